//! What an input or an output contains: bytes, or a tensor. A block is only as long as the longest of them.
//!
//! | offset | field |
//! |---|---|
//! | 0 | bytes 0–46, rank 48–51, dtype 52–59, 1 in bit 63; 0: there is no output |
//! | 8 | shape: 8 words, of which as many are meant as the rank says |
//!
//! Type and shape are encoded as in the descriptor of a topic. The words are written and read by the rules of what they
//! belong to: the description of the task, or the record of an attempt. A reader trusts none of them: a tensor that has
//! not as many bytes as the first word says counts as bytes, and the caller compares those with the block.

use crate::{
    DType,
    sync::{AtomicU64, Ordering},
    topic::MAX_RANK,
};

/// The contents of an input or an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contents {
    bytes: u64,
    dtype: DType,
    rank: u8,
    shape: [u64; MAX_RANK],
}

/// See the head of this file.
#[derive(Debug)]
#[repr(C)]
pub(super) struct ContentsWords {
    first: AtomicU64,
    shape: [AtomicU64; SHAPE_WORDS],
}

impl Contents {
    /// Returns contents of this many bytes, which are of no other type.
    pub const fn of_bytes(bytes: u64) -> Self {
        let mut shape = [0; MAX_RANK];
        shape[0] = bytes;
        Self { bytes, dtype: DType::U8, rank: 1, shape }
    }

    /// Returns a dense tensor; `None` if it does not fill whole bytes, or has more than [`MAX_RANK`] dimensions.
    pub fn of_tensor(dtype: DType, shape: &[u64]) -> Option<Self> {
        let elements = shape.iter().try_fold(1_u64, |product, length| product.checked_mul(*length))?;
        let bytes = dtype.bytes_for(elements)?;
        let mut lengths = [0; MAX_RANK];
        lengths.get_mut(..shape.len())?.copy_from_slice(shape);
        Some(Self { bytes, dtype, rank: shape.len() as u8, shape: lengths })
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the elements along each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..usize::from(self.rank)]
    }
}

impl ContentsWords {
    pub(super) fn write(&self, contents: Option<&Contents>) {
        let Some(contents) = contents else { return self.first.store(0, Ordering::Relaxed) };
        let rank = u64::from(contents.rank) << RANK;
        let dtype = u64::from(contents.dtype.code()) << DTYPE;
        self.first.store(contents.bytes | rank | dtype | IS_THERE, Ordering::Relaxed);
        for (word, length) in self.shape.iter().zip(contents.shape()) {
            word.store(*length, Ordering::Relaxed);
        }
    }

    pub(super) fn is_there(&self) -> bool {
        self.first.load(Ordering::Relaxed) & IS_THERE != 0
    }

    pub(super) fn read(&self) -> Option<Contents> {
        let first = self.first.load(Ordering::Relaxed);
        if first & IS_THERE == 0 {
            return None;
        }
        let bytes = first & (super::MAX_PART - 1);
        let rank = (first >> RANK & 15) as usize;
        let shape: Vec<u64> = self.shape.iter().take(rank).map(|word| word.load(Ordering::Relaxed)).collect();
        let tensor = DType::from_code((first >> DTYPE) as u8).and_then(|dtype| Contents::of_tensor(dtype, &shape));
        let tensor = tensor.filter(|tensor| tensor.bytes == bytes && shape.len() == rank);
        Some(tensor.unwrap_or_else(|| Contents::of_bytes(bytes)))
    }

    #[cfg(all(test, loom))]
    pub(super) fn new() -> Self {
        Self { first: AtomicU64::new(0), shape: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

shared!(ContentsWords { first, shape } bits { RANK, DTYPE, IS_THERE });

/// The first bit of the rank.
const RANK: u32 = 48;
/// The first bit of the type.
const DTYPE: u32 = 52;
const IS_THERE: u64 = 1 << 63;
/// Words of a shape. A model does without them.
const SHAPE_WORDS: usize = if cfg!(loom) { 0 } else { MAX_RANK };

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn words() -> ContentsWords {
        ContentsWords { first: AtomicU64::new(0), shape: std::array::from_fn(|_| AtomicU64::new(7)) }
    }

    #[test]
    fn contents_are_read_as_they_were_written() {
        let words = words();
        assert_eq!(words.read(), None);
        let all = [
            Contents::of_bytes(0),
            Contents::of_bytes(super::super::MAX_PART - 1),
            Contents::of_tensor(DType::F32, &[]).unwrap(),
            Contents::of_tensor(DType::F32, &[3, 0]).unwrap(),
            Contents::of_tensor(DType::C128, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap(),
            Contents::of_tensor(DType::F4, &[4]).unwrap(),
        ];
        for contents in all {
            words.write(Some(&contents));
            assert!(words.is_there());
            assert_eq!(words.read(), Some(contents));
        }
        words.write(None);
        assert!(!words.is_there());
        assert_eq!(Contents::of_tensor(DType::U8, &[1; 9]), None);
        assert_eq!(Contents::of_tensor(DType::U8, &[u64::MAX, 2]), None);
        assert_eq!(Contents::of_tensor(DType::F4, &[3]), None);
    }

    // Holds 218.
    #[test]
    fn tensor_that_a_peer_made_up_counts_as_bytes() {
        let words = words();
        let f32s = |rank: u64| 28 | rank << RANK | u64::from(DType::F32.code()) << DTYPE | IS_THERE;
        words.first.store(f32s(1), Ordering::Relaxed);
        assert_eq!(words.read(), Contents::of_tensor(DType::F32, &[7]));
        for first in [f32s(2), f32s(0), f32s(15), 28 | 1 << RANK | IS_THERE, 28 | 1 << RANK | 255 << DTYPE | IS_THERE] {
            words.first.store(first, Ordering::Relaxed);
            assert_eq!(words.read(), Some(Contents::of_bytes(28)), "{first:x}");
        }
    }
}
