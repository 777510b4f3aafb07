//! A counting semaphore that processes share: permits that survive nobody, and a queue of those who wait for one.
//!
//! A permit is a slot of `slots`, where its layout, and what is done with it, are told.

#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use mapped::Semaphore;

pub use crate::slots::{Attempt, Audit, Held, MAX_WAITERS, OVERDUE, Polled, Slots, Waiter};

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = crate::slots::MAX_SLOTS;
