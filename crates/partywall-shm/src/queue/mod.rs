//! A queue: submitters put tasks into slots, workers claim the oldest one, and each task has exactly one result.
//!
//! | offset | part | bytes | written by |
//! |---|---|---|---|
//! | 0 | magic, layout hash, and the [limits](QueueLimits) | 64 | the broker; see `control` |
//! | 64 | `tail: u64` the position of the next task | 8 | submitters |
//! | 72 | `work` the eventcount of workers that wait for a task | 8 | all; see `eventcount` |
//! | 128 | `head: u64` no position before it has a task that was never attempted, except late ones | 8 | all |
//! | 136 | `space` the eventcount of submitters that wait for a slot | 8 | all |
//! | 192 | `late: u64` counts tasks that became pending behind `head` | 8 | all |
//! | 200 | `late_claimed: u64` a hint: of those, all up to this count have been claimed | 8 | workers |
//! | 208 | `tended: u64` when a member last checked for leases that have ended, in ms | 8 | members that wait |
//! | 216 | `results` the eventcount of members that wait for a result | 8 | all |
//! | 224 | `completed: u64` results since the creation | 8 | workers |
//! | 232 | `returned: u64` attempts that ended without a result | 8 | all |
//! | 240 | `detached: u64` attachments that have ended | 8 | the broker |
//! | 256 | attachments: 32 words | 8 each | the broker; see `attachments` |
//! | 512 | slots: one word for each of the `tasks`, filled up to whole 64 bytes | 8 each | see `word` |
//! | *B* | bodies: one for each of the `tasks` | 1944 each | see `body` |
//!
//! *B* = 512 + 64 · ⌈`tasks` / 8⌉. All other bytes are 0.
//!
//! The slots form a ring: position `p` is in slot `p` modulo `tasks`. A submitter takes the first free slot at `tail`
//! or after it, and skips slots that still have a task. A task that never ends therefore occupies only its own slot. The
//! word of a slot alone decides what happens to its task; `head` and `tail` only tell members where to search:
//!
//! 1. A submitter takes a slot only at a position before `head` + `tasks`, and moves `tail` past that position before
//!    the task is pending. From `head` to `tail` each slot therefore occurs at most once, in the order of submission.
//! 2. `head` passes positions that are not pending. Such a position may become pending later, because its submitter was
//!    slow or its attempt was taken back. The member that makes it pending then adds to `late`. A worker that finds
//!    `late` ahead of `late_claimed` checks all slots first, so a task that was taken back goes before newer ones. The
//!    task of a slow submitter does, too, unless the ring has come round to its slot.
//! 3. A member may be killed or stopped after it has made a task pending and before it adds to `late`. No hint then
//!    leads to the task. Members that wait search all slots for such tasks, and for leases that have ended, every
//!    [`TEND_EVERY`]. The broker does the same when it recovers what dead members held.
//!
//! The protocols: `submit`, `claim`, `finish`, `attachments` and `recovery`.

#![cfg_attr(loom, allow(dead_code, reason = "a model does what processes do at the same time, and no more"))]

mod attachments;
mod audit;
mod body;
mod claim;
mod contents;
mod finish;
#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, loom))]
mod models;
mod recovery;
mod submit;
#[cfg(all(test, not(loom)))]
mod tests;
mod word;

use std::time::Duration;

use self::{
    attachments::AttachmentEntry,
    body::Body,
    word::{TaskSlot, TaskSlotState, TaskWord},
};
use crate::{
    EventKey,
    crash::point,
    eventcount::EventCount,
    members::Row,
    slots::Slots,
    sync::{self, AtomicU64, Ordering},
};

pub use crate::task::{MAX_TASKS, TaskId};
pub use attachments::{InUse, MAX_ATTACHMENTS, attachment_number};
pub use audit::{QueueAudit, TaskInfo};
pub use body::{
    AttachedPart, BlockId, Input, MAX_ARGUMENTS, MAX_INPUTS, MAX_KIND, MAX_PART, MAX_REASON, NewInput, NewOutput,
    NewTask, RECORDS, Reason, StreamPoint, TaskDescription,
};
pub use claim::{Candidate, Claimed, Fenced};
pub use contents::Contents;
pub use finish::{NotRetried, Output, TakenResult, TaskState, Views};
pub use submit::{NotSubmitted, Reserved};
pub use word::MAX_ATTEMPTS;

/// The interval at which the members that wait, together, check for leases that have ended.
pub const TEND_EVERY: Duration = Duration::from_millis(50);

/// The mapped control memory of a queue.
#[derive(Debug)]
pub struct Queue {
    /// As it was at the time of mapping; other processes may write the words that say it.
    limits: QueueLimits,
    header: sync::SharedArray<QueueHeader>,
    tasks: sync::SharedArray<TaskSlot>,
    bodies: sync::SharedArray<Body>,
}

/// The limits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Tasks at a time.
    pub tasks: u32,
    /// Blocks of the pool of inputs; may be 0.
    pub inputs: u32,
    /// Blocks of the pool of outputs; may be 0.
    pub outputs: u32,
    /// Milliseconds that an attempt may take before its task goes to another worker; 0: as long as it likes.
    pub lease: u64,
}

