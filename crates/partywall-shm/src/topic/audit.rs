//! Counts and lists for observers.

use partywall_wire::BlockCounts;

use super::{PublisherState, SubscriberState, Topic, port::Occupancy, sweep::BlockSet};
use crate::{
    members::NOBODY,
    slots::{SlotState, Slots},
    sync::Ordering,
};

impl Topic {
    /// Counts the blocks by state. While members use the topic, the numbers do not belong to a single moment.
    ///
    /// `invalid` counts the words that no correct member writes: a block that is in the ring twice, or in the ring or a
    /// hold although it is free, or whose state is invalid; a position that is not filled although a later one is.
    pub fn audit(&self, slots: &Slots) -> BlockCounts {
        let of_slots = slots.audit();
        let invalid = of_slots.invalid + self.ports().filter(|port| *port == Occupancy::Invalid).count() as u32;
        let mut audit = BlockCounts { waiting: of_slots.waiting, invalid, ..BlockCounts::default() };
        let blocks = self.descriptors.len() as u32;
        let mut in_ring = BlockSet::none(blocks);
        let tail = self.tail();
        for (index, entry) in self.ring.iter().enumerate() {
            let seen = entry.load();
            // The last position of this entry that was filled then, if any.
            let filled = (tail + self.ring.len() as u64).checked_sub(1 + index as u64);
            let laps = filled.map_or(0, |filled| filled / self.ring.len() as u64);
            audit.invalid += u32::from(seen.laps() < laps);
            let Some(block) = seen.block().map(u32::from) else { continue };
            let state = slots.seen(block).map(|seen| seen.state());
            let wrong = !matches!(state, Some(SlotState::Held(_))) || in_ring.insert(block);
            // If the entry has changed, the block has just left the ring.
            audit.invalid += u32::from(wrong && entry.load() == seen);
        }
        let mut read = BlockSet::none(blocks);
        self.each_hold(|block| {
            audit.invalid += u32::from(
                block >= blocks || {
                    read.insert(block);
                    false
                },
            )
        });
        for block in 0..blocks {
            let Some(seen) = slots.seen(block) else { continue };
            *match seen.state() {
                SlotState::Free => &mut audit.free,
                _ if in_ring.contains(block) => &mut audit.in_ring,
                SlotState::Held(NOBODY) if read.contains(block) => &mut audit.read,
                SlotState::Held(NOBODY) => &mut audit.unused,
                SlotState::Held(_) | SlotState::Offered(_) => &mut audit.held,
                SlotState::Handed(..) => &mut audit.handed,
                SlotState::Invalid => continue,
            } += 1;
        }
        audit
    }

    fn ports(&self) -> impl Iterator<Item = Occupancy> {
        let publishers = self.publishers.iter().map(|publisher| &publisher.port);
        let ports = publishers.chain(self.subscribers.iter().map(|subscriber| &subscriber.port));
        ports.map(|port| port.load().occupancy())
    }

    /// Returns the state of all publishers.
    pub fn publishers(&self) -> Vec<PublisherState> {
        let mut states = Vec::new();
        for publisher in self.publishers.iter() {
            let port = publisher.port.load();
            if !matches!(port.occupancy(), Occupancy::Active | Occupancy::Detached) {
                continue;
            }
            let since = publisher.blocked_since.load(Ordering::Relaxed);
            states.push(PublisherState {
                row: port.row(),
                id: port.id(),
                published: publisher.published.load(Ordering::Relaxed),
                blocked: (since != 0).then(|| (publisher.blocked_by.load(Ordering::Relaxed), since)),
                detached: port.occupancy() == Occupancy::Detached,
            });
        }
        states
    }

    /// Returns the state of all subscribers.
    pub fn subscribers(&self) -> Vec<SubscriberState> {
        let tail = self.tail();
        let publishers = self.publishers();
        let mut states = Vec::new();
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            let port = subscriber.port.load();
            if !matches!(port.occupancy(), Occupancy::Active | Occupancy::Detached) {
                continue;
            }
            let holds = self.holds_of(index);
            let waited = publishers.iter().filter_map(|publisher| publisher.blocked);
            states.push(SubscriberState {
                row: port.row(),
                id: port.id(),
                queue: Some(subscriber.queue.load(Ordering::Relaxed) as u32).filter(|queue| *queue != 0),
                lag: tail.saturating_sub(subscriber.cursor.load(Ordering::Relaxed)),
                received: subscriber.received.load(Ordering::Relaxed),
                dropped: subscriber.dropped.load(Ordering::Relaxed),
                held: holds.filter(|hold| hold.load(Ordering::Relaxed) != 0).count() as u32,
                ages: self.ages[index].read(),
                stalled: waited.filter(|(by, _)| *by == port.id()).map(|(_, since)| since).min(),
                detached: port.occupancy() == Occupancy::Detached,
            });
        }
        states
    }
}
