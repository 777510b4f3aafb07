//! Queues of tasks, and tickets.

use std::{sync::Arc, time::Duration};

use partywall::{Error, Place, QueueOptions, TaskStatus, Unsubmitted, Wait, WhenSome};
use pyo3::prelude::*;

use crate::{
    arguments::{Attempts, Bytes, Cancels, Count, Kind, Name, Needs, Places, QueueBlocks, Room, named_place},
    attachment::{Attachment, Given},
    block::Block,
    domain::Connection,
    errors::{Raise, closed, input_twice},
    handle::{Closing, Handle},
    members::Withdrawal,
    segment::Segment,
    stream::Stream,
    task::{ClaimedTask, Claims},
    ticket::Ticket,
    value::value,
    wait,
};

/// A task to be submitted: kind, inputs if there are any, output, arguments, attempts, and whether it ends
/// with its submitter.
type Request<'py> = (Kind, Option<Vec<Given<'py>>>, Room, Bytes<'py>, Attempts, Cancels);

value! {
    /// A listed task.
    TaskInfo, "partywall._queue", "TaskInfo", {
        task: String, status: &'static str, kind: String, attempts: u8, max_attempts: u8, age: f64,
        failures: Vec<(u8, String)>, text: String,
    }
}

value! {
    /// Counts of a queue.
    QueueStats, "partywall._queue", "QueueStats", {
        pending: u32, claimed: u32, enqueued: u32, done: u32, dead: u32, free: u32, completed: u64,
        returned: u64, free_inputs: u32, free_outputs: u32, attached: u32,
    }
}

/// The compiled part of `partywall.Queue`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Queue {
    inner: Handle<Arc<partywall::Queue>>,
    /// Ends the waits of tickets, too.
    closing: Closing,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// The version. A queue that is removed and created again has another one.
    #[pyo3(get)]
    version: u64,
    /// How many tasks and results fit into the queue.
    #[pyo3(get)]
    capacity: u32,
    /// Bytes of each output block.
    #[pyo3(get)]
    output_bytes: u64,
    /// Seconds that an attempt may take unless the worker extends it; `None` if attempts have no time limit.
    #[pyo3(get)]
    lease: Option<f64>,
    /// `host`, the UUID of the GPU that has the blocks, or `pinned:N`.
    #[pyo3(get)]
    place: String,
}

impl Queue {
    /// Claims a task; `None` if none comes within the timeout.
    pub(crate) fn claim_within(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<ClaimedTask>> {
        let queue = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        // With the GIL: the call takes less time than handing the GIL over.
        if let Some(task) = queue.try_claim().or_raise(py)? {
            return Ok(Some(ClaimedTask::new(queue, task)));
        }
        let task = self.inner.for_turn(py, timeout, |wait| match queue.claim(wait) {
            Err(Error::Timeout { .. }) => Ok(None),
            claimed => claimed.map(Some),
        })?;
        Ok(task.map(|task| ClaimedTask::new(queue, task)))
    }

    /// Submits tasks by `submit`, and puts the blocks of refused tasks back. Returns the tickets of the others, and the
    /// error.
    fn submit_by(
        &self,
        py: Python<'_>,
        queue: &Arc<partywall::Queue>,
        Tasks { tasks, handles }: Tasks<'_>,
        timeout: Duration,
        submit: impl FnOnce(Vec<partywall::Task>, Wait<'_>) -> Result<Vec<partywall::Ticket>, Box<Unsubmitted>> + Send,
    ) -> (Vec<Ticket>, Option<PyErr>) {
        let mut refused = None;
        let mut submitted = Vec::new();
        let waited = self.inner.for_turn(py, timeout, |wait| {
            submitted = submit(tasks, wait).unwrap_or_else(|unsubmitted| {
                let Unsubmitted { error, tasks, submitted } = *unsubmitted;
                refused = Some((error, tasks));
                submitted
            });
            Ok(())
        });
        let error = refused.map(|(error, tasks)| {
            Tasks { tasks, handles }.put_back(queue);
            error
        });
        let error = error.map(Err::<(), _>).and_then(|error| error.or_raise(py).err());
        let tickets =
            submitted.into_iter().map(|ticket| Ticket::new(queue.clone(), ticket, self.closing.clone())).collect();
        // A signal that ended the wait takes precedence: it is the reason why tasks were refused.
        (tickets, waited.err().or(error))
    }
}

/// Tasks that Python submits.
struct Tasks<'py> {
    tasks: Vec<partywall::Task>,
    /// The blocks that the inputs were taken from.
    handles: Vec<Bound<'py, Block>>,
}

impl<'py> Tasks<'py> {
    /// Takes the blocks of all requests, or of none.
    fn of(
        py: Python<'py>,
        queue: &partywall::Queue,
        requests: impl IntoIterator<Item = Request<'py>>,
    ) -> PyResult<Self> {
        let mut all = Self { tasks: Vec::new(), handles: Vec::new() };
        for (Kind(kind), inputs, output, Bytes(arguments), Attempts(attempts), Cancels(cancels)) in requests {
            let arguments = arguments.as_bytes();
            let task = partywall::Task::new(&kind).arguments(arguments).max_attempts(attempts);
            let task = match &output {
                Room::Bytes(bytes) => task.output(*bytes),
                Room::Tensor(shape, dtype) => task.output_tensor(*dtype, shape),
            };
            let mut task = task.cancel_with_submitter(cancels);
            let mut failed = None;
            for input in inputs.into_iter().flatten() {
                let error = match input {
                    Given::Tensor(ref handle, ..) | Given::Block(ref handle)
                        if all.handles.iter().any(|taken| taken.is(handle)) =>
                    {
                        input_twice(py, queue.name())
                    }
                    Given::Part(part) => match part.get().part(py) {
                        Ok(part) => {
                            task = task.part(part);
                            continue;
                        }
                        Err(error) => error,
                    },
                    Given::Tensor(handle, offset, dtype, shape) => match handle.get().take_block(py) {
                        Ok(mut block) => {
                            let limited = block.set_range(offset..).and_then(|()| block.set_tensor(dtype, &shape));
                            task = task.input(block);
                            all.handles.push(handle);
                            match limited.or_raise(py) {
                                Ok(()) => continue,
                                Err(error) => error,
                            }
                        }
                        Err(error) => error,
                    },
                    Given::Block(handle) => match handle.get().take_block(py) {
                        Ok(block) => {
                            task = task.input(block);
                            all.handles.push(handle);
                            continue;
                        }
                        Err(error) => error,
                    },
                };
                failed = Some(error);
                break;
            }
            all.tasks.push(task);
            if let Some(error) = failed {
                all.put_back(queue);
                return Err(error);
            }
        }
        Ok(all)
    }

