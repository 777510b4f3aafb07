//! Streams, own and borrowed, and the copies that run on them.
//!
//! A method named `enqueue_…` returns immediately, and its errors may appear at a later call; every other method waits
//! for the stream.
#![allow(unsafe_code)] // driver calls

use std::ffi::c_void;
use std::fmt;

use crate::abi::{Handle, HostFunction, STREAM_CAPTURE_STATUS_NONE, STREAM_NON_BLOCKING};
use crate::result::none_if;
use crate::{AccessError, Context, ContextGuard, CuResult, CudaError, DeviceSlice, Driver};

/// The driver's handle of a stream (`CUstream`, `cudaStream_t`) as a number, the form in which frameworks pass it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(pub u64);

impl RawStream {
    /// The default stream as most compiled code names it. For every call of this crate it is the same stream as
    /// [`RawStream::LEGACY_DEFAULT`].
    pub const NULL: Self = Self(0);
    /// The default stream that waits for all blocking streams of the context (`CU_STREAM_LEGACY`).
    pub const LEGACY_DEFAULT: Self = Self(1);
    /// The default stream of the calling thread (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD_DEFAULT: Self = Self(2);

    fn handle(self) -> Handle {
        // `usize` has 64 bits on every platform that the driver exists for.
        self.0 as Handle
    }
}

impl fmt::Debug for RawStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawStream({:#x})", self.0)
    }
}

/// The identity of a stream ([`StreamRef::id`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(u64);

/// A stream that this crate created. It does not wait for the default stream, and the default stream does not wait for
/// it (`CU_STREAM_NON_BLOCKING`).
///
/// Dropping it does not wait: the driver completes the enqueued work and then frees the stream (driver documentation of
/// `cuStreamDestroy`). `Send` and `Sync`: several threads may enqueue, and order their calls themselves.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: RawStream,
}

impl Stream {
    /// Returns a new stream in this context.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let _guard = context.guard()?;
        let mut handle = 0;
        // SAFETY: the pointer is to a live handle; a context is current.
        unsafe { context.driver().stream_create(&mut handle, STREAM_NON_BLOCKING) }?;
        Ok(Self { context: context.clone(), raw: RawStream(handle as u64) })
    }

    /// Returns the stream as the calls take it.
    #[must_use]
    pub fn as_ref(&self) -> StreamRef<'_> {
        StreamRef { context: &self.context, raw: self.raw }
    }

    /// See [`StreamRef::synchronize`].
    ///
    /// # Errors
    /// The same.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.as_ref().synchronize()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: created once, destroyed once; every StreamRef borrows `self` and is gone.
            unsafe { driver.stream_destroy(self.raw.handle()) }
        });
    }
}

/// A borrowed stream of the caller's framework, or of a [`Stream`]. `Copy`, `Send` and `Sync`.
///
/// The per-thread default stream differs from thread to thread.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    context: &'a Context,
    raw: RawStream,
}

/// A stream whose context is current on this thread for as long as this object lives. A sequence of calls then asks the
/// driver only once which context is current. Not `Send`, because of its guard.
#[derive(Debug)]
pub struct CurrentStream<'a> {
    stream: StreamRef<'a>,
    _guard: ContextGuard<'a>,
}

impl<'a> StreamRef<'a> {
    /// Returns a stream of the caller's framework.
    ///
    /// # Safety
    /// `raw` is one of the default streams, or a stream of this context that is not destroyed while the result is
    /// used. While one of the host-synchronous copies runs on it, no other code begins to capture it into a graph.
    #[must_use]
    pub const unsafe fn borrow(context: &'a Context, raw: RawStream) -> Self {
        Self { context, raw }
    }

    /// Returns the default stream of the context. It waits for all blocking streams of the context, which is simple but
    /// slow.
    #[must_use]
    pub const fn legacy_default(context: &'a Context) -> Self {
        Self { context, raw: RawStream::LEGACY_DEFAULT }
    }

