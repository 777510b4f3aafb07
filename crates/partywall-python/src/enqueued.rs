//! Results that streams read before they are taken. Python uses this class itself, as it does
//! [`Sample`](crate::sample::Sample).

use std::sync::Arc;

use partywall::{Error, Queue, cuda::RawStream, error::Gone};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyBytes};

use crate::{
    arguments::{ElementType, Shape},
    errors::{Never, Raise},
    exported::{Export, Exported},
    handle::{Closing, Handle},
    owner::Owner,
    tensor::Tensor,
    ticket::{TaskResult, without_output},
    wait,
};

/// The output of a task, which streams read behind the worker's stream. `take` proves that they have read the result.
///
/// ```python
/// enqueued = ticket.wait_on(stream, timeout=60)       # the host waits for no GPU
/// roots = torch.from_dlpack(enqueued.tensor(dtype="float32"))
/// total = roots.sum()                                 # enqueued behind the worker's stream
/// with enqueued.take(timeout=60):                     # `total` is the sum of the result
///     print(total.item())
/// ```
///
/// It has type and shape as a `TaskResult`; `tensor` gives its beginning others. A stream that takes it by DLPack waits
///  for the worker's stream, too. Until `take`, this object and its tensors keep only the mapping: if the attempt
/// fails, the memory may be written again. Dropping the object leaves the result in the queue.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct EnqueuedResult {
    /// `None` once the result was taken.
    held: Handle<HeldEnqueued>,
    /// Closing the queue's handle ends the wait for the result.
    closing: Closing,
    /// The task, for other processes.
    #[pyo3(get)]
    task: String,
    /// Bytes of the output: as many as the submitter asked for, unless the worker writes less.
    #[pyo3(get)]
    nbytes: u64,
    /// The number of the attempt whose output it is, from 1.
    #[pyo3(get)]
    attempt: u8,
}

#[derive(Clone)]
struct HeldEnqueued {
    owner: Arc<Owner>,
    result: Arc<partywall::EnqueuedResult>,
    queue: Arc<Queue>,
}

impl EnqueuedResult {
    /// Wraps an output that `stream` waits for.
    pub(crate) fn new(
        queue: &Arc<Queue>,
        result: partywall::EnqueuedResult,
        stream: RawStream,
        closing: Closing,
    ) -> Self {
        let task = result.task().to_string();
        let nbytes = result.bytes();
        let attempt = result.attempt();
        let result = Arc::new(result);
        let owner = Owner::of_enqueued(&result, queue, stream);
        Self {
            held: Handle::new("enqueued result", HeldEnqueued { owner, result, queue: queue.clone() }),
            closing,
            task,
            nbytes,
            attempt,
        }
    }

    fn held(&self, py: Python<'_>) -> PyResult<HeldEnqueued> {
        let held = self.held.lock().clone();
        held.ok_or_else(|| Error::Gone(Gone::Task { task: self.task.clone() })).or_raise(py)
    }
}

impl Export for EnqueuedResult {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py, None, None)
    }
}

#[pymethods]
impl EnqueuedResult {
    /// Returns the output as a tensor: with its type and shape, unless others are given. With another type and no
    /// shape, of as many elements as fit.
    ///
    /// The tensor is read-only until `take`. From then on it belongs to the result, and keeps the output block.
    #[pyo3(signature = (shape = None, dtype = None))]
    fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<Tensor> {
        let HeldEnqueued { owner, result, queue } = self.held(py)?;
        if self.nbytes == 0 {
            return Err(without_output());
        }
        let (dtype, shape) = ElementType::view(dtype, shape, (result.dtype(), &result.shape(), self.nbytes));
        let address = py.detach(|| {
            let range = result.device()?;
            owner.note_gpu(range.gpu());
            partywall::Result::Ok(range.device_ptr() as usize)
        });
        let address = address.or_raise(py)?;
        Tensor::of_part(&owner, (queue.name(), "output".into(), self.nbytes), address, dtype.0, &shape).or_raise(py)
    }

    /// Waits until the worker's stream has completed the result, and takes it. This proves that streams have read the
    /// result.
    ///
    /// Raises `AttemptFailed` if the attempt has failed: drop what was made of the output, and call `Ticket.wait_on`
    /// again for the next worker's. Raises `TaskGone` if the result was taken.
    #[pyo3(signature = (timeout = None))]
    fn take<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, TaskResult>> {
        let timeout = wait::timeout(timeout)?;
        let HeldEnqueued { owner, result, queue } = self.held(py)?;
        let ending = self.closing.begin();
        let taken = wait::for_turn(py, timeout, |py| ending.check(py), |wait| result.take(wait))?;
        self.held.close(py);
        TaskResult::of_enqueued(py, queue, taken, owner)?.into_object(py)
    }

    /// Returns a copy of the bytes, as `Tensor.tobytes`. They are the result if `take` succeeds afterwards.
    #[pyo3(signature = (stream = None))]
    fn tobytes<'py>(&self, py: Python<'py>, stream: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyBytes>> {
        self.exported(py)?.tobytes(py, stream)
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("an enqueued result is this process's own: send its task"))
    }

    fn __repr__(&self) -> String {
        format!("<partywall.EnqueuedResult {}: {} bytes, attempt {}>", self.task, self.nbytes, self.attempt)
    }
}
