//! Objects that differ from what was requested.

use partywall_shm::DType;
use partywall_wire::Named;

use super::{ErrorKind, Help, Language, advice::use_as_it_is, text::listed};

/// The object exists, but has another kind, type or size.
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
    /// The name belongs to an object of another kind.
    #[error("{name:?} is a {}, not a {}", is.name(), wanted.name())]
    Object {
        /// The name.
        name: String,
        /// The kind of the object.
        is: Named,
        /// The kind that the call opens: a segment, a pool or a topic.
        wanted: Named,
    },
    /// A pool or topic differs from the caller's options, or is not the one that was meant.
    #[error("{} {name:?} is not as requested: {why}", of.name())]
    Options {
        /// Which of the two.
        of: Named,
        /// The pool or topic.
        name: String,
        /// What differs.
        why: String,
    },
    /// The data does not fit into a block.
    #[error("a block of {} {name:?} has {has} bytes, but {needed} are needed", of.name())]
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
    /// The data does not fit into the output of a task, or more of a task's input or output is used than there is.
    #[error("{what} has {has} bytes, but {needed} are needed")]
    Room {
        /// The input or output: `output of a task of queue "work"`.
        what: String,
        /// Its bytes.
        has: u64,
        /// Bytes that were asked for.
        needed: u64,
    },
    /// A sample is of another type or shape than the topic's.
    #[error("topic {topic:?} has samples of {has}, not of {given}")]
    Sample {
        /// The topic.
        topic: String,
        /// Type and shape of its samples.
        has: String,
        /// Type and shape of the sample.
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
    /// A copy between segments whose tensors differ.
    #[error("the tensors of {name:?} are not those of {source_name:?}: {why}")]
    Tensors {
        /// The target of the copy.
        name: String,
        /// The source of the copy.
        source_name: String,
        /// What differs.
        why: String,
    },
    /// A version cannot take the place of another one, because its tensors or chunks differ.
    #[error("version {next} of {name:?} has another layout than version {version}: {}", listed(differences))]
    Layout {
        /// The name.
        name: String,
        /// The version that is open, and stays so.
        version: u64,
        /// The version that was to take its place.
        next: u64,
        /// The differences, one sentence for each.
        differences: Vec<String>,
    },
    /// A stream cannot copy into this host memory.
    #[error("cannot copy to {name:?} by a stream: {}", host_target(*pinned))]
    HostTarget {
        /// The target.
        name: String,
        /// True if it is pinned, and the source is host memory as well.
        pinned: bool,
    },
    /// The memory is of another kind than the operation works on.
    #[error("{name:?} is {has} memory; {operation} needs {wanted} memory")]
    Kind {
        /// The segment.
        name: String,
        /// The kind of the memory.
        has: &'static str,
        /// The kind that the operation needs.
        wanted: &'static str,
        /// The operation.
        operation: &'static str,
    },
}

