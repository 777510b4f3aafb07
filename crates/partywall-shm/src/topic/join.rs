//! Joining and leaving.
//!
//! Who joins takes a port, sets the words beside it, and opens the port; only then does it count. A subscriber says in the
//! end that it has joined, and looks for the tail once more: `publish` tells why nobody overruns it. If it is killed or
//! stopped on the way, before the port is open nobody notices, and behind it it is a subscriber like any other.
//!
//! Who leaves detaches first. It gives the port back when it holds nothing any more.

use super::{
    PublisherPlace, SubscriberPlace, TimelineCell,
    core::Core,
    port::{Occupancy, PortId, PortSlot, PortWord},
};
use crate::{
    crash::point,
    sync::{Ordering, fence},
};

impl Core<'_> {
    /// `None` if there are as many as there can be, or the broker has detached the member meanwhile.
    pub(super) fn join_as_publisher(self, row: u16) -> Option<PublisherPlace> {
        let (index, taken) = self.take(self.publishers.iter().map(|publisher| &publisher.port), row)?;
        // Counted before the port opens, and so before it can become free again: pairs with `is_idle`.
        self.header.publishers_joined.fetch_add(1, Ordering::Release);
        let us = &self.publishers[index];
        for word in [&us.published, &us.cell, &us.incarnation, &us.blocked_since, &us.blocked_by] {
            word.store(0, Ordering::Relaxed);
        }
        point("topic: publisher's words set, port not open");
        let port = self.open(&us.port, taken)?;
        Some(PublisherPlace::new(index, port))
    }

    /// One that may be `queue` samples behind, or that publishers wait for; it begins with the last `history` samples. `None`
    /// as above.
    pub(super) fn join_as_subscriber(self, row: u16, queue: Option<u32>, history: u32) -> Option<SubscriberPlace> {
        let (index, taken) = self.take(self.subscribers.iter().map(|subscriber| &subscriber.port), row)?;
        let us = &self.subscribers[index];
        // The last one had none, unless somebody has written there who must not.
        for hold in self.holds_of(index) {
            hold.store(0, Ordering::Relaxed);
        }
        // What the next sample overwrites is promised to nobody. Who may miss something may try.
        let oldest = |tail: u64| match queue {
            None => tail.saturating_sub(self.ring.len() as u64 - 1),
            Some(_) => self.oldest(tail),
        };
        let first = |tail: u64| oldest(tail).max(tail.saturating_sub(u64::from(history)));
        us.cursor.store(first(self.tail()), Ordering::Relaxed);
        let queue = queue.map_or(0, |queue| u64::from(queue.max(1)));
        us.queue.store(queue, Ordering::Relaxed);
        us.received.store(0, Ordering::Relaxed);
        us.dropped.store(0, Ordering::Relaxed);
        point("topic: subscriber's words set, port not open");
        let port = self.open(&us.port, taken)?;
        point("topic: subscriber's port open, not counted");
        // Pairs with the load of publishers.
        self.header.joins.fetch_add(1, Ordering::Release);
        point("topic: subscriber counted, cursor not final");
        // Pairs with the one of publishers.
        fence(Ordering::SeqCst);
        let cursor = first(self.tail());
        us.cursor.store(cursor, Ordering::Release);
        point("topic: subscriber joined, not notified");
        if queue == 0 {
            // Somebody may wait for the first cursor.
            self.header.space.notify();
        }
        Some(SubscriberPlace { index, port, cursor, queue, missed: 0 })
    }

    /// A publisher publishes no more.
    pub(super) fn detach_publisher(self, place: PortId) {
        self.publishers[place.index].port.detach(place.port);
        point("topic: publisher detached, nobody notified");
        // A subscriber may wait for the last publisher to leave.
        self.header.samples.notify();
    }

    /// A publisher's port is free for others. What it has published must be final.
    pub(super) fn leave_as_publisher(self, place: PortId) {
        leave(&self.publishers[place.index].port, place.port);
    }

    /// Nobody waits for this subscriber any more.
    pub(super) fn detach_subscriber(self, place: PortId) {
        self.subscribers[place.index].port.detach(place.port);
        point("topic: subscriber detached, nobody notified");
        self.header.space.notify();
    }

    /// A subscriber's port is free for others. It must hold no sample.
    pub(super) fn leave_as_subscriber(self, place: PortId) {
        leave(&self.subscribers[place.index].port, place.port);
        point("topic: subscriber's port free, nobody notified");
        self.header.space.notify();
    }

    /// Says which timeline a publisher's samples are complete by.
    pub(super) fn set_timeline(self, place: &PublisherPlace, cell: TimelineCell) {
        self.publishers[place.index].set_timeline(cell);
    }

    pub(super) fn set_blocked(self, place: PortId, blocked: Option<(u64, u64)>) {
        let us = &self.publishers[place.index];
        let (by, since) = blocked.unwrap_or_default();
        us.blocked_by.store(by, Ordering::Relaxed);
        us.blocked_since.store(since, Ordering::Relaxed);
    }

    /// Takes a free port.
    fn take<'a>(self, mut ports: impl Iterator<Item = &'a PortSlot>, row: u16) -> Option<(usize, PortWord)> {
        let taken = PortWord::taken(row, self.header.ids.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
        point("topic: number taken, port not");
        let index = ports.position(|port| port.take(taken))?;
        point("topic: port taken, words not set");
        Some((index, taken))
    }

    /// Opens a port; if the broker was faster, gives it back.
    fn open(self, port: &PortSlot, taken: PortWord) -> Option<PortWord> {
        let open = port.open(taken);
        if open.is_none() {
            leave(port, taken);
        }
        open
    }
}

/// Frees a port that is ours, whatever the broker has made of it. One that is another's by now stays.
fn leave(port: &PortSlot, ours: PortWord) {
    // The broker changes it once at most.
    for _ in 0..2 {
        let seen = port.load();
        if seen.occupancy() == Occupancy::Free || (seen.row(), seen.id()) != (ours.row(), ours.id()) || port.free(seen)
        {
            return;
        }
    }
}
