//! A counting semaphore that processes share: permits that are freed when their holder dies, and a queue of waiters.
//!
//! A permit is a slot; [`slots`](crate::slots) documents layout and protocol.

#[cfg(all(test, not(loom)))]
mod tests;

use crate::slots::MAX_SLOTS;
#[cfg(not(loom))]
use crate::slots::{SlotsOf, Sort};

/// The maximum number of permits of a semaphore.
pub const MAX_PERMITS: u32 = MAX_SLOTS;

/// A mapped semaphore: the slots are its permits.
#[cfg(not(loom))]
pub type Semaphore = SlotsOf<PermitSlots>;

/// The sort of slots of a [`Semaphore`].
#[cfg(not(loom))]
#[derive(Debug)]
pub enum PermitSlots {}

#[cfg(not(loom))]
impl Sort for PermitSlots {
    const MAGIC: [u8; 8] = *b"PWSEMAPH";
    const OBJECT: &str = "semaphore";
    const SLOTS: &str = "permits";
}
