//! A counting semaphore that processes share: permits that are freed when their holder dies, and a queue of waiters.
//!
//! A permit is a slot; `slots` documents layout and protocol.

#[cfg(all(test, not(loom)))]
mod tests;

pub use crate::slots::{Attempt, Audit, Held, MAX_WAITERS, OVERDUE, Polled, Slots, Waiter};

/// The maximum number of permits of a semaphore.
pub const MAX_PERMITS: u32 = crate::slots::MAX_SLOTS;

/// A mapped semaphore: the slots are its permits.
#[cfg(not(loom))]
pub type Semaphore = crate::slots::SlotsOf<Permits>;

/// The sort of slots of a [`Semaphore`].
#[cfg(not(loom))]
#[derive(Debug)]
pub enum Permits {}

#[cfg(not(loom))]
impl crate::slots::Sort for Permits {
    const MAGIC: [u8; 8] = *b"PWSEMAPH";
    const OBJECT: &str = "semaphore";
    const SLOTS: &str = "permits";
}
