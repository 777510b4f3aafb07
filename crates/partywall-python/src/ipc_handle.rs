//! Published tensors for programs that open memory by the driver's handles.

use std::sync::Arc;

use pyo3::{prelude::*, types::PyBytes};

use crate::{handle::Closable, owner::Owner};

/// The driver's handle of a published tensor, which keeps the memory until it is closed.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct IpcHandle {
    owner: Closable<Arc<Owner>>,
    handle: [u8; 64],
    /// The number of the GPU in this process.
    #[pyo3(get)]
    device_id: u32,
    /// Where the tensor begins in the allocation.
    #[pyo3(get)]
    offset: u64,
    /// The bytes of the tensor.
    #[pyo3(get)]
    nbytes: u64,
}

impl IpcHandle {
    pub(crate) fn of(owner: &Arc<Owner>, tensor: &partywall::IpcHandle<'_>) -> Self {
        Self {
            owner: Closable::new("handle", owner.clone()),
            handle: tensor.handle().0,
            device_id: tensor.gpu().context().device().ordinal(),
            offset: tensor.offset(),
            nbytes: tensor.bytes(),
        }
    }
}

#[pymethods]
impl IpcHandle {
    /// The 64 bytes. Raises `Closed` once it is closed.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.owner.check(py)?;
        Ok(PyBytes::new(py, &self.handle))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.is_closed()
    }

    /// Lets the memory end with its segment. Calling it again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let owner = self.owner.lock().take();
        owner.map_or(Ok(()), |owner| owner.close(py))
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        drop(self.owner.lock().take());
    }
}
