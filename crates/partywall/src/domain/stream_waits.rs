//! The waits that were enqueued on streams, and how long their leases have to be kept.
//!
//! A cell becomes another timeline's when there is no lease on it any more. A stream that has not come to its wait by
//! then would wait for that other timeline, perhaps for ever. So a lease is kept until every stream has passed the waits
//! that were enqueued under it, whenever its handle is dropped.
//!
//! Whether a stream has passed a wait shows in what it does afterwards: the next value that it signals, once that is
//! there. A stream that waits for many timelines one after the other and signals nothing writes a private word now and
//! then; one that waits for few is not burdened with that. What remains is a few leases for each stream that was used
//! and does nothing more: they are kept as long as the connection.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, RwLock},
};

use partywall_cuda::StreamId;
use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::Progress;

use super::{
    lease::LeaseGuard,
    timeline_memory::{CellPlace, PrivateWord},
};

/// The waits of all streams of a connection.
#[derive(Debug, Default)]
pub(crate) struct StreamWaits {
    all: RwLock<Vec<Arc<Track>>>,
    /// Kept to the end, because a kernel may look at the cell whenever it likes.
    for_good: Mutex<Vec<Arc<LeaseGuard>>>,
}

/// One stream. Its identity is never another's.
#[derive(Debug)]
pub(crate) struct Track {
    stream: StreamId,
    waits: Mutex<Waits>,
}

/// The waits of one stream. A thread that enqueues one locks this meanwhile, so that they stand here in the order in which
/// the stream comes to them.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    noted: VecDeque<Wait>,
    /// The private word that the stream writes next.
    mark: Option<PrivateWord>,
}

#[derive(Debug)]
struct Wait {
    keep: Arc<LeaseGuard>,
    place: CellPlace,
    value: u64,
    /// What the stream writes after it: the wait is passed when it is there.
    mark: Option<(CellPlace, u64)>,
}

impl StreamWaits {
    /// The stream with this identity.
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

    /// Keeps a lease as long as the connection.
    pub(crate) fn keep_for_good(&self, keep: &Arc<LeaseGuard>) {
        let mut kept = self.for_good.lock().ignore_poison();
        if !kept.iter().any(|known| Arc::ptr_eq(known, keep)) {
            kept.push(keep.clone());
        }
    }

    /// Lets go of what has been passed. Does not wait: of a stream that is in use it does when that is used again.
    pub(crate) fn forget_passed(&self) {
        for track in self.tracks() {
            if let Ok(mut waits) = track.waits.try_lock() {
                waits.forget_passed();
            }
        }
    }

    /// Cells that streams may wait for.
    pub(crate) fn places(&self) -> Vec<CellPlace> {
        let places = |track: Arc<Track>| track.lock().noted.iter().map(|wait| wait.place.clone()).collect::<Vec<_>>();
        self.tracks().into_iter().flat_map(places).collect()
    }

    /// Whether a stream may have to wait for as long as another process likes.
    pub(crate) fn may_wait(&self) -> bool {
        let undecided = |wait: &Wait| wait.place.is_undecided(wait.value);
        self.tracks().iter().any(|track| track.lock().noted.iter().any(undecided))
    }

    fn tracks(&self) -> Vec<Arc<Track>> {
        self.all.read().ignore_poison().clone()
    }
}

impl Track {
    /// Its waits, for as long as something is enqueued.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().ignore_poison()
    }
}

impl Waits {
    /// Notes a wait that is enqueued next.
    pub(crate) fn wait(&mut self, keep: &Arc<LeaseGuard>, place: &CellPlace, value: u64) {
        let place = place.clone();
        if let Some(wait) = self.unmarked().find(|wait| Arc::ptr_eq(&wait.keep, keep)) {
            // A stream that has passed the later wait has passed the earlier one.
            (wait.place, wait.value) = (place, value);
            return;
        }
        self.noted.push_back(Wait { keep: keep.clone(), place, value, mark: None });
    }

    /// Whether the stream should write a mark before it waits again.
    pub(crate) fn need_a_mark(&mut self) -> bool {
        self.unmarked().nth(MOST_UNMARKED).is_some()
    }

    /// The private word that the stream is to write, if it has one.
    pub(crate) fn take_mark(&mut self) -> Option<PrivateWord> {
        self.mark.take()
    }

    /// The private word for the next mark.
    pub(crate) fn keep_mark(&mut self, mark: PrivateWord) {
        self.mark = Some(mark);
    }

    /// Notes that the stream stores `value` at `place`, behind everything that is noted.
    pub(crate) fn mark(&mut self, place: &CellPlace, value: u64) {
        for wait in self.unmarked() {
            wait.mark = Some((place.clone(), value));
        }
        self.forget_passed();
    }

    fn unmarked(&mut self) -> impl Iterator<Item = &mut Wait> {
        self.noted.iter_mut().rev().take_while(|wait| wait.mark.is_none())
    }

    fn forget_passed(&mut self) {
        while let Some(Wait { mark: Some((place, value)), .. }) = self.noted.front()
            && place.cell().progress(*value) == Progress::Reached
        {
            self.noted.pop_front();
        }
    }
}

/// Timelines that a stream waits for, one after the other, before it writes a mark.
const MOST_UNMARKED: usize = 8;
