//! The shared word of a timeline, as one handle has it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use partywall_shm::timeline::{Cell, Ending, Progress};

use super::CellPlace;

/// One incarnation of a timeline as one handle has it.
#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) place: CellPlace,
    /// The number of its slab.
    pub(crate) slab: u32,
    pub(crate) incarnation: u32,
    /// The highest value that was waited for in any way.
    waited: AtomicU64,
    /// Kernels were told where it is, and may wait for any value.
    polled: AtomicBool,
    /// This connection has no broker any more, which would end the word if its writer died.
    gone: Arc<AtomicBool>,
}

impl Word {
    pub(super) fn new(place: CellPlace, slab: u32, incarnation: u32, gone: Arc<AtomicBool>) -> Self {
        Self { place, slab, incarnation, waited: AtomicU64::new(0), polled: AtomicBool::new(false), gone }
    }

    pub(crate) fn cell(&self) -> &Cell {
        self.place.cell()
    }

    /// How far it is on the way to `v`.
    pub(crate) fn progress(&self, v: u64) -> Progress {
        match self.cell().progress(v) {
            Progress::Pending | Progress::Announced if self.gone.load(Ordering::Acquire) => {
                Progress::Ended(Ending::BrokerGone)
            }
            progress => progress,
        }
    }

    /// Why no further value will come, as far as this process will know.
    pub(crate) fn ending(&self) -> Option<Ending> {
        let gone = || self.gone.load(Ordering::Acquire).then_some(Ending::BrokerGone);
        self.cell().ending().or_else(gone)
    }

    /// Notes that `v` was waited for.
    pub(crate) fn note_wait(&self, v: u64) {
        self.waited.fetch_max(v, Ordering::AcqRel);
    }

    /// The highest value that was waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.load(Ordering::Acquire)
    }

    /// Notes that kernels are told where it is.
    pub(crate) fn note_polled(&self) {
        self.polled.store(true, Ordering::Release);
    }

    /// Whether kernels were told where it is.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.load(Ordering::Acquire)
    }
}

#[cfg(test)]
impl Word {
    /// One that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        Self::new(CellPlace::of_tests(), 0, 0, Arc::default())
    }
}
