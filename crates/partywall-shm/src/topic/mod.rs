//! A topic: samples that several publishers put into a ring of blocks, and several subscribers read in place.
//!
//! The blocks are those of a [pool](crate::pool); this memory says which of them are in the ring, what they contain, and
//! who reads them.
//!
//! ```text
//!     0  magic         "PWTOPIC1"
//!     8  layout hash   of the description of this layout: another one is refused, never guessed
//!    16  blocks: u32, depth: u32, publishers: u32, subscribers: u32, held: u32
//!    64  tail: u64     a position before which all are filled; then the eventcount of subscribers that wait for samples
//!   128  space         the eventcount of publishers that wait for subscribers
//!   192  joins: u64    counts subscribers that have joined; then ids: u64, which counts all who have, and
//!                      publishers_joined: u64, which counts publishers alone
//!   256  ring          128 bytes an entry, `depth` of them
//!        publishers    128 bytes each
//!        subscribers   128 bytes each
//!        holds         `held` words for each subscriber, filled up to whole 128 bytes
//!        descriptors   384 bytes a block
//! ```

#![cfg_attr(loom, allow(dead_code, reason = "a model does what processes do at the same time, and no more"))]

mod audit;
mod core;
mod descriptor;
mod entry;
mod join;
#[cfg(not(loom))]
mod mapped;
mod members;
#[cfg(all(test, loom))]
mod models;
mod port;
mod publish;
mod receive;
mod recovery;
mod sweep;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::{
    DType,
    eventcount::EventCount,
    sync::{AtomicU32, AtomicU64},
};

pub use audit::Audit;
pub use descriptor::{MAX_HEADER, MAX_RANK, Status};
#[cfg(not(loom))]
pub use mapped::Topic;
pub use members::TimelineCell;
pub use port::PortId;
pub use publish::{Message, PublisherPlace, Unpublished};
pub use receive::{Ahead, Received, SubscriberPlace, Taken};

/// The most entries that a ring can have.
pub const MAX_DEPTH: u32 = 1 << 12;

/// The most publishers that a topic can have at once.
pub const MAX_PUBLISHERS: u32 = 256;

/// The most subscribers that a topic can have at once.
pub const MAX_SUBSCRIBERS: u32 = 256;

/// The most samples that a subscriber can hold.
pub const MAX_HELD: u32 = 256;

/// The most loans that a publisher can have.
pub const MAX_LOANS: u32 = 256;

/// Bytes between words that different processes write: two cache lines. Processors of Intel's fetch the other line of a pair
/// with each that they miss, and so take it from whoever writes that: with one line each, publishers and subscribers did so
/// at each message.
const LINES: usize = 128;

/// What a topic has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Of its pool.
    pub blocks: u32,
    /// Entries of the ring, a power of two.
    pub depth: u32,
    /// At once.
    pub publishers: u32,
    /// Blocks that one publisher may have at once and has not published.
    pub loans: u32,
    /// At once.
    pub subscribers: u32,
    /// Samples that one subscriber may hold at once.
    pub held: u32,
}

impl Shape {
    /// The blocks that are needed so that nobody waits for one who keeps no more than was agreed.
    pub fn needed_blocks(&self) -> u64 {
        u64::from(self.depth)
            + u64::from(self.publishers) * u64::from(self.loans)
            + u64::from(self.subscribers) * u64::from(self.held)
    }

    /// Whether there can be such a topic.
    pub fn is_possible(&self) -> bool {
        let within = |number: u32, most| (1..=most).contains(&number);
        within(self.depth, MAX_DEPTH)
            && self.depth.is_power_of_two()
            && within(self.publishers, MAX_PUBLISHERS)
            && within(self.loans, MAX_LOANS)
            && within(self.subscribers, MAX_SUBSCRIBERS)
            && within(self.held, MAX_HELD)
            && within(self.blocks, 1 << 16)
            && u64::from(self.blocks) >= self.needed_blocks()
    }
}

/// The first bytes of a topic.
#[derive(Debug)]
#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    layout: AtomicU64,
    blocks: AtomicU32,
    depth: AtomicU32,
    publishers: AtomicU32,
    subscribers: AtomicU32,
    held: AtomicU32,
    loans: AtomicU32,
    zero: [AtomicU64; 3],
    /// A hint: every position before it is filled.
    tail: AtomicU64,
    samples: EventCount,
    zero_64: [AtomicU64; 6],
    space: EventCount,
    zero_128: [AtomicU64; 7],
    joins: AtomicU64,
    ids: AtomicU64,
    publishers_joined: AtomicU64,
    zero_192: [AtomicU64; 5],
}

#[cfg(not(loom))]
mod layout {
    #![allow(unsafe_code)]

    const _: () = assert!(size_of::<super::Header>() == 256);

    // SAFETY: `repr(C)`, its fields are atomics and arrays and structs of them, and lie without gaps: their sizes add
    // up to that of the whole.
    unsafe impl partywall_os::map::Atomics for super::Header {}
}

/// What a sample's descriptor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Of its block.
    pub generation: u64,
    /// Its publisher's number.
    pub publisher: u64,
    /// How many samples its publisher had published before.
    pub sequence: u64,
    /// The code of the elements' type.
    pub dtype: u8,
    /// How many dimensions the tensor has.
    rank: usize,
    shape: [u64; MAX_RANK],
    /// The tensor's.
    pub bytes: u64,
    /// What the publisher's timeline has to reach, where the status says so.
    pub value: u64,
    /// Whether its memory may be believed, as far as was known then.
    pub status: Status,
}

impl Description {
    /// The tensor's.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..self.rank]
    }

    /// The same if type, shape and length agree, and there is room for that in a block of so many bytes; else without
    /// elements, because whoever wrote that is none of ours.
    pub fn believed(mut self, block_bytes: u64) -> Self {
        let elements = self.shape().iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        let bytes = elements.and_then(|elements| DType::from_code(self.dtype)?.bytes_for(elements));
        if bytes != Some(self.bytes) || self.bytes > block_bytes {
            (self.rank, self.shape, self.bytes) = (1, [0; MAX_RANK], 0);
        }
        self
    }
}

/// What a publisher is doing. While it does, the numbers are of no single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublisherState {
    /// Its member's.
    pub row: u16,
    /// Its number, which no other publisher or subscriber of the topic ever has.
    pub id: u64,
    /// Samples that it has published.
    pub published: u64,
    /// For which subscriber's id it waits, if it does, and since which millisecond of [`members::now`](crate::members::now).
    pub blocked: Option<(u64, u64)>,
    /// Whether it was detached from the topic by the broker, or is about to leave.
    pub detached: bool,
}

/// What a subscriber is doing. While it does, the numbers are of no single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriberState {
    /// Its member's.
    pub row: u16,
    /// Its number, which no other publisher or subscriber of the topic ever has.
    pub id: u64,
    /// How many samples it may be behind; `None`: publishers wait for it.
    pub queue: Option<u32>,
    /// How many samples it is behind.
    pub lag: u64,
    /// Samples that it has received.
    pub received: u64,
    /// Samples that passed it.
    pub dropped: u64,
    /// Blocks that it keeps from being used again.
    pub held: u32,
    /// Since which millisecond of [`members::now`](crate::members::now) a publisher waits for it.
    pub stalled: Option<u64>,
    /// Whether it was detached from the topic by the broker, or is about to leave. It counts for nobody then.
    pub detached: bool,
}
