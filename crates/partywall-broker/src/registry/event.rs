//! Events: the input of the registry.

use std::sync::Arc;

use partywall_shm::queue::InUse;
use partywall_wire::Pattern;
use serde::{Deserialize, Serialize};

use super::types::{
    Access, CellAt, Chunk, ClaimId, CloseId, ControlMemory, Deadline, FdId, Kind, LeaseId, MemberId, Memory, Name,
    ObjectKind, Place, RequestId, Table, Whom, WithdrawalId, fds,
};

/// Something that happened at the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Event {
    /// A process became a member.
    Joined { member: MemberId, identity: Identity },
    /// A member's connection ended without proof of its death.
    Suspected { member: MemberId },
    /// A suspect came back.
    Resumed { member: MemberId },
    /// A member has exited, but a child that it forked holds its connection.
    HeldByChild { member: MemberId },
    /// An operator's connection must make room for another.
    Dismissed { member: MemberId },
    /// A member is proved dead. For a member without a pidfd this says only that its connection has ended for good.
    Died { member: MemberId },
    /// A dead member's leases have been in quarantine for the configured time.
    Expired { member: MemberId },
    /// The deadline of a withdrawal has passed.
    DeadlinePassed { id: WithdrawalId },
    /// The driver works at a place, but cannot import these chunks any more, each the first of its version.
    DeviceLost { place: Place, chunks: Vec<FdId> },
    /// Everything that was to be closed before this confirmation is closed.
    Closed { id: CloseId },
    /// Everything promised in an ended cell has been stored, so nothing more will be written there.
    CellSettled { at: CellAt },
    /// The permits and blocks of a row whose member is gone have been returned.
    RowCleared { row: u16 },
    /// A timeline's cell has ended without the broker: members end it themselves if the broker is silent for too long.
    TimelineEnded { name: Name },
    /// A member sent a request.
    Request { member: MemberId, request: RequestId, call: Call },
}

/// A member's process, as people see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) simulated: bool,
    /// True if it is an operator, which can only list, inspect, and remove what members hold.
    pub(crate) operator: bool,
    /// True if the broker can see the end of its process.
    pub(crate) has_pidfd: bool,
}

/// The operation that a member requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Call {
    Ping,
    Commit(Commit),
    Open(Open),
    OpenOrBuild { name: Name },
    AbandonBuild { claim: ClaimId },
    Cancel { ticket: RequestId },
    GiveUp { request: RequestId },
    Release { lease: LeaseId },
    LeaveName { lease: LeaseId },
    WithdrawNames,
    AwaitWithdrawal { lease: LeaseId },
    Grow(Growth),
    Refresh { lease: LeaseId, growths: u64, chunks: u64 },
    AwaitGrowth { lease: LeaseId, growths: u64 },
    Remove { name: Name, deadline: Option<Deadline> },
    Inspect { name: Name, version: Option<u64> },
    List { after: Option<String> },
    Members { after: Option<MemberId> },
    UsesGpu { mps: Option<Arc<str>> },
    ContextLost,
    CheckBytes { place: Place, bytes: u64 },
    Watch(Watch),
    Evict { whom: Whom, kill: bool },
    FreeUnproven { pid: Option<u32> },
    OpenTimeline(OpenTimeline),
    FollowTimeline { lease: LeaseId },
    AbandonTimeline { name: Name },
    OpenSemaphore(OpenSemaphore),
    Attach { queue: LeaseId, segment: LeaseId },
    DetachSegment(DetachSegment),
    OpenAttached { queue: LeaseId, attachment: u32 },
    Objects { after: Option<(ObjectKind, String)> },
    InspectObject { kind: ObjectKind, name: Name },
    Status,
    Stop { force: bool },
    Leave,
}

/// What a call may do, and who may make it.
struct Class {
    only_asks: bool,
    needs_member: bool,
}

impl Call {
    /// Returns whether the call changes nothing, also if it is granted.
    pub(crate) fn only_asks(&self) -> bool {
        self.class().only_asks
    }

    /// Returns whether only members may make the call: it grants something, or may wait.
    pub(super) fn needs_member(&self) -> bool {
        self.class().needs_member
    }

