//! Streams of other libraries, as arguments of calls that enqueue work.
#![allow(unsafe_code)] // a stream on another library's word

use std::sync::Arc;

use partywall::{
    DeviceUuid, Domain, Gpu,
    cuda::{RawStream, StreamRef},
};
use pyo3::{exceptions::PyValueError, intern, prelude::*, types::PyInt};

use crate::{
    arguments::{Optional, place},
    errors::{self, Raise},
};

/// A stream of the primary context of a GPU.
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    raw: RawStream,
}

impl Stream {
    /// Returns the stream with this handle, or the legacy default stream, of the GPU that Python names.
    pub(crate) fn find(py: Python<'_>, domain: &Domain, device: &str, handle: Option<u64>) -> PyResult<Self> {
        Ok(Self::of(gpu(py, domain, device)?, handle))
    }

    /// Returns the stream with this handle, or the legacy default stream, of a known GPU.
    pub(crate) fn of(gpu: Arc<Gpu>, handle: Option<u64>) -> Self {
        Self { gpu, raw: raw(handle) }
    }

    /// Returns the stream that Python names. Without a device it is a stream of the GPU that torch or cupy uses now.
    pub(crate) fn at(
        py: Python<'_>,
        domain: &Domain,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
    ) -> PyResult<Self> {
        let place = py.import(intern!(py, "partywall._streams"))?.getattr(intern!(py, "place"))?;
        let (device, handle): (String, Option<u64>) = place.call1((stream, device))?.extract()?;
        Self::find(py, domain, &device, handle)
    }

    /// Returns the stream as [`at`](Self::at) does. Without a GPU the advice names `call`, which does this for hosts.
    pub(crate) fn or_host(
        py: Python<'_>,
        domain: &Domain,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
        call: impl FnOnce() -> String,
    ) -> PyResult<Self> {
        Self::at(py, domain, stream, device).map_err(|error| errors::for_hosts(py, error, call))
    }

    /// Borrows the stream for one call.
    pub(crate) fn borrow(&self) -> StreamRef<'_> {
        // SAFETY: the caller's promise: a stream of the primary context of that GPU, in which every library works that
        // Python has, and which lives for as long as this call.
        unsafe { StreamRef::borrow(self.gpu.context(), self.raw) }
    }

    /// Returns the GPU.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the number of the GPU in this process.
    pub(crate) fn ordinal(&self) -> u32 {
        self.gpu.context().device().ordinal()
    }

    /// Returns the GPU's UUID and the handle.
    pub(crate) fn id(&self) -> (DeviceUuid, RawStream) {
        (self.gpu.uuid(), self.raw)
    }
}

/// Returns the stream that Python names, of the GPU with this number.
pub(crate) fn named(py: Python<'_>, stream: Optional<'_, '_>, ordinal: i32) -> PyResult<RawStream> {
    handle(py, stream, ordinal).map(raw)
}

/// Returns the handle of the stream that Python names, of the GPU with this number: a handle, or an object that
/// `partywall._streams` accepts.
pub(crate) fn handle(py: Python<'_>, stream: Optional<'_, '_>, ordinal: i32) -> PyResult<Option<u64>> {
    match stream {
        Some(stream) if stream.is_instance_of::<PyInt>() => stream.extract().map(Some),
        stream => py.import("partywall._streams")?.call_method1("handle", (stream, ordinal))?.extract(),
    }
}

/// Returns the stream with this handle; the legacy default stream for `None` and 0.
pub(crate) fn raw(handle: Option<u64>) -> RawStream {
    handle.filter(|handle| *handle != 0).map_or(RawStream::LEGACY_DEFAULT, RawStream)
}

/// Returns the GPU that Python names.
pub(crate) fn gpu(py: Python<'_>, domain: &Domain, device: &str) -> PyResult<Arc<Gpu>> {
    match place(py, device)?.gpu() {
        Some(uuid) => py.detach(|| domain.gpu(uuid)).or_raise(py),
        None => Err(PyValueError::new_err("a stream is a GPU's: device is cuda, cuda:N or a GPU's UUID")),
    }
}
