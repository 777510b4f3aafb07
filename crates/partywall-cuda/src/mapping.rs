//! Device memory at an address of this process.
#![allow(unsafe_code)] // vouches for its addresses

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::{
    MEM_ACCESS_FLAGS_PROT_READ, MEM_ACCESS_FLAGS_PROT_READWRITE, MEM_LOCATION_TYPE_DEVICE, MemAccessDesc, MemLocation,
};
use crate::parts::{AddressRange, Extension, Parts};
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

/// Why the memory of a [`Mapping`] was not replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot map other memory in place{}", if lost.is_some() { ", nor the former memory again" } else { "" })]
pub struct ReplaceError {
    /// The call that failed.
    pub source: CudaError,
    /// Why the former memory could not be mapped again, if it could not. The mapping then has no bytes until a later
    /// replacement succeeds. Its addresses stay reserved.
    pub lost: Option<Box<CudaError>>,
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
    parts: Parts,
    access: Access,
    /// True if the address was ever given out. If not, no work can use the mapping.
    named: AtomicBool,
    memory: Arc<PhysicalMemory>,
}

impl Mapping {
    /// Maps memory into this process, and lets the context's device access it.
    ///
    /// Host-synchronous, and the driver may wait for running work; cost as for [`PhysicalMemory::import`].
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` if imported memory is larger than the importer declared (measured),
    /// `CUDA_ERROR_INVALID_VALUE` if it is smaller; `CUDA_ERROR_OUT_OF_MEMORY` if addresses ran out; a peer code if the
    /// memory lies on a device that this one cannot reach. Nothing stays mapped or reserved after an error.
    pub fn new(memory: impl Into<Arc<PhysicalMemory>>, access: Access) -> Result<Self, CudaError> {
        Self::with_reservation(memory, access, 0)
    }

    /// Maps memory as [`Mapping::new`] does, at the beginning of a range of `reserved` addresses, so that further
    /// memory can be mapped behind it. `reserved` is a multiple of [`PhysicalMemory::granularity`]. The range is only
    /// as long as the memory if `reserved` is less, or if the process has no free range of that length.
    ///
    /// # Errors
    /// As [`Mapping::new`].
    pub fn with_reservation(
        memory: impl Into<Arc<PhysicalMemory>>,
        access: Access,
        reserved: u64,
    ) -> Result<Self, CudaError> {
        let memory = memory.into();
        let parts = Parts::new(memory.allocation.clone(), reserved, &[rule(memory.context(), access)])?;
        Ok(Self { parts, access, named: false.into(), memory })
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
        let mut extension = self.parts.extension(self.parts.lock(), None);
        for memory in memories {
            extension.map(memory.into().allocation.clone(), &[rule(self.context(), self.access)])?;
        }
        Ok(extension)
    }

    /// Changes what the GPU may do, at the same addresses: the writer of memory that becomes frozen makes its own
    /// mapping read-only. The driver does not wait (measured): running work that writes it faults, too.
    ///
    /// # Errors
    /// As the driver says; the former access then still stands.
    pub fn set_access(&mut self, access: Access) -> Result<(), CudaError> {
        self.parts.set_access(&[rule(self.context(), access)])?;
        self.access = access;
        Ok(())
    }

    /// Maps other memory of the same size at the same addresses, with the same access, in the place of the present
    /// memory, which is returned. Every address that was given out then shows the other memory.
    ///
    /// Does not wait: work that uses the mapping while it is replaced faults, as after an unmapping. The caller waits
    /// for the work of the whole process before, and keeps other threads from enqueueing more. Host-synchronous: it
    /// takes one unmapping and one mapping.
    ///
    /// # Errors
    /// The driver's error; `CUDA_ERROR_INVALID_VALUE` for memory of another size, `CUDA_ERROR_INVALID_CONTEXT` for
    /// memory of another context, `CUDA_ERROR_NOT_SUPPORTED` for a mapping that was extended. The former memory is
    /// mapped as before, unless [`ReplaceError::lost`] says otherwise.
    pub fn replace(&mut self, memory: &Arc<PhysicalMemory>) -> Result<Arc<PhysicalMemory>, ReplaceError> {
        if memory.context() != self.context() {
            // Dropping the mapping would then wait for the other context's work, and not for this one's.
            let error = CudaError::new("cuMemMap", CuResult::INVALID_CONTEXT);
            return Err(ReplaceError { source: error.with_context("the memory is of another context"), lost: None });
        }
        let rules = [rule(self.context(), self.access)];
        self.parts.replace(memory.allocation.clone(), &rules)?;
        Ok(std::mem::replace(&mut self.memory, memory.clone()))
    }

    /// Unmaps the memory and drops this mapping's share of it, but keeps the addresses, at which
    /// [`Reservation::map`] maps memory again. Does not wait: [`settle`](Self::settle) does, and may fail without
    /// consequences.
    ///
    /// # Errors
    /// The driver's error; the addresses are then given back, too.
    pub fn vacate(mut self) -> Result<Reservation, CudaError> {
        let range = self.parts.vacate()?;
        Ok(Reservation { range, access: self.access, context: self.context().clone() })
    }

    /// Unmaps and returns the result; dropping does the same and ignores the result.
    ///
    /// # Errors
    /// The first step that failed, such as the sticky code of a lost context. The memory is as free as it can get.
    pub fn close(mut self) -> Result<(), CudaError> {
        self.unmap()
    }

    fn unmap(&mut self) -> Result<(), CudaError> {
        if !self.parts.is_mapped() {
            return Ok(());
        }
        self.settle().and(self.parts.unmap())
    }

    /// Waits for the work of this process that may use the mapping: all that it runs in the context, if a slice was ever
    /// taken.
    ///
    /// # Errors
    /// The driver's error, such as `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` while a graph is being captured.
    pub fn settle(&mut self) -> Result<(), CudaError> {
        if *self.named.get_mut() { self.context().settle() } else { Ok(()) }
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
        // SAFETY: the range stays mapped with this access while `self` is borrowed, since changing either takes `&mut
        // self` or `self`; an extension adds to it and changes nothing. After a replacement that has lost the memory
        // the range is empty.
        unsafe { DeviceSlice::from_raw(self.device_ptr(), self.len(), self.access) }
    }

    /// Returns the first address, valid on the device while the mapping lives.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        // Relaxed: dropping takes `&mut self`, so the drop happens after this store.
        self.named.store(true, Ordering::Relaxed);
        self.parts.pointer()
    }

    /// Returns the current size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.parts.len()
    }

    /// Returns the size in bytes up to which the mapping can grow in place.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.parts.reserved()
    }

    /// Returns whether nothing is mapped: true only after [`ReplaceError::lost`].
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
        &self.memory
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
            .field("device_ptr", &format_args!("{:#x}", self.parts.pointer()))
            .field("bytes", &self.len())
            .field("access", &self.access)
            .field("memory", self.memory())
            .finish_non_exhaustive()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let unmapped = self.unmap();
        self.context().record_drop(unmapped);
    }
}

