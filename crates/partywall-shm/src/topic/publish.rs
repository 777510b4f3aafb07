//! Publishing: puts a block into the ring.
//!
//! 1. The publisher holds the block, and has written it and its descriptor.
//! 2. It finds the first position that is not filled. Behind a fence it checks whether a `Block` subscriber still needs
//!    the sample in that entry. It remembers the smallest cursor of those subscribers. It reads the cursors again only
//!    if that one is too small, mostly after publishing a sample for the next one, or if a subscriber has joined. If
//!    the publisher itself has filled the previous position, the fence of its last notification is enough.
//! 3. It fills the entry by one compare-and-swap, which publishes the sample. If another publisher was first, it tries
//!    the next position.
//! 4. It moves the hint of the tail, releases the block to the topic, and notifies subscribers.
//!
//! If the publisher is killed or stopped between any two steps: before step 3 the block is its own, and nothing else
//! has happened. After step 3 the sample is published. The next member moves the hint, a sleeper checks again after
//! [`MAX_SLEEP`](crate::MAX_SLEEP), and the publisher keeps the block until it continues or is proved dead. The ring
//! and subscribers may use the block, too; it becomes free when all have released it.
//!
//! **Why a subscriber that joins is not overrun.** The subscriber counts itself in `joins`, and behind a fence reads
//! the tail. A publisher sees position `p` unfilled, and behind a fence reads `joins`. If it does not see the
//! subscriber there, its fence came first: the subscriber finds the positions before `p` filled, begins behind
//! `p` − depth, and does not need the sample that the publisher overwrites at `p`. If the publisher comes later with
//! another position, it reads `joins` again. The fence has to come after the positions before `p` were filled; if they
//! were filled before the publisher's last fence, that fence serves.

use std::time::Duration;

use super::{
    MAX_HEADER, MAX_RANK, Status, Topic,
    descriptor::{SampleOrigin, Written},
    entry::{Filling, RingWord},
    port::{Occupancy, PortId, PortWord},
};
use crate::{
    EventKey,
    crash::point,
    slots::{HeldSlot, Slots},
    sync::{Ordering, fence, fence_behind_change},
};

/// A publisher's port, and its private state.
#[derive(Debug)]
pub struct PublisherHandle {
    pub(super) index: usize,
    pub(super) port: PortWord,
    /// The number of the next sample.
    sequence: u64,
    /// Numbers that no sample has.
    skipped: u64,
    /// Every sample before this position may be overwritten, as of `joins`.
    floor: u64,
    joins: Option<u64>,
    /// All positions before it were filled before our last fence.
    fenced: u64,
}

/// The description of a sample to publish.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// [`Status::Ready`]; or [`Status::Timeline`] or [`Status::Unverified`] if a stream still writes the block, which
    /// then stays held until it is [retired](super::Topic::retire).
    pub status: Status,
    /// The publisher's lane whose timeline completes the sample.
    pub lane: u8,
    /// The value of that timeline.
    pub value: u64,
    /// The time ([`now_ns`](crate::members::now_ns)): the age of the sample counts from here.
    pub stamp: u64,
    /// The code of the elements' type.
    pub dtype: u8,
    /// The tensor's shape, of at most [`MAX_RANK`] dimensions.
    pub shape: &'a [u64],
    /// Length of the tensor.
    pub bytes: u64,
    /// The user's header, of at most [`MAX_HEADER`] bytes.
    pub header: &'a [u8],
}

/// Why a sample was not published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpublished {
    /// This subscriber has not read the sample that would be overwritten.
    Blocked {
        /// The subscriber's id.
        id: u64,
        /// Its member's row.
        row: u16,
    },
    /// Other publishers were faster every time. Try again.
    Busy,
    /// The broker has detached the publisher.
    Detached,
}

impl PublisherHandle {
    pub(super) fn new(index: usize, port: PortWord) -> Self {
        Self { index, port, sequence: 0, skipped: 0, floor: 0, joins: None, fenced: 0 }
    }

    /// Returns its number, which is never used for another publisher or subscriber of the topic.
    pub fn id(&self) -> u64 {
        self.port.id()
    }

    /// Returns its port.
    pub fn port(&self) -> PortId {
        PortId { index: self.index, word: self.port }
    }

