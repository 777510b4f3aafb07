//! Blocks of a [`SharedMap`] as plain bytes: one writer or many readers at a time.
//!
//! Processes agree which of them a block belongs to. The kernel does not enforce that agreement. Within this process
//! [`BlockBorrows`] does: it lends each block either to readers or to one writer. Other processes are trusted: one that
//! writes a block that it does not hold, by mistake or on purpose, changes bytes behind a `&` or `&mut` of this
//! process, and whatever is computed from those bytes may be wrong in any way. The processes of a domain trust each
//! other that far, because each can write the others' memory in any case.
#![allow(unsafe_code)]

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use crate::{cpu, map::SharedMap};

/// Blocks of a map, of equal length and at equal distances, each borrowed separately. No two `BlockBorrows` share
/// bytes.
pub struct BlockBorrows {
    map: Arc<SharedMap>,
    /// Unique in this process.
    id: u64,
    /// The bytes of the map from the first block to the last.
    reserved: Range<usize>,
    /// Byte offset of the first block.
    offset: usize,
    /// Distance between the starts of two blocks, in bytes.
    stride: usize,
    /// Length of a block, in bytes.
    bytes: usize,
    /// For each block: the number of readers that borrow it, or [`WRITER`].
    borrows: Box<[AtomicU32]>,
}

/// A block that no process writes until it is [given back](BlockBorrows::give_back).
///
/// It does not keep the map alive, so a message need not count references. Its bytes are accessed through its
/// `BlockBorrows`.
#[derive(Debug)]
#[must_use = "the block stays borrowed until it is given back"]
pub struct BorrowedBlock(BlockId);

/// A block that its borrower alone reads and writes until it is [given back](BlockBorrows::give_back_mut); otherwise as
/// [`BorrowedBlock`].
#[derive(Debug)]
#[must_use = "the block stays borrowed until it is given back"]
pub struct BorrowedBlockMut(BlockId);

#[derive(Debug)]
struct BlockId {
    /// The [`BlockBorrows`] that lent the block.
    lender: u64,
    index: usize,
}

