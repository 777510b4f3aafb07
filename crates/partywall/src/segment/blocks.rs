//! Access to the blocks of a pool or topic. They are the first tensor of a segment, in its first chunk.

use std::{sync::Arc, time::Duration};

use partywall_cuda::{AccessError, CuResult, CudaError, HostRegistration, StreamRef};
use partywall_os::borrow::BlockBorrows;

use super::Segment;
use crate::{
    domain::LeaseGuard,
    error::{Error, Result},
    gpu::{DeviceRange, Gpu, access_error, devices, failed_call},
    kind::wrong_kind,
};

impl Segment {
    /// Returns offset and length of the first tensor; `None` if it is not in the first chunk.
    pub(crate) fn first_tensor(&self) -> Option<(u64, u64)> {
        let first = *self.stage().table.in_given_order().first()?;
        (first.chunk() == 0).then(|| (first.offset(), first.bytes()))
    }

    /// Returns whether this process has published the memory, which must then stay until the lease is given back.
    pub(crate) fn is_published(&self) -> bool {
        self.memory().is_published()
    }

    /// Takes the lease. The segment then no longer gives it back.
    pub(crate) fn take_lease(&mut self) -> Option<Arc<LeaseGuard>> {
        self.lease.take().map(|lease| Arc::new(self.domain.keep(lease)))
    }

    /// Returns whether the CPU has access. It has none on a GPU, and to pinned memory only once it was asked for.
    pub(crate) fn has_cpu(&self) -> bool {
        self.memory().has_cpu()
    }

    /// Gives the CPU access to pinned memory, if it has none.
    pub(crate) fn allow_cpu(&self) -> Result<()> {
        self.memory().allow_cpu().map_err(|e| self.named(e))
    }

    /// Divides memory into `count` blocks of `bytes` bytes that can be borrowed one by one. Returns `None` if the CPU
    /// has no access.
    pub(crate) fn block_borrows(&self, offset: u64, stride: u64, bytes: u64, count: u32) -> Option<BlockBorrows> {
        self.memory().block_borrows(offset, stride, bytes, count)
    }

    /// Returns the error that the segment is on a GPU and the call needs host memory.
    pub(crate) fn is_on_gpu(&self) -> Error {
        self.named(wrong_kind("GPU", "host", "a slice"))
    }

    /// Returns part of the memory on its GPU.
    pub(crate) fn device_range(&self, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.memory().device(0, offset, bytes).map_err(|e| self.named(e))
    }

    /// Returns part of the memory on the stream's GPU, which pinned memory is then used on, unless another one is
    /// chosen.
    pub(crate) fn device_range_on(&self, stream: StreamRef<'_>, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.memory().choose_gpu(stream.context()).map_err(|e| self.named(e))?;
        let range = self.device_range(offset, bytes)?;
        if range.gpu.context() != stream.context() {
            return Err(self.named(access_error("using memory on a stream")(AccessError::OtherContext)));
        }
        Ok(range)
    }

    /// Registers host memory with CUDA, or shares the registrations that there are.
    pub(crate) fn register(&self, gpu: &Gpu) -> Result<Vec<Arc<HostRegistration>>> {
        // The caller may have opened the GPU without the domain, but the broker must know that this process uses it.
        self.domain().gpu(gpu.uuid())?;
        self.memory().pin(gpu).map_err(|e| self.named(e))
    }

    /// Waits until all work is done that this process has on the GPU now. Returns immediately for host memory.
    pub(crate) fn wait_idle(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| self.wait_idle_on(gpu))
    }

    /// Waits until all work is done that this process has on any GPU now. Without a context it has none there.
    pub(crate) fn wait_idle_everywhere(&self) -> Result<()> {
        for device in devices()? {
            if device.primary_context_active().map_err(|error| self.not_unused(error))? {
                let uuid = device.uuid().map_err(|error| self.not_unused(error))?;
                self.wait_idle_on(&*self.domain().gpu(uuid)?)?;
            }
        }
        Ok(())
    }

    fn wait_idle_on(&self, gpu: &Gpu) -> Result<()> {
        let health = self.domain().health();
        loop {
            health.check()?;
            // Relaxed, because otherwise the call would invalidate a graph capture of another thread.
            let waited = gpu.context().guard_relaxed().and_then(|_guard| gpu.context().synchronize());
            match waited {
                Ok(()) => return Ok(()),
                Err(error) if is_capturing(&error) => std::thread::sleep(CAPTURE),
                Err(error) => {
                    health.note(gpu.uuid(), &error);
                    return Err(self.not_unused(error));
                }
            }
        }
    }

    fn not_unused(&self, error: CudaError) -> Error {
        failed_call(&format!("waiting for memory of {:?} to be unused", self.name()), error)
    }
}

/// Returns whether the driver refused a wait because a graph is being captured.
pub(super) fn is_capturing(error: &CudaError) -> bool {
    matches!(error.code, CuResult::STREAM_CAPTURE_UNSUPPORTED | CuResult::STREAM_CAPTURE_IMPLICIT)
}

/// Pause before the next attempt to wait for a context. CUDA refuses the wait while a graph is captured in the context.
const CAPTURE: Duration = Duration::from_millis(10);
