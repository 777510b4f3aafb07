//! Finishing: how a task gets its one result, how the result is taken, and how the slot becomes free.
//!
//! 1. The worker names its output block in the record of its attempt, and records the attempt as drained if no stream
//!    uses its blocks any more. Then it makes the slot *done*, by one compare-and-swap from the word of its own
//!    attempt. This one step publishes the attempt and its block, and fails if the attempt has been taken back. Finally
//!    the worker gives up its own hold on the block. If its stream still runs, the worker makes the slot *enqueued*
//!    first, and *done* once the stream has finished.
//! 2. A reader makes the slot *ending*, which succeeds for only one reader. It takes over the block, and makes the slot
//!    *draining*. Cancelling a pending task and purging a result or a dead letter take the same steps.
//! 3. Once no record of the task is open, the inputs are freed, and then the slot if it is *draining*
//!    ([`Queue::settle`]). The worker does that, or the reader, or the worker that drains last.
//!
//! **Views.** When a worker ends its attempt, its program may still use the blocks, for example through an array. The
//! worker then records the attempt as open, even if it completes the task. While that record is open, the task keeps
//! its inputs, and a delivered output is not freed: a reader that is done with the output gives the block back to the
//! queue ([`Queue::release_output`]), and the worker frees it once its program has stopped using it
//! ([`Queue::leave_output`]). The worker knows the block, because the reader wrote its identity under the reader's hold
//! into the record while the slot was *ending*.
//!
//! **Reading early.** A reader may use the output of an *enqueued* task before it is done, in the order of a stream
//! ([`Queue::output`]). The reader has no hold on the block then. What it has read is the result if step 2 succeeds
//! from the word of that attempt and with that block ([`Queue::take_output`]): until the slot was *done* the block was
//! the worker's, and since then it is the queue's.
//!
//! If the worker is killed or stopped before the slot is *done*, its attempt is taken back. After that the result
//! stands, and the broker gives the block to the queue if the worker cannot. If a reader is killed after step 2, the
//! result is lost with it, as if the reader had died a moment later, and the broker frees the block.

use super::{
    BlockId, Claimed, Contents, Fenced, NewOutput, Pools, Queue, Row, StreamPoint, TaskDescription, TaskId,
    body::{RECORDS, Reason, RecordWord},
    claim::is_attempt,
    word::{MAX_ATTEMPTS, TaskSlotState, TaskWord},
};
use crate::{
    crash::point,
    members::NOBODY,
    slots::{HeldSlot, SlotState, SlotWord, Slots},
    sync::{Ordering, Stale, fence},
};

/// The state of a task, for its users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    /// It waits for a worker.
    Pending,
    /// A worker has it.
    Claimed {
        /// The worker's row.
        row: Row,
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// A stream of the worker completes it.
    Enqueued {
        /// The worker's row.
        row: Row,
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// It has a result that no process has read.
    Done,
    /// It was attempted as often as it may be, and has no result.
    Dead,
    /// The result was taken, or the task was cancelled or purged.
    Gone,
}

/// The output of an attempt that has succeeded, or that succeeds once a stream of its worker has finished it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// The task.
    pub task: TaskId,
    /// The number of the attempt.
    pub attempt: u8,
    /// The block; `None` if the task has no output.
    pub block: Option<BlockId>,
    /// What the output contains.
    pub contents: Option<Contents>,
    /// The value that completes it, and the row of the member that signals it; `None` if it is complete.
    pub pending: Option<(Row, StreamPoint)>,
}

/// A result that was taken.
#[derive(Debug, PartialEq, Eq)]
pub struct TakenResult {
    /// The output block, which is held; `None` if the task has no output.
    pub output: Option<HeldSlot>,
    /// What the output contains.
    pub contents: Option<Contents>,
    /// The attempt that succeeded.
    pub attempt: u8,
    /// Whether the worker may still use the output: then [`Queue::release_output`] has to give it back.
    pub viewed: bool,
}

/// The blocks of an attempt that has a result which a program may still use, for example through an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Views {
    /// None.
    None,
    /// The inputs.
    Inputs,
    /// The output, and perhaps the inputs.
    Output,
}

