//! A topic: several publishers put samples into a ring of blocks, and several subscribers read them in place.
//!
//! The blocks are those of a [pool](crate::pool). A topic's own control memory records which blocks are in the ring,
//! what they contain, and which members read them. The whole layout:
//!
//! | offset | part | bytes | written by |
//! |---|---|---|---|
//! | 0 | magic, layout hash, and the [limits](TopicLimits) | 64 | the broker; see `control` |
//! | 64 | `tail: u64` a hint: every position before it is filled | 8 | publishers |
//! | 72 | `samples` the eventcount of subscribers that wait for samples | 8 | all; see `eventcount` |
//! | 128 | `space` the eventcount of publishers that wait for subscribers | 8 | all |
//! | 192 | `joins: u64` counts subscribers that have joined | 8 | a member that joins |
//! | 200 | `ids: u64` counts all members that have joined | 8 | a member that joins |
//! | 208 | `publishers_joined: u64` counts publishers that have joined | 8 | a member that joins |
//! | 216 | `ages_until: u64` until when subscribers measure ages, 0: they do not | 8 | observers, subscribers; see `ages` |
//! | 224 | `skipped: u64` counts numbers that publishers have skipped | 8 | publishers |
//! | 256 | ring: `depth` entries | 128 each | publishers; see `entry` |
//! | *P* | `publishers` ports of publishers | 640 each | their owners; see `members` and `port` |
//! | *S* | `subscribers` ports of subscribers | 128 each | their owners |
//! | *H* | holds: `held` words for each subscriber, filled up to whole 128 bytes | 8 each | their owners |
//! | *A* | ages: a histogram for each subscriber | 2560 each | their owners; see `ages` |
//! | *D* | descriptors: one for each of the `blocks` | 384 each | the block's holder; see `descriptor` |
//!
//! *P* = 256 + 128 · `depth`, *S* = *P* + 640 · `publishers`, *H* = *S* + 128 · `subscribers`,
//! *A* = *H* + 128 · `subscribers` · ⌈`held` / 16⌉, *D* = *A* + 2560 · `subscribers`. All other bytes are 0.
//!
//! A port, an entry and a descriptor in full:
//!
//! | publisher's port | | subscriber's port | | descriptor | |
//! |---|---|---|---|---|---|
//! | 0 | port slot | 0 | port slot | 0 | numbers skipped in the topic before it |
//! | 8 | samples published | 8 | cursor: the next position | 8 | status |
//! | 16 | waiting since, in ms | 16 | queue, 0: publishers wait for it | 16 | port 16 bits, row 16, dtype 8, rank 4, length of the header 12, lane 8 |
//! | 24 | waiting for this subscriber | 24 | samples received | 24 | id of the publisher |
//! | | | 32 | samples missed | 32 | samples that it had published before |
//! | 128 | lanes: for each of 32 the cell of its timeline, and the cell's incarnation + 1 | | | 40 | bytes of the tensor |
//! | | | | | 48 | value of the lane's timeline that completes the sample |
//! | | | | | 56 | stamp, in ns; 0 for none |
//! | | | | | 64 | shape: 8 words |
//! | | | | | 128 | the user's header |
//!
//! Words that different processes write are 128 bytes apart, not one cache line, because the processor fetches the
//! other line of a pair as well. A message from one polling process to another took 490 ns with 64 bytes and 440 with
//! 128, where a shared cache line took 110 (two processors of a Xeon at 2.5 GHz, 2026-11-22).
//!
//! An entry's word is at its offset 0. The protocols: `join`, `publish`, `receive`, `sweep` and `recovery`.

#![cfg_attr(loom, allow(dead_code, reason = "a model does what processes do at the same time, and no more"))]

mod ages;
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

use self::{
    ages::Histogram,
    descriptor::Descriptor,
    entry::RingEntry,
    members::{Holds, Publishing, Subscribing},
};
use partywall_wire::Ages;

use crate::{
    DType,
    eventcount::EventCount,
    sync::{AtomicU64, SharedArray},
};

pub use ages::{AGES_LEASE, NO_STAMP};
pub use descriptor::{MAX_HEADER, MAX_RANK, Status};
pub use members::{LANES, TimelineCell};
pub use port::PortId;
pub use publish::{Message, PublisherHandle, Unpublished};
pub use receive::{Ahead, HeldSample, Received, SubscriberHandle};

/// The maximum number of samples in the ring of a topic.
pub const MAX_DEPTH: u32 = 1 << 12;

/// The maximum number of publishers of a topic at a time.
pub const MAX_PUBLISHERS: u32 = 256;

/// The maximum number of subscribers of a topic at a time.
pub const MAX_SUBSCRIBERS: u32 = 256;

/// The maximum number of samples that a subscriber can hold.
pub const MAX_HELD: u32 = 256;

/// The maximum number of loans of a publisher.
pub const MAX_LOANS: u32 = 256;

/// Bytes between words that different processes write: two cache lines. On a miss Intel's processors also fetch the
/// other line of a pair, and take it away from the process that writes it. With a distance of one line, publishers and
/// subscribers did that at each message.
const LINES: usize = 128;

