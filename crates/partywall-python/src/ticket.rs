//! Tickets of submitted tasks, and results. Python uses these classes themselves, as it does
//! [`Sample`](crate::sample::Sample).

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{DType, Error, Place, Queue, Wait, error::InvalidData};
use partywall_os::{lock::IgnorePoison, process::fork_generation};
use pyo3::{
    PyTypeInfo,
    exceptions::{PyTypeError, PyValueError},
    inspect::PyStaticExpr,
    intern,
    prelude::*,
    sync::PyOnceLock,
    type_hint_identifier, type_hint_subscript,
    types::{PyBytes, PyTuple},
};

use crate::{
    arguments::{ElementType, Optional, Shape},
    block::Block,
    enqueued::EnqueuedResult,
    errors::{Never, Raise, closed, exception, unclosed},
    exported::{Export, Exported},
    handle::{Closing, Handle},
    hint::{Hint, Hinted},
    owner::Owner,
    reaper::Late,
    stream::Stream,
    tensor::Tensor,
    value::Tuple,
    wait,
};

/// A submitted task. Dropping the ticket changes nothing. `await` it, or call `result`.
#[pyclass(frozen, module = "partywall", weakref)]
pub(crate) struct Ticket {
    /// Dropped before the queue.
    ticket: partywall::Ticket,
    queue: Late<Queue>,
    /// Closing the queue's handle ends the waits of its tickets.
    closing: Closing,
    /// True if the result was taken through this ticket.
    succeeded: AtomicBool,
}

impl Ticket {
    pub(crate) fn new(queue: Arc<Queue>, ticket: partywall::Ticket, closing: Closing) -> Self {
        Self { ticket, queue: Late::new(queue), closing, succeeded: AtomicBool::new(false) }
    }

    /// Waits for the task, until a signal comes or the queue is closed.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        wait: impl FnOnce(Wait<'_>) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let ending = self.closing.begin();
        wait::for_turn(py, timeout, |py| ending.check(py), wait)
    }
}

#[pymethods]
impl Ticket {
    /// The task, for other processes: `Queue.ticket` takes it.
    #[getter]
    fn task(&self) -> String {
        self.ticket.task().to_string()
    }

