//! Claimed tasks. Python uses these classes themselves, as it does [`Sample`](crate::sample::Sample).

use std::{
    borrow::Cow,
    sync::{Arc, Mutex, Weak},
    thread::{self, ThreadId},
    time::Duration,
};

use partywall::{
    DType, Error, Place, Queue, Result, TaskMemory, TaskRef,
    error::{Busy, Gone},
};
use partywall_os::{lock::IgnorePoison, process::fork_generation};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
    prelude::*,
    types::PyBytes,
};

use crate::{
    arguments::{ElementType, Optional, Shape},
    errors::{Never, Raise, unclosed},
    exported::{Export, Exported},
    owner::Owner,
    part::TaskClaim,
    reaper,
    stream::Stream,
    tensor::Tensor,
    value::Tuple,
    wait,
};

/// A task that this process has claimed, for one attempt.
///
/// The end of its `with` completes the task, unless the task is over; an exception fails it with the exception's text.
/// A task that is dropped goes to another worker. If the lease has ended, the task belongs to another worker, and
/// `complete` raises `ClaimLost`.
#[pyclass(frozen, module = "partywall", weakref)]
pub(crate) struct ClaimedTask {
    claim: Arc<TaskClaim>,
    /// The owner that all tensors of the output share. Without tensors nothing keeps the block once the task is over.
    output: Mutex<Weak<Owner>>,
    task: TaskRef,
    kind: String,
    arguments: Vec<u8>,
    /// Type, shape and bytes of each input.
    inputs: Vec<Described>,
    /// Those of the output, if there is one.
    room: Option<Described>,
    /// The number of the attempt, from 1.
    #[pyo3(get)]
    attempt: u8,
    /// How often the task may be attempted.
    #[pyo3(get)]
    max_attempts: u8,
    /// The fork generation of the claim: in a forked child, the task belongs to the parent.
    generation: u64,
}

/// Type, shape and bytes.
type Described = (DType, Vec<u64>, u64);

impl ClaimedTask {
    pub(crate) fn new(queue: Arc<Queue>, task: partywall::ClaimedTask) -> Self {
        Self {
            output: Mutex::default(),
            task: task.task(),
            kind: task.kind(),
            arguments: task.arguments().to_vec(),
            inputs: task.inputs().iter().map(|input| (input.dtype(), input.shape().to_vec(), input.len())).collect(),
            room: task.output().ok().map(|output| (output.dtype(), output.shape().to_vec(), output.len())),
            attempt: task.attempt(),
            max_attempts: task.max_attempts(),
            generation: fork_generation(),
            claim: TaskClaim::new(queue, task),
        }
    }

    /// Returns type, shape and bytes of an input, or of the room for the output.
    pub(crate) fn described(&self, input: Option<usize>) -> (DType, &[u64], u64) {
        let described = match input {
            Some(input) => self.inputs.get(input),
            None => self.room.as_ref(),
        };
        described.map_or((DType::U8, &[0], 0), |(dtype, shape, bytes)| (*dtype, shape, *bytes))
    }

    /// Returns an input or the output as a tensor, or its beginning as one of another type or shape.
    pub(crate) fn tensor(
        &self,
        py: Python<'_>,
        input: Option<usize>,
        shape: Option<Shape>,
        dtype: Option<ElementType>,
    ) -> PyResult<Tensor> {
        let place = self.claim.queue.place();
        let on_stream = self.claim.stream().is_some();
        let task_name = || self.task.to_string();
        let found = self.with(|task| {
            let Some(index) = input else {
                let output = task.output()?;
                let address =
                    if self.no_gpu() { output.as_ptr()? as usize } else { output.device()?.device_ptr() as usize };
                return Ok((address, None, task.output_memory()));
            };
            let segment = task.inputs()[index].segment()?;
            let place = segment.as_ref().map_or(place, |segment| segment.place());
            let by_host = place.is_cpu_reachable() && !on_stream || place == Place::Host;
            if by_host && place != Place::Host {
                // The tensor is on the host, which waits for no stream by itself.
                match task.wait_inputs(Duration::ZERO) {
                    Err(Error::Timeout { .. }) => return Err(Busy::InputsNotReady { task: task_name() }.into()),
                    waited => waited?,
                }
            }
            let input = &task.inputs()[index];
            let address = match input.gpu()? {
                None if by_host => input.as_ptr()? as usize,
                _ => input.device()?.device_ptr() as usize,
            };
            Ok((address, segment, task.inputs_memory()))
        });
        let (address, segment, memory) = found.or_raise(py)?;
        let described = self.described(input);
        let has = described.2;
        let (dtype, shape) = ElementType::view(dtype, shape, described);
        let of = (self.claim.queue.name(), part_name(input), has);
        let owner = match input {
            Some(_) => Owner::of_part(memory, &self.claim, input, segment),
            None => self.output_owner(memory),
        };
        Tensor::of_part(&owner, of, address, dtype.0, &shape).or_raise(py)
    }

