//! The number of a task, for queues and for traces of them.

/// The most tasks that a queue can have at once.
pub const MAX_TASKS: u32 = 1 << 17;

/// A task, among all that the queue ever has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId {
    /// The place.
    pub index: u32,
    /// How many tasks the place has held.
    pub generation: u64,
}

impl TaskId {
    /// Returns place and generation as one number, which no other task of the queue has.
    pub fn number(self) -> u64 {
        self.generation << MAX_TASKS.trailing_zeros() | u64::from(self.index)
    }

    /// Returns the task of a [number](Self::number).
    pub fn of_number(number: u64) -> Self {
        Self { index: number as u32 % MAX_TASKS, generation: number >> MAX_TASKS.trailing_zeros() }
    }
}
