//! Device memory at an address of this process.
#![allow(unsafe_code)] // driver calls

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use partywall_os::lock::IgnorePoison;

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

/// A whole [`PhysicalMemory`] at an address range of its own, reachable from the context's device; behind it, where
/// addresses were reserved for that, as many more as [`Mapping::extend`] was given.
///
/// Always the whole: the driver maps neither parts nor offsets (`CUDA_ERROR_NOT_SUPPORTED`, measured). The same
/// memory may be mapped several times. The addresses are this process's own and mean nothing in another.
///
/// Keeps the context and the memory alive. Dropping it unmaps, gives the addresses back and drops its share of the
/// memory; a failure of that goes to [`Context::take_drop_error`], or to the caller of [`Mapping::close`].
///
/// Dropping waits for all that this process runs in the context, if a slice was ever taken. The driver unmaps without
/// waiting, and work that is still running then faults, which ends CUDA in this process (`CUDA_ERROR_ILLEGAL_ADDRESS`,
/// measured on H200, driver 580). So do not drop a mapping behind a wait for another process.
///
/// `Send` and `Sync`: it gives out addresses and checked ranges, never references to the bytes, which other processes
/// may change at any time.
pub struct Mapping {
    // Dropped in this order: first what is mapped, then the addresses.
    first: MappedPart,
    /// The parts behind `first`, without gaps. A thread that maps more holds the lock.
    more: Mutex<Vec<MappedPart>>,
    /// Bytes of all parts; it only grows. Stored (release) by [`Extension::publish`] when the parts are mapped, loaded
    /// (acquire) by [`Mapping::len`] before they are used.
    len: AtomicU64,
    access: Access,
    /// True if the address was ever given out. If not, no work can use the mapping.
    named: AtomicBool,
    range: AddressRange,
}

impl Mapping {
    /// Maps memory into this process, and lets the context's device access it.
    ///
    /// Host-synchronous, and the driver may wait for running work; cost as for [`PhysicalMemory::import`].
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` if imported memory is larger than the importer declared (measured),
    /// `CUDA_ERROR_INVALID_VALUE` if it is smaller;
    /// `CUDA_ERROR_OUT_OF_MEMORY` if addresses ran out; a peer code if the memory lies on a device that this one
    /// cannot reach. Nothing stays mapped or reserved after an error.
    pub fn new(memory: impl Into<Arc<PhysicalMemory>>, access: Access) -> Result<Self, CudaError> {
        Self::with_reservation(memory, access, 0)
    }

    /// Maps memory as [`Mapping::new`] does, at the beginning of a range of `reserved` addresses, so that further memory can
    /// be mapped behind it. `reserved` is a multiple of [`PhysicalMemory::granularity`]. The range is only as long as the
    /// memory if `reserved` is less, or if the process has no free range of that length.
    ///
    /// # Errors
    /// As [`Mapping::new`].
    pub fn with_reservation(
        memory: impl Into<Arc<PhysicalMemory>>,
        access: Access,
        reserved: u64,
    ) -> Result<Self, CudaError> {
        let memory = memory.into();
        let context = memory.context().clone();
        let bytes = memory.len();
        let describe = |error: CudaError| describe(error, bytes, &context);
        let _guard = context.guard_relaxed()?;
        let range = match AddressRange::reserve(&context, reserved.max(bytes)) {
            Err(error) if error.code == CuResult::OUT_OF_MEMORY && reserved > bytes => {
                AddressRange::reserve(&context, bytes)
            }
            reserved => reserved,
        };
        let range = range.map_err(describe)?;
        let first = MappedPart::map(memory, range.pointer, access).map_err(describe)?;
        Ok(Self { first, more: Mutex::default(), len: AtomicU64::new(bytes), access, named: false.into(), range })
    }

    /// Maps further memory behind the current end, with the same access. It becomes visible by [`Extension::publish`].
    /// The mapped memory stays in place, and work that uses it continues; the driver may wait for that work.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`] if it does not fit into what is reserved; else as [`Mapping::new`]. The mapping is
    /// then as it was.
    pub fn extend<M: Into<Arc<PhysicalMemory>>>(
        &self,
        memories: impl IntoIterator<Item = M>,
    ) -> Result<Extension<'_>, AccessError> {
        // A panic under this lock drops, and so unmaps, what was not published.
        let more = self.more.lock().ignore_poison();
        let mut extension = Extension { mapping: self, parts: Vec::new(), more, len: self.len() };
        for memory in memories {
            let memory = memory.into();
            let offset = extension.len;
            let len = memory.len();
            let available = self.reserved();
            if available - offset < len {
                return Err(AccessError::OutOfRange { offset, len, available });
            }
            let _guard = self.context().guard_relaxed()?;
            let part = MappedPart::map(memory, self.range.pointer + offset, self.access);
            extension.parts.push(part.map_err(|error| describe(error, len, self.context()))?);
            extension.len += len;
        }
        Ok(extension)
    }

    /// Changes what the GPU may do, at the same addresses: the writer of memory that becomes frozen makes its own
    /// mapping read-only. The driver does not wait (measured): running work that writes it faults, too.
    ///
    /// # Errors
    /// As the driver says; the former access then still stands.
    pub fn set_access(&mut self, access: Access) -> Result<(), CudaError> {
        set_access(self.context(), self.range.pointer, self.len(), access)?;
        self.access = access;
        Ok(())
    }

    /// Unmaps and returns the result; dropping does the same and ignores the result.
    ///
    /// # Errors
    /// The first step that failed, such as the sticky code of a lost context. The memory is as free as it can get.
    pub fn close(mut self) -> Result<(), CudaError> {
        self.unmap()
    }

    fn unmap(&mut self) -> Result<(), CudaError> {
        if !self.first.mapped {
            return Ok(());
        }
        let settled = if *self.named.get_mut() { self.context().settle() } else { Ok(()) };
        let more = self.more.get_mut().ignore_poison();
        more.iter_mut().rev().chain([&mut self.first]).map(MappedPart::unmap).fold(settled, Result::and)
    }

    /// Returns a checked range of the memory.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        self.as_slice().slice(offset, len)
    }

    /// Returns the whole memory of the current size as a range.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the range stays mapped with this access while `self` is borrowed, since changing either takes
        // `&mut self` or `self`; an extension adds to it and changes nothing.
        unsafe { DeviceSlice::from_raw(self.device_ptr(), self.len(), self.access) }
    }

    /// Returns the first address, valid on the device while the mapping lives.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        // Relaxed: dropping takes `&mut self`, so the drop happens after this store.
        self.named.store(true, Ordering::Relaxed);
        self.range.pointer
    }

    /// Returns the current size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Returns the size in bytes up to which the mapping can grow in place.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.range.bytes as u64
    }

    /// Returns false: memory always has bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the access that the GPU has.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the first memory of the mapping, for exporting it or mapping it again.
    #[must_use]
    pub fn memory(&self) -> &Arc<PhysicalMemory> {
        &self.first.memory
    }

    /// Returns the context in which the memory is mapped.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.memory().context()
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("device_ptr", &format_args!("{:#x}", self.range.pointer))
            .field("bytes", &self.len())
            .field("access", &self.access)
            .field("memory", self.memory())
            .finish_non_exhaustive()
    }
}

