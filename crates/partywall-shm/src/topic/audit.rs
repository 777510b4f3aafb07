//! What a topic's words say, counted.

use super::{PublisherState, SubscriberState, core::Core, seat::Occupancy};
use crate::sync::Ordering;

impl Core<'_> {
    pub(super) fn publishers(self) -> Vec<PublisherState> {
        let mut states = Vec::new();
        for publisher in self.publishers {
            let seat = publisher.seat.load();
            if !matches!(seat.occupancy(), Occupancy::Active | Occupancy::Parted) {
                continue;
            }
            let since = publisher.blocked_since.load(Ordering::Relaxed);
            states.push(PublisherState {
                row: seat.row(),
                id: seat.id(),
                published: publisher.published.load(Ordering::Relaxed),
                blocked: (since != 0).then(|| (publisher.blocked_by.load(Ordering::Relaxed), since)),
                parted: seat.occupancy() == Occupancy::Parted,
            });
        }
        states
    }

    pub(super) fn subscribers(self) -> Vec<SubscriberState> {
        let tail = self.tail();
        let publishers = self.publishers();
        let mut states = Vec::new();
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            let seat = subscriber.seat.load();
            if !matches!(seat.occupancy(), Occupancy::Active | Occupancy::Parted) {
                continue;
            }
            let holds = self.holds_of(index).iter().flat_map(|line| &line.0);
            let waited = publishers.iter().filter_map(|publisher| publisher.blocked);
            states.push(SubscriberState {
                row: seat.row(),
                id: seat.id(),
                queue: Some(subscriber.queue.load(Ordering::Relaxed) as u32).filter(|queue| *queue != 0),
                lag: tail.saturating_sub(subscriber.cursor.load(Ordering::Relaxed)),
                received: subscriber.received.load(Ordering::Relaxed),
                dropped: subscriber.dropped.load(Ordering::Relaxed),
                held: holds.filter(|hold| hold.load(Ordering::Relaxed) != 0).count() as u32,
                stalled: waited.filter(|(by, _)| *by == seat.id()).map(|(_, since)| since).min(),
                parted: seat.occupancy() == Occupancy::Parted,
            });
        }
        states
    }
}
