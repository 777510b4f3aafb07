//! What is said of a sample: the words of its block's descriptor.
//!
//! | offset | field | |
//! |---|---|---|
//! | 0 | `generation` | of the block: its slot's ticket |
//! | 8 | `status` | see below; the only word that changes later |
//! | 16 | `origin` | publisher's place, its member's row, dtype, rank, length of the header: 16, 16, 8, 8 and 16 bits |
//! | 24 | `publisher` | its id |
//! | 32 | `sequence` | the publisher's own count |
//! | 40 | `bytes` | of the tensor |
//! | 48 | `value` | of the publisher's timeline; then eight zero bytes |
//! | 64 | `shape` | of the tensor, eight words |
//! | 128 | `header` | the user's, 32 words |
//!
//! Rules:
//! 1. All words are written by the holder of the block, before it is in the ring, and by nobody while it is published.
//! 2. A reader has a hold on the block, taken from the ring; so the words stay as they are until he lets go.
//! 3. Who has no hold may read them, and believes nothing unless the block's slot still has the same word behind it.
//! 4. `status` is changed afterwards by compare-and-swap, by the publisher or, when it is dead or evicted, by the broker,
//!    from *by timeline* or *unverified* to something final. The generation is part of it, so that who was stopped before
//!    the change changes nothing of a later sample.
//!
//! | status | bits 0–2 | |
//! |---|---|---|
//! | ready | 0 | the host had written the block before it published it |
//! | by timeline | 1 | a stream writes the block until the publisher's timeline has reached `value` |
//! | unverified | 2 | the same, and it rests on samples that are not decided themselves |
//! | done | 3 | final: a stream has written it |
//! | failed | 4 | final: it will never be complete; bits 3–6 say how its publisher ended |
//! | tainted | 5 | final: it was written from a sample that had failed |
//! | generation | bits 18–63 | |
//!
//! If the publisher is killed or stopped while it writes these words, nobody looks at them. If it ends before a status is
//! final, [`Topic::detach`](super::Topic::detach) makes it so.

use super::{Description, Message};
use crate::{
    sync::{AtomicU64, Ordering, prefetch, prefetch_to_write},
    timeline::Ending,
};

/// The most bytes of a user's header.
pub const MAX_HEADER: usize = 256;

/// The most dimensions of a sample's tensor.
pub const MAX_RANK: usize = 8;

/// See the head of this file.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Descriptor {
    generation: AtomicU64,
    status: AtomicU64,
    origin: AtomicU64,
    publisher: AtomicU64,
    sequence: AtomicU64,
    bytes: AtomicU64,
    value: AtomicU64,
    _zero: AtomicU64,
    shape: [AtomicU64; SHAPE_WORDS],
    header: [AtomicU64; HEADER_WORDS],
}

/// Whether a sample's memory may be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Its publisher's host had written it before it published it.
    Ready,
    /// A stream has written it once the publisher's timeline has reached the sample's value.
    Timeline,
    /// The same, and it rests on samples of which it is not known yet.
    Unverified,
    /// A stream has written it.
    Done,
    /// It will never be complete, because its publisher ended.
    Failed(Ending),
    /// It was written from a sample that had failed.
    Tainted,
}

/// A status word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StatusWord(u64);

/// What is written with a sample: rule 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) generation: u64,
    pub(super) origin: Origin,
    pub(super) publisher: u64,
    pub(super) sequence: u64,
    pub(super) message: &'a Message<'a>,
}

/// Where a sample comes from, and what its other words mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    /// The publisher's.
    pub(super) place: u16,
    pub(super) row: u16,
    pub(super) dtype: u8,
    pub(super) rank: u8,
    /// Length of the header.
    pub(super) header: u16,
}

impl Origin {
    fn word(self) -> u64 {
        u64::from(self.place)
            | u64::from(self.row) << 16
            | u64::from(self.dtype) << 32
            | u64::from(self.rank) << 40
            | u64::from(self.header) << 48
    }

    fn of(word: u64) -> Self {
        Self {
            place: word as u16,
            row: (word >> 16) as u16,
            dtype: (word >> 32) as u8,
            rank: (word >> 40) as u8,
            header: (word >> 48) as u16,
        }
    }
}

impl StatusWord {
    fn new(generation: u64, status: Status) -> Self {
        let bits = match status {
            Status::Ready => 0,
            Status::Timeline => 1,
            Status::Unverified => 2,
            Status::Done => 3,
            Status::Failed(ending) => 4 | (ending as u64) << 3,
            Status::Tainted => 5,
        };
        Self(bits | generation << GENERATION)
    }

