//! Queues: tasks that processes submit and workers claim, in shared memory. No task is lost, and each has one result.

mod attachments;
mod claim;
mod claimed;
mod enqueued;
mod event;
#[cfg(feature = "tokio")]
mod future;
mod memory;
mod options;
mod signals;
mod task;
mod ticket;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::process::fork_generation;
use partywall_shm::{
    pool as shm_pool,
    queue::{self as shm, NotRetried, Pools, QueueCondition, TEND_EVERY},
};
use partywall_wire::{LeaseId, Notice, OtherUsers};

use self::{attachments::Attachments, memory::KeptByViews, signals::Signals};
pub use self::{
    attachments::{Attachment, SegmentPart},
    claimed::{ClaimedTask, TaskInput},
    enqueued::EnqueuedResult,
    event::QueueEvent,
    memory::TaskMemory,
    options::QueueOptions,
    task::{Task, Unsubmitted},
    ticket::{TaskInfo, TaskResult, TaskStatus, Ticket},
};
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::{Domain, LeaseGuard},
    error::{Busy, Denied, Error, Gone, InvalidData, Result, Unreachable},
    gpu::Gpu,
    place::Place,
    pool::{Blocks, Object, Parts, Pool},
    recorder::{Action, Recorder, version_object},
    task_ref::TaskRef,
    wait::{Wait, Waiting},
};

pub use partywall_shm::queue::{MAX_ARGUMENTS, MAX_INPUTS, MAX_KIND, MAX_TASKS, Reason as TaskFailure};

/// A named queue of tasks, with several submitters and workers that join and leave at any time.
///
/// A submitter submits a [`Task`]: a kind of work, arguments, input blocks, and the size of the output. The queue gives
/// it to one worker at a time ([`claim`](Self::claim)), the oldest task first. The worker reads the inputs in place,
/// writes its own output block, and completes the task. A process that has the [`Ticket`] takes the result, once. All
/// of this happens in shared memory, without the broker and without copies.
///
/// # Deaths
///
/// If a worker dies, or the [lease](QueueOptions::lease) of its attempt ends, its task is pending again and goes first.
/// A worker that has lost a task in this way and continues is *fenced*: it cannot complete the task ([`Gone::Claim`]),
/// and it writes a block that no other attempt uses. Work may therefore be done twice, but each task has exactly one
/// result. After [`max_attempts`](Task::max_attempts) the task is a dead letter, which keeps its inputs until it is
/// [retried](Self::retry) or [purged](Self::purge).
///
/// A result stays until a process takes or purges it. The tasks of a submitter that dies stay, too, unless they were
/// submitted to [end with it](Task::cancel_with_submitter).
///
/// The queue ends with the last process that has it open, unless it is [kept](QueueOptions::kept). It may be used from
/// any thread.
#[derive(Debug)]
pub struct Queue {
    open: Arc<OpenQueue>,
    inputs: Pool,
    spin: AdaptiveSpin,
}

/// The counts of a queue. While processes use it, the numbers do not belong to a single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Tasks that wait for a worker.
    pub pending: u32,
    /// Tasks that workers have claimed.
    pub claimed: u32,
    /// Tasks that streams of workers will complete.
    pub enqueued: u32,
    /// Results that no process has taken.
    pub done: u32,
    /// Dead letters.
    pub dead: u32,
    /// How many more tasks fit.
    pub free: u32,
    /// Results since the queue was created.
    pub completed: u64,
    /// Attempts without a result since the queue was created.
    pub returned: u64,
    /// Free input blocks.
    pub free_inputs: u32,
    /// Output blocks that belong to no attempt and no result.
    pub free_outputs: u32,
    /// Segments that are [attached](Queue::attach).
    pub attached: u32,
}

/// What a queue and its tasks share.
#[derive(Debug)]
pub(crate) struct OpenQueue {
    control: Arc<QueueControl>,
    shared: Arc<QueueObject>,
    inputs: Arc<Blocks>,
    /// Declared last, because dropping it may end the connection.
    outputs: Arc<Blocks>,
}

/// What all handles of a queue share, apart from its inputs.
#[derive(Debug)]
struct QueueObject {
    queue: Arc<shm::Queue>,
    outputs: Arc<Blocks>,
    signals: Signals,
    attachments: Attachments,
}

