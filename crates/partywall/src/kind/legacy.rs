//! GPU memory that its publisher allocated by other means, opened by the driver's 64-byte handles.
//!
//! Each chunk is one whole allocation, because a handle names an allocation. Only the publisher keeps it alive. Readers
//! map it with the publisher's rights: it is not frozen, and only this library refuses writes. The driver refuses to
//! open a handle in the process that published it (measured); that process finds the memory by its origin.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
};

use partywall_cuda::{Access as CudaAccess, DeviceSlice, ForeignMemory, IpcMapping, IpcMemoryHandle};
use partywall_os::per_process::PerProcess;
use partywall_wire::{Kind as WireKind, LegacyHandle};

use super::{
    Attach, Extension, Kind, Memory,
    vmm::{reader, remote},
    wrong_kind,
};
use crate::{
    error::{Error, Result, Unreachable},
    gpu::{DeviceRange, Gpu, access_error, cuda_error},
    place::Place,
};

/// The kind.
pub(super) struct LegacyKind;

impl Kind for LegacyKind {
    fn wire(&self) -> WireKind {
        WireKind::Legacy
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        let Place::Gpu(owner) = version.place else {
            return Err(Unreachable::protocol("GPU memory without a GPU"));
        };
        let own: Vec<_> = version.handles.iter().filter_map(|(_, handle)| published(&handle.origin)).collect();
        let access = if version.write { CudaAccess::ReadWrite } else { CudaAccess::ReadOnly };
        let gpu = reader(owner, &version)?;
        if !own.is_empty() && own.len() == version.handles.len() {
            if gpu.uuid() != owner {
                let why = "this process published it, and the publisher cannot map it on another GPU";
                return Err(remote(owner, gpu.uuid(), &version, why.into()));
            }
            let chunks = own.into_iter().map(LegacyChunk::Own).collect();
            return Ok(Box::new(LegacyChunks { chunks, access, gpu }));
        }
        let open = |(bytes, handle): &(u64, LegacyHandle)| {
            let opened = IpcMapping::open(gpu.context(), driver_handle(handle), *bytes, access);
            let failed = cuda_error(format!("opening {bytes} bytes of {:?} on GPU {owner}", version.name));
            Ok(LegacyChunk::Opened(opened.map_err(failed)?))
        };
        let chunks = version.handles.iter().map(open).collect::<Result<_>>()?;
        Ok(Box::new(LegacyChunks { chunks, access, gpu }))
    }
}

/// Prepares allocations of this process for publishing. Returns the handles that open them, and the memory.
pub(crate) fn publish(
    allocations: Vec<Vec<ForeignMemory>>,
    gpu: Arc<Gpu>,
    mutable: bool,
) -> Result<(Vec<LegacyHandle>, Box<dyn Memory>)> {
    let access = if mutable { CudaAccess::ReadWrite } else { CudaAccess::ReadOnly };
    let mut handles = Vec::new();
    let mut chunks = Vec::new();
    for memory in allocations {
        let failed = cuda_error("asking for a handle of the memory");
        let driver = memory.first().map(ForeignMemory::handle).transpose().map_err(failed)?;
        let Some(IpcMemoryHandle(driver)) = driver else { continue };
        let mut origin = [0; 16];
        rustix::rand::getrandom(&mut origin, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("drawing random numbers", e))?;
        let (first, second) = driver.split_at(32);
        let halves = |half: &[u8]| std::array::from_fn(|i| half[i]);
        handles.push(LegacyHandle { origin, driver: [halves(first), halves(second)] });
        let own = Arc::new(Own { origin, handle: IpcMemoryHandle(driver), memory });
        PUBLISHED.lock().insert(origin, Arc::downgrade(&own));
        chunks.push(LegacyChunk::Own(own));
    }
    Ok((handles, Box::new(LegacyChunks { chunks, access, gpu })))
}

/// An allocation that this process publishes. Opening it in this process shares its ownership.
struct Own {
    origin: [u8; 16],
    handle: IpcMemoryHandle,
    /// Tensors in the allocation, which lives as long as any of their owners. Never empty.
    memory: Vec<ForeignMemory>,
}

impl Drop for Own {
    fn drop(&mut self) {
        PUBLISHED.lock().remove(&self.origin);
    }
}

/// The published allocations, by origin. Empty in a forked child, where CUDA does not work and the addresses are
/// invalid.
static PUBLISHED: PerProcess<HashMap<[u8; 16], Weak<Own>>> = PerProcess::new();

fn published(origin: &[u8; 16]) -> Option<Arc<Own>> {
    PUBLISHED.lock().get(origin).and_then(Weak::upgrade)
}

fn driver_handle(handle: &LegacyHandle) -> IpcMemoryHandle {
    let [first, second] = handle.driver;
    IpcMemoryHandle(std::array::from_fn(|i| if i < 32 { first[i] } else { second[i - 32] }))
}

enum LegacyChunk {
    Own(Arc<Own>),
    Opened(IpcMapping),
}

struct LegacyChunks {
    // Closed before the context may be released.
    chunks: Vec<LegacyChunk>,
    access: CudaAccess,
    gpu: Arc<Gpu>,
}

impl LegacyChunks {
    fn range(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        let whole: DeviceSlice<'_> = match &self.chunks[chunk] {
            LegacyChunk::Own(own) => own.memory[0].allocation(self.access),
            LegacyChunk::Opened(mapping) => mapping.as_slice(),
        };
        let slice = whole.slice(offset, bytes).map_err(access_error("a tensor's range"))?;
        Ok(DeviceRange { gpu: &self.gpu, slice })
    }
}

impl Memory for LegacyChunks {
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.range(chunk, offset, bytes)
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }

    /// Refuses: memory that the publisher allocated has a fixed length.
    fn extend(&self, _: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>> {
        Err(wrong_kind("legacy", "other", "growing"))
    }

    fn ipc_handle(&self, chunk: usize) -> Option<IpcMemoryHandle> {
        match &self.chunks[chunk] {
            LegacyChunk::Own(own) => Some(own.handle),
            LegacyChunk::Opened(_) => None,
        }
    }

    fn is_published(&self) -> bool {
        self.chunks.iter().any(|chunk| matches!(chunk, LegacyChunk::Own(_)))
    }
}