    /// Returns the number of its next sample: how many it has published or skipped.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Topic {
    /// Prefetches the words that [`publish`](Self::publish) will write for a block.
    pub fn prefetch_to_write(&self, block: u32) {
        if let Some(descriptor) = self.descriptors.get(block as usize) {
            descriptor.prefetch_to_write();
        }
    }

    /// Skips numbers of a publisher: receivers of its next sample have missed as many. Returns false, and skips none, if
    /// that leads beyond 2⁶².
    ///
    /// Each sample carries the numbers that all publishers had skipped before, so receivers that miss some samples miss
    /// none of these. If the publisher is killed before its next sample, that of another publisher carries them.
    #[must_use]
    pub fn skip(&self, handle: &mut PublisherHandle, numbers: u64) -> bool {
        let next = handle.sequence.checked_add(numbers).filter(|next| *next <= MAX_SEQUENCE);
        let Some(next) = next else { return false };
        handle.skipped += numbers;
        handle.sequence = next;
        // Ordered by the change of the entry that publishes the next sample. It may wrap, if some publishers skip nearly
        // all numbers: receivers then miss those that are shown no more.
        self.control().skipped.fetch_add(numbers, Ordering::Relaxed);
        true
    }

    /// Publishes a block that the publisher holds, and returns the sample's position. If the message's status is final,
    /// the block belongs to the topic afterwards; otherwise it stays held and has to be [retired](Topic::retire).
    ///
    /// # Errors
    /// See [`Unpublished`]. The block is then unchanged.
    ///
    /// # Panics
    /// If the shape or the header is too long, or the block belongs to another pool.
    pub fn publish(
        &self,
        slots: &Slots,
        handle: &mut PublisherHandle,
        held: &HeldSlot,
        message: &Message<'_>,
    ) -> Result<u64, Unpublished> {
        self.publish_within(slots, handle, held, message, message.status.is_final())
    }

    /// As [`publish`](Self::publish), but the block stays held in any case until it is [retired](Topic::retire),
    /// because the publisher's program may still use it.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    ///
    /// # Panics
    /// As [`publish`](Self::publish).
    pub fn publish_viewed(
        &self,
        slots: &Slots,
        handle: &mut PublisherHandle,
        held: &HeldSlot,
        message: &Message<'_>,
    ) -> Result<u64, Unpublished> {
        self.publish_within(slots, handle, held, message, false)
    }

    fn publish_within(
        &self,
        slots: &Slots,
        handle: &mut PublisherHandle,
        held: &HeldSlot,
        message: &Message<'_>,
        lets_go: bool,
    ) -> Result<u64, Unpublished> {
        assert!(message.shape.len() <= MAX_RANK && message.header.len() <= MAX_HEADER, "the caller has checked");
        let us = &self.publishers[handle.index];
        if us.port.load() != handle.port {
            return Err(Unpublished::Detached);
        }
        self.write_descriptor(handle, held, message);
        point("topic: described, not in the ring");
        let position = self.fill(handle, held.index() as u16)?;
        point("topic: in the ring, tail not moved");
        // A store, although it moves the hint back if other publishers were faster: the next member moves it again.
        self.control().tail.store(position + 1, Ordering::Release);
        handle.sequence += 1;
        us.published.store(handle.sequence - handle.skipped, Ordering::Relaxed);
        point("topic: in the ring, block still held");
        if lets_go {
            // Stale if the broker has taken this process for dead.
            let _ = slots.publish(held.index(), held.word());
            fence_behind_change();
        } else {
            fence(Ordering::SeqCst);
        }
        handle.fenced = position + 1;
        point("topic: published, nobody notified");
        self.control().samples.notify_after_fence();
        self.collect(slots);
        // Reads the cursors for the next sample now, while readers are busy with this one, because they come from the
        // readers' caches.
        let _ = self.check_space(handle, position + 1);
        Ok(position)
    }

    /// Describes the sample in its block.
    pub(super) fn write_descriptor(&self, handle: &PublisherHandle, held: &HeldSlot, message: &Message<'_>) {
        self.descriptors[held.index() as usize].write(&Written {
            generation: held.generation(),
            skipped: self.control().skipped.load(Ordering::Relaxed),
            origin: SampleOrigin {
                port: handle.index as u16,
                row: handle.port.row(),
                dtype: message.dtype,
                rank: message.shape.len() as u8,
                header: message.header.len() as u16,
                lane: message.lane,
            },
            publisher: handle.port.id(),
            sequence: handle.sequence,
            message,
        });
    }

