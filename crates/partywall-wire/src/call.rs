//! Calls: what a member can request, and what each call may do.

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::{Answer, Happened, Kind, Opened, Refusal};
use crate::{
    id::{ClaimId, LeaseId, MemberId, RequestId},
    member::Whom,
    message::{Commit, Grow, Open},
    name::Name,
    object::ObjectKind,
    place::Place,
    watch::Point,
    withdrawal::Deadline,
};

/// An operation that a member can request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Call {
    /// Does nothing. Answer: [`Answer::Done`].
    Ping,
    /// Creates the next version of a name. Answer: [`Answer::Committed`].
    Commit(Commit),
    /// Opens a version. Answer: [`Answer::Opened`], or [`Answer::Pending`] if it does not exist and `wait` is set.
    Open(Open),
    /// Opens the latest version, or makes the caller the builder if there is no version and no builder.
    /// Answer: [`Answer::Opened`], [`Answer::Build`], or [`Answer::Pending`] while another member builds.
    OpenOrBuild {
        /// The name.
        name: Name,
    },
    /// Returns a claim from [`Answer::Build`] unused. One waiter becomes builder. Answer: [`Answer::Done`].
    AbandonBuild {
        /// The claim.
        claim: ClaimId,
    },
    /// Cancels a pending request. Answer: [`Answer::Done`], or [`Refusal::Stale`] if its completion is already on its
    /// way or the request was never pending.
    Cancel {
        /// The request's number.
        ticket: RequestId,
    },
    /// Drops a lease. Dropping the committer's lease of an `owned` version removes the name; dropping the writer's
    /// lease of a timeline ends its incarnation as closed. Answer: [`Answer::Done`].
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// Drops the committer's lease of an `owned` version and keeps the name. The name ends with the member, by
    /// [`Call::WithdrawNames`], by [`Call::Remove`], or with the next version. Any other lease, and a lease on
    /// [`Kind::Legacy`], is released. Answer: [`Answer::Done`].
    LeaveName {
        /// The lease.
        lease: LeaseId,
    },
    /// Removes all `owned` names whose latest version ends with the member. The member keeps its leases. Answer:
    /// [`Answer::Done`].
    WithdrawNames,
    /// Answers [`Answer::Withdrawn`] as soon as the lease's version is no longer its name's latest because the name was
    /// removed or ended with its owner; until then [`Answer::Pending`].
    AwaitWithdrawal {
        /// The lease.
        lease: LeaseId,
    },
    /// Adds chunks to the version of the committer's lease, atomically. Answer: [`Answer::Done`].
    Grow(Grow),
    /// Asks for the chunks of a version that the member does not have: those of growths, or all. Answer:
    /// [`Answer::Grown`], or [`Answer::Done`] if it has grown no more than `growths` times and the member has all chunks.
    Refresh {
        /// The lease.
        lease: LeaseId,
        /// Number of growths that the member knows.
        growths: u64,
        /// Number of chunks that the member has.
        chunks: u64,
    },
    /// Answers [`Answer::Done`] as soon as the lease's version has grown more than `growths` times; until then
    /// [`Answer::Pending`]. Refused once the version cannot grow any more.
    AwaitGrowth {
        /// The lease.
        lease: LeaseId,
        /// Number of growths that the member knows.
        growths: u64,
    },
    /// Removes a name: its latest version can no longer be opened, and is freed with its last lease. Answer:
    /// [`Answer::Removed`].
    Remove {
        /// The name.
        name: Name,
        /// When its readers are to have dropped it. Without a deadline they may keep it.
        deadline: Option<Deadline>,
    },
    /// Asks for everything about one name. Answer: [`Answer::Info`] with the table as in [`Opened`], but no lease and
    /// no chunks.
    Inspect {
        /// The name.
        name: Name,
        /// A version of it; the latest by default.
        version: Option<u64>,
    },
    /// Lists names in order, from the first one after `after`. Answer: [`Answer::Names`].
    List {
        /// Where to go on.
        after: Option<String>,
    },
    /// Lists members in order of their numbers, from the first one after `after`. Answer: [`Answer::Members`].
    Members {
        /// Where to go on.
        after: Option<MemberId>,
    },
    /// Opens a timeline, and creates it if the name does not exist. The name ends with its last lease.
    /// Answer: [`Answer::Timeline`].
    OpenTimeline {
        /// The name.
        name: Name,
        /// True to become its writer. Refused while it has one.
        writer: bool,
        /// True to let other users open it, if this creates it.
        shared: bool,
    },
    /// Asks for the present incarnation of a timeline. A new writer begins a new incarnation after the death of the
    /// last. Answer: [`Answer::Timeline`].
    FollowTimeline {
        /// The lease.
        lease: LeaseId,
    },
    /// Ends all waits for values that a timeline has not reached. Answer: [`Answer::Done`].
    AbandonTimeline {
        /// The name.
        name: Name,
    },
    /// Opens a semaphore, and creates it if the name does not exist. The name ends with its last lease.
    /// Answer: [`Answer::Semaphore`].
    OpenSemaphore {
        /// The name.
        name: Name,
        /// Permits, at most [`crate::limits::MAX_PERMITS`]. Refused if the semaphore has another number.
        maximum: u32,
        /// True to let other users open it, if this creates it.
        shared: bool,
    },
    /// Lists timelines in order of their names, then semaphores, from the first one after `after`. Answer:
    /// [`Answer::Objects`].
    Objects {
        /// Where to go on.
        after: Option<(ObjectKind, String)>,
    },
    /// Asks for everything about one timeline or semaphore. Answer: [`Answer::Object`].
    InspectObject {
        /// The kind.
        kind: ObjectKind,
        /// The name.
        name: Name,
    },
    /// Has a queue hold the segment behind a lease, until it is detached or the queue goes. Nothing changes if the
    /// queue holds it already. Answer: [`Answer::Attached`].
    Attach {
        /// The lease on the queue.
        queue: LeaseId,
        /// The lease on the segment.
        segment: LeaseId,
    },
    /// Ends an attachment, unless tasks name it ([`Refusal::AttachmentInUse`]). Answer: [`Answer::Done`].
    DetachSegment {
        /// The lease on the queue.
        queue: LeaseId,
        /// The number of the attachment.
        attachment: u32,
    },
    /// Opens an attached segment for reading, also one whose name is gone. Answer: [`Answer::Opened`].
    OpenAttached {
        /// The lease on the queue.
        queue: LeaseId,
        /// The number of the attachment.
        attachment: u32,
    },
    /// Asks for events of names that match a pattern since a point, or waits for the next ones. Without a point,
    /// returns the present point. Answer: [`Answer::Happened`], or [`Answer::Pending`] if there are no events yet.
    Watch {
        /// The pattern, by the rules of [`crate::Pattern`].
        pattern: String,
        /// The point: [`Happened::next`] of the last answer.
        after: Option<Point>,
    },
    /// Reports that the member has opened a GPU. Answer: [`Answer::Done`].
    UsesGpu {
        /// The directory of its MPS daemon, if it is a client of MPS. The end of its process then does not prove the
        /// end of its work.
        mps: Option<String>,
    },
    /// Reports that the member's CUDA context is broken. Its leases stay until its process ends, even if it releases
    /// them. Answer: [`Answer::Done`].
    ContextLost {
        /// The GPU of the context, if known.
        gpu: Option<[u8; 16]>,
    },
    /// Has the broker find out whether the memory at a place is lost, because memory there could not be imported.
    /// Answer: [`Answer::MemoryCheck`], without waiting for the result.
    CheckMemory {
        /// The GPU, or the NUMA node of pinned memory.
        place: Place,
    },
    /// Asks whether a commit or growth of this many more bytes at a place would stay within the limits on bytes, those
    /// of the member's user among them. Nothing is reserved: only the commit decides. Answer: [`Answer::Done`].
    CheckBytes {
        /// The place.
        place: Place,
        /// Bytes, as allocated.
        bytes: u64,
    },
    /// Evicts members: ends their waits, builds, owned names and timelines, and refuses their requests from now on.
    /// Their leases stay in quarantine until their deaths are proved. Answer: [`Answer::Evicted`].
    Evict {
        /// Which members.
        whom: Whom,
        /// True to send their processes SIGKILL.
        kill: bool,
    },
    /// Frees the leases of dead members, although there is no proof that their work on the memory is over. Answer:
    /// [`Answer::Freed`].
    FreeUnproven {
        /// Frees only members with this pid.
        pid: Option<u32>,
    },
    /// Asks for the state of the broker. Answer: [`Answer::Status`].
    Status,
    /// Ends the broker. Answer: [`Answer::Done`], after which the connection ends.
    Stop {
        /// True to end it even if names and members exist.
        force: bool,
    },
    /// Ends the membership and drops all that it holds. Answer: [`Answer::Done`], after which the connection ends.
    Bye,
    /// Has the program whose file is the message's only file descriptor continue as the broker, with everything that
    /// the broker knows and holds. Refused with [`Refusal::NotReplaced`] if the program says that it cannot. Answer:
    /// [`Answer::Done`], after which all connections end; members resume.
    Replace,
    /// Gives back what an earlier request was granted, or waits for, after its connection was lost and the caller has
    /// stopped waiting for the answer. Answer: [`Answer::Done`], also if there is nothing to give back.
    GiveUp {
        /// The request's number.
        request: RequestId,
    },
}

