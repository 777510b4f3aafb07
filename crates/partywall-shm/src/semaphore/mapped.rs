//! A semaphore in memory.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use super::{Attempt, Audit, Held};
use crate::slots::{Slots, Sort};

/// A mapped semaphore.
#[derive(Debug)]
pub struct Semaphore(Slots);

/// For the broker.
impl Semaphore {
    /// A new memfd, with `maximum` permits, all free.
    ///
    /// # Errors
    /// `InvalidInput` unless there are 1 to [`MAX_PERMITS`](super::MAX_PERMITS); else as memfd_create(2).
    pub fn create(maximum: u32) -> io::Result<OwnedFd> {
        Slots::create(&SORT, maximum)
    }

    /// Gives the permits of all rows that are `dead`, and their places among those who wait, to others, and whatever
    /// is in a state that nobody may make. Returns how many permits that were.
    ///
    /// To be called once the rows' processes are proved dead. Ends, whatever the bytes are, and may be repeated.
    pub fn recover(&self, dead: impl Fn(u16) -> bool) -> u32 {
        self.0.core().recover(dead, |_, _| false)
    }

    /// Counts what there is. While others use it the numbers are of no single moment.
    pub fn audit(&self) -> Audit {
        self.0.core().audit()
    }

    /// How many permits each row holds, without those that hold none.
    pub fn holders(&self) -> Vec<(u16, u32)> {
        self.0.core().holders()
    }
}

/// For members.
impl Semaphore {
    /// Maps a semaphore that a broker has made.
    ///
    /// # Errors
    /// `InvalidData` if it is none, or of another layout; else as
    /// [`SharedMap::writable`](partywall_os::map::SharedMap::writable).
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        Slots::map(&SORT, fd).map(Self)
    }

    /// How many permits there are.
    pub fn maximum(&self) -> u32 {
        self.0.maximum()
    }

    /// Takes a permit for a row if one is free and nobody waits.
    pub fn try_acquire(&self, row: u16) -> Option<Held> {
        self.0.core().try_acquire(row)
    }

    /// Takes a permit for a row, or begins to wait for one.
    pub fn acquire(&self, row: u16) -> Attempt<'_> {
        self.0.core().acquire(row)
    }

    /// Gives a permit back. `false` if it is not held any more, because the broker took it back.
    pub fn release(&self, held: &Held) -> bool {
        self.0.core().release(held)
    }

    /// Gives a permit to the next that somebody was given and has not taken for [`OVERDUE`](super::OVERDUE). To be called
    /// now and then by those who find none.
    pub fn look_after_granted(&self) {
        self.0.look_after_granted();
    }

    #[cfg(test)]
    pub(super) fn core(&self) -> crate::slots::Core<'_> {
        self.0.core()
    }
}

const SORT: Sort = Sort { magic: *b"PWSEMAPH", object: "semaphore", slots: "permits" };
