//! Events that several processes share: one records, another's stream waits.
//!
//! An adapter for code that uses them. Order between processes is made by [memory operations](crate::memop), because
//! **no process can release a stream that waits for the event of a killed recorder** (measured: still blocked when the
//! measurement ended, after 3 s).
//!
//! # Traps
//!
//! - A wait is for the record that there is *at the time of the call*. If the other process has not recorded yet, it
//!   waits for nothing: a message "I have recorded" comes before the call, and one event cannot stand for two laps.
//! - The process that made the event keeps it until all others have closed theirs: else the behaviour is undefined
//!   (vendor's documentation), and a handle that is opened too late is refused (`CUDA_ERROR_INVALID_VALUE`).
//! - A handle is opened in another process than the one that made the event; in the same one the driver refuses.
//! - Both processes see the same `/dev/shm` and are of one user: else `CUDA_ERROR_MAP_FAILED` (measured). Killed
//!   processes leave files there.
//! - Both are on the same device, and neither event keeps a time.
#![allow(unsafe_code)] // driver calls

use std::fmt;

use crate::abi::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, IpcHandle};
use crate::result::none_if;
use crate::{Context, CuResult, CudaError, Event, StreamRef};

/// What another process needs to open an [`IpcEvent`]: 64 bytes that only the driver understands (`CUipcEventHandle`).
///
/// No identity: the driver may hand out the same bytes again for another event.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcEventHandle(pub [u8; 64]);

impl IpcEventHandle {
    pub(crate) fn of(event: &Event) -> Result<Self, CudaError> {
        let _guard = event.context.guard()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: the pointer is to a live handle; the event is live.
        unsafe { event.context.driver().ipc_get_event_handle(&mut handle, event.handle) }?;
        Ok(Self(handle.0))
    }
}

impl fmt::Debug for IpcEventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IpcEventHandle(..)")
    }
}

/// An event that other processes can open (`CU_EVENT_INTERPROCESS`), without a time (`CU_EVENT_DISABLE_TIMING`, which
/// the driver demands), or one that was opened here.
///
/// Either process may record it and wait for it. `Send` and `Sync`. Dropping does not wait.
#[derive(Debug)]
pub struct IpcEvent(Event);

impl IpcEvent {
    /// Returns a new event that nothing was recorded in.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Event::with_flags(context, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING).map(Self)
    }

    /// Returns the event that another process made on the same device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if its maker has destroyed it; `CUDA_ERROR_MAP_FAILED` if the bytes are no handle
    /// (measured), without the maker's `/dev/shm` or as another user; `CUDA_ERROR_INVALID_CONTEXT` in the process that
    /// made it (measured).
    pub fn open(context: &Context, handle: &IpcEventHandle) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let mut opened = 0;
        // SAFETY: the pointer is to a live handle; a context is current. The driver checks the bytes.
        unsafe { context.driver().ipc_open_event_handle(&mut opened, IpcHandle(handle.0)) }?;
        Ok(Self(Event { context: context.clone(), handle: opened }))
    }

    /// Returns the handle with which another process opens the event. Only its creator can.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for an event that was opened here; `CUDA_ERROR_NOT_SUPPORTED` where the platform
    /// has no event IPC; `CUDA_ERROR_MAP_FAILED` or `CUDA_ERROR_OPERATING_SYSTEM` if `/dev/shm` cannot be used.
    pub fn export(&self) -> Result<IpcEventHandle, CudaError> {
        IpcEventHandle::of(&self.0)
    }

    /// Records the point after everything that is on the stream now; later waits are for this one.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if the stream is of another context.
    pub fn record(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        self.0.record(stream)
    }

    /// Enqueues a wait for the current record, by any process. Without a record the wait ends immediately.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enqueue_wait(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        self.0.enqueue_wait(stream)
    }

    /// Returns whether the last record is reached, or no record exists. Does not wait.
    ///
    /// # Errors
    /// The error of earlier work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _guard = self.0.context.guard()?;
        // SAFETY: the event is live.
        let done = unsafe { self.0.context.driver().event_query(self.0.handle) };
        Ok(none_if(done, CuResult::NOT_READY)?.is_some())
    }
}