    /// Makes the context of the stream current for several calls.
    ///
    /// # Errors
    /// As [`Context::guard`].
    pub fn current(self) -> Result<CurrentStream<'a>, CudaError> {
        Ok(CurrentStream { stream: self, _guard: self.context.guard()? })
    }

    /// Waits until all work on the stream is done. Blocks for as long as the stream waits for another process.
    ///
    /// # Errors
    /// The error of that work; `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` while the stream is captured.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let wait = || {
            let _guard = self.context.guard()?;
            // SAFETY: the stream is live; a context is current.
            unsafe { self.context.driver().stream_synchronize(self.handle()) }
        };
        // After an error a caller frees the memory that the work uses, so the driver is asked twice. If the work
        // failed, the second call reports that again. If only the first call failed, the work has ended after the
        // second.
        wait().inspect_err(|_| drop(wait()))
    }

    /// Returns whether all work on the stream is done. Does not wait.
    ///
    /// # Errors
    /// The error of that work. This is a cheap test of whether the context is still usable.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _guard = self.context.guard()?;
        // SAFETY: the stream is live; a context is current.
        let done = unsafe { self.context.driver().stream_query(self.handle()) };
        Ok(none_if(done, CuResult::NOT_READY)?.is_some())
    }

    /// See [`CurrentStream::is_capturing`].
    ///
    /// # Errors
    /// The same.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        self.current()?.is_capturing()
    }

    /// See [`CurrentStream::id`].
    ///
    /// # Errors
    /// The same.
    pub fn id(&self) -> Result<StreamId, CudaError> {
        self.current()?.id()
    }

    /// See [`CurrentStream::enqueue_host_function`].
    ///
    /// # Errors
    /// The same.
    pub fn enqueue_host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<(), AccessError> {
        self.current()?.enqueue_host_function(function)
    }

    /// Copies host bytes to the device, in stream order, and waits for it.
    ///
    /// # Errors
    /// The lengths differ, the destination is read-only, the stream is captured, or work on the stream failed.
    pub fn copy_from_host(&self, destination: DeviceSlice<'_>, source: &[u8]) -> Result<(), AccessError> {
        self.require_not_capturing()?;
        // SAFETY: `source` is borrowed until the copy is waited for, below. If that wait fails, the context is lost
        // and with it the copy: a live context does not fail it, since the stream is not captured.
        unsafe { self.enqueue_copy_from_host(destination, source) }?;
        Ok(self.synchronize()?)
    }

    /// Copies device memory to host bytes, in stream order, and waits for it.
    ///
    /// # Errors
    /// The lengths differ, the stream is captured, or work on the stream failed. The contents of the destination are
    /// undefined then.
    pub fn copy_to_host(&self, destination: &mut [u8], source: DeviceSlice<'_>) -> Result<(), AccessError> {
        self.require_not_capturing()?;
        // SAFETY: `destination` is borrowed until the copy is waited for; see `copy_from_host` for a failing wait.
        unsafe { self.enqueue_copy_to_host(destination, source) }?;
        Ok(self.synchronize()?)
    }

    /// Enqueues a copy within device memory. Source and destination must not overlap, or the result is undefined.
    ///
    /// # Errors
    /// The lengths differ, the destination is read-only, or the driver refuses.
    pub fn enqueue_copy(&self, destination: DeviceSlice<'_>, source: DeviceSlice<'_>) -> Result<(), AccessError> {
        destination.require_writable()?;
        same_length(source.len(), destination.len())?;
        self.copy(source.len(), |driver, stream| {
            // SAFETY: both ranges are device memory of at least this size by the promise of DeviceSlice, and the
            // destination may be written; the stream is live.
            unsafe { driver.memcpy_dtod_async(destination.device_ptr(), source.device_ptr(), source.size(), stream) }
        })
    }

    /// Enqueues setting every byte of `destination` to `value`.
    ///
    /// # Errors
    /// The destination is read-only, or the driver refuses.
    pub fn enqueue_set(&self, destination: DeviceSlice<'_>, value: u8) -> Result<(), AccessError> {
        destination.require_writable()?;
        if destination.is_empty() {
            return Ok(());
        }
        let _guard = self.context.guard()?;
        // SAFETY: the range is device memory of this size that may be written, by the promise of DeviceSlice; the
        // stream is live.
        unsafe {
            self.context.driver().memset_d8_async(destination.device_ptr(), value, destination.size(), self.handle())
        }?;
        Ok(())
    }

    /// Enqueues a copy of host bytes to the device. From pageable memory, the call itself may block until the stream
    /// has finished what it waits for; from a [`PinnedBuffer`](crate::PinnedBuffer) it does not.
    ///
    /// # Errors
    /// The lengths differ, the destination is read-only, or the driver refuses; nothing is then enqueued.
    ///
    /// # Safety
    /// `source` stays allocated and unchanged until the stream has completed the copy; if the stream is being captured,
    /// until the last launch of that graph has.
    pub unsafe fn enqueue_copy_from_host(
        &self,
        destination: DeviceSlice<'_>,
        source: &[u8],
    ) -> Result<(), AccessError> {
        destination.require_writable()?;
        same_length(source.len() as u64, destination.len())?;
        self.copy(destination.len(), |driver, stream| {
            let from = source.as_ptr().cast();
            // SAFETY: the destination by the promise of DeviceSlice, the source by that of the caller.
            unsafe { driver.memcpy_htod_async(destination.device_ptr(), from, source.len(), stream) }
        })
    }

    /// Enqueues a copy of device memory to host bytes. It may block as
    /// [`enqueue_copy_from_host`](Self::enqueue_copy_from_host) may.
    ///
    /// # Errors
    /// The lengths differ, or the driver refuses; nothing is then enqueued.
    ///
    /// # Safety
    /// `destination` stays allocated, unread and unwritten until the stream has completed the copy; if the stream is
    /// being captured, until the last launch of that graph has.
    pub unsafe fn enqueue_copy_to_host(
        &self,
        destination: &mut [u8],
        source: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        same_length(source.len(), destination.len() as u64)?;
        self.copy(source.len(), |driver, stream| {
            let to = destination.as_mut_ptr().cast();
            // SAFETY: the source by the promise of DeviceSlice, the destination by that of the caller.
            unsafe { driver.memcpy_dtoh_async(to, source.device_ptr(), source.size(), stream) }
        })
    }

    /// Counts and enqueues a copy of `bytes` bytes. Does nothing for 0 bytes.
    pub(crate) fn copy(
        &self,
        bytes: u64,
        enqueue: impl FnOnce(&Driver, Handle) -> Result<(), CudaError>,
    ) -> Result<(), AccessError> {
        if bytes != 0 {
            let _guard = self.context.guard()?;
            self.context.driver().count_copy();
            enqueue(self.context.driver(), self.handle())?;
        }
        Ok(())
    }

    /// Returns the context of the stream.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// Returns the driver's handle.
    #[must_use]
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    pub(crate) fn handle(&self) -> Handle {
        self.raw.handle()
    }

    /// Refuses a captured stream, because a host-synchronous call would leave its host addresses in the graph.
    pub(crate) fn require_not_capturing(&self) -> Result<(), AccessError> {
        if self.is_capturing()? { Err(AccessError::Capturing) } else { Ok(()) }
    }
}

