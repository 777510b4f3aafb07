//! The primary context of a device, retained, and the guards that make it current around driver calls.
#![allow(unsafe_code)] // driver calls

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Handle, LIMIT_STACK_SIZE, STREAM_CAPTURE_MODE_RELAXED};
use crate::{CuResult, CudaError, Device, Driver, MemoryInfo};

/// A reference to the primary context of a device.
///
/// It is always the primary context, which the CUDA runtime, torch and cudarc use too. So addresses and streams of the
/// caller's framework are valid here. Cheap to clone; every owner of this crate holds a clone, so the context lives
/// until the last of them is dropped. The last clone releases it; the driver destroys it when no other code in the
/// process holds it any more.
///
/// `Send` and `Sync`: nothing depends on which context a thread has made current, because each call is made under a
/// [`ContextGuard`].
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

struct ContextInner {
    device: Device,
    raw: Handle,
    /// The first failure of a `Drop`, kept for [`Context::take_drop_error`].
    drop_error: Mutex<Option<CudaError>>,
}

/// Keeps a context current on this thread; dropping it restores what was current before.
///
/// Not `Send`: the stack of contexts belongs to the thread. Guards must be dropped in reverse order, which scopes do.
#[must_use = "the context is current only while the guard lives"]
#[derive(Debug)]
pub struct ContextGuard<'a> {
    context: &'a Context,
    /// True if the guard made the context current; otherwise it was current before.
    pushed: bool,
    /// The stream-capture mode of the thread to restore, if it was changed.
    capture_mode: Option<u32>,
    _not_send: PhantomData<*mut ()>,
}

/// What is current while an owner calls the driver.
#[derive(Clone, Debug)]
pub(crate) enum CallContext {
    /// The context of the owner's memory.
    Of(Context),
    /// Whatever the caller's thread has: memory of a NUMA node belongs to no context.
    Any(&'static Driver),
}

/// Keeps a [`CallContext`] in force on this thread.
#[derive(Debug)]
#[must_use = "it is in force only while the guard lives"]
pub(crate) enum CallGuard<'a> {
    Of { _guard: ContextGuard<'a> },
    Any { driver: &'static Driver, capture_mode: Option<u32>, _not_send: PhantomData<*mut ()> },
}

impl Context {
    /// Retains the device's primary context, making it if this process has none yet (about 290 ms, measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE` if the device's compute mode does not admit this process,
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device has no room for a context, an MPS code if the MPS server refuses.
    pub fn retain(device: Device) -> Result<Self, CudaError> {
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle; the device came from the driver.
        unsafe { device.driver().primary_ctx_retain(&mut raw, device.raw()) }
            .map_err(|error| error.with_context(format!("device {}", device.ordinal())))?;
        Ok(Self { inner: Arc::new(ContextInner { device, raw, drop_error: Mutex::new(None) }) })
    }

    /// Makes the context current on this thread for as long as the guard lives: any thread may do so, whatever was
    /// current on it before.
    ///
    /// # Errors
    /// The context is gone (`CUDA_ERROR_CONTEXT_IS_DESTROYED` after a reset of the device), or CUDA is shutting
    /// down.
    pub fn guard(&self) -> Result<ContextGuard<'_>, CudaError> {
        let mut current = 0;
        // Asked first: the caller's thread usually has it current already, and asking is one cheap call instead of two.
        // SAFETY: the pointer is to a live handle.
        unsafe { self.driver().ctx_get_current(&mut current) }?;
        let pushed = current != self.inner.raw;
        if pushed {
            // SAFETY: the handle is retained for as long as `self` lives.
            unsafe { self.driver().ctx_push_current(self.inner.raw) }?;
        }
        Ok(ContextGuard { context: self, pushed, capture_mode: None, _not_send: PhantomData })
    }

    /// Makes the context current as [`Context::guard`] does, and sets the thread to relaxed stream-capture mode
    /// meanwhile. In the default mode, allocating, importing and mapping invalidate a capture that another thread of
    /// the process has begun.
    ///
    /// # Errors
    /// As [`Context::guard`].
    pub fn guard_relaxed(&self) -> Result<ContextGuard<'_>, CudaError> {
        let mut guard = self.guard()?;
        guard.capture_mode = relax_captures(self.driver());
        Ok(guard)
    }