impl BlockBorrows {
    /// Divides a map into `count` blocks of `bytes` bytes, which start at `offset` and then every `stride` bytes.
    ///
    /// Returns `None` if another `BlockBorrows` has some of those bytes, or if the blocks are empty, overlap or do not
    /// lie within the map.
    pub fn new(map: Arc<SharedMap>, offset: usize, stride: usize, bytes: usize, count: usize) -> Option<Self> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let last = stride.checked_mul(count.checked_sub(1)?)?.checked_add(offset)?;
        let end = last.checked_add(bytes).filter(|end| *end <= map.len())?;
        if bytes == 0 || bytes > stride || !map.lend(offset..end) {
            return None;
        }
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let borrows = (0..count).map(|_| AtomicU32::new(0)).collect();
        Some(Self { map, id, reserved: offset..end, offset, stride, bytes, borrows })
    }

    /// Borrows a block for reading. By the processes' agreement no process writes the block before it is given back.
    ///
    /// Returns `None` if a writer has borrowed the block, or if the block does not exist.
    pub fn borrow(&self, index: usize) -> Option<BorrowedBlock> {
        let more = |readers: u32| readers.checked_add(1).filter(|more| *more != WRITER);
        // Pairs with the store in `give_back_mut`.
        self.borrows.get(index)?.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(BorrowedBlock(BlockId { lender: self.id, index }))
    }

    /// Borrows a block for reading and writing. By the processes' agreement no other process accesses the block before
    /// it is given back.
    ///
    /// Returns `None` if the block is borrowed or does not exist, or if the map is read-only.
    pub fn borrow_mut(&self, index: usize) -> Option<BorrowedBlockMut> {
        let borrows = self.borrows.get(index).filter(|_| self.map.is_writable())?;
        // Pairs with the changes in `give_back` and `give_back_mut`.
        borrows.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(BorrowedBlockMut(BlockId { lender: self.id, index }))
    }

    /// Gives a block back after reading.
    ///
    /// # Panics
    /// If another `BlockBorrows` lent the block.
    pub fn give_back(&self, block: BorrowedBlock) {
        // Pairs with the loads of the next borrower: our reads come before its writes.
        self.borrows[self.index(&block.0)].fetch_sub(1, Ordering::Release);
    }

    /// Gives a block back after writing.
    ///
    /// # Panics
    /// As [`give_back`](Self::give_back).
    pub fn give_back_mut(&self, block: BorrowedBlockMut) {
        // Pairs with the loads of the next borrower, which sees our writes. Only the writer changes the count of a
        // block that it has borrowed.
        self.borrows[self.index(&block.0)].store(0, Ordering::Release);
    }

    /// Returns the bytes of a borrowed block.
    ///
    /// # Panics
    /// If another `BlockBorrows` lent the block.
    pub fn bytes<'a>(&'a self, block: &'a BorrowedBlock) -> &'a [u8] {
        self.slice(&block.0)
    }

    /// Returns the bytes of a block that is borrowed for writing, for reading.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn bytes_of_mut<'a>(&'a self, block: &'a BorrowedBlockMut) -> &'a [u8] {
        self.slice(&block.0)
    }

    /// Returns the bytes of a block that is borrowed for writing.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn bytes_mut<'a>(&'a self, block: &'a mut BorrowedBlockMut) -> &'a mut [u8] {
        // SAFETY:
        // - As in `slice`; and the map is writable, because `borrow_mut` refuses otherwise.
        // - No other borrow of the block exists, and the `&mut` makes this the only access through this borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start(self.index(&block.0)), self.bytes) }
    }

    /// Returns the first address of a block, for code in other languages. The address is valid while the block is
    /// borrowed and `self` lives.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn as_ptr(&self, block: &BorrowedBlockMut) -> *mut u8 {
        self.start(self.index(&block.0))
    }

    /// Has the processor fetch the first bytes of a block that will be read soon.
    pub fn prefetch(&self, index: usize) {
        if index < self.borrows.len() {
            cpu::fetch(self.start(index));
        }
    }

    /// Has the processor fetch the first bytes of a block that will be written soon.
    pub fn prefetch_to_write(&self, index: usize) {
        if index < self.borrows.len() {
            cpu::fetch_to_write(self.start(index));
        }
    }

    /// Returns the index of a block that `self` has lent.
    fn index(&self, block: &BlockId) -> usize {
        assert_eq!(block.lender, self.id, "only the lender shows a block and takes it back");
        block.index
    }

    /// Returns the bytes of a block that the caller has borrowed.
    fn slice<'a>(&'a self, block: &'a BlockId) -> &'a [u8] {
        // SAFETY:
        // - The range is mapped and in bounds while `self` is borrowed, see `start`.
        // - Nothing in this process writes it meanwhile: giving back consumes the `BlockId`, which is borrowed here;
        //   `borrow_mut` refuses while a reader has the block, and a writer needs a `&mut` of the same `BlockId`. Two
        //   `BlockBorrows` never share a range, and the code that makes one uses no `SharedSlice` of that range.
        // - Other processes, and other maps of the same file, do not write it by the domain's agreement. Nothing
        //   enforces that; see the head of this file.
        unsafe { std::slice::from_raw_parts(self.start(self.index(block)), self.bytes) }
    }

    /// Returns the first address of the block `index`, which must exist.
    fn start(&self, index: usize) -> *mut u8 {
        assert!(index < self.borrows.len());
        // SAFETY: `new` has checked that all blocks lie within the mapping, which never shrinks while `map` lives.
        unsafe { self.map.as_ptr().add(self.offset + self.stride * index) }
    }
}

impl Drop for BlockBorrows {
    fn drop(&mut self) {
        // The bytes of a block that is still borrowed can no longer be reached: every other `BlockBorrows` refuses it.
        self.map.take_back(&self.reserved);
    }
}

impl fmt::Debug for BlockBorrows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, stride, bytes, borrows, .. } = self;
        write!(f, "BlockBorrows({} blocks of {bytes} bytes, from {offset}, every {stride})", borrows.len())
    }
}

