//! GPU memory of the driver's virtual memory management, exported as file descriptors.
//!
//! Each chunk is one `cuMemCreate`, exported once and mapped whole: the driver maps no parts, and an importer cannot
//! export again (both measured). Readers map read-only, which the hardware enforces; but a process with the
//! file descriptor could map it otherwise, so this protects against bugs, not against attackers.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use partywall_cuda::{
    Access as CudaAccess, CuResult, CudaError, DeviceUuid, Mapping, MemoryInfo, PhysicalMemory, Reservation,
    Upload as CudaUpload, round_up,
};
use partywall_wire::Kind as WireKind;

use super::{
    Attach, Copy, Draft, Extension, Kind, Memory, Upload, Uploads, chunks, refill, reservation, vacate, wrong_kind,
};
use crate::{
    error::{DeviceFault, Error, LimitReached, Result, Unreachable},
    gpu::{self, DeviceRange, Gpu, Gpus, access_error, cuda_error},
    place::Place,
};

/// Bytes of each of an upload's two page-locked buffers.
const BUFFER: u64 = 8 << 20;

/// The kind.
pub(super) struct VmmKind;

impl Kind for VmmKind {
    fn wire(&self) -> WireKind {
        WireKind::Vmm
    }

    fn lives_at(&self, place: Place) -> bool {
        matches!(place, Place::Gpu(_))
    }

    fn allocate(
        &self,
        name: &str,
        place: Place,
        used: &[u64],
        reserve: Option<u64>,
        gpus: &Arc<Gpus>,
    ) -> Result<Box<dyn Draft>> {
        let asked = MemoryRequest::new(name, place, gpus)?;
        let chunks = chunks(used, reserve, asked.granularity, |bytes, total, reserved| {
            let memory = asked.create(bytes, total)?;
            Mapping::with_reservation(memory, CudaAccess::ReadWrite, reserved).map_err(asked.failed(bytes, total))
        });
        let (chunks, reserved) = chunks.ok_or_else(|| asked.out_of_memory(u64::MAX, None))??;
        Ok(Box::new(VmmChunks::new(chunks, reserved, asked.gpu)))
    }

    fn chunk(&self, name: &str, place: Place, bytes: u64, gpus: &Arc<Gpus>) -> Result<(u64, OwnedFd)> {
        let asked = MemoryRequest::new(name, place, gpus)?;
        let bytes = round_up(bytes, asked.granularity).ok_or_else(|| asked.out_of_memory(bytes, None))?;
        let fd = asked.create(bytes, bytes)?.export().map_err(asked.failed(bytes, bytes))?;
        Ok((bytes, fd))
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        let Place::Gpu(owner) = version.place else {
            return Err(Unreachable::protocol("GPU memory without a GPU"));
        };
        let gpu = reader(owner, &version)?;
        let access = if version.write { CudaAccess::ReadWrite } else { CudaAccess::ReadOnly };
        let failed = cuda_error(format!("mapping a chunk of {:?} from GPU {owner}", version.name));
        // The import has its own reference: the file descriptors are closed when this returns.
        let import =
            |(bytes, fd): &(u64, OwnedFd)| PhysicalMemory::import(gpu.context(), fd.as_fd(), *bytes).map_err(&failed);
        if version.reserve == 0 {
            let map = |chunk| Mapping::new(import(chunk)?, access).map_err(&failed);
            let chunks = version.chunks.iter().map(map).collect::<Result<_>>()?;
            return Ok(Box::new(VmmChunks::new(chunks, 0, gpu)));
        }
        let mut memories = version.chunks.iter().map(import);
        let first = memories.next().ok_or_else(no_chunk)??;
        let total = version.chunks.iter().map(|(bytes, _)| bytes).sum::<u64>();
        let granularity = PhysicalMemory::granularity(gpu.context()).map_err(unsupported(gpu.uuid()))?;
        let reserved = reservation(version.reserve, total, granularity);
        let mapping = Mapping::with_reservation(first, access, reserved).map_err(&failed)?;
        let rest: Vec<_> = memories.collect::<Result<_>>()?;
        mapping.extend(rest).map_err(access_error("mapping the memory that a segment has grown by"))?.publish();
        Ok(Box::new(VmmChunks::new(vec![mapping], reserved, gpu)))
    }
}

/// A request for memory on one GPU.
struct MemoryRequest<'a> {
    name: &'a str,
    place: Place,
    gpu: Arc<Gpu>,
    granularity: u64,
}

impl<'a> MemoryRequest<'a> {
    fn new(name: &'a str, place: Place, gpus: &Gpus) -> Result<Self> {
        let Place::Gpu(uuid) = place else {
            return Err(wrong_kind("host", "GPU", "an allocation on a GPU"));
        };
        let gpu = gpus.get(uuid)?;
        let granularity = PhysicalMemory::granularity(gpu.context()).map_err(unsupported(uuid))?;
        Ok(Self { name, place, gpu, granularity })
    }

