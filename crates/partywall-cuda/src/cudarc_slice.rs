//! Shared memory for programs that use cudarc: accepts its streams and returns its views.
//!
//! cudarc finds the driver by itself, as `libcuda.so` or `libcuda.so.1`; it is the same one in the process. Both crates
//! use the device's primary context, so that addresses and streams of one are valid for the other.
#![allow(unsafe_code)] // borrows streams, makes a slice that owns no memory

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr};

use crate::{AccessError, Context, DeviceSlice, RawStream, StreamRef};

impl<'a> StreamRef<'a> {
    /// Returns a stream of cudarc's.
    ///
    /// # Errors
    /// [`AccessError::OtherContext`] for a stream of another device, or of a context that is not the primary one.
    pub fn from_cudarc(context: &'a Context, stream: &'a CudaStream) -> Result<Self, AccessError> {
        require_same(context, stream.context())?;
        // SAFETY: the stream is of this context and is destroyed by its owner's drop, which the borrow excludes. The
        // caller must not begin to capture it while a copy runs, as with cudarc's own copies:
        // `CudaStream::begin_capture` is a safe function. A capture that begins during a copy of host memory leaves its
        // address in the graph, whichever of the two crates copies.
        Ok(unsafe { StreamRef::borrow(context, RawStream(stream.cu_stream() as u64)) })
    }
}

/// Device memory as elements of cudarc's, for its copies and launches. Owns no memory: it borrows from the owner for
/// `'a` and frees nothing.
///
/// cudarc orders its own streams among each other by events, and so it does for accesses through one `CudarcSlice`. It
/// knows nothing of accesses by other processes, through another one, or by this crate: their order is made by streams,
/// events and timelines. Drain the streams that use it before its owner goes.
pub struct CudarcSlice<'a, T> {
    /// A slice that is never dropped, because its drop would free the memory.
    slice: ManuallyDrop<CudaSlice<T>>,
    memory: DeviceSlice<'a>,
    _owner: PhantomData<&'a [T]>,
}

impl<'a, T: DeviceRepr + AnyBitPattern> CudarcSlice<'a, T> {
    /// Returns all of `memory`, which is of `context`, as elements; `stream` is the one that cudarc's events refer to.
    ///
    /// # Errors
    /// [`AccessError::Misaligned`] if the memory is not of whole aligned elements; [`AccessError::OtherContext`] for a
    /// stream of another context.
    ///
    /// # Panics
    /// If cudarc panics because it cannot create its events: the context is lost.
    pub fn new(context: &Context, memory: DeviceSlice<'a>, stream: &Arc<CudaStream>) -> Result<Self, AccessError> {
        const { assert!(size_of::<T>() > 0, "elements have a size") }
        require_same(context, stream.context())?;
        // As many as fit into the address space.
        let len = memory.elements(size_of::<T>() as u64)? as usize;
        // SAFETY: the range is device memory of this size for `'a`, by the promise of DeviceSlice. Any bits are a T.
        // The result would free the memory as its owner, so it is never dropped.
        let slice = unsafe { stream.upgrade_device_ptr(memory.device_ptr(), len) };
        Ok(Self { slice: ManuallyDrop::new(slice), memory, _owner: PhantomData })
    }

    /// Returns a view for reading.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// Returns a view for reading and writing.
    ///
    /// # Errors
    /// [`AccessError::ReadOnly`] for memory that is mapped read-only: a write by the GPU would end the context.
    pub fn view_mut(&mut self) -> Result<CudaViewMut<'_, T>, AccessError> {
        self.memory.require_writable()?;
        Ok(self.slice.as_view_mut())
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}

impl<T> fmt::Debug for CudarcSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudarcSlice").field(&self.memory).finish()
    }
}

impl<T> Drop for CudarcSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, and `self` is not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Frees everything but the memory.
        slice.leak();
    }
}

fn require_same(context: &Context, theirs: &CudaContext) -> Result<(), AccessError> {
    if theirs.cu_ctx() as usize == context.as_raw() { Ok(()) } else { Err(AccessError::OtherContext) }
}