/// The control memory of a queue. It holds no connection, so the service thread may be its last user.
#[derive(Debug)]
struct QueueControl {
    queue: Arc<shm::Queue>,
    inputs: Arc<shm_pool::Pool>,
    outputs: Arc<shm_pool::Pool>,
    recorder: Recorder,
    kept: KeptByViews,
    /// The queue's number in traces.
    object: u64,
    /// Keeps the broker from reclaiming what this process holds.
    _keep: Option<Arc<LeaseGuard>>,
    generation: u64,
}

impl Domain {
    /// Returns options to create queue `name`, or to open it.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Task};
    /// # const SECOND: Duration = Duration::from_secs(1);
    /// let queue = Domain::connect()?.queue("work").tasks(1024).inputs(64, 1 << 20).outputs(64, 1 << 20).open_or_create()?;
    /// let mut input = queue.inputs().alloc(SECOND)?;
    /// input.as_mut_slice::<f32>()?.fill(49.0);
    /// let ticket = queue.submit(Task::new("sqrt").input(input).output(1 << 20), SECOND).map_err(|refused| refused.error)?;
    /// // A worker, in any process:
    /// let mut task = queue.claim(SECOND)?;
    /// let roots: Vec<f32> = task.inputs()[0].as_slice::<f32>()?.iter().map(|x| x.sqrt()).collect();
    /// task.output_mut()?.as_mut_slice::<f32>()?.copy_from_slice(&roots);
    /// task.complete()?;
    /// // The submitter:
    /// let result = ticket.wait(SECOND)?;
    /// assert_eq!(result.output().expect("room was asked for").as_slice::<f32>()?[0], 7.0);
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn queue(&self, name: &str) -> QueueOptions {
        QueueOptions::new(self.clone(), name)
    }
}

impl Queue {
    fn new(blocks: Arc<Blocks>) -> Result<Self> {
        let inputs = Pool::new(blocks.clone());
        let name = blocks.name().to_owned();
        let foreign = || Unreachable::protocol(format!("it gave {name:?} without the control memory of a queue"));
        let shared: Arc<QueueObject> = blocks.object().ok_or_else(foreign)?;
        let outputs = shared.outputs.clone();
        let control = QueueControl {
            queue: shared.queue.clone(),
            inputs: blocks.control().clone(),
            outputs: outputs.control().clone(),
            recorder: blocks.domain().recorder().clone(),
            kept: KeptByViews::default(),
            object: version_object(blocks.name(), blocks.version()),
            _keep: blocks.keep(),
            generation: fork_generation(),
        };
        let open = OpenQueue { control: Arc::new(control), shared, outputs, inputs: blocks };
        Ok(Self { open: Arc::new(open), inputs, spin: AdaptiveSpin::on_memory() })
    }

    /// Returns the pool of input blocks. A block that is not submitted returns to the pool when it is dropped.
    pub fn inputs(&self) -> &Pool {
        &self.inputs
    }

    /// Waits until the queue is removed. Returns the notice if that has a [deadline](Domain::withdraw): until when this
    /// process is to drop the queue, and what happens then.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; those of every call.
    pub fn wait_withdrawn<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Option<Notice>> {
        self.open.inputs.wait_withdrawn(wait.into())
    }

    /// Returns whether the queue may still be used. Takes nanoseconds.
    ///
    /// # Errors
    /// [`Gone::Withdrawn`] once the deadline of a withdrawal with [`Then::Stale`](crate::Then::Stale) has passed. Tasks
    /// that this process works on can be completed; no other can be claimed or submitted.
    /// [`DeviceFault::DeviceLost`](crate::error::DeviceFault::DeviceLost) once the memory is lost.
    pub fn check(&self) -> Result<()> {
        self.open.inputs.check()
    }

