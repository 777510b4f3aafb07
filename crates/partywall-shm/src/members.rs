//! The rows of members: one cache line for each member that a domain can have, written by that member alone.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `heartbeat: u64`, milliseconds of `CLOCK_MONOTONIC` | its member; the broker, before it gives the row out |
//!
//! A row belongs to a member from its welcome until nothing of the member is left; then another member may get it. The words
//! are hints: a late heartbeat is reported, and nothing else follows from it. A hostile member that writes another's row makes
//! that member seem hung, or not hung.

use std::os::fd::{AsFd, OwnedFd};

use partywall_os::{
    Errno,
    map::SharedMap,
    memfd::{self, Draft},
};

/// The number of no row: what it holds belongs to the object itself.
pub const NOBODY: u16 = u16::MAX;

/// The most rows: each has a number of 16 bits other than [`NOBODY`].
pub const MAX_ROWS: usize = NOBODY as usize;

/// Bytes of a row.
pub const ROW_BYTES: usize = 64;

/// The mapped rows of members.
#[derive(Debug)]
pub struct Members(SharedMap);

impl Members {
    /// Creates the memory of `rows` rows, zeroed.
    ///
    /// # Errors
    /// As [`Draft::create`].
    pub fn create(rows: usize) -> Result<OwnedFd, Errno> {
        Draft::create("partywall:members", rows as u64 * ROW_BYTES as u64)?.share()
    }

    /// Maps rows that [`Members::create`] has created.
    ///
    /// # Errors
    /// `EINVAL` if it is not a whole number of rows; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> Result<Self, Errno> {
        if !memfd::len(&fd)?.is_multiple_of(ROW_BYTES as u64) {
            return Err(Errno::INVAL);
        }
        SharedMap::writable(fd).map(Self)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.0.len() / ROW_BYTES
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Says that the member of `row` is well [`now`]. Does nothing if there is no such row.
    pub fn beat(&self, row: u16, now: u64) {
        if let Some(word) = self.0.slice(usize::from(row) * ROW_BYTES, 1) {
            word.set(0, now);
        }
    }

    /// Returns when the member of `row` was well for the last time.
    pub fn heartbeat(&self, row: u16) -> Option<u64> {
        Some(self.0.slice(usize::from(row) * ROW_BYTES, 1)?.get(0))
    }
}

/// Returns the milliseconds of `CLOCK_MONOTONIC`, which all processes of a machine read alike.
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // It counts from the machine's start.
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
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
