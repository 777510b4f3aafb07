//! An open version of a name, and its memory pinned.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use partywall::{DeviceUuid, Drain, Gpu, Place, Refreshed};
use partywall_os::lock::IgnorePoison;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    arguments::{Name, Needs, Optional, TensorName, pinning},
    build::{Build, Planned, typed},
    errors::{Raise, cannot_grow_here},
    handle::{Closable, Handle},
    ipc_handle::IpcHandle,
    members::Withdrawal,
    owner::{Owner, drain},
    stream::{self, Stream},
    tensor::Tensor,
    wait,
};

/// An open version of a name, which holds a lease on it.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Segment {
    owner: Closable<Arc<Owner>>,
    #[pyo3(get)]
    name: String,
    facts: Mutex<Facts>,
    place: Place,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    mutable: bool,
    /// True if it was committed through this object rather than opened.
    #[pyo3(get)]
    committed: bool,
}

/// What an advance changes.
#[derive(Clone, Copy)]
struct Facts {
    version: u64,
    kept: bool,
    uid: u32,
    shared: bool,
}

impl Facts {
    fn of(segment: &partywall::Segment) -> Self {
        let version = segment.version();
        Self { version, kept: segment.is_kept(), uid: segment.owner(), shared: segment.is_shared() }
    }
}

impl Segment {
    pub(crate) fn opened(segment: partywall::Segment) -> Self {
        let segment = Arc::new(segment);
        Self::new(&segment, Owner::of_segment(segment.clone()))
    }

    pub(crate) fn committed(segment: partywall::Segment) -> Self {
        Self { committed: true, ..Self::opened(segment) }
    }

    /// Returns the segment of a build that was committed; `None` for any other owner.
    pub(crate) fn of(owner: Arc<Owner>) -> Option<Self> {
        let segment = owner.segment()?;
        Some(Self { committed: true, ..Self::new(&segment, owner) })
    }

    fn new(segment: &partywall::Segment, owner: Arc<Owner>) -> Self {
        Self {
            owner: Closable::new("segment", owner),
            name: segment.name().to_owned(),
            facts: Mutex::new(Facts::of(segment)),
            place: segment.place(),
            kind: segment.kind(),
            mutable: segment.is_mutable(),
            committed: false,
        }
    }

    fn facts(&self) -> Facts {
        *self.facts.lock().ignore_poison()
    }

    /// Takes the owner, to close the segment.
    fn take_closed(&self) -> Option<Arc<Owner>> {
        let owner = self.owner.lock().take();
        owner.inspect(|owner| owner.note_closed())
    }

    /// Takes the owner, which then decides when the segment ends. Dropping it leaves the name.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Arc<Owner>> {
        self.owner.take(py)
    }

    /// Calls `action` with the segment, which stays open meanwhile.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Arc<Owner>, &Arc<partywall::Segment>) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let owner = self.owner.get(py)?;
        let result = py.detach(|| owner.segment().map(|segment| action(&owner, &segment)));
        self.owner.unless_closed(py, result)?.or_raise(py)
    }

    /// Returns the stream that copies this segment: that of the GPU that `at` finds, else of the domain's GPU.
    pub(crate) fn copying(
        &self,
        py: Python<'_>,
        stream: Optional<'_, '_>,
        at: impl FnOnce(&partywall::Segment) -> Option<DeviceUuid> + Send,
    ) -> PyResult<Stream> {
        let gpu = self.with(py, |_, segment| match at(segment) {
            Some(uuid) => segment.domain().gpu(uuid),
            None => segment.domain().default_gpu(),
        })?;
        let raw = stream::named(py, stream, gpu.context().device().ordinal() as i32)?;
        Ok(Stream::of(gpu, Some(raw.0)))
    }

    /// Waits for an event of the segment. Closing the segment ends the wait.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        attempt: impl Fn(&partywall::Segment, Duration) -> partywall::Result<T> + Sync,
    ) -> PyResult<T> {
        let waited = self
            .owner
            .wait(py, timeout, |owner, slice| owner.segment().map(|segment| attempt(&segment, slice)).transpose());
        self.owner.unless_closed(py, waited?)
    }

    fn refreshed(&self, py: Python<'_>, refreshed: Refreshed) -> PyResult<bool> {
        match refreshed {
            Refreshed::Unchanged => Ok(false),
            Refreshed::Grown => Ok(true),
            Refreshed::DoesNotFit { bytes, reserved } => {
                Err(cannot_grow_here(py, &self.name, self.facts().version, bytes, reserved))
            }
        }
    }
}

#[pymethods]
impl Segment {
    /// The version.
    #[getter]
    fn version(&self) -> u64 {
        self.facts().version
    }

    /// Whether the name stays after its committer has ended.
    #[getter]
    fn kept(&self) -> bool {
        self.facts().kept
    }

    /// The user to which the name belongs.
    #[getter]
    fn uid(&self) -> u32 {
        self.facts().uid
    }

    /// Whether processes of other users may open it.
    #[getter]
    fn shared(&self) -> bool {
        self.facts().shared
    }

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
    fn tensor(&self, py: Python<'_>, name: TensorName) -> PyResult<Tensor> {
        self.with(py, |owner, segment| Tensor::of_segment(owner, &segment.tensor(&name.0)?))
    }

    /// Grows a version that this process committed: the last tensor to `length` along its first dimension, and by
    /// `tensors`, with `spare` bytes behind them for later growth.
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

