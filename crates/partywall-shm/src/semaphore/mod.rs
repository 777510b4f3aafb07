//! A counting semaphore that processes share: permits that come back with their holder's death, and a queue of waiters.
//!
//! A permit is a slot; `slots` documents layout and protocol.

#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use mapped::Semaphore;

pub use crate::slots::{Attempt, Audit, Held, MAX_WAITERS, OVERDUE, Polled, Slots, Waiter};

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = crate::slots::MAX_SLOTS;
