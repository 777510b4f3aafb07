//! Host memory that the GPU accesses directly: a mapping that is page-locked and registered with the driver.
#![allow(unsafe_code)] // driver calls

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use partywall_os::map::{SealedMap, SharedMap};

use crate::abi::{DevicePtr, MEMHOSTREGISTER_DEVICEMAP, MEMHOSTREGISTER_PORTABLE, MEMHOSTREGISTER_READ_ONLY};
use crate::{Access, AccessError, Context, CuResult, CudaError, DeviceSlice, StreamRef};

/// A mapping of a memfd that is registered with CUDA (`cuMemHostRegister`). Copies from and to it are asynchronous and
/// run at full speed, streams may wait for its words and write them, and kernels may use it in place. It is valid for
/// every context of the process.
///
/// Keeps the mapping alive. Dropping it unregisters the memory, which may wait for running work; a failure goes to
/// [`Context::take_drop_error`]. Drain the streams that use it first. `Send` and `Sync`: it gives out only addresses
/// and checked ranges.
pub struct HostRegistration {
    context: Context,
    map: Map,
    /// The length of the map at registration, in bytes. A shared map may grow; its new part is not registered.
    bytes: usize,
    device_ptr: DevicePtr,
}

/// The registered map. It has no `&mut` and only volatile writes, so the device may write it.
enum Map {
    Frozen(Arc<SealedMap>),
    Shared(Arc<SharedMap>),
}

