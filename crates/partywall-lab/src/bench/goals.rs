//! The goals of all subjects: what a median is at most, or at least. [docs/bench.md](../../../../docs/bench.md) has the
//! same table, and a report says which goals were met.

use std::fmt;

use partywall_measure::{Comparison, Error};

/// A goal for the median of some cases.
#[derive(Debug)]
pub(super) struct Goal {
    subjects: &'static [&'static str],
    cases: &'static [&'static str],
    /// Parameters that a case has; other cases of the name have no goal.
    with: &'static [(&'static str, &'static str)],
    /// As [`partywall_measure::Goal`] reads it.
    pub(super) text: &'static str,
}

const fn goal(
    subjects: &'static [&'static str],
    cases: &'static [&'static str],
    with: &'static [(&'static str, &'static str)],
    text: &'static str,
) -> Goal {
    Goal { subjects, cases, with, text }
}

impl Goal {
    /// Returns whether it is a goal of every run, not only of some sizes or places.
    pub(super) fn is_of_every_run(&self) -> bool {
        self.with.is_empty()
    }
}

/// Formats as the cases and the goal.
impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cases.join("; "))?;
        for (key, value) in self.with {
            write!(f, " [{key}={value}]")?;
        }
        write!(f, " | {}", self.text)
    }
}

/// Returns the goals of a subject.
pub(super) fn all(subject: &str) -> impl Iterator<Item = &'static Goal> {
    GOALS.iter().filter(move |goal| goal.subjects.contains(&subject))
}

