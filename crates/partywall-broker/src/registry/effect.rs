//! Effects: the output of the registry.

use std::{collections::BTreeMap, sync::Arc};

use partywall_wire::Refusal;
use serde::{Deserialize, Serialize};

use super::types::{
    Awaited, BlockControl, CellAt, Change, ClaimId, CloseId, Doubt, FdId, Gap, Kind, LeaseId, Lifetime, Limit,
    MemberId, MemberState, Memory, Millis, Name, Named, Notice, OtherUsers, Place, RequestId, Staleness,
    TimelineEnding, UserInfo, WithdrawalId,
};

/// An action for the server. Effects are carried out in the order in which the registry returns them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Answer a request, sending `fds` along.
    Reply { member: MemberId, request: RequestId, outcome: Outcome, fds: Vec<FdId> },
    /// Complete a request that was answered with [`Answer::Pending`].
    Notify { member: MemberId, ticket: RequestId, outcome: Outcome, fds: Vec<FdId> },
    /// Close these descriptors: nothing in the registry refers to them any more. Held back while a row is being
    /// cleared.
    Close(Vec<FdId>),
    /// Report when everything that was to be closed until now is closed. Held back with [`Effect::Close`].
    Confirm(CloseId),
    /// Begin an incarnation in a cell, at the value of the cell `from`.
    StartCell { at: CellAt, from: Option<CellAt>, incarnation: u32 },
    /// End an incarnation and the waits for values that it has not reached. Guard the cell from now on
    /// ([`Registry::guarded`](super::Registry::guarded)): a stream of its writer may still store in it.
    EndCell { at: CellAt, ending: TimelineEnding },
    /// Report when everything promised in an ended cell has been stored
    /// ([`Event::CellSettled`](super::Event::CellSettled)). Nothing new is promised in the cell.
    SettleCell(CellAt),
    /// Let the tasks of a queue name an attachment.
    Attach { object: FdId, attachment: u32 },
    /// Return all permits or blocks of a member, and give them to waiters. Done immediately, because the member may
    /// take others afterwards.
    Return { control: FdId, row: u16 },
    /// Detach a member from a topic or queue: no process waits for the member any more, and it keeps the blocks that it
    /// holds.
    Detach { object: FdId, row: u16, ending: TimelineEnding },
    /// Return all permits and blocks of a member that is gone, then report
    /// [`Event::RowCleared`](super::Event::RowCleared). Until then no member gets the row.
    ClearRow { row: u16, control: Vec<FdId> },
    /// End the connection of a member that has left.
    Disconnect(MemberId),
    /// End the member's connection, but continue to watch its process: its leases are kept until the process ends.
    HangUp(MemberId),
    /// The member is dead, and its leases are in quarantine until an operator or a timer frees them.
    Quarantined(MemberId),
    /// Report when this many milliseconds have passed ([`Event::DeadlinePassed`](super::Event::DeadlinePassed)).
    AwaitDeadline { id: WithdrawalId, after: Millis },
    /// Notify a member that these leases of it are stale.
    Stale { member: MemberId, leases: Vec<(LeaseId, Staleness)> },
    /// Send SIGKILL to a member's process. The result goes into the reply that follows.
    Kill(MemberId),
    /// Write an audit line.
    Audit(Audited),
    /// Remove the socket's file. A process that learns that this broker ends may start the next one immediately.
    RemoveSocket,
    /// End the broker.
    Stop,
}

/// What users get of each other, and what they are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Audited {
    /// Something that belongs to another user.
    OtherUser { uid: u32, pid: u32, what: OtherUsers, owner: u32, granted: bool },
    /// A user's share of a limit was reached.
    Quota { uid: u32, pid: u32, limit: Limit, allowed: u64, needed: u64 },
}

/// The effects of one event, in order.
pub(crate) type Effects = Vec<Effect>;

/// The result of a request. A refused request changes nothing.
pub(crate) type Outcome = Result<Answer, Refusal>;

