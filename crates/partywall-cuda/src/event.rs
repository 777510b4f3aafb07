//! Events with a time stamp, which measure how long work on a stream took.
#![allow(unsafe_code)] // driver calls

use std::time::Duration;

use crate::abi::{EVENT_DEFAULT, EVENT_WAIT_DEFAULT, Handle};
use crate::{Context, CudaError, StreamRef};

/// A point in a stream, with the device's time (`cuEventCreate`). For benchmarks; order between processes is made by
/// timelines.
///
/// `Send` and `Sync`. Dropping does not wait.
#[derive(Debug)]
pub struct Event {
    pub(crate) context: Context,
    pub(crate) handle: Handle,
}

impl Event {
    /// Returns an event that nothing was recorded in.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, EVENT_DEFAULT)
    }

    pub(crate) fn with_flags(context: &Context, flags: u32) -> Result<Self, CudaError> {
        let _guard = context.guard()?;
        let mut handle = 0;
        // SAFETY: the pointer is to a live handle; a context is current.
        unsafe { context.driver().event_create(&mut handle, flags) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Records the point after everything that is on the stream now; the former point is forgotten.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if the stream is of another context.
    pub fn record(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        let _guard = self.context.guard()?;
        // SAFETY: event and stream are live.
        unsafe { self.context.driver().event_record(self.handle, stream.handle()) }
    }

    /// Enqueues a wait for the recorded point. If nothing was recorded, the wait ends immediately.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enqueue_wait(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        let _guard = self.context.guard()?;
        // SAFETY: event and stream are live.
        unsafe { self.context.driver().stream_wait_event(stream.handle(), self.handle, EVENT_WAIT_DEFAULT) }
    }

    /// Waits until the recorded point is reached (busily; an event that nothing was recorded in counts as reached).
    ///
    /// # Errors
    /// The error of earlier work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _guard = self.context.guard()?;
        // SAFETY: the event is live.
        unsafe { self.context.driver().event_synchronize(self.handle) }
    }

    /// Returns the time from `earlier` to this event; resolution about half a microsecond (driver docs).
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY` if one of the two is not reached yet, `CUDA_ERROR_INVALID_HANDLE` if nothing was
    /// recorded in one.
    pub fn elapsed_since(&self, earlier: &Self) -> Result<Duration, CudaError> {
        let _guard = self.context.guard()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: both events are live, the pointer is to a live float.
        unsafe { self.context.driver().event_elapsed_time(&mut milliseconds, earlier.handle, self.handle) }?;
        // The driver returns a negative time for events recorded in the other order; that counts as 0.
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or(Duration::ZERO))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: created or opened once, destroyed once.
            unsafe { driver.event_destroy(self.handle) }
        });
    }
}
