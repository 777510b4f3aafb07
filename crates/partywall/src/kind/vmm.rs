//! GPU memory of the driver's virtual memory management, exported as file descriptors.
//!
//! Each chunk is one `cuMemCreate`, exported once and mapped whole: the driver maps no parts, and an importer cannot
//! export again (both measured). Readers map read-only, which the hardware enforces; but whoever has the file
//! descriptor could map it otherwise, so this protects against bugs, not against attackers.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use partywall_cuda::{
    Access, CuResult, CudaError, DeviceUuid, Mapping, PhysicalMemory, Upload as CudaUpload, round_up,
};
use partywall_os::map::SharedMap;
use partywall_wire::Kind as WireKind;

use super::{Attach, Copy, Draft, Kind, Memory, Upload, Uploads, wrong_kind};
use crate::{
    error::{Error, Result},
    gpu::{self, DeviceRange, Gpu, Gpus, access_error, cuda_error},
    place::Place,
};

/// Bytes of each of an upload's two page-locked buffers.
const BUFFER: u64 = 8 << 20;

/// The kind.
pub(super) struct Vmm;

impl Kind for Vmm {
    fn wire(&self) -> WireKind {
        WireKind::Vmm
    }

    fn name(&self) -> &'static str {
        "vmm"
    }

    fn lives_at(&self, place: Place) -> bool {
        matches!(place, Place::Gpu(_))
    }

    fn allocate(&self, name: &str, place: Place, used: &[u64], gpus: &Gpus) -> Result<Box<dyn Draft>> {
        let Place::Gpu(uuid) = place else {
            return Err(wrong_kind("host", "GPU", "an allocation on a GPU"));
        };
        let gpu = gpus.get(uuid)?;
        let granularity = PhysicalMemory::granularity(gpu.context()).map_err(unsupported(uuid))?;
        let out_of_memory = |asked: u64, memory: Option<partywall_cuda::MemoryInfo>| Error::OutOfMemory {
            name: name.to_owned(),
            place,
            asked,
            free: memory.map(|m| m.free),
            total: memory.map(|m| m.total),
            held: None,
        };
        // All chunks or none: said with the whole size before the first is allocated.
        let sizes: Option<Vec<u64>> = used.iter().map(|bytes| round_up(*bytes, granularity)).collect();
        let total = sizes.as_ref().and_then(|sizes| sizes.iter().try_fold(0_u64, |sum, n| sum.checked_add(*n)));
        let (Some(sizes), Some(total)) = (sizes, total) else {
            return Err(out_of_memory(u64::MAX, None));
        };
        let chunk = |bytes: u64| {
            let describe = |error: CudaError| match error.code {
                CuResult::OUT_OF_MEMORY => out_of_memory(total, gpu.context().memory_info().ok()),
                _ => cuda_error(format!("allocating {bytes} bytes for {name:?} on GPU {uuid}"))(error),
            };
            let memory = PhysicalMemory::create(gpu.context(), bytes).map_err(describe)?;
            Mapping::new(memory, Access::ReadWrite).map_err(describe)
        };
        let chunks = sizes.into_iter().map(chunk).collect::<Result<_>>()?;
        Ok(Box::new(VmmChunks { chunks, gpu }))
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        let Place::Gpu(owner) = version.place else {
            return Err(Error::Protocol("GPU memory without a GPU".into()));
        };
        let gpu = reader(owner, &version)?;
        let access = if version.write { Access::ReadWrite } else { Access::ReadOnly };
        let map = |(bytes, fd): (u64, OwnedFd)| {
            let failed = cuda_error(format!("mapping {bytes} bytes of {:?} from GPU {owner}", version.name));
            // The import has its own reference: the file descriptor is closed when this returns.
            let memory = PhysicalMemory::import(gpu.context(), fd.as_fd(), bytes).map_err(&failed)?;
            Mapping::new(memory, access).map_err(&failed)
        };
        let chunks = version.chunks.into_iter().map(map).collect::<Result<_>>()?;
        Ok(Box::new(VmmChunks { chunks, gpu }))
    }
}

