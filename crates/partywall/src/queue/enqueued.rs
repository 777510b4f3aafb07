//! Results in the order of a stream: read behind the worker's stream, before any host knows that the task is done.
//!
//! The reader's stream waits for the worker's timeline. The reader has no hold on the output block meanwhile: it stays the
//! worker's until the task is done, and the queue's until the result is taken. So the block that [`EnqueuedResult::take`] takes,
//! if it is the one that was read, of the same attempt, has had nothing else in it in between; otherwise the attempt has failed,
//! or another process has taken the result, and `take` says so. A reader that is killed leaves nothing behind.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
};

use partywall_cuda::StreamRef;
use partywall_shm::queue as shm;

use super::{TaskRef, TaskResult, Ticket};
use crate::{
    error::{Error, Gone, InvalidArgument, InvalidData, Result},
    gpu::DeviceRange,
    pool::Block,
    wait::Wait,
};

/// The output of a task that a stream may read behind the worker's stream.
///
/// [`take`](Self::take) says afterwards whether it was the result. Dropping it changes nothing: the result stays in the queue.
#[must_use = "whether what a stream has read is the result is known once it is taken"]
pub struct EnqueuedResult {
    ticket: Ticket,
    output: shm::Output,
    /// Whether its GPU address was handed out: then work of this process may use it.
    exposed: AtomicBool,
}

impl Ticket {
    /// Has `stream` wait until the worker's stream has completed the task, and returns what may be read on `stream` from then on.
    /// The host waits only until a worker has [completed the task on its stream](super::ClaimedTask::complete_on). Nothing is
    /// enqueued if the task is done.
    ///
    /// If the worker dies before its stream has come so far, `stream` goes on, and [`EnqueuedResult::take`] says so.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # fn add(_: partywall::cuda::StreamRef<'_>, _: partywall::DeviceRange<'_>) {}
    /// # fn read(ticket: &partywall::Ticket, stream: partywall::cuda::StreamRef<'_>) -> partywall::Result<()> {
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// let result = ticket.wait_on(stream, SECOND)?;
    /// add(stream, result.device()?);                  // enqueued behind the worker's stream
    /// let result = result.take(SECOND).map_err(|refused| refused.0)?;
    /// result.into_output().expect("room was asked for").release_on(stream).map_err(|refused| refused.error)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`wait`](Self::wait) and [`Timeline::wait_on`](crate::Timeline::wait_on).
    pub fn wait_on<'w>(&self, stream: StreamRef<'_>, wait: impl Into<Wait<'w>>) -> Result<EnqueuedResult> {
        let output = self.await_result(wait.into(), || self.try_wait_on(stream))?;
        let ticket = Self::new(self.open.clone(), self.id);
        Ok(EnqueuedResult { ticket, output, exposed: AtomicBool::new(false) })
    }

    fn try_wait_on(&self, stream: StreamRef<'_>) -> Result<Option<shm::Output>> {
        self.open.require_ours()?;
        let output = match self.open.queue().output(self.id) {
            Ok(output) => output,
            Err(shm::TaskState::Gone) => return Err(self.open.gone(self.id)),
            Err(shm::TaskState::Dead) => return Err(self.failed()),
            Err(_) => return Ok(None),
        };
        let Some((row, point)) = output.pending else { return Ok(Some(output)) };
        // A timeline that has ended: the broker is about to say whether the stream came so far.
        let Some(timeline) = self.open.timeline_of(row, point)? else { return Ok(None) };
        match timeline.wait_on(stream, point.value) {
            Err(Error::Gone(Gone::Timeline { .. })) => Ok(None),
            waited => waited.map(|()| Some(output)),
        }
    }
}

impl EnqueuedResult {
    /// Where the output is on its GPU, to be read on the stream that waits. It may be longer than the output.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for host memory; [`InvalidArgument::Range`] for a task without output.
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let outputs = &self.ticket.open.outputs;
        let block = self.output.block.filter(|block| block.index < outputs.shape().blocks);
        let without = || InvalidArgument::range(format!("task {}", self.task()), "it was submitted without an output");
        let range = outputs.device(block.ok_or_else(without)?.index)?;
        self.exposed.store(true, Ordering::Relaxed);
        Ok(range)
    }

    /// Takes the result, once the worker's stream has completed it. What streams read of it behind
    /// [`wait_on`](Ticket::wait_on) was the result then, and they may go on to read its block until that is given back.
    ///
    /// # Errors
    /// This comes back with the error. [`InvalidData::TaskAttempt`]: the attempt has failed, and what streams have read of its
    /// output is not valid; the task goes to another worker, whose output `wait_on` brings. Otherwise as [`Ticket::wait`].
    pub fn take<'w>(self, wait: impl Into<Wait<'w>>) -> Result<TaskResult, Box<(Error, Self)>> {
        self.ticket.await_result(wait.into(), || self.try_take()).map_err(|error| Box::new((error, self)))
    }

    fn try_take(&self) -> Result<Option<TaskResult>> {
        let Ticket { open, id, .. } = &self.ticket;
        open.require_ours()?;
        let row = open.domain().link().row();
        let attempt = self.output.attempt;
        let taken = match open.queue().take_output(open.pools(), row, &self.output) {
            Ok(taken) => taken,
            Err(shm::TaskState::Enqueued { attempt: now, .. }) if now == attempt => return Ok(None),
            Err(shm::TaskState::Gone) => return Err(open.gone(*id)),
            Err(_) => return Err(InvalidData::TaskAttempt { task: self.task().to_string(), attempt }.into()),
        };
        let exposed = self.exposed.load(Ordering::Relaxed);
        let output = taken.output.map(|held| Block::exposed(open.outputs.clone(), held, exposed));
        Ok(Some(TaskResult::new(output, taken.bytes, taken.attempt)))
    }

    /// Bytes of the output that the submitter asked for.
    pub fn bytes(&self) -> u64 {
        self.output.bytes
    }

    /// The number of the attempt whose output it is, from 1.
    pub fn attempt(&self) -> u8 {
        self.output.attempt
    }

    /// The task, for other processes.
    pub fn task(&self) -> TaskRef {
        self.ticket.task()
    }
}

impl fmt::Debug for EnqueuedResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnqueuedResult({}, attempt {})", self.task(), self.attempt())
    }
}
