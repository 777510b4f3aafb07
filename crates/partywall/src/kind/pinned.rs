//! Host memory that the driver allocates on a NUMA node, pinned from the start, and exported as file descriptors.
//!
//! Each chunk is one `cuMemCreate`, mapped whole at one address range for the CPU and for a GPU. A process pays for
//! what it uses: the CPU and the GPU get access when the version is opened, as its [`Access`] says, or on first use.
//! The CPU alone needs no CUDA context, and such a process is no member that uses a GPU.
//!
//! Nothing is sealed. Each process maps frozen memory read-only, which the page tables of CPU and GPU enforce, but a
//! process could map it otherwise: this protects against bugs, not against attackers. So plain slices exist only of
//! memory of the own user.
//!
//! The descriptor of such memory looks like that of GPU memory, so the broker cannot check the place. An importer asks
//! the driver where the memory is, and refuses another place before it maps anything.
//!
//! `Place::gpu` is `None` for such memory and `Place::is_cpu_reachable` true; in the protocol `Place::needs_driver`
//! tells it from `host`. `Memory::gpu` is `None` until a GPU is used. Blocks of a pool can be borrowed
//! (`Blocks::bytes`) once the CPU has access.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use partywall_cuda::{
    AccessError, Context, CuResult, CudaError, DeviceSlice, DeviceUuid, Driver, HostRegistration, NodeImportError,
    NodeMapping, NodeMemory, NodeReservation, NodeUse, NodeWriter, round_up,
};
use partywall_os::{borrow::BlockBorrows, map::SharedMap};
use partywall_wire::Kind as WireKind;

use super::{
    Attach, Draft, Extension, HostUpload, Kind, Memory, Upload, Uploads, chunks, outside, refill, reservation, vacate,
    wrong_kind,
};
use crate::{
    error::{Error, InvalidData, LimitReached, Result, Unreachable},
    gpu::{DeviceRange, Gpu, Gpus, access_error, cuda_error, node_driver, not_pinned},
    place::{Access, Place},
};

/// The kind.
pub(super) struct PinnedKind;

impl Kind for PinnedKind {
    fn wire(&self) -> WireKind {
        WireKind::Pinned
    }

    fn lives_at(&self, place: Place) -> bool {
        matches!(place, Place::Pinned(_))
    }

    fn allocate(
        &self,
        name: &str,
        place: Place,
        used: &[u64],
        reserve: Option<u64>,
        gpus: &Arc<Gpus>,
    ) -> Result<Box<dyn Draft>> {
        let node = NodeRequest::new(name, place)?;
        let chunks = chunks(used, reserve, node.granularity, |bytes, total, reserved| {
            let memory = node.create(bytes, total)?;
            NodeMapping::with_reservation(memory, NodeUse::Draft, reserved).map_err(node.failed(bytes, total))
        });
        let (chunks, reserved) = chunks.ok_or_else(|| node.out_of_memory(u64::MAX, None))??;
        Ok(Box::new(PinnedChunks::new(chunks, &node, reserved, gpus)))
    }

    fn allocated(&self, bytes: u64) -> Result<u64> {
        let granularity = NodeMemory::granularity(node_driver()?).map_err(not_pinned)?;
        Ok(round_up(bytes, granularity).unwrap_or(u64::MAX))
    }

    fn chunk(&self, name: &str, place: Place, bytes: u64, _: &Arc<Gpus>) -> Result<(u64, OwnedFd)> {
        let node = NodeRequest::new(name, place)?;
        let bytes = round_up(bytes, node.granularity).ok_or_else(|| node.out_of_memory(bytes, None))?;
        let fd = node.create(bytes, bytes)?.export().map_err(node.failed(bytes, bytes))?;
        Ok((bytes, fd))
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        let node = NodeRequest::new(version.name, version.place)?;
        let used_as = match (version.mutable, version.write) {
            // A process of another user could have kept the memory writable.
            (false, _) if version.is_own => NodeUse::Frozen,
            (true, true) => NodeUse::Writable,
            _ => NodeUse::Readable,
        };
        let failed = cuda_error(format!("mapping a chunk of {:?} on NUMA node {}", version.name, node.number));
        // The import has its own reference: the file descriptors are closed when this returns.
        let mut memories = version.chunks.iter().map(|(bytes, fd)| node.import(fd.as_fd(), *bytes));
        let (chunks, reserved) = if version.reserve == 0 {
            let map = |memory: Result<NodeMemory>| NodeMapping::new(memory?, used_as).map_err(&failed);
            (memories.map(map).collect::<Result<_>>()?, 0)
        } else {
            let first = memories.next().ok_or_else(no_chunk)??;
            let total = version.chunks.iter().map(|(bytes, _)| bytes).sum::<u64>();
            let reserved = reservation(version.reserve, total, node.granularity);
            let mapping = NodeMapping::with_reservation(first, used_as, reserved).map_err(&failed)?;
            let rest: Vec<_> = memories.collect::<Result<_>>()?;
            mapping.extend(rest).map_err(access_error("mapping the memory that a segment has grown by"))?.publish();
            (vec![mapping], reserved)
        };
        let mut memory = PinnedChunks::new(chunks, &node, reserved, version.gpus);
        memory.is_foreign = !version.is_own;
        memory.device = version.device;
        if version.access != Access::Gpu {
            memory.allow_cpu()?;
        }
        if version.access != Access::Cpu {
            memory.allow_gpu()?;
        }
        Ok(Box::new(memory))
    }
}

