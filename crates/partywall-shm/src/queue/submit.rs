//! Submitting: how a task enters the queue.
//!
//! 1. The submitter takes a free slot (*writing*) and moves `tail` past its position. If `head` has passed that
//!    position in the meantime, the submitter frees the slot and starts again.
//! 2. It writes the body. It still holds the input blocks itself. If the body names an attachment that has been
//!    detached, the submitter frees the slot and fails; see `attachments`.
//! 3. It makes the slot *pending* by one compare-and-swap. From then on the blocks that the body names belong to the
//!    task, and the submitter gives up its own hold on them.
//! 4. Behind a fence, it adds to `late` if `head` has passed the position. Then it notifies workers.
//!
//! If the submitter is killed or stopped before step 3, nothing has been submitted: the slot and the blocks stay its
//! own until it continues or is proved dead. After step 3 the task is in the queue. If the submitter dies before it has
//! given up its blocks, the broker gives them to the task. If it dies before it notifies workers, they find the task
//! when they check again, which they do after at most [`MAX_SLEEP`](crate::MAX_SLEEP).
//!
//! **Why no pending task is missed.** A worker that passes a position moves `head`, and then, behind a fence, checks
//! the slot again. A submitter makes the slot *pending*, and then, behind a fence, reads `head`. At least one of the
//! two sees the other's change, and adds to `late`.

use super::{
    NewInput, NewTask, Queue, Row, TaskId,
    body::{MAX_ARGUMENTS, MAX_INPUTS, MAX_KIND},
    word::{TaskSlotState, TaskWord},
};
use crate::{
    crash::point,
    slots::Slots,
    sync::{Ordering, fence, fence_behind_change},
};

/// A slot that was taken for a task. Submit it or give it back: otherwise it stays taken until its owner dies.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Reserved {
    pub(super) index: usize,
    position: u64,
    pub(super) word: TaskWord,
}

/// Why a task was not submitted. Its blocks are still the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotSubmitted {
    /// The broker has taken the slot back because it took the caller for dead.
    Lost,
    /// The task names this attachment, which has ended, or which the broker is about to end. The slot was given back.
    Detached(u32),
}

impl Queue {
    /// Takes a slot for a task. Returns `None` if all are taken.
    ///
    /// Slots whose tasks are over are not free before those of older pending tasks have been claimed.
    pub fn reserve(&self, row: Row) -> Option<Reserved> {
        let slots = self.tasks.len() as u64;
        let mut position = self.control().tail.load(Ordering::Acquire);
        for _ in 0..2 * slots + MOST_ATTEMPTS {
            let head = self.control().head.load(Ordering::Acquire);
            // Others may have come past the position that we saw.
            position = if is_before(position, head) { head } else { position };
            if position.wrapping_sub(head) >= slots && position.wrapping_sub(self.pass_ended()) >= slots {
                return None;
            }
            let index = self.slot_of(position);
            let seen = self.tasks[index].load();
            if seen.state() != TaskSlotState::Free {
                position = position.wrapping_add(1);
                continue;
            }
            let Ok(word) = self.tasks[index].change(seen, seen.writing(row)) else { continue };
            point("queue: slot taken, tail not moved");
            self.move_tail(position);
            point("queue: tail moved, slot not checked");
            if self.has_passed(position) {
                // We were slow, and others have used this position. Tasks that were submitted since would come later
                // than ours.
                self.free_reserved(index, word);
                position = self.control().tail.load(Ordering::Acquire);
                continue;
            }
            return Some(Reserved { index, position, word });
        }
        None
    }

    /// Gives a slot back.
    pub fn give_back(&self, reserved: Reserved) {
        self.free_reserved(reserved.index, reserved.word);
        point("queue: slot given back, nobody notified");
        self.control().space.notify_behind_change();
    }

    fn free_reserved(&self, index: usize, word: TaskWord) {
        // Stale if the broker has taken this process for dead.
        let _ = self.tasks[index].change(word, word.with(TaskSlotState::Free, 0));
    }

