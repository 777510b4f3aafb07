//! GPUs and their driver.

use partywall_cuda::{CudaError, PointerKind};

use super::{
    ErrorKind, Help, Language,
    advice::cuda_anchor,
    text::{for_name, lost_text, named, pointer_kind},
};
use crate::place::Place;

/// The GPU or its driver cannot do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceFault {
    /// `CUDA_LAUNCH_BLOCKING` makes a process wait for each kernel: a wait of a stream for another process would stop
    /// it.
    #[error("this process runs with CUDA_LAUNCH_BLOCKING: waiting on a stream for timeline {name:?} would stop it")]
    LaunchBlocking {
        /// The timeline.
        name: String,
    },
    /// The driver does not share this kind of memory by handle, or not at all.
    #[error("tensor {tensor:?} cannot be published: {address:#x} is {}", pointer_kind(*kind))]
    NotShareable {
        /// The tensor.
        tensor: String,
        /// Its address.
        address: u64,
        /// The kind of memory, according to the driver.
        kind: PointerKind,
    },
    /// There is no such GPU, or no driver.
    #[error("there is no GPU{}: {why}", named(wanted.as_deref()))]
    NoDevice {
        /// The GPU that was asked for; `None` for any.
        wanted: Option<String>,
        /// The reason.
        why: String,
    },
    /// This process cannot use pinned memory: it has no driver, or the driver cannot allocate it or has no such NUMA
    /// node.
    #[error("this process cannot use pinned memory{}: {why}", for_name(name.as_deref()))]
    NoPinned {
        /// The segment; `None` if the memory was only asked for.
        name: Option<String>,
        /// The reason.
        why: String,
    },
    /// The memory is on another GPU than the reader's, and `allow_peer` was not set.
    #[error("{name:?} is on GPU {owner}, this process reads on GPU {reader}: {link}")]
    Remote {
        /// The segment.
        name: String,
        /// The UUID of the GPU that has the memory.
        owner: String,
        /// The UUID of the reader's.
        reader: String,
        /// How they are linked and what that costs.
        link: String,
    },
    /// The CUDA driver refused a call.
    #[error("{what}: {source}")]
    Cuda {
        /// What it was for.
        what: String,
        /// The call and its code.
        source: CudaError,
    },
    /// A kernel of this process, or under MPS of another process, has ended the CUDA context: this process cannot use a
    /// GPU any more. Other processes are notified: its timelines end as
    /// [`TimelineEnding::OwnerFaulted`](partywall_wire::TimelineEnding::OwnerFaulted).
    #[error("{what}: the CUDA context of this process is lost ({source})")]
    ContextLost {
        /// The operation, or the GPU on which it was found.
        what: String,
        /// The call that found it, and its code.
        source: CudaError,
    },
    /// The GPU was reset or has failed, or the driver has lost its pinned memory of a NUMA node: the memory of the name
    /// is gone. Mappings of it are of no use any more.
    #[error("{name:?} is lost: {}", lost_text(*place))]
    DeviceLost {
        /// The name.
        name: String,
        /// Where the memory was.
        place: Place,
    },
    /// An advance in place failed: the driver mapped neither the new version nor, again, the former one. Or a suspension
    /// did: it did not unmap the memory. The process must not use the addresses of the segment any more.
    #[error("version {version} of {name:?} is not mapped any more: the driver failed ({source})")]
    NotMapped {
        /// The name.
        name: String,
        /// The version that was mapped.
        version: u64,
        /// The call that failed, and its code.
        source: CudaError,
    },
    /// The segment was [suspended](crate::Segment::suspend): its memory is not mapped at present.
    #[error("{name}@{version} is suspended: its memory is not mapped until it is resumed")]
    Suspended {
        /// The name.
        name: String,
        /// The version.
        version: u64,
    },
    /// The stream is being captured into a CUDA graph, which cannot contain the operation.
    #[error("{what}: the stream is being captured into a CUDA graph, and this operation cannot be part of a graph")]
    Captured {
        /// The operation to enqueue.
        what: String,
    },
}

