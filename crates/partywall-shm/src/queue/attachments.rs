//! Attachments: the segments that the tasks of a queue may name as inputs.
//!
//! The broker keeps each attached segment until it is detached or the queue ends, even if the process that attached it
//! dies. The table says which numbers tasks may name, one entry for each attachment. Only the broker writes it. Which
//! segment a number stands for is in the broker's own list, so a member that overwrites the table gains nothing.
//!
//! | bits | field | |
//! |---|---|---|
//! | 0–31 | number | of the last attachment in this entry: the entry's index, plus [`MAX_ATTACHMENTS`] for each one before it |
//! | 32 | attached | tasks may name it |
//!
//! As long as the queue exists, a number therefore stands for one segment only.
//!
//! **Detaching.** The broker clears *attached*, and behind a fence counts the tasks whose attempts may still read the
//! segment ([`Queue::begin_detach`]). If there are any, it sets *attached* again and refuses. A submitter describes its
//! task, and behind a fence reads *attached*, before it makes the task pending ([`Queue::submit`]). At least one of the
//! two sees the other's change. A task in the queue therefore names only attached segments, and no process that may be
//! killed has to keep a count.
//!
//! The broker may read a body while its submitter writes it. If the submitter then finds *attached* set, the broker has
//! read the whole body, or the task is over by then; otherwise the submitter gives the slot back.
//!
//! If a submitter is killed or stopped between any two steps, its slot is *writing*, and the attachments in the body
//! count until the submitter continues or the broker recovers the slot. The body may still be that of the slot's
//! former task; a detach may then be refused that would be granted a moment later. If the broker is killed, no segment
//! is attached or detached any more, and processes keep what they have open.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Queue, TaskId,
    body::Body,
    word::{TaskSlotState, TaskWord},
};
use crate::sync::{AtomicU64, Ordering, fence};

/// The most segments that are attached to a queue at a time.
pub const MAX_ATTACHMENTS: u32 = if cfg!(loom) { 1 } else { 32 };

/// Returns the number of the attachment after `before` others in an entry of the table, if there is one.
pub fn attachment_number(entry: u32, before: u32) -> Option<u32> {
    before.checked_mul(MAX_ATTACHMENTS)?.checked_add(entry)
}

/// The tasks that name an attachment, and may still read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InUse {
    /// How many.
    pub tasks: u32,
    /// One of them.
    pub first: TaskId,
}

/// An entry of the table.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(transparent))]
pub(super) struct AttachmentEntry(AtomicU64);

impl Queue {
    /// Lets tasks name an attachment. Only the broker calls this; any number selects an entry.
    pub fn attach(&self, attachment: u32) {
        // Pairs with the load in `is_attached`.
        self.entry(attachment).0.store(u64::from(attachment) | ATTACHED, Ordering::Release);
    }

    /// Ends an attachment, unless tasks name it: then returns these, and tasks may still name it. Only the broker calls
    /// this.
    pub fn begin_detach(&self, attachment: u32) -> Option<InUse> {
        self.entry(attachment).0.store(attachment.into(), Ordering::Relaxed);
        // Pairs with the fence in `submit`: a submitter that found it attached has described its task for us to see.
        fence(Ordering::SeqCst);
        let in_use = self.uses(attachment);
        match in_use {
            Some(_) => self.attach(attachment),
            None => _ = self.control().detached.fetch_add(1, Ordering::AcqRel),
        }
        in_use
    }

    /// Returns how many attachments have ended. A process that keeps segments open compares it with what it was, to
    /// close those that are attached no more.
    pub fn detached(&self) -> u64 {
        self.control().detached.load(Ordering::Acquire)
    }

    /// Returns whether tasks may name an attachment.
    pub fn is_attached(&self, attachment: u32) -> bool {
        self.entry(attachment).0.load(Ordering::Acquire) == u64::from(attachment) | ATTACHED
    }

    /// Counts for each attachment the tasks that name it and may still read it. While others use the queue, these are
    /// hints.
    pub fn all_uses(&self) -> BTreeMap<u32, u32> {
        let mut uses = BTreeMap::new();
        for (_, body) in self.readers() {
            let named: BTreeSet<_> = body.attachments().collect();
            named.into_iter().for_each(|attachment| *uses.entry(attachment).or_default() += 1);
        }
        uses
    }

    /// Returns whether a task names an attachment and may still read it. While others use the queue, it is a hint.
    pub fn is_named(&self, attachment: u32) -> bool {
        self.uses(attachment).is_some()
    }

    fn uses(&self, attachment: u32) -> Option<InUse> {
        let names = |body: &Body| body.attachments().any(|named| named == attachment);
        let mut named_by = self.readers().filter(|(_, body)| names(body)).map(|(task, _)| task);
        let first = named_by.next()?;
        Some(InUse { tasks: 1 + named_by.count() as u32, first })
    }

    /// Returns the tasks that may still read their inputs.
    fn readers(&self) -> impl Iterator<Item = (TaskId, &Body)> {
        self.tasks.iter().enumerate().filter_map(|(index, slot)| {
            // Before the body, which takes no memory as long as it is not read.
            let seen = slot.load();
            self.may_read_inputs(index, seen).then(|| (Self::id(index, seen), &self.bodies[index]))
        })
    }

    /// Returns whether an attempt of the task that a slot was seen with may read the inputs, now or later.
    fn may_read_inputs(&self, index: usize, seen: TaskWord) -> bool {
        match seen.state() {
            TaskSlotState::Free => false,
            // It goes to no worker any more.
            TaskSlotState::Done | TaskSlotState::Ending | TaskSlotState::Draining | TaskSlotState::Invalid => {
                self.has_open_attempt(index, seen)
            }
            TaskSlotState::Writing
            | TaskSlotState::Pending
            | TaskSlotState::Claimed
            | TaskSlotState::Enqueued
            | TaskSlotState::Dead => true,
        }
    }

    /// Counts the segments that are attached.
    pub(super) fn attached(&self) -> u32 {
        let is_attached = |entry: &&AttachmentEntry| entry.0.load(Ordering::Relaxed) & ATTACHED != 0;
        self.control().attachments.iter().filter(is_attached).count() as u32
    }

    fn entry(&self, attachment: u32) -> &AttachmentEntry {
        &self.control().attachments[(attachment % MAX_ATTACHMENTS) as usize]
    }
}

#[cfg(all(test, loom))]
impl AttachmentEntry {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

shared!(AttachmentEntry { 0 } bits { ATTACHED });

const ATTACHED: u64 = 1 << 32;