/// A request that was granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Pending,
    Committed {
        version: u64,
        lease: LeaseId,
    },
    Opened(Opened),
    Build {
        claim: ClaimId,
    },
    /// The present state of a version, for a member that has its first `chunks` chunks.
    Grown {
        growths: u64,
        chunks: usize,
        memory: Arc<Memory>,
    },
    Withdrawn {
        notice: Option<Notice>,
    },
    Removed {
        version: u64,
        bytes_kept: u64,
        holders: Vec<Holder>,
        queues: Vec<HoldingQueue>,
        notice: Option<Notice>,
    },
    Info(Box<Info>),
    Names {
        names: Vec<NameRow>,
        more: bool,
    },
    Members {
        members: Vec<MemberRow>,
        more: bool,
    },
    Happened(Happened),
    /// `killed` says whether their processes were sent SIGKILL, or were to be.
    Evicted {
        members: Vec<Departed>,
        killed: bool,
    },
    Freed {
        members: Vec<Departed>,
        more: bool,
    },
    Timeline(OpenedTimeline),
    Semaphore {
        lease: LeaseId,
        maximum: u32,
    },
    Attached {
        attachment: u32,
    },
    Objects {
        objects: Vec<ObjectRow>,
        more: bool,
    },
    Object(Box<(ObjectRow, Vec<Holder>)>),
    Status(Box<Counts>),
}

impl Answer {
    /// Returns whether the answer to a repeated request cannot be found again in the registry's state. Answers that
    /// carry leases and claims can, and the others describe the present state.
    pub(super) fn is_found_only_here(&self) -> bool {
        matches!(
            self,
            Self::Done | Self::Removed { .. } | Self::Evicted { .. } | Self::Freed { .. } | Self::Attached { .. }
        )
    }
}

/// The events of names since a point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Happened {
    pub(crate) gap: Option<Gap>,
    pub(crate) events: Vec<Happening>,
    /// The number of the last event that was compared with the pattern.
    pub(crate) next: u64,
}

/// An event of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Happening {
    pub(crate) sequence: u64,
    pub(crate) at: Millis,
    pub(crate) named: Named,
    pub(crate) name: Name,
    pub(crate) change: Change,
    /// The user to which the name belongs.
    pub(crate) uid: u32,
    /// True if other users see the event.
    pub(crate) shared: bool,
}

impl Happening {
    /// Returns the bytes that the event counts for in the log's bound.
    pub(crate) fn cost(&self) -> u64 {
        (size_of::<Self>() + self.name.as_str().len()) as u64
    }
}

/// A version with the lease that was given on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub(crate) lease: LeaseId,
    pub(crate) name: Name,
    pub(crate) version: u64,
    pub(crate) growths: u64,
    pub(crate) memory: Arc<Memory>,
    pub(crate) uid: u32,
    pub(crate) shared: bool,
}

/// A timeline as a lease sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenedTimeline {
    pub(crate) lease: LeaseId,
    pub(crate) slab: u32,
    pub(crate) cell: u32,
    pub(crate) incarnation: u32,
    pub(crate) writer: bool,
}

/// A member that holds leases on something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) leases: u32,
    /// True if it is dead, with these leases in quarantine.
    pub(crate) unproven: bool,
    /// Identifies the member in control memory.
    pub(crate) row: u16,
}

/// A queue that holds a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HoldingQueue {
    pub(crate) name: Name,
    pub(crate) version: u64,
    pub(crate) attachment: u32,
}

/// A segment that a queue holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeldSegment {
    pub(crate) attachment: u32,
    pub(crate) name: Name,
    pub(crate) version: u64,
    pub(crate) bytes: u64,
}

/// A member that was evicted or freed by a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Departed {
    pub(crate) member: MemberId,
    pub(crate) pid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) leases: u32,
    pub(crate) bytes: u64,
}

/// A name in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NameRow {
    pub(crate) name: Name,
    pub(crate) latest: Option<VersionRow>,
    pub(crate) older: u32,
    pub(crate) older_bytes: u64,
    pub(crate) notice: Option<Notice>,
    pub(crate) lost: bool,
}

