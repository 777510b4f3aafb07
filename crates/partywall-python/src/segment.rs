//! An open version of a name, and its memory pinned.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use partywall::{Place, Refreshed};
use partywall_os::lock::IgnorePoison;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    build::{Planned, place, typed},
    errors::{Raise, cannot_grow_here, closed},
    handle::Handle,
    owner::{Owner, drain},
    tensor::Tensor,
    wait,
};

/// The process that withdrew a name, when it did, the deadline, and what happens then.
pub(crate) type Notice = (u32, f64, f64, &'static str);

pub(crate) fn notice(notice: partywall::info::Notice) -> Notice {
    let seconds = |ms: u64| ms as f64 / 1e3;
    (notice.pid, seconds(notice.at), seconds(notice.until), notice.then.name())
}

/// An open version of a name, which holds a lease on it.
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
    mutable: bool,
    #[pyo3(get)]
    kept: bool,
    #[pyo3(get)]
    uid: u32,
    #[pyo3(get)]
    shared: bool,
    /// True if it was committed through this object rather than opened.
    #[pyo3(get)]
    committed: bool,
}

impl Segment {
    pub(crate) fn opened(segment: partywall::Segment) -> Self {
        let unowned = Self::unowned(&segment);
        Self { owner: Mutex::new(Some(Owner::of_segment(segment))), ..unowned }
    }

    pub(crate) fn committed(segment: partywall::Segment) -> Self {
        Self { committed: true, ..Self::opened(segment) }
    }

    /// Returns the segment of a build that was committed; `None` for any other owner.
    pub(crate) fn of(owner: Arc<Owner>) -> Option<Self> {
        let unowned = Self::unowned(&*owner.segment()?);
        Some(Self { owner: Mutex::new(Some(owner)), committed: true, ..unowned })
    }

    fn unowned(segment: &partywall::Segment) -> Self {
        Self {
            owner: Mutex::new(None),
            name: segment.name().to_owned(),
            version: segment.version(),
            place: segment.place(),
            kind: segment.kind(),
            mutable: segment.is_mutable(),
            kept: segment.is_kept(),
            uid: segment.owner(),
            shared: segment.is_shared(),
            committed: false,
        }
    }

    /// Takes the owner, to close the segment.
    fn take_closed(&self) -> Option<Arc<Owner>> {
        let owner = self.owner.lock().ignore_poison().take();
        owner.inspect(|owner| owner.note_closed())
    }

    /// Returns the owner, unless the segment is closed.
    fn open(&self) -> Option<Arc<Owner>> {
        self.owner.lock().ignore_poison().clone()
    }

    /// Calls `action` with the segment, which stays open meanwhile.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Arc<Owner>, &Arc<partywall::Segment>) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let owner = self.open().ok_or_else(|| closed(py, "segment"))?;
        let result = py.detach(|| owner.segment().map(|segment| action(&owner, &segment)));
        result.ok_or_else(|| closed(py, "segment"))?.or_raise(py)
    }

    /// Waits for an event of the segment. Closing the segment ends the wait.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        attempt: impl Fn(&partywall::Segment, Duration) -> partywall::Result<T> + Sync,
    ) -> PyResult<T> {
        let waited = wait::in_slices(py, wait::timeout(timeout)?, |slice| {
            // Looked up again for each slice, so that a wait keeps the segment open for one slice at most.
            let owner = self.open();
            let segment = owner.as_ref().and_then(|owner| owner.segment());
            segment.map(|segment| attempt(&segment, slice)).transpose()
        });
        waited?.ok_or_else(|| closed(py, "segment"))
    }

    fn refreshed(&self, py: Python<'_>, refreshed: Refreshed) -> PyResult<bool> {
        match refreshed {
            Refreshed::Unchanged => Ok(false),
            Refreshed::Grown => Ok(true),
            Refreshed::DoesNotFit { bytes, reserved } => {
                Err(cannot_grow_here(py, &self.name, self.version, bytes, reserved))
            }
        }
    }
}

#[pymethods]
impl Segment {
    /// `host`, or the UUID of the GPU that has the memory.
    #[getter]
    fn place(&self) -> String {
        self.place.to_string()
    }

