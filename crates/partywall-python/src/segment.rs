//! An open version of a name.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use partywall::Place;
use pyo3::prelude::*;

use crate::{
    errors::{Raise, closed},
    owner::Owner,
    tensor::Tensor,
};

/// An open version of a name, and a lease on it.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Segment {
    owner: Mutex<Option<Arc<Owner>>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    version: u64,
    place: Place,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    nbytes: u64,
    #[pyo3(get)]
    mutable: bool,
    #[pyo3(get)]
    kept: bool,
}

impl Segment {
    pub(crate) fn new(segment: partywall::Segment) -> Self {
        let unowned = Self::unowned(&segment);
        Self { owner: Mutex::new(Some(Owner::of(segment))), ..unowned }
    }

    /// Of a build that has been committed.
    pub(crate) fn of(owner: Arc<Owner>) -> partywall::Result<Self> {
        let unowned = owner.with_segment(|segment| Ok(Self::unowned(segment)))?;
        Ok(Self { owner: Mutex::new(Some(owner)), ..unowned })
    }

    fn unowned(segment: &partywall::Segment) -> Self {
        Self {
            owner: Mutex::new(None),
            name: segment.name().to_owned(),
            version: segment.version(),
            place: segment.place(),
            kind: segment.kind(),
            nbytes: segment.bytes(),
            mutable: segment.is_mutable(),
            kept: segment.is_kept(),
        }
    }

    fn owner(&self, py: Python<'_>) -> PyResult<Arc<Owner>> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        owner.ok_or_else(|| closed(py, "segment"))
    }
}

#[pymethods]
impl Segment {
    /// `host`, or the UUID of the GPU that has it.
    #[getter]
    fn place(&self) -> String {
        self.place.to_string()
    }

    /// Its metadata.
    #[getter]
    fn metadata(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        let owner = self.owner(py)?;
        let pairs = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        py.detach(|| owner.with_segment(|segment| Ok(segment.metadata().map(pairs).collect()))).or_raise(py)
    }

    /// The names of its tensors, in the order in which they were added.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let names = |segment: &partywall::Segment| segment.tensors().iter().map(|it| it.name().to_owned()).collect();
        let owner = self.owner(py)?;
        py.detach(|| owner.with_segment(|segment| Ok(names(segment)))).or_raise(py)
    }

    /// All its tensors, in that order.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        let owner = self.owner(py)?;
        let all = |segment: &partywall::Segment| {
            segment.tensors().iter().map(|tensor| Tensor::of_segment(&owner, tensor)).collect()
        };
        py.detach(|| owner.with_segment(all)).or_raise(py)
    }

    /// The tensor of this name.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let owner = self.owner(py)?;
        let find = |segment: &partywall::Segment| Tensor::of_segment(&owner, &segment.tensor(name)?);
        py.detach(|| owner.with_segment(find)).or_raise(py)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Gives the lease back, once no tensor of it is used any more. Calling it again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| owner.map_or(Ok(()), Owner::close)).or_raise(py)
    }
}
