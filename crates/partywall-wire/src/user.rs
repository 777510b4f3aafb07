//! Users in messages: what belongs to which user, and what a user is refused.

use serde::{Deserialize, Serialize};

/// What a process of one user may not do to what belongs to another user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OtherUsers {
    /// Open it: it was not created shared.
    Open {
        /// The name.
        name: String,
    },
    /// Create or replace something under a name of theirs.
    Create {
        /// The name of the other user. It may be the beginning of the name that was asked for, or go on behind it.
        name: String,
    },
    /// Remove a name.
    Remove {
        /// The name.
        name: String,
    },
    /// End the waits for a timeline.
    Abandon {
        /// The name.
        name: String,
    },
    /// Retry or purge a task of a queue, or tidy it up in another way.
    Tasks {
        /// The queue.
        name: String,
    },
    /// See a name that was not created shared.
    Inspect {
        /// The name.
        name: String,
    },
    /// Evict a member.
    Evict {
        /// The member's pid.
        pid: u32,
    },
    /// Free what a dead member held.
    Free {
        /// The member's pid.
        pid: u32,
    },
    /// End the broker.
    Stop,
    /// Have the broker continue as another program.
    Replace,
}

/// What one user has in a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserInfo {
    /// The user.
    pub uid: u32,
    /// Its members, without the one that asked.
    pub members: u64,
    /// Its names, timelines and semaphores among them.
    pub names: u64,
    /// File descriptors held for its versions and control memory.
    pub fds: u64,
    /// Bytes of its versions and control memory.
    pub bytes: u64,
    /// Leases of its members on versions, timelines and semaphores.
    pub leases: u64,
    /// Its timelines.
    pub timelines: u64,
    /// Its semaphores.
    pub semaphores: u64,
    /// Waiting requests of its members.
    pub waits: u64,
    /// Bytes of its pinned memory on each NUMA node, the largest first.
    pub pinned: Vec<(u32, u64)>,
    /// Its seats in use, without that of the connection that asked.
    pub seats: u64,
    /// Its limits.
    pub limits: Quota,
}

/// The limits on what one user has; `u64::MAX` where it has none beside those of the domain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// Members, including those in quarantine.
    pub members: u64,
    /// Names, including timelines, semaphores and claims.
    pub names: u64,
    /// File descriptors of versions and control memory.
    pub fds: u64,
    /// Bytes of versions and control memory.
    pub bytes: u64,
    /// Bytes of pinned memory on each NUMA node.
    pub pinned: u64,
    /// Leases of its members.
    pub leases: u64,
    /// Timelines.
    pub timelines: u64,
    /// Semaphores.
    pub semaphores: u64,
    /// Waiting requests of its members.
    pub waits: u64,
}