    /// What nobody may write is taken for a failure.
    pub(super) fn status(self) -> Status {
        match self.0 & 7 {
            0 => Status::Ready,
            1 => Status::Timeline,
            2 => Status::Unverified,
            3 => Status::Done,
            5 => Status::Tainted,
            _ => Status::Failed(Ending::from_code((self.0 >> 3 & 15) as u32).unwrap_or(Ending::OwnerFaulted)),
        }
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION
    }
}

impl Status {
    /// Whether it stays as it is.
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Timeline | Self::Unverified)
    }
}

/// For the holder of the block.
impl Descriptor {
    pub(super) fn write(&self, words: &Words<'_>) {
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        // What orders these stores is the change of the entry that shows them.
        set(&self.generation, words.generation);
        set(&self.origin, words.origin.word());
        set(&self.publisher, words.publisher);
        set(&self.sequence, words.sequence);
        set(&self.bytes, words.message.bytes);
        set(&self.value, words.message.value);
        for (word, extent) in self.shape.iter().zip(words.message.shape) {
            set(word, *extent);
        }
        for (word, chunk) in self.header.iter().zip(words.message.header.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            set(word, u64::from_le_bytes(bytes));
        }
        // Release, and last: who finds this status still there when he changes it knows that the words which he read
        // after it are of this generation, or that nobody looks at that status any more.
        self.status.store(StatusWord::new(words.generation, words.message.status).0, Ordering::Release);
    }
}

/// For all.
impl Descriptor {
    /// Has the processor fetch what every reader reads.
    pub(super) fn prefetch(&self) {
        prefetch(&self.generation);
        prefetch(&self.shape);
    }

    /// Has the processor fetch what every publisher writes.
    pub(super) fn prefetch_to_write(&self) {
        prefetch_to_write(&self.generation);
        prefetch_to_write(&self.shape);
    }

    pub(super) fn origin(&self) -> Origin {
        Origin::of(self.origin.load(Ordering::Relaxed))
    }

    pub(super) fn publisher(&self) -> u64 {
        self.publisher.load(Ordering::Relaxed)
    }

    pub(super) fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    pub(super) fn describe(&self) -> Description {
        let origin = self.origin();
        let mut shape = [0; MAX_RANK];
        for (extent, word) in shape.iter_mut().zip(&self.shape).take(origin.rank.into()) {
            *extent = word.load(Ordering::Relaxed);
        }
        Description {
            generation: self.generation.load(Ordering::Relaxed),
            publisher: self.publisher(),
            sequence: self.sequence.load(Ordering::Relaxed),
            dtype: origin.dtype,
            rank: usize::from(origin.rank).min(MAX_RANK),
            shape,
            bytes: self.bytes.load(Ordering::Relaxed),
            value: self.value(),
            status: self.status().status(),
        }
    }

    /// The user's header; never more than [`MAX_HEADER`] bytes.
    pub(super) fn header(&self) -> Vec<u8> {
        let len = usize::from(self.origin().header).min(MAX_HEADER);
        let words = self.header.iter().take(len.div_ceil(8));
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }

    pub(super) fn status(&self) -> StatusWord {
        // Pairs with `settle`.
        StatusWord(self.status.load(Ordering::Acquire))
    }

    /// Makes a status that was seen final: rule 4.
    pub(super) fn settle(&self, seen: StatusWord, status: Status) -> bool {
        let settled = StatusWord::new(seen.generation(), status);
        self.status.compare_exchange(seen.0, settled.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(all(test, loom))]
impl Descriptor {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            generation: zero(),
            status: zero(),
            origin: zero(),
            publisher: zero(),
            sequence: zero(),
            bytes: zero(),
            value: zero(),
            _zero: zero(),
            shape: std::array::from_fn(|_| zero()),
            header: std::array::from_fn(|_| zero()),
        }
    }
}

#[cfg(not(loom))]
mod layout {
    #![allow(unsafe_code)]

    const _: () = assert!(size_of::<super::Descriptor>() == 384);

    // SAFETY: `repr(C)`, its fields are atomics and arrays of them, and lie without gaps: their sizes add up to 384.
    unsafe impl partywall_os::map::Atomics for super::Descriptor {}
}

/// Where the generation begins in a status.
const GENERATION: u32 = 18;
/// Words of a user's header. A model does not need them.
const HEADER_WORDS: usize = if cfg!(loom) { 0 } else { MAX_HEADER / 8 };
/// Words of a shape.
const SHAPE_WORDS: usize = if cfg!(loom) { 0 } else { MAX_RANK };
