//! The waits for timelines that listings of members show.
//!
//! Waits do not pass through the broker. Every 250 ms the service thread writes the longest wait of the process to the
//! member's row, from which the broker reads it. A wait that ends earlier costs nothing more: a thread adds its wait
//! only after its first sleep, and streams note their waits for another reason (see
//! [`stream_waits`](super::stream_waits)).

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::members::{self, TimelineWait};
use partywall_wire::LeaseId;

use super::{stream_waits::StreamWaits, timeline_memory::CellRef};

/// The waits of threads and event loops that have lasted for longer than one sleep or poll, and those of streams with a
/// timeout.
#[derive(Debug, Default)]
pub(crate) struct HostWaits(Mutex<Vec<Listed>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listed {
    wait: TimelineWait,
    /// When the wait ran into its timeout, if it did.
    paused: Option<u64>,
}

/// A wait in the list. Dropping it ends the wait.
#[derive(Debug)]
pub(crate) struct HostWait {
    waits: Arc<HostWaits>,
    wait: TimelineWait,
}

impl HostWaits {
    /// Adds a wait, which began at `start`, for a value of the timeline of a lease. It continues a paused one for the
    /// same value.
    pub(crate) fn add(self: &Arc<Self>, lease: LeaseId, value: u64, start: Instant) -> HostWait {
        let mut waits = self.lock();
        let paused =
            |other: &Listed| other.paused.is_some() && (other.wait.lease, other.wait.value) == (lease.0, value);
        let since = match waits.iter().position(paused) {
            Some(i) => waits.swap_remove(i).wait.since,
            None => {
                let passed = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
                members::now().saturating_sub(passed)
            }
        };
        let wait = TimelineWait { lease: lease.0, value, since };
        waits.push(Listed { wait, paused: None });
        HostWait { waits: self.clone(), wait }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Listed>> {
        self.0.lock().ignore_poison()
    }
}

impl HostWait {
    /// Ends the wait, but keeps it in the list for a while, because a caller may wait in slices, as Python does.
    pub(crate) fn pause(self) {
        self.waits.lock().push(Listed { wait: self.wait, paused: Some(members::now()) });
    }
}

impl Drop for HostWait {
    fn drop(&mut self) {
        let mut waits = self.waits.lock();
        if let Some(i) = waits.iter().position(|listed| *listed == Listed { wait: self.wait, paused: None }) {
            waits.swap_remove(i);
        }
    }
}

/// The open waits of streams, with the times at which they were first seen.
///
/// They are kept here because a thread that enqueues work may hold a stream's lock for as long as the stream waits.
#[derive(Debug, Default)]
pub(super) struct ReportedWaits(Vec<(CellRef, TimelineWait)>);

impl ReportedWaits {
    /// Returns the longest wait at the time `now`, if one has lasted for [`LEAST`].
    pub(super) fn longest(&mut self, hosts: &HostWaits, streams: &StreamWaits, now: u64) -> Option<TimelineWait> {
        self.0.retain(|(cell, wait)| cell.is_undecided(wait.value));
        streams.each_first(|lease, cell, value| {
            // An earlier value of the same timeline is the longer wait.
            if self.0.iter().all(|(_, known)| known.lease != lease) {
                self.0.push((cell.clone(), TimelineWait { lease, value, since: now }));
            }
        });
        let mut hosts = hosts.lock();
        hosts.retain(|listed| listed.paused.is_none_or(|at| now.saturating_sub(at) < LEAST));
        let all = hosts.iter().map(|listed| &listed.wait).chain(self.0.iter().map(|(_, wait)| wait));
        let longest = all.min_by_key(|wait| wait.since).copied();
        longest.filter(|wait| now.saturating_sub(wait.since) >= LEAST)
    }
}

/// The age in milliseconds from which a wait is shown: pipelines wait all the time for shorter. A paused wait is shown
/// for as long.
const LEAST: u64 = 250;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waits_in_slices_are_one_wait() {
        let hosts = Arc::new(HostWaits::default());
        let mut reported = ReportedWaits::default();
        let mut longest = |now| reported.longest(&hosts, &StreamWaits::default(), now).map(|wait| wait.value);
        let first = hosts.add(LeaseId(1), 7, Instant::now() - Duration::from_secs(1));
        let since = first.wait.since;
        assert_eq!([since, since + LEAST].map(&mut longest), [None, Some(7)]);
        first.pause();
        let next = hosts.add(LeaseId(1), 7, Instant::now());
        assert_eq!(next.wait.since, since, "it continues the paused wait");
        let other = hosts.add(LeaseId(1), 8, Instant::now() - Duration::from_secs(2));
        assert_eq!(longest(since + LEAST), Some(8));
        drop(other);
        assert_eq!(longest(since + LEAST), Some(7));
        next.pause();
        assert_eq!(longest(members::now() + LEAST), None, "the caller did not wait again");
        assert_eq!(hosts.lock().len(), 0);
    }
}
