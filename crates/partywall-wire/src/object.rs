//! Timelines and semaphores in messages.

use serde::{Deserialize, Serialize};

use crate::{id::LeaseId, member::HolderInfo};

/// The kinds of objects in control memory. Each kind has names of its own: a segment, a timeline and a semaphore may
/// share a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A 64-bit value that only grows.
    Timeline,
    /// A number of permits.
    Semaphore,
}

/// An opened timeline. File descriptors: its slab, which the member may have mapped already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedTimeline {
    /// The lease that keeps the name. The member releases it only when none of its streams waits for the timeline any
    /// more, because the cell is reused once no lease that led to it remains.
    pub lease: LeaseId,
    /// The number of the slab of the present incarnation. No other slab of the broker ever gets it.
    pub slab: u32,
    /// The cell in that slab.
    pub cell: u32,
    /// The number of that incarnation. Members that open the name before its first writer share incarnation 1 with it.
    pub incarnation: u32,
    /// True if this lease is the writer's.
    pub writer: bool,
}

/// How a timeline's incarnation ended before it reached an awaited value. Control memory contains its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[repr(u32)]
#[serde(rename_all = "snake_case")]
pub enum TimelineEnding {
    /// The writer's process is proved dead.
    OwnerDied = 1,
    /// The writer's CUDA context broke.
    OwnerFaulted = 2,
    /// The writer closed it.
    Closed = 3,
    /// Its writer or an operator abandoned it.
    Abandoned = 4,
    /// The broker is gone, so the death of the writer can no longer be noticed.
    BrokerGone = 5,
    /// The writer was evicted from the domain.
    Evicted = 6,
}

names!(TimelineEnding {
    OwnerDied => "owner_died",
    OwnerFaulted => "owner_faulted",
    Closed => "closed",
    Abandoned => "abandoned",
    BrokerGone => "broker_gone",
    Evicted => "evicted",
});

/// A timeline or a semaphore in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ObjectInfo {
    /// A timeline.
    Timeline(TimelineInfo),
    /// A semaphore.
    Semaphore(SemaphoreInfo),
}

impl ObjectInfo {
    /// Returns the kind of the object.
    pub fn kind(&self) -> ObjectKind {
        match self {
            Self::Timeline(_) => ObjectKind::Timeline,
            Self::Semaphore(_) => ObjectKind::Semaphore,
        }
    }

    /// Returns the name of the object.
    pub fn name(&self) -> &str {
        match self {
            Self::Timeline(timeline) => &timeline.name,
            Self::Semaphore(semaphore) => &semaphore.name,
        }
    }
}

/// A timeline in a listing. The numbers are read from control memory when asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineInfo {
    /// The name.
    pub name: String,
    /// The number of its present incarnation.
    pub incarnation: u32,
    /// The pid of the writer, if it has one.
    pub writer: Option<u32>,
    /// The last value that was signalled.
    pub value: u64,
    /// The highest value that was promised.
    pub announced: u64,
    /// How its present incarnation ended, if it has.
    pub ending: Option<TimelineEnding>,
    /// Leases on it.
    pub leases: u32,
    /// The user to which it belongs.
    pub uid: u32,
    /// True if other users may open it.
    pub shared: bool,
}

/// A semaphore in a listing. The numbers are read from control memory when asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SemaphoreInfo {
    /// The name.
    pub name: String,
    /// Number of permits.
    pub maximum: u32,
    /// Permits that are held.
    pub held: u32,
    /// Waiting acquirers.
    pub waiting: u32,
    /// Leases on it.
    pub leases: u32,
    /// The user to which it belongs.
    pub uid: u32,
    /// True if other users may open it.
    pub shared: bool,
}

/// Everything about one timeline or semaphore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectDetail {
    /// As in a listing.
    pub info: ObjectInfo,
    /// The members that have it open.
    pub holders: Vec<ObjectHolder>,
}

/// A member that has a timeline or semaphore open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectHolder {
    /// The member.
    pub holder: HolderInfo,
    /// Permits that it holds; 0 for a timeline.
    pub permits: u32,
}
