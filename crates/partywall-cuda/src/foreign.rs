//! Device memory that other code allocated, and that remains while its owner is kept alive.
#![allow(unsafe_code)] // trusts the caller's addresses

use std::any::Any;
use std::sync::Arc;

use crate::allocation::Counted;
use crate::{
    Access, AccessError, Context, CudaError, DeviceBuffer, DeviceSlice, IpcMemoryHandle, PointerInfo, PointerKind,
};

/// An address in memory that other code allocated (torch's caching allocator, cupy, `cudaMalloc`), with something that
/// keeps the memory alive: a reference to the tensor, for example.
///
/// The driver reports the kind of memory at construction, see [`ForeignMemory::info`]. Cheap to clone; the
/// owner is dropped with the last clone, on any thread. `Send` and `Sync`.
#[derive(Clone, Debug)]
pub struct ForeignMemory {
    context: Context,
    info: PointerInfo,
    /// Held to keep the memory alive.
    _keep: Arc<(Arc<dyn Any + Send + Sync>, Counted)>,
}

impl ForeignMemory {
    /// Memory at `address`, which stays as it is for as long as `keep` does. Any context will do: the memory's own
    /// device is found out. For memory of this crate, `TryFrom<Arc<DeviceBuffer>>` needs no promise.
    ///
    /// # Safety
    /// Until `keep` is dropped, the allocation that holds `address` is neither freed nor unmapped, nor are those behind
    /// it that are asked for as one with it ([`ForeignMemory::pieces`]); and if it is host memory, no Rust reference to
    /// its bytes exists. An address that the driver does not know is no breach: nothing is ever done with it.
    ///
    /// # Errors
    /// As [`PointerInfo::of`], [`Context::retain`].
    pub unsafe fn new(context: &Context, address: u64, keep: Arc<dyn Any + Send + Sync>) -> Result<Self, CudaError> {
        let info = PointerInfo::of(context, address)?;
        let context = match info.device {
            Some(device) if device.ordinal() != context.device().ordinal() => Context::retain(device)?,
            _ => context.clone(),
        };
        Ok(Self { context, info, _keep: Arc::new((keep, Counted::new())) })
    }

    /// Returns what the driver said about the address.
    #[must_use]
    pub fn info(&self) -> &PointerInfo {
        &self.info
    }

    /// Returns the context of the device that holds the memory; for host memory the one given at construction.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the whole allocation that holds the address; no bytes if the driver does not know the address.
    #[must_use]
    pub fn allocation(&self, access: Access) -> DeviceSlice<'_> {
        // SAFETY: the driver has named the allocation, and it stays while `keep` lives, which `self` holds.
        unsafe { DeviceSlice::from_raw(self.info.base, self.info.bytes, access) }
    }

    /// Returns the handle by which other processes open the allocation.
    ///
    /// # Errors
    /// As [`IpcMemoryHandle::of`].
    pub fn handle(&self) -> Result<IpcMemoryHandle, CudaError> {
        IpcMemoryHandle::of(&self.context, self.info.base)
    }

    /// `bytes` bytes from the address on, for reading: several ranges where the memory was mapped in several pieces one
    /// behind the other, as torch's expandable segments are.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`] where the memory ends before; as [`PointerInfo::of`].
    pub fn pieces(&self, bytes: u64) -> Result<Vec<DeviceSlice<'_>>, AccessError> {
        let mut pieces = Vec::new();
        let mut done = 0;
        let mut info = self.info;
        while done < bytes {
            let rest = info.bytes.saturating_sub(info.offset());
            let follows = done == 0 || (self.info.kind, info.kind) == (PointerKind::Vmm, PointerKind::Vmm);
            if info.kind == PointerKind::Unknown || rest == 0 || !follows {
                return Err(AccessError::OutOfRange { offset: 0, len: bytes, available: done });
            }
            let len = rest.min(bytes - done);
            // SAFETY: inside the range that the driver has just reported; it stays while `keep` lives, which `self`
            // holds.
            pieces.push(unsafe { DeviceSlice::from_raw(info.address, len, Access::ReadOnly) });
            done += len;
            if done < bytes {
                info = PointerInfo::of(&self.context, self.info.address + done)?;
            }
        }
        Ok(pieces)
    }
}

impl TryFrom<Arc<DeviceBuffer>> for ForeignMemory {
    type Error = CudaError;

    /// Returns a buffer's memory, which lives as long as the buffer.
    fn try_from(buffer: Arc<DeviceBuffer>) -> Result<Self, CudaError> {
        let context = buffer.context().clone();
        let address = buffer.as_slice().device_ptr();
        // SAFETY: the buffer frees its memory when it is dropped, and not before.
        unsafe { Self::new(&context, address, buffer) }
    }
}