    /// Makes a dead letter pending again. It may be attempted as often as it was submitted with
    /// ([`max_attempts`](Task::max_attempts)), under further numbers, and keeps the reasons of its last attempts.
    ///
    /// # Errors
    /// [`Denied::OtherUser`] in a queue of another user, which may need to ask the broker; [`Busy::TaskState`] if the
    /// task is not a dead letter, or has had 255 attempts; [`Gone::Task`] if it is over; [`InvalidData::TaskInputs`] if
    /// its submitter ended before its inputs were complete; [`Mismatch::Options`](crate::error::Mismatch::Options) for
    /// a task of another queue; [`Unreachable::Forked`].
    pub fn retry(&self, task: &TaskRef) -> Result<()> {
        self.open.require_ours()?;
        self.require_owner()?;
        let id = self.open.id(task)?;
        self.open.queue().retry(id).map_err(|refused| match refused {
            NotRetried::InputsLost => InvalidData::TaskInputs { task: task.to_string() }.into(),
            NotRetried::State(state) => self.open.not_in(id, state, "a dead letter"),
            NotRetried::Exhausted => {
                self.open.not_in(id, shm::TaskState::Dead, "a dead letter with fewer than 255 attempts")
            }
        })
    }

    /// Drops a result that no process has taken, or a dead letter.
    ///
    /// # Errors
    /// [`Busy::TaskState`] if the task is neither; otherwise as [`retry`](Self::retry).
    pub fn purge(&self, task: &TaskRef) -> Result<()> {
        self.open.require_ours()?;
        self.require_owner()?;
        let id = self.open.id(task)?;
        let is_over = |state| matches!(state, shm::TaskState::Done | shm::TaskState::Dead);
        let row = self.domain().link().row();
        let purged = self.open.queue().dispose(self.open.pools(), row, id, is_over);
        purged.map_err(|state| self.open.not_in(id, state, "done or dead"))
    }

    /// Refuses to change tasks of others in a queue of another user.
    fn require_owner(&self) -> Result<()> {
        let owner = self.open.inputs.segment().owner();
        let uid = self.domain().uid();
        if owner == uid {
            return Ok(());
        }
        let what = OtherUsers::Tasks { name: self.name().to_owned() };
        Err(Denied::OtherUser { what, owner, uid }.into())
    }

    /// Counts tasks and blocks by their states. The time is proportional to the numbers of tasks and blocks.
    pub fn stats(&self) -> QueueStats {
        let audit = self.open.queue().audit();
        let (completed, returned) = self.open.queue().totals();
        let free = |blocks: &Blocks| {
            let audit = blocks.control().audit();
            audit.free + audit.stale
        };
        QueueStats {
            pending: audit.pending,
            claimed: audit.claimed,
            enqueued: audit.enqueued,
            done: audit.done,
            dead: audit.dead,
            free: audit.free,
            completed,
            returned,
            free_inputs: free(&self.open.inputs),
            free_outputs: free(&self.open.outputs),
            attached: audit.attached,
        }
    }

    /// Returns the maximum number of tasks.
    pub fn capacity(&self) -> u32 {
        self.open.queue().limits().tasks
    }

    /// Returns the bytes of an input block.
    pub fn input_bytes(&self) -> u64 {
        self.open.inputs.shape().block_bytes
    }

    /// Returns the bytes of the largest output.
    pub fn output_bytes(&self) -> u64 {
        self.open.outputs.shape().block_bytes
    }

    /// Returns how long an attempt may take unless it is [extended](ClaimedTask::extend); `None` means no limit.
    pub fn lease(&self) -> Option<Duration> {
        Some(self.open.queue().limits().lease).filter(|lease| *lease != 0).map(Duration::from_millis)
    }

    /// Returns where the blocks are.
    pub fn place(&self) -> Place {
        self.open.inputs.segment().place()
    }

    /// Returns the GPU on which this process uses the blocks; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.open.inputs.gpu()
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.open.name()
    }

    /// Returns the version, which differs between queues that were created under one name after each other.
    pub fn version(&self) -> u64 {
        self.open.inputs.version()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.open.domain()
    }
}

impl QueueControl {
    fn pools(&self) -> Pools<'_> {
        Pools { inputs: &self.inputs, outputs: &self.outputs }
    }

    /// Records what this process does with a task, which began at `since`; nothing if nobody traced then.
    #[inline]
    fn record(&self, action: Action, task: shm::TaskId, attempt: u8, since: Option<u64>) {
        self.recorder.record_task(action, self.object, task, attempt, since);
    }
}