impl Call {
    /// Returns whether the call changes nothing, also if it is granted.
    pub fn only_asks(&self) -> bool {
        matches!(self.class(), Class::Asks | Class::AsksAsMember)
    }

    /// Returns whether only members may make the call, and no operators: it grants something, or may wait.
    pub fn needs_member(&self) -> bool {
        matches!(self.class(), Class::AsksAsMember | Class::GivesBack | Class::Takes)
    }

    /// Returns whether the call may make the broker keep more than before.
    pub fn takes(&self) -> bool {
        self.class() == Class::Takes
    }

    /// Returns whether the answer may carry file descriptors.
    pub fn may_bring_descriptors(&self) -> bool {
        match self {
            Self::Commit(commit) => commit.facts.control.is_some(),
            Self::Open(_)
            | Self::OpenOrBuild { .. }
            | Self::Refresh { .. }
            | Self::Inspect { .. }
            | Self::OpenTimeline { .. }
            | Self::FollowTimeline { .. }
            | Self::OpenSemaphore { .. }
            | Self::OpenAttached { .. } => true,
            _ => false,
        }
    }

    fn class(&self) -> Class {
        match self {
            Self::Ping
            | Self::Inspect { .. }
            | Self::List { .. }
            | Self::Members { .. }
            | Self::Objects { .. }
            | Self::InspectObject { .. }
            | Self::Status => Class::Asks,
            Self::Refresh { .. } | Self::CheckBytes { .. } => Class::AsksAsMember,
            Self::Remove { .. }
            | Self::Evict { .. }
            | Self::FreeUnproven { .. }
            | Self::AbandonTimeline { .. }
            | Self::CheckMemory { .. }
            | Self::Stop { .. }
            | Self::Replace
            | Self::Bye => Class::Manages,
            Self::Release { .. }
            | Self::LeaveName { .. }
            | Self::WithdrawNames
            | Self::AbandonBuild { .. }
            | Self::Cancel { .. }
            | Self::GiveUp { .. }
            | Self::DetachSegment { .. } => Class::GivesBack,
            Self::Commit(_)
            | Self::Open(_)
            | Self::OpenOrBuild { .. }
            | Self::AwaitWithdrawal { .. }
            | Self::Grow(_)
            | Self::AwaitGrowth { .. }
            | Self::UsesGpu { .. }
            | Self::ContextLost { .. }
            | Self::Watch { .. }
            | Self::OpenTimeline { .. }
            | Self::FollowTimeline { .. }
            | Self::OpenSemaphore { .. }
            | Self::Attach { .. }
            | Self::OpenAttached { .. } => Class::Takes,
        }
    }
}

/// What a call may do, and who may make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Changes nothing. Operators may make it, too.
    Asks,
    /// Changes nothing, and is about what the member has.
    AsksAsMember,
    /// Takes from members, or ends something. Operators may make it, too.
    Manages,
    /// Gives back what the member has.
    GivesBack,
    /// May make the broker keep more than before.
    Takes,
}
