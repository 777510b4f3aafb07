//! Memory without an address (`cuMemCreate`): what [`PhysicalMemory`](crate::PhysicalMemory) and
//! [`NodeMemory`](crate::NodeMemory) own.
#![allow(unsafe_code)] // driver calls, taking over a file descriptor

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::{
    AllocationHandle, MEM_ALLOC_GRANULARITY_MINIMUM, MEM_ALLOCATION_TYPE_PINNED, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    MEM_LOCATION_TYPE_DEVICE, MEM_LOCATION_TYPE_HOST_NUMA, MemAllocationProp, MemLocation,
};
use crate::context::CallContext;
use crate::{CuResult, CudaError};

/// Where memory lies, as the driver says of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryPlace {
    /// On the device with this ordinal in this process. Where `CUDA_VISIBLE_DEVICES` hides the device, the number may
    /// name no visible device.
    Device(i32),
    /// On the NUMA node with this number.
    Node(i32),
    /// Elsewhere: the driver's number of a kind of place that this crate does not use.
    Other(u32),
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(ordinal) => write!(f, "device {ordinal}"),
            Self::Node(node) => write!(f, "NUMA node {node}"),
            Self::Other(kind) => write!(f, "a place of kind {kind}"),
        }
    }
}

/// The [`Allocation`]s of this process, and what it has open of `cuIpcOpenMemHandle`.
static SHARED: AtomicUsize = AtomicUsize::new(0);

/// Returns how many references to memory that other processes may have, too, this process holds through this crate:
/// each [`PhysicalMemory`](crate::PhysicalMemory) and [`NodeMemory`](crate::NodeMemory), created or imported, each handle
/// that an [`IpcMapping`](crate::IpcMapping) has open, and each [`ForeignMemory`](crate::ForeignMemory).
///
/// While it holds any, a checkpoint of the process (`cuCheckpointProcessCheckpoint`) cannot be restored, or brings back
/// a copy that nobody else sees (measured, driver 580).
#[must_use]
pub fn shared_allocations() -> usize {
    SHARED.load(Ordering::Relaxed)
}

/// Counts as one of [`shared_allocations`] while it lives.
#[derive(Debug)]
pub(crate) struct Counted(());

impl Counted {
    pub(crate) fn new() -> Self {
        SHARED.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        SHARED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One reference to memory, released on drop.
#[derive(Debug)]
pub(crate) struct Allocation {
    calls: CallContext,
    handle: AllocationHandle,
    bytes: u64,
    imported: bool,
    _counted: Counted,
}

impl Allocation {
    /// Returns the number of bytes that the size of every allocation at a place must be a multiple of.
    pub(crate) fn granularity(calls: &CallContext, location: MemLocation) -> Result<u64, CudaError> {
        let mut granularity = 0;
        let properties = properties(location);
        // SAFETY: both pointers are to live values of the types that the driver expects.
        unsafe {
            calls.driver().mem_get_allocation_granularity(&mut granularity, &properties, MEM_ALLOC_GRANULARITY_MINIMUM)
        }?;
        Ok(granularity as u64)
    }

    /// Allocates memory at a place.
    pub(crate) fn create(calls: CallContext, location: MemLocation, bytes: u64) -> Result<Self, CudaError> {
        let size = usize::try_from(bytes).map_err(|_| CudaError::new("cuMemCreate", CuResult::INVALID_VALUE))?;
        let properties = properties(location);
        let mut handle = 0;
        let guard = calls.guard()?;
        // SAFETY: both pointers are to live values of the types that the driver expects; flags must be 0.
        unsafe { calls.driver().mem_create(&mut handle, size, &properties, 0) }?;
        drop(guard);
        Ok(Self { calls, handle, bytes, imported: false, _counted: Counted::new() })
    }

    /// Imports memory of `bytes` bytes.
    pub(crate) fn import(calls: CallContext, descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
        let mut handle = 0;
        // The driver takes the number of the descriptor in the place of a pointer.
        let shareable = descriptor.as_raw_fd() as usize;
        let guard = calls.guard()?;
        // SAFETY: the handle's pointer is live; the descriptor is open for the length of the call, and any open
        // descriptor may be offered: the driver refuses what it did not make.
        unsafe { calls.driver().mem_import(&mut handle, shareable, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) }
            .map_err(|error| error.with_context(format!("{bytes} bytes by file descriptor")))?;
        drop(guard);
        Ok(Self { calls, handle, bytes, imported: true, _counted: Counted::new() })
    }

    /// Returns a new file descriptor that stands for this memory, close-on-exec.
    pub(crate) fn export(&self) -> Result<OwnedFd, CudaError> {
        const CALL: &str = "cuMemExportToShareableHandle";
        let _guard = self.calls.guard()?;
        let mut raw: RawFd = -1;
        // SAFETY: for this handle type the driver stores an int; the handle is live while `self` is; flags must be 0.
        unsafe {
            self.calls.driver().mem_export((&raw mut raw).cast(), self.handle, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        }
        .map_err(|error| match self.imported {
            false => error,
            true => error.with_context("imported memory cannot be exported again, only its creator can"),
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

    /// Asks the driver where the memory lies.
    pub(crate) fn place(&self) -> Result<MemoryPlace, CudaError> {
        let mut properties = MemAllocationProp::default();
        let _guard = self.calls.guard()?;
        // SAFETY: the pointer is to a live struct of the driver's layout; the handle is live while `self` is.
        unsafe { self.calls.driver().mem_get_allocation_properties(&mut properties, self.handle) }?;
        let MemLocation { kind, id } = properties.location;
        Ok(match kind {
            MEM_LOCATION_TYPE_DEVICE => MemoryPlace::Device(id),
            MEM_LOCATION_TYPE_HOST_NUMA => MemoryPlace::Node(id),
            kind => MemoryPlace::Other(kind),
        })
    }

    pub(crate) fn calls(&self) -> &CallContext {
        &self.calls
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_imported(&self) -> bool {
        self.imported
    }

    pub(crate) fn as_raw(&self) -> AllocationHandle {
        self.handle
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let released = self.calls.give_back(|driver| {
            // SAFETY: the handle came from one create or import and is released once, here. Mappings made of it are
            // references of their own.
            unsafe { driver.mem_release(self.handle) }
        });
        self.calls.record_drop(released);
    }
}

/// Plain memory, exportable as a file descriptor, without compression: compressible memory may not be mappable
/// everywhere.
fn properties(location: MemLocation) -> MemAllocationProp {
    MemAllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location,
        ..MemAllocationProp::default()
    }
}