/// The value of a block's count that stands for a writer.
const WRITER: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memfd::Draft;

    fn map(bytes: u64) -> Arc<SharedMap> {
        Arc::new(SharedMap::writable(Draft::create("partywall:test", bytes).unwrap().share().unwrap()).unwrap())
    }

    #[test]
    fn block_has_one_writer_or_many_readers() {
        let blocks = BlockBorrows::new(map(4096), 256, 256, 200, 15).unwrap();
        let mut ours = blocks.borrow_mut(1).unwrap();
        blocks.bytes_mut(&mut ours).fill(7);
        assert!(blocks.borrow(1).is_none() && blocks.borrow_mut(1).is_none());
        let next = blocks.borrow_mut(2).unwrap();
        let read = blocks.bytes_of_mut(&ours);
        assert_eq!((blocks.bytes_of_mut(&next)[0], read[199], read.len()), (0, 7, 200));
        blocks.give_back_mut(ours);
        let readers = [(); 3].map(|()| blocks.borrow(1).unwrap());
        assert!(readers.iter().all(|borrowed| blocks.bytes(borrowed).iter().all(|byte| *byte == 7)));
        for reader in readers {
            assert!(blocks.borrow_mut(1).is_none());
            blocks.give_back(reader);
        }
        assert!(blocks.borrow_mut(1).is_some());
    }

    #[test]
    fn blocks_are_placed_by_offset_and_stride() {
        let map = map(4096);
        let blocks = BlockBorrows::new(map.clone(), 64, 128, 100, 3).unwrap();
        for index in 0..3 {
            let mut borrowed = blocks.borrow_mut(index).unwrap();
            blocks.bytes_mut(&mut borrowed).fill(index as u8 + 1);
            assert_eq!(blocks.as_ptr(&borrowed).cast_const(), blocks.bytes_of_mut(&borrowed).as_ptr());
        }
        let bytes = map.slice::<u8>(0, 4096).unwrap();
        let has = |block: usize, at: usize| (64 + 128 * block..64 + 128 * block + 100).contains(&at);
        for at in 0..4096 {
            let expected = (0..3).find(|block| has(*block, at)).map_or(0, |block| block as u8 + 1);
            assert_eq!(bytes.get(at), expected, "byte {at}");
        }
    }

    #[test]
    fn block_of_another_lender_is_refused() {
        let [one, other] = [(); 2].map(|()| BlockBorrows::new(map(4096), 0, 64, 64, 2).unwrap());
        let borrowed = one.borrow(0).unwrap();
        std::panic::catch_unwind(|| other.bytes(&borrowed).len()).unwrap_err();
        std::panic::catch_unwind(|| other.give_back(borrowed)).unwrap_err();
        assert!(other.borrow_mut(0).is_some() && one.borrow_mut(0).is_none());
    }

    #[test]
    fn missing_and_read_only_blocks_are_not_lent() {
        let fd = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        let map = Arc::new(SharedMap::readable(&fd).unwrap());
        let divide = |offset, stride, bytes, count| BlockBorrows::new(map.clone(), offset, stride, bytes, count);
        for (offset, stride, bytes, count) in [
            (4095, 2, 2, 1),
            (4096, 1, 1, 1),
            (0, 1, 0, 1),
            (0, 1, 1, 0),
            (0, 100, 101, 2),
            (0, 4096, 1, 2),
            (usize::MAX, 2, 2, 1),
            (1, usize::MAX, 1, 2),
            (0, 1 << 63, 1, 3),
        ] {
            assert!(divide(offset, stride, bytes, count).is_none(), "{offset} {stride} {bytes} {count}");
        }
        let blocks = divide(1, 4094, 1, 2).unwrap();
        assert!(blocks.borrow_mut(0).is_none(), "the map is read-only");
        assert!(blocks.borrow(1).is_some() && blocks.borrow(2).is_none());
        assert!(divide(1, 4094, 1, 2).is_none(), "the map has borrows");
        drop(blocks);
        assert!(divide(1, 4094, 1, 2).is_some());
    }

    proptest! {
        /// Checks, for any order of requests, that a block with several borrowers is only read.
        #[test]
        fn concurrent_borrows_do_not_conflict(
            asked in proptest::collection::vec((0..8_usize, any::<bool>(), any::<prop::sample::Index>()), 1..100),
        ) {
            let blocks = BlockBorrows::new(map(4096), 0, 512, 512, 8).unwrap();
            let mut read = Vec::<BorrowedBlock>::new();
            let mut written = Vec::<BorrowedBlockMut>::new();
            for (index, write, back) in asked {
                let used = |borrowed: &[BorrowedBlock]| borrowed.iter().any(|block| block.0.index == index);
                let taken = written.iter().any(|block| block.0.index == index);
                if write {
                    let borrowed = blocks.borrow_mut(index);
                    prop_assert_eq!(borrowed.is_some(), !taken && !used(&read));
                    written.extend(borrowed);
                } else {
                    let borrowed = blocks.borrow(index);
                    prop_assert_eq!(borrowed.is_some(), !taken);
                    read.extend(borrowed);
                }
                if !read.is_empty() && write {
                    blocks.give_back(read.swap_remove(back.index(read.len())));
                }
                if !written.is_empty() && !write {
                    blocks.give_back_mut(written.swap_remove(back.index(written.len())));
                }
            }
            read.into_iter().for_each(|borrowed| blocks.give_back(borrowed));
            written.into_iter().for_each(|borrowed| blocks.give_back_mut(borrowed));
            prop_assert!((0..8).all(|index| blocks.borrow_mut(index).is_some()));
        }
    }
}