/// Returns the goal of what a subject compares. A goal that refers to a rival is one only beside that rival.
///
/// # Errors
/// The goal cannot be read.
pub(super) fn of(subject: &str, comparison: &Comparison<'_>) -> Result<Option<&'static Goal>, Error> {
    let case = comparison.case();
    let has = |(key, value): &(&str, &str)| case.parameters.get(*key).is_some_and(|found| found == value);
    for goal in all(subject).filter(|goal| goal.cases.contains(&case.name.as_str()) && goal.with.iter().all(has)) {
        if goal.text.parse::<partywall_measure::Goal>()?.reference().is_none_or(|name| comparison.has(name)) {
            return Ok(Some(goal));
        }
    }
    Ok(None)
}

const SLEEPER: &str = "signal to wake of a sleeper";
const DEATHS: [&str; 3] = [
    "end to its permit in another's hands",
    "end to the end of a wait for its timeline",
    "end to the end of its lease",
];

/// All goals.
pub(super) const GOALS: &[Goal] = &[
    goal(&["round_trip"], &["round trip"], &[], "<= 1.3x floor"),
    goal(
        &["attach"],
        &["a Partywall segment, by name"],
        &[("of", "opening shared memory")],
        "<= raw socket ping-pong + 60 us",
    ),
    goal(&["attach"], &["a Partywall segment, by name"], &[("of", "opening shared memory")], "<= floor + 200 us"),
    goal(&["gpu_open"], &["open"], &[], "<= floor + 200 us"),
    goal(&["table_open"], &["open a table"], &[], "<= 20 ms"),
    goal(&["put"], &["put"], &[], "<= 1.25x floor"),
    goal(
        &["bandwidth"],
        &["a Partywall segment of another process"],
        &[("of", "bandwidth of a kernel that reads"), ("bytes", "4294967296")],
        ">= 0.99x floor",
    ),
    goal(&["many"], &["a page of metrics, its process included"], &[], "<= 100 ms"),
    goal(
        &["many"],
        &["killed, until the next call is answered", "replaced, longest of the calls meanwhile"],
        &[],
        "<= 1000 ms",
    ),
    goal(&["hostile"], &["round trip", "open and release", "connect"], &[], "<= 1 ms"),
    goal(&["ordering_wakes"], &["hand-off of the host, both polling the value"], &[], "<= 3x floor"),
    goal(
        &["ordering_wakes"],
        &["hand-off of the host, signal and wait, both ways in turn", SLEEPER],
        &[],
        "<= 1.15x floor",
    ),
    goal(&["ordering_permits"], &["take a permit and give it back, alone"], &[], "<= 150 ns"),
    goal(&["ordering_deaths", "ordering_gpu_deaths"], &DEATHS, &[], "<= 1 s"),
    goal(&["ordering_gpu_deaths"], &["end to the end of a stream's wait for its timeline"], &[], "<= 1 s"),
    goal(&["ordering_streams", "ordering_mps"], &["kernel to kernel, enqueued ahead"], &[], "<= 1.1x floor"),
    goal(&["ordering_streams", "ordering_mps"], &["kernel to kernel, an announced wake each"], &[], "<= 1.15x floor"),
    goal(
        &["ordering_streams", "ordering_mps"],
        &["host time of signal_on", "host time of wait_on"],
        &[],
        "<= floor + 1 us",
    ),
    goal(&["alloc"], &["a block of a Partywall pool"], &[], "<= 150 ns"),
    goal(&["topics"], &["publish to receive, both polling"], &[("subscribers", "1")], "<= 2.5x floor"),
    goal(&["topics"], &["publish to a sleeper"], &[("subscribers", "1")], "<= 1.1x floor"),
    goal(&["topics"], &["publish and receive in one process, with two more spans"], &[], "<= 1.02x floor"),
    goal(&["topics"], &["publish and receive in one process, measuring ages"], &[], "<= floor + 50 ns"),
    goal(
        &["topics"],
        &["publish and receive in one process, with three more checks for a tracer"],
        &[],
        "<= floor + 10 ns",
    ),
    goal(
        &["topics"],
        &["publish and receive in one process while a process traces: three events"],
        &[],
        "<= floor + 180 ns",
    ),
    goal(&["topics", "gpu_topics"], &["memory that the publisher has more for each message"], &[], "<= 0 B"),
    goal(&["gpu_topics"], &["publish on a stream to kernels of subscribers"], &[], "<= 1.1x floor"),
    goal(&["gpu_topics"], &["copies that the driver was asked for, for each message"], &[], "<= 0 count"),
    goal(&["queues"], &["submit to claim of a sleeper"], &[], "<= 1.15x floor"),
    goal(&["queues"], &["submit, claim, complete and take, in one process"], &[], "<= 1.5x floor"),
    goal(&["pinned_attach"], &["open"], &[], "<= 1.05x floor"),
    goal(&["pinned_attach"], &["open, against a memfd"], &[("for", "the GPU")], "<= 0.2x map a memfd and register it"),
    goal(
        &["pinned_attach"],
        &["open, against a memfd"],
        &[("for", "the GPU and the CPU")],
        "<= 0.45x map a memfd and register it",
    ),
    goal(&["pinned_copies"], &["copy_from"], &[], ">= 0.98x floor"),
    goal(&["pinned_copies"], &["to and commit"], &[], ">= 0.95x floor"),
    goal(&["peer_host_open", "peer_gpu_open"], &["open", "open and close"], &[], "<= floor + 10 us"),
    goal(&["peer_model"], &["open as torch tensors"], &[], "<= 30 ms"),
    goal(&["peer_modules"], &["load_module"], &[], "<= 40 ms"),
    goal(&["peer_advance"], &["pause of a stream, advance in place"], &[], "<= 5 ms"),
    goal(&["peer_spares"], &["from the kill of a worker to the next forward, by a warm spare"], &[], "<= 1500 ms"),
    goal(&["peer_allocation"], &["torch_pool"], &[], "<= 1.1x torch"),
    goal(
        &["peer_stranded", "peer_reductions"],
        &["stranded by 5 exports of 256 MiB, each read 4 times", "stranded by 5 exports of 256 MiB that nobody reads"],
        &[],
        "<= 0 B",
    ),
    goal(&["peer_reductions"], &["a tensor that is sent again and again"], &[], ">= 1x torch's own reductions"),
    goal(&["peer_updates_gpu"], &["memory that updates leave behind"], &[], "<= 0 B"),
    goal(
        &["peer_topics"],
        &["a fresh tensor there and its sum back, by send"],
        &[],
        "<= 0.8x torch.multiprocessing.SimpleQueue",
    ),
    goal(
        &["peer_topics_mps"],
        &["a fresh tensor there and its sum back, by send"],
        &[],
        "<= 0.3333x torch.multiprocessing.SimpleQueue",
    ),
    goal(
        &["peer_topics", "peer_topics_mps"],
        &["the same tensor again there and its sum back"],
        &[],
        "<= floor + 15 us",
    ),
    goal(&["peer_queues"], &["a task and its result, in Python"], &[], "<= 0.1x multiprocessing.Pool"),
    goal(&["peer_queues"], &["a task and its result, in Python"], &[], "<= 0.1x Redis lists"),
    goal(&["peer_loader"], &["batches by a pinned topic"], &[("decoding", "memcpy")], ">= 1.3x torch DataLoader"),
    goal(
        &["peer_loader"],
        &["batches by the loader of the package"],
        &[("decoding", "memcpy")],
        ">= 1.3x torch DataLoader",
    ),
    goal(
        &["peer_loader"],
        &["batches by the loader of the package"],
        &[("decoding", "small")],
        ">= 1x torch DataLoader",
    ),
];

#[cfg(test)]
mod tests {
    use partywall_measure::{Case, Unit};

    use super::*;
    use crate::bench::SUBJECTS;

    /// Returns the row of a goal in the table of the page.
    fn row(goal: &Goal) -> String {
        let subjects: Vec<_> = goal.subjects.iter().map(|subject| format!("`{subject}`")).collect();
        format!("| {} | {goal} |", subjects.join(", "))
    }

    // Holds 335.
    #[test]
    fn page_has_all_goals() {
        let page = include_str!("../../../../docs/bench.md");
        let rows: Vec<_> = page.lines().skip_while(|line| *line != "| subject | case | goal |").skip(2).collect();
        let listed: Vec<_> = rows.into_iter().take_while(|line| !line.is_empty()).map(str::to_owned).collect();
        assert_eq!(listed, GOALS.iter().map(row).collect::<Vec<_>>());
    }

    // Holds 335.
    #[test]
    fn goals_can_be_read_and_have_a_subject() {
        for goal in GOALS {
            goal.text.parse::<partywall_measure::Goal>().unwrap();
            for name in goal.subjects {
                assert!(SUBJECTS.iter().any(|subject| subject.name == *name), "{name}");
            }
        }
    }

    // Holds 335.
    #[test]
    fn goal_beside_a_rival_needs_that_rival() {
        let case = |name: &str| Case::new(name, Unit::Microseconds);
        let alone = || Comparison::new(case("a task and its result, in Python"), Box::new(|| Ok(1.0)));
        let goal = |comparison| of("peer_queues", &comparison).unwrap().map(|goal| goal.text);
        assert_eq!(goal(alone()), None);
        let beside = |name: &str| alone().rival(case(name), Box::new(|| Ok(1.0)));
        assert_eq!(goal(beside("Redis lists")), Some("<= 0.1x Redis lists"));
        assert_eq!(goal(beside("multiprocessing.Pool")), Some("<= 0.1x multiprocessing.Pool"));
    }

    #[test]
    fn goal_is_for_cases_with_its_parameters() {
        let polling = |subscribers: usize| {
            let case = Case::new("publish to receive, both polling", Unit::Microseconds);
            Comparison::new(case.parameter("subscribers", subscribers), Box::new(|| Ok(1.0)))
                .floor(Case::new("x", Unit::Microseconds), Box::new(|| Ok(1.0)))
        };
        assert!(of("topics", &polling(1)).unwrap().is_some());
        assert!(of("topics", &polling(2)).unwrap().is_none());
    }
}
