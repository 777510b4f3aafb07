//! The goals of all subjects: what a median is at most, or at least.

use partywall_measure::Case;

/// The goals: of a subject and a size, or of every size.
const GOALS: &[(&str, Option<&str>, &str)] = &[
    ("latency", Some("1024"), "<= 1.3x zenoh"),
    ("latency", Some("65536"), "<= 1.3x zenoh"),
    ("latency", Some("1048576"), "<= 1.3x zenoh"),
    ("latency", Some("12000000"), "<= zenoh"),
    ("latency", Some("100000000"), "<= zenoh"),
    ("rate", Some("1024"), ">= 0.8x zenoh"),
    ("rate", Some("1048576"), ">= 0.9x zenoh"),
    ("rate", Some("100000000"), ">= 1.2x zenoh"),
    ("pull", None, ">= 0.8x floor"),
    ("killed", None, "<= 50 ms"),
    // The lease.
    ("stopped", None, "<= 4 s"),
];

/// Returns the goal of a case.
pub(super) fn of(subject: &str, case: &Case) -> Option<&'static str> {
    let bytes = case.parameters.get("bytes").map(String::as_str);
    GOALS.iter().find(|(of, size, _)| *of == subject && (size.is_none() || *size == bytes)).map(|(.., goal)| *goal)
}
