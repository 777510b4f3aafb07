//! Slots that processes share, of which each is free or somebody's, and a queue of those who wait for one: the permits of
//! a semaphore, the blocks of a pool.
//!
//! ```text
//!     0  magic         of the sort
//!     8  layout hash   of the description of this layout: another one is refused, never guessed
//!    16  maximum: u32  slots; then ring: u32, entries of the ring
//!    64  tickets: u64, look: u32; the first ticket is the time when it was made
//!   128  head: u64
//!   192  tail: u64
//!   256  slots         one word each, filled up to whole cache lines
//!        entries       of the ring, 64 bytes each, the first eight in use
//! ```
//!
//! The bits of the words are in `word`, what is done with them in `core`.

mod audit;
mod core;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod word;

use std::time::Duration;

pub(crate) use self::core::Core;
pub use self::core::{Attempt, Held, Polled, Waiter};
pub use audit::Audit;
#[cfg(not(loom))]
pub(crate) use mapped::Slots;
#[cfg(all(test, not(loom)))]
pub(crate) use mapped::bytes;
pub(crate) use word::{SlotWord, State};

/// The most slots that there can be: each has a number of 16 bits.
pub(crate) const MAX_SLOTS: u32 = 1 << 16;

/// For how long a waiter may leave what he was given before it is given to the next: far longer than a process that runs
/// takes.
pub const OVERDUE: Duration = Duration::from_secs(1);

/// Threads that can wait at once.
pub const MAX_WAITERS: u32 = 1024;

/// What the slots are.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct Sort {
    pub(crate) magic: [u8; 8],
    /// What they belong to, for messages.
    pub(crate) object: &'static str,
    pub(crate) slots: &'static str,
}

#[cfg(not(loom))]
mod mapped {
    use std::{
        io,
        os::fd::{AsFd, OwnedFd},
        sync::{Arc, Mutex, atomic::Ordering},
        time::{Instant, SystemTime, UNIX_EPOCH},
    };

    use partywall_os::{
        lock::IgnorePoison,
        map::{Part, SharedMap},
        memfd,
    };

    use super::{
        MAX_SLOTS, MAX_WAITERS, OVERDUE, Sort,
        core::{Core, Header},
        word::{Entry, Slot, SlotWord},
    };

    /// Mapped slots.
    #[derive(Debug)]
    pub(crate) struct Slots {
        /// How many there are of each is as it was when it was mapped; others may write to the words that say so.
        header: Part<Header>,
        slots: Part<Slot>,
        ring: Part<Entry>,
        /// A slot that somebody was given and had not taken, and when that was first seen.
        granted: Mutex<Option<(Instant, (usize, SlotWord))>>,
    }

    impl Slots {
        /// A new memfd, with `maximum` slots, all free.
        ///
        /// # Errors
        /// `InvalidInput` unless there are 1 to [`MAX_SLOTS`]; else as memfd_create(2).
        pub(crate) fn create(sort: &Sort, maximum: u32) -> io::Result<OwnedFd> {
            let Sort { magic, object, slots } = sort;
            if !(1..=MAX_SLOTS).contains(&maximum) {
                let text = format!("a {object} has 1 to {MAX_SLOTS} {slots}, not {maximum}");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            let mut draft = memfd::Draft::create(&format!("partywall:{object}"), bytes(maximum) as u64)?;
            let header = draft.writer();
            header.write_all_at(magic, 0)?;
            header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
            header.write_all_at(&maximum.to_le_bytes(), 16)?;
            header.write_all_at(&MAX_WAITERS.to_le_bytes(), 20)?;
            header.write_all_at(&first_ticket().to_le_bytes(), 64)?;
            Ok(draft.share()?)
        }

        /// Maps slots that a broker has made.
        ///
        /// # Errors
        /// `InvalidData` if they are none of that sort, or of another layout; else as [`SharedMap::writable`].
        pub(crate) fn map(sort: &Sort, fd: impl AsFd) -> io::Result<Self> {
            let object = sort.object;
            let memory = Arc::new(SharedMap::writable(fd)?);
            let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
            let Some([header]) = memory.atomics::<Header>(0, 1) else {
                return refuse(format!("{} bytes are too few for a {object}", memory.len()));
            };
            let magic = header.magic.load(Ordering::Relaxed);
            let layout = header.layout.load(Ordering::Relaxed);
            crate::check_layout(object, (magic, layout), (u64::from_le_bytes(sort.magic), LAYOUT_HASH))?;
            let maximum = header.maximum.load(Ordering::Relaxed);
            let ring = header.ring.load(Ordering::Relaxed);
            if !(1..=MAX_SLOTS).contains(&maximum) || ring != MAX_WAITERS || memory.len() != bytes(maximum) {
                let slots = sort.slots;
                let len = memory.len();
                return refuse(format!("a {object} of {maximum} {slots}, {ring} waiters and {len} bytes cannot be"));
            }
            let of_the_right_length = "its length is that of its parts";
            let header = memory.part(0, 1).expect(of_the_right_length);
            let slots = memory.part(size_of::<Header>(), maximum as usize).expect(of_the_right_length);
            let ring = memory.part(ring_offset(maximum), MAX_WAITERS as usize).expect(of_the_right_length);
            Ok(Self { header, slots, ring, granted: Mutex::default() })
        }

        /// How many slots there are.
        pub(crate) fn maximum(&self) -> u32 {
            self.core().slots.len() as u32
        }

        /// Gives a slot to the next that somebody was given and has not taken for [`OVERDUE`]. To be called now and then
        /// by those who find none.
        pub(crate) fn look_after_granted(&self) {
            let core = self.core();
            // Nothing is left half-done behind it.
            let mut granted = self.granted.lock().ignore_poison();
            match *granted {
                Some((since, seen)) if core.is(seen) => {
                    if since.elapsed() >= OVERDUE {
                        core.revoke(seen);
                        *granted = None;
                    }
                }
                _ => *granted = core.first_granted().map(|seen| (Instant::now(), seen)),
            }
        }

        #[inline]
        pub(crate) fn core(&self) -> Core<'_> {
            Core { header: &self.header[0], slots: &self.slots, ring: &self.ring }
        }
    }

    /// A ticket that none was as large as in slots that were made before: those grow more slowly than this one, by one each
    /// time that somebody tries to take a slot. So what names a slot and its ticket names nothing in slots that are made
    /// later under the same name. (A ticket has 46 bits: the same ones come again after 52 days.)
    fn first_ticket() -> u64 {
        // Before 1970, and in some centuries, it is any number.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now.as_nanos() as u64 / 64
    }

    /// Where the ring begins.
    fn ring_offset(maximum: u32) -> usize {
        size_of::<Header>() + (maximum as usize * size_of::<Slot>()).next_multiple_of(align_of::<Entry>())
    }

    /// Bytes of so many slots, with all that belongs to them.
    pub(crate) fn bytes(maximum: u32) -> usize {
        ring_offset(maximum) + MAX_WAITERS as usize * size_of::<Entry>()
    }

    /// Change the text whenever the bytes change.
    const LAYOUT_HASH: u64 = crate::layout_hash(
        b"header 256: magic8 hash8 maximum4 ring4 0:40 tickets8 look4 0:52 head8 0:56 tail8 0:56; \
        slots8: state2 (free held handed offered) row16 tag46; ring64: state2 slot16 row16 lap30 0:56",
    );
}
