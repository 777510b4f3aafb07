//! Tasks, and submitting them.

use std::fmt;

use partywall_cuda::StreamRef;
use partywall_shm::{
    DType, members,
    queue::{
        Contents, MAX_ARGUMENTS, MAX_ATTEMPTS, MAX_INPUTS, MAX_KIND, NewInput, NewTask, NotSubmitted, QueueCondition,
        Reserved, StreamPoint,
    },
};
use partywall_wire::Named;

use super::{OpenQueue, Queue, SegmentPart, Ticket};
use crate::{
    error::{self, Busy, Error, Gone, InvalidArgument, Mismatch, Result},
    pool::{self, Block},
    recorder::Action,
    wait::{Wait, Waiting},
};

/// A task to submit: the kind of work, its inputs, and the size of its output.
#[derive(Debug)]
#[must_use = "a task does nothing until it is submitted"]
pub struct Task {
    kind: String,
    arguments: Vec<u8>,
    inputs: Vec<NamedInput>,
    output: Option<Output>,
    max_attempts: u8,
    cancel: bool,
}

/// An input of a task to submit.
#[derive(Debug)]
enum NamedInput {
    Block(Block),
    Part(SegmentPart),
}

/// The output of a task to submit.
#[derive(Debug)]
enum Output {
    Bytes(u64),
    Tensor(DType, Vec<u64>),
}

/// A task that could not be submitted.
#[derive(thiserror::Error)]
#[error("{} of {} tasks were not submitted: {error}", tasks.len(), tasks.len() + submitted.len())]
pub struct Unsubmitted {
    /// The reason.
    #[source]
    pub error: Error,
    /// The tasks that were not submitted, with their blocks. The tasks before them were submitted: their tickets are in
    /// [`submitted`](Self::submitted).
    pub tasks: Vec<Task>,
    /// The tickets of the tasks that were submitted.
    pub submitted: Vec<Ticket>,
}

impl fmt::Debug for Unsubmitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f.debug_struct("Unsubmitted").field("error", &self.error).finish_non_exhaustive();
        }
        error::with_advice(f, self, &self.error)
    }
}

impl From<Box<Unsubmitted>> for Error {
    fn from(failed: Box<Unsubmitted>) -> Self {
        failed.error
    }
}

impl Task {
    /// Returns a task of a kind that workers know, such as `sqrt`: at most 32 bytes. It has no inputs, no arguments and
    /// no output, and may be attempted 3 times.
    pub fn new(kind: &str) -> Self {
        let kind = kind.to_owned();
        Self { kind, arguments: Vec::new(), inputs: Vec::new(), output: None, max_attempts: ATTEMPTS, cancel: false }
    }

    /// Adds an input: a block of the queue's [inputs](Queue::inputs), or the [range](Block::set_range) or the
    /// [tensor](Block::set_tensor) in it that was set. A task has at most 8 inputs. Workers read it
    /// in place. It is free again once the task is done and no attempt may read it any more.
    pub fn input(mut self, block: Block) -> Self {
        self.inputs.push(NamedInput::Block(block));
        self
    }

    /// Adds an input: a part of a segment that is [attached](Queue::attach) to the queue. Blocks and parts keep the
    /// order in which they are added, and are at most 8 together. Workers read the part in place.
    pub fn part(mut self, part: SegmentPart) -> Self {
        self.inputs.push(NamedInput::Part(part));
        self
    }

    /// Sets the arguments for the worker, at most 512 bytes.
    pub fn arguments(mut self, bytes: &[u8]) -> Self {
        self.arguments = bytes.to_vec();
        self
    }

    /// Sets the bytes of output that each attempt gets room for; 0 means no output.
    pub fn output(mut self, bytes: u64) -> Self {
        self.output = (bytes > 0).then_some(Output::Bytes(bytes));
        self
    }

    /// Has each attempt get room for an output of this type and shape, which the result has, too.
    pub fn output_tensor(mut self, dtype: DType, shape: &[u64]) -> Self {
        self.output = Some(Output::Tensor(dtype, shape.to_vec()));
        self
    }

