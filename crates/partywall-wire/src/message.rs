//! The messages: calls, answers and events.

use serde::{Deserialize, Serialize};

use crate::{
    control::{Control, ControlInfo, Usage},
    id::{ClaimId, LeaseId, MemberId, RequestId},
    member::{Evicted, Freed, MemberInfo, Whom},
    name::Name,
    object::{ObjectDetail, ObjectInfo, ObjectKind, OpenedTimeline},
    refusal::Refusal,
    user::UserInfo,
    watch::{Happened, Point},
    withdrawal::{Deadline, Notice, Staleness},
};

/// A random proof of identity. Its `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The answer to the request with the same number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The number of the request.
    pub id: RequestId,
    /// The result.
    pub outcome: Result<Answer, Refusal>,
}

/// A message that a broker sends without a request, on the events socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Event {
    /// The end of a request that was answered with [`Answer::Pending`]. File descriptors as with that answer.
    Completion {
        /// The request's number.
        ticket: RequestId,
        /// The result, as if the request had arrived only now.
        outcome: Result<Answer, Refusal>,
    },
    /// Versions that the member has open are stale. Sent again when the member resumes.
    Stale {
        /// The member's leases on them, each with the reason.
        leases: Vec<(LeaseId, Staleness)>,
    },
}

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
    /// Asks for the growths of a version. Answer: [`Answer::Grown`], or [`Answer::Done`] if it has grown no more than
    /// `growths` times.
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
            Self::Commit(commit) => commit.control.is_some(),
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

/// The kind of memory of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Sealed memfds.
    Host,
    /// GPU memory of the driver's virtual memory management, exported as file descriptors.
    Vmm,
    /// GPU memory that its publisher allocated by other means, opened by the driver's 64-byte handles. It ends with its
    /// publisher.
    Legacy,
    /// Host memory that the driver has allocated on a NUMA node and pinned, exported as file descriptors.
    Pinned,
    /// GPU memory of an allocator that is still at work in its publisher, exported as file descriptors. It is not
    /// frozen, and contains memory of the publisher besides the tensors.
    Live,
}

names!(Kind {
    Host => "host",
    Vmm => "vmm",
    Legacy => "legacy",
    Pinned => "pinned",
    Live => "live",
});

/// Where a version's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// Main memory.
    Host,
    /// The GPU with this UUID.
    Gpu([u8; 16]),
    /// Main memory of this NUMA node, which the driver has pinned.
    Pinned(u32),
}

impl Place {
    /// Returns whether only a process with the driver that allocated the memory can map it.
    pub fn needs_driver(self) -> bool {
        !matches!(self, Self::Host)
    }
}

/// When a name ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lifetime {
    /// It ends with its committer, or with the member that its commit names ([`Commit::owner`]).
    Owned,
    /// It stays until it is removed or the broker ends.
    Kept,
    /// It ends with the last member that has its latest version open.
    Shared,
}

names!(Lifetime {
    Owned => "owned",
    Kept => "kept",
    Shared => "shared",
});

/// What an opener may do with the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// Read.
    Read,
    /// Read and write; only for `mutable` versions.
    Write,
}

/// The length of each chunk in bytes, as allocated.
pub type ChunkBytes = Vec<u64>;

/// A handle that opens one allocation of [`Kind::Legacy`]. The broker does not read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegacyHandle {
    /// Drawn at random by the publishing process, which recognises its own memory by it: the driver does not open a
    /// handle in the process that exported it.
    pub origin: [u8; 16],
    /// The driver's handle, its 64 bytes in halves.
    pub driver: [[u8; 32]; 2],
}

/// How a version's tensor table travels. The broker does not read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Table {
    /// The table is in the message; at most [`crate::limits::MAX_INLINE_TABLE`] bytes.
    Inline(#[serde(with = "crate::bytes")] Vec<u8>),
    /// A memfd, sealed against every change, as the last file descriptor of the message.
    Fd {
        /// Its length.
        bytes: u64,
    },
}

/// A built version. File descriptors: one per chunk unless it has handles, then the table if it is [`Table::Fd`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The name.
    pub name: Name,
    /// The kind of memory.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// The chunks, in the order of their file descriptors or handles.
    pub chunks: ChunkBytes,
    /// For [`Kind::Legacy`] one per chunk, each an allocation; for other kinds none.
    pub handles: Vec<LegacyHandle>,
    /// The tensor table.
    pub table: Table,
    /// Tensors in the table, for listings.
    pub tensors: u64,
    /// True if it may be opened for writing.
    pub mutable: bool,
    /// Bytes that it may grow to, all chunks together; 0 if it cannot grow.
    pub reserved: u64,
    /// When the name ends.
    pub lifetime: Lifetime,
    /// The member with which an `owned` name ends, in place of its committer. It must be alive and of the same user;
    /// refused with [`Refusal::NoSuchMember`] otherwise. Only for segments, and not for [`Kind::Legacy`].
    pub owner: Option<MemberId>,
    /// Makes it a pool, topic or queue. Refused with [`Refusal::NameExists`] if the name exists; the version is mutable
    /// and does not grow.
    pub control: Option<Control>,
    /// True to let other users open it. Refused for a mutable segment, whose readers could write it.
    pub shared: bool,
    /// True to refuse with [`Refusal::NameExists`] instead of making the next version.
    pub if_absent: bool,
    /// The claim that this commit fulfils.
    pub claim: Option<ClaimId>,
}

