//! The blocks of a pool, topic or queue as this process has them: their memory, control memory, and lease.

use std::{
    any::Any,
    fmt, io,
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
};

use partywall_cuda::{HostRegistration, StreamRef};
use partywall_os::borrow::{BlockBorrows, BorrowedBlock, BorrowedBlockMut};
use partywall_shm::pool as shm;
use partywall_wire::{Control, Notice};

use crate::{
    completion::{GpuMemory, Users},
    domain::{Domain, LeaseGuard},
    error::{Error, LimitReached, Result, Unreachable},
    gpu::{DeviceRange, Gpu},
    segment::Segment,
    wait::Wait,
};

/// The blocks of an open pool or topic, or the inputs or outputs of a queue. Every block in use has a reference to
/// this.
pub(crate) struct Blocks {
    control: Arc<shm::Pool>,
    object: Object,
    shape: Control,
    /// Byte offset of the first block.
    base: u64,
    /// Distance between the starts of two blocks, in bytes.
    stride: u64,
    /// The bytes of blocks that the CPU reaches. Unset on a GPU, and in pinned memory until the CPU uses it.
    bytes: OnceLock<Option<BlockBorrows>>,
    /// Registrations of host memory with CUDA, once they were asked for. They keep the mapping.
    pinned: OnceLock<Vec<Arc<HostRegistration>>>,
    /// Last, because the other fields use this memory until they are dropped.
    memory: Arc<BlockMemory>,
}

/// The memory of blocks.
struct BlockMemory {
    /// The segment, whose lease is in `keep`. `None` only while this is dropped.
    segment: Option<Segment>,
    /// `None` for a segment without a lease, and while this is dropped.
    keep: Option<Arc<LeaseGuard>>,
}

/// What the owner of blocks has besides their pool: its control memory, and what all its handles share.
pub(crate) type Object = Arc<dyn Any + Send + Sync>;

/// Maps the control memory of the owner of blocks that comes after that of their pool.
pub(crate) type MapObject = fn(&mut Parts<'_>) -> Result<Object>;

/// The control memory of a segment that has just been mapped, whose parts are mapped in their order.
pub(crate) struct Parts<'a> {
    pub(crate) shape: &'a Control,
    fds: std::vec::IntoIter<OwnedFd>,
    memory: &'a Arc<BlockMemory>,
    /// Byte offset of the first block.
    base: u64,
}

impl Blocks {
    /// Maps the control memory of a segment with blocks: that of their pool, then by `map` that of their owner.
    pub(super) fn new(mut segment: Segment, map: MapObject) -> Result<Arc<Self>> {
        let name = segment.name().to_owned();
        let foreign = |what: &str| Unreachable::protocol(format!("it gave {name:?} {what}"));
        let (shape, fds) = segment.take_control().ok_or_else(|| foreign("without control memory"))?;
        let place =
            segment.first_tensor().filter(|(_, bytes)| shape.data_bytes().is_some_and(|needed| needed <= *bytes));
        let (base, _) = place.ok_or_else(|| foreign("with blocks that lie outside its memory"))?;
        let memory = Arc::new(BlockMemory { keep: segment.take_lease(), segment: Some(segment) });
        let mut parts = Parts { shape: &shape, fds: fds.into_iter(), memory: &memory, base };
        let pool = parts.map(shm::Pool::map)?;
        let object = map(&mut parts)?;
        parts.blocks(pool, object, shape, 0)
    }

    /// Divides the memory into blocks that can be borrowed, if the CPU has access.
    fn borrows(&self) -> Option<BlockBorrows> {
        self.segment().block_borrows(self.base, self.stride, self.shape.block_bytes, self.shape.blocks)
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

    /// Returns the segment that contains the blocks.
    pub(crate) fn segment(&self) -> &Segment {
        self.memory.segment()
    }

    /// Returns the control memory of the blocks.
    pub(crate) fn control(&self) -> &Arc<shm::Pool> {
        &self.control
    }

    /// Returns what the owner of the blocks has besides their pool, if it is a `T`.
    pub(crate) fn object<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.object.clone().downcast().ok()
    }

