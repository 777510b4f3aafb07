//! Private memory of this process: scratch memory on the device, and host memory that the device copies at full speed.
#![allow(unsafe_code)] // driver calls, access to page-locked memory

use std::ffi::c_void;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::abi::{DevicePtr, MEMHOSTALLOC_PORTABLE};
use crate::{Access, AccessError, Context, CuResult, CudaError, DeviceSlice};

/// Device memory of `cuMemAlloc`, for scratch space and as the local side of comparisons. Shared memory is
/// [`PhysicalMemory`](crate::PhysicalMemory).
///
/// Allocating and freeing may wait for everything that runs in the context (52 µs for the pair when idle, measured),
/// so do neither while a stream waits for another process. Dropping frees; a failure goes to
/// [`Context::take_drop_error`]. `Send` and `Sync`: it gives out checked ranges only.
pub struct DeviceBuffer {
    context: Context,
    pointer: DevicePtr,
    bytes: u64,
}

impl DeviceBuffer {
    /// Allocates `bytes`, which must not be 0. What they contain is not defined.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, with free and total bytes; `CUDA_ERROR_INVALID_VALUE` for 0 bytes.
    pub fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let size = size("cuMemAlloc", bytes)?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; a context is current.
        unsafe { context.driver().mem_alloc(&mut pointer, size) }
            .map_err(|error| context.describe_allocation(error, bytes))?;
        Ok(Self { context: context.clone(), pointer, bytes })
    }

    /// Returns the context in which the memory was allocated.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns a checked range of the memory.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        self.as_slice().slice(offset, len)
    }

    /// Returns the whole memory as a range.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the memory stays allocated while `self` is borrowed.
        unsafe { DeviceSlice::from_raw(self.pointer, self.bytes, Access::ReadWrite) }
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns false: memory always has bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device_ptr", &format_args!("{:#x}", self.pointer))
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: allocated once, freed once.
            unsafe { driver.mem_free(self.pointer) }
        });
    }
}

/// Page-locked host memory of this process (`cuMemHostAlloc`), zeroed, as bytes.
///
/// Copies between it and the device are asynchronous and run at full speed; copies of ordinary memory are neither. A
/// copy that is under way while the bytes are read or written is a data race, which is why enqueueing one is unsafe.
///
/// Allocating and freeing may wait for everything that runs in the context. Dropping frees; a failure goes to
/// [`Context::take_drop_error`]. `Send` and `Sync`, like a `Vec<u8>`.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes as a Vec does; the driver lets any thread use and free them.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference gives shared access to the bytes only.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes`, which must not be 0, and clears them.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the host has no memory to lock; `CUDA_ERROR_INVALID_VALUE` for 0 bytes.
    pub fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        const CALL: &str = "cuMemHostAlloc";
        let _guard = context.guard_relaxed()?;
        let bytes = size(CALL, bytes)?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointer is to a live pointer; a context is current.
        unsafe { context.driver().mem_host_alloc(&mut pointer, bytes, MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| error.with_context(format!("{bytes} bytes of page-locked host memory")))?;
        let pointer = NonNull::new(pointer.cast::<u8>())
            .ok_or_else(|| CudaError::new(CALL, CuResult::UNKNOWN).with_context("the driver stored a null pointer"))?;
        // SAFETY: the driver just allocated these bytes for us alone.
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), pointer, bytes })
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this size, initialised, and freed only with `self`. Copies by the device while the
        // reference lives are excluded by the callers of the unsafe functions that enqueue them.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: allocated once, freed once.
            unsafe { driver.mem_free_host(self.pointer.as_ptr().cast()) }
        });
    }
}

fn size(call: &'static str, bytes: u64) -> Result<usize, CudaError> {
    usize::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes != 0 && isize::try_from(bytes).is_ok())
        .ok_or_else(|| CudaError::new(call, CuResult::INVALID_VALUE).with_context(format!("{bytes} bytes")))
}
