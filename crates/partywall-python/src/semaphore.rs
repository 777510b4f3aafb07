//! Semaphores and permits.

use std::sync::Arc;

use partywall::{Error, error::Gone};
use partywall_os::process::fork_generation;
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyTuple};

use crate::{
    arguments::{Name, Optional, Permits},
    domain::Connection,
    errors::{Never, Raise, unclosed},
    handle::Handle,
    stream::Stream,
    wait,
};

/// The compiled part of `partywall.Semaphore`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Semaphore {
    inner: Handle<Arc<partywall::Semaphore>>,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// The total number of permits.
    #[pyo3(get)]
    maximum: u32,
}

#[pymethods]
impl Semaphore {
    #[new]
    fn new(py: Python<'_>, domain: Connection<'_>, name: Name, maximum: Permits, shared: bool) -> PyResult<Self> {
        let options = domain.get(py)?.semaphore_options(&name.0, maximum.0).shared(shared);
        let semaphore = py.detach(|| options.open()).or_raise(py)?;
        let name = semaphore.name().to_owned();
        let maximum = semaphore.maximum();
        Ok(Self { inner: Handle::new("semaphore", Arc::new(semaphore)), name, maximum })
    }

    /// Takes a permit. Waits for one up to `timeout` seconds, or for ever.
    #[pyo3(signature = (timeout = None))]
    fn acquire(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Permit> {
        let semaphore = self.inner.get(py)?;
        let permit = self.inner.for_turn(py, wait::timeout(timeout)?, |wait| semaphore.acquire(wait))?;
        Ok(Permit::new(semaphore, permit))
    }

    /// Takes a permit as `acquire` does. Returns `None` once `stop`, which is polled, says so.
    #[pyo3(name = "_acquire_unless")]
    fn acquire_unless(&self, py: Python<'_>, timeout: Option<f64>, stop: Py<PyAny>) -> PyResult<Option<Permit>> {
        let semaphore = self.inner.get(py)?;
        let is_over = |py: Python<'_>| {
            self.inner.check(py)?;
            stop.bind(py).call0()?.is_truthy()
        };
        let acquired = wait::until(py, wait::timeout(timeout)?, is_over, |wait| semaphore.acquire(wait))?;
        Ok(acquired.map(|permit| Permit::new(semaphore, permit)))
    }

    /// Takes a permit if one is free and no thread waits for it; else returns `None`.
    fn try_acquire(&self, py: Python<'_>) -> PyResult<Option<Permit>> {
        let semaphore = self.inner.get(py)?;
        let acquired = semaphore.try_acquire().or_raise(py)?;
        Ok(acquired.map(|permit| Permit::new(semaphore, permit)))
    }

    /// The number of permits that are free now.
    #[getter]
    fn available(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.inner.get(py)?.available())
    }

    /// The number of threads, in all processes, that wait for a permit now.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.inner.get(py)?.waiting())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the handle. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}

/// A permit of a semaphore. Give it back with `release`, `release_on` or the end of its `with`.
#[pyclass(frozen, module = "partywall", weakref)]
pub(crate) struct Permit {
    /// `None` once the permit was released or given to a stream.
    permit: Handle<HeldPermit>,
    name: String,
    /// The process that acquired it.
    generation: u64,
}

struct HeldPermit {
    permit: partywall::Permit,
    semaphore: Arc<partywall::Semaphore>,
}

impl Permit {
    fn new(semaphore: Arc<partywall::Semaphore>, permit: partywall::Permit) -> Self {
        let name = semaphore.name().to_owned();
        Self { permit: Handle::new("permit", HeldPermit { permit, semaphore }), name, generation: fork_generation() }
    }

    fn take(&self, py: Python<'_>) -> PyResult<HeldPermit> {
        let held = self.permit.lock().take();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::Permit { name: self.name.clone() })
    }

    /// Returns whether this process must give it back. In a forked child it belongs to the parent.
    fn is_ours(&self) -> bool {
        self.held() && self.generation == fork_generation()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_ours() {
            unclosed(&self.__repr__());
        }
    }
}

#[pymethods]
impl Permit {
    /// Whether the permit must still be given back.
    #[getter]
    fn held(&self) -> bool {
        !self.permit.is_closed()
    }

    /// Gives the permit back. Raises `NotHeld` if it was already given back.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.take(py)?;
        py.detach(|| held.permit.release()).or_raise(py)
    }

    /// Gives the permit back once all work that is now on the stream is done. Returns immediately.
    ///
    /// `stream` and `device` are as for a `Timeline`.
    #[pyo3(signature = (stream = None, *, device = None))]
    fn release_on(&self, py: Python<'_>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<()> {
        let semaphore = self.permit.lock().as_ref().map(|held| held.semaphore.clone());
        let semaphore = semaphore.ok_or_else(|| self.not_held()).or_raise(py)?;
        let stream = Stream::or_host(py, semaphore.domain(), stream, device, || "release()".to_owned())?;
        let HeldPermit { permit, .. } = self.take(py)?;
        py.detach(|| permit.release_on(stream.borrow())).or_else(|unreleased| {
            *self.permit.lock() = Some(HeldPermit { permit: *unreleased.value, semaphore });
            Err(unreleased.error).or_raise(py)
        })
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.is_ours() { self.release(py) } else { Ok(()) }
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a permit is this process's own"))
    }

    fn __repr__(&self) -> String {
        format!("<partywall.Permit of {}: {}>", self.name, if self.held() { "held" } else { "given back" })
    }
}