    /// Fills the first position that is not filled with the block.
    pub(super) fn fill(&self, handle: &mut PublisherHandle, block: u16) -> Result<u64, Unpublished> {
        let mut position = self.tail();
        for _ in 0..MOST_ATTEMPTS {
            let (at, entry, seen) = self.at(position);
            match seen.filling(at) {
                Filling::Next => {}
                Filling::Filled(_) | Filling::Overwritten | Filling::Later => {
                    position = self.tail();
                    continue;
                }
            }
            // Pairs with the fence in `join_as_subscriber`: see the head of this file.
            if position != handle.fenced {
                fence(Ordering::SeqCst);
            }
            self.check_space(handle, position)?;
            point("topic: space found, entry not filled");
            if entry.fill(seen, RingWord::filled(at, block)).is_ok() {
                return Ok(position);
            }
        }
        Err(Unpublished::Busy)
    }

    /// Checks that no `Block` subscriber needs the sample that `position` overwrites.
    fn check_space(&self, handle: &mut PublisherHandle, position: u64) -> Result<(), Unpublished> {
        let depth = self.ring.len() as u64;
        // Pairs with the addition in `join_as_subscriber`: a publisher that sees it sees the subscriber's port and
        // cursor.
        let joins = self.control().joins.load(Ordering::Acquire);
        if handle.joins == Some(joins) && position < handle.floor.saturating_add(depth) {
            return Ok(());
        }
        let mut slowest = None;
        handle.floor = u64::MAX;
        for subscriber in self.subscribers.iter() {
            let port = subscriber.port.load();
            if port.occupancy() != Occupancy::Active || subscriber.queue.load(Ordering::Relaxed) != 0 {
                continue;
            }
            // Pairs with the store in `receive`: a publisher that sees the cursor sees the hold when it searches for
            // holds.
            let cursor = subscriber.cursor.load(Ordering::Acquire);
            if cursor < handle.floor {
                slowest = Some(port);
                handle.floor = cursor;
            }
        }
        handle.joins = Some(joins);
        match slowest {
            Some(port) if position >= handle.floor.saturating_add(depth) => {
                Err(Unpublished::Blocked { id: port.id(), row: port.row() })
            }
            _ => Ok(()),
        }
    }

    /// Releases a published block, once no stream writes it any more and the publisher's program has no views of it.
    pub fn retire(&self, slots: &Slots, held: &HeldSlot) {
        // As above.
        let _ = slots.publish(held.index(), held.word());
        point("topic: retired, nobody notified");
        fence_behind_change();
        self.collect(slots);
    }

    /// Returns whether a publisher may publish: it has neither left nor been detached.
    pub fn is_publisher(&self, port: PortId) -> bool {
        self.publishers[port.index].port.load() == port.word
    }

    /// Returns the number of samples that a publisher has published, for callers without its handle.
    pub fn published_by(&self, port: PortId) -> u64 {
        self.publishers[port.index].published.load(Ordering::Relaxed)
    }

    /// Makes the status of a published sample final. Does nothing if it is final already, or if the block holds another
    /// sample by now.
    pub fn settle(&self, block: u32, generation: u64, status: Status) {
        let Some(descriptor) = self.descriptors.get(block as usize) else { return };
        let seen = descriptor.status();
        if seen.generation() == generation && !seen.status().is_final() {
            // Stale if the broker has settled it, or the block holds another sample by now.
            let _ = descriptor.settle(seen, status);
        }
    }

    /// Announces that the caller may sleep until there is room, or until a subscriber joins. The caller must then try
    /// [`publish`](Self::publish) or count the [`subscribers`](Self::subscribers) again before it sleeps.
    pub fn prepare_for_space(&self) -> EventKey {
        self.control().space.prepare()
    }

    /// Sleeps until there may be room, for at most `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return early.
    pub fn sleep_for_space(&self, key: EventKey, limit: Duration) {
        self.control().space.sleep(key, limit);
    }
}

/// Maximum number of attempts to fill a position. Each failure is another publisher's success.
const MOST_ATTEMPTS: usize = 64;

/// No publisher comes so far by itself, so its numbers never overflow.
const MAX_SEQUENCE: u64 = 1 << 62;