/// Memory that is mapped behind a [`Mapping`] and not yet visible in it. Dropping it unmaps it again.
#[derive(Debug)]
pub struct Extension<'a> {
    mapping: &'a Mapping,
    // Unmapped before the lock is released: the next extension takes the same addresses.
    parts: Vec<MappedPart>,
    more: MutexGuard<'a, Vec<MappedPart>>,
    /// The length of the mapping including it.
    len: u64,
}

impl Extension<'_> {
    /// Makes the memory part of the mapping.
    pub fn publish(mut self) {
        self.more.append(&mut self.parts);
        self.mapping.len.store(self.len, Ordering::Release);
    }
}

/// One allocation, mapped whole.
#[derive(Debug)]
struct MappedPart {
    pointer: DevicePtr,
    memory: Arc<PhysicalMemory>,
    /// True if it is still mapped; false only between [`MappedPart::unmap`] and the drop of the fields.
    mapped: bool,
}

impl MappedPart {
    /// Maps memory at addresses that are reserved and unused, and gives the device access. A context is current.
    fn map(memory: Arc<PhysicalMemory>, pointer: DevicePtr, access: Access) -> Result<Self, CudaError> {
        let context = memory.context();
        // SAFETY: the callers have reserved the addresses for as many bytes, and nothing is mapped there; the handle
        // is live while `memory` is; offset and flags must be 0.
        unsafe { context.driver().mem_map(pointer, memory.len() as usize, 0, memory.as_raw(), 0) }?;
        // From here on dropping it unmaps.
        let part = Self { pointer, memory, mapped: true };
        set_access(part.memory.context(), pointer, part.memory.len(), access)?;
        Ok(part)
    }

    fn unmap(&mut self) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.mapped, false) {
            return Ok(());
        }
        self.memory.context().give_back(|driver| {
            // SAFETY: exactly the range that was mapped, unmapped once; nothing gives it out any more, because all
            // callers end the part.
            unsafe { driver.mem_unmap(self.pointer, self.memory.len() as usize) }
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let unmapped = self.unmap();
        self.context().record_drop(unmapped);
    }
}

impl Drop for MappedPart {
    fn drop(&mut self) {
        let unmapped = self.unmap();
        self.memory.context().record_drop(unmapped);
    }
}

/// Lets the context's device access `bytes` from `pointer` on, all of which are mapped.
fn set_access(context: &Context, pointer: DevicePtr, bytes: u64, access: Access) -> Result<(), CudaError> {
    let description = MemAccessDesc {
        location: MemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: context.device().raw() },
        flags: match access {
            Access::ReadOnly => MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => MEM_ACCESS_FLAGS_PROT_READWRITE,
        },
    };
    let _guard = context.guard_relaxed()?;
    // SAFETY: the range is mapped as a whole, by the callers; one live description is counted as one.
    unsafe { context.driver().mem_set_access(pointer, bytes as usize, &description, 1) }
}

fn describe(error: CudaError, bytes: u64, context: &Context) -> CudaError {
    error.with_context(format!("mapping {bytes} bytes for device {}", context.device().ordinal()))
}

/// A reserved range of addresses.
pub(crate) struct AddressRange {
    context: Context,
    pub(crate) pointer: DevicePtr,
    pub(crate) bytes: usize,
}

impl AddressRange {
    /// Reserves exactly this many bytes of addresses, in one range.
    pub(crate) fn reserve(context: &Context, bytes: u64) -> Result<Self, CudaError> {
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
        self.context.release(|driver| {
            // SAFETY: reserved once, freed once. If unmapping failed before, the driver refuses and the addresses
            // stay reserved, which is safe.
            unsafe { driver.mem_address_free(self.pointer, self.bytes) }
        });
    }
}
