//! Slots that processes share, and a queue of the waiters for a free one: the permits of a semaphore, the blocks of a
//! pool.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | magic, layout hash, and the shape: the number of slots | the broker; see `control` |
//! | 64 | `tickets: u64` the next ticket; the first one is the time of creation | every member that tries to take a slot |
//! | 72 | `look: u32` a hint: where a free slot may be | every member |
//! | 128 | `head: u64` a hint: the position of the first waiter | every member |
//! | 192 | `tail: u64` a hint: the position of the next waiter | every member |
//! | 256 | slots: 8 bytes each, filled up to whole cache lines | see `word` |
//! | | ring: [`MAX_WAITERS`] entries of 64 bytes, of which 8 are in use | see `word` |
//!
//! `word` documents the bits of slots and entries, and `core` the protocol.

mod audit;
mod core;
#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod word;

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use self::{
    core::SlotsHeader,
    word::{Slot, WaiterEntry},
};
use crate::sync::SharedArray;

pub use self::core::{Attempt, HeldSlot, Polled, Waiter, WaiterTurn};
pub use crate::sync::Stale;
pub use audit::SlotAudit;
#[cfg(not(loom))]
pub use mapped::{SlotsOf, Sort};
pub(crate) use word::{SlotState, SlotWord};

/// The maximum number of slots: each has a 16-bit number.
pub(crate) const MAX_SLOTS: u32 = 1 << 16;

/// How long a waiter may leave a granted slot before the slot goes to the next waiter. A running process takes it far
/// sooner.
pub const OVERDUE: Duration = Duration::from_secs(1);

/// The maximum number of threads that can wait at the same time.
pub const MAX_WAITERS: u32 = 1024;

/// The slots of a semaphore or a pool.
#[derive(Debug)]
pub struct Slots {
    /// The lengths of these parts were fixed at the time of mapping, because other processes may overwrite the stored
    /// numbers.
    header: SharedArray<SlotsHeader>,
    slots: SharedArray<Slot>,
    ring: SharedArray<WaiterEntry>,
    /// A slot that was granted and not taken, and when that was first seen.
    granted: Mutex<Option<(Instant, (usize, SlotWord))>>,
}

impl Slots {
    #[inline]
    fn header(&self) -> &SlotsHeader {
        &self.header[0]
    }
}
