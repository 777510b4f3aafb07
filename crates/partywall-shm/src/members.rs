//! The rows of members: one cache line per possible member of a domain, written by that member alone. The domain's
//! [traces](crate::trace) follow them.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `heartbeat: u64`, milliseconds of `CLOCK_MONOTONIC` | its member; the broker, before it assigns the row |
//!
//! A row belongs to a member from its welcome until nothing of the member is left. Then another member may get it. The
//! words are hints: a late heartbeat is reported and has no other effect. A member that breaks the rules and writes
//! another's row only makes that member seem hung or alive.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

#[cfg(not(loom))]
use crate::trace;
use partywall_os::{
    Errno,
    map::{SharedMap, SharedSlice},
    memfd::{self, Draft},
};

/// The number of no row. Slots with this row belong to the object itself.
pub const NOBODY: u16 = u16::MAX;

/// The maximum number of rows: each has a 16-bit number other than [`NOBODY`].
pub const MAX_ROWS: usize = NOBODY as usize;

/// Bytes of a row.
pub const ROW_BYTES: usize = 64;

#[cfg(not(loom))]
const TRACES: usize = trace::BYTES;
/// Models have no mapped memory.
#[cfg(loom)]
const TRACES: usize = 0;

/// The mapped rows of members.
#[derive(Debug)]
pub struct Members(Arc<SharedMap>);

impl Members {
    /// Creates the memory of `rows` rows and of the traces, zeroed.
    ///
    /// # Errors
    /// As [`Draft::create`].
    pub fn create(rows: usize) -> Result<OwnedFd, Errno> {
        Draft::create("partywall:members", (rows * ROW_BYTES + TRACES) as u64)?.share()
    }

    /// Maps rows that [`Members::create`] has created.
    ///
    /// # Errors
    /// `EINVAL` if it is not the traces and a whole number of rows; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> Result<Self, Errno> {
        let rows = memfd::len(&fd)?.checked_sub(TRACES as u64);
        if !rows.is_some_and(|rows| rows.is_multiple_of(ROW_BYTES as u64)) {
            return Err(Errno::INVAL);
        }
        SharedMap::writable(fd).map(Arc::new).map(Self)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.0.len().saturating_sub(TRACES) / ROW_BYTES
    }

    /// Returns the traces of the domain.
    #[cfg(not(loom))]
    pub fn traces(&self) -> trace::Traces {
        trace::Traces::at(&self.0, self.len() * ROW_BYTES).expect("mapping has checked the length")
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores a heartbeat of the member of `row` at [`now`]. Does nothing if the row does not exist.
    pub fn beat(&self, row: u16, now: u64) {
        if let Some(word) = self.word(row) {
            word.set(0, now);
        }
    }

    /// Returns the time of the last heartbeat of `row`.
    pub fn heartbeat(&self, row: u16) -> Option<u64> {
        Some(self.word(row)?.get(0))
    }

    fn word(&self, row: u16) -> Option<SharedSlice<'_, u64>> {
        let row = usize::from(row);
        if row < self.len() { self.0.slice(row * ROW_BYTES, 1) } else { None }
    }
}

/// Returns `CLOCK_MONOTONIC` in milliseconds, which is the same in all processes of a machine.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The clock starts when the machine starts, so neither value is negative.
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds, as [`now`].
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // 2⁶⁴ ns are 584 years.
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_are_seen_through_every_mapping() {
        let fd = Members::create(3).unwrap();
        let ours = Members::map(&fd).unwrap();
        let theirs = Members::map(&fd).unwrap();
        ours.beat(2, 77);
        ours.beat(3, 78);
        assert_eq!((theirs.len(), theirs.heartbeat(0), theirs.heartbeat(2)), (3, Some(0), Some(77)));
        assert_eq!(theirs.heartbeat(3), None);
        let odd = Draft::create("odd", 100).unwrap().share().unwrap();
        assert_eq!(Members::map(odd).err(), Some(Errno::INVAL));
    }
}