    /// Returns the owner of the output, for a tensor that keeps it.
    fn output_owner(&self, memory: TaskMemory) -> Arc<Owner> {
        let mut output = self.output.lock().ignore_poison();
        output.upgrade().unwrap_or_else(|| {
            let owner = Owner::of_part(memory, &self.claim, None, None);
            if self.closed() {
                owner.end_writing();
            }
            *output = Arc::downgrade(&owner);
            owner
        })
    }

    /// Calls `change` with the owner of the output, if it has tensors.
    fn with_output(&self, change: impl FnOnce(&Owner)) {
        let output = self.output.lock().ignore_poison().upgrade();
        if let Some(output) = output {
            change(&output);
        }
    }

    /// Fails the attempt with an exception as the reason.
    fn fail_for(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<()> {
        let kind = error.get_type().name()?;
        self.give_up(py, &format!("{kind}: {}", text(error)))
    }

    fn give_up(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let task = self.take(py)?;
        py.detach(|| task.fail(reason)).or_raise(py)
    }

    /// Sets what the result is to be, if the worker says so: not more than there is room for.
    fn set_output(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<()> {
        if shape.is_none() && dtype.is_none() {
            return Ok(());
        }
        let (dtype, shape) = ElementType::view(dtype, shape, self.described(None));
        self.with(|task| task.output_mut()?.set_tensor(dtype.0, &shape)).or_raise(py)
    }

    /// Returns whether this process uses the queue's blocks by the CPU alone.
    fn no_gpu(&self) -> bool {
        self.claim.queue.gpu().is_none()
    }

    fn take(&self, py: Python<'_>) -> PyResult<partywall::ClaimedTask> {
        let task = self.claim.lock().take();
        self.with_output(Owner::end_writing);
        task.ok_or_else(|| self.over()).or_raise(py)
    }

    fn with<T>(&self, action: impl FnOnce(&mut partywall::ClaimedTask) -> Result<T>) -> Result<T> {
        self.claim.lock().as_mut().map_or_else(|| Err(self.over()), action)
    }

    /// Returns the stream that a caller names. In host memory there is none by default, and hosts call `instead`.
    fn stream(
        &self,
        py: Python<'_>,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
        instead: &str,
    ) -> PyResult<Stream> {
        if self.claim.queue.place() == Place::Host && stream.is_none() && device.is_none() {
            let why = format!("the blocks of this queue are in host memory: name a stream, or call {instead}");
            return Err(PyValueError::new_err(why));
        }
        Stream::at(py, self.claim.queue.domain(), stream, device)
    }

    fn over(&self) -> Error {
        Error::Gone(Gone::Attempt { task: self.task.to_string(), attempt: self.attempt })
    }
}

#[pymethods]
impl ClaimedTask {
    /// The task, for other processes.
    #[getter]
    pub(crate) fn task(&self) -> String {
        self.task.to_string()
    }

    /// The kind of work.
    #[getter]
    fn kind(&self) -> &str {
        &self.kind
    }

    /// The arguments.
    #[getter]
    fn args<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.arguments)
    }

