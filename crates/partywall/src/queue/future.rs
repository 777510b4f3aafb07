//! Queues in asynchronous programs.

use std::{mem, sync::Arc, time::Instant};

use futures_core::Stream;
use partywall_shm::queue::QueueCondition;
use tokio::task::coop::consume_budget;
use tracing::Instrument;

use super::{
    ClaimedTask, Queue, QueueControl, QueueOptions, TEND_EVERY, Task, TaskResult, TaskStatus, Ticket, Unsubmitted,
    claim::Found,
};
use crate::{
    domain::stream,
    error::{Busy, Error, Result},
    pool::Block,
    slots,
};

impl Queue {
    /// Claims the oldest task as [`claim`](Self::claim) does, and waits for one without blocking a thread. Runs on any
    /// executor, and needs the runtime of tokio where output blocks are scarce.
    ///
    /// A task is noticed within a millisecond or so: while a future waits, the connection's service thread polls the
    /// queue. Several futures may wait at a time.
    ///
    /// The future may be dropped at any time, for example by `tokio::time::timeout` or `select!`: it claims a task only
    /// in the poll that returns it. A [`ClaimedTask`] that is dropped goes to another worker.
    ///
    /// ```no_run
    /// # async fn work(queue: &partywall::Queue) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut task = queue.claim_async().await?;
    /// let (inputs, output) = task.inputs_and_output()?;
    /// for (root, number) in output.as_mut_slice::<f32>()?.iter_mut().zip(inputs[0].as_slice::<f32>()?) {
    ///     *root = number.sqrt();
    /// }
    /// task.complete()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`claim`](Self::claim), except [`Error::Timeout`] and [`Error::Cancelled`]. [`Busy::OutputsFull`] only if
    /// views of ended tasks of this process keep all output blocks.
    pub async fn claim_async(&self) -> Result<ClaimedTask> {
        let claim = async {
            // Before anything is claimed: a worker that always finds a task lets others run here.
            consume_budget().await;
            let mut room = None;
            let mut was_kept = false;
            loop {
                match self.try_claim_into(&mut room)? {
                    Found::Task(task) => return Ok(*task),
                    Found::Nothing => {
                        let kept = self.all_kept();
                        if let (true, Some(kept)) = (mem::replace(&mut was_kept, kept.is_some()), kept) {
                            return Err(kept.into());
                        }
                        // Another thread may be about to drop its views.
                        self.until_work(was_kept).await?;
                    }
                    Found::NoRoom => {
                        room = self.room_async().await?;
                        // They were kept during the whole wait, so no other thread was about to drop its views.
                        if room.is_none() && self.open.control.kept.outputs() >= self.open.outputs.shape().blocks {
                            return Err(self.outputs_full().into());
                        }
                    }
                }
            }
        };
        claim.instrument(tracing::trace_span!("claim", queue = self.name())).await
    }

    /// Waits until there may be a task to claim; only briefly if it `is_brief`.
    async fn until_work(&self, is_brief: bool) -> Result<()> {
        self.open.inputs.require_live()?;
        let control = self.open.control.clone();
        let end = Instant::now() + TEND_EVERY;
        let mut tending = control.tending();
        let is_there = move |now| {
            tending(now);
            control.queue.next().is_some() || is_brief && now >= end
        };
        self.domain().until(is_there).await;
        Ok(())
    }

    /// Waits briefly for a free output block, in line with other waiters, as [`claim`](Self::claim) does.
    async fn room_async(&self) -> Result<Option<Block>> {
        let outputs = &self.open.outputs;
        self.open.queue().tend(self.open.pools());
        let limit = TEND_EVERY.min(self.open.queue().sleep_limit());
        let live = || outputs.require_live();
        let held = slots::take_async(outputs.control(), self.domain(), live, Some(limit)).await?;
        Ok(held.map(|held| Block::new(outputs.clone(), held)))
    }

