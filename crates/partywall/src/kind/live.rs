//! Memory of a [`Heap`](crate::Heap), published while an allocator divides it among tensors.
//!
//! Readers map it as memory of kind `vmm`. The publisher keeps its own mapping, because the chunks contain other memory
//! that it writes.

use std::{os::fd::OwnedFd, sync::Arc};

use partywall_cuda::{Access as CudaAccess, ForeignMemory, Mapping};
use partywall_wire::Kind as WireKind;

use super::{Attach, Extension, Kind, Memory, vmm::VmmKind, wrong_kind};
use crate::{
    error::Result,
    gpu::{DeviceRange, Gpu, access_error, cuda_error},
    heap::HeapBlock,
};

/// The kind.
pub(super) struct LiveKind;

impl Kind for LiveKind {
    fn wire(&self) -> WireKind {
        WireKind::Live
    }

    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>> {
        VmmKind.attach(version)
    }
}

/// Prepares the chunks of these blocks for publishing. Returns a file descriptor for each, in the order of the blocks,
/// and the memory, which keeps the owners of the tensors.
pub(crate) fn publish(
    tensors: Vec<ForeignMemory>,
    blocks: Vec<Arc<HeapBlock>>,
    gpu: Arc<Gpu>,
    mutable: bool,
) -> Result<(Vec<OwnedFd>, Box<dyn Memory>)> {
    let mut chunks: Vec<Arc<Mapping>> = Vec::new();
    for block in &blocks {
        if !chunks.iter().any(|chunk| Arc::ptr_eq(chunk, block.chunk())) {
            chunks.push(block.chunk().clone());
        }
    }
    let export = |chunk: &Arc<Mapping>| chunk.memory().export();
    let fds = chunks.iter().map(export).collect::<Result<_, _>>().map_err(cuda_error("exporting memory"))?;
    let access = if mutable { CudaAccess::ReadWrite } else { CudaAccess::ReadOnly };
    Ok((fds, Box::new(LiveChunks { _tensors: tensors, chunks, _blocks: blocks, access, gpu })))
}

struct LiveChunks {
    // Dropped in this order.
    /// Keep the allocator from using their memory for other tensors.
    _tensors: Vec<ForeignMemory>,
    chunks: Vec<Arc<Mapping>>,
    /// Keep the heap from using their memory again, even if the allocator has freed them.
    _blocks: Vec<Arc<HeapBlock>>,
    access: CudaAccess,
    gpu: Arc<Gpu>,
}

impl Memory for LiveChunks {
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        let slice = self.chunks[chunk].slice(offset, bytes).map_err(access_error("a tensor's range"))?;
        let slice = if self.access == CudaAccess::ReadOnly { slice.read_only() } else { slice };
        Ok(DeviceRange { gpu: &self.gpu, slice })
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.gpu)
    }

    /// Refuses: the allocator owns the chunks.
    fn extend(&self, _: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>> {
        Err(wrong_kind("live", "other", "growing"))
    }

    fn is_published(&self) -> bool {
        true
    }
}