/// The GPU that is to use memory of `owner`.
fn reader(owner: DeviceUuid, version: &Attach<'_>) -> Result<Arc<Gpu>> {
    let wanted = match version.device {
        Some(device) => device,
        // The owner if we see it. Else what there is: the driver maps memory of a GPU that this process does not see.
        None => match gpu::find(owner) {
            Ok(_) => owner,
            Err(Error::NoDevice { .. }) => first_visible(owner)?,
            Err(error) => return Err(error),
        },
    };
    if wanted != owner && !version.allow_peer {
        return Err(Error::RemoteDevice {
            name: version.name.to_owned(),
            owner: owner.to_string(),
            reader: wanted.to_string(),
            link: link(owner, wanted),
        });
    }
    version.gpus.get(wanted)
}

fn first_visible(owner: DeviceUuid) -> Result<DeviceUuid> {
    let all = gpu::devices()?;
    let why = "this process sees no GPU at all".to_owned();
    let first = all.first().ok_or_else(|| Error::NoDevice { wanted: owner.to_string(), why })?;
    first.uuid().map_err(cuda_error("asking for a GPU's UUID"))
}

/// How two GPUs reach each other, and what that costs (measured on two H200 with NVLink).
fn link(owner: DeviceUuid, reader: DeviceUuid) -> String {
    let reachable = gpu::find(owner).ok().zip(gpu::find(reader).ok()).map(|(a, b)| b.can_access_peer(&a));
    match reachable {
        Some(Ok(true)) => "they reach each other directly; over NVLink a kernel reads 374 GB/s instead of 4,434".into(),
        Some(Ok(false)) => "they do not reach each other directly".into(),
        _ => "the owner is hidden from this process; over NVLink a kernel reads 374 GB/s instead of 4,434".into(),
    }
}

fn unsupported(uuid: DeviceUuid) -> impl Fn(CudaError) -> Error {
    cuda_error(format!("asking GPU {uuid} for its allocation granularity (is its driver 550 or later?)"))
}

/// Mapped chunks: a draft while this process alone has them, the memory of a version afterwards.
struct VmmChunks {
    // Unmapped before the context may go.
    chunks: Vec<Mapping>,
    gpu: Arc<Gpu>,
}

impl VmmChunks {
    fn range(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        let slice = self.chunks[chunk].slice(offset, bytes).map_err(access_error("a tensor's range"))?;
        Ok(DeviceRange { gpu: &self.gpu, slice })
    }
}

impl Draft for VmmChunks {
    fn chunk_bytes(&self) -> Vec<u64> {
        self.chunks.iter().map(Mapping::len).collect()
    }

    fn host_mut(&mut self, _: usize, _: u64, _: u64) -> Result<&mut [u8]> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn uploads(&mut self) -> Box<dyn Uploads + '_> {
        Box::new(VmmUploads(self))
    }

    fn finish(mut self: Box<Self>, mutable: bool) -> Result<(Vec<OwnedFd>, Box<dyn Memory>)> {
        let failed = |what: &str| cuda_error(format!("{what} on GPU {}", self.gpu.uuid()));
        // What the builder enqueued must be in memory before others may read it.
        self.gpu.context().synchronize().map_err(failed("finishing the builder's work"))?;
        let export = |chunk: &Mapping| chunk.memory().export().map_err(failed("exporting memory"));
        let fds = self.chunks.iter().map(export).collect::<Result<_>>()?;
        if !mutable {
            let freeze = cuda_error("making the builder's mapping read-only");
            for chunk in &mut self.chunks {
                chunk.set_access(Access::ReadOnly).map_err(&freeze)?;
            }
        }
        Ok((fds, self))
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
    fn bytes(&self, _: usize, _: u64, _: u64) -> Result<&[u8]> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    fn shared(&self, _: usize) -> Result<&SharedMap> {
        Err(wrong_kind("GPU", "mutable host", "a shared slice"))
    }

    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn read(&self, chunk: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.range(chunk, offset, out.len() as u64)?.copy_to_host(self.gpu.stream(), out)
    }

    fn write(&self, chunk: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.range(chunk, offset, bytes.len() as u64)?.copy_from_host(self.gpu.stream(), bytes)
    }
}
