//! Claiming: how a worker gets a task, and how a task is taken back from a worker.
//!
//! 1. The worker searches for the oldest pending task: in all slots if `late` is ahead of `late_claimed`, otherwise
//!    from `head` on.
//! 2. It makes the slot *claimed* by one compare-and-swap, which also counts the attempt. The word then contains what
//!    identifies the claim: generation, attempt and row.
//! 3. It writes the lease. A lease names its attempt, so the lease of an earlier attempt has no effect. If the worker
//!    is stopped before this step, the member that checks for ended leases writes the lease on its behalf.
//!
//! **Taking back.** Once a worker is gone or its lease has ended, another member records the attempt as open. Then it
//! makes the slot *pending* or *dead*, by one compare-and-swap from the word of that attempt. Every change by the old
//! worker starts from the same word, so all its later changes fail: the worker is *fenced*. If the worker changed the
//! word first, taking back fails, and the worker drains the record.
//!
//! If the worker is killed or stopped before step 2, nothing has happened. After step 2 the task waits until its lease
//! ends or the worker is proved dead. If the member that takes a task back is killed or stopped between its two steps,
//! the attempt continues with an open record, and the end of that attempt drains the record.

use std::time::Duration;

use super::{
    Pools, Queue, Row, TEND_EVERY, TaskId,
    body::{LEASE_GENERATION, Reason, RecordWord, UNTIL},
    submit::is_before,
    word::{TaskSlotState, TaskWord},
};
use crate::{
    MAX_SLEEP,
    crash::point,
    members::now,
    sync::{self, Ordering, Stale, fence},
};

/// A task that was seen pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    index: usize,
    word: TaskWord,
    /// Whether an attempt needs a block for an output.
    pub needs_output: bool,
}

/// An attempt of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    pub(super) index: usize,
    /// The word of the slot when it was claimed.
    pub(super) word: TaskWord,
}

/// A worker has lost its claim: the task goes to another worker, or has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fenced;

impl Claimed {
    /// Returns the task.
    pub fn id(&self) -> TaskId {
        Queue::id(self.index, self.word)
    }

    /// Returns the number of the attempt, from 1.
    pub fn attempt(&self) -> u8 {
        self.word.attempts()
    }
}

impl Queue {
    /// Returns the task that is to be claimed next, if there is one.
    pub fn next(&self) -> Option<Candidate> {
        self.late_candidate().or_else(|| self.first_candidate())
    }

    /// Returns the oldest task that needs no output block, for a worker that has found none free. Considers the oldest
    /// 1,024 pending tasks.
    pub fn next_without_output(&self) -> Option<Candidate> {
        let tail = self.control().tail.load(Ordering::Acquire);
        // The positions before `tail` are in these slots, the oldest one first.
        let slots = (0..self.tasks.len() as u64).map(|ahead| self.slot_of(tail.wrapping_add(ahead)));
        let seen = slots.map(|index| (index, self.tasks[index].load()));
        let pending = seen.filter(|(_, seen)| seen.state() == TaskSlotState::Pending).take(MOST_PASSED);
        pending.filter_map(|(index, seen)| self.candidate(index, seen)).find(|candidate| !candidate.needs_output)
    }

    /// Claims a task that was seen pending. Returns `None` if another worker was faster.
    pub fn claim(&self, row: Row, candidate: &Candidate) -> Option<Claimed> {
        let Candidate { index, word, .. } = *candidate;
        let claimed = self.tasks[index].change(word, word.claimed(row)).ok()?;
        point("queue: claimed, no lease");
        if self.limits.lease != 0 {
            let lease = Lease::of(claimed, now() + self.limits.lease);
            self.bodies[index].lease.store(lease.0, Ordering::Release);
        }
        Some(Claimed { index, word: claimed })
    }

    /// Returns whether a claim still stands.
    pub fn is_claimed(&self, claimed: &Claimed) -> bool {
        let seen = self.tasks[claimed.index].load();
        seen.is_attempted() && is_attempt(seen, claimed.word)
    }

    /// Makes the lease of a claim end at `until` ([`members::now`](crate::members::now)).
    ///
    /// # Errors
    /// [`Fenced`] if the claim has been taken back.
    pub fn extend(&self, claimed: &Claimed, until: u64) -> Result<(), Fenced> {
        if self.is_claimed(claimed) {
            // If a later attempt has begun since, it loses its lease to this one, and gets another one from the next
            // check.
            self.bodies[claimed.index].lease.store(Lease::of(claimed.word, until).0, Ordering::Release);
            if self.is_claimed(claimed) {
                return Ok(());
            }
        }
        Err(Fenced)
    }