    /// `pending`, `claimed`, `enqueued`, `done`, `dead` or `gone`.
    #[getter]
    fn status(&self) -> &'static str {
        self.ticket.status().name()
    }

    /// Waits until the task is done, and takes its result. Raises `TaskFailed` for a dead letter, `TaskGone` if the
    /// task is over.
    #[pyo3(signature = (timeout = None))]
    fn result<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, TaskResult>> {
        let ticket = &self.ticket;
        let timeout = wait::timeout(timeout)?;
        // With the GIL: the call takes less time than handing the GIL over.
        let result = match ticket.try_take().or_raise(py)? {
            Some(result) => result,
            None => self.wait(py, timeout, |wait| ticket.wait(wait))?,
        };
        self.succeeded.store(true, Ordering::Relaxed);
        TaskResult::new(self.queue.clone(), result).into_object(py)
    }

    /// Has a stream wait until the worker's stream has completed the task, and returns the output, to be read on that
    /// stream.
    ///
    /// The host waits only until a worker has called `complete_on`. `stream` and `device` as for a `Timeline`. If the
    /// worker dies before its stream is done, `stream` goes on: `EnqueuedResult.take` proves that it has read the
    /// result.
    #[pyo3(signature = (stream = None, *, device = None, timeout = None))]
    fn wait_on<'py>(
        &self,
        py: Python<'py>,
        stream: Optional<'_, 'py>,
        device: Optional<'_, 'py>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, EnqueuedResult>> {
        let Self { ticket, queue, closing, .. } = self;
        if queue.place() == Place::Host {
            return Err(PyValueError::new_err("results in host memory are waited for by hosts: result()"));
        }
        let timeout = wait::timeout(timeout)?;
        let stream = Stream::at(py, queue.domain(), stream, device)?;
        let result = self.wait(py, timeout, |wait| ticket.wait_on(stream.borrow(), wait))?;
        EnqueuedResult::new(queue, result, stream.id().1, closing.clone()).into_object(py)
    }

    /// Waits until the task is done, and leaves its result. Returns `None` if the task has succeeded, and `TaskFailed`
    /// for a dead letter. Raises `TaskGone` if the task was cancelled or purged, or another process has taken its
    /// result.
    #[pyo3(signature = (timeout = None))]
    fn exception<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Hinted<'py, Failure>>> {
        let timeout = wait::timeout(timeout)?;
        if self.succeeded.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let done = |wait: Wait<'_>| match self.ticket.wait_done(wait) {
            Err(failed @ Error::InvalidData(InvalidData::TaskFailed { .. })) => Ok(Some(failed)),
            done => done.map(|()| None),
        };
        let done = self.wait(py, timeout, done)?;
        Ok(done.map(|failed| Hinted::new(exception(py, &failed).into_value(py).into_bound(py))))
    }

    /// Returns whether the task has a result, is a dead letter, or is over.
    fn done(&self) -> bool {
        matches!(self.status(), "done" | "dead" | "gone")
    }

    /// Cancels the task. Raises `TaskRunning` if a worker has it, `TaskGone` if it is over.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.ticket.cancel().or_raise(py)
    }

    /// Identifies the open queue, which all its tickets share.
    #[getter]
    fn _queue(&self) -> usize {
        Arc::as_ptr(&self.queue) as usize
    }

    /// Whether the queue is open.
    #[getter]
    fn _is_open(&self) -> bool {
        self.closing.is_open()
    }

    /// Raises if the queue was closed.
    fn _require_open(&self, py: Python<'_>) -> PyResult<()> {
        self.closing.check(py)
    }

    /// Returns a file descriptor that is readable when tasks of the queue have ended.
    fn _event(&self, py: Python<'_>) -> PyResult<QueueEvent> {
        let event = self.queue.event().or_raise(py)?;
        Ok(QueueEvent { event: Handle::new("event", Arc::new(event)) })
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<Hinted<'_, Awaiting>> {
        let py = slf.py();
        let awaited = py.import(intern!(py, "partywall._queue"))?.call_method1(intern!(py, "awaited"), (slf,))?;
        awaited.call_method0(intern!(py, "__await__")).map(Hinted::new)
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a ticket is this process's own: send its task"))
    }

    fn __repr__(&self) -> String {
        format!("<partywall.Ticket {}: {}>", self.task(), self.status())
    }
}

/// A file descriptor that signals the ends of tasks.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct QueueEvent {
    event: Handle<Arc<partywall::QueueEvent>>,
}

#[pymethods]
impl QueueEvent {
    /// The descriptor, to be polled for reading.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.event.get(py)?.as_fd().as_raw_fd())
    }

    /// Makes the descriptor unreadable until further tasks end. Raises `BrokerGone` if the broker has gone.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.event.get(py)?.clear().or_raise(py)
    }

    /// Closes the descriptor. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.event.close(py);
    }
}

/// A result that was taken. The end of its `with`, or `release`, gives the output block back.
///
/// It has the type and the shape that the submitter or the worker gave it, and `from_dlpack`, `np.asarray` and the like
/// take it so; `tensor` gives its beginning others.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct TaskResult {
    /// The output, until it is released or becomes a Python object.
    taken: Mutex<Option<partywall::Block>>,
    /// The output as a Python object, once it is needed in that form.
    block: PyOnceLock<Py<Block>>,
    queue: Late<Queue>,
    has_output: bool,
    /// The type of the elements, and how many along each dimension.
    described: (DType, Vec<u64>),
    /// Bytes of the output: as many as the submitter asked for, unless the worker wrote less.
    #[pyo3(get)]
    nbytes: u64,
    /// The number of the attempt that succeeded, from 1.
    #[pyo3(get)]
    attempt: u8,
    /// The fork generation of the take: in a forked child, the result belongs to the parent.
    generation: u64,
}

impl TaskResult {
    fn new(queue: Arc<Queue>, result: partywall::TaskResult) -> Self {
        let nbytes = result.bytes();
        let attempt = result.attempt();
        let output = result.into_output();
        Self {
            has_output: output.is_some(),
            described: output.as_ref().map_or((DType::U8, vec![0]), |output| (output.dtype(), output.shape().to_vec())),
            taken: Mutex::new(output),
            block: PyOnceLock::new(),
            queue: Late::new(queue),
            nbytes,
            attempt,
            generation: fork_generation(),
        }
    }

