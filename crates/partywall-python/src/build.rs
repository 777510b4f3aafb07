//! Versions that are being written, and the right to write one that other processes wait for.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use partywall::{Builder, DType, DeviceChoice, Place};
use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{
    errors::{Raise, closed, parse, parse_dtype},
    handle::Handle,
    owner::Owner,
    segment::Segment,
    tensor::Tensor,
};

/// Name, dtype and shape of a tensor, as Python passes them.
pub(crate) type Planned = (String, String, Vec<u64>);

/// A version that is being written and that no other process sees.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Build {
    owner: Mutex<Option<Arc<Owner>>>,
    tensors: Vec<(String, DType, Vec<u64>)>,
    /// The index of each name in the tensors.
    places: HashMap<String, usize>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    place: String,
    #[pyo3(get)]
    nbytes: u64,
}

impl Build {
    /// Allocates a build with these tensors.
    pub(crate) fn allocate(
        py: Python<'_>,
        name: &str,
        device: &str,
        tensors: Vec<Planned>,
        metadata: Vec<(String, String)>,
        builder: impl FnOnce(Place) -> Builder + Send,
    ) -> PyResult<Self> {
        let place = place(py, device)?;
        let tensors = typed(tensors)?;
        let allocate = || {
            let mut builder = builder(place);
            for (name, dtype, shape) in &tensors {
                builder = builder.tensor(name, *dtype, shape);
            }
            for (key, value) in &metadata {
                builder = builder.metadata(key, value);
            }
            let build = builder.allocate()?;
            let context = build.gpu().map(|gpu| gpu.context().clone());
            let nbytes = build.bytes();
            partywall::Result::Ok((nbytes, Owner::of_build(build, context)))
        };
        let (nbytes, owner) = py.detach(allocate).or_raise(py)?;
        let name = name.to_owned();
        let place = place.to_string();
        let places = tensors.iter().enumerate().map(|(at, (name, ..))| (name.clone(), at)).collect();
        Ok(Self { owner: Mutex::new(Some(owner)), tensors, places, name, place, nbytes })
    }

    fn owner(&self, py: Python<'_>) -> PyResult<Arc<Owner>> {
        let owner = self.owner.lock().ignore_poison().clone();
        owner.ok_or_else(|| closed(py, "build"))
    }

    /// Calls `action` with the build.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Arc<Owner>, &mut partywall::Build) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let owner = self.owner(py)?;
        py.detach(|| owner.with_build(|build| action(&owner, build))).ok_or_else(|| closed(py, "build"))?.or_raise(py)
    }
}

#[pymethods]
impl Build {
    /// The names of the tensors, in the order in which they were added.
    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|(name, ..)| name.clone()).collect()
    }

    /// All tensors in that order, to be written.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        self.with(py, |owner, build| {
            let all = self.tensors.iter();
            all.map(|(name, dtype, shape)| Tensor::of_build(owner, build, name, *dtype, shape)).collect()
        })
    }

    /// The tensor of this name, to be written.
    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        // If there is no such tensor, the build reports the error.
        let found = self.places.get(name).map(|at| &self.tensors[*at]);
        let (dtype, shape) = found.map_or((DType::U8, &[][..]), |(_, dtype, shape)| (*dtype, &shape[..]));
        self.with(py, |owner, build| Tensor::of_build(owner, build, name, dtype, shape))
    }

    /// Commits the build as the next version of its name. Waits for all work of this process on the GPU.
    fn commit(&self, py: Python<'_>) -> PyResult<Segment> {
        let owner = self.owner(py)?;
        // The commit would wait, too, but a signal ends this wait and leaves the build as it was.
        owner.drain(py)?;
        match py.detach(|| owner.commit()) {
            Some(committed) => committed.or_raise(py)?,
            None => return Err(closed(py, "build")),
        }
        self.owner.lock().ignore_poison().take();
        Segment::of(owner).ok_or_else(|| closed(py, "build"))
    }

    /// Whether it was closed or committed.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.lock().ignore_poison().is_none()
    }

    /// Frees the memory, once no tensor of it is used any more. Calling it again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let owner = self.owner.lock().ignore_poison().take();
        owner.map_or(Ok(()), |owner| owner.close(py))
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        drop(self.owner.lock().ignore_poison().take());
    }
}

/// Converts tensors to the form that the library takes.
pub(crate) fn typed(tensors: Vec<Planned>) -> PyResult<Vec<(String, DType, Vec<u64>)>> {
    tensors.into_iter().map(|(name, dtype, shape)| Ok((name, parse_dtype(&dtype)?, shape))).collect()
}

/// Returns the place that Python names, for the calling thread: `cuda`, or `gpu`, is its current device, as in torch and cupy.
pub(crate) fn place(py: Python<'_>, device: &str) -> PyResult<Place> {
    let choice = parse(device)?;
    let is_current = matches!(device, "cuda" | "gpu");
    let resolve = || match partywall::gpu::resolve(if is_current { DeviceChoice::Auto } else { choice })? {
        // The selection of a default reports why there is none.
        (Place::Host, Some(_)) if is_current => partywall::gpu::resolve(choice),
        resolved => Ok(resolved),
    };
    Ok(py.detach(resolve).or_raise(py)?.0)
}

/// Returns the place that Python names; `None` if it names none, or `auto`.
pub(crate) fn named_place(py: Python<'_>, device: Option<&str>) -> PyResult<Option<Place>> {
    device.filter(|device| *device != "auto").map(|device| place(py, device)).transpose()
}

/// The right to build a name that others wait for. Closing it passes the right on to one of them.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Claim {
    claim: Handle<partywall::Claim>,
    #[pyo3(get)]
    name: String,
}

impl Claim {
    pub(crate) fn new(claim: partywall::Claim) -> Self {
        Self { name: claim.name().to_owned(), claim: Handle::new(claim) }
    }
}

#[pymethods]
impl Claim {
    /// Allocates the version that fulfils the claim when it is committed.
    #[pyo3(signature = (device, tensors, metadata, *, mutable, reserve, kept, shared))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments")]
    fn create(
        &self,
        py: Python<'_>,
        device: &str,
        tensors: Vec<Planned>,
        metadata: Vec<(String, String)>,
        mutable: bool,
        reserve: Option<u64>,
        kept: bool,
        shared: bool,
    ) -> PyResult<Build> {
        let claim = self.claim.take(py, "claim")?;
        Build::allocate(py, &self.name, device, tensors, metadata, |place| {
            let builder = claim.create(place).mutable(mutable).kept(kept).shared(shared);
            reserve.into_iter().fold(builder, Builder::reserve)
        })
    }

    /// Passes the right on, if nothing was created.
    fn close(&self, py: Python<'_>) {
        self.claim.close(py);
    }
}
