//! Pools, topics and queues in messages. Each is a version of a name, whose commit says how its memory is divided into
//! blocks: a topic is a pool with a ring, and a queue a pool of inputs, a pool of outputs behind it, and places for
//! tasks. The broker creates the control memory. It is part of the version: a process that opens the version receives
//! its file descriptors, and they are closed with the version.
//!
//! Claims, waiting opens, listings, leases, quarantine and removal are therefore those of segments. Two things differ.
//! The name is withdrawn with the last lease (`Lifetime::Shared`). And no version follows a pool, topic or queue while
//! its name exists, because all users of the name mean the same one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::member::MemberState;

/// The alignment of a block, in bytes: blocks follow each other at the next multiple of this.
pub const BLOCK_ALIGNMENT: u64 = 256;

/// The most dimensions of a topic's samples.
pub const MAX_RANK: usize = 8;

/// The shape of a pool, topic or queue. Its blocks lie in the version's first chunk, one every [`Control::stride`]
/// bytes from the beginning. The outputs of a queue follow its inputs.
///
/// In a message, its control memory follows the version's file descriptors: the pool's, that of a queue's outputs, then
/// the topic's or queue's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Control {
    /// Number of blocks, at most [`crate::limits::MAX_BLOCKS`]; for a queue, number of input blocks.
    pub blocks: u32,
    /// Usable bytes of a block.
    pub block_bytes: u64,
    /// True if a process that takes a block sets it to zero first. Always false for a topic or queue.
    pub zeroed: bool,
    /// The topic's own shape.
    pub topic: Option<TopicShape>,
    /// The queue's own shape.
    pub queue: Option<QueueShape>,
}

impl Control {
    /// Returns the distance between the starts of two blocks, in bytes; `None` if it overflows.
    pub fn stride(&self) -> Option<u64> {
        stride(self.block_bytes)
    }

    /// Returns the bytes of all blocks; `None` if the sum overflows.
    pub fn data_bytes(&self) -> Option<u64> {
        self.pool_bytes()?.checked_add(self.queue.map_or(Some(0), |queue| queue.outputs_bytes())?)
    }

    /// Returns the bytes of the blocks of a pool or topic, or of a queue's inputs; `None` if the product overflows.
    pub fn pool_bytes(&self) -> Option<u64> {
        self.stride()?.checked_mul(u64::from(self.blocks))
    }

    /// Returns the shape of a queue's outputs as that of a pool.
    pub fn outputs(&self) -> Option<Self> {
        let QueueShape { outputs, output_bytes, .. } = self.queue?;
        Some(Self { blocks: outputs, block_bytes: output_bytes, zeroed: false, topic: None, queue: None })
    }

    /// Returns the number of file descriptors of its control memory.
    pub fn fds(&self) -> usize {
        1 + usize::from(self.topic.is_some()) + 2 * usize::from(self.queue.is_some())
    }
}

/// Returns the distance between the starts of two blocks, in bytes.
fn stride(block_bytes: u64) -> Option<u64> {
    block_bytes.checked_next_multiple_of(BLOCK_ALIGNMENT)
}

/// The shape of a queue, apart from its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueShape {
    /// Maximum number of tasks at a time.
    pub tasks: u32,
    /// Number of output blocks, at most [`crate::limits::MAX_BLOCKS`].
    pub outputs: u32,
    /// Usable bytes of an output block.
    pub output_bytes: u64,
    /// Milliseconds that an attempt may take; 0 means no limit.
    // Names of fields are the keys of the command's JSON; messages contain none.
    #[serde(rename = "lease_ms")]
    pub lease: u64,
}

impl QueueShape {
    fn outputs_bytes(&self) -> Option<u64> {
        stride(self.output_bytes)?.checked_mul(u64::from(self.outputs))
    }
}

/// The shape of a topic, apart from its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicShape {
    /// Samples in the ring.
    pub depth: u32,
    /// Samples that a late subscriber still receives.
    pub history: u32,
    /// Maximum number of publishers at a time.
    // Names of fields are the keys of the command's JSON; messages contain none.
    #[serde(rename = "max_publishers")]
    pub publishers: u32,
    /// Maximum number of samples that a publisher has borrowed and not yet published.
    #[serde(rename = "max_loans")]
    pub loans: u32,
    /// Maximum number of subscribers at a time.
    #[serde(rename = "max_subscribers")]
    pub subscribers: u32,
    /// Maximum number of samples that a subscriber holds at a time.
    #[serde(rename = "max_held")]
    pub held: u32,
    /// The number of the element type of all samples; absent if samples may differ.
    pub dtype: Option<u8>,
    /// The shape of all samples; absent if samples may have any shape.
    pub shape: Option<SampleShape>,
}

/// The shape of all samples of a topic: in each dimension a length, or any length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Option<u64>>", into = "Vec<Option<u64>>")]
pub struct SampleShape {
    rank: u8,
    /// Extents beyond the rank are `None`.
    extents: [Option<u64>; MAX_RANK],
}

