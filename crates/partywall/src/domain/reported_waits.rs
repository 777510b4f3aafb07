//! The waits for timelines that listings of members show.
//!
//! Waits do not pass through the broker. Every 250 ms the service thread writes the longest wait of the process to the
//! member's row, from which the broker reads it. A wait that ends earlier costs nothing more: a thread adds its wait only
//! after its first sleep, and streams note their waits for another reason (see [`stream_waits`](super::stream_waits)).

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::members::{self, TimelineWait};

use super::{stream_waits::StreamWaits, timeline_memory::CellPlace};

/// The waits of threads and event loops that have lasted for longer than one sleep or poll, and those of streams with a
/// timeout.
#[derive(Debug, Default)]
pub(crate) struct HostWaits(Mutex<Vec<TimelineWait>>);

/// A wait in the list. Dropping it ends the wait.
#[derive(Debug)]
pub(crate) struct HostWait {
    waits: Arc<HostWaits>,
    wait: TimelineWait,
}

impl HostWaits {
    /// Adds a wait, which began at `start`, for a value of the timeline of a lease.
    pub(crate) fn add(self: &Arc<Self>, lease: u64, value: u64, start: Instant) -> HostWait {
        let passed = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let wait = TimelineWait { lease, value, since: members::now().saturating_sub(passed) };
        self.lock().push(wait);
        HostWait { waits: self.clone(), wait }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<TimelineWait>> {
        self.0.lock().ignore_poison()
    }
}

impl Drop for HostWait {
    fn drop(&mut self) {
        let mut waits = self.waits.lock();
        if let Some(i) = waits.iter().position(|wait| *wait == self.wait) {
            waits.swap_remove(i);
        }
    }
}

/// The open waits of streams, with the times at which they were first seen.
///
/// They are kept here because a thread that enqueues work may hold a stream's lock for as long as the stream waits.
#[derive(Debug, Default)]
pub(super) struct ReportedWaits(Vec<(CellPlace, TimelineWait)>);

impl ReportedWaits {
    /// Returns the longest wait at the time `now`, if one has lasted for [`LEAST`].
    pub(super) fn longest(&mut self, hosts: &HostWaits, streams: &StreamWaits, now: u64) -> Option<TimelineWait> {
        self.0.retain(|(place, wait)| place.is_undecided(wait.value));
        streams.each_first(|lease, place, value| {
            // An earlier value of the same timeline is the longer wait.
            if self.0.iter().all(|(_, known)| known.lease != lease) {
                self.0.push((place.clone(), TimelineWait { lease, value, since: now }));
            }
        });
        let hosts = hosts.lock();
        let all = hosts.iter().chain(self.0.iter().map(|(_, wait)| wait));
        let longest = all.min_by_key(|wait| wait.since).copied();
        longest.filter(|wait| now.saturating_sub(wait.since) >= LEAST)
    }
}

/// The age in milliseconds from which a wait is shown: pipelines wait all the time for shorter.
const LEAST: u64 = 250;