/// A version in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VersionRow {
    pub(crate) version: u64,
    pub(crate) kind: Kind,
    pub(crate) place: Place,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) mutable: bool,
    pub(crate) reserved: u64,
    pub(crate) growths: u64,
    pub(crate) lifetime: Lifetime,
    pub(crate) control: Option<BlockControl>,
    pub(crate) committer: u32,
    pub(crate) owner: u32,
    pub(crate) uid: u32,
    pub(crate) shared: bool,
    pub(crate) leases: u32,
    pub(crate) notice: Option<Notice>,
    pub(crate) lost: bool,
    pub(crate) committed_at: Millis,
}

/// Everything about one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    pub(crate) name: Name,
    pub(crate) version: VersionRow,
    pub(crate) memory: Arc<Memory>,
    pub(crate) is_latest: bool,
    pub(crate) versions: Vec<VersionRow>,
    pub(crate) holders: Vec<Holder>,
    pub(crate) queues: Vec<HoldingQueue>,
    /// The segments that a queue holds; empty for other objects.
    pub(crate) attached: Vec<HeldSegment>,
    pub(crate) builder: Option<u32>,
    /// The members whose rows may appear in its control memory, if it has any.
    pub(crate) rows: BTreeMap<u16, RowOwner>,
}

/// The member of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RowOwner {
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) state: MemberState,
}

/// A member in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberRow {
    pub(crate) member: MemberId,
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: Arc<str>,
    pub(crate) state: MemberState,
    pub(crate) doubt: Option<Doubt>,
    pub(crate) mps: Option<Arc<str>>,
    /// Its row, which locates its heartbeat and identifies its permits. Absent for a dead member.
    pub(crate) row: Option<u16>,
    pub(crate) leases: u32,
    /// Timelines that it writes.
    pub(crate) timelines: u32,
    /// Semaphores that it has open.
    pub(crate) semaphores: Vec<FdId>,
    /// The slot tables of the pools, topics and queues that it has open.
    pub(crate) pools: Vec<FdId>,
    pub(crate) bytes: u64,
    pub(crate) since: Millis,
    /// Its first waits for names. Its wait for a timeline is in its row.
    pub(crate) waits: Vec<WaitRow>,
    pub(crate) simulated: bool,
}

/// A wait for a name in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitRow {
    pub(crate) on: Awaited,
    pub(crate) name: Name,
    pub(crate) version: Option<u64>,
    /// The pid of the member that can end it, if it is known.
    pub(crate) by: Option<u32>,
}

/// A timeline or semaphore in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ObjectRow {
    Timeline(TimelineRow),
    Semaphore(SemaphoreRow),
}

impl ObjectRow {
    pub(crate) fn name(&self) -> &Name {
        match self {
            Self::Timeline(timeline) => &timeline.name,
            Self::Semaphore(semaphore) => &semaphore.name,
        }
    }
}

/// A timeline in a listing. Its value is in its cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimelineRow {
    pub(crate) name: Name,
    pub(crate) at: Option<CellAt>,
    pub(crate) incarnation: u32,
    pub(crate) writer: Option<u32>,
    pub(crate) leases: u32,
    pub(crate) uid: u32,
    pub(crate) shared: bool,
}

/// A semaphore in a listing. Its memory records which rows hold its permits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SemaphoreRow {
    pub(crate) name: Name,
    pub(crate) memory: FdId,
    pub(crate) maximum: u32,
    pub(crate) leases: u32,
    pub(crate) uid: u32,
    pub(crate) shared: bool,
}

/// The numbers of a status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts {
    /// True if the members run on the simulated driver.
    pub(crate) simulated: bool,
    /// Members, without the one that asked.
    pub(crate) members: u64,
    pub(crate) names: u64,
    pub(crate) versions: u64,
    pub(crate) timelines: u64,
    pub(crate) semaphores: u64,
    pub(crate) leases: u64,
    /// Dead members whose work is not proved to be over.
    pub(crate) unproven: u64,
    /// Bytes of the versions that they hold leases on, each counted once.
    pub(crate) unproven_bytes: u64,
    /// Members that died since the start.
    pub(crate) deaths: u64,
    /// Deaths among them that did not prove that the work of the process was over.
    pub(crate) unproven_deaths: u64,
    pub(crate) fds: u64,
    pub(crate) bytes: Vec<(Place, u64)>,
    pub(crate) largest: Vec<(Name, Place, u64)>,
    pub(crate) users: Vec<UserInfo>,
}
