//! What can go wrong while measuring.

use std::path::PathBuf;

use crate::Unit;

/// Why a sampler could not deliver a sample; anything that the code under measurement fails with.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The code under measurement failed, so that the whole comparison says nothing.
    #[error("case '{case}' failed at call {call} (warm-up included): {source}")]
    Sample {
        /// The name of the case.
        case: String,
        /// Which call it was, counted from 1.
        call: usize,
        /// What the sampler returned.
        source: Failure,
    },
    /// A sampler returned infinity or not-a-number, which has no place in a ranking.
    #[error("case '{case}' returned the sample {value}, which is no finite number; check its sampler")]
    NotFinite {
        /// The name of the case.
        case: String,
        /// The sample.
        value: f64,
    },
    /// A plot could not be drawn.
    #[error("cannot draw '{title}': {why}")]
    Plot {
        /// What was to be drawn.
        title: String,
        /// What the drawing library said.
        why: String,
    },
    /// Percentiles of nothing were asked for.
    #[error("there are no samples to summarise; plan at least one")]
    NoSamples,
    /// Two numbers of units that cannot be converted were to be compared.
    #[error("cannot compare {from} with {to}; give both cases and the goal units of one kind")]
    Units {
        /// The unit of the number that does not fit.
        from: Unit,
        /// The unit that was needed.
        to: Unit,
    },
    /// A goal that is no goal.
    #[error(
        "'{text}' is not a goal: {reason}; write one such as '<= 1.3x floor', '<= floor + 60 us', \
         '>= 0.99x floor' or '<= 20 ms'"
    )]
    GoalSyntax {
        /// What was to be a goal.
        text: String,
        /// The part that was not understood.
        reason: String,
    },
    /// A unit that this crate does not know.
    #[error("'{0}' is not a unit; known are ns, us, ms, s, GB/s, 1/s and count, and B for sizes")]
    UnitSyntax(String),
    /// A goal that refers to a case which is not part of the comparison.
    #[error("the goal refers to '{reference}', but the comparison has only: {known}")]
    UnknownReference {
        /// The name in the goal.
        reference: String,
        /// The names that would have been understood.
        known: String,
    },
    /// The report could not be written or read.
    #[error("cannot {action} the report {path}: {source}")]
    Io {
        /// `write` or `read`.
        action: &'static str,
        /// The report's file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The report's JSON is not a report.
    #[error("{path} is not a report of this crate: {source}")]
    Json {
        /// The report's file.
        path: PathBuf,
        /// Where the JSON differs.
        source: serde_json::Error,
    },
}
