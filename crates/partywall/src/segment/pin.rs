//! Pinned host segments: page-locked and registered with CUDA, so that a GPU can access them.

use std::{fmt, ops::Deref, sync::Arc};

use partywall_cuda::{AccessError, DeviceSlice, HostRegistration, StreamRef};
use partywall_shm::Tensor as Entry;

use super::{Segment, no_such_tensor};
use crate::{
    error::{InvalidArgument, Result},
    gpu::{DeviceRange, Gpu, access_error},
};

/// A host segment whose memory is registered with CUDA in this process; see [`Segment::pin`].
///
/// Copies from and to a pinned segment are asynchronous: the call returns immediately, and the copy engine reads or
/// writes the shared memory directly. Kernels may use the memory in place, at the speed of the bus.
///
/// The registration covers the memory that the segment had mapped when it was first pinned. Dropping the last pin of a
/// segment unregisters it, which may wait for running work: drain the streams that use it first.
///
/// `S` is a reference to the segment: `&Segment`, or an `Arc<Segment>` that keeps it alive.
#[must_use = "the memory is unregistered when it is dropped"]
pub struct Pinned<S: Deref<Target = Segment>> {
    segment: S,
    /// How often the segment had grown when it was pinned.
    growths: u64,
    /// One registration for each chunk, shared with the other pins of the segment.
    registrations: Vec<Arc<HostRegistration>>,
    gpu: Arc<Gpu>,
}

impl Segment {
    /// Page-locks a host segment and registers it with CUDA, for asynchronous copies and for kernels of `gpu`: 0.4 ms
    /// per MiB (measured on H200, driver 580). Host-synchronous.
    ///
    /// Each process pins for itself. Where several processes or short-lived ones use the memory on a GPU, create it at
    /// [`Place::Pinned`](crate::Place::Pinned): it is pinned once, and a process attaches in 10 ms a GiB.
    ///
    /// A second pin of this segment shares the registration of the first. Dropping the last pin unregisters the memory.
    /// Frozen segments, and segments opened for reading, are registered read-only.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Domain, Place, Result, gpu};
    /// # fn main() -> Result<()> {
    /// let domain = Domain::connect()?;
    /// let (Place::Gpu(uuid), _) = gpu::resolve("cuda:0".parse().expect("a device"))? else { return Ok(()) };
    /// let gpu = domain.gpu(uuid)?;
    /// let weights = domain.open("weights", Duration::ZERO)?;
    /// let build = domain.create("copy", Place::Gpu(uuid)).tensor("w", DType::F32, &[1024]).allocate()?;
    /// let pinned = weights.pin(&gpu)?;
    /// pinned.enqueue_copy_to("w", gpu.stream(), build.device("w")?.as_slice())?; // does not wait
    /// // The commit waits for the copy.
    /// build.commit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Pinned::new`].
    pub fn pin(&self, gpu: &Arc<Gpu>) -> Result<Pinned<&Self>> {
        Pinned::new(self, gpu.clone())
    }
}

impl<S: Deref<Target = Segment>> Pinned<S> {
    /// Pins a segment as [`Segment::pin`] does, with any kind of reference to the segment.
    ///
    /// # Errors
    /// - [`Mismatch::Kind`](crate::error::Mismatch::Kind) for memory on a GPU;
    /// - [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if the pages cannot be locked, or if the memory is
    ///   mapped read-only and the GPU cannot register read-only memory;
    /// - as [`Domain::gpu`](crate::Domain::gpu).
    pub fn new(segment: S, gpu: Arc<Gpu>) -> Result<Self> {
        // The caller may have opened the GPU without the domain, but the broker must know that this process uses it.
        segment.domain.gpu(gpu.uuid())?;
        let growths = segment.stage().growths;
        let registrations = segment.view()?.pin(&gpu).map_err(|e| segment.named(e))?;
        Ok(Self { segment, growths, registrations, gpu })
    }

    /// Returns the GPU for which the segment is pinned.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the number of registered bytes.
    pub fn bytes(&self) -> u64 {
        self.registrations.iter().map(|registration| registration.len()).sum()
    }

    /// Returns a tensor's range for kernels of the GPU.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor); [`InvalidArgument::Range`] for a tensor without bytes, or
    /// one that lies beyond the registered memory because the segment has grown.
    pub fn device(&self, tensor: &str) -> Result<DeviceRange<'_>> {
        let entry = self.find(tensor)?;
        if entry.bytes() == 0 {
            return Err(InvalidArgument::range(tensor, "it has no bytes, and so no address"));
        }
        let slice = self.registrations[entry.chunk()].slice(entry.offset(), entry.bytes());
        Ok(DeviceRange { gpu: &self.gpu, slice: slice.map_err(access_error("a tensor's range"))? })
    }

    /// Enqueues a copy of a tensor to device memory of the same length. Until the stream has completed the copy, do not
    /// change the tensor or the destination, and do not drop the pin.
    ///
    /// # Errors
    /// [`NotFound::Tensor`](crate::error::NotFound::Tensor); [`InvalidArgument::Range`] if the lengths differ, the
    /// destination is read-only, or the stream is being captured;
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda). Nothing is then enqueued.
    pub fn enqueue_copy_to(&self, tensor: &str, stream: StreamRef<'_>, destination: DeviceSlice<'_>) -> Result<()> {
        let copy = |registration: &HostRegistration, offset| registration.enqueue_copy_to(stream, offset, destination);
        self.copy(tensor, destination.len(), copy)
    }

    /// Enqueues a copy of device memory to a tensor of the same length; see [`Pinned::enqueue_copy_to`].
    ///
    /// # Errors
    /// As [`Pinned::enqueue_copy_to`]; [`InvalidArgument::Range`] also unless the segment was opened for writing.
    pub fn enqueue_copy_from(&self, tensor: &str, stream: StreamRef<'_>, source: DeviceSlice<'_>) -> Result<()> {
        let copy = |registration: &HostRegistration, offset| registration.enqueue_copy_from(stream, offset, source);
        self.copy(tensor, source.len(), copy)
    }

    fn copy(
        &self,
        tensor: &str,
        bytes: u64,
        enqueue: impl FnOnce(&HostRegistration, u64) -> Result<(), AccessError>,
    ) -> Result<()> {
        let entry = self.find(tensor)?;
        if entry.bytes() != bytes {
            return Err(InvalidArgument::range(
                tensor,
                format!("it has {} bytes, but the other side of the copy has {bytes}", entry.bytes()),
            ));
        }
        if bytes == 0 {
            return Ok(());
        }
        enqueue(&self.registrations[entry.chunk()], entry.offset()).map_err(access_error("copying pinned memory"))
    }

    fn find(&self, tensor: &str) -> Result<Entry<'_>> {
        let table = &self.segment.first.at(self.growths).table;
        table.find(tensor).ok_or_else(|| no_such_tensor(&self.segment.facts.name, tensor, table))
    }
}

impl<S: Deref<Target = Segment>> Drop for Pinned<S> {
    fn drop(&mut self) {
        // A forked child needs no lock: the registrations are the parent's, and dropping them does nothing.
        if self.segment.domain.link().require_ours().is_ok() {
            self.segment.memory().unpin(std::mem::take(&mut self.registrations));
        }
    }
}

impl<S: Deref<Target = Segment>> fmt::Debug for Pinned<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({}: {} bytes for {:?})", self.segment.facts.name, self.bytes(), self.gpu)
    }
}