    /// Sets how often the task may be attempted before it becomes a dead letter: 1 to 255.
    pub fn max_attempts(mut self, attempts: u8) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// Sets whether the task ends when its submitter dies or closes the queue: a pending task is cancelled, and the
    /// result of any other is dropped. False by default.
    pub fn cancel_with_submitter(mut self, cancel: bool) -> Self {
        self.cancel = cancel;
        self
    }

    /// Returns the blocks among the inputs of a task that was not submitted.
    pub fn into_inputs(self) -> Vec<Block> {
        self.inputs.into_iter().filter_map(NamedInput::into_block).collect()
    }

    /// Returns what the output contains.
    fn contents(&self, open: &OpenQueue) -> Result<Option<Contents>> {
        Ok(match &self.output {
            None => None,
            Some(Output::Bytes(bytes)) => Some(Contents::of_bytes(*bytes)),
            Some(Output::Tensor(dtype, shape)) => Some(pool::tensor(open.name(), *dtype, shape)?),
        })
    }

    /// Refuses a task that is invalid, or that does not fit this queue.
    fn check(&self, open: &OpenQueue) -> Result<()> {
        let Self { kind, arguments, inputs, .. } = self;
        let name = || format!("task {kind:?} for queue {:?}", open.name());
        let limits = [
            ("a kind of", kind.len(), MAX_KIND, "bytes"),
            ("arguments of", arguments.len(), MAX_ARGUMENTS, "bytes"),
            ("", inputs.len(), MAX_INPUTS, "inputs"),
        ];
        for (what, has, most, unit) in limits {
            if has > most {
                let why = format!("a task has {what} at most {most} {unit}, not {has}").replace("  ", " ");
                return Err(InvalidArgument::task(name(), why));
            }
        }
        if !(1..=MAX_ATTEMPTS).contains(&self.max_attempts) {
            return Err(InvalidArgument::task(name(), "a task is attempted at least once"));
        }
        let has = open.outputs.shape().block_bytes;
        let needed = self.contents(open)?.map_or(0, |output| output.bytes());
        if needed > has {
            let name = open.name().to_owned();
            return Err(Mismatch::BlockSize { name, of: Named::Queue, has, needed }.into());
        }
        inputs.iter().try_for_each(|input| match input {
            NamedInput::Block(block) if !block.is_of(&open.inputs) => {
                Err(open.refuses(format!("{block:?} is a block of another pool; take inputs from inputs()")))
            }
            NamedInput::Block(_) => Ok(()),
            NamedInput::Part(part) => open.check_attachment(part.attachment()),
        })
    }
}