    /// Returns claimed tasks as a stream: each time it is polled for the next one, it claims one. It ends after an
    /// error; another stream then goes on. A stream that is dropped has claimed nothing.
    ///
    /// ```no_run
    /// # async fn work(queue: &partywall::Queue) -> partywall::Result<()> {
    /// use tokio_stream::StreamExt; // or `futures::StreamExt`
    ///
    /// let mut tasks = queue.claim_stream();
    /// while let Some(task) = tasks.next().await {
    ///     task?.complete()?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn claim_stream(&self) -> impl Stream<Item = Result<ClaimedTask>> + Send + Unpin + '_ {
        stream(move || async move { self.claim_async().await.map(Some) })
    }

    /// Submits a task as [`submit`](Self::submit) does, and waits for a free slot without blocking a thread. Runs on any
    /// executor.
    ///
    /// A future that is dropped before it is complete has not submitted the task, and drops it with its inputs.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), except [`Busy::QueueFull`] and [`Error::Cancelled`].
    pub async fn submit_async(&self, mut task: Task) -> Result<Ticket, Box<Unsubmitted>> {
        let mut key = None;
        loop {
            let mut refused = match self.try_submit(task) {
                Ok(ticket) => return Ok(ticket),
                Err(refused) => refused,
            };
            if !matches!(refused.error, Error::Busy(Busy::QueueFull { .. })) {
                return Err(refused);
            }
            if let Err(gone) = self.open.inputs.require_live() {
                refused.error = gone;
                return Err(refused);
            }
            task = match refused.tasks.pop() {
                Some(same) => same,
                None => return Err(refused),
            };
            let control = self.open.control.clone();
            let Some(seen) = key.take() else {
                // What becomes free from now on is counted. Then there is one more attempt, for what was free before.
                key = Some(control.queue.prepare(QueueCondition::Space));
                continue;
            };
            let mut tending = control.tending();
            let has_changed = move |now| {
                tending(now);
                control.queue.prepare(QueueCondition::Space) != seen
            };
            self.domain().until(has_changed).await;
        }
    }
}

impl Ticket {
    /// Waits until the task is done, and takes its result, without blocking a thread. Runs on any executor.
    ///
    /// The end of the task is noticed within a millisecond or so. The future may be dropped at any time: it takes the
    /// result only in the poll that returns it, so the ticket can be asked again.
    ///
    /// ```no_run
    /// # async fn take(ticket: &partywall::Ticket) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let result = tokio::time::timeout(Duration::from_secs(10), ticket.wait_async()).await??;
    /// println!("{} bytes", result.bytes());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`wait`](Self::wait), except [`Error::Timeout`] and [`Error::Cancelled`].
    pub async fn wait_async(&self) -> Result<TaskResult> {
        loop {
            if let Some(result) = self.try_take()? {
                return Ok(result);
            }
            self.until_over().await?;
        }
    }

    /// Waits until the task is done, and leaves its result in the queue, without blocking a thread. Runs on any
    /// executor. The future may be dropped at any time.
    ///
    /// # Errors
    /// As [`wait_async`](Self::wait_async).
    pub async fn wait_done_async(&self) -> Result<()> {
        while !self.is_done()? {
            self.until_over().await?;
        }
        Ok(())
    }

    /// Waits until the task may be over.
    async fn until_over(&self) -> Result<()> {
        self.open.inputs.require_live()?;
        let control = self.open.control.clone();
        let id = self.id;
        let mut tending = control.tending();
        let is_over = move |now| {
            tending(now);
            matches!(TaskStatus::of(control.queue.state(id)), TaskStatus::Done | TaskStatus::Dead | TaskStatus::Gone)
        };
        self.open.domain().until(is_over).await;
        Ok(())
    }
}

impl QueueControl {
    /// Returns what ends leases, as a waiting thread does, if it is called again and again with the time.
    fn tending(self: &Arc<Self>) -> impl FnMut(Instant) + Send + 'static {
        let control = self.clone();
        let mut next = Instant::now();
        move |now| {
            // Each of a thousand conditions would otherwise read the clock.
            if now >= next {
                control.queue.tend(control.pools());
                next = now + TEND_EVERY / 2;
            }
        }
    }
}

impl QueueOptions {
    /// Opens the queue as [`open`](Self::open) does, but waits for one that does not exist yet, for as long as the
    /// future is polled, without blocking a thread; needs the runtime of tokio. The [timeout](Self::timeout) has no
    /// effect.
    ///
    /// The future may be dropped at any time.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Cancelled`] if the runtime ends.
    pub async fn open_async(&self) -> Result<Queue> {
        let options = self.clone();
        let open = move |opened, fds| {
            options.wanted.attach(opened, fds, |control| options.check(control)).and_then(Queue::new)
        };
        self.wanted.open_async(open).await
    }
}
