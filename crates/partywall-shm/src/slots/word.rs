//! The words of a slot and of a waiter's entry: their bits and all their changes.
//!
//! | slot | bits | |
//! |---|---|---|
//! | state | 0–1 | 0 free, 1 held, 2 handed, 3 offered |
//! | row | 2–17 | the member that holds the slot, was handed it, or offers it; held by [`NOBODY`] means published |
//! | tag | 18–63 | held, offered: the ticket, which differs each time the slot is taken; handed: the waiter's [`WaiterPosition`] |
//!
//! | entry | bits | |
//! |---|---|---|
//! | state | 0–1 | 0 empty, 1 waiting, 2 granted |
//! | slot | 2–17 | granted: the slot |
//! | row | 18–33 | waiting, granted: the waiter's member |
//! | lap | 34–63 | which of the positions that share the entry, modulo 2³⁰; empty: the first one that may be taken |
//!
//! The `p`-th wait is at the entry `p` modulo the ring's length, in lap `p` divided by that length. Laps repeat after
//! 2³⁰ times the ring's length of waits, which takes longer than any process is stopped between two steps. The state is
//! in the low half of the entry, on which the waiter sleeps.
//!
//! Each change is one compare-and-swap from what was seen:
//!
//! | change | by | |
//! |---|---|---|
//! | [`Slot::take`] | a member that takes; any member, for a waiter | free, or handed to a waiter that has left → held; → handed |
//! | [`Slot::keep`] | the waiter | handed → held |
//! | [`Slot::offer`] | the holder | held → offered, with the same ticket |
//! | [`Slot::accept`] | a member that knows the ticket | offered → held, with another ticket |
//! | [`Slot::take_over`] | the reader of a result in a queue | held → held by another row, with another ticket |
//! | [`Slot::publish`] | the holder; a member that completes that; the broker for the dead | held → held by no member |
//! | [`Slot::free`] | the holder; a member that handed in vain, or proves a published one unused; the broker for the dead | held, handed, offered → free |
//! | [`WaiterEntry::wait`] | a member that begins to wait | empty → waiting |
//! | [`WaiterEntry::grant`] | any member that meets the slot handed | waiting → granted |
//! | [`WaiterEntry::finish`] | the waiter; the broker for the dead | waiting, granted → empty, in the next lap |

use crate::{
    members::{NOBODY, Row},
    sync::{self, AtomicU64, FutexWord, Ordering, Stale},
};

/// A position in the queue of waiters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaiterPosition {
    /// The entry's index.
    pub(super) index: usize,
    pub(super) lap: u64,
}

/// A position as a number, for a ring of a given length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(u64);

impl WaiterPosition {
    /// Returns the position of the `count`-th wait in a ring of `len` entries, which is a power of two.
    pub(super) fn of(count: u64, len: usize) -> Self {
        // Shift and mask, because a division would take as long as the rest of taking a slot.
        Self { index: count as usize & (len - 1), lap: (count >> len.trailing_zeros()) & LAPS }
    }

    pub(super) fn of_tag(Tag(tag): Tag, len: usize) -> Self {
        Self::of(tag, len)
    }

    pub(super) fn tag(self, len: usize) -> Tag {
        Tag(self.lap * len as u64 + self.index as u64)
    }
}

/// A slot's word.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct Slot(AtomicU64);

/// The meaning of a slot word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    Held(Row),
    /// Offered by its holder to any member that knows the ticket.
    Offered(Row),
    /// Handed to the waiter at a position.
    Handed(Row, Tag),
    /// Bits that no member may write.
    Invalid,
}

/// A slot word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotWord(u64);

impl SlotWord {
    pub(crate) fn state(self) -> SlotState {
        let row = (self.0 >> ROW) as Row;
        match self.0 & STATE {
            _ if self == FREE => SlotState::Free,
            HELD => SlotState::Held(row),
            HANDED => SlotState::Handed(row, Tag(self.0 >> TAG)),
            OFFERED => SlotState::Offered(row),
            _ => SlotState::Invalid,
        }
    }

    /// The ticket of a slot that is held or offered.
    pub(crate) fn ticket(self) -> u64 {
        self.0 >> TAG
    }

    pub(super) fn held(row: Row, ticket: u64) -> Self {
        Self(HELD | u64::from(row) << ROW | ticket << TAG)
    }

    fn offered(self) -> Self {
        Self(self.0 & !STATE | OFFERED)
    }

    fn published(self) -> Self {
        Self::held(NOBODY, self.ticket())
    }

    pub(super) fn handed(row: Row, Tag(tag): Tag) -> Self {
        Self(HANDED | u64::from(row) << ROW | tag << TAG)
    }
}

impl Slot {
    pub(super) fn load(&self) -> SlotWord {
        // Pairs with the changes below: a member that sees a change sees what was done before it.
        SlotWord(self.0.load(Ordering::Acquire))
    }

    /// Changes a slot that was seen free, or handed to a waiter that has left, to `taken`: held, or handed.
    pub(super) fn take(&self, seen: SlotWord, taken: SlotWord) -> Result<SlotWord, Stale> {
        self.change(seen, taken)
    }

    /// Takes a slot that was handed to this member.
    pub(super) fn keep(&self, handed: SlotWord, held: SlotWord) -> Result<SlotWord, Stale> {
        self.change(handed, held)
    }

    /// Offers a slot that this member holds.
    pub(super) fn offer(&self, held: SlotWord) -> Result<SlotWord, Stale> {
        self.change(held, held.offered())
    }

    /// Takes a slot that was seen offered.
    pub(super) fn accept(&self, offered: SlotWord, held: SlotWord) -> Result<SlotWord, Stale> {
        self.change(offered, held)
    }

