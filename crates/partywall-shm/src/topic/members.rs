//! The ports of publishers and subscribers, which only the port's owner writes. Others change only the [`PortSlot`].
//!
//! An owner may be killed between any two steps: it moves its cursor only after the hold is written, sets the timeline
//! of a lane before it publishes the first sample of that lane, and the other words are only for people.

use super::{LINES, port::PortSlot};
use crate::sync::{AtomicU64, Ordering};

/// A publisher's port.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Publishing {
    pub(super) port: PortSlot,
    /// Samples published.
    pub(super) published: AtomicU64,
    /// The time since which it waits for a subscriber, in milliseconds; 0 if it does not wait.
    pub(super) blocked_since: AtomicU64,
    /// The id of that subscriber.
    pub(super) blocked_by: AtomicU64,
    pub(super) zero: [AtomicU64; 12],
    pub(super) lanes: [Lane; LANES],
}

/// The timeline of one of a publisher's lanes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lane {
    /// Its cell: the slab in the upper half, the cell in the lower one.
    cell: AtomicU64,
    /// The cell's incarnation + 1; 0: it has no timeline.
    incarnation: AtomicU64,
}

/// A subscriber's port.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Subscribing {
    pub(super) port: PortSlot,
    /// The next position that it will read.
    pub(super) cursor: AtomicU64,
    /// How many samples it may fall behind; 0: publishers wait for it.
    pub(super) queue: AtomicU64,
    pub(super) received: AtomicU64,
    /// Samples that it did not receive, because they were overwritten or it wanted later ones.
    pub(super) dropped: AtomicU64,
    pub(super) zero: [AtomicU64; 11],
}

/// Some of a subscriber's holds. A hold is a hazard pointer: 0, or 1 + the index of a block that must not be reused.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Holds(pub(super) [AtomicU64; HOLDS]);

/// The most streams of a publisher that complete samples without waiting for each other. A model has two.
pub const LANES: usize = if cfg!(loom) { 2 } else { 32 };

/// Holds in one [`Holds`].
pub(super) const HOLDS: usize = LINES / 8;

impl Lane {
    /// Returns the cell of its timeline, if it has one.
    pub(super) fn timeline(&self) -> Option<TimelineCell> {
        // Pairs with `set_timeline`.
        let incarnation = self.incarnation.load(Ordering::Acquire).checked_sub(1)? as u32;
        let cell = self.cell.load(Ordering::Relaxed);
        Some(TimelineCell { slab: (cell >> SLAB) as u32, cell: cell as u32, incarnation })
    }

    pub(super) fn set_timeline(&self, cell: TimelineCell) {
        self.cell.store(u64::from(cell.slab) << SLAB | u64::from(cell.cell), Ordering::Relaxed);
        // Pairs with the load in `timeline`.
        self.incarnation.store(u64::from(cell.incarnation) + 1, Ordering::Release);
    }

    /// Forgets the timeline, before the port opens for another publisher.
    pub(super) fn clear(&self) {
        self.incarnation.store(0, Ordering::Relaxed);
        self.cell.store(0, Ordering::Relaxed);
    }
}

/// One incarnation of a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineCell {
    /// The number of the slab.
    pub slab: u32,
    /// The cell in the slab.
    pub cell: u32,
    /// The incarnation of the timeline.
    pub incarnation: u32,
}

#[cfg(all(test, loom))]
mod new {
    use super::{AtomicU64, Holds, Lane, PortSlot, Publishing, Subscribing};

    fn zero() -> AtomicU64 {
        AtomicU64::new(0)
    }

    impl Publishing {
        pub(in super::super) fn new() -> Self {
            Self {
                port: PortSlot::new(),
                published: zero(),
                blocked_since: zero(),
                blocked_by: zero(),
                zero: std::array::from_fn(|_| zero()),
                lanes: std::array::from_fn(|_| Lane { cell: zero(), incarnation: zero() }),
            }
        }
    }

    impl Subscribing {
        pub(in super::super) fn new() -> Self {
            Self {
                port: PortSlot::new(),
                cursor: zero(),
                queue: zero(),
                received: zero(),
                dropped: zero(),
                zero: std::array::from_fn(|_| zero()),
            }
        }
    }

    impl Holds {
        pub(in super::super) fn new() -> Self {
            Self(std::array::from_fn(|_| zero()))
        }
    }
}

shared!(Publishing { port, published, blocked_since, blocked_by, zero, lanes });
shared!(Lane { cell, incarnation } bits { SLAB });
shared!(Subscribing { port, cursor, queue, received, dropped, zero });
shared!(Holds { 0 });

/// The first bit of a cell's slab.
const SLAB: u32 = 32;
