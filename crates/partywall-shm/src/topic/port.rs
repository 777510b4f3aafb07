//! The slot of a port, which records the owner of the port. One word, changed only by compare-and-swap.
//!
//! | bits | | |
//! |---|---|---|
//! | state | 0–1 | 0 free (the whole word is 0), 1 taken, 2 active, 3 detached |
//! | row | 2–17 | the member that owns it |
//! | id | 18–63 | the number of the join, from one counter for publishers and subscribers; no two joins have the same |
//!
//! | change | by | |
//! |---|---|---|
//! | [`PortSlot::take`] | a member that joins | free → taken |
//! | [`PortSlot::open`] | its owner, once the words beside it are set | taken → active |
//! | [`PortSlot::detach`] | its owner, when it leaves; the broker, if the owner is dead or evicted | taken, active → detached |
//! | [`PortSlot::free`] | its owner, when it holds nothing more; the broker, once the owner is proved dead | any → free |
//!
//! A port counts while it is active. A detached port keeps its holds. Only its owner writes the words beside the slot,
//! from taking the port to freeing it.
//!
//! If its owner is killed or stopped between any two changes, the port stays its own until the owner is proved dead. No
//! process waits for the next change: a port that is taken and not active does not count.

use crate::sync::{self, AtomicU64, Ordering, Stale};

/// See the head of this file.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct PortSlot(AtomicU64);

/// The word of a port slot as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PortWord(u64);

/// Identifies one publisher or subscriber of a topic by its port and its join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortId {
    pub(super) index: usize,
    pub(super) word: PortWord,
}

impl PortId {
    /// Returns its number, which is never used for another publisher or subscriber of the topic.
    pub fn id(&self) -> u64 {
        self.word.id()
    }
}

/// The meaning of a port slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occupancy {
    Free,
    Taken,
    Active,
    Detached,
    /// Bits that no process may write.
    Invalid,
}

impl PortWord {
    pub(super) fn taken(row: u16, id: u64) -> Self {
        Self(TAKEN | u64::from(row) << ROW | (id & MAX_ID) << ID)
    }

    pub(super) fn occupancy(self) -> Occupancy {
        match self.0 & STATE {
            _ if self.0 == 0 => Occupancy::Free,
            TAKEN => Occupancy::Taken,
            ACTIVE => Occupancy::Active,
            DETACHED => Occupancy::Detached,
            _ => Occupancy::Invalid,
        }
    }

    pub(super) fn row(self) -> u16 {
        (self.0 >> ROW) as u16
    }

    pub(super) fn id(self) -> u64 {
        self.0 >> ID
    }

    fn with(self, state: u64) -> Self {
        Self(self.0 & !STATE | state)
    }
}

impl PortSlot {
    pub(super) fn load(&self) -> PortWord {
        // Pairs with the changes below: a process that sees a change sees what the owner wrote before it.
        PortWord(self.0.load(Ordering::Acquire))
    }

    pub(super) fn take(&self, taken: PortWord) -> Result<PortWord, Stale> {
        self.change(PortWord(0), taken)
    }

    /// Opens the port, unless the broker has detached it already.
    pub(super) fn open(&self, taken: PortWord) -> Result<PortWord, Stale> {
        self.change(taken, taken.with(ACTIVE))
    }

    /// Detaches a port that was seen taken or active.
    pub(super) fn detach(&self, seen: PortWord) -> Result<PortWord, Stale> {
        self.change(seen, seen.with(DETACHED))
    }

    /// Frees the port.
    pub(super) fn free(&self, seen: PortWord) -> Result<PortWord, Stale> {
        self.change(seen, PortWord(0))
    }

    /// Returns the new word.
    fn change(&self, from: PortWord, to: PortWord) -> Result<PortWord, Stale> {
        sync::change(&self.0, from.0, to.0).and(Ok(to))
    }
}

#[cfg(all(test, loom))]
impl PortSlot {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

shared!(PortSlot { 0 } bits { TAKEN, ACTIVE, DETACHED, ROW, ID });

const TAKEN: u64 = 1;
const ACTIVE: u64 = 2;
const DETACHED: u64 = 3;
/// The bits of the state.
const STATE: u64 = 3;
/// The first bit of the row.
const ROW: u32 = 2;
/// The first bit of the id.
const ID: u32 = 18;
/// The largest id.
const MAX_ID: u64 = u64::MAX >> ID;
