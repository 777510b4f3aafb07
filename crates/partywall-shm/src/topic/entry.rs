//! An entry of the ring: which block is at a position.
//!
//! | bits | | |
//! |---|---|---|
//! | block | 0–15 | its index in the pool |
//! | lap + 1 | 16–63 | which of the positions that share the entry; 0: none of them has been filled |
//!
//! Position `p` is at entry `p` modulo the depth, in the lap `p` divided by it. Laps end after 2⁴⁸ – 1: with ten
//! million samples a second and a depth of one, after ten months.
//!
//! The only change of an entry is [`RingEntry::fill`]: a compare-and-swap from the word of one lap to a word of the
//! next lap, by a publisher that has seen every earlier position filled. Therefore positions are filled in order, each
//! word occurs once, and a process that sees the same word twice knows that the entry did not change in between.
//!
//! If a publisher is killed or stopped before that change, nothing has happened; after it, the change is complete.

use crate::sync::{self, AtomicU64, Ordering, Stale};

/// An entry, in its own cache lines (see [`LINES`](super::LINES)), because readers poll it while they wait.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct RingEntry {
    word: AtomicU64,
    _zero: [AtomicU64; 15],
}

/// The entry and the lap of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingPosition {
    pub(super) index: usize,
    lap: u64,
}

impl RingPosition {
    /// Returns where `position` is in a ring of `depth` entries, a power of two.
    pub(super) fn of(position: u64, depth: usize) -> Self {
        // Shift and mask, because a division would take half as long as the rest of a message.
        let index = position as usize & depth.wrapping_sub(1);
        Self { index, lap: (position >> depth.trailing_zeros()).min(MAX_LAP) }
    }
}

/// An entry as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingWord(u64);

/// The meaning of an entry for a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filling {
    /// The position may be filled: the entry holds the position a lap before, or none in the first lap.
    Next,
    /// The position holds this block.
    Filled(u16),
    /// The position was filled, and overwritten by a later one.
    Overwritten,
    /// Earlier positions have to be filled first.
    Later,
}

impl RingWord {
    pub(super) fn filled(at: RingPosition, block: u16) -> Self {
        Self((at.lap + 1) << LAP | u64::from(block))
    }

    pub(super) fn filling(self, at: RingPosition) -> Filling {
        let laps = self.laps();
        if laps > at.lap + 1 {
            Filling::Overwritten
        } else if laps == at.lap + 1 {
            Filling::Filled(self.0 as u16)
        } else if laps == at.lap {
            Filling::Next
        } else {
            Filling::Later
        }
    }

    /// Returns how many positions the entry has held.
    pub(super) fn laps(self) -> u64 {
        self.0 >> LAP
    }

    /// Returns the block that the entry holds, of any lap.
    pub(super) fn block(self) -> Option<u16> {
        (self.laps() != 0).then_some(self.0 as u16)
    }

    /// Returns the position that the entry `index` holds, in a ring of `depth`.
    pub(super) fn position(self, index: usize, depth: usize) -> Option<u64> {
        self.laps().checked_sub(1).map(|lap| lap * depth as u64 + index as u64)
    }
}

impl RingEntry {
    pub(super) fn load(&self) -> RingWord {
        // Pairs with `fill`: a reader that sees a block there sees what its publisher wrote into it and its descriptor.
        RingWord(self.word.load(Ordering::Acquire))
    }

    /// Fills an entry that was seen to be [next](Filling::Next).
    pub(super) fn fill(&self, seen: RingWord, filled: RingWord) -> Result<(), Stale> {
        sync::change(&self.word, seen.0, filled.0)
    }
}

#[cfg(all(test, loom))]
impl RingEntry {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { word: zero(), _zero: std::array::from_fn(|_| zero()) }
    }
}

shared!(RingEntry { word, _zero } bits { LAP });

/// The first bit of the lap.
const LAP: u32 = 16;
/// The last lap.
const MAX_LAP: u64 = (u64::MAX >> LAP) - 1;
