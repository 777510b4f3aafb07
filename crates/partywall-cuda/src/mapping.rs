//! Device memory at an address of this process.
#![allow(unsafe_code)] // driver calls

use std::fmt;
use std::sync::Arc;

use crate::abi::{
    DevicePtr, MEM_ACCESS_FLAGS_PROT_READ, MEM_ACCESS_FLAGS_PROT_READWRITE, MEM_LOCATION_TYPE_DEVICE, MemAccessDesc,
    MemLocation,
};
use crate::{AccessError, Context, CuResult, CudaError, DeviceSlice, PhysicalMemory};

/// What the GPU may do to a mapping.
///
/// The hardware enforces it: a write through a read-only mapping kills the writer's context (measured). But each
/// process chooses for itself, whatever the exporter meant: this protects against bugs, not against attackers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Kernels and copies may read.
    ReadOnly,
    /// Kernels and copies may read and write.
    ReadWrite,
}

/// A whole [`PhysicalMemory`] at an address range of its own, reachable from the context's device.
///
/// Always the whole: the driver maps neither parts nor offsets (`CUDA_ERROR_NOT_SUPPORTED`, measured). The same
/// memory may be mapped several times. The addresses are this process's own and mean nothing in another.
///
/// Keeps the context and the memory alive. Dropping it unmaps, gives the addresses back and drops its share of the
/// memory; a failure of that goes to [`Context::take_drop_error`], or to the caller of [`Mapping::close`].
///
/// **Work that is still running** when a mapping goes away makes the context fault (`CUDA_ERROR_ILLEGAL_ADDRESS`,
/// which ends CUDA in this process), unless the driver waits for it first; the driver docs say only that unmapping
/// may wait. So drain the streams that use a mapping before dropping it. No host memory is at risk.
///
/// `Send` and `Sync`: it gives out addresses and checked ranges, never references to the bytes, which other processes
/// may change at any time.
pub struct Mapping {
    // Dropped in this order, after unmapping: first the addresses, then the memory.
    range: AddressRange,
    memory: Arc<PhysicalMemory>,
    access: Access,
    /// Whether the memory is still mapped; false only between [`Mapping::unmap`] and the drop of the fields.
    mapped: bool,
}

impl Mapping {
    /// Maps memory into this process, and lets the context's device access it.
    ///
    /// Host-synchronous, and the driver may wait for running work; cost as for [`PhysicalMemory::import`].
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` if imported memory is larger than the importer was told (measured),
    /// `CUDA_ERROR_INVALID_VALUE` if it is smaller;
    /// `CUDA_ERROR_OUT_OF_MEMORY` if addresses ran out; a peer code if the memory lies on a device that this one
    /// cannot reach. Nothing stays mapped or reserved after an error.
    pub fn new(memory: impl Into<Arc<PhysicalMemory>>, access: Access) -> Result<Self, CudaError> {
        let memory = memory.into();
        let context = memory.context().clone();
        let bytes = memory.len();
        let describe = |error: CudaError| {
            error.with_context(format!("mapping {bytes} bytes for device {}", context.device().ordinal()))
        };
        let _guard = context.guard_relaxed()?;
        let range = AddressRange::reserve(&context, bytes).map_err(describe)?;
        // SAFETY: the range was just reserved with this size and nothing is mapped there; the handle is live while
        // `memory` is; offset and flags must be 0.
        unsafe { context.driver().mem_map(range.pointer, range.bytes, 0, memory.handle(), 0) }.map_err(describe)?;
        // From here on dropping it unmaps.
        let mapping = Self { range, memory, access, mapped: true };
        mapping.apply(access).map_err(describe)?;
        Ok(mapping)
    }

    /// Changes what the GPU may do, at the same addresses: the writer of memory that becomes frozen makes its own
    /// mapping read-only. The driver may wait for running work; a kernel that writes afterwards faults.
    ///
    /// # Errors
    /// As the driver says; the former access then still stands.
    pub fn set_access(&mut self, access: Access) -> Result<(), CudaError> {
        self.apply(access)?;
        self.access = access;
        Ok(())
    }

    /// Unmaps and says how that went; dropping does the same silently.
    ///
    /// # Errors
    /// The first step that failed, such as the sticky code of a lost context. The memory is as free as it can get.
    pub fn close(mut self) -> Result<(), CudaError> {
        self.unmap()
    }

    /// A checked range of it.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        self.as_slice().slice(offset, len)
    }

    /// All of it.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the range stays mapped with this access while `self` is borrowed, since changing either takes
        // `&mut self` or `self`.
        unsafe { DeviceSlice::from_raw(self.range.pointer, self.len(), self.access) }
    }

    /// Its first address, valid on the device while the mapping lives.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.range.pointer
    }

    /// Its size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// Never: there is no memory of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the GPU may do to it.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The memory behind it, for exporting it or mapping it again.
    #[must_use]
    pub fn memory(&self) -> &Arc<PhysicalMemory> {
        &self.memory
    }

    /// The context that it is mapped in.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.memory.context()
    }

    fn apply(&self, access: Access) -> Result<(), CudaError> {
        let context = self.context();
        let description = MemAccessDesc {
            location: MemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: context.device().raw() },
            flags: match access {
                Access::ReadOnly => MEM_ACCESS_FLAGS_PROT_READ,
                Access::ReadWrite => MEM_ACCESS_FLAGS_PROT_READWRITE,
            },
        };
        let _guard = context.guard_relaxed()?;
        // SAFETY: the range is mapped as a whole; one live description is counted as one.
        unsafe { context.driver().mem_set_access(self.range.pointer, self.range.bytes, &description, 1) }
    }

    fn unmap(&mut self) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.mapped, false) {
            return Ok(());
        }
        let context = self.context();
        let _guard = context.guard_relaxed()?;
        // SAFETY: exactly the range that was mapped, unmapped once; `self` gives out nothing any more, because both
        // callers end it.
        unsafe { context.driver().mem_unmap(self.range.pointer, self.range.bytes) }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("device_ptr", &format_args!("{:#x}", self.range.pointer))
            .field("access", &self.access)
            .field("memory", &self.memory)
            .finish()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let unmapped = self.unmap();
        self.context().record_drop(unmapped);
    }
}

/// Addresses that nothing else in the process gets.
struct AddressRange {
    context: Context,
    pointer: DevicePtr,
    bytes: usize,
}

impl AddressRange {
    /// Exactly as many as asked for: reserving more exhausts the address space long before the memory (field reports).
    fn reserve(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let size =
            usize::try_from(bytes).map_err(|_| CudaError::new("cuMemAddressReserve", CuResult::INVALID_VALUE))?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; no alignment, hint or flags are asked for.
        unsafe { context.driver().mem_address_reserve(&mut pointer, size, 0, 0, 0) }?;
        Ok(Self { context: context.clone(), pointer, bytes: size })
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let freed = self.context.guard_relaxed().and_then(|_guard| {
            // SAFETY: reserved once, freed once. If unmapping failed before, the driver refuses and the addresses
            // stay reserved, which is safe.
            unsafe { self.context.driver().mem_address_free(self.pointer, self.bytes) }
        });
        self.context.record_drop(freed);
    }
}