    /// Puts the inputs of the last tasks back into their blocks.
    fn put_back(self, queue: &partywall::Queue) {
        let blocks: Vec<_> = self.tasks.into_iter().flat_map(partywall::Task::into_inputs).collect();
        for (handle, block) in self.handles[self.handles.len() - blocks.len()..].iter().zip(blocks) {
            handle.get().put_block_back(queue.inputs(), block);
        }
    }
}

impl Queue {
    /// Returns the queue, unless it is closed.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<partywall::Queue>> {
        self.inner.get(py)
    }
}

#[pymethods]
impl Queue {
    /// Opens a queue. If numbers are given, creates it if it does not exist.
    #[new]
    #[pyo3(signature = (domain, name, tasks, inputs, outputs, lease, device, access, *, kept, shared, timeout))]
    fn new(
        py: Python<'_>,
        domain: Connection<'_>,
        name: Name,
        tasks: Option<Places>,
        inputs: Option<(QueueBlocks, Count)>,
        outputs: Option<(QueueBlocks, Count)>,
        lease: Option<f64>,
        device: Option<&str>,
        access: Option<Needs>,
        kept: bool,
        shared: bool,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let connection = domain.get(py)?;
        let makes = tasks.is_some() || inputs.is_some() || outputs.is_some();
        let timeout = wait::creation(timeout, makes)?;
        let lease = lease.map(|lease| wait::timeout(Some(lease))).transpose()?;
        let mut options = connection.queue(&name.0).kept(kept).shared(shared);
        options = options
            .when_some(tasks, |options, Places(tasks)| options.tasks(tasks))
            .when_some(inputs, |options, (QueueBlocks(blocks), Count(bytes))| options.inputs(blocks, bytes))
            .when_some(outputs, |options, (QueueBlocks(blocks), Count(bytes))| options.outputs(blocks, bytes))
            .when_some(lease, QueueOptions::lease)
            .when_some(access, |options, Needs(access)| options.access(access));
        options = match named_place(py, device)? {
            Some(Place::Gpu(uuid)) if !makes => options.device(uuid),
            Some(place) => options.place(place),
            None => options,
        };
        let queue = domain.in_slices(py, timeout, |slice| {
            let options = options.clone().timeout(slice);
            if makes { options.open_or_create() } else { options.open() }
        })?;
        let name = queue.name().to_owned();
        let version = queue.version();
        let capacity = queue.capacity();
        let output_bytes = queue.output_bytes();
        let lease = queue.lease().map(|lease| lease.as_secs_f64());
        let place = queue.place().to_string();
        let inner = Handle::new("queue", Arc::new(queue));
        let closing = Closing::new("queue");
        Ok(Self { inner, closing, name, version, capacity, output_bytes, lease, place })
    }

