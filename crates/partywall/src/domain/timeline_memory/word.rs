//! The shared word of a timeline, as used by one handle.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use partywall_shm::timeline::{Cell, Progress, TimelineEnding};

use super::CellRef;

/// One incarnation of a timeline, as used by one handle.
#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) cell: CellRef,
    /// The number of its slab.
    pub(crate) slab: u32,
    pub(crate) incarnation: u32,
    /// The highest value that was waited for by any means.
    waited: AtomicU64,
    /// True if kernels know its address, and may wait for any value.
    polled: AtomicBool,
    /// Whether the broker is gone, which would end the timeline if its writer died.
    gone: Arc<AtomicBool>,
}

impl Word {
    pub(super) fn new(cell: CellRef, slab: u32, incarnation: u32, gone: Arc<AtomicBool>) -> Self {
        Self { cell, slab, incarnation, waited: AtomicU64::new(0), polled: AtomicBool::new(false), gone }
    }

    pub(crate) fn cell(&self) -> &Cell {
        self.cell.get()
    }

    /// Returns the progress towards `v`.
    pub(crate) fn progress(&self, v: u64) -> Progress {
        match self.cell().progress(v) {
            Progress::Pending | Progress::Announced if self.gone.load(Ordering::Acquire) => {
                Progress::Ended(TimelineEnding::BrokerGone)
            }
            progress => progress,
        }
    }

    /// Returns why no further value will come, as far as this process can know.
    pub(crate) fn ending(&self) -> Option<TimelineEnding> {
        let gone = || self.gone.load(Ordering::Acquire).then_some(TimelineEnding::BrokerGone);
        self.cell().ending().or_else(gone)
    }

    /// Records that `v` was waited for.
    pub(crate) fn note_wait(&self, v: u64) {
        self.waited.fetch_max(v, Ordering::AcqRel);
    }

    /// Returns the highest value that was waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.load(Ordering::Acquire)
    }

    /// Records that kernels know its address.
    pub(crate) fn note_polled(&self) {
        self.polled.store(true, Ordering::Release);
    }

    /// Returns whether kernels know its address.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.load(Ordering::Acquire)
    }
}

#[cfg(test)]
impl Word {
    /// Creates a word that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        Self::new(CellRef::of_tests(), 0, 0, Arc::default())
    }
}
