//! The common parts of a topic's protocols: positions, the end of the ring, and the holds.

use super::{
    TimelineCell, Topic, TopicHeader,
    entry::{Filling, RingEntry, RingPosition, RingWord},
    members::HOLDS,
};
use crate::sync::{AtomicU64, Ordering};

impl Topic {
    #[inline]
    pub(super) fn control(&self) -> &TopicHeader {
        &self.header[0]
    }

    /// Returns the first position that is not filled, at most [`MAX_POSITION`].
    pub(super) fn tail(&self) -> u64 {
        let mut tail = self.control().tail.load(Ordering::Acquire);
        for _ in 0..=self.ring.len() {
            let (at, _, seen) = self.at(tail);
            tail = match seen.filling(at) {
                Filling::Next if tail <= MAX_POSITION => return tail,
                Filling::Filled(_) | Filling::Overwritten if tail < MAX_POSITION => self.advance(tail, tail + 1),
                _ => break,
            };
        }
        // The hint is more than a lap behind, or a process that breaks the rules has written it.
        let entries = self.ring.iter().enumerate();
        let last = entries.filter_map(|(index, entry)| entry.load().position(index, self.ring.len())).max();
        let found = last.map_or(0, |last| last + 1).min(MAX_POSITION);
        self.advance(tail, found);
        found
    }

    /// Returns where a position is, its entry, and the entry's word.
    pub(super) fn at(&self, position: u64) -> (RingPosition, &RingEntry, RingWord) {
        let at = RingPosition::of(position, self.ring.len());
        let entry = &self.ring[at.index];
        (at, entry, entry.load())
    }

    /// Moves the hint, unless another member has. Returns its new value.
    pub(super) fn advance(&self, from: u64, to: u64) -> u64 {
        self.control()
            .tail
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .map_or_else(|now| now, |_| to)
    }

    /// Returns the timeline that completes the sample in a block, unless its publisher has left.
    pub(super) fn timeline_of_block(&self, block: usize) -> Option<TimelineCell> {
        let descriptor = &self.descriptors[block];
        let origin = descriptor.origin();
        let publisher = self.publishers.get(usize::from(origin.port))?;
        let lane = publisher.lanes.get(usize::from(origin.lane))?;
        (publisher.port.load().id() == descriptor.publisher()).then(|| lane.timeline())?
    }

    /// Returns the holds of a subscriber.
    pub(super) fn holds_of(&self, subscriber: usize) -> impl Iterator<Item = &AtomicU64> {
        (0..self.limits.held as usize).map(move |index| self.hold(subscriber, index))
    }

    /// Returns one hold of a subscriber.
    pub(super) fn hold(&self, subscriber: usize, index: usize) -> &AtomicU64 {
        let each = (self.limits.held as usize).div_ceil(HOLDS);
        &self.holds[subscriber * each + index / HOLDS].0[index % HOLDS]
    }
}

/// The largest position. Reaching it would take decades, and additions to it do not overflow.
pub(super) const MAX_POSITION: u64 = 1 << 60;