/// Why a task was not retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotRetried {
    /// It is in this state, and no dead letter.
    State(TaskState),
    /// Its submitter ended before its inputs were complete.
    InputsLost,
    /// It was attempted [`MAX_ATTEMPTS`] times.
    Exhausted,
}

impl Queue {
    /// Completes a task, whose output is in `output`. No stream may use its blocks any more. The output then belongs to
    /// the queue. If this process has views of the blocks, it has to call [`drain`](Self::drain) later.
    ///
    /// # Errors
    /// [`Fenced`] if the attempt has been taken back. The output is still held, and the attempt drained or not.
    pub fn complete(
        &self,
        pools: Pools<'_>,
        claimed: &Claimed,
        output: Option<NewOutput<'_>>,
        views: Views,
    ) -> Result<(), Fenced> {
        self.name_output(claimed, output, None);
        self.publish_result(pools, claimed, output.map(|output| output.block()), views)
    }

    /// Announces that a task will be complete once the worker's timeline reaches a value. The worker has to call
    /// [`finish`](Self::finish) then.
    ///
    /// # Errors
    /// [`Fenced`] if the attempt has been taken back. Its stream may still use the blocks.
    pub fn enqueue(&self, claimed: &Claimed, output: Option<NewOutput<'_>>, at: StreamPoint) -> Result<(), Fenced> {
        self.name_output(claimed, output, Some(at));
        point("queue: output named, not enqueued");
        let enqueued = |seen: TaskWord| {
            (seen.state() == TaskSlotState::Claimed).then(|| seen.with(TaskSlotState::Enqueued, seen.row()))
        };
        self.change_attempt(claimed, enqueued).ok_or(Fenced)?;
        point("queue: enqueued, nobody notified");
        self.control().results.notify_behind_change();
        Ok(())
    }

