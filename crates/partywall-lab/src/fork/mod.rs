//! `partywall lab fork`: a child that was forked before CUDA changes its parent's memory, and children that are forked
//! later have no CUDA.
//!
//! | role | process | does |
//! |---|---|---|
//! | (child) | forked by the parent before it opens CUDA | opens the parent's handle, writes to the memory |
//! | parent | `partywall lab fork` | allocates, puts the handle into shared memory, forks again; concludes |

mod child;
mod parent;

use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "fork",
    title: "a forked child changes its parent's memory, and CUDA does not survive a fork",
    observer: Role::forking("parent", child::run, parent::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

// The words of the memory that both processes map.
/// [`OFFERED`], then [`ANSWERED`].
const STATE: usize = 0;
/// The UUID of the GPU, 16 bytes.
const UUID: usize = 1;
/// The address of the memory in the parent.
const ADDRESS: usize = 3;
/// The handle, 64 bytes.
const HANDLE: usize = 4;
/// The child's answers: the driver's code for the parent's address, and for the handle; its own address of the memory;
/// the first byte that it found.
const ADDRESS_CODE: usize = 12;
const HANDLE_CODE: usize = 13;
const OWN_ADDRESS: usize = 14;
const FOUND: usize = 15;

/// The words from [`UUID`] to the end of the handle are there.
const OFFERED: u64 = 1;
/// The child's answers are there.
const ANSWERED: u64 = 2;

const BYTES: u64 = 4 << 20;

/// The byte that the parent writes, and the byte that the child writes later.
const WRITTEN: u8 = 0x11;
const CHANGED: u8 = 0x22;

beliefs! {
    COPY = "copy": "A forked child has a copy of its parent's GPU memory.",
    ADDRESSES = "addresses": "A device address of the parent is valid in its child.",
    SURVIVES = "survives": "A child that is forked after the first CUDA call can use CUDA.",
    HARMS = "harms": "A fork harms CUDA in the parent.",
}
