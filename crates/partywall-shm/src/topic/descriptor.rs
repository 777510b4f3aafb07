//! What is said of a sample: the words of its block's descriptor.
//!
//! | offset | field | |
//! |---|---|---|
//! | 0 | `generation` | of the block: its slot's ticket |
//! | 8 | `position` | where the sample is in the topic's order, if it has been published |
//! | 16 | `status` | see below; the only word that changes later |
//! | 24 | `origin` | publisher's place, its member's row, dtype, rank, length of the header: 16, 16, 8, 8 and 16 bits |
//! | 32 | `publisher` | its id |
//! | 40 | `sequence` | the publisher's own count |
//! | 48 | `bytes` | of the tensor |
//! | 56 | `value` | of the publisher's timeline |
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
//! final, [`Topic::part`](super::Topic::part) makes it so.

use crate::{
    sync::{AtomicU64, Ordering},
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
    position: AtomicU64,
    status: AtomicU64,
    origin: AtomicU64,
    publisher: AtomicU64,
    sequence: AtomicU64,
    bytes: AtomicU64,
    value: AtomicU64,
    shape: [AtomicU64; MAX_RANK],
    header: [AtomicU64; MAX_HEADER / 8],
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
    pub(super) status: Status,
    pub(super) origin: Origin,
    pub(super) publisher: u64,
    pub(super) sequence: u64,
    pub(super) bytes: u64,
    pub(super) value: u64,
    pub(super) shape: &'a [u64],
    pub(super) header: &'a [u8],
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
    /// Writes everything but the position.
    pub(super) fn write(&self, words: &Words<'_>) {
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        // What orders these stores is the change of the entry that shows them.
        set(&self.generation, words.generation);
        set(&self.origin, words.origin.word());
        set(&self.publisher, words.publisher);
        set(&self.sequence, words.sequence);
        set(&self.bytes, words.bytes);
        set(&self.value, words.value);
        for (word, extent) in self.shape.iter().zip(words.shape) {
            set(word, *extent);
        }
        for (word, chunk) in self.header.iter().zip(words.header.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            set(word, u64::from_le_bytes(bytes));
        }
        // Release, and last: who finds this status still there when he changes it knows that the words which he read
        // after it are of this generation, or that nobody looks at that status any more.
        self.status.store(StatusWord::new(words.generation, words.status).0, Ordering::Release);
    }

    /// Says where the sample is about to be. Release: who sees the position of a block that is not in the ring there sees
    /// that entry at least as its publisher saw it.
    pub(super) fn set_position(&self, position: u64) {
        self.position.store(position, Ordering::Release);
    }
}

/// For all.
impl Descriptor {
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    pub(super) fn position(&self) -> u64 {
        self.position.load(Ordering::Acquire)
    }

    pub(super) fn origin(&self) -> Origin {
        Origin::of(self.origin.load(Ordering::Relaxed))
    }

    pub(super) fn publisher(&self) -> u64 {
        self.publisher.load(Ordering::Relaxed)
    }

    pub(super) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    /// The first `rank` extents, of at most [`MAX_RANK`].
    pub(super) fn shape(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.shape.iter().take(rank).map(|word| word.load(Ordering::Relaxed))
    }

    /// The first `len` bytes of the header, of at most [`MAX_HEADER`].
    pub(super) fn header(&self, len: usize) -> Vec<u8> {
        let len = len.min(MAX_HEADER);
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
            position: zero(),
            status: zero(),
            origin: zero(),
            publisher: zero(),
            sequence: zero(),
            bytes: zero(),
            value: zero(),
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
