//! Receiving: how a reader comes to a block, and lets go of it.
//!
//! 1. The subscriber looks at the entry of its cursor, and finds a block.
//! 2. It writes the block into one of its holds. If publishers wait for it, it moves its cursor.
//! 3. Behind a fence it looks whether its hold will be seen: if publishers wait for it, whether its port is still its own, and
//!    otherwise whether the entry is still the same.
//! 4. If publishers wait for it, it wakes those that sleep; otherwise it moves its cursor.
//! 5. It reads the descriptor and the block in place, and in the end clears the hold.
//!
//! **Why nobody writes what is read.** Who frees blocks looks at the entries first and, behind a fence, at the holds. If it
//! does not find ours, its fence came before ours, so that we see what it had seen: that the block has left the ring.
//!
//! A publisher that waits for us overwrites our entry when it has seen the cursor behind it, and so the hold; who sees the
//! entry overwritten sees that hold, too. One that does not wait for us has seen us detached. Whoever frees the block after that,
//! and does not find our hold, had seen it before his fence, and we see it behind ours. So one fence is for the hold and for
//! those who sleep, and the entry, which the next publisher may be about to take, need not be looked at again.
//!
//! A subscriber that may be `queue` samples behind looks whether the entry `queue` positions later is filled; if so it goes to
//! those that are last. One whose next sample was overwritten goes to the oldest that will still be there for a moment.
//!
//! If it is killed or stopped between any two steps, a hold keeps one block from being used, of those that it is promised,
//! until it goes on or is proved dead. If its publishers wait for it, they wait; anybody can see that, and part it.

use super::{
    core::Core,
    entry::Filling,
    port::{Occupancy, PortId, PortSlot, PortWord},
};
use crate::{
    crash::point,
    slots,
    sync::{AtomicU64, Ordering, fence, prefetch_to_write},
};

/// A subscriber's place, and what it remembers.
#[derive(Debug)]
pub struct SubscriberPlace {
    pub(super) index: usize,
    pub(super) port: PortWord,
    /// As it has written it.
    pub(super) cursor: u64,
    /// How many samples it may be behind; 0: publishers wait for it.
    pub(super) queue: u64,
    /// Samples that passed since the last one.
    pub(super) missed: u64,
}

/// What became of an attempt to receive.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A sample.
    Sample(Taken),
    /// There is none.
    Empty,
    /// It holds as many as it may.
    Full,
    /// Publishers were always faster. To be tried again.
    Busy,
    /// The broker has detached it from the topic.
    Detached,
}

/// What there is to receive, as far as a look at the ring tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing.
    Nothing,
    /// A sample in this block of the pool, if there is such a one.
    Sample(u32),
    /// A later sample, or that the broker has detached us.
    Other,
}

/// A sample that is held. Its block is lost, until its reader dies, if it is not [released](super::Topic::release).
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Taken {
    /// Whose: the index of the subscriber's place.
    subscriber: usize,
    hold: usize,
    block: u32,
    position: u64,
    missed: u64,
}

impl Taken {
    /// The block's index in its pool.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Which sample of the topic it is.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The same hold once more. It is released once.
    pub fn again(&self) -> Self {
        Self { ..*self }
    }

    /// Samples between the one before, of this subscriber, and this one, which it has not received.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

impl SubscriberPlace {
    /// Its number, which no other publisher or subscriber of the topic ever has.
    pub fn id(&self) -> u64 {
        self.port.id()
    }

    /// The first position that it has not looked at.
    pub fn next(&self) -> u64 {
        self.cursor
    }