/// The growth of a version. File descriptors: one per chunk, then the table if it is [`Table::Fd`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grow {
    /// The committer's lease.
    pub lease: LeaseId,
    /// Number of growths that the member knows. Refused if the version has grown more often.
    pub growths: u64,
    /// The kind of memory, which is the version's.
    pub kind: Kind,
    /// The chunks to add; there may be none.
    pub chunks: ChunkBytes,
    /// The tensor table of all chunks.
    pub table: Table,
    /// Tensors in the table, for listings.
    pub tensors: u64,
}

/// Which version to open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The name.
    pub name: Name,
    /// A version; the latest by default.
    pub version: Option<u64>,
    /// The access that is needed.
    pub access: Access,
    /// True to wait for a name or version that does not exist yet.
    pub wait: bool,
}

/// An opened version. File descriptors: one per chunk unless it has handles, then the table if it is [`Table::Fd`],
/// then its control memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// Keeps the version openable until it is released.
    pub lease: LeaseId,
    /// Its name.
    pub name: Name,
    /// Its version.
    pub version: u64,
    /// The kind of memory.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// The chunks.
    pub chunks: ChunkBytes,
    /// As in [`Commit`].
    pub handles: Vec<LegacyHandle>,
    /// The tensor table.
    pub table: Table,
    /// True if it may be written.
    pub mutable: bool,
    /// As in [`Commit`].
    pub reserved: u64,
    /// Number of times that it has grown.
    pub growths: u64,
    /// When the name ends.
    pub lifetime: Lifetime,
    /// Its shape, if it is a pool or topic.
    pub control: Option<Control>,
    /// The user to which it belongs.
    pub uid: u32,
    /// True if other users may open it.
    pub shared: bool,
}

/// The growths of a version. File descriptors: one per chunk, then the table if it is [`Table::Fd`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grown {
    /// Number of times that it has grown.
    pub growths: u64,
    /// The chunks that the member does not have yet.
    pub chunks: ChunkBytes,
    /// The tensor table of all.
    pub table: Table,
}

/// The result of a granted request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Answer {
    /// Done.
    Done,
    /// The completion will come as an [`Event::Completion`] with the request's number.
    Pending,
    /// The new version, and the committer's lease on it. File descriptors: its control memory, if it is a pool, topic
    /// or queue.
    Committed {
        /// The version.
        version: u64,
        /// The lease.
        lease: LeaseId,
    },
    /// An opened version.
    Opened(Opened),
    /// The growths of a version.
    Grown(Grown),
    /// The caller is to build the version.
    Build {
        /// The claim, to be passed in the commit or abandoned.
        claim: ClaimId,
    },
    /// The lease's version has been withdrawn.
    Withdrawn {
        /// When its readers are to have dropped it, if the withdrawal has a deadline.
        notice: Option<Notice>,
    },
    /// Whether a check of the place has begun or is running; if not, one has just found that the memory is in order or
    /// could not find out, or nothing is held there.
    MemoryCheck {
        /// True if it runs.
        runs: bool,
    },
    /// The name is gone.
    Removed {
        /// The latest version at that moment.
        version: u64,
        /// Bytes that stay because members or queues hold them.
        bytes_kept: u64,
        /// The members that hold them.
        holders: Vec<HolderInfo>,
        /// The queues that hold them.
        queues: Vec<QueueHolder>,
        /// As readers learn of it, if there is a deadline.
        notice: Option<Notice>,
    },
    /// Everything about a name.
    Info(Box<SegmentInfo>),
    /// Some names, in order.
    Names {
        /// The names.
        names: Vec<NameInfo>,
        /// True if there are more after the last.
        more: bool,
    },
    /// Some members, in order.
    Members {
        /// The members.
        members: Vec<MemberInfo>,
        /// True if there are more after the last.
        more: bool,
    },
    /// An opened timeline.
    Timeline(OpenedTimeline),
    /// An opened semaphore. Its memory is the message's only file descriptor.
    Semaphore {
        /// Keeps the name.
        lease: LeaseId,
        /// Its permits.
        maximum: u32,
    },
    /// An attached segment.
    Attached {
        /// The number by which the queue's tasks name it. No other segment gets it as long as the queue exists.
        attachment: u32,
    },
    /// Some timelines and semaphores, in order.
    Objects {
        /// The objects.
        objects: Vec<ObjectInfo>,
        /// True if there are more after the last.
        more: bool,
    },
    /// Everything about a timeline or semaphore.
    Object(Box<ObjectDetail>),
    /// Events of names.
    Happened(Happened),
    /// The evicted members, at most a hundred.
    Evicted(Vec<Evicted>),
    /// The freed members.
    Freed {
        /// At most a hundred of them.
        members: Vec<Freed>,
        /// True if there are more, for the next request.
        more: bool,
    },
    /// The broker itself.
    Status(Box<StatusInfo>),
}