    /// Submits a task. With a stream, that stream completes the inputs. Blocks of a refused task stay the caller's.
    fn _submit(
        &self,
        py: Python<'_>,
        kind: Kind,
        inputs: Option<Vec<Given<'_>>>,
        output: Room,
        args: Bytes<'_>,
        max_attempts: Attempts,
        on_death: Cancels,
        stream: Option<(String, Option<u64>)>,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let queue = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let stream = stream.map(|(device, handle)| Stream::find(py, queue.domain(), &device, handle)).transpose()?;
        let mut tasks = Tasks::of(py, &queue, [(kind, inputs, output, args, max_attempts, on_death)])?;
        if stream.is_none()
            && let Some(task) = tasks.tasks.pop()
        {
            // With the GIL: the call takes less time than handing the GIL over.
            match queue.try_submit(task) {
                Ok(ticket) => return Ok(Ticket::new(queue, ticket, self.closing.clone())),
                // The next attempt reports the reason, or waits for a slot.
                Err(refused) => tasks.tasks = refused.tasks,
            }
        }
        let (mut tickets, error) = self.submit_by(py, &queue, tasks, timeout, |tasks, wait| {
            let mut tickets = Vec::new();
            for task in tasks {
                tickets.push(match &stream {
                    None => queue.submit(task, wait)?,
                    Some(stream) => queue.submit_on(task, stream.borrow(), wait)?,
                });
            }
            Ok(tickets)
        });
        match (error, tickets.pop()) {
            (None, Some(ticket)) => Ok(ticket),
            (error, _) => Err(error.unwrap_or_else(|| closed(py, "queue"))),
        }
    }

    /// Submits tasks and wakes workers once. Returns the tickets of submitted tasks, and the error that ended the call.
    fn _submit_all(
        &self,
        py: Python<'_>,
        tasks: Vec<Request<'_>>,
        timeout: Option<f64>,
    ) -> PyResult<(Vec<Ticket>, Option<Py<PyAny>>)> {
        let queue = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let tasks = Tasks::of(py, &queue, tasks)?;
        let (tickets, error) = self.submit_by(py, &queue, tasks, timeout, |tasks, wait| queue.submit_all(tasks, wait));
        Ok((tickets, error.map(|error| error.into_value(py).into_any())))
    }