    /// Returns the result of a task whose output streams have read. `owner`, which tensors of the output share, keeps
    /// the block.
    pub(crate) fn of_enqueued(
        py: Python<'_>,
        queue: Arc<Queue>,
        result: partywall::TaskResult,
        owner: Arc<Owner>,
    ) -> PyResult<Self> {
        let this = Self::new(queue, result);
        let taken = this.taken.lock().ignore_poison().take();
        if let Some(taken) = taken {
            let block = Block::of_taken(py, this.queue.inputs(), owner, taken).into_object(py)?;
            // This cannot fail: no other thread knows this result yet.
            _ = this.block.set(py, block.unbind());
        }
        Ok(this)
    }

    /// Returns the output as a Python object.
    fn block<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, Block>> {
        let block = self.block.get_or_try_init(py, || {
            let taken = self.taken.lock().ignore_poison().take();
            let taken = taken.ok_or_else(|| closed(py, "result"))?;
            Block::new(self.queue.inputs(), taken).into_object(py).map(Bound::unbind)
        });
        block.map(|block| block.bind(py))
    }
}

impl Export for TaskResult {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py, None, None)
    }
}

#[pymethods]
impl TaskResult {
    /// The block that the worker has written; `None` for a task without output.
    #[getter]
    fn output<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, Block>>> {
        self.has_output.then(|| self.block(py).cloned()).transpose()
    }

    /// The type of the elements: `uint8` unless the submitter or the worker gave another one.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.described.0.name()
    }

    /// Elements along each dimension.
    #[getter]
    fn shape(&self) -> Tuple<u64> {
        Tuple(self.described.1.clone())
    }

    /// Returns the output as a tensor: with its type and shape, unless others are given. With another type and no
    /// shape, of as many elements as fit.
    #[pyo3(signature = (shape = None, dtype = None))]
    fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<Tensor> {
        if !self.has_output {
            return Err(without_output());
        }
        self.block(py)?.get().tensor(py, shape, dtype)
    }

    /// Returns a copy of the bytes, as `Tensor.tobytes`.
    #[pyo3(signature = (stream = None))]
    fn tobytes<'py>(&self, py: Python<'py>, stream: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyBytes>> {
        // Copying a few bytes in host memory takes less time than creating a tensor.
        let nbytes = self.nbytes as usize;
        if nbytes <= FEW
            && let Some(block) = &*self.taken.lock().ignore_poison()
            && let Ok(bytes) = block.bytes()
        {
            return Ok(PyBytes::new(py, &bytes[..nbytes]));
        }
        self.exported(py)?.tobytes(py, stream)
    }

    /// Gives the output block back. Calling it again does nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(block) = self.block.get(py) {
            return block.get().close(py);
        }
        let taken = self.taken.lock().ignore_poison().take();
        // No address was handed out, so there is nothing to wait for.
        taken.map_or(Ok(()), partywall::Block::release).or_raise(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        // In a forked child it belongs to the parent.
        if self.generation == fork_generation() { self.release(py) } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("<partywall.TaskResult: {} bytes, attempt {}>", self.nbytes, self.attempt)
    }
}

impl Drop for TaskResult {
    fn drop(&mut self) {
        let taken = self.taken.get_mut().ignore_poison().take();
        if taken.is_some() && self.generation == fork_generation() {
            unclosed(&self.__repr__());
        }
    }
}

/// Returns the exception for reading the output of a task without one.
pub(crate) fn without_output() -> PyErr {
    PyTypeError::new_err("the task was submitted without room for an output")
}

/// The exception of a task that has failed.
pub(crate) enum Failure {}

impl Hint for Failure {
    const TYPE: PyStaticExpr = type_hint_identifier!("partywall._errors", "TaskFailed");
}

/// The generator that awaits a ticket.
pub(crate) enum Awaiting {}

impl Hint for Awaiting {
    const TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("collections.abc", "Generator"),
        type_hint_identifier!("typing", "Any"),
        <() as IntoPyObject<'static>>::OUTPUT_TYPE,
        <TaskResult as PyTypeInfo>::TYPE_HINT
    );
}

/// The largest result that is copied without releasing the GIL, in bytes.
const FEW: usize = 4096;
