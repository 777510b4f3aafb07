//! Physical device memory that can be passed to other processes as a file descriptor.
#![allow(unsafe_code)] // driver calls, taking over a file descriptor

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::abi::{
    AllocationHandle, MEM_ALLOC_GRANULARITY_MINIMUM, MEM_ALLOCATION_TYPE_PINNED, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    MEM_LOCATION_TYPE_DEVICE, MemAllocationProp, MemLocation,
};
use crate::{Context, CuResult, CudaError, Device};

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
    handle: AllocationHandle,
    bytes: u64,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Created,
    Imported,
}

impl PhysicalMemory {
    /// Returns the number of bytes that the size of every allocation on the context's device must be a multiple of: 2
    /// MiB on current GPUs (measured on H200).
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` or `CUDA_ERROR_NOT_PERMITTED` where the device or the virtualisation has no
    /// exportable memory.
    pub fn granularity(context: &Context) -> Result<u64, CudaError> {
        let mut granularity = 0;
        let properties = properties_on(context.device());
        // SAFETY: both pointers are to live values of the types that the driver expects.
        unsafe {
            context.driver().mem_get_allocation_granularity(
                &mut granularity,
                &properties,
                MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        }?;
        Ok(granularity as u64)
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
        const CALL: &str = "cuMemCreate";
        let describe = |error| context.describe_allocation(error, bytes);
        let _guard = context.guard_relaxed()?;
        let size = usize::try_from(bytes).map_err(|_| describe(CudaError::new(CALL, CuResult::INVALID_VALUE)))?;
        let properties = properties_on(context.device());
        let mut handle = 0;
        // SAFETY: both pointers are to live values of the types that the driver expects; flags must be 0.
        unsafe { context.driver().mem_create(&mut handle, size, &properties, 0) }.map_err(describe)?;
        Ok(Self { context: context.clone(), handle, bytes, origin: Origin::Created })
    }

    /// Imports memory that another process (or this one) exported. `bytes` is the size it was created with, which the
    /// descriptor does not have; a wrong size is found when the memory is mapped.
    ///
    /// The descriptor is not consumed and may be closed at once. The memory may lie on another device than the
    /// context's: see [`PhysicalMemory::device_ordinal`]. Host-synchronous: with mapping 42 µs for 2 MiB, 0.14 ms for
    /// 1 GiB (measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_UNKNOWN` if the descriptor is something else (measured); `CUDA_ERROR_INVALID_DEVICE` if its GPU is
    /// not reachable from this process.
    pub fn import(context: &Context, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let mut handle = 0;
        // The driver takes the number of the descriptor in the place of a pointer.
        let shareable = descriptor.as_raw_fd() as usize;
        // SAFETY: the handle's pointer is live; the descriptor is open for the length of the call, and any open
        // descriptor may be offered: the driver refuses what it did not make.
        unsafe { context.driver().mem_import(&mut handle, shareable, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) }
            .map_err(|error| error.with_context(format!("{bytes} bytes by file descriptor")))?;
        Ok(Self { context: context.clone(), handle, bytes, origin: Origin::Imported })
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
        const CALL: &str = "cuMemExportToShareableHandle";
        let _guard = self.context.guard_relaxed()?;
        let mut raw: RawFd = -1;
        // SAFETY: for this handle type the driver stores an int; the handle is live while `self` is; flags must be 0.
        unsafe {
            self.context.driver().mem_export(
                (&raw mut raw).cast(),
                self.handle,
                MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        }
        .map_err(|error| match self.origin {
            Origin::Created => error,
            Origin::Imported => error.with_context("imported memory cannot be exported again, only its creator can"),
        })?;
        if raw < 0 {
            return Err(CudaError::new(CALL, CuResult::UNKNOWN).with_context("the driver stored no descriptor"));
        }
        // SAFETY: the driver just made this descriptor for the caller, which must close it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
        rustix::io::fcntl_setfd(descriptor.as_fd(), rustix::io::FdFlags::CLOEXEC).map_err(|errno| {
            CudaError::new(CALL, CuResult::OPERATING_SYSTEM).with_context(format!("cannot set close-on-exec: {errno}"))
        })?;
        Ok(descriptor)
    }

    /// Returns the ordinal, in this process, of the device that the memory lies on, as the driver reports it. For
    /// memory whose device `CUDA_VISIBLE_DEVICES` hides the number may name no visible device.
    ///
    /// # Errors
    /// The driver's error.
    pub fn device_ordinal(&self) -> Result<i32, CudaError> {
        let _guard = self.context.guard()?;
        let mut properties = MemAllocationProp::default();
        // SAFETY: the pointer is to a live struct of the driver's layout; the handle is live while `self` is.
        unsafe { self.context.driver().mem_get_allocation_properties(&mut properties, self.handle) }?;
        Ok(properties.location.id)
    }

    /// Returns its size in bytes: as created, or as the importer declared.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns false: memory without bytes cannot be created.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns whether it came from [`PhysicalMemory::import`].
    #[must_use]
    pub fn is_imported(&self) -> bool {
        self.origin == Origin::Imported
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
        self.handle
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: the handle came from one create or import and is released once, here. Mappings made of it are
            // references of their own.
            unsafe { driver.mem_release(self.handle) }
        });
    }
}

/// Returns the smallest multiple of `granularity` that holds `bytes`; nothing if that exceeds 64 bits or the
/// granularity is 0.
#[must_use]
pub const fn round_up(bytes: u64, granularity: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(granularity)
}

/// Plain memory on one device, exportable as a file descriptor, without compression: compressible memory may not be
/// mappable everywhere.
fn properties_on(device: Device) -> MemAllocationProp {
    MemAllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: MemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: device.raw() },
        ..MemAllocationProp::default()
    }
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