    fn class(&self) -> Class {
        let (only_asks, needs_member) = match self {
            Self::Ping
            | Self::Inspect { .. }
            | Self::List { .. }
            | Self::Members { .. }
            | Self::Objects { .. }
            | Self::InspectObject { .. }
            | Self::Status => (true, false),
            Self::Refresh { .. } | Self::CheckBytes { .. } => (true, true),
            Self::Remove { .. }
            | Self::Evict { .. }
            | Self::FreeUnproven { .. }
            | Self::AbandonTimeline { .. }
            | Self::Stop { .. }
            | Self::Leave => (false, false),
            Self::Commit(_)
            | Self::Open(_)
            | Self::OpenOrBuild { .. }
            | Self::AbandonBuild { .. }
            | Self::Cancel { .. }
            | Self::GiveUp { .. }
            | Self::Release { .. }
            | Self::LeaveName { .. }
            | Self::WithdrawNames
            | Self::AwaitWithdrawal { .. }
            | Self::Grow(_)
            | Self::AwaitGrowth { .. }
            | Self::UsesGpu { .. }
            | Self::ContextLost
            | Self::Watch(_)
            | Self::OpenTimeline(_)
            | Self::FollowTimeline { .. }
            | Self::OpenSemaphore(_)
            | Self::Attach { .. }
            | Self::DetachSegment(_)
            | Self::OpenAttached { .. } => (false, true),
        };
        Class { only_asks, needs_member }
    }

    /// Returns the file descriptors that came with the call.
    pub(crate) fn fds(&self) -> Vec<FdId> {
        match self {
            Self::Commit(commit) => commit.memory.fds(),
            Self::Grow(growth) => growth.fds(),
            Self::OpenTimeline(open) => open.slab.iter().map(|slab| slab.fd).collect(),
            Self::OpenSemaphore(open) => open.memory.iter().map(|memory| memory.fd).collect(),
            _ => Vec::new(),
        }
    }
}

/// A built version. The server has checked its file descriptors and given each a number of its own. The control memory
/// of a pool or topic depends on the request alone, so the server has created it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Commit {
    pub(crate) name: Name,
    pub(crate) memory: Arc<Memory>,
    pub(crate) if_absent: bool,
    /// The member with which an owned name ends, in place of its committer.
    pub(crate) owner: Option<MemberId>,
    pub(crate) claim: Option<ClaimId>,
    /// True to let other users open it.
    pub(crate) shared: bool,
}

/// The growth of a version. File descriptors as in [`Commit`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Growth {
    pub(crate) lease: LeaseId,
    pub(crate) growths: u64,
    pub(crate) kind: Kind,
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) table: Table,
    pub(crate) tensors: u64,
}

impl Growth {
    /// Returns the file descriptors: those of the chunks, then the table's.
    pub(super) fn fds(&self) -> Vec<FdId> {
        fds(&self.chunks, &self.table)
    }
}

/// Which version to open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(crate) name: Name,
    pub(crate) version: Option<u64>,
    pub(crate) access: Access,
    pub(crate) wait: bool,
}

/// Which attachment is to end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DetachSegment {
    /// The lease on the queue.
    pub(crate) queue: LeaseId,
    pub(crate) attachment: u32,
    /// Tasks that name it, if the server has found any ([`Registry::to_detach`](super::Registry::to_detach)).
    ///
    /// The request is then refused, and refused requests are not recorded.
    #[serde(skip)]
    pub(crate) in_use: Option<InUse>,
}

/// A request for events of names.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Watch {
    #[serde(with = "super::coding::pattern")]
    pub(crate) pattern: Pattern,
    pub(crate) after: After,
}

/// A point in the sequence of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum After {
    /// After the last event.
    Now,
    /// After the event with this number.
    Event(u64),
    /// A point of another broker.
    Elsewhere,
}

/// Which timeline to open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenTimeline {
    pub(crate) name: Name,
    pub(crate) writer: bool,
    /// True to let other users open it, if this creates it.
    pub(crate) shared: bool,
    /// A new slab, if [`Registry::control_needed`](super::Registry::control_needed) asked for one.
    pub(crate) slab: Option<ControlMemory>,
}

/// Which semaphore to open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenSemaphore {
    pub(crate) name: Name,
    pub(crate) maximum: u32,
    /// True to let other users open it, if this creates it.
    pub(crate) shared: bool,
    /// New memory for it, if [`Registry::control_needed`](super::Registry::control_needed) asked for it.
    pub(crate) memory: Option<ControlMemory>,
}
