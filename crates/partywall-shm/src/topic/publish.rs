//! Publishing: how a block comes into the ring.
//!
//! 1. The publisher holds the block, and has written it and its descriptor.
//! 2. It finds the first position that is not filled, and behind a fence looks whether subscribers that are waited for
//!    still need what is in that entry. It knows the smallest of their cursors as of its last look, and looks again only
//!    when that does not do – mostly behind a sample, for the next one – or when somebody has joined. If it has filled the
//!    position before that one itself, the fence is that of its last wake.
//! 3. It fills the entry by one compare-and-swap. That fails if somebody else was at this position first; then the next
//!    one is tried. Now the sample is published.
//! 4. It moves the hint of the tail, lets go of the block – which now belongs to the topic – and wakes who sleeps.
//!
//! If it is killed or stopped between any two steps: before 3 the block is its own, and nothing else has happened. After 3
//! everything has; whoever comes next moves the hint, a sleeper looks by itself after [`MAX_SLEEP`](crate::MAX_SLEEP), and the block
//! stays the publisher's until it goes on or is proved dead. It may be that then the ring and subscribers have it too: it is free
//! when all have let go.
//!
//! **Why nobody is overrun who joins.** A subscriber that joins counts itself in `joins`, and behind a fence looks
//! for the tail; a publisher sees position `p` unfilled, and behind a fence looks at `joins`. If it does not see the
//! subscriber there, its fence was first, so that the subscriber finds the positions before `p` filled, and begins at
//! `p` − depth + 1 at least: it does not need what the publisher overwrites at `p`. If it comes later with another
//! position, it looks at `joins` again. The fence has to come after the positions before `p` were filled: if they were before
//! the publisher's last one, then that is it.

use super::{
    Status,
    core::Core,
    descriptor::{Origin, Words},
    entry::{EntryWord, Filling},
    port::{Occupancy, PortId, PortWord},
};
use crate::{
    crash::point,
    slots::{self, Held},
    sync::{Ordering, fence},
};

/// A publisher's place, and what it remembers.
#[derive(Debug)]
pub struct PublisherPlace {
    pub(super) index: usize,
    pub(super) port: PortWord,
    /// Samples that it has published.
    sequence: u64,
    /// Before which position everything may be overwritten, as of `joins`.
    floor: u64,
    joins: Option<u64>,
    /// All positions before it were filled before our last fence.
    fenced: u64,
}

/// What is said of a sample.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// [`Status::Ready`], or [`Status::Timeline`] or [`Status::Unverified`], if a stream still writes the block: then it
    /// stays held until it is [retired](super::Topic::retire).
    pub status: Status,
    /// The value that the publisher's timeline has afterwards.
    pub value: u64,
    /// The code of the elements' type.
    pub dtype: u8,
    /// The tensor's, of at most [`MAX_RANK`](super::MAX_RANK) dimensions.
    pub shape: &'a [u64],
    /// The tensor's.
    pub bytes: u64,
    /// The user's, of at most [`MAX_HEADER`](super::MAX_HEADER) bytes.
    pub header: &'a [u8],
}

/// Why a sample has not been published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpublished {
    /// The subscriber with this id, of the member of this row, has not read what would be overwritten.
    Blocked {
        /// The subscriber's.
        id: u64,
        /// Its member's.
        row: u16,
    },
    /// Other publishers were always faster. To be tried again.
    Busy,
    /// The broker has detached it from the topic.
    Detached,
}

impl PublisherPlace {
    pub(super) fn new(index: usize, port: PortWord) -> Self {
        Self { index, port, sequence: 0, floor: 0, joins: None, fenced: 0 }
    }

    /// Its number, which no other publisher or subscriber of the topic ever has.
    pub fn id(&self) -> u64 {
        self.port.id()
    }

    /// The place itself.
    pub fn port(&self) -> PortId {
        PortId { index: self.index, port: self.port }
    }

