//! Members in messages: their states, evictions, and the end of quarantines.

use serde::{Deserialize, Serialize};

/// The state of a member. If several apply, the last of them in this list is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Connected.
    Alive,
    /// Connected, and its heartbeat is late: it is stopped, or its machine is too busy to let it run. The broker takes
    /// no action.
    Hung,
    /// Its CUDA context is broken. It cannot use a GPU any more, and keeps what it holds until its process ends.
    LostContext,
    /// Its connection ended without proof of its death. It may come back, and gets nothing new until then.
    Suspect,
    /// It was evicted. It gets nothing new, and keeps what it holds until its process ends.
    Evicted,
    /// It has exited, but a child that it forked still holds its connection, and so perhaps its memory.
    HeldByChild,
    /// It is gone, without proof that its work on the memory is over (see [`Doubt`]). Its leases are in quarantine.
    Unproven,
    /// Its death is proved, and its memory is being freed.
    Dead,
}

names!(MemberState {
    Alive => "alive",
    Hung => "hung",
    LostContext => "lost_context",
    Suspect => "suspect",
    Evicted => "evicted",
    HeldByChild => "held_by_child",
    Unproven => "unproven",
    Dead => "dead",
});

/// Why the end of a member's process does not prove that its work on the memory is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// It is a client of MPS, whose server may continue its work on the GPU after its process has ended.
    Mps,
    /// The broker has no pidfd of it, so it sees the end of its connection, not of its process.
    NoPidfd,
}

names!(Doubt {
    Mps => "mps",
    NoPidfd => "no_pidfd",
});

/// What a member waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Awaited {
    /// The commit of a version.
    Commit,
    /// The withdrawal of the version.
    Withdrawal,
    /// The next growth of the version.
    Growth,
    /// A value of a timeline.
    Timeline,
}

names!(Awaited {
    Commit => "commit",
    Withdrawal => "withdrawal",
    Growth => "growth",
    Timeline => "timeline",
});

/// A wait of a member for a name or a timeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitInfo {
    /// What it waits for.
    pub on: Awaited,
    /// The name of the segment or timeline.
    pub name: String,
    /// The version, absent if any will do, or the value of the timeline.
    pub target: Option<u64>,
    /// The pid of the process that can end the wait, as far as it is known: the builder or the committer of the
    /// version, or the writer of the timeline.
    pub by: Option<u32>,
    /// Milliseconds since it began, of a wait for a timeline.
    pub ms: Option<u64>,
}

/// A member in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Its number.
    pub member: u64,
    /// Its pid as the broker sees it, or as the member reports it if it is in another PID namespace.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its command line.
    pub command: String,
    /// Its state.
    pub state: MemberState,
    /// Why the end of its process will not prove that its work is over, if so.
    pub doubt: Option<Doubt>,
    /// The directory of the MPS daemon whose client it is, as the member reports it.
    pub mps: Option<String>,
    /// Milliseconds since its last heartbeat; absent without one.
    // Names of fields and variants are the keys of the command's JSON; messages contain none.
    #[serde(rename = "quiet_ms")]
    pub quiet: Option<u64>,
    /// Leases it holds.
    pub leases: u32,
    /// Timelines that it writes.
    pub timelines: u32,
    /// Permits of semaphores that it holds; absent if there are too many to count.
    pub permits: Option<u32>,
    /// Blocks of pools and topics that it holds; absent if there are too many to count.
    pub blocks: Option<u32>,
    /// Tasks of queues that it works on; absent if there are too many to count.
    pub tasks: Option<u32>,
    /// Bytes of the versions that it holds leases on, each counted once; for a dead member, bytes that are being freed.
    pub bytes: u64,
    /// When it joined, in milliseconds since 1970.
    #[serde(rename = "since_ms")]
    pub since: u64,
    /// Its first waits for names, at most four, and its longest wait for a timeline. A wait for a timeline is listed
    /// once it has lasted for about half a second.
    pub waits: Vec<WaitInfo>,
    /// True if it runs on the simulated CUDA driver.
    pub simulated: bool,
}

/// Selects members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whom {
    /// All members with this pid: a process has one for each of its connections.
    Pid(u32),
    /// The member with this number.
    Member(u64),
}

impl From<u32> for Whom {
    fn from(pid: u32) -> Self {
        Self::Pid(pid)
    }
}

/// A member that was evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Its number.
    pub member: u64,
    /// Its pid, as in [`MemberInfo`].
    pub pid: u32,
    /// Its command line.
    pub command: String,
    /// Leases that stay in quarantine until its death is proved.
    pub leases: u32,
    /// Bytes of the versions of these leases.
    pub bytes: u64,
    /// The result of the signal.
    pub kill: Kill,
}

/// The result of killing a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kill {
    /// The request did not ask for a signal.
    NotAsked,
    /// SIGKILL was sent.
    Sent,
    /// It has exited already.
    Exited,
    /// The broker has no pidfd of the process, and its pid alone may belong to another process by now.
    NoPidfd,
    /// The kernel refused, with this errno.
    Refused(i32),
}

names!(Kill {
    NotAsked => "not_asked",
    Sent => "sent",
    Exited => "exited",
    NoPidfd => "no_pidfd",
    Refused => "refused",
});

impl Kill {
    /// Returns the kernel's errno, if it refused.
    pub fn errno(self) -> Option<i32> {
        match self {
            Self::Refused(errno) => Some(errno),
            _ => None,
        }
    }
}

/// A dead member whose holdings were freed without a proof that its work on them is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freed {
    /// Its number.
    pub member: u64,
    /// Its pid, as in [`MemberInfo`].
    pub pid: u32,
    /// Its command line.
    pub command: String,
    /// Leases that it held.
    pub leases: u32,
    /// Bytes of the versions of these leases. Other members may hold them, too.
    pub bytes: u64,
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
