//! Physical device memory that can be passed to other processes as a file descriptor.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::abi::{MEM_LOCATION_TYPE_DEVICE, MemLocation};
use crate::allocation::Allocation;
use crate::context::CallContext;
use crate::{Context, CuResult, CudaError, MemoryPlace};

/// Memory on one device without an address (`cuMemCreate`), created here or imported from another process.
///
/// It becomes usable by a [`Mapping`]. Holds one reference to the memory and releases it on drop; mappings, imports
/// in other processes and exported file descriptors are references of their own, and the memory goes back to the
/// device with the last of them. Each import counts, so it is an owner like any other.
///
/// `Send` and `Sync`.
///
/// [`Mapping`]: crate::Mapping
#[derive(Debug)]
pub struct PhysicalMemory {
    context: Context,
    pub(crate) allocation: Arc<Allocation>,
}

impl PhysicalMemory {
    /// Returns the number of bytes that the size of every allocation on the context's device must be a multiple of: 2
    /// MiB on current GPUs (measured on H200).
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` or `CUDA_ERROR_NOT_PERMITTED` where the device or the virtualisation has no
    /// exportable memory.
    pub fn granularity(context: &Context) -> Result<u64, CudaError> {
        Allocation::granularity(&CallContext::Of(context.clone()), location(context))
    }

    /// Allocates `bytes` of memory on the context's device, exportable as a file descriptor. `bytes` is a multiple of
    /// [`PhysicalMemory::granularity`]; [`round_up`] makes it one.
    ///
    /// What the memory contains is not promised. It read as zero after another process's exit (measured), but the
    /// driver docs do not say so: clear it before another process can read it.
    ///
    /// Host-synchronous: 0.77 ms for 1 GiB with mapping and export (measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, with the free and total bytes of the device in [`CudaError::memory`];
    /// `CUDA_ERROR_INVALID_VALUE` for a size that is zero or not a multiple of the granularity.
    pub fn create(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let allocation = Allocation::create(CallContext::Of(context.clone()), location(context), bytes)
            .map_err(|error| context.describe_allocation(error, bytes))?;
        Ok(Self { context: context.clone(), allocation: Arc::new(allocation) })
    }

    /// Imports memory that another process (or this one) exported. `bytes` is the size it was created with, which the
    /// descriptor does not have; a wrong size is found when the memory is mapped.
    ///
    /// The descriptor is not consumed and may be closed at once. The memory may lie on another device than the
    /// context's: see [`PhysicalMemory::place`]. Host-synchronous: with mapping 42 µs for 2 MiB, 0.14 ms for
    /// 1 GiB (measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_UNKNOWN` if the descriptor is something else (measured); `CUDA_ERROR_INVALID_DEVICE` if its GPU is
    /// not reachable from this process, and if it is memory of a NUMA node, whose descriptors look the same. Neither
    /// means that the memory is lost.
    pub fn import(context: &Context, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
        let allocation = Allocation::import(CallContext::Of(context.clone()), descriptor, bytes)?;
        if let place @ MemoryPlace::Node(_) = allocation.place()? {
            let error = CudaError::new("cuMemImportFromShareableHandle", CuResult::INVALID_DEVICE);
            return Err(error.with_context(format!("the memory lies on {place}, not on a device")));
        }
        Ok(Self { context: context.clone(), allocation: Arc::new(allocation) })
    }

    /// Returns a new file descriptor that stands for this memory, close-on-exec. It is a reference of its own: the
    /// memory lives while any copy of it is open, in whatever process, with or without CUDA (measured, also after the
    /// creator was killed).
    ///
    /// The driver makes the descriptor without close-on-exec and it is set right after: a child that another thread
    /// forks and executes just between keeps a copy.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for imported memory: only the creator can export (measured).
    /// `CUDA_ERROR_OPERATING_SYSTEM` if the process has no descriptor left.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.allocation.export()
    }

    /// Asks the driver where the memory lies.
    ///
    /// # Errors
    /// The driver's error.
    pub fn place(&self) -> Result<MemoryPlace, CudaError> {
        self.allocation.place()
    }

    /// Returns its size in bytes: as created, or as the importer declared.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.allocation.bytes()
    }

    /// Returns false: memory without bytes cannot be created.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether it came from [`PhysicalMemory::import`].
    #[must_use]
    pub fn is_imported(&self) -> bool {
        self.allocation.is_imported()
    }

    /// Returns the context in which the memory was created or imported.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the driver's handle (`CUmemGenericAllocationHandle`), for other CUDA libraries; valid while `self`
    /// lives. Two handles of the same memory need not be equal (vendor's documentation).
    #[must_use]
    pub fn as_raw(&self) -> u64 {
        self.allocation.as_raw()
    }
}

/// Returns the smallest multiple of `granularity` that holds `bytes`; nothing if that exceeds 64 bits or the
/// granularity is 0.
#[must_use]
pub const fn round_up(bytes: u64, granularity: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(granularity)
}

fn location(context: &Context) -> MemLocation {
    MemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: context.device().raw() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rounding_has_its_edges() {
        assert_eq!(round_up(0, 2 << 20), Some(0));
        assert_eq!(round_up(1, 2 << 20), Some(2 << 20));
        assert_eq!(round_up(2 << 20, 2 << 20), Some(2 << 20));
        assert_eq!(round_up(u64::MAX, 2 << 20), None);
        assert_eq!(round_up(1, 0), None);
    }

    proptest! {
        #[test]
        fn rounding_gives_the_next_multiple(bytes in 0..=u64::MAX / 2, granularity in 1..=u64::MAX / 4) {
            let rounded = round_up(bytes, granularity).unwrap();
            prop_assert!(rounded >= bytes && rounded - bytes < granularity && rounded.is_multiple_of(granularity));
        }
    }
}
