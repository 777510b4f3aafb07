//! The word of a task's slot: it says which member may do what with the task.
//!
//! | bits | field | |
//! |---|---|---|
//! | 0–3 | state | see below |
//! | 4 | unwanted | the submitter has died and no process reads the result: the task ends with its attempt |
//! | 5–20 | row | of the member that has the slot: *writing*, *claimed*, *enqueued*, *ending* |
//! | 21–28 | attempts | the number of the last attempt, from 1; no number is used twice, also after a retry |
//! | 29–63 | generation | how many tasks the slot has held |
//!
//! | state | | the next states |
//! |---|---|---|
//! | 0 free | no task | writing |
//! | 1 writing | its submitter describes it | pending; free |
//! | 2 pending | a worker may claim it | claimed; ending |
//! | 3 claimed | a worker has it | done, enqueued, ending; pending or dead, if it is taken back |
//! | 4 enqueued | a stream of its worker completes it | as claimed |
//! | 5 done | its result is unread | ending |
//! | 6 dead | a dead letter: it was attempted as often as it may be | pending (again), ending |
//! | 7 ending | one member has taken the result, cancelled it or purged it | draining |
//! | 8 draining | it is over; fenced attempts may still read its inputs | free |
//!
//! Each change is one compare-and-swap from what was seen. Generations repeat after 2³⁵ tasks in one slot: with 64
//! slots and a million tasks a second, after 25 days, longer than any process is stopped between two steps.

use super::Row;
use crate::sync::{self, AtomicU64, Ordering, Stale};

/// The most attempts that a task can have, those after retries included.
pub const MAX_ATTEMPTS: u8 = u8::MAX;

/// The word of a slot.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(crate) struct TaskSlot(AtomicU64);

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskSlotState {
    Free,
    Writing,
    Pending,
    Claimed,
    Enqueued,
    Done,
    Dead,
    Ending,
    Draining,
    /// Bits that no member may write.
    Invalid,
}

/// The word of a slot as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskWord(u64);

impl TaskWord {
    pub(super) fn state(self) -> TaskSlotState {
        match self.0 & STATE {
            0 => TaskSlotState::Free,
            1 => TaskSlotState::Writing,
            2 => TaskSlotState::Pending,
            3 => TaskSlotState::Claimed,
            4 => TaskSlotState::Enqueued,
            5 => TaskSlotState::Done,
            6 => TaskSlotState::Dead,
            7 => TaskSlotState::Ending,
            8 => TaskSlotState::Draining,
            _ => TaskSlotState::Invalid,
        }
    }

    pub(super) fn is_unwanted(self) -> bool {
        self.0 & UNWANTED != 0
    }

    pub(super) fn row(self) -> Row {
        (self.0 >> ROW) as Row
    }

    pub(super) fn attempts(self) -> u8 {
        (self.0 >> ATTEMPTS) as u8
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION
    }

    /// Returns whether an attempt is under way.
    pub(super) fn is_attempted(self) -> bool {
        matches!(self.state(), TaskSlotState::Claimed | TaskSlotState::Enqueued)
    }

    /// The next task of the slot, which `row` describes.
    pub(super) fn writing(self, row: Row) -> Self {
        let generation = (self.0 >> GENERATION << GENERATION).wrapping_add(1 << GENERATION);
        Self(generation | u64::from(row) << ROW | TaskSlotState::Writing as u64)
    }

    /// The next attempt, by `row`.
    pub(super) fn claimed(self, row: Row) -> Self {
        let attempts = u64::from(self.attempts().saturating_add(1));
        let kept = self.0 & !(0xff << ATTEMPTS);
        Self(kept | attempts << ATTEMPTS).with(TaskSlotState::Claimed, row)
    }

    /// The same task and attempt in another state, in which it belongs to `row`.
    pub(super) fn with(self, state: TaskSlotState, row: Row) -> Self {
        Self(self.0 & !(STATE | 0xffff << ROW) | u64::from(row) << ROW | state as u64)
    }

    pub(super) fn unwanted(self) -> Self {
        Self(self.0 | UNWANTED)
    }

    /// The dead letter as a pending task whose next attempt comes after that number.
    pub(super) fn retried(self, before: u8) -> Self {
        Self(self.0 & !(0xff << ATTEMPTS) | u64::from(before) << ATTEMPTS).with(TaskSlotState::Pending, 0)
    }
}

impl TaskSlot {
    pub(super) fn load(&self) -> TaskWord {
        // Pairs with `change`: a member that sees a state sees what was done before it.
        TaskWord(self.0.load(Ordering::Acquire))
    }

    /// Returns the new word. The next owner then sees what this one did, and this one what the former one did.
    pub(super) fn change(&self, from: TaskWord, to: TaskWord) -> Result<TaskWord, Stale> {
        sync::change(&self.0, from.0, to.0).and(Ok(to))
    }
}

#[cfg(all(test, loom))]
impl TaskSlot {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

shared! {
    TaskSlot { 0 }
    bits {
        UNWANTED, ROW, ATTEMPTS, GENERATION,
        TaskSlotState::Free as u64, TaskSlotState::Writing as u64, TaskSlotState::Pending as u64, TaskSlotState::Claimed as u64,
        TaskSlotState::Enqueued as u64, TaskSlotState::Done as u64, TaskSlotState::Dead as u64, TaskSlotState::Ending as u64, TaskSlotState::Draining as u64,
    }
}

const STATE: u64 = 15;
const UNWANTED: u64 = 1 << 4;
/// The first bit of the row.
const ROW: u32 = 5;
/// The first bit of the attempts.
const ATTEMPTS: u32 = 21;
/// The first bit of the generation.
const GENERATION: u32 = 29;