impl SampleShape {
    /// Returns a shape with these lengths; `None` stands for any length. Returns `None` beyond [`MAX_RANK`] dimensions.
    pub fn new(extents: &[Option<u64>]) -> Option<Self> {
        let mut all = [None; MAX_RANK];
        all.get_mut(..extents.len())?.copy_from_slice(extents);
        Some(Self { rank: extents.len() as u8, extents: all })
    }

    /// Returns the length of each dimension; `None` stands for any length.
    pub fn extents(&self) -> &[Option<u64>] {
        &self.extents[..usize::from(self.rank)]
    }

    /// Returns whether a sample may have this shape.
    pub fn accepts(&self, shape: &[u64]) -> bool {
        let extents = self.extents();
        extents.len() == shape.len()
            && extents.iter().zip(shape).all(|(extent, has)| extent.is_none_or(|it| it == *has))
    }
}

impl TryFrom<Vec<Option<u64>>> for SampleShape {
    type Error = String;

    fn try_from(extents: Vec<Option<u64>>) -> Result<Self, String> {
        Self::new(&extents).ok_or_else(|| format!("samples have at most {MAX_RANK} dimensions, not {}", extents.len()))
    }
}

impl From<SampleShape> for Vec<Option<u64>> {
    fn from(shape: SampleShape) -> Self {
        shape.extents().to_vec()
    }
}

/// `[any, 640, 3]`.
impl fmt::Display for SampleShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent = |extent: &Option<u64>| extent.map_or_else(|| "any".to_owned(), |extent| extent.to_string());
        write!(f, "[{}]", self.extents().iter().map(extent).collect::<Vec<_>>().join(", "))
    }
}

/// How a pool or topic is used, in a listing. Counted for each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Blocks that any member can take immediately.
    pub free: u32,
    /// Absent for a pool.
    pub topic: Option<TopicUsage>,
    /// The tasks of a queue; `None` for other objects.
    pub queue: Option<QueueUsage>,
}

/// The tasks of a queue, by state. Counted for each request. While members use the queue, the numbers do not belong to
/// a single moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueUsage {
    /// Tasks that wait for a worker.
    pub pending: u32,
    /// Tasks that workers have claimed.
    pub claimed: u32,
    /// Tasks that workers' streams will complete.
    pub enqueued: u32,
    /// Results that have not been read.
    pub done: u32,
    /// Tasks that failed for good (dead letters).
    pub dead: u32,
    /// Tasks that are over, but whose attempts may still use their blocks.
    pub ending: u32,
    /// Places for tasks that are free, or that submitters are filling.
    pub free: u32,
    /// Results since the queue was created.
    pub completed: u64,
    /// Attempts without a result since the queue was created.
    pub returned: u64,
}

/// How a topic is used, in a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicUsage {
    /// Publishers.
    pub publishers: u32,
    /// Subscribers.
    pub subscribers: u32,
    /// Samples that have been published.
    pub published: u64,
}

/// The blocks of a pool or topic, by state. Counted for each request. While members use the blocks, the numbers do not
/// belong to a single moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    /// Blocks that any member can take immediately.
    pub free: u32,
    /// Blocks that members fill, or that a stream still writes after they were published.
    pub held: u32,
    /// Blocks that their holders offer to other processes.
    pub offered: u32,
    /// Blocks in a topic's ring, or owned by tasks of a queue.
    pub in_ring: u32,
    /// Blocks that have left the ring and that readers still hold.
    pub read: u32,
    /// Blocks that were published and that no process uses any more. The next process that needs a block finds them.
    pub unused: u32,
    /// Blocks that are on their way to a waiter.
    pub handed: u32,
    /// Waiters for a block.
    pub waiting: u32,
    /// Slots with a value that no correct process writes: 0, unless something is wrong.
    pub invalid: u32,
}

/// How a pool, topic or queue is used, in detail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlInfo {
    /// The blocks, by state.
    pub blocks: BlockCounts,
    /// Absent for a pool.
    pub topic: Option<TopicInfo>,
    /// The tasks of a queue; `None` for other objects.
    pub queue: Option<QueueInfo>,
}

/// How a queue is used, in detail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueInfo {
    /// The tasks, by state.
    pub usage: QueueUsage,
    /// The output blocks, by state.
    pub outputs: BlockCounts,
    /// The segments that it holds.
    pub attached: Vec<AttachedInfo>,
}

/// A segment that a queue holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedInfo {
    /// The number of the attachment.
    pub attachment: u32,
    /// The segment.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Tasks that name it and may still read it.
    pub tasks: u32,
}

/// How a topic is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicInfo {
    /// The counts.
    pub usage: TopicUsage,
    /// The publishers; only some of them if there are very many.
    pub publishers: Vec<PublisherInfo>,
    /// The subscribers; only some of them if there are very many.
    pub subscribers: Vec<SubscriberInfo>,
}

