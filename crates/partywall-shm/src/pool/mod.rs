//! The control memory of a pool, which records the holder of each block. The blocks themselves are in other memory.
//!
//! A block is a slot; [`slots`](crate::slots) documents layout and protocol. The block's index is the slot's. Its *generation* is the
//! slot's ticket, so a block that was freed, or handed over, and taken again has another generation.
//!
//! An [offered](crate::slots::Slots::offer) block belongs to the offering member until a member that knows its index and generation
//! has [accepted](crate::slots::Slots::accept) it, and is freed if the offering member dies. A *published* block belongs to a topic
//! and not to a member, so no member's death frees it.

#[cfg(all(test, not(loom)))]
mod tests;

use crate::slots::MAX_SLOTS;
#[cfg(not(loom))]
use crate::slots::{SlotsOf, Sort};

/// The maximum number of blocks of a pool.
pub const MAX_BLOCKS: u32 = MAX_SLOTS;

/// The mapped control memory of a pool: the slots are its blocks.
#[cfg(not(loom))]
pub type Pool = SlotsOf<BlockSlots>;

/// The sort of slots of a [`Pool`].
#[cfg(not(loom))]
#[derive(Debug)]
pub enum BlockSlots {}

#[cfg(not(loom))]
impl Sort for BlockSlots {
    const MAGIC: [u8; 8] = *b"PWBLOCKS";
    const OBJECT: &str = "pool";
    const SLOTS: &str = "blocks";
}