/// A request for memory on one node.
struct NodeRequest<'a> {
    name: &'a str,
    place: Place,
    number: u32,
    driver: &'static Driver,
    granularity: u64,
}

impl<'a> NodeRequest<'a> {
    fn new(name: &'a str, place: Place) -> Result<Self> {
        let Place::Pinned(number) = place else {
            return Err(Unreachable::protocol("pinned memory without a NUMA node"));
        };
        let driver = node_driver()?;
        let granularity = NodeMemory::granularity(driver).map_err(not_pinned)?;
        Ok(Self { name, place, number, driver, granularity })
    }

    fn create(&self, bytes: u64, total: u64) -> Result<NodeMemory> {
        NodeMemory::create(self.driver, self.number, bytes).map_err(|error| match error.code {
            // Sizes are right, so the driver does not know the node.
            CuResult::INVALID_VALUE => not_pinned(error),
            _ => self.failed(bytes, total)(error),
        })
    }

    fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<NodeMemory> {
        NodeMemory::import(self.driver, self.number, fd, bytes).map_err(|error| match error {
            NodeImportError::OtherPlace { found, .. } => Error::InvalidData(InvalidData::OtherPlace {
                name: self.name.to_owned(),
                place: self.place,
                found: found.to_string(),
            }),
            NodeImportError::Driver(error) => cuda_error(format!("importing a chunk of {:?}", self.name))(error),
            error => Unreachable::protocol(error.to_string()),
        })
    }

    /// Returns the error that `bytes` of `total` bytes could not be allocated.
    fn failed(&self, bytes: u64, total: u64) -> impl Fn(CudaError) -> Error {
        move |error| match error.code {
            CuResult::OUT_OF_MEMORY => {
                self.out_of_memory(total, error.memory.map(|memory| (memory.free, memory.total)))
            }
            _ => {
                let what = format!("allocating {bytes} bytes for {:?} on NUMA node {}", self.name, self.number);
                cuda_error(what)(error)
            }
        }
    }

    fn out_of_memory(&self, asked: u64, memory: Option<(u64, u64)>) -> Error {
        LimitReached::memory(self.name, self.place, asked, memory)
    }
}

fn no_chunk() -> Error {
    Unreachable::protocol("pinned memory without a chunk")
}

/// Mapped chunks: a draft until they are committed, the memory of a version afterwards.
struct PinnedChunks {
    // First, so that the chunks are unmapped before a context may be released.
    chunks: Vec<NodeMapping>,
    /// The addresses of the chunks while they are not mapped.
    vacant: Vec<NodeReservation>,
    node: u32,
    /// The reservation that was asked for, if the only mapping may grow. The actual one may be smaller.
    reserved: u64,
    /// The file descriptors of a draft, for the broker.
    exported: Vec<OwnedFd>,
    /// True if a process of another user has committed it.
    is_foreign: bool,
    /// The GPU that the process has chosen for the memory.
    device: Option<DeviceUuid>,
    /// The GPU on which this process uses the memory, from its first use on: until then no context is made.
    gpu: OnceLock<Arc<Gpu>>,
    gpus: Arc<Gpus>,
}

impl PinnedChunks {
    fn new(chunks: Vec<NodeMapping>, node: &NodeRequest<'_>, reserved: u64, gpus: &Arc<Gpus>) -> Self {
        let node = node.number;
        let gpu = OnceLock::new();
        let (vacant, exported) = (Vec::new(), Vec::new());
        Self { chunks, vacant, node, reserved, exported, is_foreign: false, device: None, gpu, gpus: gpus.clone() }
    }

    fn allow_gpu(&self) -> Result<()> {
        let gpu = self.used_gpu()?;
        self.chunks.iter().try_for_each(|chunk| chunk.allow_device(gpu.context())).map_err(self.no_access(gpu))
    }

    /// Returns the GPU on which this process uses the memory. The first call decides which one.
    fn used_gpu(&self) -> Result<&Arc<Gpu>> {
        if let Some(gpu) = self.gpu.get() {
            return Ok(gpu);
        }
        let gpu = self.device.map_or_else(|| self.gpus.preferred(), |device| self.gpus.get(device))?;
        Ok(self.gpu.get_or_init(|| gpu))
    }

