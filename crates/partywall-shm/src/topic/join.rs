//! Joining and leaving a topic.
//!
//! A member that joins takes a port, sets the words beside it, and opens the port; only then does the port count. A
//! subscriber then counts itself in `joins`, and reads the tail again: `publish` explains why no publisher overruns it.
//! If the member is killed or stopped before its port is open, no other member notices; afterwards it is a member like
//! any other.
//!
//! A member that leaves detaches first. It frees the port when it holds nothing any more.

use super::{
    PublisherHandle, SubscriberHandle, TimelineCell, Topic,
    members::Lane,
    port::{Occupancy, PortId, PortSlot, PortWord},
};
use crate::{
    crash::point,
    sync::{Ordering, fence},
};

impl Topic {
    /// Makes a member's row a publisher. Returns `None` if all publishers' ports are taken, or the broker has detached
    /// the row meanwhile.
    pub fn join_as_publisher(&self, row: u16) -> Option<PublisherHandle> {
        let (index, taken) = self.take(self.publishers.iter().map(|publisher| &publisher.port), row)?;
        // Counted before the port opens, and so before it can become free again: pairs with `is_idle`.
        self.control().publishers_joined.fetch_add(1, Ordering::Release);
        let us = &self.publishers[index];
        for word in [&us.published, &us.blocked_since, &us.blocked_by] {
            word.store(0, Ordering::Relaxed);
        }
        us.lanes.iter().for_each(Lane::clear);
        point("topic: publisher's words set, port not open");
        let port = self.open(&us.port, taken)?;
        Some(PublisherHandle::new(index, port))
    }

    /// Makes a member's row a subscriber. It may fall `queue` samples behind; with `None`, publishers wait for it. It
    /// starts with the last `history` samples, or with as many as the ring keeps. Returns `None` if all subscribers'
    /// ports are taken, or the broker has detached the row meanwhile.
    pub fn join_as_subscriber(&self, row: u16, queue: Option<u32>, history: u32) -> Option<SubscriberHandle> {
        let (index, taken) = self.take(self.subscribers.iter().map(|subscriber| &subscriber.port), row)?;
        let us = &self.subscribers[index];
        // The former owner left no holds, unless a process that breaks the rules has written there.
        for hold in self.holds_of(index) {
            hold.store(0, Ordering::Relaxed);
        }
        // The position that the next sample overwrites is not guaranteed to any subscriber. In a ring with one entry a
        // subscriber that may miss samples may try it.
        let kept = (self.ring.len() as u64 - 1).max(queue.map_or(0, |_| 1));
        let oldest = |tail: u64| tail.saturating_sub(kept);
        let first = |tail: u64| oldest(tail).max(tail.saturating_sub(u64::from(history)));
        us.cursor.store(first(self.tail()), Ordering::Relaxed);
        let queue = queue.map_or(0, |queue| u64::from(queue.max(1)));
        us.queue.store(queue, Ordering::Relaxed);
        us.received.store(0, Ordering::Relaxed);
        us.dropped.store(0, Ordering::Relaxed);
        self.ages[index].clear();
        point("topic: subscriber's words set, port not open");
        let port = self.open(&us.port, taken)?;
        point("topic: subscriber's port open, not counted");
        // Pairs with the load in `check_space`.
        self.control().joins.fetch_add(1, Ordering::Release);
        point("topic: subscriber counted, cursor not final");
        // Pairs with the fence in `fill`.
        fence(Ordering::SeqCst);
        let cursor = first(self.tail());
        us.cursor.store(cursor, Ordering::Release);
        let skipped = self.control().skipped.load(Ordering::Relaxed);
        point("topic: subscriber joined, not notified");
        // A publisher may be waiting for subscribers, or for the initial cursor of one that it must not overtake.
        self.control().space.notify();
        Some(SubscriberHandle { index, port, cursor, queue, missed: 0, skipped })
    }

    /// Detaches a publisher, which cannot publish any more.
    pub fn detach_publisher(&self, port: PortId) {
        // Stale if the broker has detached it.
        let _ = self.publishers[port.index].port.detach(port.word);
        point("topic: publisher detached, nobody notified");
        // A subscriber may be waiting for the last publisher to leave.
        self.control().samples.notify();
    }

    /// Frees a publisher's port, once the status of all its samples is final.
    pub fn leave_as_publisher(&self, port: PortId) {
        leave(&self.publishers[port.index].port, port.word);
    }

    /// Detaches a subscriber: no publisher waits for it any more. It keeps its samples.
    pub fn detach_subscriber(&self, port: PortId) {
        // Stale if the broker has detached it.
        let _ = self.subscribers[port.index].port.detach(port.word);
        point("topic: subscriber detached, nobody notified");
        self.control().space.notify();
    }

    /// Frees a subscriber's port, once it holds nothing.
    pub fn leave_as_subscriber(&self, port: PortId) {
        leave(&self.subscribers[port.index].port, port.word);
        point("topic: subscriber's port free, nobody notified");
        self.control().space.notify();
    }

    /// Sets the timeline that tells when the samples of a publisher's lane are complete. Call this before the first of
    /// them, and once.
    ///
    /// # Panics
    /// If there are not as many [`LANES`](super::LANES).
    pub fn set_timeline(&self, port: PortId, lane: u8, cell: TimelineCell) {
        self.publishers[port.index].lanes[usize::from(lane)].set_timeline(cell);
    }

    /// Records for observers which subscriber a publisher waits for, and since when.
    pub fn set_blocked(&self, port: PortId, blocked: Option<(u64, u64)>) {
        let us = &self.publishers[port.index];
        let (by, since) = blocked.unwrap_or_default();
        us.blocked_by.store(by, Ordering::Relaxed);
        us.blocked_since.store(since, Ordering::Relaxed);
    }

    /// Takes a free port.
    fn take<'a>(&self, mut ports: impl Iterator<Item = &'a PortSlot>, row: u16) -> Option<(usize, PortWord)> {
        let taken = PortWord::taken(row, self.control().ids.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
        point("topic: number taken, port not");
        let index = ports.position(|port| port.take(taken).is_ok())?;
        point("topic: port taken, words not set");
        Some((index, taken))
    }

    /// Opens a port. If the broker has detached it already, frees it instead.
    fn open(&self, port: &PortSlot, taken: PortWord) -> Option<PortWord> {
        port.open(taken).inspect_err(|_| leave(port, taken)).ok()
    }
}

/// Frees this member's port, whether or not the broker has detached it. Does nothing if the port belongs to another
/// join by now.
fn leave(port: &PortSlot, ours: PortWord) {
    // The broker changes it at most once.
    for _ in 0..2 {
        let seen = port.load();
        let is_ours = seen.occupancy() != Occupancy::Free && (seen.row(), seen.id()) == (ours.row(), ours.id());
        if !is_ours || port.free(seen).is_ok() {
            return;
        }
    }
}