    /// Waits until the name is removed or goes with its owner. Returns the withdrawal if there is a deadline.
    fn wait_withdrawn(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Withdrawal>> {
        let notice = self.wait(py, timeout, |segment, slice| segment.wait_withdrawn(slice))?;
        Ok(notice.map(Withdrawal::from))
    }

    /// Raises if the segment is stale.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |_, segment| segment.check())
    }

    /// Opens the latest version, or `version`, as this one was opened; `None` if that is this version, or if `timeout`
    /// seconds bring no other.
    fn newer(&self, py: Python<'_>, version: Option<u64>, timeout: Option<f64>) -> PyResult<Option<Self>> {
        // Dropped in the reverse order: a thread that has a segment also has its owner.
        let (_owner, segment) = self.with(py, |owner, segment| Ok((owner.clone(), segment.clone())))?;
        let timeout = wait::timeout(timeout)?;
        let found = self.owner.for_turn(py, timeout, |wait| segment.newer(version, wait))?;
        Ok(found.map(Self::opened))
    }

    /// Maps the version that `next` has open at the addresses of this segment, and closes `next`, of which no tensor is
    /// used. Waits first for all work of this process on the GPU, or with `only` for that of the streams. None of the
    /// streams may be being captured.
    fn advance(&self, py: Python<'_>, next: &Self, streams: Vec<Option<Bound<'_, PyAny>>>, only: bool) -> PyResult<()> {
        let (owner, gpu) = self.with(py, |owner, segment| {
            let gpu = segment.gpu().map(|gpu| segment.domain().gpu(gpu.uuid())).transpose()?;
            Ok((owner.clone(), gpu))
        })?;
        // Memory that no GPU uses is refused, whatever the streams.
        let of_gpu = |gpu: Arc<Gpu>| {
            let ordinal = gpu.context().device().ordinal() as i32;
            let named = |stream: &Option<Bound<'_, PyAny>>| {
                let raw = stream::named(py, stream.as_ref(), ordinal)?;
                Ok(Stream::of(gpu.clone(), Some(raw.0)))
            };
            streams.iter().map(named).collect::<PyResult<Vec<_>>>()
        };
        let streams = gpu.map_or_else(|| Ok(Vec::new()), of_gpu)?;
        let other = self.owner.unless_closed(py, next.take_closed())?;
        let used = || PyValueError::new_err("tensors of the other version are used: drop them before the advance");
        let advanced = py.detach(|| {
            let other = other.into_segment()?;
            let streams: Vec<_> = streams.iter().map(Stream::borrow).collect();
            Some(owner.advance(other, if only { Drain::Only(&streams) } else { Drain::All(&streams) }))
        });
        advanced.ok_or_else(used)?.or_raise(py)?;
        *self.facts.lock().ignore_poison() = next.facts();
        Ok(())
    }

    /// Registers host memory with CUDA, for asynchronous copies of a GPU.
    fn pin(&self, py: Python<'_>, device: &str) -> PyResult<Pinned> {
        let uuid = pinning(py, device)?;
        self.with(py, |owner, segment| {
            let pinned = partywall::Pinned::new(segment.clone(), segment.domain().gpu(uuid)?)?;
            let nbytes = pinned.bytes();
            Ok(Pinned { held: Handle::new("pinned memory", HeldPin { pinned, _owner: owner.clone() }), nbytes })
        })
    }

    /// The driver's handle of a tensor that this process has published.
    fn ipc_handle(&self, py: Python<'_>, name: TensorName) -> PyResult<IpcHandle> {
        self.with(py, |owner, segment| Ok(IpcHandle::of(owner, &segment.tensor(&name.0)?.ipc_handle()?)))
    }

    /// Begins a version of `name` at `device`, and enqueues a copy of all tensors into it.
    fn to(
        &self,
        py: Python<'_>,
        name: Name,
        device: &str,
        access: Option<Needs>,
        stream: Optional<'_, '_>,
    ) -> PyResult<Build> {
        Build::copy(py, self, &name.0, (device, access), stream)
    }

    /// Enqueues a copy of all tensors of a segment, which has the same. This segment is open for writing.
    fn copy_from(&self, py: Python<'_>, source: &Self, stream: Optional<'_, '_>) -> PyResult<()> {
        let at = self.with(py, |_, segment| Ok(segment.gpu().map(Gpu::uuid)))?;
        let stream = source.copying(py, stream, |segment| at.or(segment.gpu().map(Gpu::uuid)))?;
        let (owner, target) = self.with(py, |owner, segment| Ok((owner.clone(), segment.clone())))?;
        source.with(py, |from, segment| {
            from.note_gpu(stream.gpu());
            owner.note_gpu(stream.gpu());
            target.copy_from(segment, stream.borrow())
        })
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.is_closed()
    }

    /// Releases the lease once no tensor of the segment is in use, and removes the name if this object committed it.
    /// Calling it again does nothing.
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
    held: Handle<HeldPin>,
    #[pyo3(get)]
    nbytes: u64,
}

/// The pin is dropped first: it needs the memory to be mapped, and the owner keeps the mapping.
struct HeldPin {
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
        let held = Handle::new("pinned memory", held);
        if drain(py, &context)? {
            held.close(py);
        }
        Ok(())
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        let held = self.held.lock().take();
        drop(held.map(|held| Handle::new("pinned memory", held)));
    }
}
