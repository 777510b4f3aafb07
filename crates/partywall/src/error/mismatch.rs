//! What is there, and is not as asked for.

use partywall_shm::DType;
use partywall_wire::Named;

use super::{ErrorKind, Language, advice::use_as_it_is};

/// What was asked for is there, and is of another kind, type or size.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The semaphore has another number of permits.
    #[error("semaphore {name:?} has {maximum} permits, not {asked}")]
    Maximum {
        /// The semaphore.
        name: String,
        /// Permits that it has.
        maximum: u32,
        /// Permits that it was opened with.
        asked: u32,
    },
    /// The name is a pool's or a topic's, not a segment's.
    #[error("{name:?} is a {}, not a segment", is.name())]
    NotASegment {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The name is not a pool's.
    #[error("{name:?} is a {}, not a pool", is.name())]
    NotAPool {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The pool is not as the caller said, or not the one that was meant.
    #[error("pool {name:?} is not as asked: {why}")]
    Pool {
        /// The pool.
        name: String,
        /// What differs.
        why: String,
    },
    /// What was to be in a block does not fit.
    #[error("a block of {} {name:?} has {has} bytes, and {needed} are needed", of.name())]
    BlockSize {
        /// The pool or topic.
        name: String,
        /// Which of the two.
        of: Named,
        /// Bytes of a block.
        has: u64,
        /// Bytes that were asked for.
        needed: u64,
    },
    /// The name is not a topic's.
    #[error("{name:?} is a {}, not a topic", is.name())]
    NotATopic {
        /// The name.
        name: String,
        /// What it is.
        is: Named,
    },
    /// The topic is not as the caller said.
    #[error("topic {name:?} is not as asked: {why}")]
    Topic {
        /// The topic.
        name: String,
        /// What differs.
        why: String,
    },
    /// A sample is of another type or shape than the topic's.
    #[error("topic {topic:?} has samples of {has}, not of {given}")]
    Sample {
        /// The topic.
        topic: String,
        /// What its samples are.
        has: String,
        /// What was to be published.
        given: String,
    },
    /// Elements were asked for as another type than theirs.
    #[error("{what} is {has}, and {wanted} was asked for")]
    DType {
        /// The tensor or sample: `tensor "x"`.
        what: String,
        /// Its type.
        has: DType,
        /// The type asked for.
        wanted: &'static str,
    },
    /// The memory is of another kind than the operation works on.
    #[error("{name:?} is {has} memory; {operation} needs {wanted} memory")]
    Kind {
        /// The segment.
        name: String,
        /// What it is.
        has: &'static str,
        /// What was needed.
        wanted: &'static str,
        /// For what.
        operation: &'static str,
    },
}

impl Mismatch {
    /// The class of the error.
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Kind { .. } => ErrorKind::Refused,
            Self::NotASegment { .. }
            | Self::NotAPool { .. }
            | Self::NotATopic { .. }
            | Self::Pool { .. }
            | Self::Topic { .. }
            | Self::Sample { .. }
            | Self::Maximum { .. }
            | Self::DType { .. }
            | Self::BlockSize { .. } => ErrorKind::Usage,
        }
    }

    /// What to do about it, as a sentence that names calls of `language`.
    pub(super) fn advice(&self, language: Language) -> String {
        match self {
            Self::NotASegment { name, is } | Self::NotAPool { name, is } | Self::NotATopic { name, is } => {
                format!("{}, or choose another name", use_as_it_is(name, *is, language))
            }
            Self::Maximum { .. } => "open it with the number that it has, or use another name; it goes with the last process that has it open".into(),
            Self::Pool { name, .. } => format!("open it as it is, or use another name; `partywall show {name}` says how it is"),
            Self::BlockSize { of: Named::Topic, .. } => "make the topic with a larger max_bytes, or publish smaller samples".into(),
            Self::BlockSize { .. } => "make the pool with larger blocks (block_bytes), or put in less".into(),
            Self::Topic { name, .. } => format!("open it as it is, or use another name; `partywall show {name}` says how it is"),
            Self::Sample { .. } => "publish samples of the topic's type, or make the topic with another dtype and shape; one that is made with max_bytes alone takes any".into(),
            Self::DType { has, .. } => format!("use it as {has}, or use its bytes"),
            Self::Kind { wanted, .. } => format!("create it as {wanted} memory, or copy it with read(), in Python tobytes()"),
        }
    }

    /// The entry of `docs/troubleshooting.md` about it.
    pub(super) fn anchor(&self) -> &'static str {
        match self {
            Self::Maximum { .. } => "wrong-maximum",
            Self::NotASegment { .. } => "not-a-segment",
            Self::NotAPool { .. } => "not-a-pool",
            Self::Pool { .. } => "wrong-pool",
            Self::BlockSize { .. } => "block-too-small",
            Self::NotATopic { .. } => "not-a-topic",
            Self::Topic { .. } => "wrong-topic",
            Self::Sample { .. } => "wrong-sample",
            Self::DType { .. } => "wrong-dtype",
            Self::Kind { .. } => "wrong-kind",
        }
    }
}
