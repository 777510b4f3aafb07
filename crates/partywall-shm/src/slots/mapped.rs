//! Slots in memory that the broker creates and members map.

use std::{
    io,
    marker::PhantomData,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, atomic::Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use partywall_os::{map::SharedMap, memfd};

use super::{
    MAX_SLOTS, MAX_WAITERS, Slots,
    core::Header,
    word::{QueueEntry, Slot},
};
use crate::invalid;

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
    /// `InvalidInput` unless there are 1 to 65,536; otherwise as memfd_create(2).
    pub fn create(maximum: u32) -> io::Result<OwnedFd> {
        if !(1..=MAX_SLOTS).contains(&maximum) {
            let text = format!("a {} has 1 to {MAX_SLOTS} {}, not {maximum}", S::OBJECT, S::SLOTS);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut draft = memfd::Draft::create(&format!("partywall:{}", S::OBJECT), bytes(maximum) as u64)?;
        let header = draft.writer();
        header.write_all_at(&S::MAGIC, 0)?;
        header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
        header.write_all_at(&maximum.to_le_bytes(), 16)?;
        header.write_all_at(&MAX_WAITERS.to_le_bytes(), 20)?;
        header.write_all_at(&first_ticket().to_le_bytes(), 64)?;
        Ok(draft.share()?)
    }

    /// Maps slots that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory does not contain slots of this kind, or has another layout; otherwise as
    /// [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = Arc::new(SharedMap::writable(fd)?);
        let len = memory.len();
        let Some(header) = memory.part::<Header>(0, 1) else {
            return Err(invalid(format!("{len} bytes are too few for a {}", S::OBJECT)));
        };
        let found = (header[0].magic.load(Ordering::Relaxed), header[0].layout.load(Ordering::Relaxed));
        crate::check_layout(S::OBJECT, found, (u64::from_le_bytes(S::MAGIC), LAYOUT_HASH))?;
        let maximum = header[0].maximum.load(Ordering::Relaxed);
        let entries = header[0].ring.load(Ordering::Relaxed);
        if !(1..=MAX_SLOTS).contains(&maximum) || entries != MAX_WAITERS || len != bytes(maximum) {
            let object = format!("a {} of {maximum} {}", S::OBJECT, S::SLOTS);
            return Err(invalid(format!("{object}, {entries} waiters and {len} bytes are invalid")));
        }
        let slots = memory.part(size_of::<Header>(), maximum as usize);
        let ring = memory.part(ring_offset(maximum), entries as usize);
        let (slots, ring) = slots.zip(ring).expect("the length is that of the parts");
        let slots = Slots { header, slots, ring, granted: Mutex::default() };
        Ok(Self { slots, sort: PhantomData })
    }
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

/// Byte offset of the ring.
fn ring_offset(maximum: u32) -> usize {
    size_of::<Header>() + (maximum as usize * size_of::<Slot>()).next_multiple_of(align_of::<QueueEntry>())
}

/// Bytes of the memory of `maximum` slots.
pub(crate) fn bytes(maximum: u32) -> usize {
    ring_offset(maximum) + MAX_WAITERS as usize * size_of::<QueueEntry>()
}

/// Change the text whenever the bytes change, and never for a name alone.
pub(crate) const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 256: magic8 hash8 maximum4 ring4 0:40 tickets8 look4 0:52 head8 0:56 tail8 0:56; \
    slots8: state2 (free held handed offered) row16 tag46; ring64: state2 slot16 row16 lap30 0:56",
);