/// A name in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameInfo {
    /// The name.
    pub name: String,
    /// The latest version; absent for a removed name whose old versions are still held.
    pub latest: Option<VersionInfo>,
    /// How the latest version is used, if it is a pool or topic.
    pub usage: Option<Usage>,
    /// Older versions that members still hold.
    pub older: u32,
    /// Bytes of these versions.
    pub older_bytes: u64,
    /// The latest withdrawal with a deadline of versions that members still hold.
    pub notice: Option<Notice>,
    /// True if it has no latest version because its memory is lost.
    pub lost: bool,
}

/// A version in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// The version.
    pub version: u64,
    /// The kind of memory.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// Bytes allocated.
    pub bytes: u64,
    /// Tensors in its table.
    pub tensors: u64,
    /// True if it may be written.
    pub mutable: bool,
    /// As in [`Commit`].
    pub reserved: u64,
    /// Number of times that it has grown.
    pub growths: u64,
    /// When its name ends.
    pub lifetime: Lifetime,
    /// Its shape, if it is a pool or topic.
    pub control: Option<Control>,
    /// The committer's pid.
    pub committer: u32,
    /// The pid of the member with which an `owned` name ends: the committer, unless the commit named another.
    pub owner: u32,
    /// The user to which it belongs.
    pub uid: u32,
    /// True if other users may open it.
    pub shared: bool,
    /// Leases on it, of members and of queues.
    pub leases: u32,
    /// Its withdrawal, if that has a deadline.
    pub notice: Option<Notice>,
    /// True if its memory is lost.
    pub lost: bool,
    /// When it was committed, in milliseconds since 1970.
    // Names of fields and variants are the keys of the command's JSON; messages contain none.
    #[serde(rename = "committed_at_ms")]
    pub committed_at: u64,
}

/// Everything about one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// The name.
    pub name: String,
    /// The version asked for.
    pub version: VersionInfo,
    /// Its chunks.
    pub chunks: ChunkBytes,
    /// Its table; a memfd is the message's only file descriptor.
    pub table: Table,
    /// True if it is the latest.
    pub is_latest: bool,
    /// All versions that exist, in order.
    pub versions: Vec<VersionInfo>,
    /// The members that hold it.
    pub holders: Vec<HolderInfo>,
    /// The queues that hold it.
    pub queues: Vec<QueueHolder>,
    /// The pid of the member that builds the next version under a claim.
    pub builder: Option<u32>,
    /// How it is used, if it is a pool or topic.
    pub control: Option<ControlInfo>,
}

/// A member that holds leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderInfo {
    /// Its pid, as in [`MemberInfo`].
    pub pid: u32,
    /// Its command line.
    pub command: String,
    /// Number of leases.
    pub leases: u32,
    /// Blocks that it holds, if a pool, topic or queue is inspected.
    pub blocks: u32,
    /// Tasks that it works on, if a queue is inspected.
    pub tasks: u32,
    /// Its threads that wait for a block or permit, if what has these is inspected.
    pub waiting: u32,
    /// True if it is dead, and its leases are in quarantine.
    pub unproven: bool,
}

/// A queue that holds a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueHolder {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// The number of the attachment.
    pub attachment: u32,
}

/// The broker itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Its pid: that of the worker, if it is supervised.
    pub pid: u32,
    /// The pid of the supervisor, which restarts it if it dies. Absent if it has none, or if the supervisor is dead.
    pub supervisor: Option<u32>,
    /// How often it was restarted.
    pub restarts: u64,
    /// Its user.
    pub uid: u32,
    /// Its release.
    pub version: String,
    /// Drawn at random when it started.
    pub instance: u64,
    /// When it started, in milliseconds since 1970.
    pub started_at: u64,
    /// Its log file.
    pub log: Option<String>,
    /// True if its members run on the simulated CUDA driver.
    pub simulated: bool,
    /// Members, without the one that asked.
    pub members: u64,
    /// Names.
    pub names: u64,
    /// Versions, including those that only leases keep.
    pub versions: u64,
    /// Timelines.
    pub timelines: u64,
    /// Semaphores.
    pub semaphores: u64,
    /// Leases.
    pub leases: u64,
    /// Members that are dead without proof that their work is over.
    pub unproven: u64,
    /// Bytes of the versions that these members hold leases on, each counted once.
    pub unproven_bytes: u64,
    /// Members that died since the broker started.
    pub deaths: u64,
    /// Deaths among them that did not prove that the work of the process was over.
    pub unproven_deaths: u64,
    /// File descriptors held for versions and for control memory.
    pub fds: u64,
    /// Bytes held in each place.
    pub bytes: Vec<(Place, u64)>,
    /// The largest names with their bytes and place, largest first.
    pub largest: Vec<(String, Place, u64)>,
    /// Its limits.
    pub limits: Vec<(crate::refusal::Limit, u64)>,
    /// The users that have something in the domain; only the one that asks, if it is not the broker's.
    pub users: Vec<UserInfo>,
    /// The seats of the broker's own user, and those of each other user.
    pub seats: [u64; 2],
}