impl Mismatch {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::Object { name, is, wanted } => {
                let (anchor, python_class) = match wanted {
                    Named::Pool => ("not-a-pool", "WrongPool"),
                    Named::Topic => ("not-a-topic", "WrongTopic"),
                    Named::Queue => ("not-a-queue", "WrongQueue"),
                    Named::Segment | Named::Timeline | Named::Semaphore => ("not-a-segment", "WrongKind"),
                    _ => ("not-a-segment", "WrongKind"),
                };
                ErrorKind::Usage.help(anchor, python_class, format!("{}, or choose another name", use_as_it_is(name, *is, language)))
            }
            Self::Maximum { .. } => ErrorKind::Usage.help("wrong-maximum", "WrongMaximum", "open it with the number that it has, or use another name; it ends with the last process that has it open"),
            Self::Options { of, name, .. } => {
                let (anchor, python_class) = match of {
                    Named::Pool => ("wrong-pool", "WrongPool"),
                    Named::Queue => ("wrong-queue", "WrongQueue"),
                    // No other object has options.
                    _ => ("wrong-topic", "WrongTopic"),
                };
                ErrorKind::Usage.help(anchor, python_class, format!("open it with its own options, which `partywall show {name}` lists, or use another name"))
            }
            Self::BlockSize { of, .. } => ErrorKind::Usage.help("block-too-small", "BlockTooSmall", match of {
                Named::Topic => "make the topic with a larger max_bytes, or publish smaller samples",
                Named::Queue => "make the queue with larger outputs, or ask for less room",
                _ => "make the pool with larger blocks (block_bytes), or put in less",
            }),
            Self::Room { .. } => ErrorKind::Usage.help("block-too-small", "BlockTooSmall", "use no more than that, or submit the task with more"),
            Self::Sample { .. } => ErrorKind::Usage.help("wrong-sample", "WrongSample", "publish samples of the topic's type, or make the topic with another dtype and shape; one that is made with max_bytes alone takes any"),
            Self::DType { has, .. } => ErrorKind::Usage.help("wrong-dtype", "WrongKind", format!("use it as {has}, or use its bytes")),
            Self::Tensors { source_name, .. } => ErrorKind::Usage.help("other-tensors", "WrongKind", match language {
                Language::Python => format!("create the target with the same names, types and shapes, or make it of the source: `{source_name}.to(…)`"),
                _ => "create the target with the same names, types and shapes (Builder::like), or make it of the source (Segment::to)".to_owned(),
            }),
            Self::Layout { .. } => ErrorKind::Usage.help("layout-changed", "LayoutChanged", match language {
                Language::Python => "open the new version beside this one: advance without stable_address, or open()",
                Language::C => "open the new version beside this one, at addresses of its own (pw_segment_open)",
                _ => "open the new version beside this one, at addresses of its own (Domain::open)",
            }),
            Self::Kind { operation: "advancing in place", .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", match language {
                Language::Python => "open the new version beside this one: advance without stable_address, or open()",
                Language::C => "open the new version beside this one, at addresses of its own (pw_segment_open)",
                _ => "open the new version beside this one, at addresses of its own (Domain::open)",
            }),
            Self::HostTarget { .. } => ErrorKind::Refused.help("copy-to-host", "WrongKind", match language {
                Language::Python => "copy it by the CPU (`Domain.put(name, {key: source[key] for key in source}, \"host\")`), or to pinned memory (\"pinned\")",
                _ => "copy it by the CPU (Put::segment, `partywall cp`), or to pinned memory (`pinned`)",
            }),
            Self::Kind { operation: "an IPC handle", .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", match language {
                Language::Python => "publish a tensor of torch or cupy in this process (Domain.publish), outside of torch_pool and cupy_pool, and take the handle of the segment that it returns",
                Language::C => "publish memory of cudaMalloc in this process (pw_publication_commit), and take the handle of the segment that it stores",
                _ => "publish memory of cudaMalloc in this process (Domain::publish), and take the handle of the segment that commit() returns",
            }),
            Self::Kind { wanted: "pinned or GPU", .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", "pin it first (Segment::pin, in Python pin()), or create it as pinned memory"),
            Self::Kind { has: "legacy", wanted: "host, pinned or vmm", .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", "its publisher allocated it, and the driver shares it by a handle that only CUDA takes: publish a copy of it (Publication::commit_copy, in Python put), which has file descriptors"),
            Self::Kind { has: "pinned", operation: "pinning", .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", "use it as it is: the driver pinned it when it was allocated"),
            Self::Kind { wanted, .. } => ErrorKind::Refused.help("wrong-kind", "WrongKind", format!("create it as {wanted} memory, or copy it with read(), in Python tobytes()")),
        }
    }
}

fn host_target(pinned: bool) -> &'static str {
    match pinned {
        true => "both sides are host memory, and a stream copies from or to a GPU or pinned memory",
        false => "it is host memory, which can be pinned only once it is committed",
    }
}
