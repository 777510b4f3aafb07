//! Rows in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall_os::{
    map::{SharedArray, SharedMap},
    memfd,
};

use super::{MAX_ROWS, TimelineWait};
use crate::{
    control::{self, ControlMemory, Numbers, parts},
    trace::{self, RINGS, Traces},
};

/// The mapped rows of members.
#[derive(Debug)]
pub struct Members {
    rows: SharedArray<MemberRow>,
    traces: Traces,
}

/// See the module's documentation.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct MemberRow {
    heartbeat: AtomicU64,
    lease: AtomicU64,
    value: AtomicU64,
    since: AtomicU64,
    zero: [AtomicU64; 4],
}

shared!(MemberRow { heartbeat, lease, value, since, zero });

/// Operations of the broker.
impl Members {
    /// Creates the memory of `rows` rows and of the traces, zeroed.
    ///
    /// # Errors
    /// `InvalidInput` if there are more than [`MAX_ROWS`]; otherwise as memfd_create(2) and mmap(2).
    pub fn create(rows: usize) -> io::Result<OwnedFd> {
        control::create::<Self>(control::narrowed(rows as u64))
    }

    /// Maps rows that this broker, or a former process of it, has created. Unlike [`Members::map`] it does not read the
    /// first words, which members may have overwritten.
    ///
    /// # Errors
    /// `InvalidData` if the length is not that of rows; otherwise as [`SharedMap::writable`].
    pub fn restore(fd: impl AsFd) -> io::Result<Self> {
        let rows = memfd::len(&fd)?.saturating_sub(control::bytes::<Self>(0) as u64) / size_of::<MemberRow>() as u64;
        control::map_as(&Arc::new(SharedMap::writable(fd)?), control::narrowed(rows))
    }

    /// Writes the first words anew. Otherwise a member that has overwritten them would keep processes of its user from
    /// joining.
    pub fn repair(&self) {
        control::write_head::<Self>(self.rows.memory(), self.rows.len() as u32);
    }
}

impl Members {
    /// Maps rows that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory does not contain rows, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the traces of these members.
    pub fn traces(&self) -> Traces {
        self.traces.clone()
    }

    /// Stores a heartbeat of the member of `row` at [`now`](super::now). Does nothing if the row does not exist.
    pub fn beat(&self, row: u16, now: u64) {
        if let Some(row) = self.row(row) {
            row.heartbeat.store(now, Ordering::Relaxed);
        }
    }

    /// Returns the time of the last heartbeat of `row`.
    pub fn heartbeat(&self, row: u16) -> Option<u64> {
        Some(self.row(row)?.heartbeat.load(Ordering::Relaxed))
    }

    /// Stores the wait of the member of `row`, or that it does not wait. Does nothing if the row does not exist.
    pub fn set_wait(&self, row: u16, wait: Option<TimelineWait>) {
        if let Some(row) = self.row(row) {
            let TimelineWait { lease, value, since } = wait.unwrap_or(TimelineWait { lease: 0, value: 0, since: 0 });
            row.lease.store(lease, Ordering::Relaxed);
            row.value.store(value, Ordering::Relaxed);
            row.since.store(since, Ordering::Relaxed);
        }
    }

    /// Returns the wait of the member of `row`, if it waits.
    pub fn wait(&self, row: u16) -> Option<TimelineWait> {
        let row = self.row(row)?;
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let wait = TimelineWait { lease: get(&row.lease), value: get(&row.value), since: get(&row.since) };
        (wait.lease != 0).then_some(wait)
    }

    fn row(&self, row: u16) -> Option<&MemberRow> {
        self.rows.get(usize::from(row))
    }
}

impl ControlMemory for Members {
    const MAGIC: [u8; 8] = *b"PWMEMBER";
    const NAME: &'static str = "table of members";
    type Shape = u32;

    fn check(rows: u32) -> Result<(), String> {
        let why = || format!("a table of members has at most {MAX_ROWS} rows, not {rows}");
        (rows as usize <= MAX_ROWS).then_some(()).ok_or_else(why)
    }

    fn numbers(rows: u32) -> Numbers {
        [rows.into(), 0, 0, 0, 0, 0]
    }

    fn shape_of([rows, ..]: Numbers) -> u32 {
        control::narrowed(rows)
    }

    parts!(|count| {
        rows: MemberRow = count,
        header: trace::TraceHeader = 1,
        rings: trace::Ring = RINGS,
    } => Self { rows, traces: Traces { header, rings } });
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
    }

    // Holds 365.
    #[test]
    fn first_words_that_a_member_has_overwritten_do_not_stop_the_broker() {
        let fd = Members::create(3).unwrap();
        let theirs = Members::map(&fd).unwrap();
        theirs.beat(2, 77);
        let words = SharedMap::writable(&fd).unwrap();
        words.atomics::<AtomicU64>(0, 8).unwrap().iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        assert_eq!(Members::map(&fd).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let ours = Members::restore(&fd).unwrap();
        assert_eq!((ours.len(), ours.heartbeat(2)), (3, Some(77)));
        ours.repair();
        assert_eq!(Members::map(&fd).unwrap().heartbeat(2), Some(77));
        for bytes in [0, 100, memfd::len(&fd).unwrap() + 32] {
            let other = memfd::Draft::create("other", bytes).unwrap().share().unwrap();
            assert_eq!(Members::restore(other).unwrap_err().kind(), io::ErrorKind::InvalidData, "{bytes}");
        }
    }
}