/// Addresses that a [`Mapping`] has left reserved. Nothing is mapped there: GPU work that uses them faults. Dropping it
/// gives the addresses back. `Send` and `Sync`.
#[derive(Debug)]
pub struct Reservation {
    range: AddressRange,
    access: Access,
    context: Context,
}

impl Reservation {
    /// Maps memory at the addresses that the former mapping had, with the access that it had. Several memories lie one
    /// behind the other.
    ///
    /// # Errors
    /// The reservation, with the error of [`Mapping::new`]; `CUDA_ERROR_INVALID_VALUE` for no memory, for more than the
    /// former mapping was reserved for, and for memory of another context. Nothing is mapped then.
    pub fn map(self, memories: Vec<Arc<PhysicalMemory>>) -> Result<Mapping, Box<(Self, CudaError)>> {
        let Self { range, access, context } = self;
        let refused = |range, error| Err(Box::new((Self { range, access, context: context.clone() }, error)));
        let first = memories.first().filter(|_| memories.iter().all(|memory| *memory.context() == context)).cloned();
        let Some(memory) = first else {
            let error = CudaError::new("cuMemMap", CuResult::INVALID_VALUE);
            return refused(range, error.with_context("there is no memory, or it is of another context"));
        };
        let allocations = memories.iter().map(|memory| memory.allocation.clone());
        match Parts::at(range, allocations, &[rule(&context, access)]) {
            // Work of before may have kept the address.
            Ok(parts) => Ok(Mapping { parts, access, named: true.into(), memory }),
            Err((range, error)) => refused(range, error),
        }
    }

    /// Returns the context for whose device the addresses are.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Returns the rule that gives the context's device access.
pub(crate) fn rule(context: &Context, access: Access) -> MemAccessDesc {
    let location = MemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: context.device().raw() };
    MemAccessDesc { location, flags: access.flags() }
}

impl Access {
    pub(crate) fn flags(self) -> u32 {
        match self {
            Self::ReadOnly => MEM_ACCESS_FLAGS_PROT_READ,
            Self::ReadWrite => MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}
