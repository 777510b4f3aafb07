//! The rows of one user's members: one cache line per possible member of a domain, written by that member alone. The
//! [traces](crate::trace) of these members follow them.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `heartbeat: u64`, milliseconds, as [`now`] counts | its member; the broker, before it assigns the row |
//! | 8 | `lease: u64`, the member's lease on the timeline that it waits for; 0 without a wait | its member |
//! | 16 | `value: u64`, for which it waits | its member |
//! | 24 | `since: u64`, when the wait began, as `heartbeat` | its member |
//!
//! A row belongs to a member from its welcome until nothing of the member is left. Then another member may get it. The
//! words are hints: they are reported and have no other effect. A member that breaks the rules and writes another's row
//! only makes that member seem hung, alive or waiting. No lease of a former member belongs to the next one, so the
//! words of a wait need no reset. They are not read in one step: a listing may show a wait with the value of the next
//! one.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

#[cfg(not(loom))]
use crate::trace;
use partywall_os::{
    Errno, clock,
    map::{SharedMap, SharedSlice},
    memfd::{self, Draft},
};

/// The number of no row. Slots with this row belong to the object itself.
pub const NOBODY: u16 = u16::MAX;

/// The maximum number of rows: each has a 16-bit number other than [`NOBODY`].
pub const MAX_ROWS: usize = NOBODY as usize;

/// Bytes of a row.
pub const ROW_BYTES: usize = 64;

/// A member's wait for a timeline, as its row shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineWait {
    /// The member's lease on the timeline.
    pub lease: u64,
    /// The value.
    pub value: u64,
    /// When it began, as [`now`] counts.
    pub since: u64,
}

/// Change the text whenever the bytes change, and never for a name alone.
#[cfg(not(loom))]
pub(crate) const LAYOUT_HASH: u64 =
    crate::layout_hash(b"rows64: heartbeat8 lease8 value8 since8 0:32; then the traces");

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

    /// Returns the traces of these members.
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
        if let Some(words) = self.words(row) {
            words.set(HEARTBEAT, now);
        }
    }

    /// Returns the time of the last heartbeat of `row`.
    pub fn heartbeat(&self, row: u16) -> Option<u64> {
        Some(self.words(row)?.get(HEARTBEAT))
    }

    /// Stores the wait of the member of `row`, or that it does not wait. Does nothing if the row does not exist.
    pub fn set_wait(&self, row: u16, wait: Option<TimelineWait>) {
        if let Some(words) = self.words(row) {
            let TimelineWait { lease, value, since } = wait.unwrap_or(TimelineWait { lease: 0, value: 0, since: 0 });
            words.set(LEASE, lease);
            words.set(VALUE, value);
            words.set(SINCE, since);
        }
    }

    /// Returns the wait of the member of `row`, if it waits.
    pub fn wait(&self, row: u16) -> Option<TimelineWait> {
        let words = self.words(row)?;
        let wait = TimelineWait { lease: words.get(LEASE), value: words.get(VALUE), since: words.get(SINCE) };
        (wait.lease != 0).then_some(wait)
    }

    fn words(&self, row: u16) -> Option<SharedSlice<'_, u64>> {
        let row = usize::from(row);
        if row < self.len() { self.0.slice(row * ROW_BYTES, WORDS) } else { None }
    }
}

/// The words of a row, by index, and their number.
const HEARTBEAT: usize = 0;
const LEASE: usize = 1;
const VALUE: usize = 2;
const SINCE: usize = 3;
const WORDS: usize = 4;

/// Returns the [clock of the machine](clock) in milliseconds, which is the same in all processes.
pub fn now() -> u64 {
    now_ns() / 1_000_000
}

/// Returns the [clock of the machine](clock) in nanoseconds, as [`now`].
pub fn now_ns() -> u64 {
    clock::monotonic_ns()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_and_waits_are_seen_through_every_mapping() {
        let fd = Members::create(3).unwrap();
        let ours = Members::map(&fd).unwrap();
        let theirs = Members::map(&fd).unwrap();
        ours.beat(2, 77);
        ours.beat(3, 78);
        assert_eq!((theirs.len(), theirs.heartbeat(0), theirs.heartbeat(2)), (3, Some(0), Some(77)));
        assert_eq!(theirs.heartbeat(3), None);
        let wait = TimelineWait { lease: 7, value: 8, since: 9 };
        ours.set_wait(1, Some(wait));
        ours.set_wait(3, Some(wait));
        assert_eq!([0, 1, 2, 3].map(|row| theirs.wait(row)), [None, Some(wait), None, None]);
        assert_eq!((theirs.heartbeat(1), theirs.heartbeat(2)), (Some(0), Some(77)));
        ours.set_wait(1, None);
        assert_eq!(theirs.wait(1), None);
        let odd = Draft::create("odd", 100).unwrap().share().unwrap();
        assert_eq!(Members::map(odd).err(), Some(Errno::INVAL));
    }
}
