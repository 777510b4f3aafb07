//! A version's memory as file descriptors.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd},
};

use partywall::Place;
use pyo3::prelude::*;

use crate::{
    arguments::Name,
    domain::Connection,
    handle::Handle,
    value::{Tuple, value},
    wait,
};

/// The compiled part of `partywall.Descriptors`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Descriptors {
    inner: Handle<partywall::Descriptors>,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// The version.
    #[pyo3(get)]
    version: u64,
    place: Place,
    /// `host`, whose descriptors `mmap` takes, or `vmm` or `pinned`, whose descriptors drivers import.
    #[pyo3(get)]
    kind: &'static str,
    /// Whether processes may write the memory.
    #[pyo3(get)]
    mutable: bool,
    /// Whether the version may grow. Its chunks are then mapped one after another, because a tensor may span two.
    #[pyo3(get)]
    may_grow: bool,
    /// The bytes of all chunks.
    #[pyo3(get)]
    nbytes: u64,
}

value! {
    /// A chunk: the number of its file descriptor, and its bytes.
    Chunk, "partywall._descriptors", "Chunk", {
        fd: i32, nbytes: u64,
    }
}

value! {
    /// Where a tensor is.
    TensorPlace, "partywall._descriptors", "TensorPlace", {
        dtype: &'static str, shape: Tuple<u64>, strides: Tuple<u64>, chunk: usize, offset: u64, nbytes: u64,
    }
}

impl Descriptors {
    fn with<T>(&self, py: Python<'_>, read: impl FnOnce(&partywall::Descriptors) -> T) -> PyResult<T> {
        let found = self.inner.lock().as_ref().map(read);
        self.inner.unless_closed(py, found)
    }
}

#[pymethods]
impl Descriptors {
    #[new]
    fn new(py: Python<'_>, domain: Connection<'_>, name: Name, timeout: Option<f64>) -> PyResult<Self> {
        let connection = domain.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let descriptors = domain.in_slices(py, timeout, |slice| connection.descriptors(&name.0, slice))?;
        Ok(Self {
            name: descriptors.name().to_owned(),
            version: descriptors.version(),
            place: descriptors.place(),
            kind: descriptors.kind(),
            mutable: descriptors.is_mutable(),
            may_grow: descriptors.may_grow(),
            nbytes: descriptors.bytes(),
            inner: Handle::new("list of descriptors", descriptors),
        })
    }

    /// `host`, the UUID of the GPU on which to import the memory, or `pinned:N`.
    #[getter]
    fn place(&self) -> String {
        self.place.to_string()
    }

    /// The chunks, in order.
    #[getter]
    fn chunks(&self, py: Python<'_>) -> PyResult<Vec<Chunk>> {
        self.with(py, |descriptors| {
            let chunks = descriptors.chunks().iter();
            chunks.map(|chunk| Chunk { fd: chunk.as_fd().as_raw_fd(), nbytes: chunk.bytes() }).collect()
        })
    }

    /// The chunks' file descriptors, in order.
    #[getter]
    fn fds(&self, py: Python<'_>) -> PyResult<Vec<i32>> {
        self.with(py, |descriptors| descriptors.chunks().iter().map(|chunk| chunk.as_fd().as_raw_fd()).collect())
    }

    /// All tensors, in the order in which they were added.
    #[pyo3(name = "_tensors")]
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<(String, TensorPlace)>> {
        self.with(py, |descriptors| {
            let tensors = descriptors.table().in_given_order().into_iter();
            tensors
                .map(|tensor| {
                    let place = TensorPlace {
                        dtype: tensor.dtype().name(),
                        shape: Tuple(tensor.shape().collect()),
                        strides: Tuple(tensor.strides().collect()),
                        chunk: tensor.chunk(),
                        offset: tensor.offset(),
                        nbytes: tensor.bytes(),
                    };
                    (tensor.name().to_owned(), place)
                })
                .collect()
        })
    }

    /// Its metadata.
    #[getter]
    fn metadata(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        let pairs = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        self.with(py, |descriptors| descriptors.table().metadata().map(pairs).collect())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the descriptors and gives the lease back. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}