    /// Claims the oldest task. Waits for a task up to `timeout` seconds, or for ever.
    ///
    /// Raises `OutputsFull` if there are tasks, but results that were not taken occupy all output blocks. If arrays of
    /// ended tasks of this process keep all of them, raises it without waiting for the timeout; if they keep all slots
    /// or input blocks, `StillUsed`.
    #[pyo3(signature = (timeout = None))]
    fn claim(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<ClaimedTask> {
        let queue = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        // As in `claim_within`.
        let task = match queue.try_claim().or_raise(py)? {
            Some(task) => task,
            None => self.inner.for_turn(py, timeout, |wait| queue.claim(wait))?,
        };
        Ok(ClaimedTask::new(queue, task))
    }

    /// Claims up to `most` tasks, and waits for the first.
    fn _claim_all(&self, py: Python<'_>, most: usize, timeout: Option<f64>) -> PyResult<Vec<ClaimedTask>> {
        let queue = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let tasks = self.inner.for_turn(py, timeout, |wait| queue.claim_all(most, wait))?;
        Ok(tasks.into_iter().map(|task| ClaimedTask::new(queue.clone(), task)).collect())
    }

    /// Claims one task after another. Waits for each up to `timeout` seconds, or for ever; ends when none comes in time.
    ///
    ///     for task in queue.claims():
    ///         ...                             # the end of the body completes the task
    ///
    /// Requesting the next task completes the one before, unless it is already completed or failed. An exception that
    /// leaves the body of the loop fails the task, with its text as the reason. After `break` or `return` the caller
    /// still has the task: complete it, or it goes to another worker when it is dropped. Each thread calls `claims` for
    /// itself.
    #[pyo3(signature = (timeout = None))]
    fn claims(slf: Py<Self>, timeout: Option<f64>) -> Claims {
        Claims::new(slf, timeout)
    }

    /// Returns the ticket of a task that any process has submitted.
    fn ticket(&self, py: Python<'_>, task: &str) -> PyResult<Ticket> {
        let queue = self.inner.get(py)?;
        let ticket = task.parse().and_then(|task| queue.ticket(&task)).or_raise(py)?;
        Ok(Ticket::new(queue, ticket, self.closing.clone()))
    }

    /// Has the queue hold a segment, so that tasks can name parts of it.
    fn _attach(&self, py: Python<'_>, segment: &Segment) -> PyResult<Attachment> {
        let queue = self.inner.get(py)?;
        segment.with(py, |_, segment| Attachment::new(&queue, segment))
    }

    /// As `_attach`, of a name or `NAME@V`.
    fn _attach_name(&self, py: Python<'_>, name: Name) -> PyResult<Attachment> {
        let queue = self.inner.get(py)?;
        let attach = || Attachment::new(&queue, &queue.domain().opener(&name.0).open()?);
        py.detach(attach).or_raise(py)
    }

    /// Ends an attachment once no task names it. Waits up to `timeout` seconds, or for ever; then raises `SegmentInUse`.
    ///
    /// Dead letters also name it. Raises `NotAttached` if it was already detached.
    #[pyo3(signature = (attachment, timeout = None))]
    fn detach(&self, py: Python<'_>, attachment: &Attachment, timeout: Option<f64>) -> PyResult<()> {
        let queue = self.inner.get(py)?;
        let attachment = attachment.attachment(py)?;
        let timeout = wait::timeout(timeout)?;
        self.inner.for_turn(py, timeout, |wait| queue.detach(&attachment, wait))
    }

    /// Makes a dead letter pending again, with as many attempts as it was submitted with, up to 255 in all.
    ///
    /// Raises `WrongTaskState` for other tasks, and for one that had 255 attempts.
    fn retry(&self, py: Python<'_>, task: &str) -> PyResult<()> {
        let queue = self.inner.get(py)?;
        task.parse().and_then(|task| queue.retry(&task)).or_raise(py)
    }

    /// Drops a result that was not taken, or a dead letter. Raises `WrongTaskState` for other tasks.
    fn purge(&self, py: Python<'_>, task: &str) -> PyResult<()> {
        let queue = self.inner.get(py)?;
        task.parse().and_then(|task| queue.purge(&task)).or_raise(py)
    }

    /// Lists the tasks in the queue.
    fn _tasks(&self, py: Python<'_>, most: usize, status: Option<&str>) -> PyResult<Vec<TaskInfo>> {
        let queue = self.inner.get(py)?;
        let is_asked = |of: TaskStatus| status.is_none_or(|status| of.name() == status);
        let tasks = py.detach(|| queue.tasks(most, is_asked));
        let row = |info: partywall::TaskInfo| {
            let failures = info.failures.iter().map(|(attempt, reason)| (*attempt, reason.to_string())).collect();
            TaskInfo {
                task: info.task.to_string(),
                status: info.status.name(),
                kind: info.kind,
                attempts: info.attempts,
                max_attempts: info.max_attempts,
                age: info.age.as_secs_f64(),
                failures,
                text: info.text,
            }
        };
        Ok(tasks.into_iter().map(row).collect())
    }

    /// Counts what is in the queue.
    fn stats(&self, py: Python<'_>) -> PyResult<QueueStats> {
        let queue = self.inner.get(py)?;
        let s = py.detach(|| queue.stats());
        Ok(QueueStats {
            pending: s.pending,
            claimed: s.claimed,
            enqueued: s.enqueued,
            done: s.done,
            dead: s.dead,
            free: s.free,
            completed: s.completed,
            returned: s.returned,
            free_inputs: s.free_inputs,
            free_outputs: s.free_outputs,
            attached: s.attached,
        })
    }

    /// Waits up to `timeout` seconds, or for ever, until the name is removed or its owner ends.
    ///
    /// A newer version does not end the wait. Returns the withdrawal if this process has a deadline to drop the object.
    #[pyo3(signature = (timeout = None))]
    fn wait_withdrawn(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Withdrawal>> {
        let notice = self.inner.wait(py, timeout, |queue, slice| queue.wait_withdrawn(slice))?;
        Ok(notice.map(Withdrawal::from))
    }

    /// Raises `Withdrawn` once the deadline of a withdrawal with `then="stale"` has passed.
    ///
    /// Raises `DeviceLost` once the GPU has lost the memory.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.get(py)?.check().or_raise(py)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the handle, and ends the waits for its tasks. Tasks, tickets and blocks stay. Calling it again does
    /// nothing.
    fn close(&self, py: Python<'_>) {
        self.closing.close();
        self.inner.close(py);
    }
}