    fn create(&self, bytes: u64, total: u64) -> Result<PhysicalMemory> {
        PhysicalMemory::create(self.gpu.context(), bytes).map_err(self.failed(bytes, total))
    }

    /// Returns the error that `bytes` of `total` bytes could not be allocated.
    fn failed(&self, bytes: u64, total: u64) -> impl Fn(CudaError) -> Error {
        move |error| match error.code {
            CuResult::OUT_OF_MEMORY => self.out_of_memory(total, self.gpu.context().memory_info().ok()),
            _ => {
                let what = format!("allocating {bytes} bytes for {:?} on GPU {}", self.name, self.gpu.uuid());
                cuda_error(what)(error)
            }
        }
    }

    fn out_of_memory(&self, asked: u64, memory: Option<MemoryInfo>) -> Error {
        LimitReached::memory(self.name, self.place, asked, memory.map(|memory| (memory.free, memory.total)))
    }
}

/// Returns the GPU on which this process uses memory of `owner`.
pub(super) fn reader(owner: DeviceUuid, version: &Attach<'_>) -> Result<Arc<Gpu>> {
    let wanted = match version.device {
        Some(device) => device,
        // Asking the driver for all GPUs takes as many calls as there are.
        None if version.gpus.has(owner) => owner,
        // The owner, if this process sees it; otherwise the first GPU. The driver also maps memory of invisible GPUs.
        None => {
            let visible = gpu::uuids()?;
            let why = "this process sees no GPU at all".to_owned();
            let none = || DeviceFault::NoDevice { wanted: Some(owner.to_string()), why };
            let first = visible.first().ok_or_else(none)?;
            *visible.iter().find(|uuid| **uuid == owner).unwrap_or(first)
        }
    };
    if wanted != owner && !version.allow_peer {
        return Err(remote(owner, wanted, version, link(owner, wanted)));
    }
    version.gpus.get(wanted)
}

/// Returns the error that the memory is on GPU `owner`, but would be used on GPU `reader`.
pub(super) fn remote(owner: DeviceUuid, reader: DeviceUuid, version: &Attach<'_>, link: String) -> Error {
    let owner = owner.to_string();
    let reader = reader.to_string();
    Error::DeviceFault(DeviceFault::Remote { name: version.name.to_owned(), owner, reader, link })
}

/// Describes how two GPUs reach each other, and the cost (measured on two H200 with NVLink).
fn link(owner: DeviceUuid, reader: DeviceUuid) -> String {
    let reachable = gpu::find(owner).ok().zip(gpu::find(reader).ok()).map(|(a, b)| b.can_access_peer(&a));
    match reachable {
        Some(Ok(true)) => "they reach each other directly; over NVLink a kernel reads 374 GB/s instead of 4,434".into(),
        Some(Ok(false)) => "they do not reach each other directly".into(),
        _ => "the owner is hidden from this process; over NVLink a kernel reads 374 GB/s instead of 4,434".into(),
    }
}

fn no_chunk() -> Error {
    Unreachable::protocol("GPU memory without a chunk")
}

fn unsupported(uuid: DeviceUuid) -> impl Fn(CudaError) -> Error {
    cuda_error(format!("asking GPU {uuid} for its allocation granularity (is its driver 550 or later?)"))
}

/// Mapped chunks: a draft until they are committed, the memory of a version afterwards.
struct VmmChunks {
    // First, so that the chunks are unmapped before the context may be released.
    chunks: Vec<Mapping>,
    /// The addresses of the chunks while they are not mapped.
    vacant: Vec<Reservation>,
    /// The reservation that was asked for, if the only mapping may grow. The actual one may be smaller.
    reserved: u64,
    /// The file descriptors of a draft, for the broker.
    exported: Vec<OwnedFd>,
    gpu: Arc<Gpu>,
}

impl VmmChunks {
    fn new(chunks: Vec<Mapping>, reserved: u64, gpu: Arc<Gpu>) -> Self {
        Self { chunks, vacant: Vec::new(), reserved, exported: Vec::new(), gpu }
    }

    fn range(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        let slice = self.chunks[chunk].slice(offset, bytes).map_err(access_error("a tensor's range"))?;
        Ok(DeviceRange { gpu: &self.gpu, slice })
    }
}

impl Draft for VmmChunks {
    fn chunk_bytes(&self) -> Vec<u64> {
        self.chunks.iter().map(Mapping::len).collect()
    }