    /// Refuses another use of blocks of a stale version.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        let keep = self.memory.keep.as_ref();
        keep.map_or(Ok(()), |keep| self.domain().link().check_lease(keep.lease(), self.name()))
    }

    /// Fails if a wait for something of these blocks would not end: the broker is gone, or the version is stale.
    pub(crate) fn require_live(&self) -> Result<()> {
        self.domain().link().require_broker()?;
        self.check()
    }

    /// Waits until the version is withdrawn.
    pub(crate) fn wait_withdrawn(&self, wait: Wait<'_>) -> Result<Option<Notice>> {
        match &self.memory.keep {
            Some(keep) => self.domain().link().wait_withdrawn(keep.lease(), self.name(), wait),
            None => Ok(None),
        }
    }

    pub(crate) fn shape(&self) -> &Control {
        &self.shape
    }

    /// Returns the lease, for work that may outlive these handles: without a lease the broker frees this process's
    /// blocks.
    pub(crate) fn keep(&self) -> Option<Arc<LeaseGuard>> {
        self.memory.keep.clone()
    }

    /// Borrows a block for reading by the CPU, until it is [given back](Self::give_back). Returns `None` if the CPU has
    /// no access (see [`bytes`](Self::bytes)), or if this process borrows the block for writing.
    pub(crate) fn borrow(&self, index: u32) -> Option<BorrowedBlock> {
        self.lender()?.borrow(index as usize)
    }

    /// Borrows a block for writing by the CPU, until it is [given back](Self::give_back_mut). Returns `None` if the CPU
    /// has no access (see [`bytes`](Self::bytes)), or if this process borrows the block already.
    pub(crate) fn borrow_mut(&self, index: u32) -> Option<BorrowedBlockMut> {
        self.lender()?.borrow_mut(index as usize)
    }

    /// Ends the use of a block that was borrowed for reading.
    pub(crate) fn give_back(&self, borrowed: Option<BorrowedBlock>) {
        if let (Some(bytes), Some(borrowed)) = (self.lender(), borrowed) {
            bytes.give_back(borrowed);
        }
    }

    /// Ends the use of a block that was borrowed for writing.
    pub(crate) fn give_back_mut(&self, borrowed: Option<BorrowedBlockMut>) {
        if let (Some(bytes), Some(borrowed)) = (self.lender(), borrowed) {
            bytes.give_back_mut(borrowed);
        }
    }

    /// Returns the lender, which shows the bytes of borrowed blocks. Gives the CPU access to pinned memory, if it has
    /// none.
    ///
    /// # Errors
    /// [`Mismatch::Kind`](crate::error::Mismatch::Kind) for memory of a GPU;
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub(crate) fn bytes(&self) -> Result<&BlockBorrows> {
        match self.lender() {
            Some(bytes) => Ok(bytes),
            None => self.allow_cpu(),
        }
    }

    #[cold]
    fn allow_cpu(&self) -> Result<&BlockBorrows> {
        self.segment().allow_cpu()?;
        self.bytes.get_or_init(|| self.borrows()).as_ref().ok_or_else(|| self.segment().is_on_gpu())
    }

    #[inline]
    fn lender(&self) -> Option<&BlockBorrows> {
        self.bytes.get()?.as_ref()
    }

    /// Returns the range of a block on its GPU.
    pub(crate) fn device(&self, index: u32) -> Result<DeviceRange<'_>> {
        self.segment().device_range(self.offset(index), self.shape.block_bytes)
    }

    /// Returns the range of a block on the stream's GPU.
    pub(crate) fn device_on(&self, index: u32, stream: StreamRef<'_>) -> Result<DeviceRange<'_>> {
        self.segment().device_range_on(stream, self.offset(index), self.shape.block_bytes)
    }

    /// Returns the bytes of a block on a GPU, if that is where the blocks are: those from `offset` on. Waits until all
    /// work is done that this process has there, if the address was handed out (`exposed`) to work that may still use
    /// the block.
    pub(crate) fn on_gpu(
        &self,
        index: u32,
        offset: u64,
        bytes: usize,
        exposed: bool,
    ) -> Result<Option<DeviceRange<'_>>> {
        if self.segment().place().is_cpu_reachable() {
            return Ok(None);
        }
        if exposed {
            self.wait_idle()?;
        }
        self.device(index)?.slice(offset, bytes as u64).map(Some)
    }

    /// Returns the GPU on which this process uses the blocks; `None` for host memory.
    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        self.segment().gpu()
    }

    /// Registers host memory with CUDA for as long as this process has it mapped.
    pub(crate) fn pin(&self, gpu: &Gpu) -> Result<()> {
        let registrations = self.segment().register(gpu)?;
        // If they were set before, these are the same.
        _ = self.pinned.set(registrations);
        Ok(())
    }

    /// Returns whether this process has registered host memory with CUDA, so that any GPU may use its addresses.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.get().is_some()
    }

    /// Waits until all work is done that this process has now on the GPUs that may use the memory. Returns immediately
    /// for host memory that is not registered.
    pub(crate) fn wait_idle(&self) -> Result<()> {
        if self.is_pinned() { self.segment().wait_idle_everywhere() } else { self.segment().wait_idle() }
    }

    /// Prefetches the first bytes of a block in host memory that will be read soon.
    pub(crate) fn prefetch(&self, index: u32) {
        if let Some(bytes) = self.lender() {
            bytes.prefetch(index as usize);
        }
    }

    /// Prefetches the first bytes of a block in host memory that will be written soon.
    pub(crate) fn prefetch_to_write(&self, index: u32) {
        if let Some(bytes) = self.lender() {
            bytes.prefetch_to_write(index as usize);
        }
    }

    /// Returns where a block begins in the first chunk.
    pub(crate) fn offset(&self, index: u32) -> u64 {
        // `new` has checked that all blocks lie within the memory, so this does not overflow.
        self.base + u64::from(index) * self.stride
    }
}

