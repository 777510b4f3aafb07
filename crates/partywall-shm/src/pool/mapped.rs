//! A pool's control memory.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
};

use crate::slots::{Slots, Sort};

/// The mapped control memory of a pool: the slots are its blocks.
#[derive(Debug)]
pub struct Pool(Slots);

impl Pool {
    /// Creates a memfd with the control memory of `blocks` blocks, all free.
    ///
    /// # Errors
    /// `InvalidInput` unless there are 1 to [`MAX_BLOCKS`](super::MAX_BLOCKS); otherwise as memfd_create(2).
    pub fn create(blocks: u32) -> io::Result<OwnedFd> {
        Slots::create(&SORT, blocks)
    }

    /// Maps the control memory of a pool that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a pool's, or has another layout; otherwise as
    /// [`SharedMap::writable`](partywall_os::map::SharedMap::writable).
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        Slots::map(&SORT, fd).map(Self)
    }
}

impl Deref for Pool {
    type Target = Slots;

    fn deref(&self) -> &Slots {
        &self.0
    }
}

const SORT: Sort = Sort { magic: *b"PWBLOCKS", object: "pool", slots: "blocks" };
