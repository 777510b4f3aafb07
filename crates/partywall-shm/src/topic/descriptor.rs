//! The descriptor of a block: the words that describe its sample.
//!
//! | offset | field | |
//! |---|---|---|
//! | 0 | `skipped` | numbers that the topic's publishers had skipped before: see [`Topic::skip`](super::Topic::skip) |
//! | 8 | `status` | with the block's generation: see below; the only word that changes later |
//! | 16 | `origin` | publisher's port, its member's row, dtype, rank, length of the header, lane: 16, 16, 8, 4, 12 and 8 bits |
//! | 24 | `publisher` | its id |
//! | 32 | `sequence` | the publisher's own count |
//! | 40 | `bytes` | of the tensor |
//! | 48 | `value` | of the timeline of the publisher's lane |
//! | 56 | `stamp` | when the publisher put the sample into the ring, or 0; see `ages` |
//! | 64 | `shape` | of the tensor, eight words |
//! | 128 | `header` | the user's, 32 words |
//!
//! Rules:
//! 1. The holder of the block writes all words before the block is in the ring; no process writes them while it is
//!    published.
//! 2. A reader has a hold on the block, taken from the ring, so the words do not change until it releases the hold.
//! 3. A process without a hold may read the words, and uses them only if the block's slot word is unchanged afterwards.
//! 4. `status` changes later by compare-and-swap, from *by timeline* or *unverified* to a final one. The publisher
//!    changes it; once the publisher is dead or evicted, the broker does. The generation is part of the word, so a
//!    process that was stopped before the change changes nothing of a later sample.
//!
//! | status | bits 0–2 | |
//! |---|---|---|
//! | ready | 0 | the host had written the block before it published it |
//! | by timeline | 1 | a stream writes the block until the timeline of the publisher's lane has reached `value` |
//! | unverified | 2 | as *by timeline*, and the sample rests on samples that are not final themselves |
//! | done | 3 | final: a stream has written it |
//! | failed | 4 | final: it will never be complete; bits 3–6 say how its publisher ended |
//! | tainted | 5 | final: it was written from a sample that had failed |
//! | generation | bits 18–63 | |
//!
//! If the publisher is killed or stopped while it writes these words, no process reads them. If the publisher ends
//! before a status is final, [`Topic::detach`](super::Topic::detach) makes the status final.

use super::{Message, SampleDescription};
use crate::{
    sync::{self, AtomicU64, Ordering, Stale, prefetch, prefetch_to_write},
    timeline::{TimelineEnding, ending_of},
};

/// The most bytes of a user's header.
pub const MAX_HEADER: usize = 256;

/// The most dimensions of a sample's tensor.
pub const MAX_RANK: usize = 8;

// What the word `origin` has room for.
const _: () = assert!(MAX_RANK < 1 << 4 && MAX_HEADER < 1 << 12);

/// See the head of this file.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Descriptor {
    skipped: AtomicU64,
    status: AtomicU64,
    origin: AtomicU64,
    publisher: AtomicU64,
    sequence: AtomicU64,
    bytes: AtomicU64,
    value: AtomicU64,
    stamp: AtomicU64,
    shape: [AtomicU64; SHAPE_WORDS],
    header: [AtomicU64; HEADER_WORDS],
}

/// Whether a sample is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Valid: its publisher's host had written it before publishing it.
    Ready,
    /// Valid once the timeline of the publisher's lane has reached the sample's value, because a stream writes it.
    Timeline,
    /// As [`Timeline`](Self::Timeline), and the sample rests on samples whose status is not final.
    Unverified,
    /// Valid: a stream has written it.
    Done,
    /// Never valid: its publisher ended before it was complete.
    Failed(TimelineEnding),
    /// Not valid: it was written from a sample that had failed.
    Tainted,
}

/// A status word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StatusWord(u64);

/// The words that are written with a sample: rule 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written<'a> {
    /// Of the block: its slot's ticket.
    pub(super) generation: u64,
    pub(super) skipped: u64,
    pub(super) origin: SampleOrigin,
    pub(super) publisher: u64,
    pub(super) sequence: u64,
    pub(super) message: &'a Message<'a>,
}

/// The origin of a sample, and the meaning of its other words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SampleOrigin {
    /// The index of the publisher's port.
    pub(super) port: u16,
    pub(super) row: u16,
    pub(super) dtype: u8,
    pub(super) rank: u8,
    /// Length of the header.
    pub(super) header: u16,
    /// The lane whose timeline completes the sample.
    pub(super) lane: u8,
}

impl SampleOrigin {
    fn word(self) -> u64 {
        u64::from(self.port)
            | u64::from(self.row) << ROW
            | u64::from(self.dtype) << DTYPE
            | u64::from(self.rank) << RANK
            | u64::from(self.header) << HEADER
            | u64::from(self.lane) << LANE
    }

    fn of(word: u64) -> Self {
        Self {
            port: word as u16,
            row: (word >> ROW) as u16,
            dtype: (word >> DTYPE) as u8,
            rank: (word >> RANK) as u8 & 15,
            header: (word >> HEADER) as u16 & 0xFFF,
            lane: (word >> LANE) as u8,
        }
    }
}