    /// Searches for what no hint names: leases that have ended, tasks that are pending and were not counted, and slots
    /// whose tasks are over. Members that wait call this repeatedly, and one of them searches every [`TEND_EVERY`].
    /// Returns whether the caller has searched.
    pub fn tend(&self, pools: Pools<'_>) -> bool {
        let now = now();
        let tended = &self.control().tended;
        let seen = tended.load(Ordering::Relaxed);
        // No member that follows the rules writes a time in the future.
        let is_recent = seen <= now && now - seen < TEND_EVERY.as_millis() as u64;
        if is_recent || tended.compare_exchange(seen, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        self.tend_at(pools, now);
        true
    }

    /// Returns how long a member that waits may sleep before it calls [`tend`](Self::tend) again. In a queue whose
    /// attempts have a lease this is the rest of [`TEND_EVERY`], so that the end of a lease is acted on soon after
    /// that.
    pub fn sleep_limit(&self) -> Duration {
        self.sleep_limit_at(now())
    }

    /// As [`sleep_limit`](Self::sleep_limit), at a certain time.
    pub(super) fn sleep_limit_at(&self, now: u64) -> Duration {
        if self.limits.lease == 0 {
            return MAX_SLEEP;
        }
        let seen = self.control().tended.load(Ordering::Relaxed);
        // The next call tends at once if the time is in the future.
        let passed = now.checked_sub(seen).map_or(TEND_EVERY, Duration::from_millis);
        // Otherwise members would spin while another one tends.
        TEND_EVERY.saturating_sub(passed).max(Duration::from_millis(1))
    }

    /// As [`tend`](Self::tend), at a certain time.
    pub(super) fn tend_at(&self, pools: Pools<'_>, now: u64) {
        let mut uncounted = false;
        for (index, slot) in self.tasks.iter().enumerate() {
            let seen = slot.load();
            match seen.state() {
                TaskSlotState::Claimed | TaskSlotState::Enqueued if self.lease_has_ended(index, seen, now) => {
                    // Stale if it has ended meanwhile.
                    let _ = self.take_back(pools, index, seen, Reason::Lease);
                }
                TaskSlotState::Pending => uncounted |= !self.is_in_order(index, seen),
                TaskSlotState::Draining => self.settle(pools, index, seen),
                _ => {}
            }
        }
        if uncounted {
            self.add_late();
            self.control().work.notify_behind_change();
        }
    }

    /// Returns whether an attempt has lasted too long. Gives it a lease if it has none.
    fn lease_has_ended(&self, index: usize, seen: TaskWord, now: u64) -> bool {
        if self.limits.lease == 0 {
            return false;
        }
        let lease = &self.bodies[index].lease;
        let found = Lease(lease.load(Ordering::Acquire));
        if found.is_of(seen) {
            return found.until() <= now;
        }
        // Its worker was stopped before it wrote one, or does so now. A lease of an attempt that is over means nothing.
        let _ = sync::change(lease, found.0, Lease::of(seen, now + self.limits.lease).0);
        false
    }

    /// Takes an attempt back, unless it has ended meanwhile: the task is pending again, or a dead letter, or over if no
    /// process wants its result.
    pub(super) fn take_back(
        &self,
        pools: Pools<'_>,
        index: usize,
        seen: TaskWord,
        reason: Reason,
    ) -> Result<(), Stale> {
        self.record(index, seen, RecordWord::open(Some(reason), seen));
        point("queue: attempt recorded as open, not taken back");
        self.end_attempt(pools, index, seen, reason)
    }

    /// Records how an attempt ends. A record that this attempt has already stays, except that an open one may be
    /// drained.
    pub(super) fn record(&self, index: usize, seen: TaskWord, ended: RecordWord) {
        let record = self.bodies[index].record(seen.attempts());
        for _ in 0..MOST_ATTEMPTS {
            let found = record.load();
            let recorded = found.is_of_attempt(seen);
            if !recorded && !is_attempt(self.tasks[index].load(), seen) {
                // We were slow. The record is, or will be, a later attempt's.
                return;
            }
            let outcome = match recorded {
                true if ended.is_open() || !found.is_open() => Ok(()),
                true => record.drain(found),
                false => record.change(found, ended),
            };
            if outcome.is_ok() {
                return;
            }
        }
    }

    /// Ends an attempt that has been recorded, without a result, unless it had ended.
    pub(super) fn end_attempt(
        &self,
        pools: Pools<'_>,
        index: usize,
        seen: TaskWord,
        reason: Reason,
    ) -> Result<(), Stale> {
        let is_last = seen.attempts() >= self.bodies[index].last_attempt() || reason == Reason::Inputs;
        let state = match (seen.is_unwanted(), is_last) {
            (true, _) => TaskSlotState::Draining,
            (false, true) => TaskSlotState::Dead,
            (false, false) => TaskSlotState::Pending,
        };
        let ended = self.tasks[index].change(seen, seen.with(state, 0))?;
        point("queue: attempt taken back, nobody notified");
        self.control().returned.fetch_add(1, Ordering::Relaxed);
        match state {
            TaskSlotState::Pending => {
                self.add_late();
                self.notify_workers(1);
            }
            TaskSlotState::Dead => self.control().results.notify_behind_change(),
            _ => self.settle(pools, index, ended),
        }
        Ok(())
    }

    /// Returns a pending task that `head` has passed, if there is one.
    fn late_candidate(&self) -> Option<Candidate> {
        let control = self.control();
        // Pairs with `add_late`.
        let late = control.late.load(Ordering::Acquire);
        let claimed = control.late_claimed.load(Ordering::Relaxed);
        if late == claimed {
            return None;
        }
        let first = self.slot_of(control.tail.load(Ordering::Acquire));
        let order = (first..self.tasks.len()).chain(0..first);
        for index in order {
            let seen = self.tasks[index].load();
            if seen.state() == TaskSlotState::Pending
                && !self.is_in_order(index, seen)
                && let Some(candidate) = self.candidate(index, seen)
            {
                return Some(candidate);
            }
        }
        point("queue: no late task found, count not moved");
        // If it has been moved, another worker has searched since.
        let _ = control.late_claimed.compare_exchange(claimed, late, Ordering::AcqRel, Ordering::Relaxed);
        None
    }

    /// Returns whether a pending task will be found at `head`: it has not been attempted, and `head` has not passed it.
    fn is_in_order(&self, index: usize, seen: TaskWord) -> bool {
        let head = self.control().head.load(Ordering::Acquire);
        let tail = self.control().tail.load(Ordering::Acquire);
        let slots = self.tasks.len() as u64;
        let ahead = (index as u64 + slots - self.slot_of(head) as u64) % slots;
        seen.attempts() == 0 && ahead < tail.wrapping_sub(head)
    }

    /// Returns the pending task at `head`, if there is one.
    fn first_candidate(&self) -> Option<Candidate> {
        let control = self.control();
        let mut head = control.head.load(Ordering::Acquire);
        for _ in 0..2 * self.tasks.len() {
            if !is_before(head, control.tail.load(Ordering::Acquire)) {
                return None;
            }
            let index = self.slot_of(head);
            let seen = self.tasks[index].load();
            if seen.state() == TaskSlotState::Pending
                && let Some(candidate) = self.candidate(index, seen)
            {
                let now = control.head.load(Ordering::Acquire);
                if now == head {
                    return Some(candidate);
                }
                // Others have come past it, and the slot may have a later task.
                head = now;
                continue;
            }
            head = self.pass(head);
        }
        None
    }

    /// Returns a pending task that may be claimed. `None` if the next attempt needs a record in which an earlier
    /// attempt is still open.
    fn candidate(&self, index: usize, word: TaskWord) -> Option<Candidate> {
        let next = word.attempts().saturating_add(1);
        if self.lacks_record(index, word, next) {
            // Pairs with the fence in `act_on_drain`: either we see the record drained, or its worker sees the task
            // pending.
            fence(Ordering::SeqCst);
            if self.lacks_record(index, word, next) {
                return None;
            }
        }
        Some(Candidate { index, word, needs_output: self.bodies[index].has_output() })
    }
}

impl Queue {
    /// Returns whether a task that is pending cannot be claimed yet, because an attempt that was taken back may still
    /// use the record that its next attempt needs.
    pub fn is_held_back(&self, id: TaskId) -> bool {
        self.task(id).is_some_and(|(_, _, seen)| self.holds_back(id.index as usize, seen))
    }

