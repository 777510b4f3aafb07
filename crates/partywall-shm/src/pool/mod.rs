//! The control memory of a pool: which member has each block. The blocks themselves are in another memory.
//!
//! A block is a slot; `slots` documents layout and protocol. The block's index is the slot's. Its *generation* is the slot's
//! ticket, so a block that was freed, or handed over, and taken again has another generation.
//!
//! An [offered](Slots::offer) block belongs to its giver until a member that knows its index and generation has
//! [accepted](Slots::accept) it, and comes back with the giver's death. A *published* block belongs to a topic and to no
//! member, so no member's death changes that.

#[cfg(all(test, not(loom)))]
mod tests;

pub use crate::slots::{Attempt, Audit, Held, MAX_WAITERS, OVERDUE, Polled, Slots, Waiter};

/// The most blocks that a pool can have.
pub const MAX_BLOCKS: u32 = crate::slots::MAX_SLOTS;

/// The mapped control memory of a pool: the slots are its blocks.
#[cfg(not(loom))]
pub type Pool = crate::slots::SlotsOf<Blocks>;

/// The sort of slots of a [`Pool`].
#[cfg(not(loom))]
#[derive(Debug)]
pub enum Blocks {}

#[cfg(not(loom))]
impl crate::slots::Sort for Blocks {
    const MAGIC: [u8; 8] = *b"PWBLOCKS";
    const OBJECT: &str = "pool";
    const SLOTS: &str = "blocks";
}
