//! The reasons for which a broker refuses a request. The library turns them into advice in one place.

use serde::{Deserialize, Serialize};

use crate::{
    member::{MemberState, Whom},
    name::Name,
    object::ObjectKind,
    place::Place,
    user::OtherUsers,
    watch::Named,
    withdrawal::Notice,
};

/// Why a request was refused. The broker's state is as it was before the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// No segment, pool, topic or queue has this name. `near` are existing names that look like it.
    NotFound {
        /// The name asked for.
        name: Name,
        /// A few existing names close to it.
        near: Vec<Name>,
        /// Objects of other kinds with exactly this name.
        is: Vec<Named>,
        /// How it ended, if it existed less than a minute ago.
        ended: Option<Box<NameEnd>>,
    },
    /// The name belonged to legacy memory and ended with its publication, or was lost with its GPU, less than a minute
    /// ago. Publishing or committing again restores it.
    Ended {
        /// The name asked for.
        name: Name,
        /// How it ended.
        end: NameEnd,
    },
    /// The name exists but this version does not, and never will again: numbers restart only when no version of a name
    /// is left.
    VersionNotFound {
        /// The name asked for.
        name: Name,
        /// The version asked for.
        version: u64,
        /// The latest one, if the name still has one.
        latest: Option<u64>,
    },
    /// The name is being withdrawn: its readers are to drop it by a deadline, which cannot be changed.
    Withdrawing {
        /// The name.
        name: Name,
        /// The withdrawal.
        notice: Notice,
    },
    /// The deadline of the version's withdrawal has passed, so no member gets another view of it.
    Withdrawn {
        /// The name.
        name: Name,
        /// The version.
        version: u64,
        /// The withdrawal.
        notice: Notice,
    },
    /// The version's GPU was reset or has failed, or its driver was reloaded, and the version's memory is lost.
    DeviceLost {
        /// The name.
        name: Name,
        /// The version.
        version: u64,
        /// Where the memory was.
        place: Place,
    },
    /// The name exists, and the commit required that it did not.
    NameExists {
        /// The name.
        name: Name,
        /// Its latest version.
        version: u64,
        /// What it is.
        is: Named,
    },
    /// A read-write open of a version that was not made mutable.
    ReadOnly {
        /// The name.
        name: Name,
        /// The version.
        version: u64,
    },
    /// The version cannot grow by this request.
    CannotGrow {
        /// The name.
        name: Name,
        /// The version.
        version: u64,
        /// Why.
        why: NoGrowth,
    },
    /// The queue does not hold a segment by this number: it was detached, or never attached.
    NotAttached {
        /// The queue.
        queue: Name,
        /// The number.
        attachment: u32,
    },
    /// The segment cannot be detached: tasks name it that are pending, claimed or dead letters.
    AttachmentInUse {
        /// The queue.
        queue: Name,
        /// Its version.
        queue_version: u64,
        /// The segment.
        name: Name,
        /// The segment's version.
        version: u64,
        /// How many tasks name it.
        tasks: u32,
        /// One of them: its place, and how many tasks the place has held.
        first: (u32, u64),
    },
    /// No queue can hold memory of [`crate::Kind::Legacy`], which goes with its publisher.
    CannotHold {
        /// The segment.
        name: Name,
        /// Its version.
        version: u64,
    },
    /// No timeline or semaphore has this name. `near` are existing names that look like it.
    ObjectNotFound {
        /// What was asked for.
        kind: ObjectKind,
        /// The name asked for.
        name: Name,
        /// A few existing names of the kind close to it.
        near: Vec<Name>,
        /// Objects of other kinds with exactly this name.
        is: Vec<Named>,
    },
    /// The timeline has a writer.
    WriterExists {
        /// The timeline.
        name: Name,
        /// The writer.
        pid: u32,
    },
    /// The semaphore exists with another number of permits.
    WrongMaximum {
        /// The semaphore.
        name: Name,
        /// Permits that it has.
        maximum: u32,
        /// Permits that were asked for.
        asked: u32,
    },
    /// The name breaks the rules of [`crate::name::check_name`].
    BadName {
        /// The name as given.
        name: String,
        /// The rule.
        why: String,
    },
    /// The pattern matches no name.
    BadPattern {
        /// The pattern as given.
        pattern: String,
        /// The rule that it breaks.
        why: String,
    },
    /// A file descriptor is not of the kind that the message states.
    BadFd {
        /// Its index among the message's file descriptors, from 0.
        index: u32,
        /// What is wrong.
        fault: FdFault,
    },
    /// The request contradicts itself. A correct library never sends it.
    Invalid {
        /// What is wrong.
        why: String,
    },
    /// The machine has no such NUMA node.
    NoSuchNode {
        /// The number of the node.
        node: u32,
        /// The highest number that a node may have.
        highest: u32,
    },
    /// A limit of the broker is reached.
    Limit {
        /// Which.
        limit: Limit,
        /// Its value.
        allowed: u64,
        /// The value that the request would have led to.
        needed: u64,
        /// The processes that have most of it, as far as the one that asks may see them; the largest first. Empty for
        /// limits of one process or one object.
        holders: Vec<LimitHolder>,
    },
    /// The user's share of a limit is reached.
    Quota {
        /// The user.
        uid: u32,
        /// Which limit.
        limit: Limit,
        /// The user's share.
        allowed: u64,
        /// What the user has of it.
        held: u64,
        /// The value that the request would have led to.
        needed: u64,
        /// The processes that have most of it, as far as the one that asks may see them; the largest first.
        holders: Vec<LimitHolder>,
    },
    /// It belongs to another user.
    OtherUser {
        /// What was asked for.
        what: OtherUsers,
        /// The user to which it belongs.
        owner: u32,
        /// The user that asked.
        uid: u32,
    },
    /// Too many file descriptors have been sent and not read. The kernel counts them per user.
    Unread {
        /// Number of such descriptors, of the asking process or of all.
        unread: u64,
        /// The limit on that number.
        allowed: u64,
        /// Pids of the processes that have not read for the longest time. Empty if the asking process itself has to
        /// read.
        pids: Vec<u32>,
    },
    /// The kernel refused an operation that the request needs.
    System {
        /// What.
        what: String,
        /// Why.
        errno: i32,
    },
    /// The lease, claim or ticket is not this member's, or no longer exists.
    Stale {
        /// Which of them.
        what: Handle,
    },
    /// No member has this pid or number. `near` are pids of members that look like it.
    NoSuchMember {
        /// The member that was asked for.
        whom: Whom,
        /// A few pids of members.
        near: Vec<u32>,
    },
    /// The connection is an operator's, so it can only list, inspect and remove.
    NotMember,
    /// A member cannot evict itself.
    NotYourself,
    /// The member is dead, and its leases are in quarantine. They can only be freed.
    IsUnproven {
        /// Its pid.
        pid: u32,
    },
    /// Nothing of the member is in quarantine, because its process is not known to be gone.
    NotUnproven {
        /// Its pid.
        pid: u32,
        /// Its state.
        state: MemberState,
    },
    /// The asking member was evicted.
    Evicted {
        /// The pid of the process that evicted it.
        by: u32,
        /// When, in milliseconds since 1970.
        at: u64,
    },
    /// The peer runs as another user, which the broker does not admit.
    WrongUser {
        /// The broker's user id.
        broker: u32,
        /// The peer's.
        peer: u32,
    },
    /// The file descriptor of the handshake is not a pidfd of the process that connected.
    NoPidfd {
        /// What was found instead.
        why: String,
    },
    /// Members on the simulated CUDA driver and members on the real one never share a domain. The first member decides
    /// the kind of the domain, for as long as the domain has a member or GPU memory.
    OtherDriver {
        /// True if the domain's members run on the simulated driver.
        simulated: bool,
    },
    /// The two processes speak different protocols. Both versions are in the fixed heads.
    Protocol,
    /// The member cannot resume: it is unknown here, proved dead, or another process.
    CannotResume,
    /// `stop` without `force` while something is held.
    InUse {
        /// Number of names, including those of timelines and semaphores.
        names: u64,
        /// Number of other members.
        members: u64,
    },
    /// The broker is ending. A new one can be started.
    ShuttingDown,
    /// The broker goes on as it was, and no other program continues for it.
    NotReplaced {
        /// Why.
        why: NoReplacement,
    },
}