    fn range(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        let gpu = self.used_gpu()?;
        Ok(DeviceRange { gpu, slice: self.slice(gpu, chunk, offset, bytes)? })
    }

    fn slice(&self, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceSlice<'_>> {
        let mapping = &self.chunks[chunk];
        let slice = match mapping.slice(gpu.context(), offset, bytes) {
            Err(AccessError::NoAccess { .. }) => {
                mapping.allow_device(gpu.context()).map_err(self.no_access(gpu))?;
                mapping.slice(gpu.context(), offset, bytes)
            }
            slice => slice,
        };
        slice.map_err(access_error("a tensor's range"))
    }

    fn no_access(&self, gpu: &Gpu) -> impl Fn(CudaError) -> Error + use<> {
        cuda_error(format!("giving GPU {} access to pinned memory of NUMA node {}", gpu.uuid(), self.node))
    }

    fn no_cpu(&self) -> impl Fn(CudaError) -> Error + use<> {
        cuda_error(format!("giving the CPU access to pinned memory of NUMA node {}", self.node))
    }

    /// Returns the view of memory that may change.
    fn view(&self, chunk: usize) -> Result<Option<&Arc<SharedMap>>> {
        let mapping = &self.chunks[chunk];
        if let view @ Some(_) = mapping.shared() {
            return Ok(view);
        }
        mapping.allow_cpu().map_err(self.no_cpu())?;
        Ok(mapping.shared())
    }
}

impl Draft for PinnedChunks {
    fn chunk_bytes(&self) -> Vec<u64> {
        self.chunks.iter().map(NodeMapping::len).collect()
    }

    fn push(&mut self, name: &str, place: Place, bytes: u64, _: &Arc<Gpus>) -> Result<()> {
        let node = NodeRequest::new(name, place)?;
        let bytes = round_up(bytes, node.granularity).ok_or_else(|| node.out_of_memory(bytes, None))?;
        let memory = node.create(bytes, bytes)?;
        self.chunks.push(NodeMapping::new(memory, NodeUse::Draft).map_err(node.failed(bytes, bytes))?);
        Ok(())
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn host_mut(&mut self, chunk: usize, offset: u64, bytes: u64) -> Result<&mut [u8]> {
        let no_cpu = self.no_cpu();
        let mapping = &mut self.chunks[chunk];
        mapping.allow_cpu().map_err(no_cpu)?;
        let all = mapping.bytes_mut().map_err(cuda_error("finishing the work of GPUs on a draft"))?;
        let all = all.ok_or_else(|| wrong_kind("frozen pinned", "uncommitted", "a slice for writing"))?;
        Ok(&mut all[offset as usize..(offset + bytes) as usize])
    }

    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn device_on(&self, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceSlice<'_>> {
        self.slice(gpu, chunk, offset, bytes)
    }

    fn gpu(&self) -> Option<&Gpu> {
        self.gpu.get().map(|gpu| &**gpu)
    }

    fn uploads(&mut self) -> Box<dyn Uploads + '_> {
        let what = self.no_cpu();
        let writers = self.chunks.iter_mut().map(writer).collect::<Result<Option<Vec<_>>, _>>();
        Box::new(PinnedUploads { writers, what: Box::new(what) })
    }

    fn freeze(&mut self, mutable: bool) -> Result<()> {
        // Writes that the builder enqueued must be in memory before other processes may read it.
        let waited = self.chunks.iter().try_for_each(NodeMapping::synchronize);
        waited.map_err(cuda_error("finishing the builder's work on a GPU"))?;
        if self.exported.is_empty() {
            let export = |chunk: &NodeMapping| chunk.memory().export().map_err(cuda_error("exporting pinned memory"));
            self.exported = self.chunks.iter().map(export).collect::<Result<_>>()?;
        }
        let freeze = cuda_error("making the builder's mapping read-only");
        for chunk in &mut self.chunks {
            if mutable {
                chunk.share();
            } else {
                chunk.freeze().map_err(&freeze)?;
            }
        }
        Ok(())
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.exported.iter().map(AsFd::as_fd).collect()
    }

    fn into_memory(mut self: Box<Self>) -> Box<dyn Memory> {
        self.exported.clear();
        self
    }
}

/// Returns a writer of a draft; `None` if it is frozen.
fn writer(mapping: &mut NodeMapping) -> Result<Option<NodeWriter<'_>>, CudaError> {
    mapping.allow_cpu()?;
    Ok(mapping.writer())
}

struct PinnedUploads<'a> {
    /// One for each chunk. `None` if the chunks are frozen, the error if the CPU got no access.
    writers: Result<Option<Vec<NodeWriter<'a>>>, CudaError>,
    what: Box<dyn Fn(CudaError) -> Error + Send + Sync>,
}

