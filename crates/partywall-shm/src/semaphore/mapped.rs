//! A semaphore in memory.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
};

use crate::slots::{Slots, Sort};

/// A mapped semaphore: the slots are its permits.
#[derive(Debug)]
pub struct Semaphore(Slots);

impl Semaphore {
    /// Creates a memfd with `permits` permits, all free.
    ///
    /// # Errors
    /// `InvalidInput` unless there are 1 to [`MAX_PERMITS`](super::MAX_PERMITS); otherwise as memfd_create(2).
    pub fn create(permits: u32) -> io::Result<OwnedFd> {
        Slots::create(&SORT, permits)
    }

    /// Maps a semaphore that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a semaphore, or has another layout; otherwise as
    /// [`SharedMap::writable`](partywall_os::map::SharedMap::writable).
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        Slots::map(&SORT, fd).map(Self)
    }
}

impl Deref for Semaphore {
    type Target = Slots;

    fn deref(&self) -> &Slots {
        &self.0
    }
}

const SORT: Sort = Sort { magic: *b"PWSEMAPH", object: "semaphore", slots: "permits" };
