//! Results that a stream reads behind the worker's stream, before any host knows that the task is done.
//!
//! The reader's stream waits for the worker's timeline. Meanwhile the reader has no hold on the output block: the block
//! belongs to the worker until the task is done, and to the queue until the result is taken. If
//! [`EnqueuedResult::take`] takes the same block of the same attempt, no other process has written the block in
//! between. Otherwise the attempt has failed, or another process has taken the result, and `take` returns an error. A
//! reader that is killed leaves nothing behind.

use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering},
};

use partywall_cuda::StreamRef;
use partywall_shm::{
    DType,
    queue::{self as shm, Contents},
};

use super::{OpenQueue, TaskResult, Ticket};
use crate::{
    error::{Error, Gone, InvalidArgument, InvalidData, Result},
    gpu::DeviceRange,
    place::Place,
    recorder::Action,
    task_ref::TaskRef,
    wait::Wait,
};

/// The output of a task, which streams read behind the worker's stream.
///
/// [`take`](Self::take) returns afterwards whether that output was the result. Dropping this object changes nothing:
/// the result stays in the queue.
#[must_use = "whether what a stream has read is the result is known once it is taken"]
pub struct EnqueuedResult {
    ticket: Ticket,
    output: shm::Output,
    /// [`EXPOSED`] and [`TAKEN`], in one atomic: either the block is taken as exposed, or its address is refused.
    uses: AtomicU8,
}

/// Set once the GPU address was handed out, so that enqueued work of this process may use the output.
const EXPOSED: u8 = 1;
/// Set once this process has taken the result. From then on only the block gives out its address.
const TAKEN: u8 = 2;

impl Ticket {
    /// Makes `stream` wait until the worker's stream has completed the task, and returns the output, which later work
    /// on `stream` may read. The host waits only until a worker has called
    /// [`complete_on`](super::ClaimedTask::complete_on). Enqueues nothing if the task is done.
    ///
    /// If the worker dies before its stream has completed the task, `stream` continues, and [`EnqueuedResult::take`]
    /// reports the failure.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # fn add(_: partywall::cuda::StreamRef<'_>, _: partywall::DeviceRange<'_>) {}
    /// # fn read(ticket: &partywall::Ticket, stream: partywall::cuda::StreamRef<'_>) -> partywall::Result<()> {
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// let result = ticket.wait_on(stream, SECOND)?;
    /// add(stream, result.device()?);                  // enqueued behind the worker's stream
    /// let result = result.take(SECOND)?;
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
        Ok(EnqueuedResult { ticket, output, uses: AtomicU8::new(0) })
    }

    fn try_wait_on(&self, stream: StreamRef<'_>) -> Result<Option<shm::Output>> {
        self.open.require_ours()?;
        let output = match self.open.queue().output(self.id) {
            Ok(output) => output,
            Err(shm::TaskState::Gone) => return Err(self.open.gone(self.id)),
            Err(shm::TaskState::Dead) => return Err(self.failed()),
            Err(_) => return Ok(None),
        };
        Ok(self.open.order(&output, stream)?.then_some(output))
    }
}

impl OpenQueue {
    /// Makes `stream` wait until the output is complete. Returns false if the worker's timeline has ended: the broker
    /// will decide whether the worker's stream got that far.
    fn order(&self, output: &shm::Output, stream: StreamRef<'_>) -> Result<bool> {
        let Some((row, point)) = output.pending else { return Ok(true) };
        let Some(timeline) = self.timeline_of(row, point)? else { return Ok(false) };
        match timeline.wait_on(stream, point.value) {
            Err(Error::Gone(Gone::Timeline { .. })) => Ok(false),
            waited => waited.map(|()| true),
        }
    }
}

