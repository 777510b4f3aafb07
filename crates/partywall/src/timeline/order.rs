//! One incarnation of a timeline, for code that polls it without a [`Timeline`] handle.

use std::sync::Arc;

use partywall_shm::{timeline::Progress, topic::TimelineCell};

use super::Timeline;
use crate::domain::{LeaseGuard, Word};

/// One incarnation of a timeline that streams signal, to be polled later.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) word: Arc<Word>,
    /// The lease, without which the word may become another timeline's.
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
        let Word { slab, incarnation, ref cell, .. } = *self.word;
        TimelineCell { slab, cell: cell.index(), incarnation }
    }
}