    /// Completes an enqueued task, now that its stream has finished.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn finish(
        &self,
        pools: Pools<'_>,
        claimed: &Claimed,
        output: Option<&HeldSlot>,
        views: Views,
    ) -> Result<(), Fenced> {
        self.publish_result(pools, claimed, output.map(block), views)
    }

    /// Ends an attempt without a result. `drained` says that no stream and no view of this process uses its blocks any
    /// more; otherwise the worker has to call [`drain`](Self::drain) later.
    ///
    /// # Errors
    /// [`Fenced`] if the attempt has been taken back; it is recorded as drained, or not, all the same.
    pub fn fail(
        &self,
        pools: Pools<'_>,
        claimed: &Claimed,
        reason: Reason,
        text: &str,
        drained: bool,
    ) -> Result<(), Fenced> {
        if !self.is_claimed(claimed) {
            // The text is for the reasons of attempts that stood until they failed.
            if drained {
                self.drain_record(pools, claimed.index, claimed.word);
            }
            return Err(Fenced);
        }
        if reason == Reason::Failed {
            self.bodies[claimed.index].set_text(text);
        }
        let end = if drained {
            RecordWord::drained(Some(reason), claimed.word)
        } else {
            RecordWord::open(Some(reason), claimed.word)
        };
        self.record(claimed.index, claimed.word, end);
        point("queue: failure recorded, task still claimed");
        for _ in 0..MOST_ATTEMPTS {
            let seen = self.tasks[claimed.index].load();
            if !seen.is_attempted() || !is_attempt(seen, claimed.word) {
                break;
            }
            if self.end_attempt(pools, claimed.index, seen, reason).is_ok() {
                return Ok(());
            }
        }
        self.act_on_drain(pools, claimed.index, claimed.word);
        Err(Fenced)
    }

    /// Records that an attempt of ours that has a result no longer uses its output. The worker still has to call
    /// [`drain`](Self::drain).
    pub fn leave_output(&self, pools: Pools<'_>, claimed: &Claimed) {
        let record = self.bodies[claimed.index].record(claimed.attempt());
        let found = record.load();
        if found.is_of_attempt(claimed.word) && found.uses_output() {
            // Stale if the broker has taken this process for dead.
            let _ = record.leave_output(found);
        }
        point("queue: output left, slot not checked");
        self.act_on_drain(pools, claimed.index, claimed.word);
    }

    /// Records that an attempt of ours that is over no longer uses its blocks.
    pub fn drain(&self, pools: Pools<'_>, claimed: &Claimed) {
        self.drain_record(pools, claimed.index, claimed.word);
    }

    pub(super) fn drain_record(&self, pools: Pools<'_>, index: usize, attempt: TaskWord) {
        let record = self.bodies[index].record(attempt.attempts());
        let found = record.load();
        if found.is_of_attempt(attempt) && found.is_open() {
            // Stale if the broker has drained it.
            let _ = record.drain(found);
        }
        point("queue: attempt drained, slot not checked");
        self.act_on_drain(pools, index, attempt);
    }

    /// Does what had to wait until the record was drained.
    fn act_on_drain(&self, pools: Pools<'_>, index: usize, attempt: TaskWord) {
        // Pairs with the fences in `candidate` and `settle`.
        fence(Ordering::SeqCst);
        let seen = self.tasks[index].load();
        if seen.generation() != attempt.generation() {
            return;
        }
        if seen.state() == TaskSlotState::Pending {
            // A worker may have passed it over because this record was open.
            self.add_late();
            self.notify_workers(1);
        }
        self.settle(pools, index, seen);
    }

    /// Returns the state of a task.
    pub fn state(&self, id: TaskId) -> TaskState {
        self.task(id).map_or(TaskState::Gone, |(_, _, seen)| task_state(seen))
    }

    /// Returns the output of a task that is done or enqueued. The block stays the worker's or the queue's. What the
    /// caller reads there is the result only if [`take_output`](Self::take_output) succeeds afterwards.
    ///
    /// # Errors
    /// The state of the task if it is neither.
    pub fn output(&self, id: TaskId) -> Result<Output, TaskState> {
        for _ in 0..MOST_ATTEMPTS {
            let Some((slot, body, seen)) = self.task(id) else { break };
            let record = body.record(seen.attempts());
            let pending = match (seen.state(), record.point()) {
                (TaskSlotState::Done, _) => None,
                (TaskSlotState::Enqueued, Some(point)) => Some((seen.row(), point)),
                _ => return Err(task_state(seen)),
            };
            let attempt = seen.attempts();
            let block = record.output();
            let contents = record.contents();
            // Pairs with the fence in `set_output`: what was read of a later attempt shows that attempt here.
            fence(Ordering::Acquire);
            if slot.load() == seen {
                return Ok(Output { task: id, attempt, block, contents, pending });
            }
        }
        Err(self.state(id))
    }

    /// Takes the result of a task.
    ///
    /// # Errors
    /// The state of the task if it has no result that is unread.
    pub fn take(&self, pools: Pools<'_>, row: Row, id: TaskId) -> Result<TakenResult, TaskState> {
        self.take_if(pools, row, id, |_| true)
    }

    /// Takes the result of a task if it is this output. If that succeeds, nothing else was written to the block since
    /// the stream of its worker finished, because it was never free in between.
    ///
    /// # Errors
    /// As [`take`](Self::take); [`TaskState::Done`] if the result is another attempt's.
    pub fn take_output(&self, pools: Pools<'_>, row: Row, output: &Output) -> Result<TakenResult, TaskState> {
        self.take_if(pools, row, output.task, |attempt| attempt == output.attempt)
    }

    fn take_if(
        &self,
        pools: Pools<'_>,
        row: Row,
        id: TaskId,
        is_it: impl Fn(u8) -> bool,
    ) -> Result<TakenResult, TaskState> {
        for _ in 0..MOST_ATTEMPTS {
            let Some((slot, body, seen)) = self.task(id) else { break };
            if seen.state() != TaskSlotState::Done || !is_it(seen.attempts()) {
                return Err(task_state(seen));
            }
            let found = body.record(seen.attempts()).output();
            let contents = body.record(seen.attempts()).contents();
            // The record that was read belongs to the result if this change succeeds.
            let Ok(ending) = slot.change(seen, seen.with(TaskSlotState::Ending, row)) else { continue };
            point("queue: result taken, block not");
            let output = found.and_then(|block| adopt(pools.outputs, row, block));
            let viewed = self.is_viewed(id.index as usize, ending);
            if let Some(held) = output.as_ref().filter(|_| viewed) {
                point("queue: viewed output taken, not named");
                body.record(seen.attempts()).name(block(held));
            }
            let taken = TakenResult { output, contents, attempt: seen.attempts(), viewed };
            self.end(pools, id.index as usize, ending, None);
            return Ok(taken);
        }
        Err(TaskState::Gone)
    }

    /// Gives back the output of a result that was taken while the worker might still use it. The block is freed at once
    /// if the worker no longer uses it, otherwise when the worker has drained.
    ///
    /// # Errors
    /// As [`Slots::free`].
    pub fn release_output(&self, pools: Pools<'_>, id: TaskId, attempt: u8, held: &HeldSlot) -> Result<(), Stale> {
        let published = pools.outputs.publish(held.index(), held.word())?;
        point("queue: viewed output given back, worker not looked at");
        // Pairs with the fence in `settle`: either we see the worker drained, or it sees the block given back.
        fence(Ordering::SeqCst);
        let record = self.bodies[id.index as usize].record(attempt).load();
        if !(record.is_of(id.generation) && record.attempt() == attempt && record.uses_output()) {
            // Stale if the worker has drained, and freed it.
            let _ = pools.outputs.free_seen(held.index(), published);
        }
        Ok(())
    }

    /// Ends a task that is in one of these states, without its result: cancels or purges it.
    ///
    /// # Errors
    /// The state that it is in.
    pub fn dispose(
        &self,
        pools: Pools<'_>,
        row: Row,
        id: TaskId,
        of: impl Fn(TaskState) -> bool,
    ) -> Result<(), TaskState> {
        for _ in 0..MOST_ATTEMPTS {
            let Some((slot, body, seen)) = self.task(id) else { break };
            let state = task_state(seen);
            let has_no_owner =
                matches!(seen.state(), TaskSlotState::Pending | TaskSlotState::Done | TaskSlotState::Dead);
            if !has_no_owner || !of(state) {
                return Err(state);
            }
            if let Ok(ending) = slot.change(seen, seen.with(TaskSlotState::Ending, row)) {
                // The output is the queue's only if the task is done.
                let output = (state == TaskState::Done).then(|| body.record(seen.attempts()).output()).flatten();
                self.end(pools, id.index as usize, ending, output);
                return Ok(());
            }
        }
        Err(TaskState::Gone)
    }

    /// Makes a dead letter pending again. It may be attempted as often as before, under further numbers.
    ///
    /// 1. The caller writes which attempt is the last one before the retry. Until step 2 that changes nothing, because
    ///    no attempt of a dead letter is under way. Two retries at once may see different records open; then the task
    ///    may have an attempt more or less, but at least one.
    /// 2. It makes the slot *pending*.
    ///
    /// # Errors
    /// [`NotRetried`]
    pub fn retry(&self, id: TaskId) -> Result<(), NotRetried> {
        for _ in 0..MOST_ATTEMPTS {
            let Some((slot, body, seen)) = self.task(id) else { break };
            let origin = body.origin();
            let are_lost = body.inputs_are_lost();
            if !self.is_still(id) {
                break;
            }
            if seen.state() != TaskSlotState::Dead {
                return Err(NotRetried::State(task_state(seen)));
            }
            if are_lost {
                return Err(NotRetried::InputsLost);
            }
            let before = self.attempt_before(id.index as usize, seen).ok_or(NotRetried::Exhausted)?;
            if body.allow_more(origin, before).is_err() {
                continue;
            }
            point("queue: more attempts allowed, dead letter not pending");
            if slot.change(seen, seen.retried(before)).is_ok() {
                point("queue: dead letter pending, nobody notified");
                self.add_late();
                self.notify_workers(1);
                return Ok(());
            }
        }
        Err(NotRetried::State(self.state(id)))
    }

    /// Returns the number after which the next attempt of a dead letter comes: that of its last attempt, or a later one
    /// if the next attempt would have to wait for the record of one that is open. Returns `None` if no number is left.
    fn attempt_before(&self, index: usize, seen: TaskWord) -> Option<u8> {
        let last = seen.attempts();
        let numbers = || (last..MAX_ATTEMPTS).take(RECORDS);
        numbers().find(|before| !self.lacks_record(index, seen, before + 1)).or_else(|| numbers().next())
    }

    /// Reads what a task is. Returns `None` if it has gone.
    pub fn describe(&self, id: TaskId) -> Option<TaskDescription> {
        let (_, body, _) = self.task(id)?;
        let description = body.describe();
        self.is_still(id).then_some(description)
    }

    /// Reads why attempts of a task have had no result: the numbers of the last ones with their reasons, oldest first,
    /// and what the last worker said that failed it.
    pub fn failures(&self, id: TaskId) -> (Vec<(u8, Reason)>, Vec<u8>) {
        let Some((_, body, seen)) = self.task(id) else { return Default::default() };
        let all = body.records().iter().map(|record| record.load()).filter(|found| found.is_of(seen.generation()));
        let mut failures: Vec<_> = all.filter_map(|found| Some((found.attempt(), found.reason()?))).collect();
        failures.sort_unstable_by_key(|(attempt, _)| *attempt);
        // A slot keeps the text of an earlier task.
        let has_failed = failures.iter().any(|(_, reason)| *reason == Reason::Failed);
        (failures, if has_failed { body.text() } else { Vec::new() })
    }

    /// Names the output of an attempt in its record, unless the attempt is over: then the record may tell of a result.
    fn name_output(&self, claimed: &Claimed, output: Option<NewOutput<'_>>, at: Option<StreamPoint>) {
        if self.is_claimed(claimed) {
            self.bodies[claimed.index].record(claimed.attempt()).set_output(output, at);
        }
    }

    /// Makes the result of an attempt the task's, unless the attempt has been taken back.
    pub(super) fn publish_result(
        &self,
        pools: Pools<'_>,
        claimed: &Claimed,
        output: Option<BlockId>,
        views: Views,
    ) -> Result<(), Fenced> {
        let index = claimed.index;
        let end = match views {
            Views::None => RecordWord::drained(None, claimed.word),
            Views::Inputs => RecordWord::reading(claimed.word),
            Views::Output => RecordWord::open(None, claimed.word),
        };
        self.record(index, claimed.word, end);
        point("queue: attempt recorded, no result yet");
        let done = |seen: TaskWord| {
            let state = if seen.is_unwanted() { TaskSlotState::Ending } else { TaskSlotState::Done };
            // The worker ends a task whose result no process wants.
            seen.is_attempted().then(|| seen.with(state, if seen.is_unwanted() { claimed.word.row() } else { 0 }))
        };
        let Some(now) = self.change_attempt(claimed, done) else {
            if views == Views::None {
                self.drain_record(pools, index, claimed.word);
            }
            return Err(Fenced);
        };
        point("queue: done, block still held");
        if let Some(output) = output {
            publish(pools.outputs, output);
        }
        self.control().completed.fetch_add(1, Ordering::Relaxed);
        if now.state() == TaskSlotState::Ending {
            self.end(pools, index, now, output);
        } else {
            self.settle(pools, index, now);
        }
        point("queue: done, nobody notified");
        self.control().results.notify_behind_change();
        Ok(())
    }

    /// Changes the word of an attempt of ours. Only the mark that no process wants the result may have changed in it.
    fn change_attempt(&self, claimed: &Claimed, to: impl Fn(TaskWord) -> Option<TaskWord>) -> Option<TaskWord> {
        for _ in 0..MOST_ATTEMPTS {
            let seen = self.tasks[claimed.index].load();
            if !is_attempt(seen, claimed.word) {
                return None;
            }
            if let Ok(now) = self.tasks[claimed.index].change(seen, to(seen)?) {
                return Some(now);
            }
        }
        None
    }

    /// Ends a task that is *ending*: frees an output that is still the queue's and that its worker does not use, and
    /// the slot once it is drained.
    pub(super) fn end(&self, pools: Pools<'_>, index: usize, ending: TaskWord, output: Option<BlockId>) {
        if let Some(output) = output.filter(|_| !self.is_viewed(index, ending)) {
            release(pools.outputs, output);
        }
        point("queue: output free, slot not draining");
        if let Ok(draining) = self.tasks[index].change(ending, ending.with(TaskSlotState::Draining, 0)) {
            self.settle(pools, index, draining);
            point("queue: over, nobody notified");
            self.control().results.notify_behind_change();
        }
    }

    /// Returns whether the worker of a result, which a slot was seen with, may still use the output.
    pub(super) fn is_viewed(&self, index: usize, seen: TaskWord) -> bool {
        let record = self.bodies[index].record(seen.attempts()).load();
        record.is_of_attempt(seen) && record.uses_output()
    }

    /// Frees what a task that is done or draining no longer needs: an output that was given back, unless its worker may
    /// still use it; and, once no attempt may read the inputs any more, the inputs and a slot that is draining. May be
    /// repeated.
    pub(super) fn settle(&self, pools: Pools<'_>, index: usize, seen: TaskWord) {
        if !matches!(seen.state(), TaskSlotState::Done | TaskSlotState::Draining) {
            return;
        }
        // Pairs with the fences in `act_on_drain` and `release_output`.
        fence(Ordering::SeqCst);
        let output = self.bodies[index].record(seen.attempts()).output();
        if seen.state() == TaskSlotState::Draining
            && !self.is_viewed(index, seen)
            && self.is_still(Self::id(index, seen))
            && let Some(output) = output
        {
            release_published(pools.outputs, output);
        }
        if self.has_open_attempt(index, seen) {
            return;
        }
        let inputs: Vec<BlockId> = self.bodies[index].blocks().collect();
        if !self.is_still(Self::id(index, seen)) {
            return;
        }
        for block in inputs {
            release(pools.inputs, block);
        }
        point("queue: inputs free, slot not");
        if seen.state() == TaskSlotState::Draining
            && self.tasks[index].change(seen, seen.with(TaskSlotState::Free, 0)).is_ok()
        {
            point("queue: slot free, nobody notified");
            self.control().space.notify_behind_change();
        }
    }

    /// Returns whether what was read of a task's body is that task's: the slot has had no other since.
    pub(super) fn is_still(&self, id: TaskId) -> bool {
        // Pairs with the fence in `Body::write`: what was read of a later task shows its generation here.
        fence(Ordering::Acquire);
        self.tasks[id.index as usize].load().generation() == id.generation
    }
}

