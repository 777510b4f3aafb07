//! The blocks of a pool or topic in this process: their memory, their control memory, and the lease that keeps both.

use std::{fmt, sync::Arc, time::Duration};

use partywall_cuda::{CuResult, CudaError};
use partywall_os::borrow::{BlockBorrows, BorrowedBlock, BorrowedBlockMut};
use partywall_shm::{pool as shm, topic};
use partywall_wire::Control;

use crate::{
    domain::{Domain, LeaseGuard},
    error::{Error, LimitReached, Result, Unreachable},
    gpu::{DeviceRange, Gpu, failed_call},
    segment::Segment,
};

/// The blocks of an open pool or topic. Every block in use keeps this.
pub(crate) struct Blocks {
    /// Without its lease. `None` once this is dropped.
    segment: Option<Segment>,
    control: Arc<shm::Pool>,
    /// Of a topic.
    topic: Option<Arc<topic::Topic>>,
    shape: Control,
    /// Where the first block begins.
    base: u64,
    stride: u64,
    /// Their bytes, in host memory. `None` on a GPU, and once this is dropped.
    bytes: Option<BlockBorrows>,
    /// `None` once this is dropped.
    keep: Option<Arc<LeaseGuard>>,
}

impl Blocks {
    /// Of a segment that is a pool or topic.
    pub(crate) fn new(mut segment: Segment) -> Result<Self> {
        let name = segment.name().to_owned();
        let foreign = |what: &str| Unreachable::protocol(format!("it gave {name:?} {what}"));
        let control = segment.take_control().ok_or_else(|| foreign("without control memory"))?;
        let shape = control.shape;
        let mut fds = control.fds.into_iter();
        let place =
            segment.first_tensor().filter(|(_, bytes)| shape.data_bytes().is_some_and(|needed| needed <= *bytes));
        let outside = || foreign("with blocks that lie outside its memory");
        let ((base, _), stride) = place.zip(shape.stride()).ok_or_else(outside)?;
        let missing = || LimitReached::FileDescriptors(format!("the control memory of {name:?}"));
        let mut fd = || fds.next().ok_or_else(missing);
        let system = |source| Error::System { what: format!("mapping the control memory of {name:?}"), source };
        let pool = fd()?;
        let topic = shape.topic.is_some().then(fd).transpose()?;
        let control = shm::Pool::map(pool).map_err(system)?;
        let topic = topic.map(topic::Topic::map).transpose().map_err(system)?;
        let blocks = topic.as_ref().map_or(shape.blocks, |topic| topic.shape().blocks);
        if control.count() != shape.blocks || blocks != shape.blocks {
            return Err(foreign("with control memory for another number of blocks"));
        }
        let bytes = segment.block_borrows(base, stride, shape.block_bytes, shape.blocks);
        let keep = segment.take_lease();
        let control = Arc::new(control);
        let topic = topic.map(Arc::new);
        Ok(Self { segment: Some(segment), control, topic, shape, base, stride, bytes, keep })
    }

    pub(crate) fn name(&self) -> &str {
        self.segment().name()
    }

    pub(crate) fn version(&self) -> u64 {
        self.segment().version()
    }

    pub(crate) fn domain(&self) -> &Domain {
        self.segment().domain()
    }

    /// The segment that they are in.
    pub(crate) fn segment(&self) -> &Segment {
        // Only `drop` takes it.
        self.segment.as_ref().expect("the blocks are mapped until they are dropped")
    }

    /// The control memory of the blocks.
    pub(crate) fn control(&self) -> &Arc<shm::Pool> {
        &self.control
    }

    /// The control memory of a topic.
    pub(crate) fn topic(&self) -> Option<&Arc<topic::Topic>> {
        self.topic.as_ref()
    }

    pub(crate) fn shape(&self) -> &Control {
        &self.shape
    }

    /// The lease, for what may outlive this: without it the broker gives to others what this process has.
    pub(crate) fn keep(&self) -> Option<Arc<LeaseGuard>> {
        self.keep.clone()
    }

