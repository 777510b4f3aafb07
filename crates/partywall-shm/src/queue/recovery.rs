//! Recovery: the broker takes back what members that are gone had in a queue.

use std::{cell::Cell, collections::BTreeSet};

use super::{
    BlockId, Claimed, Pools, Queue, QueueCondition, Row, TaskState, Views,
    body::{Reason, RecordWord},
    finish::task_state,
    word::{TaskSlotState, TaskWord},
};
use crate::{
    crash::point,
    members::{NOBODY, now},
    slots::{SlotState, SlotWord, Slots},
    sync::{Ordering, fence},
    topic::TimelineCell,
};

impl Queue {
    /// Takes back the attempts of the `gone` rows, for a reason, and ends the tasks that end with these rows as their
    /// submitters. `reached` returns the value that an ended incarnation of a timeline has really reached: an enqueued
    /// task whose value was reached has its result, and a task whose inputs will never be complete is a dead letter.
    ///
    /// The rows keep their blocks, and their attempts are open. The call ends for any bytes, and may be repeated.
    /// Returns how many attempts and tasks it has ended.
    pub fn detach(
        &self,
        pools: Pools<'_>,
        gone: impl Fn(Row) -> bool,
        reason: Reason,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> u32 {
        let mut ended = 0;
        for index in 0..self.tasks.len() {
            // A member changes a word that we change as often as others let it.
            for _ in 0..MOST_ATTEMPTS {
                let seen = self.tasks[index].load();
                match self.detach_task(pools, index, seen, &gone, reason, &reached) {
                    Detached::Nothing => break,
                    Detached::Ended => ended += 1,
                    Detached::Changed => {}
                }
            }
        }
        point("queue: detached, nobody notified");
        self.notify_all();
        ended
    }

    /// Takes back everything of the `dead` rows: attempts, slots, blocks, and their positions in the queues for a block.
    /// Returns how many blocks they held. Call this instead of [`Slots::recover`], once the rows' processes are proved
    /// dead.
    ///
    /// Ends whatever the bytes are, and may be repeated.
    pub fn recover(&self, pools: Pools<'_>, dead: impl Fn(Row) -> bool) -> u32 {
        // Otherwise the tasks that they have would never end.
        self.detach(pools, &dead, Reason::Died, |_| None);
        for (index, slot) in self.tasks.iter().enumerate() {
            let seen = slot.load();
            let is_lost = seen.row() == NOBODY || dead(seen.row());
            match seen.state() {
                // Stale only if a process breaks the rules.
                TaskSlotState::Invalid => _ = slot.change(seen, seen.with(TaskSlotState::Draining, 0)),
                TaskSlotState::Writing if is_lost => _ = slot.change(seen, seen.with(TaskSlotState::Free, 0)),
                // The output of a result that was not taken over may still be held by its worker, which is about to
                // give it up.
                TaskSlotState::Ending if is_lost => {
                    let record = self.bodies[index].record(seen.attempts());
                    let found = record.load();
                    // A dead reader may have taken the block over, and not named it. The worker still uses it, so it
                    // has no other owner.
                    if self.is_viewed(index, seen)
                        && let Some(output) = record.output()
                        && let Some(now) = pools.outputs.seen(output.index)
                    {
                        record.name(BlockId { generation: now.ticket(), ..output });
                    }
                    let has_result = found.is_of_attempt(seen) && found.reason().is_none();
                    self.end(pools, index, seen, record.output().filter(|_| has_result));
                }
                _ => {}
            }
            for record in self.bodies[index].records() {
                let found = record.load();
                if found.is_open() && dead(found.row()) {
                    // As above.
                    let _ = record.drain(found);
                }
            }
            self.settle(pools, index, slot.load());
        }
        point("queue: slots of the dead free, blocks not taken");
        let taken = Cell::new(0);
        // Whether a task has their blocks does not matter: they become the queue's, and those that no task has are
        // freed.
        let publish = |_, seen: SlotWord| {
            taken.set(taken.get() + u32::from(seen.state() != SlotState::Held(NOBODY)));
            true
        };
        let is_lost = |row| row == NOBODY || dead(row);
        let freed =
            pools.inputs.recover_or_publish(is_lost, publish) + pools.outputs.recover_or_publish(is_lost, publish);
        point("queue: blocks of the dead taken, not free");
        self.free_unused(pools.inputs, Self::each_input);
        self.free_unused(pools.outputs, Self::each_output);
        // The dead may have made tasks pending that they did not count.
        self.tend_at(pools, now());
        self.notify_all();
        freed + taken.get()
    }

    /// Wakes all threads that wait. The dead may have been about to wake some of them.
    fn notify_all(&self) {
        for event in [QueueCondition::Work, QueueCondition::Space, QueueCondition::Result] {
            self.eventcount(event).notify_unmarked();
        }
    }

    fn detach_task(
        &self,
        pools: Pools<'_>,
        index: usize,
        seen: TaskWord,
        gone: impl Fn(Row) -> bool,
        reason: Reason,
        reached: impl Fn(TimelineCell) -> Option<u64>,
    ) -> Detached {
        let slot = &self.tasks[index];
        let body = &self.bodies[index];
        let state = task_state(seen);
        if state == TaskState::Gone {
            return Detached::Nothing;
        }
        let came = |point: super::StreamPoint| reached(point.cell).is_some_and(|value| value >= point.value);
        let done = |is_done| if is_done { Detached::Ended } else { Detached::Changed };
        // The body that is read belongs to the task if a change from `seen` succeeds.
        if seen.is_attempted() && gone(seen.row()) {
            let record = body.record(seen.attempts());
            if seen.state() == TaskSlotState::Enqueued && record.point().is_some_and(came) {
                return done(
                    self.publish_result(pools, &Claimed { index, word: seen }, record.output(), Views::None).is_ok(),
                );
            }
            return done(self.take_back(pools, index, seen, reason).is_ok());
        }
        if !gone(body.submitter()) {
            return Detached::Nothing;
        }
        let head = body.head();
        let ready = body.ready();
        if !self.is_still(Self::id(index, seen)) {
            return Detached::Changed;
        }
        let without_inputs = ready.is_some_and(|ready| !came(ready));
        if ready.is_some() {
            // Later it is unknown how far the stream came, and the row may be another member's.
            body.decide_inputs(head, !without_inputs);
        }
        match state {
            TaskState::Pending | TaskState::Done | TaskState::Dead if body.ends_with_submitter() => {
                done(self.dispose(pools, NOBODY, Self::id(index, seen), |_| true).is_ok())
            }
            TaskState::Pending if without_inputs => {
                // The last attempt, if there was one, may be open, and its record says why it has no result.
                if seen.attempts() == 0 {
                    self.record(index, seen, RecordWord::drained(Some(Reason::Inputs), seen));
                }
                done(slot.change(seen, seen.with(TaskSlotState::Dead, 0)).is_ok())
            }
            TaskState::Claimed { .. } | TaskState::Enqueued { .. }
                if body.ends_with_submitter() && !seen.is_unwanted() =>
            {
                done(slot.change(seen, seen.unwanted()).is_ok())
            }
            TaskState::Claimed { .. } | TaskState::Enqueued { .. } if without_inputs => {
                done(self.take_back(pools, index, seen, Reason::Inputs).is_ok())
            }
            _ => Detached::Nothing,
        }
    }

    /// Frees the blocks that are the queue's and that no task has.
    ///
    /// **Why this is right.** While a block is the queue's, a task has it, unless a process died in between. The words
    /// of the blocks are read first; a block that no task has afterwards, and whose word has not changed, is lost.
    fn free_unused(&self, slots: &Slots, each: impl Fn(&Self, usize, TaskWord, &mut dyn FnMut(BlockId))) {
        let all = (0..slots.count()).filter_map(|block| Some((block, slots.seen(block)?)));
        let published: Vec<_> = all.filter(|(_, seen)| seen.state() == SlotState::Held(NOBODY)).collect();
        if published.is_empty() {
            return;
        }
        fence(Ordering::SeqCst);
        let mut used = BTreeSet::new();
        for (index, slot) in self.tasks.iter().enumerate() {
            let mut insert = |block| {
                used.insert(block);
            };
            each(self, index, slot.load(), &mut insert);
        }
        let is_unused =
            |(index, seen): &(u32, SlotWord)| !used.contains(&BlockId { index: *index, generation: seen.ticket() });
        slots.free_all(published.into_iter().filter(is_unused));
    }

    fn each_input(&self, index: usize, seen: TaskWord, found: &mut dyn FnMut(BlockId)) {
        if !matches!(seen.state(), TaskSlotState::Free | TaskSlotState::Writing) {
            self.bodies[index].blocks().for_each(found);
        }
    }

    fn each_output(&self, index: usize, seen: TaskWord, found: &mut dyn FnMut(BlockId)) {
        let is_kept = seen.state() == TaskSlotState::Draining && self.is_viewed(index, seen);
        if (is_kept || matches!(seen.state(), TaskSlotState::Done | TaskSlotState::Ending))
            && let Some(output) = self.bodies[index].record(seen.attempts()).output()
        {
            found(output);
        }
    }
}

/// What was done about a task.
enum Detached {
    Nothing,
    /// Its attempt, or the task, has ended, or no process wants its result.
    Ended,
    /// It has changed meanwhile.
    Changed,
}

const MOST_ATTEMPTS: usize = 8;