impl HostRegistration {
    /// Registers frozen memory, for reading.
    ///
    /// Page-locks the memory, which takes 0.4 ms per MiB (measured). Blocks the host meanwhile.
    ///
    /// # Errors
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` if any page of the mapping is registered in this process;
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the pages cannot be locked; `CUDA_ERROR_NOT_SUPPORTED` if the device does not
    /// support read-only registrations; `CUDA_ERROR_INVALID_VALUE` for an empty mapping.
    pub fn frozen(context: &Context, map: Arc<SealedMap>) -> Result<Self, CudaError> {
        Self::new(context, Map::Frozen(map))
    }

    /// Registers memory that processes write, with the access and the length that the mapping has now.
    ///
    /// # Errors
    /// As [`HostRegistration::frozen`].
    pub fn shared(context: &Context, map: Arc<SharedMap>) -> Result<Self, CudaError> {
        Self::new(context, Map::Shared(map))
    }

    fn new(context: &Context, map: Map) -> Result<Self, CudaError> {
        let bytes = map.len();
        let describe = |error: CudaError| explain(error, bytes);
        let _guard = context.guard_relaxed()?;
        let flags = match map.access() {
            Access::ReadOnly => MEMHOSTREGISTER_READ_ONLY,
            Access::ReadWrite => 0,
        } | MEMHOSTREGISTER_PORTABLE
            | MEMHOSTREGISTER_DEVICEMAP;
        let driver = context.driver();
        // SAFETY: the range is mapped for as long as `map` lives. The device may write it only if the mapping is one
        // whose bytes are never borrowed.
        unsafe { driver.mem_host_register(map.address(), bytes, flags) }.map_err(describe)?;
        let mut device_ptr = 0;
        // SAFETY: the pointer is to a live address; the range was just registered; flags must be 0.
        let found = unsafe { driver.mem_host_get_device_pointer(&mut device_ptr, map.address(), 0) };
        // From here on, dropping the registration unregisters the memory.
        let registration = Self { context: context.clone(), map, bytes, device_ptr };
        found?;
        Ok(registration)
    }

    /// Returns a checked range of the memory.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        self.as_slice().slice(offset, len)
    }

    /// Returns the whole memory, as streams and kernels take it.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the range stays registered with this access while `self` is borrowed.
        unsafe { DeviceSlice::from_raw(self.device_ptr, self.len(), self.map.access()) }
    }

    /// Enqueues a copy of bytes from `offset` on to device memory. Returns immediately, because the copy engine reads
    /// page-locked memory itself. Do not drop the registration before the stream has completed the copy.
    ///
    /// # Errors
    /// The range is out of bounds, the destination is read-only, the stream is captured (a graph may be launched after
    /// the registration is dropped), or the driver refuses. Nothing is enqueued then.
    pub fn enqueue_copy_to(
        &self,
        stream: StreamRef<'_>,
        offset: u64,
        destination: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        let source = self.slice(offset, destination.len())?;
        destination.require_writable()?;
        stream.require_not_capturing()?;
        stream.copy(source.len(), |driver, stream| {
            // SAFETY: the source lies inside the map, which lives while `self` does; the destination is device memory
            // of this size that may be written, by the promise of DeviceSlice; the stream is live.
            unsafe {
                let from = self.map.address().byte_add(offset as usize);
                driver.memcpy_htod_async(destination.device_ptr(), from, source.size(), stream)
            }
        })
    }

    /// Enqueues a copy of device memory to the bytes from `offset` on, as [`HostRegistration::enqueue_copy_to`].
    ///
    /// # Errors
    /// The range is out of bounds, the memory is read-only, the stream is captured, or the driver refuses. Nothing is
    /// enqueued then.
    pub fn enqueue_copy_from(
        &self,
        stream: StreamRef<'_>,
        offset: u64,
        source: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        let destination = self.slice(offset, source.len())?;
        destination.require_writable()?;
        stream.require_not_capturing()?;
        stream.copy(source.len(), |driver, stream| {
            // SAFETY: the destination lies inside the map, which lives while `self` does, is mapped for writing and is
            // never borrowed; the source by the promise of DeviceSlice; the stream is live.
            unsafe {
                let to = self.map.address().byte_add(offset as usize);
                driver.memcpy_dtoh_async(to, source.device_ptr(), destination.size(), stream)
            }
        })
    }

    /// Returns its first address on the device.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.device_ptr
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Returns false: the driver registers no empty range.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the access that the GPU has.
    #[must_use]
    pub fn access(&self) -> Access {
        self.map.access()
    }

    /// Returns the mapping, if processes may write it.
    pub(crate) fn shared_words(&self) -> Option<&SharedMap> {
        match &self.map {
            Map::Shared(map) => Some(map),
            Map::Frozen(_) => None,
        }
    }

    /// Returns the context in which the memory was registered.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Map {
    fn address(&self) -> *mut c_void {
        match self {
            Self::Frozen(map) => map.bytes().as_ptr().cast_mut().cast(),
            Self::Shared(map) => map.as_ptr().cast(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Frozen(map) => map.bytes().len(),
            Self::Shared(map) => map.len(),
        }
    }

    fn access(&self) -> Access {
        match self {
            Self::Shared(map) if map.is_writable() => Access::ReadWrite,
            Self::Frozen(_) | Self::Shared(_) => Access::ReadOnly,
        }
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegistration")
            .field("device_ptr", &format_args!("{:#x}", self.device_ptr))
            .field("bytes", &self.len())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: registered once from this address, unregistered once; the range is still mapped.
            unsafe { driver.mem_host_unregister(self.map.address()) }
        });
    }
}

/// Adds the usual cause to an error of the registration.
fn explain(error: CudaError, bytes: usize) -> CudaError {
    let meaning = match error.code {
        CuResult::HOST_MEMORY_ALREADY_REGISTERED => {
            ": this mapping, or a page of it, is registered in this process already; map the file once more, or use \
             the registration that there is"
        }
        CuResult::OUT_OF_MEMORY | CuResult::OPERATING_SYSTEM => {
            ": the pages cannot be locked; is the host out of memory, or is the limit of locked memory (`ulimit -l`) \
             too low?"
        }
        CuResult::NOT_SUPPORTED => ": this GPU cannot register memory that is mapped read-only",
        _ => "",
    };
    error.with_context(format!("registering {bytes} bytes of host memory{meaning}"))
}
