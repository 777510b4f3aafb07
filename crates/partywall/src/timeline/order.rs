//! One incarnation of a timeline, for those who poll it without the timeline.

use std::sync::Arc;

use partywall_shm::{timeline::Progress, topic::TimelineCell};

use super::Timeline;
use crate::domain::{LeaseGuard, Word};

/// One incarnation of a timeline that streams signal, to be polled later.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) word: Arc<Word>,
    /// So that the word stays the writer's.
    _keep: Arc<LeaseGuard>,
}

impl Order {
    pub(crate) fn of(timeline: &Timeline) -> Self {
        let (word, keep) = timeline.present();
        Self { word, _keep: keep }
    }

    pub(crate) fn progress(&self, value: u64) -> Progress {
        self.word.progress(value)
    }

    pub(crate) fn cell(&self) -> TimelineCell {
        let Word { slab, incarnation, ref place, .. } = *self.word;
        TimelineCell { slab, cell: place.index(), incarnation }
    }
}