    /// Submits a task. The blocks among its inputs then belong to the queue. The caller has to [notify](Queue::notify)
    /// workers afterwards, once for all tasks that it submits together.
    ///
    /// # Errors
    /// [`NotSubmitted`]; the blocks are still the caller's.
    ///
    /// # Panics
    /// If the kind, the arguments or the inputs are too long, or there is no attempt.
    pub fn submit(
        &self,
        slots: &Slots,
        reserved: Reserved,
        task: &NewTask<'_>,
        inputs: &[NewInput<'_>],
    ) -> Result<TaskId, NotSubmitted> {
        let fits = task.kind.len() <= MAX_KIND && task.arguments.len() <= MAX_ARGUMENTS;
        let are_possible = inputs.len() <= MAX_INPUTS && inputs.iter().all(NewInput::is_possible);
        assert!(fits && are_possible && task.max_attempts > 0, "the caller has checked");
        let Reserved { index, position, word } = reserved;
        self.bodies[index].write(word, task, inputs);
        point("queue: described, not pending");
        if let Some(detached) = self.find_detached(inputs) {
            self.give_back(reserved);
            return Err(NotSubmitted::Detached(detached));
        }
        point("queue: attachments seen, not pending");
        let pending = word.with(TaskSlotState::Pending, 0);
        self.tasks[index].change(word, pending).map_err(|_| NotSubmitted::Lost)?;
        point("queue: pending, blocks still held");
        for block in inputs.iter().filter_map(NewInput::block) {
            // Stale if the task has ended already, which frees the block.
            let _ = slots.publish(block.index(), block.word());
        }
        point("queue: pending, nobody notified");
        // Pairs with the fence in `pass`.
        fence_behind_change();
        if self.has_passed(position) {
            self.add_late();
        }
        Ok(Self::id(index, pending))
    }

    /// Returns an attachment that a described task names and that is not attached.
    fn find_detached(&self, inputs: &[NewInput<'_>]) -> Option<u32> {
        let mut named = inputs.iter().filter_map(NewInput::part).map(|part| part.attachment).peekable();
        named.peek()?;
        // Pairs with the fence in `begin_detach`: either the broker sees the task, or we see the attachment end.
        fence(Ordering::SeqCst);
        named.find(|attachment| !self.is_attached(*attachment))
    }

    fn has_passed(&self, position: u64) -> bool {
        is_before(position, self.control().head.load(Ordering::Acquire))
    }

    /// Moves `tail` past a position, unless it is past it already.
    fn move_tail(&self, position: u64) {
        let tail = &self.control().tail;
        let next = position.wrapping_add(1);
        for _ in 0..MOST_ATTEMPTS {
            let seen = tail.load(Ordering::Acquire);
            if !is_before(seen, next) || tail.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    /// Counts a task that has become pending although `head` may have passed its position.
    pub(super) fn add_late(&self) {
        // Pairs with the load in `late_candidate`: a worker that sees the count sees the task.
        self.control().late.fetch_add(1, Ordering::AcqRel);
    }

    /// Moves `head` to the first position that is pending, or to `tail`; returns it.
    pub(super) fn pass_ended(&self) -> u64 {
        let mut head = self.control().head.load(Ordering::Acquire);
        for _ in 0..2 * self.tasks.len() {
            let tail = self.control().tail.load(Ordering::Acquire);
            if !is_before(head, tail) || self.tasks[self.slot_of(head)].load().state() == TaskSlotState::Pending {
                break;
            }
            head = self.pass(head);
        }
        head
    }

    /// Moves `head` past a position that was seen not to be pending. Returns the new `head`.
    pub(super) fn pass(&self, position: u64) -> u64 {
        let next = position.wrapping_add(1);
        let head = &self.control().head;
        if let Err(now) = head.compare_exchange(position, next, Ordering::AcqRel, Ordering::Acquire) {
            return now;
        }
        point("queue: head moved, slot not checked again");
        // Pairs with the fence in `submit`.
        fence_behind_change();
        if self.tasks[self.slot_of(position)].load().state() == TaskSlotState::Pending {
            // Its submitter may have notified a worker that did not find it.
            self.add_late();
            self.notify_workers(1);
        }
        next
    }
}

/// Returns whether one position comes before another; they wrap around.
pub(super) fn is_before(position: u64, other: u64) -> bool {
    other.wrapping_sub(position) as i64 > 0
}

/// Attempts to change a word that others change. Each failure is another member's success.
const MOST_ATTEMPTS: u64 = 64;
