//! Claiming tasks, and waiting for them and for room for their output.

use std::time::{Duration, Instant};

use partywall_shm::queue::QueueCondition;

use super::{ClaimedTask, Queue, TEND_EVERY};
use crate::{
    error::{Busy, Error, Result},
    pool::Block,
    recorder::Action,
    slots,
    wait::{Wait, Waiting},
};

impl Queue {
    /// Claims the oldest task, and waits for one if there is none. Tasks that other workers gave back or lost go first.
    /// While no output block is free, tasks without an output pass those that have one.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # fn work(queue: &partywall::Queue) -> partywall::Result<()> {
    /// let mut task = queue.claim(Duration::from_secs(10))?;
    /// let (inputs, output) = task.inputs_and_output()?;
    /// let roots = output.as_mut_slice::<f32>()?;
    /// for (root, number) in roots.iter_mut().zip(inputs[0].as_slice::<f32>()?) {
    ///     *root = number.sqrt();
    /// }
    /// task.complete()?; // dropped instead, the task goes to another worker
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `claim_async` blocks none.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Busy::OutputsFull`] if there are tasks, but no output block is free:
    /// at the end of the wait, or soon if views of tasks that this process has ended
    /// ([`TaskMemory`](super::TaskMemory)) keep all of them; [`Busy::TasksKept`] if there is no task, and such views
    /// keep all slots or all input blocks; [`Unreachable::Gone`](crate::error::Unreachable::Gone) if it has to wait
    /// without a broker; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn claim<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<ClaimedTask> {
        let _span = tracing::trace_span!("claim", queue = self.name()).entered();
        let mut room = None;
        let mut found = self.try_claim_into(&mut room)?;
        let waiting = wait.into().begin();
        loop {
            match found {
                Found::Task(task) => return Ok(*task),
                Found::Nothing => {
                    if self.all_kept().is_some()
                        && let Some(left) = waiting.left(Instant::now())
                    {
                        // Another thread may be about to drop its views.
                        found = self.await_task(&mut room, &Wait::from(left.min(TEND_EVERY)).begin())?;
                        if matches!(found, Found::Nothing)
                            && waiting.left(Instant::now()).is_some()
                            && let Some(kept) = self.all_kept()
                        {
                            return Err(kept.into());
                        }
                        continue;
                    }
                    found = self.await_task(&mut room, &waiting)?;
                    if matches!(found, Found::Nothing) {
                        let what = format!("cannot claim a task of queue {:?}: {}", self.name(), self.why_none());
                        return Err(waiting.error(what));
                    }
                }
                Found::NoRoom => {
                    room = self.await_room(&waiting)?;
                    // They were kept during the whole wait, so no other thread was about to drop its views.
                    if room.is_none() && self.open.control.kept.outputs() >= self.open.outputs.shape().blocks {
                        return Err(self.outputs_full().into());
                    }
                    found = self.try_claim_into(&mut room)?;
                }
            }
        }
    }

    /// Claims the oldest task if there is one, and if an output block for it is free.
    ///
    /// # Errors
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn try_claim(&self) -> Result<Option<ClaimedTask>> {
        match self.try_claim_into(&mut None)? {
            Found::Task(task) => Ok(Some(*task)),
            Found::Nothing | Found::NoRoom => Ok(None),
        }
    }

    /// Claims the oldest task if there is one, with `room` or a free block for its output.
    pub(super) fn try_claim_into(&self, room: &mut Option<Block>) -> Result<Found> {
        self.open.require_ours()?;
        self.open.inputs.check()?;
        self.open.close_detached();
        let row = self.domain().link().row();
        let outputs = &self.open.outputs;
        while let Some(mut candidate) = self.open.queue().next() {
            // The block is taken first: otherwise a task that was claimed without room would have to be given back.
            if candidate.needs_output && room.is_none() {
                if let Some(held) = slots::try_take(&**outputs.control(), self.domain())? {
                    *room = Some(Block::new(outputs.clone(), held));
                } else if let Some(without) = self.open.queue().next_without_output() {
                    candidate = without;
                } else {
                    return Ok(Found::NoRoom);
                }
            }
            let control = &self.open.control;
            let since = control.recorder.begin();
            let Some(claimed) = control.queue.claim(row, &candidate) else { continue };
            control.record(Action::Claim, claimed.id(), claimed.attempt(), since);
            let output = room.take_if(|_| candidate.needs_output);
            if let Some(task) = ClaimedTask::new(self.open.clone(), claimed, output) {
                return Ok(Found::Task(Box::new(task)));
            }
        }
        *room = None;
        Ok(Found::Nothing)
    }

    /// Returns why there is no task to claim.
    fn why_none(&self) -> String {
        match self.open.queue().held_back() {
            0 => match self.open.control.kept.inputs() {
                (0, _) => "there is none".to_owned(),
                (tasks, blocks) => format!(
                    "there is none; arrays of tasks of this process that have ended ({tasks}) keep as many slots, and \
                     input blocks ({blocks}), from new tasks"
                ),
            },
            count => format!(
                "workers that lost earlier attempts of all pending tasks ({count}) still run, and none of them finished"
            ),
        }
    }

    /// Waits for a task, and claims it as [`try_claim_into`](Self::try_claim_into) does.
    fn await_task(&self, room: &mut Option<Block>, waiting: &Waiting<'_>) -> Result<Found> {
        let found = self.open.await_event(QueueCondition::Work, &self.spin, waiting, || {
            let found = self.try_claim_into(room)?;
            Ok((!matches!(found, Found::Nothing)).then_some(found))
        })?;
        Ok(found.unwrap_or(Found::Nothing))
    }

    /// Returns the error that no task can come, because views of ended tasks of this process keep all slots or all
    /// input blocks.
    pub(super) fn all_kept(&self) -> Option<Busy> {
        let (tasks, blocks) = self.open.control.kept.inputs();
        let kept = match () {
            () if tasks >= self.capacity() => "slot",
            () if blocks > 0 && blocks >= self.open.inputs.shape().blocks => "input block",
            () => return None,
        };
        Some(Busy::TasksKept { queue: self.name().to_owned(), kept, tasks })
    }

    /// Returns the error that no output block is free.
    pub(super) fn outputs_full(&self) -> Busy {
        Busy::OutputsFull {
            queue: self.name().to_owned(),
            outputs: self.open.outputs.shape().blocks,
            results: self.open.queue().unread(),
            kept: self.open.control.kept.outputs(),
        }
    }

    /// Waits briefly for a free output block, in line with other waiters. Returns `None` if there was none.
    fn await_room(&self, waiting: &Waiting<'_>) -> Result<Option<Block>> {
        let outputs = &self.open.outputs;
        let Some(left) = waiting.left(Instant::now()) else {
            if waiting.was_cancelled() {
                let what = format!("cannot claim a task of queue {:?}: no output block is free", self.name());
                return Err(waiting.error(what));
            }
            return Err(self.outputs_full().into());
        };
        self.open.queue().tend(self.open.pools());
        let wait = left.min(TEND_EVERY).min(self.open.queue().sleep_limit()).into();
        match slots::take(&**outputs.control(), self.domain(), &self.spin, wait, || outputs.require_live(), String::new)
        {
            Ok(held) => Ok(Some(Block::new(outputs.clone(), held))),
            Err(Error::Timeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for a task, and claims all tasks that are there by then, up to `most`.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub fn claim_all<'w>(&self, most: usize, wait: impl Into<Wait<'w>>) -> Result<Vec<ClaimedTask>> {
        let mut tasks = vec![self.claim(wait)?];
        while tasks.len() < most
            && let Some(task) = self.try_claim()?
        {
            tasks.push(task);
        }
        Ok(tasks)
    }

    /// Returns an iterator that claims one task after another. It ends when no task comes within `timeout`;
    /// [`Duration::MAX`] never ends it.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # fn work(queue: &partywall::Queue) -> partywall::Result<()> {
    /// for task in queue.claims(Duration::from_secs(10)) {
    ///     let task = task?;
    ///     match task.kind().as_str() {
    ///         "echo" => task.complete()?,
    ///         other => task.fail(&format!("no worker knows {other:?}"))?,
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn claims(&self, timeout: Duration) -> impl Iterator<Item = Result<ClaimedTask>> + '_ {
        std::iter::from_fn(move || match self.claim(timeout) {
            Err(Error::Timeout { .. }) => None,
            claimed => Some(claimed),
        })
    }
}

/// The outcome of an attempt to claim.
pub(super) enum Found {
    Task(Box<ClaimedTask>),
    Nothing,
    /// There is a task, but no block for its output.
    NoRoom,
}