    fn push(&mut self, name: &str, place: Place, bytes: u64, gpus: &Arc<Gpus>) -> Result<()> {
        let asked = MemoryRequest::new(name, place, gpus)?;
        let bytes = round_up(bytes, asked.granularity).ok_or_else(|| asked.out_of_memory(bytes, None))?;
        let memory = asked.create(bytes, bytes)?;
        self.chunks.push(Mapping::new(memory, CudaAccess::ReadWrite).map_err(asked.failed(bytes, bytes))?);
        Ok(())
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn host_mut(&mut self, _: usize, _: u64, _: u64) -> Result<&mut [u8]> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }

    fn uploads(&mut self) -> Box<dyn Uploads + '_> {
        Box::new(VmmUploads(self))
    }

    fn freeze(&mut self, mutable: bool) -> Result<()> {
        let failed = |what: &str| cuda_error(format!("{what} on GPU {}", self.gpu.uuid()));
        // Writes that the builder enqueued must be in memory before other processes may read it.
        self.gpu.context().synchronize().map_err(failed("finishing the builder's work"))?;
        if self.exported.is_empty() {
            let export = |chunk: &Mapping| chunk.memory().export().map_err(failed("exporting memory"));
            self.exported = self.chunks.iter().map(export).collect::<Result<_>>()?;
        }
        if !mutable {
            let freeze = cuda_error("making the builder's mapping read-only");
            for chunk in &mut self.chunks {
                chunk.set_access(CudaAccess::ReadOnly).map_err(&freeze)?;
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

struct VmmUploads<'a>(&'a VmmChunks);

impl Uploads for VmmUploads<'_> {
    fn start(&self) -> Result<Box<dyn Upload + '_>> {
        let largest = self.0.chunks.iter().map(Mapping::len).max().unwrap_or(1);
        let upload = CudaUpload::new(self.0.gpu.context(), BUFFER.min(largest));
        Ok(Box::new(VmmUpload { chunks: self.0, upload: upload.map_err(cuda_error("making buffers for an upload"))? }))
    }
}

struct VmmUpload<'a> {
    chunks: &'a VmmChunks,
    upload: CudaUpload,
}

impl Upload for VmmUpload<'_> {
    fn buffer(&mut self) -> Result<&mut [u8]> {
        self.upload.buffer().map_err(cuda_error("copying to the GPU"))
    }

    fn submit(&mut self, copies: &[Copy]) -> Result<()> {
        let part =
            |copy: &Copy| Ok((copy.start, self.chunks.range(copy.chunk, copy.offset, copy.len as u64)?.as_slice()));
        let parts: Vec<_> = copies.iter().map(part).collect::<Result<_>>()?;
        self.upload.submit(&parts).map_err(access_error("copying to the GPU"))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.upload.finish().map_err(cuda_error("copying to the GPU"))
    }
}

impl Memory for VmmChunks {
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }

    fn reserved(&self) -> u64 {
        if self.reserved > 0 { self.chunks.first().map_or(0, Mapping::reserved) } else { 0 }
    }

    fn extend(&self, chunks: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>> {
        let what = "mapping the memory that a segment has grown by";
        let import = |(bytes, fd): &(u64, OwnedFd)| {
            PhysicalMemory::import(self.gpu.context(), fd.as_fd(), *bytes).map_err(cuda_error(what))
        };
        let memories: Vec<_> = chunks.iter().map(import).collect::<Result<_>>()?;
        let mapping = self.chunks.first().ok_or_else(no_chunk)?;
        Ok(Box::new(mapping.extend(memories).map_err(access_error(what))?))
    }

    fn mappings(&mut self) -> Option<&mut [Mapping]> {
        (self.reserved == 0).then_some(&mut self.chunks)
    }

    fn settle(&mut self) -> Result<(), CudaError> {
        self.chunks.iter_mut().try_for_each(Mapping::settle)
    }

    fn vacate(&mut self) -> Option<Result<(), CudaError>> {
        Some(vacate(&mut self.chunks, &mut self.vacant, Mapping::vacate))
    }

    fn refill(&mut self, chunks: &[(u64, OwnedFd)]) -> Result<()> {
        let failed = cuda_error(format!("mapping memory of GPU {} again", self.gpu.uuid()));
        let import = |(bytes, fd): &(u64, OwnedFd)| {
            PhysicalMemory::import(self.gpu.context(), fd.as_fd(), *bytes).map(Arc::new).map_err(&failed)
        };
        let memories = chunks.iter().map(import).collect::<Result<_>>()?;
        refill(&mut self.vacant, &mut self.chunks, memories, Reservation::map).map_err(failed)
    }
}

impl Extension for partywall_cuda::Extension<'_> {
    fn publish(self: Box<Self>) {
        partywall_cuda::Extension::publish(*self);
    }
}
