//! A counting semaphore that processes share: permits that survive nobody, and a queue of those who wait for one.
//!
//! ```text
//!     0  magic         "PWSEMAPH"
//!     8  layout hash   of the description of this layout: another one is refused, never guessed
//!    16  maximum: u32  permits; then ring: u32, entries of the ring
//!    64  tickets: u64, look: u32
//!   128  head: u64
//!   192  tail: u64
//!   256  slots         one word a permit, filled up to whole cache lines
//!        entries       of the ring, 64 bytes each, the first eight in use
//! ```
//!
//! The bits of the words are in `word`, what is done with them in `core`.

mod audit;
mod core;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
mod word;

use std::time::Duration;

pub use self::core::{Attempt, Held, Polled, Waiter};
pub use audit::Audit;
#[cfg(not(loom))]
pub use mapped::Semaphore;

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = 1 << 16;

/// For how long a waiter may leave a permit that he was given before it is given to the next: far longer than a process
/// that runs takes.
pub const OVERDUE: Duration = Duration::from_secs(1);

/// Threads that can wait at once.
pub const MAX_WAITERS: u32 = 1024;

#[cfg(not(loom))]
mod mapped {
    use std::{
        io,
        os::fd::{AsFd, OwnedFd},
        sync::{Mutex, PoisonError, atomic::Ordering},
        time::Instant,
    };

    use partywall_os::{map::SharedMap, memfd};

    use super::{
        Attempt, Audit, Held, MAX_PERMITS, MAX_WAITERS, OVERDUE,
        core::{Core, Header},
        word::{Entry, Slot, SlotWord},
    };

    /// A mapped semaphore.
    #[derive(Debug)]
    pub struct Semaphore {
        memory: SharedMap,
        /// As it was when it was mapped; others may write to the word.
        maximum: u32,
        /// A permit that somebody was given and had not taken, and when that was first seen.
        granted: Mutex<Option<(Instant, (usize, SlotWord))>>,
    }

    /// For the broker.
    impl Semaphore {
        /// A new memfd, with `maximum` permits, all free.
        ///
        /// # Errors
        /// `InvalidInput` unless there are 1 to [`MAX_PERMITS`]; else as memfd_create(2).
        pub fn create(maximum: u32) -> io::Result<OwnedFd> {
            if !(1..=MAX_PERMITS).contains(&maximum) {
                let text = format!("a semaphore has 1 to {MAX_PERMITS} permits, not {maximum}");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            let mut draft = memfd::Draft::create("partywall:semaphore", bytes(maximum) as u64)?;
            let header = draft.writer();
            header.write_all_at(&MAGIC.to_le_bytes(), 0)?;
            header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
            header.write_all_at(&maximum.to_le_bytes(), 16)?;
            header.write_all_at(&MAX_WAITERS.to_le_bytes(), 20)?;
            Ok(draft.share()?)
        }

        /// Gives the permits of all rows that are `dead`, and their places among those who wait, to others, and whatever
        /// is in a state that nobody may make. Returns how many permits that were.
        ///
        /// To be called once the rows' processes are proved dead. Ends, whatever the bytes are, and may be repeated.
        pub fn recover(&self, dead: impl Fn(u16) -> bool) -> u32 {
            self.core().recover(dead)
        }

        /// Counts what there is. While others use it the numbers are of no single moment.
        pub fn audit(&self) -> Audit {
            self.core().audit()
        }

        /// How many permits each row holds, without those that hold none.
        pub fn holders(&self) -> Vec<(u16, u32)> {
            self.core().holders()
        }
    }

    /// For members.
    impl Semaphore {
        /// Maps a semaphore that a broker has made.
        ///
        /// # Errors
        /// `InvalidData` if it is none, or of another layout; else as [`SharedMap::writable`].
        pub fn map(fd: impl AsFd) -> io::Result<Self> {
            let memory = SharedMap::writable(fd)?;
            let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
            let Some([header]) = memory.atomics::<Header>(0, 1) else {
                return refuse(format!("{} bytes are too few for a semaphore", memory.len()));
            };
            let (magic, layout) = (header.magic.load(Ordering::Relaxed), header.layout.load(Ordering::Relaxed));
            if magic != MAGIC || layout != LAYOUT_HASH {
                return refuse(format!("no semaphore of the layout {LAYOUT_HASH:016x}: {magic:016x} {layout:016x}"));
            }
            let (maximum, ring) = (header.maximum.load(Ordering::Relaxed), header.ring.load(Ordering::Relaxed));
            if !(1..=MAX_PERMITS).contains(&maximum) || ring != MAX_WAITERS || memory.len() != bytes(maximum) {
                let len = memory.len();
                return refuse(format!("a semaphore of {maximum} permits, {ring} waiters and {len} bytes cannot be"));
            }
            Ok(Self { memory, maximum, granted: Mutex::default() })
        }

        /// How many permits there are.
        pub fn maximum(&self) -> u32 {
            self.maximum
        }

        /// Takes a permit for a row if one is free and nobody waits.
        pub fn try_acquire(&self, row: u16) -> Option<Held> {
            self.core().try_acquire(row)
        }

        /// Takes a permit for a row, or begins to wait for one.
        pub fn acquire(&self, row: u16) -> Attempt<'_> {
            self.core().acquire(row)
        }

        /// Gives a permit back. `false` if it is not held any more, because the broker took it back.
        pub fn release(&self, held: &Held) -> bool {
            self.core().release(held)
        }

        /// Gives a permit to the next that somebody was given and has not taken for [`OVERDUE`]. To be called now and then
        /// by those who find none.
        pub fn look_after_granted(&self) {
            let core = self.core();
            // Nothing is left half-done behind it.
            let mut granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner);
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

        pub(super) fn core(&self) -> Core<'_> {
            let slots = self.memory.atomics::<Slot>(size_of::<Header>(), self.maximum as usize);
            let ring = self.memory.atomics::<Entry>(ring_offset(self.maximum), MAX_WAITERS as usize);
            let header = self.memory.atomics::<Header>(0, 1).and_then(<[_]>::first);
            const PROOF: &str = "`map` has found the file to be as long as it has to be";
            Core { header: header.expect(PROOF), slots: slots.expect(PROOF), ring: ring.expect(PROOF) }
        }
    }

    /// Where the ring begins.
    fn ring_offset(maximum: u32) -> usize {
        size_of::<Header>() + (maximum as usize * size_of::<Slot>()).next_multiple_of(align_of::<Entry>())
    }

    /// Bytes of a semaphore.
    pub(super) fn bytes(maximum: u32) -> usize {
        ring_offset(maximum) + MAX_WAITERS as usize * size_of::<Entry>()
    }

    const MAGIC: u64 = u64::from_le_bytes(*b"PWSEMAPH");

    /// Change the text whenever the bytes change.
    const LAYOUT_HASH: u64 = crate::layout_hash(
        b"header 256: magic8 hash8 maximum4 ring4 0:40 tickets8 look4 0:52 head8 0:56 tail8 0:56; \
        slots8: state2 row16 tag46; ring64: state2 slot16 row16 lap30 0:56",
    );
}