impl Refusal {
    /// Returns the refusal of a request that contradicts itself.
    pub fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid { why: why.into() }
    }
}

/// What a member names by a number that it got from the broker, or gave to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Handle {
    /// [`LeaseId`](crate::LeaseId).
    Lease,
    /// [`ClaimId`](crate::ClaimId).
    Claim,
    /// [`RequestId`](crate::RequestId).
    Ticket,
}

/// Why no other program continues for a broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NoReplacement {
    /// It has no supervisor that could execute the program, or its journal cannot be written.
    Unsupervised,
    /// Another process is replacing it at this moment.
    InProgress,
    /// The asking process cannot be shown to be in the namespaces of the broker. A process in a container must not
    /// start programs outside.
    Elsewhere {
        /// What was found.
        found: String,
    },
    /// The program cannot continue.
    Program {
        /// What it said, or why it said nothing.
        said: String,
    },
}

/// Why a version does not grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum NoGrowth {
    /// It is frozen, or its kind cannot grow.
    Fixed,
    /// Only its committer's lease may grow it, and this lease is another.
    NotCommitter,
    /// Its committer has released its lease.
    CommitterGone,
    /// It has grown more often than the request states.
    Behind,
    /// It would exceed what was reserved for it.
    Reserved {
        /// Bytes that were reserved.
        reserved: u64,
        /// Bytes that it would need.
        needed: u64,
    },
}