impl DeviceFault {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::LaunchBlocking { .. } => ErrorKind::Refused.help("launch-blocking", "LaunchBlocking", "unset CUDA_LAUNCH_BLOCKING, or wait on the host"),
            Self::NotShareable { kind, .. } => not_shareable(*kind),
            Self::NoDevice { .. } => ErrorKind::Device.help("no-device", "NoDevice", format!("`partywall doctor` says what is missing; host memory works without one ({})", on_host(language))),
            Self::NoPinned { .. } => ErrorKind::Device.help("no-pinned-memory", "NoDevice", format!("`partywall doctor` says what is missing; if you named a node, name one that exists; host memory works without it ({}, and pin() where a GPU reads it)", on_host(language))),
            Self::Remote { .. } => ErrorKind::Device.help("remote-device", "RemoteDevice", "open it with allow_peer if the link's cost is acceptable, or read on the owner's GPU"),
            Self::ContextLost { .. } => ErrorKind::Device.help("broken-context", "ContextLost", "restart this process; nothing else brings its CUDA context back"),
            Self::NotMapped { .. } => ErrorKind::Device.help("not-mapped", "CudaError", "drop it with everything made of it, and open the name again"),
            Self::Suspended { .. } => ErrorKind::Usage.help("suspended", "Suspended", format!("call {} first", resuming(language))),
            Self::DeviceLost { .. } => ErrorKind::Device.help("device-lost", "DeviceLost", "drop it, restart the processes that used the memory, and commit the name again from its source"),
            Self::Captured { .. } => ErrorKind::Usage.help("captured", "Captured", "do that outside of the capture; waits and signals can also be nodes of the graph (capture_wait, capture_signal)"),
            Self::Cuda { source, .. } => {
                let anchor = cuda_anchor(source);
                let advice = match anchor {
                    "broken-context" => "the CUDA context of this process is broken: restart this process",
                    "cannot-page-lock" => "raise the limit of locked memory (`ulimit -l`), or pin less",
                    "event-not-shared" => {
                        "run both processes as one user with one /dev/shm, and keep the event in the process that created it; or use a timeline"
                    }
                    _ => "`partywall doctor` checks the driver",
                };
                ErrorKind::Device.help(anchor, "CudaError", advice)
            }
        }
    }
}

/// Names host memory as a call or an option does.
fn on_host(language: Language) -> &'static str {
    match language {
        Language::Rust => "Place::Host",
        Language::Python => "device=\"host\"",
        Language::Shell => "--device host",
        Language::C => "the device \"host\"",
    }
}

/// Names the call that ends a suspension.
fn resuming(language: Language) -> &'static str {
    match language {
        Language::Python => "resume() of the domain",
        // No other front end suspends.
        Language::Rust | Language::Shell | Language::C => "Segment::resume",
    }
}

fn not_shareable(kind: PointerKind) -> Help {
    match kind {
        PointerKind::Device => ErrorKind::Refused.help("no-memory-handles", "NotShareable", "publish a copy (commit_copy(), in Python put()); `partywall doctor` says what this driver lacks"),
        PointerKind::Imported => ErrorKind::Refused.help("imported-memory", "NotShareable", "publish it in the process that allocated it, or publish a copy (commit_copy(), in Python put())"),
        PointerKind::Pool => ErrorKind::Refused.help("pool-memory", "NotShareable", "publish a copy (commit_copy(), in Python put()), or allocate it with cuMemAlloc; torch does with PYTORCH_CUDA_ALLOC_CONF=backend:native"),
        PointerKind::Vmm => ErrorKind::Refused.help("vmm-memory", "NotShareable", "create it in a pool of torch_pool(), in Rust a Heap; or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or publish a copy (commit_copy(), in Python put())"),
        PointerKind::Managed => ErrorKind::Refused.help("managed-memory", "NotShareable", "publish a copy (commit_copy(), in Python put()), or allocate it with cuMemAlloc"),
        PointerKind::Pinned => ErrorKind::Refused.help("pinned-memory", "NotShareable", IN_HOST_MEMORY),
        PointerKind::Registered => ErrorKind::Refused.help("registered-memory", "NotShareable", IN_HOST_MEMORY),
        // `Unknown`, and kinds of later releases.
        _ => ErrorKind::Refused.help("unknown-pointer", "NotShareable", "use put() for an array in host memory; to publish one on a GPU check its address, and that it is not yet freed"),
    }
}

const IN_HOST_MEMORY: &str = "use put(), which copies it; or build a segment in host memory with create()";
