//! Claimed tasks, and their inputs and outputs as tensors.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use partywall::{
    ClaimedTask, Error, Queue, Result,
    cuda::RawStream,
    error::{Denied, Gone},
};
use partywall_os::lock::IgnorePoison;
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    errors::{Raise, parse_dtype},
    memory::{Memory, Work},
    owner::{Owner, let_go},
    reaper,
    stream::Stream,
    tensor::Tensor,
    wait,
};

/// A task that this process has, for one attempt.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Task {
    claim: Arc<Claim>,
    output: OnceLock<Arc<Owner>>,
    #[pyo3(get)]
    task: String,
    #[pyo3(get)]
    kind: String,
    arguments: Vec<u8>,
    #[pyo3(get)]
    attempt: u8,
    #[pyo3(get)]
    max_attempts: u8,
    #[pyo3(get)]
    output_bytes: u64,
    /// Bytes of each.
    #[pyo3(get)]
    inputs: Vec<u64>,
}

/// What a task and its tensors share. The queue stays mapped for tensors of a task that is over.
pub(crate) struct Claim {
    /// `None` once it is over. Before the queue: dropping it needs that.
    task: Mutex<Option<ClaimedTask>>,
    queue: Arc<Queue>,
}

/// An input, or the output, of a claimed task.
pub(crate) struct Part {
    claim: Arc<Claim>,
    /// `None`: the output.
    input: Option<usize>,
}

impl Claim {
    fn lock(&self) -> MutexGuard<'_, Option<ClaimedTask>> {
        self.task.lock().ignore_poison()
    }

    fn over(&self, task: &str, attempt: u8) -> Error {
        Error::Gone(Gone::Claim { task: task.to_owned(), attempt })
    }
}

impl Part {
    /// Leaves what may have to wait for the broker to the reaper.
    pub(crate) fn let_go(self) {
        let_go(self.claim);
    }

    fn look<T>(&self, look: impl FnOnce(&mut ClaimedTask) -> Result<T>) -> Result<T> {
        let over = || Error::Gone(Gone::HeldBlock { pool: self.claim.queue.name().to_owned() });
        self.claim.lock().as_mut().map_or_else(|| Err(over()), look)
    }
}

impl Memory for Part {
    fn on_device(&self, _: &str, bytes: u64, _: RawStream, work: Work<'_>) -> Result<()> {
        self.look(|task| {
            let range = match self.input {
                Some(index) => task.inputs()[index].device()?,
                None => task.output()?.device()?,
            };
            work(range.slice(0, bytes)?)
        })
    }

    fn read(&mut self, _: &str, out: &mut [u8]) -> Result<()> {
        let input = self.input;
        self.look(|task| match input {
            Some(index) => task.inputs()[index].bytes().map(|bytes| out.copy_from_slice(&bytes[..out.len()])),
            None => task.output()?.bytes().map(|bytes| out.copy_from_slice(&bytes[..out.len()])),
        })
    }

    fn write(&mut self, name: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        let version = self.claim.queue.version();
        let is_input = self.input.is_some();
        self.look(|task| match (is_input, on_host) {
            (true, _) => Err(Error::Denied(Denied::ReadOnly { name: name.to_owned(), version })),
            (false, true) => task.output_mut()?.bytes_mut().map(|all| all[..bytes.len()].copy_from_slice(bytes)),
            (false, false) => {
                let range = task.output()?.device()?.slice(0, bytes.len() as u64)?;
                range.copy_from_host(range.gpu().stream(), bytes)
            }
        })
    }
}

impl Task {
    pub(crate) fn new(queue: Arc<Queue>, task: ClaimedTask) -> Self {
        Self {
            output: OnceLock::new(),
            task: task.task().to_string(),
            kind: task.kind(),
            arguments: task.arguments().to_vec(),
            attempt: task.attempt(),
            max_attempts: task.max_attempts(),
            output_bytes: task.output_bytes(),
            inputs: task.inputs().iter().map(partywall::TaskInput::len).collect(),
            claim: Arc::new(Claim { task: Mutex::new(Some(task)), queue }),
        }
    }

    fn take(&self, py: Python<'_>) -> PyResult<ClaimedTask> {
        let task = self.claim.lock().take();
        if let Some(output) = self.output.get() {
            output.end_writing();
        }
        task.ok_or_else(|| self.claim.over(&self.task, self.attempt)).or_raise(py)
    }

    fn look<T>(&self, look: impl FnOnce(&mut ClaimedTask) -> Result<T>) -> Result<T> {
        self.claim.lock().as_mut().map_or_else(|| Err(self.claim.over(&self.task, self.attempt)), look)
    }

    fn part(&self, input: Option<usize>) -> Arc<Owner> {
        let context = self.claim.queue.gpu().map(|gpu| gpu.context().clone());
        Owner::of_part(Part { claim: self.claim.clone(), input }, input.is_none(), context)
    }
}