    /// The inputs, read-only, in their order.
    #[getter]
    fn inputs<'py>(slf: &Bound<'py, Self>) -> PyResult<Tuple<Bound<'py, TaskBytes>>> {
        let inputs = (0..slf.get().inputs.len()).map(|index| TaskBytes::of(slf, Some(index)));
        inputs.collect::<PyResult<_>>().map(Tuple)
    }

    /// The room for the output, which only this attempt uses. It contains the bytes of its previous user.
    #[getter]
    fn output<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, TaskBytes>> {
        let this = slf.get();
        if this.room.is_none() {
            let why = format!("task {} was submitted without room for an output", this.task);
            return Err(PyTypeError::new_err(why));
        }
        TaskBytes::of(slf, None)
    }

    /// Waits until the submitter's stream has completed the inputs. Raises `InputsLost` if the submitter ended before
    /// that.
    #[pyo3(signature = (timeout = None))]
    fn wait_inputs(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        wait::in_slices(py, wait::timeout(timeout)?, |slice| self.with(|task| task.wait_inputs(slice)))
    }

    /// Has a stream wait until the inputs are complete. Returns at once. `stream` and `device` as for a `Timeline`.
    ///
    /// A stream that takes an input by DLPack waits for it without this call.
    #[pyo3(signature = (stream = None, *, device = None))]
    fn wait_inputs_on(&self, py: Python<'_>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<()> {
        let stream = self.stream(py, stream, device, "wait_inputs()")?;
        py.detach(|| self.with(|task| task.wait_inputs_on(stream.borrow()))).or_raise(py)?;
        self.claim.note_stream(stream.id().1);
        Ok(())
    }

    /// Completes the task: its output is the result. On a GPU, waits for all work of this process there.
    ///
    /// A worker that wrote less than it was asked for passes the shape of what it wrote, and its type if that is
    /// another one.
    #[pyo3(signature = (shape = None, dtype = None))]
    fn complete(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<()> {
        self.set_output(py, shape, dtype)?;
        let task = self.take(py)?;
        // Without a GPU there is nothing to wait for.
        let completed = if self.no_gpu() { task.complete() } else { py.detach(|| task.complete()) };
        completed.or_raise(py)
    }

    /// Completes the task when all work that is on a stream now is done. Returns at once. `shape` and `dtype` as for
    /// `complete`.
    #[pyo3(signature = (stream = None, *, device = None, shape = None, dtype = None))]
    fn complete_on(
        &self,
        py: Python<'_>,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
        shape: Option<Shape>,
        dtype: Option<ElementType>,
    ) -> PyResult<()> {
        let stream = self.stream(py, stream, device, "complete()")?;
        self.set_output(py, shape, dtype)?;
        let task = self.take(py)?;
        let completed = py.detach(|| task.complete_on(stream.borrow()));
        completed
            .map_err(|refused| {
                let (error, task) = *refused;
                *self.claim.lock() = Some(task);
                self.with_output(Owner::allow_writing);
                error
            })
            .or_raise(py)
    }

    /// Fails the attempt: the task goes to another worker, or becomes a dead letter. 127 bytes of the reason are kept,
    /// until another attempt fails.
    fn fail(&self, py: Python<'_>, reason: &Bound<'_, PyAny>) -> PyResult<()> {
        self.give_up(py, &text(reason))
    }

    /// Moves the end of the lease to a number of seconds from now. In a queue without a lease it only checks the claim.
    fn extend(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let seconds = wait::timeout(Some(seconds))?;
        self.with(|task| task.extend(seconds)).or_raise(py)
    }

    /// Whether the task is still this worker's. If not, further work on it is wasted.
    #[getter]
    fn claimed(&self) -> bool {
        self.claim.lock().as_ref().is_some_and(partywall::ClaimedTask::is_claimed)
    }

    /// Whether the task was completed, failed or given back here.
    #[getter]
    fn closed(&self) -> bool {
        self.claim.lock().is_none()
    }

    /// Gives the task back, which counts as an attempt, unless the task is over. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let task = self.take(py);
        py.detach(|| drop(task));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: Optional<'_, '_>,
        raised: Optional<'_, '_>,
        _traceback: Optional<'_, '_>,
    ) -> PyResult<()> {
        match raised {
            // In a forked child it belongs to the parent.
            _ if self.closed() || self.generation != fork_generation() => Ok(()),
            None => self.complete(py, None, None),
            Some(error) => self.fail_for(py, error),
        }
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a claimed task is this process's own"))
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "over".to_owned() } else { format!("attempt {}", self.attempt) };
        format!("<partywall.ClaimedTask {}: {}, {state}>", self.task, self.kind)
    }
}

impl Drop for ClaimedTask {
    /// Arrays of the task may stay in use, and keep their blocks; another worker can claim it at once.
    fn drop(&mut self) {
        self.with_output(Owner::end_writing);
        if self.closed() {
            return;
        }
        if self.generation == fork_generation() {
            unclosed(&self.__repr__());
        }
        let task = self.claim.lock().take();
        let queue = self.claim.queue.clone();
        reaper::later(move || {
            drop(task);
            drop(queue);
        });
    }
}

/// An input or the output of a claimed task, used in place.
///
/// It has the type and the shape that the submitter gave it, and `from_dlpack`, `np.asarray` and the like take it so;
/// `tensor` gives its beginning others.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct TaskBytes {
    task: Py<ClaimedTask>,
    /// The index of the input; `None` for the output.
    input: Option<usize>,
}

