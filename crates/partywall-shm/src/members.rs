//! The members' rows: one cache line for each process that a domain can have, written by that process alone.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `heartbeat: u64`, milliseconds of `CLOCK_MONOTONIC` | its member; the broker, before it gives the row out |
//!
//! A row belongs to a member from its welcome until nothing of it is left, and only then to another. The words are
//! hints: a late heartbeat is reported, and nothing else follows from it. A row that a hostile member has written
//! makes another seem hung, or not hung.

use std::os::fd::{AsFd, OwnedFd};

use partywall_os::{
    Errno,
    map::SharedMap,
    memfd::{self, Draft},
};

/// The number of no row: what it holds belongs to an object itself.
pub const NOBODY: u16 = u16::MAX;

/// Rows that there can be: each has a number of 16 bits, but [`NOBODY`].
pub const MAX_ROWS: usize = NOBODY as usize;

/// Bytes of a row.
pub const ROW_BYTES: usize = 64;

/// Rows of members, mapped.
#[derive(Debug)]
pub struct Members(SharedMap);

impl Members {
    /// The memory of `rows` rows, zeroed, to be mapped by everybody.
    ///
    /// # Errors
    /// As [`Draft::create`].
    pub fn create(rows: usize) -> Result<OwnedFd, Errno> {
        Draft::create("partywall:members", rows as u64 * ROW_BYTES as u64)?.share()
    }

    /// Maps rows that [`Members::create`] has made.
    ///
    /// # Errors
    /// `EINVAL` if it is no whole number of rows; else as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> Result<Self, Errno> {
        if !memfd::len(&fd)?.is_multiple_of(ROW_BYTES as u64) {
            return Err(Errno::INVAL);
        }
        SharedMap::writable(fd).map(Self)
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.0.len() / ROW_BYTES
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells that the member of `row` is well [`now`]. Nothing happens where there is no such row.
    pub fn beat(&self, row: u16, now: u64) {
        if let Some(word) = self.0.slice(usize::from(row) * ROW_BYTES, 1) {
            word.set(0, now);
        }
    }

    /// When the member of `row` was well for the last time.
    pub fn heartbeat(&self, row: u16) -> Option<u64> {
        Some(self.0.slice(usize::from(row) * ROW_BYTES, 1)?.get(0))
    }
}

/// Milliseconds of `CLOCK_MONOTONIC`, which all processes of a machine read alike.
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
