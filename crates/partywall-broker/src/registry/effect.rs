//! Effects: the output of the registry.

use std::collections::BTreeMap;

use partywall_wire::{AttachedInfo, Refusal};

use super::types::{
    CellAt, CloseId, FdId, LeaseId, Limit, MemberId, MemberState, Millis, OtherUsers, RequestId, Staleness,
    TimelineEnding, WithdrawalId,
};

pub(crate) use partywall_wire::Answer;

/// An action for the server. Effects are carried out in the order in which the registry returns them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Answer a request, sending `fds` along.
    Reply { member: MemberId, request: RequestId, outcome: Outcome, fds: Vec<FdId>, unread: Unread },
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
    /// ([`Guarded`](super::Guarded)): a stream of its writer may still store in it.
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

/// What the server reads from control memory and adds to an answer before it sends it. Until then those numbers are 0.
///
/// Lists are in the order of the answer's rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Unread {
    #[default]
    Nothing,
    /// Of each name the slot table of its latest version, if that has one.
    Names(Vec<Option<FdId>>),
    Members(Vec<MemberAt>),
    /// Of an inspected version, if it has a slot table.
    Version {
        slots: FdId,
        /// The rows of its holders.
        holders: Vec<u16>,
        /// The members whose rows may appear in its control memory.
        rows: BTreeMap<u16, RowOwner>,
        /// The segments that a queue holds; empty for other objects.
        attached: Vec<AttachedInfo>,
    },
    Objects(Vec<ObjectAt>),
    /// Of an inspected object, with the rows of its holders.
    Object(ObjectAt, Vec<u16>),
}

/// What a member has in control memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MemberAt {
    /// Its row, which locates its heartbeat and identifies its permits. Absent for a dead member.
    pub(crate) row: Option<u16>,
    /// Semaphores that it has open.
    pub(crate) semaphores: Vec<FdId>,
    /// The slot tables of the pools, topics and queues that it has open.
    pub(crate) pools: Vec<FdId>,
}

/// The cell of a timeline, or the memory of a semaphore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectAt {
    Timeline(Option<CellAt>),
    Semaphore(FdId),
}

/// The member of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowOwner {
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) state: MemberState,
}

/// A granted request, the file descriptors that go with the answer, and what the server adds.
pub(crate) struct Granted(pub(crate) Answer, pub(crate) Vec<FdId>, pub(crate) Unread);

impl From<Answer> for Granted {
    fn from(answer: Answer) -> Self {
        Self(answer, Vec::new(), Unread::Nothing)
    }
}

/// The decision on a request.
pub(crate) type Decision = Result<Granted, Refusal>;

/// Separates the outcome of a decision from what goes with it.
pub(crate) fn split(decision: Decision) -> (Outcome, Vec<FdId>, Unread) {
    match decision {
        Ok(Granted(answer, fds, unread)) => (Ok(answer), fds, unread),
        Err(refused) => (Err(refused), Vec::new(), Unread::Nothing),
    }
}