impl TaskBytes {
    pub(crate) fn of<'py>(task: &Bound<'py, ClaimedTask>, input: Option<usize>) -> PyResult<Bound<'py, Self>> {
        Self { task: task.clone().unbind(), input }.into_object(task.py())
    }
}

impl Export for TaskBytes {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py, None, None)
    }
}

#[pymethods]
impl TaskBytes {
    /// Returns it as a tensor: with the type and the shape that it was submitted with, unless others are given. With
    /// another type and no shape, of as many elements as fit.
    #[pyo3(signature = (shape = None, dtype = None))]
    fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<Tensor> {
        self.task.get().tensor(py, self.input, shape, dtype)
    }

    /// Bytes that were submitted, or that were requested for the output.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.task.get().described(self.input).2
    }

    /// The type of the elements: `uint8` unless the submitter gave another one.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.task.get().described(self.input).0.name()
    }

    /// Elements along each dimension.
    #[getter]
    fn shape(&self) -> Tuple<u64> {
        Tuple(self.task.get().described(self.input).1.to_vec())
    }

    fn __repr__(&self) -> String {
        let what = part_name(self.input);
        format!("<partywall.TaskBytes: {what} of {}, {} bytes>", self.task.get().task(), self.nbytes())
    }
}

/// Iterates over the tasks of a queue. Asking for the next task completes the one before, unless that is over.
///
/// If an exception leaves the body of the loop, dropping the iterator fails the task for that reason: the interpreter
/// sets the exception before it drops the iterator.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Claims {
    queue: Py<crate::queue::Queue>,
    timeout: Option<f64>,
    iteration: Mutex<Iteration>,
}

/// The state of an iteration. No Python code runs while it is locked.
#[derive(Default)]
struct Iteration {
    current: Option<Py<ClaimedTask>>,
    /// The thread that asked for the current task.
    thread: Option<ThreadId>,
    /// True if that thread is still waiting.
    is_waiting: bool,
}

impl Claims {
    pub(crate) fn new(queue: Py<crate::queue::Queue>, timeout: Option<f64>) -> Self {
        Self { queue, timeout, iteration: Mutex::default() }
    }

    /// Begins a wait, and returns the previous task. Refuses a second thread, which would complete a task of the first.
    fn begin(&self) -> PyResult<Option<Py<ClaimedTask>>> {
        let iteration = &mut *self.iteration.lock().ignore_poison();
        let thread = Some(thread::current().id());
        let is_open = iteration.current.as_ref().is_some_and(|task| !task.get().closed());
        if iteration.is_waiting || is_open && iteration.thread != thread {
            return Err(PyRuntimeError::new_err(
                "another thread iterates these claims(), and asking for the next task completes the task that it has: \
                 call claims() in each thread",
            ));
        }
        let begun = Iteration { current: None, thread, is_waiting: true };
        Ok(std::mem::replace(iteration, begun).current)
    }

    fn next(&self, py: Python<'_>, before: Option<Py<ClaimedTask>>) -> PyResult<Option<Py<ClaimedTask>>> {
        if let Some(task) = before.as_ref().map(Py::get).filter(|task| !task.closed()) {
            task.complete(py, None, None)?;
        }
        let claimed = self.queue.get().claim_within(py, self.timeout)?;
        claimed.map(|task| Py::new(py, task)).transpose()
    }
}

#[pymethods]
impl Claims {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Returns the next task, or ends the iteration if none comes within the timeout.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<ClaimedTask>>> {
        let before = self.begin()?;
        let claimed = self.next(py, before);
        let iteration = &mut *self.iteration.lock().ignore_poison();
        iteration.is_waiting = false;
        iteration.current = claimed.as_ref().ok().and_then(|task| Some(task.as_ref()?.clone_ref(py)));
        claimed
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        let Some(task) = self.iteration.get_mut().ignore_poison().current.take() else { return };
        Python::try_attach(|py| {
            // After `break` or `return` there is no exception, and the task stays the caller's.
            let Some(error) = PyErr::take(py) else { return };
            if !task.get().closed() {
                _ = task.get().fail_for(py, error.value(py));
            }
            error.restore(py);
        });
    }
}

/// Returns the text of an object. File names in messages may contain unpaired surrogates, which are not UTF-8.
fn text(object: &Bound<'_, PyAny>) -> String {
    let text = object.str().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| "it cannot be said in words".to_owned())
}

/// Returns the name of a part's tensors.
fn part_name(input: Option<usize>) -> Cow<'static, str> {
    input.map_or(Cow::Borrowed("output"), |index| format!("input {index}").into())
}