impl CurrentStream<'_> {
    /// Returns whether the stream is being captured into a graph, also if the capture was invalidated and has not ended
    /// yet.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` for the legacy default stream while a stream that it waits for is
    /// captured.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        let mut status = STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live, and its context current; the pointer is to a live status.
        unsafe { self.driver().stream_is_capturing(self.stream.handle(), &mut status) }?;
        Ok(status != STREAM_CAPTURE_STATUS_NONE)
    }

    /// Returns the identity of the stream. The driver reuses handles, but no other stream of the process ever has the
    /// same identity. The default streams of two threads have different identities.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND` from a driver older than CUDA 12.
    pub fn id(&self) -> Result<StreamId, CudaError> {
        let mut id = 0;
        // SAFETY: the stream is live, and its context current; the pointer is to a live number.
        unsafe { self.driver().stream_get_id(self.stream.handle(), &mut id) }?;
        Ok(StreamId(id))
    }

    /// Makes the driver call `function` once, on a thread of the driver, when all work that is on the stream now is
    /// done. Work that is enqueued later waits until it has returned. Every stream of the context may have to wait for
    /// it, so it must be short and must not wait for anything.
    ///
    /// It must not call CUDA, nor drop an object that does: such calls are refused (`CUDA_ERROR_NOT_PERMITTED`). A
    /// panic in it ends the process. If the context is lost before the call, the function is never called, and its
    /// captures are never dropped.
    ///
    /// # Errors
    /// The stream is captured (a graph might call the function more than once), or the driver refuses. Nothing is
    /// enqueued then.
    pub fn enqueue_host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<(), AccessError> {
        if self.is_capturing()? {
            return Err(AccessError::Capturing);
        }
        launch(function, |call, data| {
            // SAFETY: the stream is live, and its context current; function and data belong together, and are valid
            // until the one call.
            unsafe { self.driver().launch_host_func(self.stream.handle(), call, data) }
        })?;
        Ok(())
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.stream.context.driver()
    }

    pub(crate) fn context(&self) -> &Context {
        self.stream.context
    }

    pub(crate) fn handle(&self) -> Handle {
        self.stream.handle()
    }
}

/// Passes a function to the driver in the driver's form. If `enqueue` fails, the function is dropped.
fn launch<F: FnOnce() + Send + 'static>(
    function: F,
    enqueue: impl FnOnce(HostFunction, *mut c_void) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    unsafe extern "C" fn call<F: FnOnce()>(data: *mut c_void) {
        // SAFETY: what `launch` gave to the driver with this function, which the driver calls once.
        let function = unsafe { Box::from_raw(data.cast::<F>()) };
        function();
    }
    let data = Box::into_raw(Box::new(function));
    enqueue(call::<F>, data.cast()).inspect_err(|_| {
        // SAFETY: made above; the driver has refused it and will not call.
        drop(unsafe { Box::from_raw(data) });
    })
}

fn same_length(source_len: u64, destination_len: u64) -> Result<(), AccessError> {
    if source_len == destination_len {
        Ok(())
    } else {
        Err(AccessError::LengthMismatch { source_len, destination_len })
    }
}
