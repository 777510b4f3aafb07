//! Errors of measuring.

use std::path::PathBuf;

use crate::Unit;

/// Why a sampler could not return a sample: any error of the measured code.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The measured code failed, which makes the whole comparison meaningless.
    #[error("case '{case}' failed at call {call} (warm-up included): {source}")]
    Sample {
        /// The name of the case.
        case: String,
        /// Which call it was, counted from 1.
        call: usize,
        /// What the sampler returned.
        source: Failure,
    },
    /// A sampler returned infinity or NaN, which cannot be ranked.
    #[error("case '{case}' returned the sample {value}, which is not a finite number; check its sampler")]
    NotFinite {
        /// The name of the case.
        case: String,
        /// The sample.
        value: f64,
    },
    /// A plot could not be drawn.
    #[error("cannot draw '{title}': {why}")]
    Plot {
        /// The title of the plot.
        title: String,
        /// The error of the drawing library.
        why: String,
    },
    /// Percentiles of zero samples were requested.
    #[error("there are no samples to summarise; plan at least one")]
    NoSamples,
    /// Two numbers cannot be compared, because their units cannot be converted.
    #[error("cannot compare {from} with {to}; give both cases and the goal units of one kind")]
    Units {
        /// The unit of the number that does not fit.
        from: Unit,
        /// The unit that was needed.
        to: Unit,
    },
    /// The text is not a goal.
    #[error(
        "'{text}' is not a goal: {reason}; write one such as '<= 1.3x floor', '<= floor + 60 us', \
         '>= 0.99x floor' or '<= 20 ms'"
    )]
    GoalSyntax {
        /// The text.
        text: String,
        /// The part that was not understood.
        reason: String,
    },
    /// The text is not a unit that this crate knows.
    #[error("'{0}' is not a unit; known are ns, us, ms, s, GB/s, 1/s and count, and B for sizes")]
    UnitSyntax(String),
    /// The goal refers to a case that is not part of the comparison.
    #[error("the goal refers to '{reference}', but the comparison has only: {known}")]
    UnknownReference {
        /// The name in the goal.
        reference: String,
        /// The names that a goal can refer to.
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
    #[error("{path} is not a report of measurements: {source}")]
    Json {
        /// The report's file.
        path: PathBuf,
        /// How the JSON differs.
        source: serde_json::Error,
    },
}
