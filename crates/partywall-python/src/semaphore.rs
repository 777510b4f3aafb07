//! Semaphores and permits.

use std::sync::Arc;

use partywall::{Error, error::Gone};
use pyo3::prelude::*;

use crate::{arguments::Name, domain::Domain, errors::Raise, handle::Handle, stream::Stream, wait};

/// An open semaphore.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Semaphore {
    inner: Handle<Arc<partywall::Semaphore>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    maximum: u32,
}

impl Semaphore {
    fn permit(semaphore: Arc<partywall::Semaphore>, permit: partywall::Permit) -> Permit {
        let name = semaphore.name().to_owned();
        Permit { held: Handle::new("permit", Held { permit, semaphore }), name }
    }
}

#[pymethods]
impl Semaphore {
    /// Opens a semaphore.
    #[staticmethod]
    fn open(py: Python<'_>, domain: &Domain, name: Name, maximum: u32, shared: bool) -> PyResult<Self> {
        let options = domain.get(py)?.semaphore_options(&name.0, maximum).shared(shared);
        let semaphore = py.detach(|| options.open()).or_raise(py)?;
        let name = semaphore.name().to_owned();
        let maximum = semaphore.maximum();
        Ok(Self { inner: Handle::new("semaphore", Arc::new(semaphore)), name, maximum })
    }

    /// Acquires a permit, and waits for one. Returns `None` once `stop`, which is polled, says so.
    fn acquire(&self, py: Python<'_>, timeout: Option<f64>, stop: Option<Py<PyAny>>) -> PyResult<Option<Permit>> {
        let semaphore = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let is_over = |py: Python<'_>| {
            self.inner.check(py)?;
            stop.as_ref().map_or(Ok(false), |stop| stop.bind(py).call0()?.is_truthy())
        };
        let acquired = wait::until(py, timeout, is_over, |wait| semaphore.acquire(wait))?;
        Ok(acquired.map(|permit| Self::permit(semaphore, permit)))
    }

    /// Acquires a permit if one is free and no thread waits for one.
    fn try_acquire(&self, py: Python<'_>) -> PyResult<Option<Permit>> {
        let semaphore = self.inner.get(py)?;
        let acquired = semaphore.try_acquire().or_raise(py)?;
        Ok(acquired.map(|permit| Self::permit(semaphore, permit)))
    }

    /// How many permits are free.
    #[getter]
    fn available(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.inner.get(py)?.available())
    }

    /// How many threads wait, in all processes.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.inner.get(py)?.waiting())
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the handle. Permits stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}

/// A permit of a semaphore.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Permit {
    /// `None` once the permit was released or given to a stream.
    held: Handle<Held>,
    #[pyo3(get)]
    name: String,
}

struct Held {
    permit: partywall::Permit,
    semaphore: Arc<partywall::Semaphore>,
}

impl Permit {
    fn take(&self, py: Python<'_>) -> PyResult<Held> {
        let held = self.held.lock().take();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::Permit { name: self.name.clone() })
    }
}

#[pymethods]
impl Permit {
    /// Releases the permit.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.take(py)?;
        py.detach(|| held.permit.release()).or_raise(py)
    }

    /// Releases the permit when all work that is on a stream now is done.
    fn release_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let semaphore = self.held.lock().as_ref().map(|held| held.semaphore.clone());
        let semaphore = semaphore.ok_or_else(|| self.not_held()).or_raise(py)?;
        let stream = Stream::find(py, semaphore.domain(), device, stream)?;
        let Held { permit, .. } = self.take(py)?;
        py.detach(|| permit.release_on(stream.borrow())).or_else(|unreleased| {
            *self.held.lock() = Some(Held { permit: *unreleased.value, semaphore });
            Err(unreleased.error).or_raise(py)
        })
    }

    /// Whether the permit was released or given to a stream.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }
}