    /// Takes a slot that was seen held by another row, or published.
    pub(super) fn take_over(&self, seen: SlotWord, held: SlotWord) -> Result<SlotWord, Stale> {
        self.change(seen, held)
    }

    /// Publishes a slot that was seen held.
    pub(super) fn publish(&self, held: SlotWord) -> Result<SlotWord, Stale> {
        self.change(held, held.published())
    }

    /// Frees a slot.
    pub(super) fn free(&self, seen: SlotWord) -> Result<SlotWord, Stale> {
        self.change(seen, FREE)
    }

    /// Returns the new word. The next holder then sees what this one did, and this one what the former one did.
    fn change(&self, from: SlotWord, to: SlotWord) -> Result<SlotWord, Stale> {
        sync::change(&self.0, from.0, to.0).and(Ok(to))
    }
}

/// A waiter's entry of the ring, in its own cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct WaiterEntry {
    word: FutexWord<AtomicU64>,
    _zero: [AtomicU64; 7],
}

/// The meaning of an entry's word for a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaiterState {
    /// The entry belongs to a position a lap or more earlier, which is not finished.
    Occupied,
    /// The position has not been taken yet.
    Open,
    Waiting(Row),
    Granted(Row, u16),
    /// The position is finished.
    Done,
    /// Bits that no member may write.
    Invalid,
}

/// An entry's word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaiterWord(u64);

impl WaiterWord {
    /// Returns its meaning for a position in `lap`.
    pub(super) fn state(self, lap: u64) -> WaiterState {
        let row = (self.0 >> ENTRY_ROW) as Row;
        match (self.lap().wrapping_sub(lap) & LAPS, self.0 & STATE) {
            (0, EMPTY) => WaiterState::Open,
            (0, WAITING) => WaiterState::Waiting(row),
            (0, GRANTED) => WaiterState::Granted(row, (self.0 >> ENTRY_SLOT) as u16),
            (0, _) => WaiterState::Invalid,
            (1..=HALF, _) => WaiterState::Done,
            _ => WaiterState::Occupied,
        }
    }

    /// Returns the lap that it belongs to.
    pub(super) fn lap(self) -> u64 {
        self.0 >> LAP
    }

    /// Returns whether its lap comes before that of `other`.
    pub(super) fn is_before(self, other: Self) -> bool {
        matches!(other.lap().wrapping_sub(self.lap()) & LAPS, 1..=HALF)
    }

    pub(super) fn waiting(row: Row, lap: u64) -> Self {
        Self(WAITING | u64::from(row) << ENTRY_ROW | lap << LAP)
    }

    fn granted(self, slot: u16) -> Self {
        Self(self.0 & !STATE & !(0xffff << ENTRY_SLOT) | GRANTED | u64::from(slot) << ENTRY_SLOT)
    }

    fn finished(self) -> Self {
        Self((self.lap() + 1) << LAP)
    }
}

impl WaiterEntry {
    #[cfg(all(test, loom))]
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { word: FutexWord::new(zero()), _zero: std::array::from_fn(|_| zero()) }
    }

    pub(super) fn load(&self) -> WaiterWord {
        // Pairs with the changes below.
        WaiterWord(self.word.load(Ordering::Acquire))
    }

    /// Starts a wait at a position that was seen open.
    pub(super) fn wait(&self, open: WaiterWord, waiting: WaiterWord) -> Result<(), Stale> {
        self.change(open, waiting)
    }

    /// Notifies the waiter of `waiting` that a slot was handed to it, and wakes it.
    pub(super) fn grant(&self, waiting: WaiterWord, slot: u16) -> Result<(), Stale> {
        self.change(waiting, waiting.granted(slot))?;
        crate::crash::point("slots: entry granted, waiter not woken");
        self.word.wake_all();
        Ok(())
    }

    /// Frees the entry for the next lap.
    pub(super) fn finish(&self, seen: WaiterWord) -> Result<(), Stale> {
        self.change(seen, seen.finished())
    }

    /// Sleeps while its word is unchanged. Returns false if the time ran out.
    pub(super) fn sleep(&self, seen: WaiterWord, limit: std::time::Duration) -> bool {
        self.word.sleep(seen.0 as u32, limit)
    }

    fn change(&self, from: WaiterWord, to: WaiterWord) -> Result<(), Stale> {
        sync::change(&self.word, from.0, to.0)
    }
}

#[cfg(all(test, loom))]
impl Slot {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

shared!(Slot { 0 } bits { FREE.0, HELD, HANDED, OFFERED, ROW, TAG, NOBODY });
shared!(WaiterEntry { word, _zero } bits { EMPTY, WAITING, GRANTED, ENTRY_SLOT, ENTRY_ROW, LAP, super::MAX_WAITERS });

const FREE: SlotWord = SlotWord(0);
/// The bits of the state, in both words.
const STATE: u64 = 3;

// The states of a slot; `FREE` is the whole word.
const HELD: u64 = 1;
const HANDED: u64 = 2;
const OFFERED: u64 = 3;
/// The first bit of a slot's row.
const ROW: u32 = 2;
/// The first bit of a slot's tag.
const TAG: u32 = 18;

// The states of an entry.
const EMPTY: u64 = 0;
const WAITING: u64 = 1;
const GRANTED: u64 = 2;
/// The first bit of an entry's slot.
const ENTRY_SLOT: u32 = 2;
/// The first bit of an entry's row.
const ENTRY_ROW: u32 = 18;
/// The first bit of an entry's lap.
const LAP: u32 = 34;
/// The largest lap: laps are modulo this plus 1.
const LAPS: u64 = u64::MAX >> LAP;
/// Half of the laps.
const HALF: u64 = LAPS / 2;
