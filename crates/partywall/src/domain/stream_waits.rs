//! The waits that are enqueued on streams, and the leases that they need.
//!
//! A cell is reused for another timeline when no lease on it is left. A stream that has not reached its wait by then
//! would wait for that other timeline, perhaps without end. A lease is therefore kept until every stream has passed the
//! waits that were enqueued under it, even if its handle is dropped earlier.
//!
//! The next value that a stream signals proves that it has passed its earlier waits. A stream that waits for many
//! timelines without a signal writes a private word from time to time; a stream with few waits does not have this cost.
//! A few leases of streams that do nothing more remain, and are kept as long as the connection. A domain that is
//! dropped while a stream may wait stays connected until the stream has passed its waits.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, RwLock},
};

use partywall_cuda::StreamId;
use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::Progress;

use super::{
    lease::LeaseGuard,
    timeline_memory::{CellRef, PrivateWord},
};

/// The waits of all streams of a connection.
#[derive(Debug, Default)]
pub(crate) struct StreamWaits {
    all: RwLock<Vec<Arc<Track>>>,
    /// Kept until the connection ends, because a kernel may read the cell at any time.
    for_good: Mutex<Vec<Arc<LeaseGuard>>>,
}

/// One stream. The driver never reuses its identity.
#[derive(Debug)]
pub(crate) struct Track {
    stream: StreamId,
    waits: Mutex<TrackWaits>,
}

/// The waits of one stream. A thread that enqueues a wait locks this meanwhile, so the waits are in the order of the
/// stream.
#[derive(Debug, Default)]
pub(crate) struct TrackWaits {
    noted: VecDeque<NotedWait>,
    /// The private word that the stream writes next.
    mark: Option<PrivateWord>,
}

#[derive(Debug)]
struct NotedWait {
    keep: Arc<LeaseGuard>,
    cell: CellRef,
    value: u64,
    /// The word and value that the stream writes after the wait. Once the value is stored, the stream has passed the
    /// wait.
    mark: Option<(CellRef, u64)>,
}

impl StreamWaits {
    /// Returns the record of the stream with this identity.
    pub(crate) fn track(&self, stream: StreamId) -> Arc<Track> {
        let known = |all: &Vec<Arc<Track>>| all.iter().find(|track| track.stream == stream).cloned();
        if let Some(track) = known(&self.all.read().ignore_poison()) {
            return track;
        }
        let mut all = self.all.write().ignore_poison();
        known(&all).unwrap_or_else(|| {
            let track = Arc::new(Track { stream, waits: Mutex::default() });
            all.push(track.clone());
            track
        })
    }

    /// Keeps a lease until the connection ends.
    pub(crate) fn keep_for_good(&self, keep: &Arc<LeaseGuard>) {
        let mut kept = self.for_good.lock().ignore_poison();
        if !kept.iter().any(|known| Arc::ptr_eq(known, keep)) {
            kept.push(keep.clone());
        }
    }

    /// Forgets the waits that streams have passed. Skips locked streams; their next use forgets them.
    pub(crate) fn forget_passed(&self) {
        for track in self.tracks() {
            if let Ok(mut waits) = track.waits.try_lock() {
                waits.forget_passed();
            }
        }
    }

    /// Calls `found` with the lease, the cell and the value of each stream's first open wait. Skips locked streams.
    pub(super) fn each_first(&self, mut found: impl FnMut(u64, &CellRef, u64)) {
        for track in self.tracks() {
            if let Ok(waits) = track.waits.try_lock()
                && let Some(wait) = waits.first_open()
            {
                found(wait.keep.lease().0, &wait.cell, wait.value);
            }
        }
    }

    /// Returns the cells that streams may wait for.
    pub(crate) fn cells(&self) -> Vec<CellRef> {
        let cells = |track: Arc<Track>| track.lock().noted.iter().map(|wait| wait.cell.clone()).collect::<Vec<_>>();
        self.tracks().into_iter().flat_map(cells).collect()
    }

    /// Returns whether a stream may still wait for another process.
    pub(crate) fn may_wait(&self) -> bool {
        self.tracks().iter().any(|track| track.lock().first_open().is_some())
    }

    fn tracks(&self) -> Vec<Arc<Track>> {
        self.all.read().ignore_poison().clone()
    }
}

impl Track {
    /// Locks the waits of the stream, to enqueue work.
    pub(crate) fn lock(&self) -> MutexGuard<'_, TrackWaits> {
        self.waits.lock().ignore_poison()
    }
}

impl TrackWaits {
    /// Records a wait that is enqueued next.
    pub(crate) fn wait(&mut self, keep: &Arc<LeaseGuard>, cell: &CellRef, value: u64) {
        let same = |wait: &&mut NotedWait| Arc::ptr_eq(&wait.keep, keep) && wait.cell.is(cell);
        if let Some(wait) = self.unmarked().find(same) {
            // Values only grow: a stream can pass both waits once it can pass the one for the larger value.
            wait.value = wait.value.max(value);
            return;
        }
        self.noted.push_back(NotedWait { keep: keep.clone(), cell: cell.clone(), value, mark: None });
    }

    /// Returns whether the stream should write a mark before it waits again.
    pub(crate) fn need_a_mark(&mut self) -> bool {
        self.unmarked().nth(MOST_UNMARKED).is_some()
    }

    /// Takes the private word that the stream writes next, if it has one.
    pub(crate) fn take_mark(&mut self) -> Option<PrivateWord> {
        self.mark.take()
    }

    /// Stores the private word for the next mark.
    pub(crate) fn keep_mark(&mut self, mark: PrivateWord) {
        self.mark = Some(mark);
    }

    /// Records that the stream stores `value` in `cell`, behind all recorded waits.
    pub(crate) fn mark(&mut self, cell: &CellRef, value: u64) {
        for wait in self.unmarked() {
            wait.mark = Some((cell.clone(), value));
        }
        self.forget_passed();
    }

    fn first_open(&self) -> Option<&NotedWait> {
        self.noted.iter().find(|wait| wait.cell.is_undecided(wait.value))
    }

    fn unmarked(&mut self) -> impl Iterator<Item = &mut NotedWait> {
        self.noted.iter_mut().rev().take_while(|wait| wait.mark.is_none())
    }

    fn forget_passed(&mut self) {
        while let Some(NotedWait { mark: Some((cell, value)), .. }) = self.noted.front()
            && cell.get().progress(*value) == Progress::Reached
        {
            self.noted.pop_front();
        }
    }
}

/// Number of waits of a stream before it writes a mark.
const MOST_UNMARKED: usize = 8;

#[cfg(test)]
mod tests {
    use partywall_harness::World;

    use super::*;
    use crate::Domain;

    #[test]
    fn later_wait_under_the_same_lease_hides_no_open_one() {
        let world = World::new();
        let domain = Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let writer = domain.timeline_writer("t").unwrap();
        let (word, keep) = writer.timeline().present();
        let other = PrivateWord::of_hosts();
        let mut waits = TrackWaits::default();
        for (cell, value) in [(&word.cell, 10), (&word.cell, 5), (&other.cell, other.target)] {
            waits.wait(&keep, cell, value);
        }
        let open = || waits.first_open().map(|wait| wait.value);

        writer.signal(5).unwrap();
        other.cell.get().signal(other.target).unwrap();
        assert_eq!(open(), Some(10));
        writer.signal(10).unwrap();
        assert_eq!(open(), None);
    }
}
