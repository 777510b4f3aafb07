//! Events with a time stamp, which measure how long work on a stream took.
#![allow(unsafe_code)] // driver calls

use std::fmt;
use std::time::Duration;

use crate::abi::{EVENT_DEFAULT, Handle};
use crate::{Context, CudaError, StreamRef};

/// A point in a stream, with the device's time (`cuEventCreate`). For benchmarks; order between processes is made by
/// timelines.
///
/// `Send` and `Sync`. Dropping does not wait.
pub struct Event {
    context: Context,
    handle: Handle,
}

impl Event {
    /// Returns an event that nothing was recorded in.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let _guard = context.guard()?;
        let mut handle = 0;
        // SAFETY: the pointer is to a live handle; a context is current.
        unsafe { context.driver().event_create(&mut handle, EVENT_DEFAULT) }?;
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

    /// Waits until the recorded point is reached (busily; an event that nothing was recorded in counts as reached).
    ///
    /// # Errors
    /// What the work before it failed with.
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

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("handle", &format_args!("{:#x}", self.handle)).finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroyed = self.context.give_back(|driver| {
            // SAFETY: created once, destroyed once.
            unsafe { driver.event_destroy(self.handle) }
        });
        self.context.record_drop(destroyed);
    }
}
