//! Answers and events, and the versions that they and calls are about.

use serde::{Deserialize, Serialize};

use crate::{
    control::{Control, ControlInfo, Usage},
    id::{ClaimId, LeaseId, MemberId, RequestId},
    member::{Evicted, Freed, HolderInfo, MemberInfo},
    name::Name,
    object::{ObjectDetail, ObjectInfo, OpenedTimeline},
    place::{Kind, Place},
    refusal::Refusal,
    user::UserInfo,
    watch::{Happened, Named},
    withdrawal::{Notice, Staleness},
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

/// What the committer of a version has chosen. Growth does not change it.
///
/// The user to which the version belongs is not part of it: no member chooses that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionFacts {
    /// The kind of memory.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// True if it may be opened for writing.
    pub mutable: bool,
    /// Bytes that it may grow to, all chunks together; 0 if it cannot grow.
    pub reserved: u64,
    /// When the name ends.
    pub lifetime: Lifetime,
    /// True to let other users open it. Refused for a mutable segment, whose readers could write it.
    pub shared: bool,
    /// Makes it a pool, topic or queue. Refused with [`Refusal::NameExists`] if the name exists; the version is mutable
    /// and does not grow.
    pub control: Option<Control>,
}

impl VersionFacts {
    /// Returns what a name with this version is.
    pub fn named(&self) -> Named {
        Named::of(self.control.as_ref())
    }
}

/// A built version. File descriptors: one per chunk unless it has handles, then the table if it is [`Table::Fd`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The name.
    pub name: Name,
    /// What it is.
    pub facts: VersionFacts,
    /// The chunks, in the order of their file descriptors or handles.
    pub chunks: ChunkBytes,
    /// For [`Kind::Legacy`] one per chunk, each an allocation; for other kinds none.
    pub handles: Vec<LegacyHandle>,
    /// The tensor table.
    pub table: Table,
    /// Tensors in the table, for listings.
    pub tensors: u64,
    /// The member with which an `owned` name ends, in place of its committer. It must be alive and of the same user;
    /// refused with [`Refusal::NoSuchMember`] otherwise. Only for segments, and not for [`Kind::Legacy`].
    pub owner: Option<MemberId>,
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
    /// What its committer has chosen.
    pub facts: VersionFacts,
    /// The user to which it belongs.
    pub uid: u32,
    /// The chunks.
    pub chunks: ChunkBytes,
    /// As in [`Commit`].
    pub handles: Vec<LegacyHandle>,
    /// The tensor table.
    pub table: Table,
    /// Number of times that it has grown.
    pub growths: u64,
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
    /// As in [`VersionFacts`].
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