    /// Makes the context current on this thread for good, replacing what was current: for threads that belong to the
    /// caller entirely.
    ///
    /// # Errors
    /// As [`Context::guard`].
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is retained for as long as `self` lives. A thread that still has it current afterwards
        // gets CUDA_ERROR_CONTEXT_IS_DESTROYED, nothing worse.
        unsafe { self.driver().ctx_set_current(self.inner.raw) }
    }

    /// Waits until all work of the process in this context is done. Blocks for as long as any stream waits for
    /// another process.
    ///
    /// # Errors
    /// The error of that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let wait = || {
            let _guard = self.guard()?;
            // SAFETY: no arguments; a context is current.
            unsafe { self.driver().ctx_synchronize() }
        };
        // Twice, as `StreamRef::synchronize` does and for the same reason.
        wait().inspect_err(|_| drop(wait()))
    }

    /// Fails if the context is lost. Does not wait for work on the GPU, and is valid during a stream capture.
    ///
    /// It asks for a limit of the context, for two reasons. The driver holds such a call up while it checkpoints the
    /// process, whereas a thread in `cuStreamQuery`, `cuEventQuery` or a synchronization reads memory that the driver has
    /// taken away, and ends the process (measured on H200, driver 580). And nothing is enqueued, so that the call cannot
    /// wait behind work of other streams.
    ///
    /// # Errors
    /// The error that ended the context.
    pub fn check(&self) -> Result<(), CudaError> {
        let _guard = self.guard_relaxed()?;
        let mut bytes = 0;
        // SAFETY: the pointer is to a live number; a context is current.
        unsafe { self.driver().ctx_get_limit(&mut bytes, LIMIT_STACK_SIZE) }
    }

    /// Returns the free and total memory of the device.
    ///
    /// # Errors
    /// The driver's error.
    pub fn memory_info(&self) -> Result<MemoryInfo, CudaError> {
        let _guard = self.guard()?;
        let mut free = 0;
        let mut total = 0;
        // SAFETY: both pointers are to live numbers; a context is current.
        unsafe { self.driver().mem_get_info(&mut free, &mut total) }?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Returns the first failure that a `Drop` of something in this context met since the last call. A `Drop` cannot
    /// return it; what it failed to free stays allocated until the process ends.
    #[must_use]
    pub fn take_drop_error(&self) -> Option<CudaError> {
        self.inner.drop_error.lock().ignore_poison().take()
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.inner.device.driver()
    }

    /// Returns the driver's handle (`CUcontext`), for other CUDA libraries; valid while a clone of `self` lives.
    #[must_use]
    pub fn as_raw(&self) -> usize {
        self.inner.raw
    }

    /// Frees a resource in a `Drop`, which has no second chance: a context that cannot be made current is
    /// tried twice, and then the call is made nevertheless, because some calls need no context.
    pub(crate) fn give_back(
        &self,
        call: impl FnOnce(&'static Driver) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (_guard, current) = match self.guard_relaxed() {
            Ok(guard) => (Ok(guard), Ok(())),
            Err(error) => (self.guard_relaxed(), Err(error)),
        };
        let given_back = call(self.driver());
        current.and(given_back)
    }

    /// Frees a resource in a `Drop`, as [`give_back`](Self::give_back), and stores a failure.
    pub(crate) fn release(&self, call: impl FnOnce(&'static Driver) -> Result<(), CudaError>) {
        self.record_drop(self.give_back(call));
    }

    /// Waits for the work of this process in the context, before memory that the work may use is unmapped or used for
    /// something else. The driver waits by itself before it frees or unregisters memory, but not before it unmaps it
    /// (both measured on H200, driver 580). Unlike [`Context::synchronize`], this calls the driver in relaxed
    /// stream-capture mode.
    ///
    /// # Errors
    /// The error of that work.
    pub fn settle(&self) -> Result<(), CudaError> {
        let wait = || {
            self.give_back(|driver| {
                // SAFETY: no arguments; that no context is current would be an error code.
                unsafe { driver.ctx_synchronize() }
            })
        };
        // Twice, as `StreamRef::synchronize` does and for the same reason.
        wait().inspect_err(|_| drop(wait()))
    }

    /// Adds to the error of an allocation its size and, if memory ran out, how much there was.
    pub(crate) fn describe_allocation(&self, error: CudaError, bytes: u64) -> CudaError {
        let mut error = error.with_context(format!("{bytes} bytes on device {}", self.device().ordinal()));
        if error.code == CuResult::OUT_OF_MEMORY {
            error.memory = self.memory_info().ok();
        }
        error
    }

    /// Stores the failure of a `Drop`, if it is the first one.
    pub(crate) fn record_drop(&self, result: Result<(), CudaError>) {
        if let Err(error) = result {
            let mut first = self.inner.drop_error.lock().ignore_poison();
            first.get_or_insert(error);
        }
    }
}

impl CallContext {
    pub(crate) fn driver(&self) -> &'static Driver {
        match self {
            Self::Of(context) => context.driver(),
            Self::Any(driver) => driver,
        }
    }

    /// Puts it in force on this thread, in relaxed stream-capture mode, as [`Context::guard_relaxed`] does.
    ///
    /// # Errors
    /// As [`Context::guard`].
    pub(crate) fn guard(&self) -> Result<CallGuard<'_>, CudaError> {
        Ok(match self {
            Self::Of(context) => CallGuard::Of { _guard: context.guard_relaxed()? },
            Self::Any(driver) => {
                CallGuard::Any { driver, capture_mode: relax_captures(driver), _not_send: PhantomData }
            }
        })
    }

    /// Frees a resource in a `Drop`, as [`Context::give_back`].
    pub(crate) fn give_back(
        &self,
        call: impl FnOnce(&'static Driver) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        match self {
            Self::Of(context) => context.give_back(call),
            Self::Any(driver) => {
                let _guard = self.guard()?;
                call(driver)
            }
        }
    }

    /// Stores the failure of a `Drop`, if it is the first one.
    pub(crate) fn record_drop(&self, result: Result<(), CudaError>) {
        match self {
            Self::Of(context) => context.record_drop(result),
            Self::Any(driver) => driver.record_drop(result),
        }
    }
}