    /// Counts the tasks that are [held back](Self::is_held_back).
    pub fn held_back(&self) -> u32 {
        let slots = self.tasks.iter().enumerate();
        slots.filter(|(index, slot)| self.holds_back(*index, slot.load())).count() as u32
    }

    fn holds_back(&self, index: usize, seen: TaskWord) -> bool {
        seen.state() == TaskSlotState::Pending && self.lacks_record(index, seen, seen.attempts().saturating_add(1))
    }

    /// Returns whether an earlier attempt of the task is open in the record that an attempt needs.
    pub(super) fn lacks_record(&self, index: usize, seen: TaskWord, attempt: u8) -> bool {
        let found = self.bodies[index].record(attempt).load();
        found.is_of(seen.generation()) && found.is_open()
    }
}

/// Returns whether two words are of one attempt.
pub(super) fn is_attempt(seen: TaskWord, ours: TaskWord) -> bool {
    (seen.generation(), seen.attempts(), seen.row()) == (ours.generation(), ours.attempts(), ours.row())
}

/// A lease as it was seen: see `body`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lease(u64);

impl Lease {
    fn of(word: TaskWord, until: u64) -> Self {
        Self(Self::tag(word) | until.min(MAX_UNTIL) << UNTIL)
    }

    fn tag(word: TaskWord) -> u64 {
        u64::from(word.attempts()) | (word.generation() & 0xffff) << LEASE_GENERATION
    }

    fn is_of(self, word: TaskWord) -> bool {
        self.0 & !(u64::MAX << UNTIL) == Self::tag(word)
    }

    fn until(self) -> u64 {
        self.0 >> UNTIL
    }
}

/// The largest end of a lease: 34 years after the machine's start.
const MAX_UNTIL: u64 = u64::MAX >> UNTIL;

/// How many tasks that need an output block a task that needs none may pass while no block is free. Workers consider
/// them at each poll.
const MOST_PASSED: usize = 1024;

/// Attempts to change a lease. Each failure is another member's success.
const MOST_ATTEMPTS: usize = 8;