pub(super) fn task_state(seen: TaskWord) -> TaskState {
    match seen.state() {
        TaskSlotState::Pending => TaskState::Pending,
        TaskSlotState::Claimed => TaskState::Claimed { row: seen.row(), attempt: seen.attempts() },
        TaskSlotState::Enqueued => TaskState::Enqueued { row: seen.row(), attempt: seen.attempts() },
        TaskSlotState::Done => TaskState::Done,
        TaskSlotState::Dead => TaskState::Dead,
        TaskSlotState::Free
        | TaskSlotState::Writing
        | TaskSlotState::Ending
        | TaskSlotState::Draining
        | TaskSlotState::Invalid => TaskState::Gone,
    }
}

fn block(held: &HeldSlot) -> BlockId {
    BlockId { index: held.index(), generation: held.generation() }
}

/// Returns the word of a block that is held, or published, with this generation.
pub(super) fn current(slots: &Slots, block: BlockId) -> Option<SlotWord> {
    let seen = slots.seen(block.index)?;
    (matches!(seen.state(), SlotState::Held(_)) && seen.ticket() == block.generation).then_some(seen)
}

/// Gives a block to the queue, unless it is the queue's, or has been taken over or freed.
fn publish(slots: &Slots, block: BlockId) {
    if let Some(seen) = current(slots, block) {
        let _ = slots.publish(block.index, seen);
    }
}

/// Frees a block of the queue, also one that its former holder has not given up yet.
fn release(slots: &Slots, block: BlockId) {
    // The former holder changes the word once.
    for _ in 0..2 {
        match current(slots, block) {
            Some(seen) if slots.free_seen(block.index, seen).is_err() => {}
            _ => return,
        }
    }
}

/// Frees a block if no member holds it. An attempt that had no result, or an earlier task, may have named it.
fn release_published(slots: &Slots, block: BlockId) {
    if let Some(seen) = current(slots, block).filter(|seen| seen.state() == SlotState::Held(NOBODY)) {
        let _ = slots.free_seen(block.index, seen);
    }
}

/// Takes a block of the queue over, also one that its former holder has not given up yet.
fn adopt(slots: &Slots, row: Row, block: BlockId) -> Option<HeldSlot> {
    // As above.
    for _ in 0..2 {
        let seen = current(slots, block)?;
        if let Ok(held) = slots.take_over(row, block.index, seen) {
            return Some(held);
        }
    }
    None
}

/// Attempts to change a word that others change. Each failure is another member's success.
const MOST_ATTEMPTS: usize = 8;
