//! How blocks become free: those that are in no entry of the ring and in no hold of a reader.
//!
//! Nobody counts references. Who finds no free block, for now or for the next sample, or lets go of one while somebody
//! waits for a block, *sweeps*: looks at all blocks' slots, then at all entries, and behind a fence at all holds; what is
//! published, in no entry and in no hold is freed by compare-and-swap from the word that it began with. So a block may be in
//! no use and not free for a while; that costs nobody anything, and otherwise no publisher and no reader looks at another's
//! holds.
//!
//! Why it is right. A slot word is there once. If it is unchanged in the end, the block was published all the time; since it
//! was put into the ring before that, and leaves it once, it was out of the ring from our look at its entry on. A reader
//! takes its hold from an entry, and behind a fence looks whether the block may have left the ring without anybody having seen
//! that hold (`topic/receive.rs` says how). If we have not found its hold, our fence came before its own, and it finds so.
//!
//! Why nobody waits in vain. Who waits for a block says so, and behind a fence sweeps. Who fills an entry, retires a
//! block or clears a hold does so, and behind a fence looks whether somebody waits. One of them sees what the other did. And
//! who waits sweeps again after [`MAX_SLEEP`](crate::MAX_SLEEP).
//!
//! If who sweeps is killed or stopped between any two steps, some blocks are freed and others are left to the next.

use super::{core::Core, port::Occupancy};
use crate::{
    crash::point,
    members::NOBODY,
    slots::{self, SlotWord, State},
    sync::{Ordering, fence},
};

impl Core<'_> {
    /// Sweeps if somebody waits for a block. To be called behind a fence.
    pub(super) fn collect(self, slots: slots::Core<'_>) {
        if slots.somebody_waits() {
            self.sweep(slots);
        }
    }

    /// Frees the blocks that are in no use. Returns how many.
    pub(super) fn sweep(self, slots: slots::Core<'_>) -> u32 {
        let candidates = self.unused(slots);
        point("topic: blocks found unused, not freed");
        slots.free_all(candidates)
    }

    /// The published blocks that are in no use, each as it was seen.
    pub(super) fn unused(self, slots: slots::Core<'_>) -> impl Iterator<Item = (u32, SlotWord)> {
        let blocks = self.descriptors.len() as u32;
        let mut published = Vec::with_capacity(blocks as usize);
        let seen = (0..blocks).filter_map(|block| Some((block, slots.seen(block)?)));
        published.extend(seen.filter(|(_, seen)| seen.state() == State::Held(NOBODY)));
        let mut used = Blocks::none(blocks);
        for entry in self.ring {
            if let Some(block) = entry.load().block() {
                used.insert(block.into());
            }
        }
        // Pairs with the one of who receives.
        fence(Ordering::SeqCst);
        self.each_hold(|block| {
            used.insert(block);
        });
        published.into_iter().filter(move |(block, _)| !used.contains(*block))
    }

    /// Calls `found` for each block in a hold.
    pub(super) fn each_hold(self, mut found: impl FnMut(u32)) {
        for (index, subscriber) in self.subscribers.iter().enumerate() {
            // Who takes the port after this look takes its holds behind a fence that comes after ours.
            if subscriber.port.load().occupancy() == Occupancy::Free {
                continue;
            }
            // Pairs with the store of who lets go.
            for hold in self.holds_of(index) {
                if let Some(block) = hold.load(Ordering::Acquire).checked_sub(1) {
                    found(u32::try_from(block).unwrap_or(u32::MAX));
                }
            }
        }
    }
}

/// A set of blocks.
pub(super) enum Blocks {
    Few([u64; FEW]),
    Many(Vec<u64>),
}

impl Blocks {
    pub(super) fn none(blocks: u32) -> Self {
        match blocks.div_ceil(64) as usize {
            ..=FEW => Self::Few([0; FEW]),
            words => Self::Many(vec![0; words]),
        }
    }

    fn words(&self) -> &[u64] {
        match self {
            Self::Few(words) => words,
            Self::Many(words) => words,
        }
    }

    fn words_mut(&mut self) -> &mut [u64] {
        match self {
            Self::Few(words) => words,
            Self::Many(words) => words,
        }
    }

    /// Does nothing for a block that there is not. Returns whether it was there already.
    pub(super) fn insert(&mut self, block: u32) -> bool {
        let Some(word) = self.words_mut().get_mut(block as usize / 64) else { return false };
        let bit = 1 << (block % 64);
        std::mem::replace(word, *word | bit) & bit != 0
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.words().get(block as usize / 64).is_some_and(|word| word & 1 << (block % 64) != 0)
    }
}

/// Words of a set for which no memory is allocated.
const FEW: usize = 4;
