//! Counts and lists for observers.

use std::collections::BTreeMap;

use super::{
    Queue, Reason, Row, TaskId, TaskState,
    finish::{current, task_state},
    word::TaskSlotState,
};
use crate::slots::Slots;

/// Where the tasks of a queue are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueAudit {
    /// Slots without a task.
    pub free: u32,
    /// Slots whose task its submitter describes.
    pub writing: u32,
    /// Tasks that wait for a worker.
    pub pending: u32,
    /// Tasks that a worker has.
    pub claimed: u32,
    /// Tasks that a worker's stream completes.
    pub enqueued: u32,
    /// Results that no process has read.
    pub done: u32,
    /// Dead letters.
    pub dead: u32,
    /// Tasks that are over, and whose slot is not free yet.
    pub ending: u32,
    /// Attempts that are over, and may still use their blocks.
    pub open: u32,
    /// Words in a state that no member may make.
    pub invalid: u32,
    /// Segments that are attached.
    pub attached: u32,
}

/// A task, for observers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// The task.
    pub id: TaskId,
    /// How far it is.
    pub state: TaskState,
    /// The kind of work.
    pub kind: Vec<u8>,
    /// The number of its last attempt.
    pub attempts: u8,
    /// The number of the last one that it may have.
    pub max_attempts: u8,
    /// The row of the submitter.
    pub submitter: Row,
    /// When it was submitted: [`members::now`](crate::members::now).
    pub submitted: u64,
    /// Why its last attempts have had no result, with their numbers.
    pub failures: Vec<(u8, Reason)>,
    /// What the last worker that failed it said.
    pub text: Vec<u8>,
}

impl Queue {
    /// Counts the tasks. While others use the queue, the numbers are of no single moment.
    pub fn audit(&self) -> QueueAudit {
        let mut audit = QueueAudit { attached: self.attached(), ..QueueAudit::default() };
        for (slot, body) in self.tasks.iter().zip(self.bodies.iter()) {
            let seen = slot.load();
            *match seen.state() {
                TaskSlotState::Free => &mut audit.free,
                TaskSlotState::Writing => &mut audit.writing,
                TaskSlotState::Pending => &mut audit.pending,
                TaskSlotState::Claimed => &mut audit.claimed,
                TaskSlotState::Enqueued => &mut audit.enqueued,
                TaskSlotState::Done => &mut audit.done,
                TaskSlotState::Dead => &mut audit.dead,
                TaskSlotState::Ending | TaskSlotState::Draining => &mut audit.ending,
                TaskSlotState::Invalid => &mut audit.invalid,
            } += 1;
            if seen.state() != TaskSlotState::Free {
                let open = body.records().iter().filter(|record| {
                    let found = record.load();
                    found.is_of(seen.generation()) && found.is_open()
                });
                audit.open += open.count() as u32;
            }
        }
        audit
    }

    /// Counts the inputs of tasks, and of attempts that may still use them, that are free or another member's blocks.
    /// No correct member makes one.
    pub fn lost_inputs(&self, inputs: &Slots) -> u32 {
        let mut lost = 0;
        for (index, (slot, body)) in self.tasks.iter().zip(self.bodies.iter()).enumerate() {
            let seen = slot.load();
            let are_needed = || match seen.state() {
                TaskSlotState::Free | TaskSlotState::Writing | TaskSlotState::Invalid => false,
                TaskSlotState::Done | TaskSlotState::Draining => self.has_open_attempt(index, seen),
                _ => true,
            };
            if are_needed() {
                let found = body.blocks().filter(|block| current(inputs, *block).is_none()).count();
                // If the task has gone on, its inputs may have been freed meanwhile.
                if found > 0 && slot.load() == seen && are_needed() {
                    lost += found as u32;
                }
            }
        }
        lost
    }

    /// Counts the results that no process has read. Reads the words of the slots alone, so it takes less time than an
    /// audit.
    pub fn unread(&self) -> u32 {
        self.tasks.iter().filter(|slot| slot.load().state() == TaskSlotState::Done).count() as u32
    }

    /// Counts the tasks that each row works on, rows without a task left out.
    pub fn workers(&self) -> BTreeMap<Row, u32> {
        let mut workers = BTreeMap::new();
        for seen in self.tasks.iter().map(|slot| slot.load()).filter(|seen| seen.is_attempted()) {
            *workers.entry(seen.row()).or_default() += 1;
        }
        workers
    }

    /// Lists tasks in states that `of` accepts, by slot from `first`, at most `most`.
    pub fn tasks(&self, first: u32, most: usize, of: impl Fn(TaskState) -> bool) -> Vec<TaskInfo> {
        let slots = self.tasks.iter().enumerate().skip(first as usize);
        let found = slots.filter_map(|(index, slot)| {
            let seen = slot.load();
            let state = task_state(seen);
            if state == TaskState::Gone || !of(state) {
                return None;
            }
            let id = Self::id(index, seen);
            let description = self.describe(id)?;
            let (failures, text) = self.failures(id);
            Some(TaskInfo {
                id,
                state,
                kind: description.kind,
                attempts: seen.attempts(),
                max_attempts: description.max_attempts,
                submitter: description.submitter,
                submitted: description.submitted,
                failures,
                text,
            })
        });
        found.take(most).collect()
    }
}