impl QueueLimits {
    /// Returns whether there can be such a queue.
    pub fn is_possible(&self) -> bool {
        (1..=MAX_TASKS).contains(&self.tasks)
            && self.inputs <= 1 << 16
            && self.outputs <= 1 << 16
            && self.lease <= MAX_LEASE
    }
}

/// The longest lease, in milliseconds: a year.
pub const MAX_LEASE: u64 = 365 * 24 * 3600 * 1000;

/// The pools of a queue.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    /// The blocks of the inputs.
    pub inputs: &'a Slots,
    /// The blocks of the outputs.
    pub outputs: &'a Slots,
}

/// What threads of several processes wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueCondition {
    /// A task to claim.
    Work,
    /// A slot for a task.
    Space,
    /// A result, or another end of a task.
    Result,
}

/// What comes before the slots.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct QueueHeader {
    tail: AtomicU64,
    work: EventCount,
    zero_80: [AtomicU64; 6],
    head: AtomicU64,
    space: EventCount,
    zero_144: [AtomicU64; 6],
    late: AtomicU64,
    late_claimed: AtomicU64,
    tended: AtomicU64,
    results: EventCount,
    completed: AtomicU64,
    returned: AtomicU64,
    detached: AtomicU64,
    zero_248: AtomicU64,
    attachments: [AttachmentEntry; MAX_ATTACHMENTS as usize],
}

impl Queue {
    /// Returns what the queue has room for.
    pub fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Returns how many tasks have had a result, and how many attempts have had none.
    pub fn totals(&self) -> (u64, u64) {
        let control = self.control();
        (control.completed.load(Ordering::Relaxed), control.returned.load(Ordering::Relaxed))
    }

    /// Announces that the caller may sleep until an event. What it waits for has to be checked afterwards, and before
    /// [`sleep`](Self::sleep).
    pub fn prepare(&self, event: QueueCondition) -> EventKey {
        self.eventcount(event).prepare()
    }

    /// Sleeps until there may have been an event; at most for `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return
    /// early.
    pub fn sleep(&self, event: QueueCondition, key: EventKey, limit: Duration) {
        self.eventcount(event).sleep(key, limit);
    }

    /// Wakes the threads that wait for an event.
    pub fn notify(&self, event: QueueCondition) {
        self.eventcount(event).notify();
    }

    /// Wakes as many workers as there are new `tasks`.
    ///
    /// More would find nothing, and take processors from those that have tasks, and from the submitter.
    pub fn notify_workers(&self, tasks: usize) {
        // Otherwise it would clear the mark and wake no worker.
        if tasks > 0 {
            self.control().work.notify_some(tasks.try_into().unwrap_or(u32::MAX));
        }
    }

    /// Lets other sleepers have what the calling thread does not need. A thread that may have slept until an event
    /// calls this after its last sleep, whatever it has found.
    pub fn pass_on(&self, event: QueueCondition) {
        match event {
            QueueCondition::Work => {
                point("queue: woken, other workers not marked");
                self.control().work.remark();
                if self.next().is_some() {
                    self.notify_workers(1);
                }
            }
            // Their notifiers wake all.
            QueueCondition::Space | QueueCondition::Result => {}
        }
    }

    fn eventcount(&self, event: QueueCondition) -> &EventCount {
        match event {
            QueueCondition::Work => &self.control().work,
            QueueCondition::Space => &self.control().space,
            QueueCondition::Result => &self.control().results,
        }
    }

    fn control(&self) -> &QueueHeader {
        &self.header[0]
    }

    /// Returns the slot of a position.
    fn slot_of(&self, position: u64) -> usize {
        (position % self.tasks.len() as u64) as usize
    }

    /// Returns a task's slot and body, and the slot's word, if the slot still has the task.
    fn task(&self, id: TaskId) -> Option<(&TaskSlot, &Body, TaskWord)> {
        let index = id.index as usize;
        let slot = self.tasks.get(index)?;
        let body = self.bodies.get(index)?;
        let seen = slot.load();
        let exists = !matches!(
            seen.state(),
            TaskSlotState::Free | TaskSlotState::Writing | TaskSlotState::Draining | TaskSlotState::Invalid
        );
        (exists && seen.generation() == id.generation).then_some((slot, body, seen))
    }

    /// Returns whether an attempt of the task that a slot was seen with has no result and may still use its blocks.
    fn has_open_attempt(&self, index: usize, seen: TaskWord) -> bool {
        self.bodies[index].records().iter().any(|record| {
            let found = record.load();
            found.is_of(seen.generation()) && found.is_open()
        })
    }

    /// Returns the task in a slot.
    fn id(index: usize, word: TaskWord) -> TaskId {
        TaskId { index: index as u32, generation: word.generation() }
    }
}

shared!(QueueHeader {
    tail,
    work,
    zero_80,
    head,
    space,
    zero_144,
    late,
    late_claimed,
    tended,
    results,
    completed,
    returned,
    detached,
    zero_248,
    attachments
});