#[pymethods]
impl Task {
    /// The arguments.
    #[getter]
    fn args<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.arguments)
    }

    /// An input as a tensor, or its beginning.
    fn input(&self, py: Python<'_>, index: usize, dtype: &str, shape: Option<Vec<u64>>) -> PyResult<Tensor> {
        let dtype = parse_dtype(dtype)?;
        let on_host = self.claim.queue.gpu().is_none();
        let found = self.look(|task| {
            let input = &task.inputs()[index];
            let address =
                if on_host { input.bytes()?.as_ptr() as usize } else { input.device()?.device_ptr() as usize };
            Ok((address, input.len()))
        });
        let (address, has) = found.or_raise(py)?;
        let shape = shape.unwrap_or_else(|| vec![has / dtype.item_bytes().unwrap_or(1)]);
        let name = format!("{} input {index}", self.task);
        Tensor::of_part(&self.part(Some(index)), (name, has), address, dtype, &shape).or_raise(py)
    }

    /// The room for the output as a tensor, or its beginning.
    fn output(&self, py: Python<'_>, dtype: &str, shape: Option<Vec<u64>>) -> PyResult<Tensor> {
        let dtype = parse_dtype(dtype)?;
        let on_host = self.claim.queue.gpu().is_none();
        let found = self.look(|task| {
            let block = task.output()?;
            if on_host { Ok(block.as_ptr()? as usize) } else { Ok(block.device()?.device_ptr() as usize) }
        });
        let address = found.or_raise(py)?;
        let has = self.output_bytes;
        let shape = shape.unwrap_or_else(|| vec![has / dtype.item_bytes().unwrap_or(1)]);
        let owner = self.output.get_or_init(|| self.part(None));
        Tensor::of_part(owner, (format!("{} output", self.task), has), address, dtype, &shape).or_raise(py)
    }

    /// Whether its blocks are in host memory.
    #[getter]
    fn on_host(&self) -> bool {
        self.claim.queue.gpu().is_none()
    }

    /// Whether its attempt has an output.
    #[getter]
    fn has_output(&self) -> bool {
        self.claim.lock().as_ref().is_some_and(|task| task.output().is_ok())
    }

    /// Waits until the submitter's stream has completed the inputs.
    fn wait_inputs(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        wait::in_slices(py, wait::timeout(timeout)?, |slice| self.look(|task| task.wait_inputs(slice)))
    }

    /// Has a stream wait until the submitter's stream has completed the inputs.
    fn wait_inputs_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let stream = Stream::find(py, self.claim.queue.domain(), device, stream)?;
        py.detach(|| self.look(|task| task.wait_inputs_on(stream.borrow()))).or_raise(py)
    }

    /// Completes the task.
    fn complete(&self, py: Python<'_>) -> PyResult<()> {
        let task = self.take(py)?;
        py.detach(|| task.complete()).or_raise(py)
    }

    /// Completes the task when everything is done that is on a stream now. A task that is refused stays.
    fn complete_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let stream = Stream::find(py, self.claim.queue.domain(), device, stream)?;
        let task = self.take(py)?;
        let completed = py.detach(|| task.complete_on(stream.borrow()));
        completed
            .map_err(|refused| {
                let (error, task) = *refused;
                *self.claim.lock() = Some(task);
                error
            })
            .or_raise(py)
    }

    /// Fails the attempt.
    fn fail(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let task = self.take(py)?;
        py.detach(|| task.fail(reason)).or_raise(py)
    }

    /// Has the lease end so many seconds from now on.
    fn extend(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let seconds = wait::timeout(Some(seconds))?;
        self.look(|task| task.extend(seconds)).or_raise(py)
    }

    /// Whether this process still has it.
    #[getter]
    fn claimed(&self) -> bool {
        self.claim.lock().as_ref().is_some_and(ClaimedTask::is_claimed)
    }

    /// Whether it was completed, failed or given back here.
    #[getter]
    fn closed(&self) -> bool {
        self.claim.lock().is_none()
    }

    /// Gives the task back, unless it is over.
    fn close(&self, py: Python<'_>) {
        let task = self.take(py);
        py.detach(|| drop(task));
    }
}

/// The tasks of a queue, one after the other. Asking for the next one completes the one before, unless that is over.
///
/// If this goes while an exception leaves the body of the loop, the task is failed for that reason. The interpreter sets the
/// exception before it drops the iterator of a loop.
#[pyclass(module = "partywall._native")]
pub(crate) struct Claims {
    queue: Py<super::queue::Queue>,
    timeout: Option<f64>,
    current: Option<Py<Task>>,
}

impl Claims {
    pub(crate) fn new(queue: Py<super::queue::Queue>, timeout: Option<f64>) -> Self {
        Self { queue, timeout, current: None }
    }
}

#[pymethods]
impl Claims {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// The next task; the end if none comes within the timeout.
    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Py<Task>>> {
        if let Some(task) = self.current.take() {
            let task = task.get();
            if !task.closed() {
                task.complete(py)?;
            }
        }
        let claimed = self.queue.get().claim_within(py, self.timeout)?;
        self.current = claimed.map(|task| Py::new(py, task)).transpose()?;
        Ok(self.current.as_ref().map(|task| task.clone_ref(py)))
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        let Some(task) = self.current.take() else { return };
        Python::try_attach(|py| {
            // After a break or a return there is none, and the task is the caller's.
            let Some(error) = PyErr::take(py) else { return };
            if !task.get().closed() {
                let text = format!(
                    "{}: {}",
                    error.get_type(py).name().map_or_else(|_| "exception".into(), |name| name.to_string()),
                    error.value(py)
                );
                _ = task.get().fail(py, &text);
            }
            error.restore(py);
        });
    }
}

impl Drop for Task {
    /// Arrays of it may stay; the task is another worker's at once.
    fn drop(&mut self) {
        if let Some(output) = self.output.get() {
            output.end_writing();
        }
        if let Some(task) = self.claim.lock().take() {
            let queue = self.claim.queue.clone();
            reaper::later(move || {
                drop(task);
                drop(queue);
            });
        }
    }
}
