//! Which blocks of a pool are whose: the words behind memory that holds the blocks themselves.
//!
//! A block is a slot of `slots`, where the layout, and what is done with it, are told. Its index is the
//! slot's; its *generation* is the slot's ticket, so that one that was freed, or handed over, and taken again is another.
//!
//! A block that is [offered](Slots::offer) is its giver's until somebody who knows its index and generation has
//! [accepted](Slots::accept) it, and comes back with the giver's death. A *published* block is a topic's: it belongs to no
//! member, and no member's death changes that.

#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use mapped::Pool;

pub use crate::slots::{Attempt, Audit, Held, MAX_WAITERS, OVERDUE, Polled, Slots, Waiter};

/// The most blocks that a pool can have.
pub const MAX_BLOCKS: u32 = crate::slots::MAX_SLOTS;
