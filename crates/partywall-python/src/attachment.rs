//! Segments that queues hold, and parts of them. Python uses these classes themselves, as it does
//! [`Sample`](crate::sample::Sample).

use std::{collections::BTreeMap, sync::Arc};

use partywall::{DType, Error, error::NotFound};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    inspect::PyStaticExpr,
    prelude::*,
    type_hint_identifier, type_hint_union,
    types::{PySlice, PyTuple},
};

use crate::{
    arguments::{Count, ElementType, Shape},
    block::Block,
    errors::{Never, Raise},
    handle::Handle,
};

/// A segment that a queue holds, so that tasks can name parts of it as inputs.
///
/// `weights["name"]` is a tensor of the segment, `weights[start:end]` its bytes.
#[pyclass(frozen, module = "partywall")]
pub(crate) struct Attachment {
    inner: Handle<Arc<Attached>>,
    /// The segment's name.
    #[pyo3(get)]
    name: String,
    /// The segment's version.
    #[pyo3(get)]
    version: u64,
    /// The segment's bytes, including alignment.
    #[pyo3(get)]
    nbytes: u64,
}

struct Attached {
    attachment: partywall::Attachment,
    /// The tensors at the time of the attachment.
    tensors: BTreeMap<String, partywall::SegmentPart>,
}

impl Attachment {
    /// Attaches a segment to a queue.
    pub(crate) fn new(queue: &partywall::Queue, segment: &partywall::Segment) -> partywall::Result<Self> {
        let attachment = queue.attach(segment)?;
        let tensors = segment.tensors().into_iter().filter(|tensor| tensor.bytes() > 0);
        let tensors = tensors.map(|tensor| Ok((tensor.name().to_owned(), attachment.tensor(&tensor)?)));
        let tensors = tensors.collect::<partywall::Result<_>>()?;
        let name = attachment.name().to_owned();
        let version = attachment.version();
        let nbytes = attachment.bytes();
        Ok(Self { inner: Handle::new("attachment", Arc::new(Attached { attachment, tensors })), name, version, nbytes })
    }

    pub(crate) fn attachment(&self, py: Python<'_>) -> PyResult<partywall::Attachment> {
        self.inner.get(py).map(|attached| attached.attachment.clone())
    }
}

#[pymethods]
impl Attachment {
    /// Returns a tensor by its name, or the bytes between two offsets. A part lies within one chunk.
    fn __getitem__(&self, py: Python<'_>, key: Key<'_>) -> PyResult<SegmentPart> {
        let attached = self.inner.get(py)?;
        let part = match key {
            Key::Tensor(name) => attached.tensors.get(&name).cloned().ok_or_else(|| {
                Error::NotFound(NotFound::Tensor { segment: self.name.clone(), tensor: name, near: Vec::new() })
            }),
            Key::Bytes(slice) => {
                let nbytes = isize::try_from(self.nbytes).unwrap_or(isize::MAX);
                let range = slice.indices(nbytes)?;
                if range.step != 1 {
                    return Err(PyValueError::new_err("a part of a segment has no gaps: leave the step out"));
                }
                attached.attachment.part(range.start as u64..range.stop.max(range.start) as u64)
            }
        };
        Ok(SegmentPart {
            bytes: part.as_ref().map_or(0, partywall::SegmentPart::bytes),
            part: Handle::new("part of a segment", part.or_raise(py)?),
        })
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("an attachment is this process's own: attach the segment there, too"))
    }

    fn __repr__(&self) -> String {
        format!("<partywall.Attachment {}@{}: {} bytes>", self.name, self.version, self.nbytes)
    }
}

/// A part of an attached segment, which can be an input of any number of tasks.
#[pyclass(frozen, module = "partywall")]
pub(crate) struct SegmentPart {
    part: Handle<partywall::SegmentPart>,
    /// The bytes of the part.
    #[pyo3(get, name = "nbytes")]
    bytes: u64,
}

impl SegmentPart {
    pub(crate) fn part(&self, py: Python<'_>) -> PyResult<partywall::SegmentPart> {
        self.part.get(py)
    }
}

#[pymethods]
impl SegmentPart {
    fn __repr__(&self) -> String {
        let of = self.part.lock().as_ref().map(|part| format!("{:?}", part.attachment())).unwrap_or_default();
        format!("<partywall.SegmentPart: {} bytes of {of}>", self.bytes)
    }
}

/// The argument of an attachment's `[]`.
enum Key<'py> {
    Tensor(String),
    Bytes(Bound<'py, PySlice>),
}

impl<'py> FromPyObject<'_, 'py> for Key<'py> {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_union!(<&str>::INPUT_TYPE, <PySlice as pyo3::PyTypeInfo>::TYPE_HINT);

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(slice) = object.cast::<PySlice>() {
            return Ok(Self::Bytes(slice.to_owned()));
        }
        let wrong = |_| PyTypeError::new_err(format!("the name of a tensor, or start:end, not {}", *object));
        object.extract().map(Self::Tensor).map_err(wrong)
    }
}

/// An input of a task to submit.
pub(crate) enum Given<'py> {
    Block(Bound<'py, Block>),
    /// A block, where a tensor begins in it, and the tensor's type and shape.
    Tensor(Bound<'py, Block>, u64, DType, Vec<u64>),
    Part(Bound<'py, SegmentPart>),
}

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(block) = object.cast::<Block>() {
            return Ok(Self::Block(block.to_owned()));
        }
        if let Ok(part) = object.cast::<PyTuple>() {
            let (block, Count(offset), ElementType(dtype), Shape(shape)) = part.extract()?;
            return Ok(Self::Tensor(block, offset, dtype, shape));
        }
        Ok(Self::Part(object.cast::<SegmentPart>()?.to_owned()))
    }
}