impl EnqueuedResult {
    /// Returns the range of the output on its GPU, for streams that wait for it. In pinned memory it is for reading,
    /// because it may outlive [`take`](Self::take), after which the CPU may have the bytes.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for host memory; [`InvalidArgument::Task`] for a task without
    /// output; [`Gone::Task`] once [`take`](Self::take) has taken the result.
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let outputs = &self.ticket.open.outputs;
        let block = self.output.block.filter(|block| block.index < outputs.shape().blocks);
        let without = || InvalidArgument::task(format!("task {}", self.task()), "it was submitted without an output");
        let range = outputs.device(block.ok_or_else(without)?.index)?.slice(0, self.bytes())?;
        if self.uses.fetch_or(EXPOSED, Ordering::AcqRel) & TAKEN != 0 {
            return Err(self.ticket.open.gone(self.ticket.id));
        }
        Ok(if matches!(outputs.segment().place(), Place::Pinned(_)) { range.read_only() } else { range })
    }

    /// Makes another stream wait for the output, as [`Ticket::wait_on`] does. Returns immediately, and enqueues nothing
    /// if the task is done.
    ///
    /// # Errors
    /// [`InvalidData::TaskAttempt`] if the attempt has failed; [`Gone::Task`] once the result was taken;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked); otherwise as
    /// [`Timeline::wait_on`](crate::Timeline::wait_on).
    pub fn wait_on(&self, stream: StreamRef<'_>) -> Result<()> {
        let Ticket { open, id, .. } = &self.ticket;
        open.require_ours()?;
        match open.queue().output(*id) {
            // If the worker's timeline has ended, a stream has nothing to wait for. `take` reports the outcome of the
            // attempt.
            Ok(now) if (now.attempt, now.block) == (self.output.attempt, self.output.block) => {
                open.order(&now, stream).map(drop)
            }
            Err(shm::TaskState::Gone) => Err(open.gone(*id)),
            _ => Err(self.failed()),
        }
    }

    /// Waits until the worker's stream has completed the result, and takes it. Success proves that the output that
    /// streams have read behind [`wait_on`](Ticket::wait_on) was the result. Streams may read the block until it is
    /// given back.
    ///
    /// # Errors
    /// [`InvalidData::TaskAttempt`] if the attempt has failed: what streams have read of its output is not valid, and
    /// the task goes to another worker, whose output [`Ticket::wait_on`] returns. Otherwise as [`Ticket::wait`]. After
    /// a timeout it can be called again.
    pub fn take<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<TaskResult> {
        self.ticket.await_result(wait.into(), || self.try_take())
    }

    fn try_take(&self) -> Result<Option<TaskResult>> {
        let Ticket { open, id, .. } = &self.ticket;
        open.require_ours()?;
        let row = open.domain().link().row();
        let attempt = self.output.attempt;
        let control = &open.control;
        let since = control.recorder.begin();
        let taken = match control.queue.take_output(control.pools(), row, &self.output) {
            Ok(taken) => taken,
            Err(shm::TaskState::Enqueued { attempt: now, .. }) if now == attempt => return Ok(None),
            Err(shm::TaskState::Gone) => return Err(open.gone(*id)),
            Err(_) => return Err(self.failed()),
        };
        control.record(Action::Take, *id, taken.attempt, since);
        let exposed = self.uses.fetch_or(TAKEN, Ordering::AcqRel) & EXPOSED != 0;
        Ok(Some(open.result(*id, taken, exposed)))
    }

    fn failed(&self) -> Error {
        InvalidData::TaskAttempt { task: self.task().to_string(), attempt: self.output.attempt }.into()
    }

    /// Returns the bytes of the output: as many as the submitter asked for, unless the worker writes less.
    pub fn bytes(&self) -> u64 {
        self.contents().bytes()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.contents().dtype()
    }

    /// Returns the elements along each dimension.
    pub fn shape(&self) -> Vec<u64> {
        self.contents().shape().to_vec()
    }

    /// Returns what the worker says that the output contains, unless no block has room for it.
    fn contents(&self) -> Contents {
        let room = self.ticket.open.outputs.shape().block_bytes;
        let contents = self.output.contents.unwrap_or(Contents::of_bytes(0));
        if contents.bytes() > room { Contents::of_bytes(room) } else { contents }
    }

    /// Returns the number of the attempt whose output this is, from 1.
    pub fn attempt(&self) -> u8 {
        self.output.attempt
    }

    /// Returns the reference of the task, for other processes.
    pub fn task(&self) -> TaskRef {
        self.ticket.task()
    }
}

impl fmt::Debug for EnqueuedResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnqueuedResult({}, attempt {})", self.task(), self.attempt())
    }
}