    /// Borrows a block in host memory for reading, until it is [given back](Self::give_back). Returns `None` on a GPU, or if
    /// this process borrows the block for writing.
    pub(crate) fn borrow(&self, index: u32) -> Option<BorrowedBlock> {
        self.bytes.as_ref()?.borrow(index as usize)
    }

    /// Borrows a block in host memory for writing, until it is [given back](Self::give_back_mut). Returns `None` on a GPU, or
    /// if this process borrows the block already.
    pub(crate) fn borrow_mut(&self, index: u32) -> Option<BorrowedBlockMut> {
        self.bytes.as_ref()?.borrow_mut(index as usize)
    }

    /// Ends the use of a block that was borrowed for reading.
    pub(crate) fn give_back(&self, borrowed: Option<BorrowedBlock>) {
        if let (Some(bytes), Some(borrowed)) = (&self.bytes, borrowed) {
            bytes.give_back(borrowed);
        }
    }

    /// Ends the use of a block that was borrowed for writing.
    pub(crate) fn give_back_mut(&self, borrowed: Option<BorrowedBlockMut>) {
        if let (Some(bytes), Some(borrowed)) = (&self.bytes, borrowed) {
            bytes.give_back_mut(borrowed);
        }
    }

    /// Returns the lender, which shows the bytes of borrowed blocks.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for memory of a GPU.
    pub(crate) fn bytes(&self) -> Result<&BlockBorrows> {
        self.bytes.as_ref().ok_or_else(|| self.segment().is_on_gpu())
    }

    /// A block on the GPU.
    pub(crate) fn device(&self, index: u32) -> Result<DeviceRange<'_>> {
        self.segment().device_range(self.offset(index), self.shape.block_bytes)
    }

    /// The GPU that this process uses them on; `None` for host memory.
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        self.segment().gpu()
    }

    /// Waits until everything is over that this process runs now on the GPU. Returns at once for host memory.
    pub(crate) fn wait_idle(&self) -> Result<()> {
        let Some(gpu) = self.gpu() else { return Ok(()) };
        let health = self.domain().health();
        loop {
            health.check()?;
            // Relaxed, so that asking spoils no capture of another thread.
            let waited = gpu.context().guard_relaxed().and_then(|_guard| gpu.context().synchronize());
            match waited {
                Ok(()) => return Ok(()),
                Err(error) if is_capturing(&error) => std::thread::sleep(CAPTURE),
                Err(error) => {
                    health.note(gpu.uuid(), &error);
                    return Err(failed_call(&format!("waiting for blocks of {:?} to be unused", self.name()), error));
                }
            }
        }
    }

    /// Has the processor fetch the first bytes of a block in host memory, which will be read soon.
    pub(crate) fn prefetch(&self, index: u32) {
        if let Some(bytes) = &self.bytes {
            bytes.prefetch(index as usize);
        }
    }

    /// The same, for one that will be written soon.
    pub(crate) fn prefetch_to_write(&self, index: u32) {
        if let Some(bytes) = &self.bytes {
            bytes.prefetch_to_write(index as usize);
        }
    }

    fn offset(&self, index: u32) -> u64 {
        // `new` has found all of them to lie within the memory.
        self.base + u64::from(index) * self.stride
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // Memory that others open must stay until the broker hands it out no more.
        let published = self.segment.take_if(|segment| segment.is_published());
        // Unmapped before the lease is given back; on a GPU that waits for whatever still uses it.
        (self.bytes, self.segment) = (None, None);
        if let Some(keep) = self.keep.take() {
            keep.release();
        }
        drop(published);
    }
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("name", &self.name()).field("shape", &self.shape).finish_non_exhaustive()
    }
}

fn is_capturing(error: &CudaError) -> bool {
    matches!(error.code, CuResult::STREAM_CAPTURE_UNSUPPORTED | CuResult::STREAM_CAPTURE_IMPLICIT)
}

/// How long to wait before a context is asked again that cannot be waited for while a graph is captured in it.
const CAPTURE: Duration = Duration::from_millis(10);