impl Queue {
    /// Submits a task, and waits until the queue has room for it. The inputs were written by the CPU, or by streams
    /// that were waited for.
    ///
    /// A free slot is enough, also while results that were not taken occupy all output blocks: the task needs an
    /// output block only when a worker claims it.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// use partywall::{Error, Queue, Task, error::Busy};
    ///
    /// # fn submit(queue: &Queue, second: Duration) -> partywall::Result<()> {
    /// let mut input = queue.inputs().alloc(second)?;
    /// input.as_mut_slice::<f32>()?.fill(49.0);
    /// let task = Task::new("sqrt").input(input).output(queue.input_bytes());
    /// match queue.submit(task, second) {
    ///     Ok(ticket) => println!("submitted {}", ticket.task()),
    ///     Err(refused) => match refused.error {
    ///         // The task has come back with its input, to be submitted later.
    ///         Error::Busy(Busy::QueueFull { results, .. }) => {
    ///             println!("{results} results were not taken; {} task waits", refused.tasks.len());
    ///         }
    ///         error => return Err(error),
    ///     },
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `submit_async` blocks none.
    ///
    /// # Errors
    /// The error contains the task. [`Busy::QueueFull`], which counts the results that were not taken;
    /// [`Error::Cancelled`]; [`InvalidArgument::Task`] for a task that is too long; [`Mismatch::BlockSize`] for an
    /// output larger than the queue's; [`Mismatch::Options`] for blocks of another pool or queue; [`Gone::Attachment`]
    /// for a part of a segment that was detached; [`Unreachable::Gone`](crate::error::Unreachable::Gone) if it has to
    /// wait without a broker; [`Gone::HeldBlock`] if the broker took this process for dead and gave a block to another
    /// process; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn submit<'w>(&self, task: Task, wait: impl Into<Wait<'w>>) -> Result<Ticket, Box<Unsubmitted>> {
        self.submit_at([task], None, Some(wait.into())).map(|mut tickets| tickets.swap_remove(0))
    }

    /// Submits a task if the queue has room for it. Does not wait.
    ///
    /// On a full queue this reads all slots: for some microseconds with the default of 1,024 tasks, for a fraction of
    /// a millisecond with 131,072.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), except those of waiting.
    pub fn try_submit(&self, task: Task) -> Result<Ticket, Box<Unsubmitted>> {
        self.submit_at([task], None, None).map(|mut tickets| tickets.swap_remove(0))
    }

    /// Submits a task whose inputs are complete once all work that is on `stream` now is done. Does not wait for that:
    /// workers order their streams behind it ([`ClaimedTask::wait_inputs_on`](super::ClaimedTask::wait_inputs_on)). If
    /// this process dies before that, the task becomes a dead letter.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`TimelineWriter::signal_on`](crate::TimelineWriter::signal_on).
    pub fn submit_on<'w>(
        &self,
        task: Task,
        stream: StreamRef<'_>,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Ticket, Box<Unsubmitted>> {
        let ready = match self.open.signal_on(stream) {
            Ok((_, point)) => point,
            Err(error) => return Err(Box::new(Unsubmitted { error, tasks: vec![task], submitted: Vec::new() })),
        };
        self.submit_at([task], Some(ready), Some(wait.into())).map(|mut tickets| tickets.swap_remove(0))
    }

    /// Submits several tasks in order, and wakes workers once.
    ///
    /// # Errors
    /// As [`submit`](Self::submit). The tasks before the one that failed are submitted.
    pub fn submit_all<'w>(
        &self,
        tasks: impl IntoIterator<Item = Task>,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Vec<Ticket>, Box<Unsubmitted>> {
        self.submit_at(tasks.into_iter().collect::<Vec<_>>(), None, Some(wait.into()))
    }

    fn submit_at(
        &self,
        tasks: impl IntoIterator<Item = Task, IntoIter: ExactSizeIterator>,
        ready: Option<StreamPoint>,
        wait: Option<Wait<'_>>,
    ) -> Result<Vec<Ticket>, Box<Unsubmitted>> {
        let _span = tracing::trace_span!("submit", queue = self.name()).entered();
        let mut tasks = tasks.into_iter();
        // Waking a worker takes several times as long as submitting a task, and the tasks are there by the time the
        // worker runs. But a call that finds the queue full must wake none, because it may be repeated in a loop.
        let mut to_wake = tasks.len();
        let mut submitted = Vec::with_capacity(tasks.len());
        let mut waiting = None;
        let mut failed = None;
        for mut task in tasks.by_ref() {
            // Repeated only while other processes try to detach a segment that the task names.
            let put = loop {
                let slot = self.reserve(&task, wait, &mut waiting);
                if slot.is_ok() {
                    self.open.queue().notify_workers(std::mem::take(&mut to_wake));
                }
                match slot.and_then(|slot| self.put(slot, &mut task, ready)) {
                    Ok(None) => {}
                    Ok(Some(ticket)) => break Ok(ticket),
                    Err(error) => break Err(error),
                }
            };
            match put {
                Ok(ticket) => submitted.push(ticket),
                Err(error) => {
                    failed = Some((error, task));
                    break;
                }
            }
        }
        if !submitted.is_empty() {
            self.open.queue().notify_workers(submitted.len());
        }
        match failed {
            None => Ok(submitted),
            Some((error, task)) => {
                let tasks = std::iter::once(task).chain(tasks).collect();
                Err(Box::new(Unsubmitted { error, tasks, submitted }))
            }
        }
    }

    /// Reserves a slot for a task. Waits for one if there is a `wait`; `waiting` is set once that has begun.
    fn reserve<'w>(&self, task: &Task, wait: Option<Wait<'w>>, waiting: &mut Option<Waiting<'w>>) -> Result<Reserved> {
        self.open.require_ours()?;
        self.open.inputs.check()?;
        task.check(&self.open)?;
        let row = self.domain().link().row();
        if let Some(slot) = self.open.queue().reserve(row) {
            return Ok(slot);
        }
        let Some(wait) = wait else { return Err(self.full()) };
        // Workers must know of the earlier tasks of this call, because those may fill the queue.
        self.open.queue().notify_workers(usize::MAX);
        let waiting = waiting.get_or_insert_with(|| wait.begin());
        let slot =
            self.open.await_event(QueueCondition::Space, &self.spin, waiting, || Ok(self.open.queue().reserve(row)))?;
        slot.ok_or_else(|| match waiting.was_cancelled() {
            true => waiting.error(format!("cannot submit to queue {:?}: no slot became free", self.name())),
            false => self.full(),
        })
    }

    /// Puts a task into a slot. Returns `None` if another slot is needed.
    fn put(&self, slot: Reserved, task: &mut Task, ready: Option<StreamPoint>) -> Result<Option<Ticket>> {
        // Once the task is pending, other threads of this process may read the blocks or own them.
        task.inputs.iter_mut().for_each(NamedInput::end_use);
        let held = task.inputs.iter().map(NamedInput::as_new).collect::<Result<Vec<_>>>();
        let (held, output) = match held.and_then(|held| Ok((held, task.contents(&self.open)?))) {
            Ok(found) => found,
            Err(error) => {
                self.open.queue().give_back(slot);
                return Err(error);
            }
        };
        let Task { kind, arguments, max_attempts, cancel, .. } = task;
        let described = NewTask {
            kind: kind.as_bytes(),
            arguments,
            ready,
            output,
            max_attempts: *max_attempts,
            cancel: *cancel,
            now: members::now(),
        };
        let control = &self.open.control;
        let since = control.recorder.begin();
        match control.queue.submit(&control.inputs, slot, &described, &held) {
            Ok(id) => {
                control.record(Action::Submit, id, 0, since);
                drop(held);
                for block in task.inputs.drain(..).filter_map(NamedInput::into_block) {
                    // The block belongs to the queue now.
                    let _ = block.into_held();
                }
                Ok(Some(Ticket::new(self.open.clone(), id)))
            }
            Err(NotSubmitted::Detached(attachment)) => match self.open.is_attached(attachment)? {
                true => Ok(None),
                false => Err(Gone::Attachment { queue: self.name().to_owned(), attachment }.into()),
            },
            // The broker has taken the slot back, so its answer gives the reason.
            Err(NotSubmitted::Lost) => {
                self.domain().ping()?;
                Err(self.full())
            }
        }
    }

    fn full(&self) -> Error {
        let queue = self.name().to_owned();
        let tasks = self.capacity();
        let results = self.open.queue().unread();
        let outputs_full = self.open.results_fill_outputs();
        let (kept, _) = self.open.control.kept.inputs();
        Busy::QueueFull { queue, tasks, results, outputs_full, kept }.into()
    }
}

impl NamedInput {
    fn end_use(&mut self) {
        if let Self::Block(block) = self {
            block.end_use();
        }
    }

    fn as_new(&self) -> Result<NewInput<'_>> {
        match self {
            Self::Block(block) => {
                let (offset, contents) = block.contents();
                block.held().map(|held| NewInput::Block(held, offset, contents))
            }
            Self::Part(part) => Ok(NewInput::Part(part.named())),
        }
    }

    fn into_block(self) -> Option<Block> {
        if let Self::Block(block) = self { Some(block) } else { None }
    }
}

const ATTEMPTS: u8 = 3;
