//! Pools and topics, as they are encoded: versions whose memory is used block by block, by the words in control memory
//! that the broker makes for them.

use serde::{Deserialize, Serialize};

/// The alignment of a block, in bytes: blocks follow each other at the next multiple of this.
pub const BLOCK_ALIGNMENT: u64 = 256;

/// What a pool or topic is. Its data are the version's: blocks from the beginning of the first chunk on, one every
/// [`Control::stride`] bytes.
///
/// Where it is sent, its control memory follows the version's file descriptors: the pool's words, then the topic's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Control {
    /// How many blocks, at most [`crate::limits::MAX_BLOCKS`].
    pub blocks: u32,
    /// Bytes of a block that are for use.
    pub block_bytes: u64,
    /// Of a topic.
    pub topic: Option<TopicShape>,
}

impl Control {
    /// Bytes from one block to the next; `None` if that is no number of bytes.
    pub fn stride(&self) -> Option<u64> {
        self.block_bytes.checked_next_multiple_of(BLOCK_ALIGNMENT)
    }

    /// Bytes of all blocks; `None` if that is no number of bytes.
    pub fn data_bytes(&self) -> Option<u64> {
        self.stride()?.checked_mul(u64::from(self.blocks))
    }

    /// How many file descriptors its control memory has.
    pub fn fds(&self) -> usize {
        1 + usize::from(self.topic.is_some())
    }
}

/// What a topic is, besides its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicShape {
    /// Samples in the ring.
    pub depth: u32,
    /// Samples that a late subscriber still gets.
    pub history: u32,
    /// Publishers at a time.
    pub publishers: u32,
    /// Subscribers at a time.
    pub subscribers: u32,
    /// Samples that a subscriber may hold at a time.
    pub held: u32,
    /// The number of the element type of its samples, if they all have the same.
    pub dtype: Option<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_no_size_overflows() {
        let control = |blocks, block_bytes| Control { blocks, block_bytes, topic: None };
        assert_eq!((control(3, 1).stride(), control(3, 1).data_bytes()), (Some(256), Some(768)));
        assert_eq!((control(3, 256).stride(), control(3, 257).data_bytes()), (Some(256), Some(1536)));
        assert_eq!((control(1, u64::MAX).stride(), control(2, u64::MAX / 2).data_bytes()), (None, None));
    }
}