impl OpenQueue {
    /// Maps the control memory of a queue, apart from that of its inputs.
    fn map(parts: &mut Parts<'_>) -> Result<Object> {
        let (shape, bytes) = parts.shape.outputs().zip(parts.shape.pool_bytes()).ok_or_else(|| parts.wrong())?;
        let pool = parts.map(shm_pool::Pool::map)?;
        let queue = parts.map(shm::Queue::map)?;
        let has = queue.limits();
        if (has.inputs, has.outputs) != (parts.shape.blocks, shape.blocks) {
            return Err(parts.wrong());
        }
        let outputs = parts.blocks(pool, Arc::new(()), shape, bytes)?;
        let signals = Signals::default();
        let attachments = Attachments::default();
        Ok(Arc::new(QueueObject { queue: Arc::new(queue), outputs, signals, attachments }))
    }

    fn queue(&self) -> &shm::Queue {
        &self.control.queue
    }

    fn pools(&self) -> Pools<'_> {
        self.control.pools()
    }

    fn name(&self) -> &str {
        self.inputs.name()
    }

    fn domain(&self) -> &Domain {
        self.inputs.domain()
    }

    /// Returns the number of the lease on the queue.
    fn lease(&self) -> Result<LeaseId> {
        let keep = self.inputs.keep();
        let gone = || Unreachable::protocol(format!("it gave {:?} without a lease", self.name()));
        Ok(keep.ok_or_else(gone)?.lease())
    }

    /// Returns false in a forked child.
    fn is_ours(&self) -> bool {
        self.control.generation == fork_generation()
    }

    fn require_ours(&self) -> Result<()> {
        if self.is_ours() { Ok(()) } else { self.domain().link().require_ours() }
    }

    fn reference(&self, id: shm::TaskId) -> TaskRef {
        TaskRef::new(self.name(), self.inputs.version(), id)
    }

    /// Returns whether results that were not taken occupy output blocks, and no output block is free.
    fn results_fill_outputs(&self) -> bool {
        let audit = self.outputs.control().audit();
        audit.published > 0 && audit.free + audit.stale == 0
    }

    /// Returns the error that a task is not in a state that the caller needs.
    fn not_in(&self, id: shm::TaskId, state: shm::TaskState, wanted: &'static str) -> Error {
        match TaskStatus::of(state) {
            TaskStatus::Gone => self.gone(id),
            status => Busy::TaskState { task: self.reference(id).to_string(), status: status.name(), wanted }.into(),
        }
    }

    /// Returns the error that a claim has been taken back.
    fn fenced(&self, claimed: &shm::Claimed) -> Error {
        Gone::Claim { task: self.reference(claimed.id()).to_string(), attempt: claimed.attempt() }.into()
    }

    /// Returns the error that a task is over.
    fn gone(&self, id: shm::TaskId) -> Error {
        Error::Gone(Gone::Task { task: self.reference(id).to_string() })
    }

    /// Polls until `poll` returns a value or the wait ends; sleeps in between, and ends overdue leases. Returns `None`
    /// if the wait has ended.
    fn await_event<T>(
        &self,
        event: QueueCondition,
        spin: &AdaptiveSpin,
        waiting: &Waiting<'_>,
        mut poll: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut found = None;
        // Polling may have effects, so its value must not be lost.
        let now = spin.spin(waiting.start(), waiting.timeout(), || {
            found = poll().transpose();
            found.is_some()
        });
        if let Some(found) = found {
            return found.map(Some);
        }
        let found = self.sleep_until(event, waiting, now, poll);
        self.queue().pass_on(event);
        found
    }

    /// As [`await_event`](Self::await_event), without spinning first. Reads the clock if the caller passes no time.
    fn sleep_until<T>(
        &self,
        event: QueueCondition,
        waiting: &Waiting<'_>,
        mut now: Option<Instant>,
        mut poll: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        loop {
            // Done before the clock is read, so that a caller that never waits ends overdue leases, too.
            self.queue().tend(self.pools());
            let Some(left) = waiting.left(now.take().unwrap_or_else(Instant::now)) else { return Ok(None) };
            self.inputs.require_live()?;
            let key = self.queue().prepare(event);
            if let Some(found) = poll()? {
                return Ok(Some(found));
            }
            self.queue().sleep(event, key, left.min(self.queue().sleep_limit()));
            if let Some(found) = poll()? {
                return Ok(Some(found));
            }
        }
    }
}