impl Uploads for PinnedUploads<'_> {
    fn start(&self) -> Result<Box<dyn Upload + '_>> {
        let writers = self.writers.as_ref().map_err(|error| (self.what)(error.clone()))?;
        let chunks = writers.as_ref().ok_or_else(|| wrong_kind("frozen pinned", "uncommitted", "an upload"))?;
        Ok(Box::new(HostUpload::new(chunks, |chunk, offset, bytes| {
            chunk.write(offset, bytes).map_err(access_error("writing into pinned memory"))
        })))
    }
}

impl Memory for PinnedChunks {
    fn has_cpu(&self) -> bool {
        self.chunks.iter().all(NodeMapping::has_cpu)
    }

    fn allow_cpu(&self) -> Result<()> {
        self.chunks.iter().try_for_each(NodeMapping::allow_cpu).map_err(self.no_cpu())
    }

    fn bytes(&self, chunk: usize, offset: u64, bytes: u64) -> Result<&[u8]> {
        let mapping = &self.chunks[chunk];
        if self.is_foreign {
            return Err(wrong_kind("another user's pinned", "host", "a plain slice"));
        }
        mapping.allow_cpu().map_err(self.no_cpu())?;
        let all = mapping.bytes().ok_or_else(|| wrong_kind("mutable pinned", "frozen", "a plain slice"))?;
        Ok(&all[offset as usize..(offset + bytes) as usize])
    }

    fn shared(&self, chunk: usize) -> Result<&SharedMap> {
        let view = self.view(chunk)?.ok_or_else(|| wrong_kind("frozen pinned", "mutable", "a shared slice"))?;
        Ok(view)
    }

    fn block_borrows(&self, offset: u64, stride: u64, bytes: u64, count: u32) -> Option<BlockBorrows> {
        let map = self.chunks.first()?.shared()?.clone();
        BlockBorrows::new(map, offset as usize, stride as usize, bytes as usize, count as usize)
    }

    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn device_on(&self, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceSlice<'_>> {
        self.slice(gpu, chunk, offset, bytes)
    }

    fn gpu(&self) -> Option<&Gpu> {
        self.gpu.get().map(|gpu| &**gpu)
    }

    fn pin(&self, _: &Gpu) -> Result<Vec<Arc<HostRegistration>>> {
        Err(wrong_kind("pinned", "host", "pinning"))
    }

    fn choose_gpu(&self, context: &Context) -> Result<()> {
        if self.gpu.get().is_none() && self.device.is_none() {
            let uuid = context.device().uuid().map_err(cuda_error("asking for the UUID of a stream's GPU"))?;
            let gpu = self.gpus.get(uuid)?;
            self.gpu.get_or_init(|| gpu);
        }
        Ok(())
    }

    fn read(&self, chunk: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        match self.view(chunk)? {
            Some(view) => view.read_bytes(offset as usize, out).ok_or_else(outside)?,
            None => out.copy_from_slice(self.bytes(chunk, offset, out.len() as u64)?),
        }
        Ok(())
    }

    fn write(&self, chunk: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.shared(chunk)?.write_bytes(offset as usize, bytes).ok_or_else(outside)
    }

    fn reserved(&self) -> u64 {
        if self.reserved > 0 { self.chunks.first().map_or(0, NodeMapping::reserved) } else { 0 }
    }

    fn settle(&mut self) -> Result<(), CudaError> {
        self.chunks.iter().try_for_each(NodeMapping::synchronize)
    }

    fn vacate(&mut self) -> Option<Result<(), CudaError>> {
        Some(vacate(&mut self.chunks, &mut self.vacant, NodeMapping::vacate))
    }

    fn refill(&mut self, chunks: &[(u64, OwnedFd)]) -> Result<()> {
        let node = NodeRequest::new("a suspended segment", Place::Pinned(self.node))?;
        let import = |(bytes, fd): &(u64, OwnedFd)| node.import(fd.as_fd(), *bytes).map(Arc::new);
        let memories = chunks.iter().map(import).collect::<Result<_>>()?;
        refill(&mut self.vacant, &mut self.chunks, memories, NodeReservation::map)
            .map_err(cuda_error(format!("mapping memory of NUMA node {} again", self.node)))
    }

    fn extend(&self, chunks: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>> {
        let node = NodeRequest::new("a segment that has grown", Place::Pinned(self.node))?;
        let import = |(bytes, fd): &(u64, OwnedFd)| node.import(fd.as_fd(), *bytes);
        let memories: Vec<_> = chunks.iter().map(import).collect::<Result<_>>()?;
        let mapping = self.chunks.first().ok_or_else(no_chunk)?;
        let what = "mapping the memory that a segment has grown by";
        Ok(Box::new(mapping.extend(memories).map_err(access_error(what))?))
    }
}
