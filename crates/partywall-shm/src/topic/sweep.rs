//! Sweeping: frees the blocks that are in no entry of the ring and in no hold of a reader.
//!
//! There are no reference counts. A member *sweeps* if it finds no free block, for now or for the next sample, or if it
//! releases a block while another member waits for one. It reads the slots of all blocks, then all entries, and behind
//! a fence all holds. It frees the blocks that are published, in no entry and in no hold, by compare-and-swap from the
//! slot word that it saw first. A block may therefore be unused and not free for a while, which costs nothing. Apart
//! from sweeps, no publisher or reader reads another's holds.
//!
//! **Why this is right.** A slot word occurs once. If it is unchanged in the end, the block was published all the time.
//! The block was put into the ring before that and leaves it once, so it was out of the ring since we read its entry. A
//! reader takes its hold from an entry, and behind a fence checks whether the block may have left the ring before its
//! hold was visible (see `receive`). If we have not found its hold, our fence came before its own, and the reader
//! notices.
//!
//! **Why no member waits in vain.** A member that waits for a block announces that, and behind a fence sweeps. A member
//! that fills an entry, retires a block or clears a hold does so, and behind a fence checks for waiters. One of the two
//! sees the other's change. A waiter also sweeps again after [`MAX_SLEEP`](crate::MAX_SLEEP).
//!
//! If a member that sweeps is killed or stopped between any two steps, some blocks are freed and the others are left to
//! the next sweep.

use super::{Topic, port::Occupancy};
use crate::{
    crash::point,
    members::NOBODY,
    slots::{SlotState, SlotWord, Slots},
    sync::{Ordering, fence},
};

impl Topic {
    /// Sweeps if a member waits for a block. Call this behind a fence.
    pub(super) fn collect(&self, slots: &Slots) {
        if slots.has_waiters() {
            self.sweep(slots);
        }
    }

    /// Frees the unused blocks, and returns their number. A member that finds no free block calls this once it waits
    /// for one, and from time to time while it waits.
    pub fn sweep(&self, slots: &Slots) -> u32 {
        let candidates = self.unused(slots);
        point("topic: blocks found unused, not freed");
        slots.free_all(candidates)
    }

    /// Returns the published blocks that are not in use, each with the word that was seen.
    pub(super) fn unused(&self, slots: &Slots) -> impl Iterator<Item = (u32, SlotWord)> {
        let blocks = self.descriptors.len() as u32;
        let mut published = Vec::with_capacity(blocks as usize);
        let seen = (0..blocks).filter_map(|block| Some((block, slots.seen(block)?)));
        published.extend(seen.filter(|(_, seen)| seen.state() == SlotState::Held(NOBODY)));
        let mut used = BlockSet::none(blocks);
        for entry in self.ring.iter() {
            if let Some(block) = entry.load().block() {
                used.insert(block.into());
            }
        }
        // Pairs with the fence in `receive`.
        fence(Ordering::SeqCst);
        self.each_hold(|block| {
            used.insert(block);
        });
        published.into_iter().filter(move |(block, _)| !used.contains(*block))
    }

    /// Calls `found` for each block in a hold.
    pub(super) fn each_hold(&self, mut found: impl FnMut(u32)) {
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            // A member that takes the port after this load takes its holds behind a fence that comes after ours.
            if subscriber.port.load().occupancy() == Occupancy::Free {
                continue;
            }
            // Pairs with the store in `release`.
            for hold in self.holds_of(index) {
                if let Some(block) = hold.load(Ordering::Acquire).checked_sub(1) {
                    found(u32::try_from(block).unwrap_or(u32::MAX));
                }
            }
        }
    }
}

/// A set of blocks. A small set needs no allocation.
pub(super) enum BlockSet {
    Few([u64; FEW]),
    Many(Vec<u64>),
}

impl BlockSet {
    pub(super) fn none(blocks: u32) -> Self {
        match blocks.div_ceil(64) as usize {
            ..=FEW => Self::Few([0; FEW]),
            words => Self::Many(vec![0; words]),
        }
    }

    /// Adds a block, if it exists. Returns whether the set contained the block already.
    pub(super) fn insert(&mut self, block: u32) -> bool {
        let words = match self {
            Self::Few(words) => &mut words[..],
            Self::Many(words) => words,
        };
        let Some(word) = words.get_mut(block as usize / 64) else { return false };
        let bit = 1 << (block % 64);
        std::mem::replace(word, *word | bit) & bit != 0
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        let words = match self {
            Self::Few(words) => &words[..],
            Self::Many(words) => words,
        };
        words.get(block as usize / 64).is_some_and(|word| word & 1 << (block % 64) != 0)
    }
}

/// Words of a set that needs no allocation.
const FEW: usize = 4;
