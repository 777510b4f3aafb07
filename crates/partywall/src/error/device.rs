//! GPUs and their driver.

use partywall_cuda::{CudaError, PointerKind};

use super::{
    ErrorKind,
    advice::{cuda_anchor, not_shareable},
    text::{named, pointer_kind},
};

/// The GPU or its driver cannot do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceFault {
    /// `CUDA_LAUNCH_BLOCKING` makes a process wait for each kernel: a stream that waits for another process would stop
    /// it for as long.
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
        /// What the driver says of it.
        kind: PointerKind,
    },
    /// There is no such GPU, or no driver.
    #[error("there is no GPU{}: {why}", named(wanted.as_deref()))]
    NoDevice {
        /// Which was asked for; `None` for any.
        wanted: Option<String>,
        /// What was found.
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
    /// A kernel of this process, or under MPS one of a neighbour's, has ended the CUDA context: this process can do
    /// nothing on a GPU any more. Others are told: its timelines end as [`TimelineEnding::OwnerFaulted`](partywall_wire::TimelineEnding::OwnerFaulted).
    #[error("{what}: the CUDA context of this process is lost ({source})")]
    ContextLost {
        /// What was being done, or which GPU it was found on.
        what: String,
        /// The call that found it, and its code.
        source: CudaError,
    },
    /// A stream is being captured into a CUDA graph, whose launches would wait and signal again and again.
    #[error("{what}: the stream is being captured into a CUDA graph, which this cannot be part of")]
    Captured {
        /// What was to be enqueued.
        what: String,
    },
}

impl DeviceFault {
    /// The class of the error.
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Captured { .. } => ErrorKind::Usage,
            Self::LaunchBlocking { .. } | Self::NotShareable { .. } => ErrorKind::Refused,
            Self::NoDevice { .. } | Self::Remote { .. } | Self::Cuda { .. } | Self::ContextLost { .. } => {
                ErrorKind::Device
            }
        }
    }

    /// What to do about it.
    pub(super) fn advice(&self) -> String {
        match self {
            Self::LaunchBlocking { .. } => "unset CUDA_LAUNCH_BLOCKING, or wait on the host".into(),
            Self::NotShareable { kind, .. } => not_shareable(*kind).into(),
            Self::NoDevice { .. } => "`partywall doctor` says what is missing; host memory works without one (device `host`)".into(),
            Self::Remote { .. } => "open it with allow_peer if the link's cost is acceptable, or read on the owner's GPU".into(),
            Self::ContextLost { .. } => "restart this process; nothing else brings its CUDA context back".into(),
            Self::Cuda { source, .. } if source.is_sticky() => "the CUDA context of this process is broken: restart this process".into(),
            Self::Captured { .. } => "wait for timelines and signal them outside of the graph, before and after its launch".into(),
            Self::Cuda { source, .. } if cuda_anchor(source) == "cannot-page-lock" => "raise the limit of locked memory (`ulimit -l`), or pin less".into(),
            Self::Cuda { source, .. } if cuda_anchor(source) == "event-not-shared" => "both processes need one /dev/shm and one user, and the maker keeps the event; a timeline needs none of this".into(),
            Self::Cuda { .. } => "`partywall doctor` checks the driver".into(),
        }
    }

    /// The entry of `docs/troubleshooting.md` about it.
    pub(super) fn anchor(&self) -> &'static str {
        match self {
            Self::LaunchBlocking { .. } => "launch-blocking",
            Self::NotShareable { kind, .. } => match kind {
                PointerKind::Device => "no-memory-handles",
                PointerKind::Imported => "imported-memory",
                PointerKind::Pool => "pool-memory",
                PointerKind::Vmm => "vmm-memory",
                PointerKind::Managed => "managed-memory",
                PointerKind::Pinned => "pinned-memory",
                PointerKind::Registered => "registered-memory",
                _ => "unknown-pointer",
            },
            Self::NoDevice { .. } => "no-device",
            Self::Remote { .. } => "remote-device",
            Self::Cuda { source, .. } => cuda_anchor(source),
            Self::ContextLost { .. } => "broken-context",
            Self::Captured { .. } => "captured",
        }
    }
}