/// The end of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameEnd {
    /// The version that was the latest.
    pub version: u64,
    /// How it ended.
    pub ending: Ending,
    /// The process that ended it: its owner, its remover or its last user; 0 if its memory was lost.
    pub pid: u32,
    /// The command line of that process; empty if its memory was lost.
    pub command: String,
    /// When, in milliseconds since 1970.
    pub at: u64,
}

/// How a name ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Ending {
    /// Its owner dropped it or left.
    Withdrawn,
    /// Its owner is proved dead.
    OwnerDied,
    /// A member removed it, or evicted its owner.
    Removed,
    /// The last member that had it open dropped it, left or died.
    Unused,
    /// The memory at this place is lost: its GPU was reset or has failed, or the driver was reloaded.
    DeviceLost(Place),
}

/// What is wrong with a donated file descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FdFault {
    /// It never arrived: the broker had no free file descriptor for it.
    Missing,
    /// Neither a memfd nor a file of the NVIDIA driver.
    WrongType {
        /// What it is.
        found: String,
    },
    /// A memfd that can still shrink or grow, or that can still be written although its version is frozen.
    NotSealed {
        /// The seal that is missing.
        seal: String,
    },
    /// A memfd of another length than the message says.
    WrongSize {
        /// The length that the message states.
        said: u64,
        /// The length of the file.
        found: u64,
    },
}

/// A process that has part of what a limit counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitHolder {
    /// The process: the one that is connected, has the leases, waits or has the object open, or that created the
    /// version.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// How much it has, in what the limit counts. A timeline or semaphore counts for each process that has it open.
    pub held: u64,
}

/// The limits that a broker enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Limit {
    /// Bytes of all versions together.
    Bytes,
    /// Bytes of pinned memory on one NUMA node: this one, or any where none is meant.
    Pinned(Option<u32>),
    /// Names.
    Names,
    /// File descriptors held for versions and for control memory.
    Fds,
    /// Members.
    Clients,
    /// Members of one process.
    ClientsOfProcess,
    /// Members whose connections one process has closed without [`crate::Call::Bye`].
    HungUp,
    /// Operators of one process.
    Operators,
    /// Connections of other users than the broker's that have not introduced themselves.
    Handshakes,
    /// Bytes of a message.
    Message,
    /// Waiting requests of all members together.
    Waits,
    /// Leases of all members together.
    Leases,
    /// Chunks of one version.
    Chunks,
    /// Growths of one version.
    Growths,
    /// Timelines, including cells of earlier incarnations that members still have open.
    Timelines,
    /// Semaphores.
    Semaphores,
    /// Segments attached to one queue.
    Attachments,
    /// Leases of one member.
    LeasesOfMember,
    /// Waiting requests of one member.
    WaitsOfMember,
}