/// A member that publishes or subscribes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Participant {
    /// Its number in the topic, which is never used twice there.
    pub id: u64,
    /// The member's pid, if its row is a member's.
    pub pid: Option<u32>,
    /// The member's state, if its row is a member's.
    pub state: Option<MemberState>,
    /// True if it is detached from the topic, so that no process waits for it any more.
    pub detached: bool,
}

/// A publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublisherInfo {
    /// The member.
    pub who: Participant,
    /// Samples that it has published.
    pub published: u64,
    /// The number of the subscriber that it waits for, and for how many milliseconds it has waited.
    pub blocked: Option<(u64, u64)>,
}

/// A subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscriberInfo {
    /// The member.
    pub who: Participant,
    /// How many samples it may be behind before it loses the oldest; absent if publishers wait for it instead.
    pub queue: Option<u32>,
    /// How many samples it is behind.
    pub lag: u64,
    /// Samples that it has received.
    pub received: u64,
    /// Samples that it has lost.
    pub dropped: u64,
    /// Blocks that it holds, so that they are not reused.
    pub held: u32,
    /// The ages of the samples that it received while ages were measured. Asking for this makes subscribers measure
    /// them for the next minute.
    pub ages: Ages,
    /// Milliseconds for which a publisher has waited for it, if one does.
    pub stalled: Option<u64>,
}

/// The ages of samples when a subscriber received them: the time since each was published, in nanoseconds. Samples that
/// the subscriber received while ages were not measured do not count. While it receives, the numbers do not belong to a
/// single moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ages {
    /// The number of ages. The other numbers are 0 if there are none.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// The median, at most an eighth too large.
    pub p50: u64,
    /// The age that 99 of 100 samples do not exceed, at most an eighth too large.
    pub p99: u64,
    /// The greatest age.
    pub max: u64,
    /// How many ages were smaller than each [`bound`](Self::bound).
    pub younger: [u64; Ages::BOUNDS],
}

impl Ages {
    /// The number of bounds: powers of two from 1 µs to 1 s.
    pub const BOUNDS: usize = 21;

    /// Returns a bound of [`younger`](Self::younger), in nanoseconds.
    ///
    /// # Panics
    /// If `index` is not below [`BOUNDS`](Self::BOUNDS).
    pub fn bound(index: usize) -> u64 {
        assert!(index < Self::BOUNDS, "there are {} bounds", Self::BOUNDS);
        1024 << index
    }
}

impl SubscriberInfo {
    /// Returns the name of its policy that programs see.
    pub fn policy(&self) -> &'static str {
        match self.queue {
            None => "block",
            Some(1) => "latest",
            Some(_) => "drop-oldest",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_accepts_its_lengths_and_any_for_none() {
        let shape = SampleShape::new(&[None, Some(640), Some(3)]).unwrap();
        assert_eq!((shape.to_string().as_str(), shape.extents().len()), ("[any, 640, 3]", 3));
        assert!(shape.accepts(&[0, 640, 3]) && shape.accepts(&[u64::MAX, 640, 3]));
        for other in [&[480, 640, 4][..], &[640, 3], &[1, 480, 640, 3], &[]] {
            assert!(!shape.accepts(other), "{other:?}");
        }
        let scalar = SampleShape::new(&[]).unwrap();
        assert!(scalar.accepts(&[]) && !scalar.accepts(&[1]));
        // As a peer could send it.
        let long = vec![None; MAX_RANK + 1];
        let sent = |extents: &Vec<Option<u64>>| postcard::from_bytes(&postcard::to_allocvec(extents).unwrap());
        assert!(sent(&long).is_err_and(|_: postcard::Error| SampleShape::new(&long).is_none()));
        assert_eq!(sent(&shape.into()), Ok(shape));
    }

    #[test]
    fn blocks_are_aligned_and_no_size_overflows() {
        let control = |blocks, block_bytes| Control { blocks, block_bytes, zeroed: false, topic: None, queue: None };
        assert_eq!((control(3, 1).stride(), control(3, 1).data_bytes()), (Some(256), Some(768)));
        assert_eq!((control(3, 256).stride(), control(3, 257).data_bytes()), (Some(256), Some(1536)));
        assert_eq!((control(1, u64::MAX).stride(), control(2, u64::MAX / 2).data_bytes()), (None, None));
        let queue = |output_bytes| QueueShape { tasks: 1, outputs: 2, output_bytes, lease: 0 };
        let with = |output_bytes| Control { queue: Some(queue(output_bytes)), ..control(3, 1) };
        let outputs = with(257).outputs().unwrap();
        assert_eq!((with(257).data_bytes(), outputs.data_bytes()), (Some(768 + 1024), Some(1024)));
        assert_eq!((with(u64::MAX / 2 + 2).data_bytes(), with(1).fds()), (None, 3));
    }
}
