//! Versions that are being written, and the right to write one that other processes wait for.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall::{Access, Builder, DType, Gpu, Place, WhenSome, error::Mismatch};
use pyo3::prelude::*;

use crate::{
    arguments::{Needs, Optional, TensorName, place},
    dlpack::contiguous,
    errors::{Raise, parse_dtype},
    handle::{Closable, Handle},
    owner::Owner,
    segment::Segment,
    tensor::{Layout, Tensor},
};

/// Name, dtype and shape of a tensor, as Python passes them.
pub(crate) type Planned = (String, String, Vec<u64>);

/// A tensor of a build as Python passes it: also its strides, in elements, unless it is without gaps; and for a view
/// the earlier tensor whose memory it shows, and the offset in it in bytes.
pub(crate) type Placed = (String, String, Vec<u64>, Option<Vec<u64>>, Option<(String, u64)>);

/// A version that is being written and that no other process sees.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Build {
    owner: Closable<Arc<Owner>>,
    /// What gets access to memory that is allocated later.
    access: Option<Needs>,
    tensors: Vec<Layout>,
    /// The index of each name in the tensors.
    places: HashMap<String, usize>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    place: String,
    /// Grows where chunks are allocated on demand.
    nbytes: AtomicU64,
}

impl Build {
    /// Allocates a build with these tensors.
    pub(crate) fn allocate(
        py: Python<'_>,
        name: &str,
        device: &str,
        access: Option<Needs>,
        tensors: Vec<Placed>,
        metadata: Vec<(String, String)>,
        builder: impl FnOnce(Place) -> Builder + Send,
    ) -> PyResult<Self> {
        let place = place(py, device)?;
        let typed =
            |(name, dtype, shape, strides, within): Placed| Ok((name, parse_dtype(&dtype)?, shape, strides, within));
        let tensors = tensors.into_iter().map(typed).collect::<PyResult<Vec<_>>>()?;
        let allocate = || {
            let mut builder = builder(place);
            for (name, dtype, shape, strides, within) in &tensors {
                builder = match (strides, within) {
                    (None, None) => builder.tensor(name, *dtype, shape),
                    (Some(strides), None) => builder.tensor_strided(name, *dtype, shape, strides),
                    (strides, Some((of, offset))) => {
                        let strides = strides.clone().unwrap_or_else(|| contiguous(shape));
                        builder.view(name, *dtype, shape, &strides, (of, *offset))
                    }
                };
            }
            for (key, value) in &metadata {
                builder = builder.metadata(key, value);
            }
            let mut build = builder.allocate()?;
            allow(&mut build, access, tensors.iter().map(|(name, _, shape, ..)| (&**name, &**shape)))?;
            partywall::Result::Ok(build)
        };
        let build = py.detach(allocate).or_raise(py)?;
        // The table has checked the numbers, but not the strides of a tensor without elements.
        let layout = |(name, dtype, shape, strides, _): (_, DType, Vec<u64>, Option<Vec<u64>>, _)| {
            let strides = strides.unwrap_or_else(|| contiguous(&shape));
            let elements = match shape.contains(&0) {
                true => 0,
                false => shape.iter().zip(&strides).map(|(length, stride)| (length - 1) * stride).sum::<u64>() + 1,
            };
            Layout { name, dtype, shape, strides, bytes: dtype.bytes_for(elements).unwrap_or(0) }
        };
        Ok(Self::new(name, build, access, tensors.into_iter().map(layout).collect()))
    }

    /// Returns the copy of a segment's tensors that a stream makes, as a version of `name` at `device`.
    pub(crate) fn copy(
        py: Python<'_>,
        source: &Segment,
        name: &str,
        (device, access): (&str, Option<Needs>),
        stream: Optional<'_, '_>,
    ) -> PyResult<Self> {
        let place = place(py, device)?;
        if place == Place::Host {
            // Without looking for a stream, which a process without a GPU does not have.
            let refused = Mismatch::HostTarget { name: name.to_owned(), pinned: false };
            return partywall::Result::Err(refused.into()).or_raise(py);
        }
        let stream = source.copying(py, stream, |segment| place.gpu().or(segment.gpu().map(Gpu::uuid)))?;
        source.with(py, |owner, segment| {
            owner.note_gpu(stream.gpu());
            let tensors: Vec<_> = segment.tensors().iter().map(Layout::of).collect();
            let mut build = segment.domain().create(name, place).like(segment).allocate()?;
            // Before the copy, which the CPU would otherwise wait for.
            allow(&mut build, access, tensors.iter().map(|tensor| (&*tensor.name, &*tensor.shape)))?;
            build.copy_from(segment, stream.borrow())?;
            let this = Self::new(name, build, access, tensors);
            if let Some(owner) = &*this.owner.lock() {
                owner.note_gpu(stream.gpu());
            }
            Ok(this)
        })
    }

    fn new(name: &str, build: partywall::Build, access: Option<Needs>, tensors: Vec<Layout>) -> Self {
        let name = name.to_owned();
        let place = build.place().to_string();
        let nbytes = build.bytes().into();
        let places = tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
        Self { owner: Closable::new("build", Owner::of_build(build)), access, tensors, places, name, place, nbytes }
    }

    /// Returns a tensor, whose memory is allocated from now on.
    fn take(&self, owner: &Arc<Owner>, build: &mut partywall::Build, tensor: &Layout) -> partywall::Result<Tensor> {
        if !build.is_allocated(&tensor.name)? {
            build.allocate_for(&tensor.name)?;
            self.nbytes.store(build.bytes(), Ordering::Relaxed);
            allow(build, self.access, [(&*tensor.name, &*tensor.shape)].into_iter())?;
        }
        Tensor::of_build(owner, build, tensor)
    }

