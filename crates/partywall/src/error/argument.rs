//! Arguments that no call accepts.

use std::{path::PathBuf, time::Duration};

use partywall_shm::TableError;
use partywall_wire::Named;

use super::{
    Error, ErrorKind, Help, Language,
    text::{bad_value, beginning},
};

/// An argument that no call accepts, whatever the state of the domain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidArgument {
    /// The value cannot be signalled, or can never be reached.
    #[error("{value} is not a valid next value for timeline {name:?}: {}", bad_value(*value, *last))]
    Value {
        /// The timeline.
        name: String,
        /// The value.
        value: u64,
        /// The highest value that was signalled or promised.
        last: u64,
    },
    /// A semaphore cannot have this number of permits.
    #[error(
        "semaphore {name:?} cannot have {asked} permits: the number must be 1 to {}",
        partywall_shm::semaphore::MAX_PERMITS
    )]
    Maximum {
        /// The semaphore.
        name: String,
        /// Permits that were asked for.
        asked: u32,
    },
    /// The deadline of a withdrawal is too far away.
    #[error("a deadline in {} s is too far away: the limit is a year", after.as_secs())]
    Deadline {
        /// How far away it is.
        after: Duration,
    },
    /// The options of a pool, topic or queue are invalid.
    #[error("cannot create {} {name:?}: {why}", of.name())]
    Options {
        /// Which of them.
        of: Named,
        /// Its name.
        name: String,
        /// The rule that the options break.
        why: String,
    },
    /// The options give a topic fewer blocks than it promises to publishers and subscribers.
    #[error(
        "{blocks} blocks are too few for topic {name:?}: {depth} in its ring + {loans} for each of {publishers} \
         publishers + {held} for each of {subscribers} subscribers are {needed}"
    )]
    TooFewBlocks {
        /// The topic.
        name: String,
        /// Blocks that the options give it.
        blocks: u32,
        /// Blocks that it needs.
        needed: u64,
        /// Samples in its ring.
        depth: u32,
        /// Publishers at a time.
        publishers: u32,
        /// Loans that a publisher may have.
        loans: u32,
        /// Subscribers at a time.
        subscribers: u32,
        /// Samples that a subscriber may hold.
        held: u32,
    },
    /// The name breaks the rules for names.
    #[error("{} is not a name: {why}", beginning(name))]
    Name {
        /// The name.
        name: String,
        /// The rule.
        why: String,
    },
    /// The text after the `@` of `NAME@VERSION` is not a version.
    #[error("{} is not a version of {name:?}: versions are numbers from 1", beginning(version))]
    Version {
        /// The name.
        name: String,
        /// The text after the `@`.
        version: String,
    },
    /// The pattern cannot match any name.
    #[error("{pattern:?} is not a pattern: {why}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The rule that it breaks.
        why: String,
    },
    /// The tensors cannot be laid out.
    #[error("{name:?}: {source}")]
    Table {
        /// The segment.
        name: String,
        /// What is wrong.
        source: TableError,
    },
    /// The bytes are outside the tensor, or its elements do not lie as in a plain slice.
    #[error("tensor {tensor:?}: {why}")]
    Range {
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },
    /// The header of a sample is longer than [`MAX_HEADER`](crate::MAX_HEADER).
    #[error(
        "a header of {bytes} bytes is too long for a sample of topic {topic:?}: the limit is {} bytes",
        partywall_shm::topic::MAX_HEADER
    )]
    Header {
        /// The topic.
        topic: String,
        /// Bytes of the header.
        bytes: usize,
    },
    /// A graph that cannot be captured or launched in this way.
    #[error("{what}: {why}")]
    Graph {
        /// The operation.
        what: String,
        /// The reason.
        why: String,
    },
    /// No queue accepts such a task, or the task has no output.
    #[error("{task}: {why}")]
    Task {
        /// The task: its kind and the queue, or its reference.
        task: String,
        /// The reason.
        why: String,
    },
    /// The socket's path does not fit into a socket's address.
    #[error("the socket's path {} has {} bytes, and the limit is 107", path.display(), path.as_os_str().len())]
    SocketPath {
        /// The path.
        path: PathBuf,
    },
    /// A process asked to evict itself.
    #[error("a process cannot evict itself")]
    Yourself,
}

