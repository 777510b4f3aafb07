//! Data that must not be used.

use partywall_shm::TableError;
use partywall_wire::TimelineEnding;

use super::{ErrorKind, Help, text::publisher_ending};
use crate::place::Place;

/// The data must not be used, because it is damaged or work that it rests on has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidData {
    /// The value rests on another timeline, which ended before its value: the data behind it may be garbage.
    #[error("timeline {name:?} is tainted from value {from} on: a timeline that these values rest on has failed")]
    Tainted {
        /// The timeline.
        name: String,
        /// The first value that rests on the failed input.
        from: u64,
    },
    /// The sample's publisher ended before a stream had completed the sample: it contains garbage.
    #[error("sample {position} of topic {topic:?} was never completed: publisher {publisher} {}", publisher_ending(*ending))]
    SampleFailed {
        /// The topic.
        topic: String,
        /// The position of the sample in the topic.
        position: u64,
        /// The publisher's number.
        publisher: u64,
        /// How the publisher ended.
        ending: TimelineEnding,
    },
    /// The sample was made of a sample that had failed: it contains garbage.
    #[error("sample {position} of topic {topic:?} was made from a sample that has failed")]
    SampleTainted {
        /// The topic.
        topic: String,
        /// The position of the sample in the topic.
        position: u64,
    },
    /// The task was attempted as often as it may be, and has no result. It is a dead letter now.
    #[error("task {task} has failed after {attempts} attempts: {reason}")]
    TaskFailed {
        /// The reference of the task.
        task: String,
        /// How many attempts there were.
        attempts: u8,
        /// Why the last one had no result.
        reason: String,
    },
    /// The submitter of the task ended before its stream had completed the inputs.
    #[error("the inputs of task {task} were never completed: its submitter has ended")]
    TaskInputs {
        /// The reference of the task.
        task: String,
    },
    /// The attempt whose output a stream was to read has failed.
    #[error("attempt {attempt} of task {task} has no result: data that a stream has read from its output is invalid")]
    TaskAttempt {
        /// The reference of the task.
        task: String,
        /// The number of the attempt.
        attempt: u8,
    },
    /// The memory that another process has committed is not where the commit says.
    #[error("{name:?} was committed as memory at {place}, but it is memory of {found}")]
    OtherPlace {
        /// The segment.
        name: String,
        /// Where it should be.
        place: Place,
        /// Where it is, as the driver says.
        found: String,
    },
    /// The tensor table that another process has committed is damaged, or of another release.
    #[error("the tensor table of {name:?} is damaged: {source}")]
    Table {
        /// The segment.
        name: String,
        /// The damage.
        source: TableError,
    },
}

impl InvalidData {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self) -> Help {
        match self {
            Self::Tainted { .. } => ErrorKind::CheckFailed.help("tainted", "Tainted", "do the work again from its inputs; a new writer of the timeline starts without the mark"),
            Self::SampleFailed { .. } => ErrorKind::CheckFailed.help("sample-failed", "SampleFailed", "drop the sample and everything made from it; later samples of other publishers are not affected"),
            Self::SampleTainted { .. } => ErrorKind::CheckFailed.help("sample-tainted", "Tainted", "drop it, and make it again from samples that check() accepts"),
            Self::TaskFailed { .. } => ErrorKind::CheckFailed.help("task-failed", "TaskFailed", "fix the reported cause, then retry or purge the task: `partywall queue ls NAME` lists dead letters"),
            Self::TaskInputs { .. } => ErrorKind::CheckFailed.help("inputs-never-complete", "InputsLost", "drop the task; its submitter must submit it again"),
            Self::TaskAttempt { .. } => ErrorKind::CheckFailed.help("attempt-without-result", "AttemptFailed", "drop everything made from its output, and wait for the task again: another worker runs it"),
            Self::OtherPlace { name, .. } => ErrorKind::Refused.help("other-place", "Error", format!("commit {name:?} again: the process that committed it passed other memory; `partywall show {name}` names that process")),
            Self::Table { source: TableError::ForeignLayout { .. }, .. } => ErrorKind::Refused.help("damaged-table", "BadTensor", "run the same Partywall release on both sides"),
            Self::Table { name, .. } => ErrorKind::Refused.help("damaged-table", "BadTensor", format!("commit {name:?} again: the process that committed it wrote a bad table, this one only read it; `partywall show {name}` names that process")),
        }
    }
}