    /// The place itself.
    pub fn port(&self) -> PortId {
        PortId { index: self.index, port: self.port }
    }
}

impl<'a> Core<'a> {
    /// Takes the next sample.
    pub(super) fn receive(self, slots: slots::Core<'_>, place: &mut SubscriberPlace) -> Received {
        let us = &self.subscribers[place.index];
        if us.port.load() != place.port {
            return Received::Detached;
        }
        for _ in 0..MOST_ATTEMPTS {
            self.keep_up(place);
            let (at, entry, seen) = self.at(place.cursor);
            let block = match seen.filling(at) {
                Filling::Next | Filling::Later => return Received::Empty,
                Filling::Overwritten => {
                    self.skip_to(place, self.oldest(self.tail()));
                    continue;
                }
                Filling::Filled(block) => u32::from(block),
            };
            if block as usize >= self.descriptors.len() {
                // None of ours has written that.
                self.skip_to(place, place.cursor + 1);
                continue;
            }
            let Some((hold, word)) = self.free_hold(place.index) else { return Received::Full };
            word.store(u64::from(block) + 1, Ordering::Relaxed);
            point("topic: hold written, not known to be seen");
            let waited_for = place.queue == 0;
            if waited_for {
                // Pairs with the load of publishers.
                us.cursor.store(place.cursor + 1, Ordering::Release);
                point("topic: cursor moved, hold not known to be seen");
            }
            // Pairs with the one of who frees blocks, and with that of publishers who are about to sleep for room.
            fence(Ordering::SeqCst);
            let safe = if waited_for { us.port.load() == place.port } else { entry.load() == seen };
            if !safe {
                word.store(0, Ordering::Release);
                point("topic: hold given up, nobody notified");
                // Who looked for blocks meanwhile has passed over this one.
                fence(Ordering::SeqCst);
                self.collect(slots);
                if waited_for {
                    return Received::Detached;
                }
                continue;
            }
            point("topic: sample held, nobody notified");
            let taken = Taken { subscriber: place.index, hold, block, position: place.cursor, missed: place.missed };
            (place.cursor, place.missed) = (place.cursor + 1, 0);
            us.received.store(us.received.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            if waited_for {
                self.header.space.notify_after_fence();
            } else {
                us.cursor.store(place.cursor, Ordering::Relaxed);
            }
            return Received::Sample(taken);
        }
        Received::Busy
    }

    /// What there is to receive at a position or behind it.
    #[inline]
    pub(super) fn look(self, place: PortId, next: u64) -> Ahead {
        let (at, _, seen) = self.at(next);
        match seen.filling(at) {
            Filling::Filled(block) => {
                // They take longer to come than all that has to be done before they are needed: what is said of the sample,
                // and what of ours publishers have looked at.
                prefetch_to_write(&self.subscribers[place.index]);
                prefetch_to_write(self.hold(place.index, 0));
                if let Some(descriptor) = self.descriptors.get(usize::from(block)) {
                    descriptor.prefetch();
                }
                Ahead::Sample(block.into())
            }
            Filling::Next | Filling::Later if self.subscribers[place.index].port.load() == place.port => Ahead::Nothing,
            Filling::Next | Filling::Later | Filling::Overwritten => Ahead::Other,
        }
    }

    /// See [`Topic::is_idle`](super::Topic::is_idle).
    ///
    /// A publisher that is killed or stopped while it joins or leaves keeps its port, and so the topic busy, until the broker
    /// parts it.
    pub(super) fn is_idle(self, next: u64) -> bool {
        // Pairs with the addition of a publisher that joins: if one has left behind our back, and had waited for another to
        // join, then the second load sees that one counted.
        let joined = || self.header.publishers_joined.load(Ordering::Acquire);
        let before = joined();
        let is_present = |port: &PortSlot| matches!(port.load().occupancy(), Occupancy::Taken | Occupancy::Active);
        if before == 0 || self.publishers.iter().any(|publisher| is_present(&publisher.port)) {
            return false;
        }
        // Behind the ports: who sees that a publisher has left sees all that it has published.
        let (at, _, seen) = self.at(next);
        matches!(seen.filling(at), Filling::Next | Filling::Later) && joined() == before
    }

    /// Lets go of a sample.
    pub(super) fn release(self, slots: slots::Core<'_>, taken: &Taken) {
        // Pairs with the load of who frees blocks: what we have read was read before it is written again.
        self.hold(taken.subscriber, taken.hold).store(0, Ordering::Release);
        point("topic: sample released, nobody notified");
        fence(Ordering::SeqCst);
        self.collect(slots);
    }

    /// The oldest position that is not the next to be overwritten, with that tail; with one entry, that one.
    pub(super) fn oldest(self, tail: u64) -> u64 {
        tail.saturating_sub((self.ring.len() as u64 - 1).max(1))
    }

    /// Passes over what one who may be `queue` samples behind does not want any more.
    fn keep_up(self, place: &mut SubscriberPlace) {
        if place.queue == 0 || place.queue >= self.ring.len() as u64 {
            return;
        }
        let (at, _, seen) = self.at(place.cursor.saturating_add(place.queue));
        if matches!(seen.filling(at), Filling::Filled(_) | Filling::Overwritten) {
            self.skip_to(place, self.tail().saturating_sub(place.queue));
        }
    }

    /// Moves the cursor on without receiving.
    fn skip_to(self, place: &mut SubscriberPlace, position: u64) {
        let us = &self.subscribers[place.index];
        let skipped = position.saturating_sub(place.cursor);
        place.cursor += skipped;
        place.missed += skipped;
        us.dropped.store(us.dropped.load(Ordering::Relaxed) + skipped, Ordering::Relaxed);
        us.cursor.store(place.cursor, Ordering::Release);
    }

    /// One of our holds that is free. Nobody else makes one of them anything else.
    fn free_hold(self, subscriber: usize) -> Option<(usize, &'a AtomicU64)> {
        self.holds_of(subscriber).enumerate().find(|(_, hold)| hold.load(Ordering::Relaxed) == 0)
    }
}

/// How often a sample is tried, at most. Each failure is a publisher's success.
const MOST_ATTEMPTS: usize = 64;
