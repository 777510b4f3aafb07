//! What all of a topic's protocols share: its parts, and where its end is.

use super::{
    Header, TimelineCell,
    descriptor::Descriptor,
    entry::{Entry, EntryWord, Filling, Place},
    members::{HOLDS, Holds, Publishing, Subscribing},
};
use crate::sync::{AtomicU64, Ordering};

/// A topic's words.
#[derive(Clone, Copy)]
pub(super) struct Core<'a> {
    pub(super) header: &'a Header,
    pub(super) ring: &'a [Entry],
    pub(super) publishers: &'a [Publishing],
    pub(super) subscribers: &'a [Subscribing],
    /// As many for each subscriber.
    pub(super) holds: &'a [Holds],
    pub(super) descriptors: &'a [Descriptor],
    /// Holds that a subscriber has.
    pub(super) held: usize,
}

impl<'a> Core<'a> {
    /// The first position that is not filled, at most [`MAX_POSITION`].
    pub(super) fn tail(self) -> u64 {
        let mut tail = self.header.tail.load(Ordering::Acquire);
        for _ in 0..=self.ring.len() {
            let (place, _, seen) = self.at(tail);
            tail = match seen.filling(place) {
                Filling::Next if tail <= MAX_POSITION => return tail,
                Filling::Filled(_) | Filling::Overwritten if tail < MAX_POSITION => self.advance(tail, tail + 1),
                _ => break,
            };
        }
        // The hint is more than a lap behind, or nobody of us has written it.
        let entries = self.ring.iter().enumerate();
        let last = entries.filter_map(|(index, entry)| entry.load().position(index, self.ring.len())).max();
        let found = last.map_or(0, |last| last + 1).min(MAX_POSITION);
        self.advance(tail, found);
        found
    }

    /// A position's place, its entry, and what is there.
    pub(super) fn at(self, position: u64) -> (Place, &'a Entry, EntryWord) {
        let place = Place::of(position, self.ring.len());
        let entry = &self.ring[place.index];
        (place, entry, entry.load())
    }

    /// Moves the hint, unless somebody has; returns what it is.
    pub(super) fn advance(self, from: u64, to: u64) -> u64 {
        self.header.tail.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).map_or_else(|now| now, |_| to)
    }

    /// The timeline of the one who has published what is in a block, unless he has left.
    pub(super) fn timeline_of(self, block: usize) -> Option<TimelineCell> {
        let descriptor = &self.descriptors[block];
        let publisher = self.publishers.get(usize::from(descriptor.origin().place))?;
        (publisher.port.load().id() == descriptor.publisher()).then(|| publisher.timeline())?
    }

    /// A subscriber's holds.
    pub(super) fn holds_of(self, subscriber: usize) -> impl Iterator<Item = &'a AtomicU64> {
        (0..self.held).map(move |index| self.hold(subscriber, index))
    }

    /// One of them.
    pub(super) fn hold(self, subscriber: usize, index: usize) -> &'a AtomicU64 {
        let each = self.held.div_ceil(HOLDS);
        &self.holds[subscriber * each + index / HOLDS].0[index % HOLDS]
    }
}

/// No position is larger. Whoever had put a sample there would have needed decades, and additions do not overflow.
pub(super) const MAX_POSITION: u64 = 1 << 60;