    /// Mapped bytes, including alignment.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |_, segment| Ok(segment.bytes()))
    }

    /// The most bytes that the segment can have in this process without moving; 0 if it cannot grow.
    #[getter]
    fn reserved(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |_, segment| Ok(segment.reserved()))
    }

    /// Its metadata.
    #[getter]
    fn metadata(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        let pairs = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        self.with(py, |_, segment| Ok(segment.metadata().map(pairs).collect()))
    }

    /// The names of the tensors, in the order in which they were added.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |_, segment| Ok(segment.tensors().iter().map(|tensor| tensor.name().to_owned()).collect()))
    }

    /// All tensors, in that order.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        self.with(py, |owner, segment| {
            segment.tensors().iter().map(|tensor| Tensor::of_segment(owner, tensor)).collect()
        })
    }

    /// The tensor of this name.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        self.with(py, |owner, segment| Tensor::of_segment(owner, &segment.tensor(name)?))
    }

    /// Grows a version that this process committed: the last tensor to `length` along its first dimension, and by `tensors`,
    /// with `spare` bytes behind them for later growth.
    fn grow(&self, py: Python<'_>, length: Option<u64>, tensors: Vec<Planned>, spare: u64) -> PyResult<()> {
        let tensors = typed(tensors)?;
        self.with(py, |_, segment| {
            let mut growth = segment.grow().spare(spare);
            if let Some(length) = length {
                // If the segment has no tensors, the growth itself reports that none can be longer.
                let last = segment.tensors().last().map(|tensor| tensor.name().to_owned()).unwrap_or_default();
                growth = growth.extend(&last, length);
            }
            for (name, dtype, shape) in &tensors {
                growth = growth.tensor(name, *dtype, shape);
            }
            growth.commit()
        })
    }

    /// Maps what the segment has grown by. Returns whether it has grown.
    fn refresh(&self, py: Python<'_>) -> PyResult<bool> {
        let refreshed = self.with(py, |_, segment| segment.refresh())?;
        self.refreshed(py, refreshed)
    }

    /// Waits until the segment is longer than this process knows, and maps the growth.
    fn wait_growth(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let refreshed = self.wait(py, timeout, |segment, slice| segment.wait_growth(slice))?;
        self.refreshed(py, refreshed).map(drop)
    }

    /// Waits until the name is removed or goes with its owner. Returns the notice if there is a deadline: the process, the times
    /// in seconds since 1970, and what happens then.
    fn wait_withdrawn(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Notice>> {
        let notice = self.wait(py, timeout, |segment, slice| segment.wait_withdrawn(slice))?;
        Ok(notice.map(self::notice))
    }

    /// Raises if the segment is stale.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |_, segment| segment.check())
    }

    /// Registers host memory with CUDA, for asynchronous copies of a GPU.
    fn pin(&self, py: Python<'_>, device: &str) -> PyResult<Pinned> {
        let Place::Gpu(uuid) = place(py, device)? else {
            return Err(PyValueError::new_err("memory is pinned for a GPU: device is cuda, cuda:N or a GPU's UUID"));
        };
        self.with(py, |owner, segment| {
            let pinned = partywall::Pinned::new(segment.clone(), segment.domain().gpu(uuid)?)?;
            let nbytes = pinned.bytes();
            Ok(Pinned { held: Handle::new(Held { pinned, _owner: owner.clone() }), nbytes })
        })
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.lock().ignore_poison().is_none()
    }

    /// Releases the lease once no tensor of the segment is in use, and removes the name if this object committed it. Calling it
    /// again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.take_closed().map_or(Ok(()), |owner| owner.close(py))
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        drop(self.take_closed());
    }
}

/// A segment in host memory that is registered with CUDA.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Pinned {
    held: Handle<Held>,
    #[pyo3(get)]
    nbytes: u64,
}

/// The pin is dropped first: it needs the memory to be mapped, and the owner keeps the mapping.
struct Held {
    pinned: partywall::Pinned<Arc<partywall::Segment>>,
    _owner: Arc<Owner>,
}

#[pymethods]
impl Pinned {
    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    /// Unregisters the memory once all work of this process on the GPU is done. Calling it again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(held) = self.held.lock().take() else { return Ok(()) };
        let context = held.pinned.gpu().context().clone();
        // If a signal ends the wait, the reaper unregisters the memory.
        let held = Handle::new(held);
        if drain(py, &context)? {
            held.close(py);
        }
        Ok(())
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        let held = self.held.lock().take();
        drop(held.map(Handle::new));
    }
}
