//! Contents that must not be used.

use partywall_shm::TableError;
use partywall_wire::TimelineEnding;

use super::{ErrorKind, Help, text::publisher_ending};

/// What was read must not be used: work that it rests on has failed, or it is damaged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidData {
    /// The value was promised on the strength of another timeline, and that one has ended before it got there: what is
    /// behind it may be garbage.
    #[error("timeline {name:?} is tainted from value {from} on: a timeline that these values rest on has failed")]
    Tainted {
        /// The timeline.
        name: String,
        /// The first value that rests on the failed input.
        from: u64,
    },
    /// The sample's publisher ended before a stream had completed it: what it contains is garbage.
    #[error("sample {position} of topic {topic:?} was never completed: publisher {publisher} {}", publisher_ending(*ending))]
    SampleFailed {
        /// The topic.
        topic: String,
        /// Which sample of the topic.
        position: u64,
        /// The publisher's number.
        publisher: u64,
        /// How the publisher ended.
        ending: TimelineEnding,
    },
    /// The sample was made of one that had failed: what it contains is garbage.
    #[error("sample {position} of topic {topic:?} was made of a sample that has failed")]
    SampleTainted {
        /// The topic.
        topic: String,
        /// Which sample of the topic.
        position: u64,
    },
    /// The table of tensors that another process has committed is damaged, or of another release.
    #[error("the tensor table of {name:?} is damaged: {source}")]
    Table {
        /// The segment.
        name: String,
        /// What is wrong.
        source: TableError,
    },
}

impl InvalidData {
    /// Returns the class of the error, its entry of the documentation, and what to do about it.
    pub(super) fn help(&self) -> Help {
        match self {
            Self::Tainted { .. } => ErrorKind::CheckFailed.help("tainted", "do the work again from its inputs; a new writer of the timeline starts without the mark"),
            Self::SampleFailed { .. } => ErrorKind::CheckFailed.help("sample-failed", "drop it, and what was made of it; later samples of other publishers are not concerned"),
            Self::SampleTainted { .. } => ErrorKind::CheckFailed.help("sample-tainted", "drop it; make it again from samples whose check() says that they are valid"),
            Self::Table { source: TableError::ForeignLayout { .. }, .. } => ErrorKind::Refused.help("damaged-table", "run the same Partywall release on both sides"),
            Self::Table { name, .. } => ErrorKind::Refused.help("damaged-table", format!("commit {name:?} again: the process that committed it wrote a bad table, this one only read it; `partywall show {name}` names that process")),
        }
    }
}
