//! Effects: the output of the registry.

use std::{collections::BTreeMap, sync::Arc};

use partywall_wire::{
    AttachedInfo, Freed, Happened, HolderInfo, MemberInfo, NameInfo, OpenedTimeline, QueueHolder, Refusal, SegmentInfo,
    SemaphoreInfo, StatusInfo, TimelineInfo,
};
use serde::{Deserialize, Serialize};

use super::types::{
    CellAt, ClaimId, CloseId, FdId, LeaseId, Limit, MemberId, MemberState, Memory, Millis, Name, Notice, OtherUsers,
    RequestId, Staleness, TimelineEnding, WithdrawalId,
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
        holders: Vec<HolderInfo>,
        queues: Vec<QueueHolder>,
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
        members: Vec<Freed>,
        killed: bool,
    },
    Freed {
        members: Vec<Freed>,
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
    /// Without what the server knows of itself.
    Status(Box<StatusInfo>),
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

/// A row of a listing as the wire has it, and where the server reads what the registry does not know. Until then those
/// numbers are 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row<T, P> {
    pub(crate) info: T,
    pub(crate) at: P,
}

/// A name, with the slot table of its latest version if that has one.
pub(crate) type NameRow = Row<NameInfo, Option<FdId>>;

/// A member that holds leases on something, with the row that identifies it in control memory.
pub(crate) type Holder = Row<HolderInfo, u16>;

/// A member, with what it has in control memory.
pub(crate) type MemberRow = Row<MemberInfo, MemberAt>;

/// What a member has in control memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberAt {
    /// Its row, which locates its heartbeat and identifies its permits. Absent for a dead member.
    pub(crate) row: Option<u16>,
    /// Semaphores that it has open.
    pub(crate) semaphores: Vec<FdId>,
    /// The slot tables of the pools, topics and queues that it has open.
    pub(crate) pools: Vec<FdId>,
}

/// A timeline with its cell, or a semaphore with its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ObjectRow {
    Timeline(Row<TimelineInfo, Option<CellAt>>),
    Semaphore(Row<SemaphoreInfo, FdId>),
}

impl ObjectRow {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Timeline(timeline) => &timeline.info.name,
            Self::Semaphore(semaphore) => &semaphore.info.name,
        }
    }
}

/// Everything about one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    /// Without its holders.
    pub(crate) info: SegmentInfo,
    pub(crate) holders: Vec<Holder>,
    /// The slot table of the version, if it has one.
    pub(crate) slots: Option<FdId>,
    /// The segments that a queue holds; empty for other objects.
    pub(crate) attached: Vec<AttachedInfo>,
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
