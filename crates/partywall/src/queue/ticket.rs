//! Tickets: the state of submitted tasks, and their results.

use std::{sync::Arc, time::Duration};

use partywall_shm::{
    members,
    queue::{self as shm, QueueCondition, TaskId},
};
use partywall_wire::Named;

use super::{OpenQueue, Queue, TaskFailure};
use crate::{
    adaptive_spin::AdaptiveSpin,
    error::{Busy, Error, InvalidData, Mismatch, Result},
    pool::Block,
    recorder::Action,
    task_ref::TaskRef,
    wait::Wait,
};

/// A submitted task. Dropping the ticket changes nothing: the task continues, and any process can take its result by
/// the [reference](Self::task).
#[derive(Debug)]
pub struct Ticket {
    pub(super) open: Arc<OpenQueue>,
    pub(super) id: TaskId,
    spin: AdaptiveSpin,
}

/// A result that was taken. Its output belongs to this process, and returns to the queue when it is dropped.
#[derive(Debug)]
pub struct TaskResult {
    output: Option<Block>,
    attempt: u8,
}

/// A task in a listing of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskInfo {
    /// The reference of the task.
    pub task: TaskRef,
    /// Its state.
    pub status: TaskStatus,
    /// The kind of work.
    pub kind: String,
    /// The number of its last attempt.
    pub attempts: u8,
    /// The number of the last attempt that it may have. A [retry](Queue::retry) raises it.
    pub max_attempts: u8,
    /// How long ago it was submitted.
    pub age: Duration,
    /// Why its last attempts had no result, with their numbers; at most 4.
    pub failures: Vec<(u8, TaskFailure)>,
    /// The reason that the last worker that failed it gave; empty if none did. Only that of the last
    /// [`TaskFailure::Failed`] among the failures is kept.
    pub text: String,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TaskStatus {
    /// It waits for a worker.
    Pending,
    /// A worker has claimed it.
    Claimed {
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// A stream of its worker will complete it.
    Enqueued {
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// It has a result that no process has taken.
    Done,
    /// It is a dead letter: all its attempts have failed.
    Dead,
    /// Its result was taken, or it was cancelled or purged.
    Gone,
}

impl Ticket {
    pub(super) fn new(open: Arc<OpenQueue>, id: TaskId) -> Self {
        Self { open, id, spin: AdaptiveSpin::on_memory() }
    }

    /// Waits until the task is done, and takes its result. The result keeps the output block until it is dropped.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use partywall::{Error, Ticket, error::InvalidData};
    ///
    /// # fn take(ticket: &Ticket) -> partywall::Result<()> {
    /// match ticket.wait(Duration::from_secs(10)) {
    ///     Ok(result) => {
    ///         let output = result.output().expect("the task was submitted with room for an output");
    ///         println!("{}", output.as_slice::<f32>()?[0]);
    ///     }
    ///     Err(Error::InvalidData(InvalidData::TaskFailed { attempts, reason, .. })) => {
    ///         println!("a dead letter after {attempts} attempts: {reason}");
    ///     }
    ///     Err(Error::Timeout { .. }) => println!("not done yet: {}", ticket.status().name()),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `wait_async` blocks none.
    ///
    /// # Errors
    /// [`InvalidData::TaskFailed`] for a dead letter, which stays in the queue;
    /// [`Gone::Task`](crate::error::Gone::Task) if the result was taken, or the task was cancelled or purged;
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Unreachable::Gone`](crate::error::Unreachable::Gone) if it has to
    /// wait without a broker; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn wait<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<TaskResult> {
        self.await_result(wait.into(), || self.try_take())
    }

    /// Polls until `poll` returns a value. Only a call that has to wait reads the clock.
    pub(super) fn await_result<T>(&self, wait: Wait<'_>, poll: impl Fn() -> Result<Option<T>>) -> Result<T> {
        if let Some(found) = poll()? {
            return Ok(found);
        }
        let waiting = wait.begin();
        let found = self.open.await_event(QueueCondition::Result, &self.spin, &waiting, poll)?;
        found.ok_or_else(|| waiting.error(self.not_done()))
    }

    /// Takes the result if the task is done.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), except those of waiting.
    pub fn try_take(&self) -> Result<Option<TaskResult>> {
        self.open.require_ours()?;
        let row = self.open.domain().link().row();
        let control = &self.open.control;
        let since = control.recorder.begin();
        let taken = match control.queue.take(control.pools(), row, self.id) {
            Ok(taken) => taken,
            Err(shm::TaskState::Gone) => return Err(self.open.gone(self.id)),
            Err(shm::TaskState::Dead) => return Err(self.failed()),
            Err(_) => return Ok(None),
        };
        control.record(Action::Take, self.id, taken.attempt, since);
        Ok(Some(self.open.result(self.id, taken, false)))
    }

    /// Waits until the task is done, and leaves its result in the queue.
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `wait_done_async` blocks none.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_done<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.await_result(wait.into(), || Ok(self.is_done()?.then_some(())))
    }

    /// Returns whether the task has a result.
    pub(super) fn is_done(&self) -> Result<bool> {
        self.open.require_ours()?;
        match self.status() {
            TaskStatus::Done => Ok(true),
            TaskStatus::Dead => Err(self.failed()),
            TaskStatus::Gone => Err(self.open.gone(self.id)),
            TaskStatus::Pending | TaskStatus::Claimed { .. } | TaskStatus::Enqueued { .. } => Ok(false),
        }
    }

    /// Returns the state of the task.
    pub fn status(&self) -> TaskStatus {
        TaskStatus::of(self.open.queue().state(self.id))
    }

    /// Cancels the task unless a worker has claimed it.
    ///
    /// # Errors
    /// [`Busy::TaskRunning`] if a worker has claimed it; [`Gone::Task`](crate::error::Gone::Task) if it is over;
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn cancel(&self) -> Result<()> {
        self.open.require_ours()?;
        let row = self.open.domain().link().row();
        let is_pending = |state| state == shm::TaskState::Pending;
        let attempt = match self.open.queue().dispose(self.open.pools(), row, self.id, is_pending) {
            Ok(()) => return Ok(()),
            Err(shm::TaskState::Claimed { attempt, .. } | shm::TaskState::Enqueued { attempt, .. }) => attempt,
            Err(_) => return Err(self.open.gone(self.id)),
        };
        Err(Busy::TaskRunning { task: self.task().to_string(), attempt }.into())
    }

    /// Returns the reference of the task, for other processes.
    pub fn task(&self) -> TaskRef {
        self.open.reference(self.id)
    }

    /// Returns how far the task is, and the reason if no worker can claim it.
    fn not_done(&self) -> String {
        let status = self.status();
        let needs_output = || self.open.queue().describe(self.id).is_some_and(|task| task.output.is_some());
        let blocked = if status != TaskStatus::Pending {
            ""
        } else if self.open.queue().is_held_back(self.id) {
            ", because workers that lost earlier attempts of it still run"
        } else if needs_output() && self.open.results_fill_outputs() {
            ", because no output block is free (results that were not taken, or arrays of tasks that have ended, occupy them)"
        } else {
            ""
        };
        format!("task {} is {}{blocked}: it was not done", self.task(), status.name())
    }

    pub(super) fn failed(&self) -> Error {
        let (failures, text) = self.open.queue().failures(self.id);
        let attempts = failures.last().map_or(0, |(attempt, _)| *attempt);
        let reason = match failures.last() {
            Some((_, TaskFailure::Failed)) if !text.is_empty() => String::from_utf8_lossy(&text).into_owned(),
            Some((_, reason)) => reason.to_string(),
            None => "its attempts left no reason".to_owned(),
        };
        InvalidData::TaskFailed { task: self.task().to_string(), attempts, reason }.into()
    }
}

impl Queue {
    /// Returns up to `most` tasks of the queue whose state satisfies `of`.
    pub fn tasks(&self, most: usize, of: impl Fn(TaskStatus) -> bool) -> Vec<TaskInfo> {
        let now = members::now();
        let tasks = self.open.queue().tasks(0, most, |state| of(TaskStatus::of(state)));
        let tasks = tasks.into_iter().map(|info| TaskInfo {
            task: self.open.reference(info.id),
            status: TaskStatus::of(info.state),
            kind: String::from_utf8_lossy(&info.kind).into_owned(),
            attempts: info.attempts,
            max_attempts: info.max_attempts,
            age: Duration::from_millis(now.saturating_sub(info.submitted)),
            failures: info.failures,
            text: String::from_utf8_lossy(&info.text).into_owned(),
        });
        tasks.collect()
    }

    /// Returns a ticket for a task that another process has submitted.
    ///
    /// # Errors
    /// [`Mismatch::Options`] for a task of another queue.
    pub fn ticket(&self, task: &TaskRef) -> Result<Ticket> {
        self.open.id(task).map(|id| Ticket::new(self.open.clone(), id))
    }
}

impl OpenQueue {
    /// Returns the number of a task of this queue.
    pub(super) fn id(&self, task: &TaskRef) -> Result<TaskId> {
        let TaskRef { queue, version, index, generation } = task;
        if (queue.as_str(), *version) == (self.name(), self.inputs.version()) {
            return Ok(TaskId { index: *index, generation: *generation });
        }
        let why = format!("it is version {} of its name, and {task} is a task of another queue", self.inputs.version());
        Err(Mismatch::Options { of: Named::Queue, name: self.name().to_owned(), why }.into())
    }
}

impl OpenQueue {
    /// Returns the result of a task that was taken. `is_exposed` says whether its GPU address was handed out.
    pub(super) fn result(&self, id: TaskId, taken: shm::TakenResult, is_exposed: bool) -> TaskResult {
        let attempt = taken.attempt;
        let block = |held| {
            let block = Block::exposed(self.outputs.clone(), held, is_exposed).of_output(taken.contents);
            if !taken.viewed {
                return block;
            }
            let control = self.control.clone();
            let release = move |held: &_| control.queue.release_output(control.pools(), id, attempt, held);
            block.released_by(Box::new(release))
        };
        TaskResult { output: taken.output.map(block), attempt }
    }
}

impl TaskResult {
    /// Returns the output that the worker has written, with its length, type and shape; `None` if the task has none.
    pub fn output(&self) -> Option<&Block> {
        self.output.as_ref()
    }

    /// Returns the block that the worker has written, and gives it to the caller.
    pub fn into_output(self) -> Option<Block> {
        self.output
    }

    /// Returns the bytes of the output: as many as the submitter asked for, unless the worker wrote less.
    pub fn bytes(&self) -> u64 {
        self.output.as_ref().map_or(0, Block::len)
    }

    /// Returns the number of the attempt that succeeded, from 1.
    pub fn attempt(&self) -> u8 {
        self.attempt
    }
}

impl TaskStatus {
    pub(super) fn of(state: shm::TaskState) -> Self {
        match state {
            shm::TaskState::Pending => Self::Pending,
            shm::TaskState::Claimed { attempt, .. } => Self::Claimed { attempt },
            shm::TaskState::Enqueued { attempt, .. } => Self::Enqueued { attempt },
            shm::TaskState::Done => Self::Done,
            shm::TaskState::Dead => Self::Dead,
            shm::TaskState::Gone => Self::Gone,
        }
    }

    /// Returns the name that programs see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Claimed { .. } => "claimed",
            Self::Enqueued { .. } => "enqueued",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Gone => "gone",
        }
    }
}
