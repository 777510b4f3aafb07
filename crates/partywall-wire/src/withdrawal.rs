//! Withdrawals with a deadline: the readers of a name are to drop it by then.

use serde::{Deserialize, Serialize};

use crate::place::Place;

/// What happens to readers that have not dropped a withdrawn name by the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Then {
    /// Nothing: the memory stays until the last reader drops it.
    Wait,
    /// They get no new view of the memory. Views that they have stay valid, and so do the mappings.
    Stale,
    /// They are evicted ([`crate::Call::Evict`]), except the member that withdrew the name. The memory is freed once
    /// their deaths are proved.
    Evict,
}

names!(Then {
    Wait => "wait",
    Stale => "stale",
    Evict => "evict",
});

/// A deadline, as a member asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// Milliseconds from now.
    pub after: u64,
    /// What happens then.
    pub then: Then,
}

/// Why a version that a member has open allows no new views.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Staleness {
    /// The deadline of its withdrawal has passed with [`Then::Stale`].
    Withdrawn(Notice),
    /// The memory at this place is lost.
    DeviceLost(Place),
}

/// A withdrawal with a deadline, as readers learn of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Notice {
    /// The process that withdrew the name.
    pub pid: u32,
    /// When it did, in milliseconds since 1970.
    // Names of fields are the keys of the command's JSON; messages contain none.
    #[serde(rename = "at_ms")]
    pub at: u64,
    /// The deadline, in milliseconds since 1970.
    #[serde(rename = "until_ms")]
    pub until: u64,
    /// What happens then.
    pub then: Then,
}
