//! Inputs and outputs of claimed tasks, as tensors.

use std::{borrow::Cow, sync::Arc};

use partywall::{
    Domain, Error, Result, Segment, TaskMemory,
    cuda::StreamRef,
    error::{Denied, Gone},
};
use pyo3::{
    PyTypeInfo,
    inspect::{PyStaticConstant, PyStaticExpr},
    prelude::*,
    type_hint_identifier, type_hint_subscript,
};

use crate::{
    arguments::{ElementType, Shape},
    exported::{Export, Exported},
    hint::Hint,
    memory::{Memory, Work},
    owner::Owner,
    reaper::Late,
    task::{ClaimedTask, TaskClaim},
    tensor::{Lengths, Tensor, signed},
};

/// The memory of an input or the output of a claimed task.
pub(crate) struct Part {
    /// Keeps the blocks from other tasks. Dropped before the queue.
    _memory: TaskMemory,
    claim: Arc<TaskClaim>,
    /// The index of the input; `None` for the output.
    input: Option<usize>,
    /// The segment that an input is a part of. It stays mapped for tensors that outlive the task.
    _segment: Option<Late<Segment>>,
}

impl Part {
    /// Returns an owner of the part. Only the output is writable.
    pub(crate) fn owner(
        memory: TaskMemory,
        claim: &Arc<TaskClaim>,
        input: Option<usize>,
        segment: Option<Arc<Segment>>,
    ) -> Arc<Owner> {
        let queue = &claim.queue;
        let (place, gpu) =
            segment.as_ref().map_or_else(|| (queue.place(), queue.gpu()), |segment| (segment.place(), segment.gpu()));
        let context = gpu.map(|gpu| gpu.context().clone());
        let on_stream = input.is_some() && claim.stream().is_some();
        let part = Self { _memory: memory, claim: claim.clone(), input, _segment: segment.map(Late::new) };
        Owner::of_part(part, input.is_none(), (place, on_stream), context)
    }

    pub(crate) fn domain(&self) -> &Domain {
        self.claim.queue.domain()
    }

    /// Returns the claim of an input, which a stream of the submitter may still write; `None` for the output.
    pub(crate) fn of_input(&self) -> Option<&Arc<TaskClaim>> {
        self.input.map(|_| &self.claim)
    }

    fn with<T>(&self, action: impl FnOnce(&mut partywall::ClaimedTask) -> Result<T>) -> Result<T> {
        let over = || Error::Gone(Gone::HeldBlock { pool: self.claim.queue.name().to_owned() });
        self.claim.lock().as_mut().map_or_else(|| Err(over()), action)
    }
}

impl Memory for Part {
    /// Has the stream wait first until the submitter's stream has completed the inputs.
    fn on_device(&mut self, name: &str, bytes: u64, stream: StreamRef<'_>, work: Work<'_>) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => {
                task.wait_inputs_on(stream)?;
                work(task.inputs()[index].device()?.slice(0, bytes)?)
            }
            None => task.output_mut()?.on_device(name, bytes, stream, work),
        })
    }

    fn allow_cpu(&mut self, name: &str) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => task.inputs()[index].as_ptr().map(drop),
            None => task.output_mut()?.allow_cpu(name),
        })
    }

    fn read(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        self.with(|task| match self.input {
            Some(index) => task.inputs()[index].read_at(0, out),
            None => task.output_mut()?.read(name, out),
        })
    }

    fn write(&mut self, name: &str, bytes: &[u8], on_host: bool) -> Result<()> {
        self.with(|task| match self.input {
            Some(_) => Err(Denied::ReadOnly { name: name.to_owned(), version: self.claim.queue.version() }.into()),
            None => Memory::write(task.output_mut()?, name, bytes, on_host),
        })
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
    fn shape(&self) -> Lengths {
        Lengths(signed(self.task.get().described(self.input).1))
    }

    fn __repr__(&self) -> String {
        let what = name(self.input);
        format!("<partywall.TaskBytes: {what} of {}, {} bytes>", self.task.get().task(), self.nbytes())
    }
}

/// The inputs of a task: a tuple.
pub(crate) enum Inputs {}

impl Hint for Inputs {
    const TYPE: PyStaticExpr = type_hint_subscript!(
        type_hint_identifier!("builtins", "tuple"),
        <TaskBytes as PyTypeInfo>::TYPE_HINT,
        PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis }
    );
}

/// Returns the name of a part's tensors.
pub(crate) fn name(input: Option<usize>) -> Cow<'static, str> {
    input.map_or(Cow::Borrowed("output"), |index| format!("input {index}").into())
}