    /// Samples that it has published.
    pub fn published(&self) -> u64 {
        self.sequence
    }
}

impl Core<'_> {
    /// Publishes a block. Returns its position.
    pub(super) fn publish(
        self,
        slots: slots::Core<'_>,
        place: &mut PublisherPlace,
        held: &Held,
        message: &Message<'_>,
    ) -> Result<u64, Unpublished> {
        let us = &self.publishers[place.index];
        if us.port.load() != place.port {
            return Err(Unpublished::Detached);
        }
        self.describe(place, held, message);
        point("topic: described, not in the ring");
        let position = self.fill(place, held.index() as u16)?;
        point("topic: in the ring, tail not moved");
        self.advance(position, position + 1);
        place.sequence += 1;
        us.published.store(place.sequence, Ordering::Relaxed);
        point("topic: in the ring, block still held");
        if message.status.is_final() {
            slots.publish(held.index(), held.word());
        }
        point("topic: published, nobody notified");
        self.header.samples.notify();
        // Behind the fence of that.
        place.fenced = position + 1;
        self.collect(slots);
        // While readers are busy with this one: what has to be known of them for the next one has to come from them.
        let _ = self.check_space(place, position + 1);
        Ok(position)
    }

    /// Says what is in the block.
    pub(super) fn describe(self, place: &PublisherPlace, held: &Held, message: &Message<'_>) {
        self.descriptors[held.index() as usize].write(&Words {
            generation: held.generation(),
            origin: Origin {
                place: place.index as u16,
                row: place.port.row(),
                dtype: message.dtype,
                rank: message.shape.len() as u8,
                header: message.header.len() as u16,
            },
            publisher: place.port.id(),
            sequence: place.sequence,
            message,
        });
    }

    /// Puts the block into the first position that is not filled.
    pub(super) fn fill(self, place: &mut PublisherPlace, block: u16) -> Result<u64, Unpublished> {
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
            // Pairs with the one of who joins: see the head of this file.
            if position != place.fenced {
                fence(Ordering::SeqCst);
            }
            self.check_space(place, position)?;
            point("topic: space found, entry not filled");
            if entry.fill(seen, EntryWord::filled(at, block)) {
                return Ok(position);
            }
        }
        Err(Unpublished::Busy)
    }

    /// Whether nobody who is waited for needs what `position` overwrites.
    fn check_space(self, place: &mut PublisherPlace, position: u64) -> Result<(), Unpublished> {
        let depth = self.ring.len() as u64;
        // Pairs with the addition: who sees it sees the subscriber's port and cursor.
        let joins = self.header.joins.load(Ordering::Acquire);
        if place.joins == Some(joins) && position < place.floor.saturating_add(depth) {
            return Ok(());
        }
        let mut slowest = None;
        place.floor = u64::MAX;
        for subscriber in self.subscribers {
            let port = subscriber.port.load();
            if port.occupancy() != Occupancy::Active || subscriber.queue.load(Ordering::Relaxed) != 0 {
                continue;
            }
            // Pairs with the store of who has received: what it holds is seen by who looks for holds.
            let cursor = subscriber.cursor.load(Ordering::Acquire);
            if cursor < place.floor {
                (slowest, place.floor) = (Some(port), cursor);
            }
        }
        place.joins = Some(joins);
        match slowest {
            Some(port) if position >= place.floor.saturating_add(depth) => {
                Err(Unpublished::Blocked { id: port.id(), row: port.row() })
            }
            _ => Ok(()),
        }
    }

    /// Lets go of a block that was published while a stream wrote it.
    pub(super) fn retire(self, slots: slots::Core<'_>, held: &Held) {
        slots.publish(held.index(), held.word());
        point("topic: retired, nobody notified");
        fence(Ordering::SeqCst);
        self.collect(slots);
    }
}

/// How often a position is tried, at most. Each failure is another publisher's success.
const MOST_ATTEMPTS: usize = 64;