impl StatusWord {
    fn new(generation: u64, status: Status) -> Self {
        let bits = match status {
            Status::Ready => READY,
            Status::Timeline => TIMELINE,
            Status::Unverified => UNVERIFIED,
            Status::Done => DONE,
            Status::Failed(ending) => FAILED | (ending as u64) << ENDING,
            Status::Tainted => TAINTED,
        };
        Self(bits | generation << GENERATION)
    }

    /// Returns the status. An invalid one counts as a failure.
    pub(super) fn status(self) -> Status {
        match self.0 & STATUS {
            READY => Status::Ready,
            TIMELINE => Status::Timeline,
            UNVERIFIED => Status::Unverified,
            DONE => Status::Done,
            TAINTED => Status::Tainted,
            _ => Status::Failed(ending_of((self.0 >> ENDING & 15) as u32).unwrap_or(TimelineEnding::OwnerFaulted)),
        }
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION
    }
}

impl Status {
    /// Returns whether the status does not change any more.
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Timeline | Self::Unverified)
    }
}

/// Operations of the block's holder.
impl Descriptor {
    pub(super) fn write(&self, words: &Written<'_>) {
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        // These stores are ordered by the change of the entry that publishes them.
        set(&self.skipped, words.skipped);
        set(&self.origin, words.origin.word());
        set(&self.publisher, words.publisher);
        set(&self.sequence, words.sequence);
        set(&self.bytes, words.message.bytes);
        set(&self.value, words.message.value);
        set(&self.stamp, words.message.stamp);
        for (word, extent) in self.shape.iter().zip(words.message.shape) {
            set(word, *extent);
        }
        for (word, chunk) in self.header.iter().zip(words.message.header.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            set(word, u64::from_le_bytes(bytes));
        }
        // Release, and last. If a process changes this status from the word that it saw, the words that it read after
        // the status are of this generation, or no process reads that status any more.
        self.status.store(StatusWord::new(words.generation, words.message.status).0, Ordering::Release);
    }
}

/// Operations of every process.
impl Descriptor {
    /// Prefetches the words that every reader reads.
    pub(super) fn prefetch(&self) {
        prefetch(&self.skipped);
        prefetch(&self.shape);
    }

    /// Prefetches the words that every publisher writes.
    pub(super) fn prefetch_to_write(&self) {
        prefetch_to_write(&self.skipped);
        prefetch_to_write(&self.shape);
    }

    pub(super) fn origin(&self) -> SampleOrigin {
        SampleOrigin::of(self.origin.load(Ordering::Relaxed))
    }

    pub(super) fn publisher(&self) -> u64 {
        self.publisher.load(Ordering::Relaxed)
    }

    pub(super) fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    pub(super) fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    pub(super) fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn describe(&self) -> SampleDescription {
        let origin = self.origin();
        let status = self.status();
        let mut shape = [0; MAX_RANK];
        for (extent, word) in shape.iter_mut().zip(&self.shape).take(origin.rank.into()) {
            *extent = word.load(Ordering::Relaxed);
        }
        SampleDescription {
            generation: status.generation(),
            publisher: self.publisher(),
            sequence: self.sequence.load(Ordering::Relaxed),
            dtype: origin.dtype,
            rank: usize::from(origin.rank).min(MAX_RANK),
            shape,
            bytes: self.bytes.load(Ordering::Relaxed),
            lane: origin.lane,
            value: self.value(),
            stamp: self.stamp(),
            status: status.status(),
        }
    }

    /// Returns the user's header; never more than [`MAX_HEADER`] bytes.
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
    pub(super) fn settle(&self, seen: StatusWord, status: Status) -> Result<(), Stale> {
        sync::change(&self.status, seen.0, StatusWord::new(seen.generation(), status).0)
    }
}

#[cfg(all(test, loom))]
impl Descriptor {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            skipped: zero(),
            status: zero(),
            origin: zero(),
            publisher: zero(),
            sequence: zero(),
            bytes: zero(),
            value: zero(),
            stamp: zero(),
            shape: std::array::from_fn(|_| zero()),
            header: std::array::from_fn(|_| zero()),
        }
    }
}

shared! {
    Descriptor { skipped, status, origin, publisher, sequence, bytes, value, stamp, shape, header }
    bits {
        READY, TIMELINE, UNVERIFIED, DONE, FAILED, TAINTED, ENDING, GENERATION,
        ROW, DTYPE, RANK, HEADER, LANE,
    }
}

/// The bits of the status itself.
const STATUS: u64 = 7;
const READY: u64 = 0;
const TIMELINE: u64 = 1;
const UNVERIFIED: u64 = 2;
const DONE: u64 = 3;
const FAILED: u64 = 4;
const TAINTED: u64 = 5;
/// The first bit of the ending.
const ENDING: u32 = 3;
/// The first bit of the generation.
const GENERATION: u32 = 18;
/// The first bit of the row, in the origin.
const ROW: u32 = 16;
/// The first bit of the element type.
const DTYPE: u32 = 32;
/// The first bit of the rank.
const RANK: u32 = 40;
/// The first bit of the header's length.
const HEADER: u32 = 44;
/// The first bit of the lane.
const LANE: u32 = 56;
/// Words of a user's header. A model does without them.
const HEADER_WORDS: usize = if cfg!(loom) { 0 } else { MAX_HEADER / 8 };
/// Words of a shape.
const SHAPE_WORDS: usize = if cfg!(loom) { 0 } else { MAX_RANK };
