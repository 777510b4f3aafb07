//! Receiving: how a reader gets a block and releases it.
//!
//! 1. The subscriber reads the entry at its cursor, and finds a block.
//! 2. It writes the block into one of its holds. If publishers wait for it, it moves its cursor.
//! 3. Behind a fence it makes sure that its hold is seen. If publishers wait for it, it checks that its port is still
//!    its own; otherwise, that the entry is unchanged.
//! 4. If publishers wait for it, it notifies them; otherwise it moves its cursor.
//! 5. It reads the descriptor and the block in place, and in the end clears the hold.
//!
//! **Why no sample is written while it is read.** A member that frees blocks reads the entries first and, behind a
//! fence, the holds. If it does not find our hold, its fence came before ours, so we see what it had seen: the block
//! has left the ring.
//!
//! A publisher that waits for us overwrites our entry once it has seen the cursor behind it, and so the hold; a member
//! that sees the entry overwritten sees the hold, too. A publisher that does not wait for us has seen us detached. A
//! member that then frees the block, and does not find our hold, has seen us detached before its fence, and we see that
//! behind ours. Therefore one fence is enough for the hold and for sleepers, and the entry, whose cache line the next
//! publisher may be about to take, need not be read again.
//!
//! A subscriber that may fall `queue` samples behind checks whether the entry `queue` positions later is filled; if so,
//! it skips to the last `queue` samples. A subscriber whose next sample was overwritten skips to the oldest sample in
//! the ring. That one is overwritten next; if it is before the hold is seen, the subscriber skips further.
//!
//! If the subscriber is killed or stopped between any two steps, its holds keep the blocks from being reused until it
//! continues or is proved dead. Publishers that wait for it keep waiting; any process can see that, and have the
//! subscriber detached.

use std::time::Duration;

use super::{
    SampleDescription, Status, TimelineCell, Topic,
    entry::Filling,
    port::{Occupancy, PortId, PortSlot, PortWord},
};
use crate::{
    EventKey,
    crash::point,
    slots::Slots,
    sync::{AtomicU64, Ordering, fence, prefetch_to_write},
};

/// A subscriber's port, and its private state.
#[derive(Debug)]
pub struct SubscriberHandle {
    pub(super) index: usize,
    pub(super) port: PortWord,
    /// The cursor, as the subscriber has written it.
    pub(super) cursor: u64,
    /// How many samples it may fall behind; 0: publishers wait for it.
    pub(super) queue: u64,
    /// Samples that passed since the last one.
    pub(super) missed: u64,
    /// The most skipped numbers that a sample carried, or that there were at the join.
    pub(super) skipped: u64,
}

/// The outcome of an attempt to receive.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A sample.
    Sample(HeldSample),
    /// There is no sample.
    Empty,
    /// The subscriber holds as many samples as it may.
    Full,
    /// Publishers were faster every time. Try again.
    Busy,
    /// The broker has detached the subscriber.
    Detached,
}

/// The next thing to receive, judged by the ring alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing.
    Nothing,
    /// A sample in this block of the pool, if the block exists.
    Sample(u32),
    /// A later sample, or the broker has detached the subscriber.
    Other,
}

/// A held sample. If it is not [released](super::Topic::release), its block is lost until its reader dies.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct HeldSample {
    /// The index of the subscriber's port.
    subscriber: usize,
    hold: usize,
    block: u32,
    position: u64,
    missed: u64,
}

impl HeldSample {
    /// Returns the block's index in its pool.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Returns the sample's position in the topic.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns a second handle of the same hold, which must be released only once.
    pub fn again(&self) -> Self {
        Self { ..*self }
    }

    /// Returns the number of samples that the subscriber missed between its previous sample and this one.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

impl SubscriberHandle {
    /// Returns its number, which is never used for another publisher or subscriber of the topic.
    pub fn id(&self) -> u64 {
        self.port.id()
    }

    /// Returns the first position that it has not read.
    pub fn next(&self) -> u64 {
        self.cursor
    }

