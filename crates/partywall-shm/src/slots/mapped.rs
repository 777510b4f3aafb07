//! Slots in memory that the broker creates and members map.

use std::{
    io,
    marker::PhantomData,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, atomic::Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

#[cfg(doc)]
use partywall_os::map::SharedMap;

use super::{
    MAX_SLOTS, MAX_WAITERS, Slots,
    core::SlotsHeader,
    word::{Slot, WaiterEntry},
};
use crate::control::{self, ControlMemory, Numbers, parts};

/// A kind of slots.
pub trait Sort {
    /// The first bytes of the memory.
    const MAGIC: [u8; 8];
    /// The name of the object that has the slots, for messages.
    const OBJECT: &'static str;
    /// The name of the slots, for messages.
    const SLOTS: &'static str;
}

/// Mapped slots of one kind.
#[derive(Debug)]
pub struct SlotsOf<S> {
    slots: Slots,
    sort: PhantomData<S>,
}

impl<S: Sort> SlotsOf<S> {
    /// Creates a memfd with `maximum` slots, all free.
    ///
    /// # Errors
    /// `InvalidInput` unless there are 1 to 65,536; otherwise as memfd_create(2) and mmap(2).
    pub fn create(maximum: u32) -> io::Result<OwnedFd> {
        let fd = control::create::<Self>(maximum)?;
        Self::map(&fd)?.header().tickets.store(first_ticket(), Ordering::Relaxed);
        Ok(fd)
    }

    /// Maps slots that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory does not contain slots of this kind, or has another layout; otherwise as
    /// [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }
}

impl<S: Sort> ControlMemory for SlotsOf<S> {
    const MAGIC: [u8; 8] = S::MAGIC;
    const NAME: &'static str = S::OBJECT;
    type Shape = u32;

    fn check(maximum: u32) -> Result<(), String> {
        let is_possible = (1..=MAX_SLOTS).contains(&maximum);
        let why = || format!("a {} has 1 to {MAX_SLOTS} {}, not {maximum}", S::OBJECT, S::SLOTS);
        is_possible.then_some(()).ok_or_else(why)
    }

    fn numbers(maximum: u32) -> Numbers {
        [u64::from(maximum), 0, 0, 0, 0, 0]
    }

    fn shape_of([maximum, ..]: Numbers) -> u32 {
        control::narrowed(maximum)
    }

    parts!(|maximum| {
        header: SlotsHeader = 1,
        slots: Slot = maximum,
        ring: WaiterEntry = MAX_WAITERS,
    } => Self { slots: Slots { header, slots, ring, granted: Mutex::default() }, sort: PhantomData });
}

impl<S> Deref for SlotsOf<S> {
    type Target = Slots;

    fn deref(&self) -> &Slots {
        &self.slots
    }
}

/// Returns a ticket that is larger than all tickets of slots that were created before. Their tickets grow more slowly
/// than this one: by one for each attempt to take a slot. A slot and its ticket are therefore never valid in slots that
/// are created later under the same name. (A ticket has 46 bits, so tickets repeat after 52 days.)
fn first_ticket() -> u64 {
    // A clock before 1970 or far in the future gives an arbitrary ticket.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 / 64
}