impl PartialEq for Context {
    /// Returns whether both are the same context of the driver.
    fn eq(&self, other: &Self) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl Eq for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.inner.device.ordinal()).finish_non_exhaustive()
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: retained once in `Context::retain`, released once here. A failure cannot be
        // reported, and needs no report: CUDA is shutting down or the context is lost, and both free it.
        let _ = unsafe { self.device.driver().primary_ctx_release(self.device.raw()) };
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if let Self::Any { driver, capture_mode: Some(mode), .. } = self {
            driver.record_drop(restore_captures(driver, *mode));
        }
    }
}

/// Sets the thread to relaxed stream-capture mode. Returns its former mode, if it was changed.
fn relax_captures(driver: &Driver) -> Option<u32> {
    let mut mode = STREAM_CAPTURE_MODE_RELAXED;
    // A driver without the call, or a thread that may not change its mode, still does the work itself: the guard
    // then protects no capture, which is no reason to fail.
    // SAFETY: the pointer is to a live mode, which the driver exchanges for the thread's former one.
    unsafe { driver.thread_exchange_stream_capture_mode(&mut mode) }.is_ok().then_some(mode)
}

fn restore_captures(driver: &Driver, mut mode: u32) -> Result<(), CudaError> {
    // SAFETY: the pointer is to a live mode.
    unsafe { driver.thread_exchange_stream_capture_mode(&mut mode) }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let driver = self.context.driver();
        if let Some(mode) = self.capture_mode {
            self.context.record_drop(restore_captures(driver, mode));
        }
        if self.pushed {
            let mut popped = 0;
            // SAFETY: the pointer is to a live handle. What is on top is what this guard pushed: it cannot have left
            // its thread, and guards end in reverse order.
            self.context.record_drop(unsafe { driver.ctx_pop_current(&mut popped) });
        }
    }
}
