//! Joining and leaving.
//!
//! Who joins takes a seat, sets the words beside it, and opens the seat; only then does it count. A subscriber says in the
//! end that it has joined, and looks for the tail once more: `publish` tells why nobody overruns it. If it is killed or
//! stopped on the way, before the seat is open nobody notices, and behind it it is a subscriber like any other.
//!
//! Who leaves parts first. It gives the seat back when it holds nothing any more.

use super::{
    PublisherPlace, SubscriberPlace, TimelineCell,
    core::Core,
    seat::{Occupancy, Seat, SeatWord, Seated},
};
use crate::{
    crash::point,
    sync::{Ordering, fence},
};

impl Core<'_> {
    /// `None` if there are as many as there can be, or the broker has parted the member meanwhile.
    pub(super) fn join_as_publisher(self, row: u16) -> Option<PublisherPlace> {
        let (index, taken) = self.take(self.publishers.iter().map(|publisher| &publisher.seat), row)?;
        // Counted before the seat opens, and so before it can become free again: pairs with `is_idle`.
        self.header.publishers_joined.fetch_add(1, Ordering::Release);
        let us = &self.publishers[index];
        for word in [&us.published, &us.cell, &us.incarnation, &us.blocked_since, &us.blocked_by] {
            word.store(0, Ordering::Relaxed);
        }
        point("topic: publisher's words set, seat not open");
        let seat = self.open(&us.seat, taken)?;
        Some(PublisherPlace::new(index, seat))
    }

    /// One that may be `queue` samples behind, or that publishers wait for; it begins with the last `history` samples. `None`
    /// as above.
    pub(super) fn join_as_subscriber(self, row: u16, queue: Option<u32>, history: u32) -> Option<SubscriberPlace> {
        let (index, taken) = self.take(self.subscribers.iter().map(|subscriber| &subscriber.seat), row)?;
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
        point("topic: subscriber's words set, seat not open");
        let seat = self.open(&us.seat, taken)?;
        point("topic: subscriber's seat open, not counted");
        // Pairs with the load of publishers.
        self.header.joins.fetch_add(1, Ordering::Release);
        point("topic: subscriber counted, cursor not final");
        // Pairs with the one of publishers.
        fence(Ordering::SeqCst);
        let cursor = first(self.tail());
        us.cursor.store(cursor, Ordering::Release);
        point("topic: subscriber joined, not told");
        if queue == 0 {
            // Somebody may wait for the first cursor.
            self.header.space.ring();
        }
        Some(SubscriberPlace { index, seat, cursor, queue, missed: 0 })
    }

    /// A publisher publishes no more.
    pub(super) fn part_publisher(self, place: Seated) {
        self.publishers[place.index].seat.part(place.seat);
        point("topic: publisher parted, nobody told");
        // A subscriber may wait for the last publisher to leave.
        self.header.samples.ring();
    }

    /// A publisher's seat is free for others. What it has published must be final.
    pub(super) fn leave_as_publisher(self, place: Seated) {
        leave(&self.publishers[place.index].seat, place.seat);
    }

    /// Nobody waits for this subscriber any more.
    pub(super) fn part_subscriber(self, place: Seated) {
        self.subscribers[place.index].seat.part(place.seat);
        point("topic: subscriber parted, nobody told");
        self.header.space.ring();
    }

    /// A subscriber's seat is free for others. It must hold no sample.
    pub(super) fn leave_as_subscriber(self, place: Seated) {
        leave(&self.subscribers[place.index].seat, place.seat);
        point("topic: subscriber's seat free, nobody told");
        self.header.space.ring();
    }

    /// Says which timeline a publisher's samples are complete by.
    pub(super) fn set_timeline(self, place: &PublisherPlace, cell: TimelineCell) {
        self.publishers[place.index].set_timeline(cell);
    }

    pub(super) fn set_blocked(self, place: Seated, blocked: Option<(u64, u64)>) {
        let us = &self.publishers[place.index];
        let (by, since) = blocked.unwrap_or_default();
        us.blocked_by.store(by, Ordering::Relaxed);
        us.blocked_since.store(since, Ordering::Relaxed);
    }

    /// Takes a free seat.
    fn take<'a>(self, mut seats: impl Iterator<Item = &'a Seat>, row: u16) -> Option<(usize, SeatWord)> {
        let taken = SeatWord::taken(row, self.header.ids.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
        point("topic: number taken, seat not");
        let index = seats.position(|seat| seat.take(taken))?;
        point("topic: seat taken, words not set");
        Some((index, taken))
    }

    /// Opens a seat; if the broker was faster, gives it back.
    fn open(self, seat: &Seat, taken: SeatWord) -> Option<SeatWord> {
        let open = seat.open(taken);
        if open.is_none() {
            leave(seat, taken);
        }
        open
    }
}

/// Frees a seat that is ours, whatever the broker has made of it. One that is another's by now stays.
fn leave(seat: &Seat, ours: SeatWord) {
    // The broker changes it once at most.
    for _ in 0..2 {
        let seen = seat.load();
        if seen.occupancy() == Occupancy::Free || (seen.row(), seen.id()) != (ours.row(), ours.id()) || seat.free(seen)
        {
            return;
        }
    }
}