impl Parts<'_> {
    /// Maps the next part.
    pub(crate) fn map<T>(&mut self, map: impl FnOnce(OwnedFd) -> io::Result<T>) -> Result<T> {
        let what = format!("the control memory of {:?}", self.memory.segment().name());
        let Some(fd) = self.fds.next() else { return Err(LimitReached::FileDescriptors(what).into()) };
        map(fd).map_err(|source| Error::io(format!("mapping {what}"), source))
    }

    /// Returns the blocks that begin `offset` bytes after the first.
    pub(crate) fn blocks(&self, pool: shm::Pool, object: Object, shape: Control, offset: u64) -> Result<Arc<Blocks>> {
        let stride = shape.stride().filter(|_| pool.count() == shape.blocks).ok_or_else(|| self.wrong())?;
        let control = Arc::new(pool);
        let base = self.base + offset;
        let bytes = OnceLock::new();
        let pinned = OnceLock::new();
        let blocks = Blocks { control, object, shape, base, stride, bytes, pinned, memory: self.memory.clone() };
        if blocks.segment().has_cpu() {
            blocks.bytes.get_or_init(|| blocks.borrows());
        }
        Ok(Arc::new(blocks))
    }

    /// Returns the error that a part does not fit the others.
    pub(crate) fn wrong(&self) -> Error {
        let name = self.memory.segment().name();
        Unreachable::protocol(format!("it gave {name:?} with control memory for another number of blocks"))
    }
}

impl GpuMemory for Blocks {
    fn users(&self) -> Users {
        match self.gpu() {
            _ if self.is_pinned() => Users::EveryGpu,
            Some(gpu) => Users::Gpu(gpu.uuid()),
            None => Users::Nobody,
        }
    }

    fn wait_idle(&self) -> Result<()> {
        self.wait_idle()
    }
}

impl BlockMemory {
    fn segment(&self) -> &Segment {
        // Only `drop` takes it.
        self.segment.as_ref().expect("the blocks are mapped until they are dropped")
    }
}

impl Drop for BlockMemory {
    fn drop(&mut self) {
        // Memory that other processes open must stay until the broker no longer hands it out.
        let published = self.segment.take_if(|segment| segment.is_published());
        // Unmapped before the lease is given back. On a GPU, unmapping waits for work that still uses the memory.
        self.segment = None;
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