/// The mapped control memory of a topic.
#[derive(Debug)]
pub struct Topic {
    /// Fixed at the time of mapping, because other processes may overwrite the stored numbers.
    limits: TopicLimits,
    header: SharedArray<TopicHeader>,
    ring: SharedArray<RingEntry>,
    publishers: SharedArray<Publishing>,
    subscribers: SharedArray<Subscribing>,
    /// The same number of elements for each subscriber.
    holds: SharedArray<Holds>,
    ages: SharedArray<Histogram>,
    descriptors: SharedArray<Descriptor>,
}

/// The limits of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopicLimits {
    /// Blocks of its pool.
    pub blocks: u32,
    /// Entries of the ring, a power of two.
    pub depth: u32,
    /// Publishers at a time.
    pub publishers: u32,
    /// Blocks that one publisher may hold without having published them.
    pub loans: u32,
    /// Subscribers at a time.
    pub subscribers: u32,
    /// Samples that one subscriber may hold at a time.
    pub held: u32,
}

impl Topic {
    /// Returns the limits of the topic.
    pub fn limits(&self) -> TopicLimits {
        self.limits
    }

    /// Returns how many samples have been published.
    pub fn published(&self) -> u64 {
        self.tail()
    }
}

impl TopicLimits {
    /// Returns the smallest number of blocks with which no member has to wait for another that keeps its limits.
    pub fn needed_blocks(&self) -> u64 {
        u64::from(self.depth)
            + u64::from(self.publishers) * u64::from(self.loans)
            + u64::from(self.subscribers) * u64::from(self.held)
    }

    /// Returns how many blocks a publisher may have in loans and in flight.
    pub fn most_in_use(&self) -> u32 {
        let [depth, publishers] = [self.depth, self.publishers].map(u64::from);
        // All other publishers may be stopped that far ahead, with samples that have left the ring.
        let needed = self.needed_blocks() + (publishers - 1) * depth;
        let spare = u64::from(self.blocks).saturating_sub(needed);
        self.depth + self.loans + (spare / publishers) as u32
    }

    /// Returns whether the limits are valid.
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

/// What comes before the ring.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct TopicHeader {
    tail: AtomicU64,
    samples: EventCount,
    zero_80: [AtomicU64; 6],
    space: EventCount,
    zero_136: [AtomicU64; 7],
    joins: AtomicU64,
    ids: AtomicU64,
    publishers_joined: AtomicU64,
    ages_until: AtomicU64,
    skipped: AtomicU64,
    zero_232: [AtomicU64; 3],
}

shared! {
    TopicHeader { tail, samples, zero_80, space, zero_136, joins, ids, publishers_joined, ages_until, skipped, zero_232 }
}

/// The description of a sample, as its publisher wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleDescription {
    /// The generation of its block.
    pub generation: u64,
    /// The id of its publisher.
    pub publisher: u64,
    /// The number of samples that its publisher had published before.
    pub sequence: u64,
    /// The code of the elements' type.
    pub dtype: u8,
    /// The number of dimensions of the tensor.
    rank: usize,
    shape: [u64; MAX_RANK],
    /// Length of the tensor.
    pub bytes: u64,
    /// The lane of its publisher whose timeline completes it, if the status depends on one.
    pub lane: u8,
    /// The value that this timeline has to reach.
    pub value: u64,
    /// When its publisher put it into the ring ([`now_ns`](crate::members::now_ns)).
    pub stamp: u64,
    /// Whether the sample was known to be valid when this was read.
    pub status: Status,
}

impl SampleDescription {
    /// Returns the tensor's shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..self.rank]
    }

    /// Removes the elements unless type, shape and length agree and fit a block of `block_bytes`: a process that breaks
    /// the rules wrote them.
    #[inline]
    pub fn check(&mut self, block_bytes: u64) {
        let elements = self.shape().iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
        let bytes = elements.and_then(|elements| DType::from_code(self.dtype)?.bytes_for(elements));
        if bytes != Some(self.bytes) || self.bytes > block_bytes {
            self.rank = 1;
            self.shape = [0; MAX_RANK];
            self.bytes = 0;
        }
    }
}

/// The state of a publisher. While it runs, the numbers do not belong to a single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublisherState {
    /// The row of its member.
    pub row: u16,
    /// Its number, which is never used for another publisher or subscriber of the topic.
    pub id: u64,
    /// Samples published.
    pub published: u64,
    /// The id of the subscriber that it waits for, if it does, and since when ([`members::now`](crate::members::now)).
    pub blocked: Option<(u64, u64)>,
    /// True if the broker has detached it, or it is about to leave.
    pub detached: bool,
}

/// The state of a subscriber. While it runs, the numbers do not belong to a single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriberState {
    /// The row of its member.
    pub row: u16,
    /// Its number, which is never used for another publisher or subscriber of the topic.
    pub id: u64,
    /// How many samples it may fall behind; `None`: publishers wait for it.
    pub queue: Option<u32>,
    /// How many samples it is behind.
    pub lag: u64,
    /// Samples received.
    pub received: u64,
    /// Samples missed.
    pub dropped: u64,
    /// Samples held.
    pub held: u32,
    /// The ages of the samples that it received while ages were measured.
    pub ages: Ages,
    /// Since when a publisher waits for it ([`members::now`](crate::members::now)).
    pub stalled: Option<u64>,
    /// True if the broker has detached it, or it is about to leave. No process waits for it then.
    pub detached: bool,
}