    /// Returns its port.
    pub fn port(&self) -> PortId {
        PortId { index: self.index, word: self.port }
    }
}

impl Topic {
    /// Takes the next sample.
    pub fn receive(&self, slots: &Slots, handle: &mut SubscriberHandle) -> Received {
        let us = &self.subscribers[handle.index];
        if us.port.load() != handle.port {
            return Received::Detached;
        }
        for attempt in 0..MOST_ATTEMPTS {
            self.keep_up(handle);
            let (at, entry, seen) = self.at(handle.cursor);
            let block = match seen.filling(at) {
                Filling::Next | Filling::Later => return Received::Empty,
                Filling::Overwritten => {
                    // The oldest sample of the ring is overwritten next: if publishers are faster, then the next
                    // attempts leave them more and more time.
                    let kept = (self.ring.len() as u64).saturating_sub(attempt).max(1);
                    self.skip_to(handle, self.tail().saturating_sub(kept));
                    continue;
                }
                Filling::Filled(block) => u32::from(block),
            };
            if block as usize >= self.descriptors.len() {
                // Only a process that breaks the rules writes such a block number.
                self.skip_to(handle, handle.cursor + 1);
                continue;
            }
            let Some((hold, word)) = self.free_hold(handle.index) else { return Received::Full };
            word.store(u64::from(block) + 1, Ordering::Relaxed);
            point("topic: hold written, not known to be seen");
            let waited_for = handle.queue == 0;
            if waited_for {
                // Pairs with the load in `check_space`.
                us.cursor.store(handle.cursor + 1, Ordering::Release);
                point("topic: cursor moved, hold not known to be seen");
            }
            // Pairs with the fence in `unused`, and with that of publishers that prepare to sleep for room.
            fence(Ordering::SeqCst);
            let safe = if waited_for { us.port.load() == handle.port } else { entry.load() == seen };
            if !safe {
                word.store(0, Ordering::Release);
                point("topic: hold given up, nobody notified");
                // A member that searched for unused blocks meanwhile has skipped this one.
                fence(Ordering::SeqCst);
                self.collect(slots);
                if waited_for {
                    return Received::Detached;
                }
                continue;
            }
            point("topic: sample held, nobody notified");
            self.miss_skipped(handle, self.descriptors[block as usize].skipped());
            let taken =
                HeldSample { subscriber: handle.index, hold, block, position: handle.cursor, missed: handle.missed };
            handle.cursor += 1;
            handle.missed = 0;
            us.received.store(us.received.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            if waited_for {
                self.control().space.notify_after_fence();
            } else {
                us.cursor.store(handle.cursor, Ordering::Relaxed);
            }
            return Received::Sample(taken);
        }
        Received::Busy
    }

    /// Returns whether a subscriber can hold another sample.
    pub fn has_room(&self, port: PortId) -> bool {
        self.free_hold(port.index).is_some()
    }

    /// Returns what [`receive`](Self::receive) would find for a subscriber whose [`SubscriberHandle::next`] is `next`,
    /// for callers that poll. Prefetches the sample's description.
    #[inline]
    pub fn peek(&self, port: PortId, next: u64) -> Ahead {
        let (at, _, seen) = self.at(next);
        match seen.filling(at) {
            Filling::Filled(block) => {
                // Fetched early, because fetching takes longer than the work before these words are needed: the
                // sample's description, and this subscriber's words, which publishers have read.
                prefetch_to_write(&self.subscribers[port.index]);
                prefetch_to_write(self.hold(port.index, 0));
                if let Some(descriptor) = self.descriptors.get(usize::from(block)) {
                    descriptor.prefetch();
                }
                Ahead::Sample(block.into())
            }
            Filling::Next | Filling::Later if self.subscribers[port.index].port.load() == port.word => Ahead::Nothing,
            Filling::Next | Filling::Later | Filling::Overwritten => Ahead::Other,
        }
    }

    /// Returns whether all publishers have left and the subscriber whose [`SubscriberHandle::next`] is `next` has
    /// received everything. Returns false if the topic has never had a publisher.
    ///
    /// A publisher that is killed or stopped while it joins or leaves keeps the topic busy until the broker detaches
    /// it.
    pub fn is_idle(&self, next: u64) -> bool {
        self.is_idle_but_for(next, &[])
    }

    /// As [`is_idle`](Self::is_idle), as if the publishers with these ids had never been there.
    pub fn is_idle_but_for(&self, next: u64, ignored: &[u64]) -> bool {
        // Pairs with the addition in `join_as_publisher`: if a publisher has left meanwhile, and had waited for another
        // one to join, the second load sees the other one counted.
        let joined = || self.control().publishers_joined.load(Ordering::Acquire);
        let before = joined();
        let is_present = |port: &PortSlot| {
            let seen = port.load();
            matches!(seen.occupancy(), Occupancy::Taken | Occupancy::Active) && !ignored.contains(&seen.id())
        };
        if before <= ignored.len() as u64 || self.publishers.iter().any(|publisher| is_present(&publisher.port)) {
            return false;
        }
        // Read after the ports: a reader that sees that a publisher has left sees all its samples.
        let (at, _, seen) = self.at(next);
        matches!(seen.filling(at), Filling::Next | Filling::Later) && joined() == before
    }

    /// Releases a sample.
    pub fn release(&self, slots: &Slots, taken: &HeldSample) {
        // Pairs with the load in `each_hold`: our reads come before the block is written again.
        self.hold(taken.subscriber, taken.hold).store(0, Ordering::Release);
        point("topic: sample released, nobody notified");
        fence(Ordering::SeqCst);
        self.collect(slots);
    }

    /// Skips the samples beyond the `queue` of a subscriber that may fall behind.
    fn keep_up(&self, handle: &mut SubscriberHandle) {
        if handle.queue == 0 || handle.queue >= self.ring.len() as u64 {
            return;
        }
        let (at, _, seen) = self.at(handle.cursor.saturating_add(handle.queue));
        if matches!(seen.filling(at), Filling::Filled(_) | Filling::Overwritten) {
            self.skip_to(handle, self.tail().saturating_sub(handle.queue));
        }
    }

    /// Moves the cursor without receiving.
    fn skip_to(&self, handle: &mut SubscriberHandle, position: u64) {
        let passed = position.saturating_sub(handle.cursor);
        handle.cursor += passed;
        self.miss(handle, passed);
        self.subscribers[handle.index].cursor.store(handle.cursor, Ordering::Release);
    }

    /// Counts what publishers have skipped up to the sample that carries this number.
    fn miss_skipped(&self, handle: &mut SubscriberHandle, skipped: u64) {
        // Less, if its publisher has described it before that of an earlier position.
        let new = skipped.saturating_sub(handle.skipped);
        if new > 0 {
            handle.skipped = skipped;
            self.miss(handle, new);
        }
    }

    fn miss(&self, handle: &mut SubscriberHandle, samples: u64) {
        let us = &self.subscribers[handle.index];
        handle.missed = handle.missed.saturating_add(samples);
        us.dropped.store(us.dropped.load(Ordering::Relaxed).wrapping_add(samples), Ordering::Relaxed);
    }

    /// Returns a free hold of this subscriber. No other process writes its holds.
    fn free_hold(&self, subscriber: usize) -> Option<(usize, &AtomicU64)> {
        self.holds_of(subscriber).enumerate().find(|(_, hold)| hold.load(Ordering::Relaxed) == 0)
    }

    /// Returns the description of a sample. It does not change while the sample is held.
    #[inline]
    pub fn describe(&self, taken: &HeldSample) -> SampleDescription {
        self.descriptors[taken.block as usize].describe()
    }

    /// Returns the user's header of a sample.
    pub fn header(&self, taken: &HeldSample) -> Vec<u8> {
        self.descriptors[taken.block as usize].header()
    }

    /// Returns whether a sample is known to be valid now.
    pub fn status(&self, taken: &HeldSample) -> Status {
        self.descriptors[taken.block as usize].status().status()
    }

    /// Returns the timeline that completes a sample, until its publisher has left the topic. A publisher stays while
    /// the status of any of its samples is not final.
    pub fn timeline_of(&self, taken: &HeldSample) -> Option<TimelineCell> {
        self.timeline_of_block(taken.block as usize)
    }

    /// Announces that the caller may sleep until there is a sample. The caller must then try [`receive`](Self::receive)
    /// again before it sleeps.
    pub fn prepare_for_sample(&self) -> EventKey {
        self.control().samples.prepare()
    }

    /// Sleeps until there may be a sample, for at most `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return early.
    pub fn sleep_for_sample(&self, key: EventKey, limit: Duration) {
        self.control().samples.sleep(key, limit);
    }
}

/// Maximum number of attempts to receive a sample. Each failure is a publisher's success.
const MOST_ATTEMPTS: u64 = 64;
