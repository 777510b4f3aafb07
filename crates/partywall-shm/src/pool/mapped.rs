//! A pool's words in memory.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use super::{Attempt, Audit, Held};
use crate::slots::{Core, Slots, Sort, State};

/// A pool's words, mapped.
#[derive(Debug)]
pub struct Pool(Slots);

/// For the broker.
impl Pool {
    /// A new memfd, with the words of `blocks` blocks, all free.
    ///
    /// # Errors
    /// `InvalidInput` unless there are 1 to [`MAX_BLOCKS`](super::MAX_BLOCKS); else as memfd_create(2).
    pub fn create(blocks: u32) -> io::Result<OwnedFd> {
        Slots::create(&SORT, blocks)
    }

    /// Gives the blocks that rows which are `dead` hold or offer, and their places among those who wait, to others, and
    /// whatever is in a state that nobody may make. Returns how many blocks that were.
    ///
    /// Published blocks are those of the row [`NOBODY`](crate::members::NOBODY). Where there is no topic somebody has
    /// made them who must not, and it is as `dead` as any.
    ///
    /// To be called once the rows' processes are proved dead. Ends, whatever the bytes are, and may be repeated.
    pub fn recover(&self, dead: impl Fn(u16) -> bool) -> u32 {
        self.core().recover(dead, |_, _| false)
    }

    /// Counts what there is. While others use it the numbers are of no single moment.
    pub fn audit(&self) -> Audit {
        self.core().audit()
    }

    /// How many blocks each row holds or offers, without those that have none.
    pub fn holders(&self) -> Vec<(u16, u32)> {
        self.core().holders()
    }
}

/// For members.
impl Pool {
    /// Maps a pool's words that a broker has made.
    ///
    /// # Errors
    /// `InvalidData` if they are none, or of another layout; else as
    /// [`SharedMap::writable`](partywall_os::map::SharedMap::writable).
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        Slots::map(&SORT, fd).map(Self)
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u32 {
        self.0.maximum()
    }

    /// Takes a block for a row if one is free and nobody waits.
    pub fn try_alloc(&self, row: u16) -> Option<Held> {
        self.core().try_acquire(row)
    }

    /// A free block, which [`Pool::try_alloc`] is likely to take next.
    pub fn next_free(&self) -> Option<u32> {
        self.core().next_free()
    }

    /// Takes a block for a row, or begins to wait for one.
    pub fn alloc(&self, row: u16) -> Attempt<'_> {
        self.core().acquire(row)
    }

    /// Gives a block back. `false` if it is not held any more, because the broker took it back, or it was offered.
    pub fn free(&self, held: &Held) -> bool {
        self.core().release(held)
    }

    /// Lets whoever knows its index and generation take a block over. `false` if it is not held any more.
    pub fn offer(&self, held: &Held) -> bool {
        self.core().offer(held)
    }

    /// Takes a block over that is offered with this generation; it has another then. `None` if it is not, or not any more.
    pub fn accept(&self, row: u16, index: u32, generation: u64) -> Option<Held> {
        self.core().accept(row, index, generation)
    }

    /// Whether a block is held, offered or published with this generation.
    pub fn is_current(&self, index: u32, generation: u64) -> bool {
        let in_use = |state| matches!(state, State::Held(_) | State::Offered(_));
        self.core().seen(index).is_some_and(|seen| in_use(seen.state()) && seen.ticket() == generation)
    }

    /// Gives a block to the next that somebody was given and has not taken for [`OVERDUE`](super::OVERDUE). To be called
    /// now and then by those who find none.
    pub fn look_after_granted(&self) {
        self.0.look_after_granted();
    }

    /// The words, for a topic's own rules.
    pub(crate) fn core(&self) -> Core<'_> {
        self.0.core()
    }
}

const SORT: Sort = Sort { magic: *b"PWBLOCKS", object: "pool", slots: "blocks" };