impl InvalidArgument {
    /// Returns the error that a name breaks the rules for names.
    pub(crate) fn name(name: &str, why: impl Into<String>) -> Error {
        Self::Name { name: name.to_owned(), why: why.into() }.into()
    }

    /// Returns the error that bytes of a tensor, sample or block cannot be used as asked.
    pub(crate) fn range(tensor: impl Into<String>, why: impl Into<String>) -> Error {
        Self::Range { tensor: tensor.into(), why: why.into() }.into()
    }

    /// Returns the error that a task cannot be submitted, or used, as asked.
    pub(crate) fn task(task: impl Into<String>, why: impl Into<String>) -> Error {
        Self::Task { task: task.into(), why: why.into() }.into()
    }

    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::Value { .. } => ErrorKind::Usage.help("bad-value", "BadValue", "signal increasing values, up to 2^61"),
            Self::Maximum { .. } => ErrorKind::Usage.help("bad-maximum", "WrongMaximum", "open it with a number in that range"),
            Self::Deadline { .. } => ErrorKind::Usage.help("bad-deadline", "BadDeadline", "give a number of seconds from 0 to a year, or no deadline"),
            Self::Options { of: Named::Pool, .. } => ErrorKind::Usage.help("bad-pool", "WrongPool", "give the number of blocks and the bytes of each block, within the range"),
            Self::Options { of: Named::Queue, .. } => ErrorKind::Usage.help("bad-queue", "WrongQueue", "give numbers within that range, or leave them out for the defaults"),
            Self::Options { of: Named::Segment, .. } => ErrorKind::Usage.help("cannot-keep", "CannotKeep", "give only one of kept(), until_unused() and owner()"),
            Self::Options { .. } => ErrorKind::Usage.help("bad-topic", "WrongTopic", match language {
                Language::Rust => "give dtype() and shape(), or max_bytes() if samples vary, and numbers within the range",
                Language::C => "set dtype and shape, or max_bytes if samples vary, and numbers within the range",
                Language::Python => "give dtype= and shape=, or max_bytes= if samples vary, and numbers within the range",
                Language::Shell => "give --dtype and --shape, or --max-bytes if samples vary, or a file to take them from, and numbers within the range",
            }),
            Self::TooFewBlocks { needed, .. } => ErrorKind::Usage.help("pool-too-small", "WrongTopic", format!("omit the number of blocks, or give at least {needed}, or reduce the other numbers")),
            Self::Version { name, .. } => ErrorKind::Usage.help("bad-version", "BadName", format!("`partywall show {name}` lists its versions; without `@` it means the latest")),
            Self::SocketPath { .. } => ErrorKind::Usage.help("path-too-long", "BadName", "use a shorter path (--socket, PARTYWALL_SOCKET), or shorten $XDG_RUNTIME_DIR or $TMPDIR, which contain the default socket"),
            Self::Name { .. } => ErrorKind::Usage.help("bad-name", "BadName", "choose a name of letters, digits and `._-`"),
            Self::Pattern { .. } => ErrorKind::Usage.help("bad-pattern", "BadPattern", "`*` stands for any characters and `?` for one, the rest is as in a name"),
            Self::Table { source: TableError::ForeignLayout { .. }, .. } => ErrorKind::Refused.help("bad-table", "BadTensor", "run the same Partywall release on both sides"),
            Self::Table { .. } => ErrorKind::Refused.help("bad-table", "BadTensor", "correct the tensors' names, shapes and dtypes"),
            Self::Range { .. } => ErrorKind::Usage.help("bad-range", "BadTensor", "use a range inside the tensor, or read(), in Python tobytes(), for a copy"),
            Self::Header { .. } => ErrorKind::Usage.help("header-too-long", "BadTensor", "shorten it, or put the data into the sample itself"),
            Self::Graph { .. } => ErrorKind::Usage.help("bad-graph", "BadGraph", "capture the nodes on the stream that is being captured, name each node once in a launch of their graph, and let no launch wait for its own later signals"),
            Self::Task { .. } => ErrorKind::Usage.help("bad-task", "BadTask", "submit a task within the limits: a kind of 32 bytes, arguments of 512 bytes, 8 inputs, 1 to 255 attempts; give it an output if its worker writes one"),
            Self::Yourself => ErrorKind::Usage.help("not-yourself", "NotYourself", "drop the Domain to leave, or name another process"),
        }
    }
}