    /// Calls `action` with the build.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Arc<Owner>, &mut partywall::Build) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let owner = self.owner.get(py)?;
        let result = py.detach(|| owner.with_build(|build| action(&owner, build)));
        self.owner.unless_closed(py, result)?.or_raise(py)
    }
}

#[pymethods]
impl Build {
    /// The number of bytes allocated so far.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// Whether the memory of a tensor is allocated already, so that taking it allocates nothing.
    fn is_allocated(&self, py: Python<'_>, name: TensorName) -> PyResult<bool> {
        self.with(py, |_, build| build.is_allocated(&name.0))
    }

    /// The names of the tensors, in the order in which they were added.
    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    /// All tensors in that order, to be written.
    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        self.with(py, |owner, build| self.tensors.iter().map(|tensor| self.take(owner, build, tensor)).collect())
    }

    /// The tensor of this name, to be written.
    fn tensor(&self, py: Python<'_>, name: TensorName) -> PyResult<Tensor> {
        let name = &*name.0;
        let found = self.places.get(name).map(|at| &self.tensors[*at]);
        // If there is no such tensor, the build reports the error.
        let unknown = || Layout { name: name.to_owned(), dtype: DType::U8, shape: vec![], strides: vec![], bytes: 1 };
        self.with(py, |owner, build| match found {
            Some(tensor) => self.take(owner, build, tensor),
            None => self.take(owner, build, &unknown()),
        })
    }

    /// Enqueues a copy of all tensors of a segment, which has the same.
    fn copy_from(&self, py: Python<'_>, source: &Segment, stream: Optional<'_, '_>) -> PyResult<()> {
        let owner = self.owner.get(py)?;
        let at = py.detach(|| owner.with_build(|build| build.place().gpu())).flatten();
        let stream = source.copying(py, stream, |segment| at.or(segment.gpu().map(Gpu::uuid)))?;
        let copied = source.with(py, |from, segment| {
            from.note_gpu(stream.gpu());
            owner.note_gpu(stream.gpu());
            owner.with_build(|build| build.copy_from(segment, stream.borrow())).transpose()
        });
        self.owner.unless_closed(py, copied?)
    }

    /// Commits the build as the next version of its name. Waits for all work of this process on the GPU.
    fn commit(&self, py: Python<'_>) -> PyResult<Segment> {
        let owner = self.owner.get(py)?;
        // The commit would wait, too, but a signal ends this wait and leaves the build as it was.
        owner.drain(py)?;
        let committed = py.detach(|| owner.commit());
        self.owner.unless_closed(py, committed)?.or_raise(py)?;
        self.owner.lock().take();
        self.owner.unless_closed(py, Segment::of(owner))
    }

    /// Whether it was closed or committed.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.is_closed()
    }

    /// Frees the memory, once no tensor of it is used any more. Calling it again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let owner = self.owner.lock().take();
        owner.map_or(Ok(()), |owner| owner.close(py))
    }

    /// Closes as `close` does, but leaves all waiting to the reaper.
    fn close_later(&self) {
        drop(self.owner.lock().take());
    }
}

/// Gives the CPU, a GPU, or both access to the tensors of these names and shapes that are allocated, if the build is in
/// pinned memory.
fn allow<'a>(
    build: &mut partywall::Build,
    access: Option<Needs>,
    tensors: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> partywall::Result<()> {
    let (Place::Pinned(_), Some(Needs(access))) = (build.place(), access) else { return Ok(()) };
    for (name, _) in tensors.filter(|(_, shape)| !shape.contains(&0)) {
        if !build.is_allocated(name)? {
            continue;
        }
        if access != Access::Cpu {
            build.device(name)?;
        }
        if access != Access::Gpu {
            build.as_mut_bytes(name)?;
        }
    }
    Ok(())
}

/// Converts tensors to the form that the library takes.
pub(crate) fn typed(tensors: Vec<Planned>) -> PyResult<Vec<(String, DType, Vec<u64>)>> {
    tensors.into_iter().map(|(name, dtype, shape)| Ok((name, parse_dtype(&dtype)?, shape))).collect()
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
        Self { name: claim.name().to_owned(), claim: Handle::new("claim", claim) }
    }
}

#[pymethods]
impl Claim {
    /// Allocates the version that fulfils the claim when it is committed.
    #[pyo3(signature = (
        device, access, tensors, metadata, *,
        mutable = false, reserve = None, kept = false, shared = false, owner = None,
    ))]
    fn create(
        &self,
        py: Python<'_>,
        device: &str,
        access: Option<Needs>,
        tensors: Vec<Placed>,
        metadata: Vec<(String, String)>,
        mutable: bool,
        reserve: Option<u64>,
        kept: bool,
        shared: bool,
        owner: Option<u64>,
    ) -> PyResult<Build> {
        let claim = self.claim.take(py)?;
        Build::allocate(py, &self.name, device, access, tensors, metadata, |place| {
            let builder = claim.create(place).mutable(mutable).kept(kept).shared(shared);
            builder.when_some(owner, Builder::owner).when_some(reserve, Builder::reserve)
        })
    }

    /// Passes the right on, if nothing was created.
    fn close(&self, py: Python<'_>) {
        self.claim.close(py);
    }
}
