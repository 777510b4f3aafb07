//! Semaphores: a limited number of permits that processes share.

use std::ffi::{c_char, c_void};

use partywall::{DeviceUuid, Domain, Permit, Semaphore};

use crate::{
    argument::{self, device_gpu, store_info, structs, text, timeout},
    domain::pw_domain,
    error::{call, pw_status},
    handle::{self, object},
    timeline::gpu_of,
};

/// A semaphore. Any thread may use it.
pub struct pw_semaphore {
    _opaque: (),
}

/// A permit that this process holds. It is free again if the process dies. Any thread may use it.
pub struct pw_permit {
    _opaque: (),
}

struct OpenSemaphore {
    semaphore: Semaphore,
    /// The GPU of streams, if the caller named it.
    device: Option<DeviceUuid>,
}

struct HeldPermit {
    permit: Permit,
    domain: Domain,
    device: Option<DeviceUuid>,
}

object!(OpenSemaphore, pw_semaphore, 17, "semaphore");
object!(HeldPermit, pw_permit, 18, "permit");
structs!(pw_semaphore_options, pw_semaphore_info);

/// How a semaphore is opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_semaphore_options {
    /// `sizeof(pw_semaphore_options)`.
    pub size: usize,
    /// The GPU of the streams that `pw_permit_close_on` gets; null as for timelines.
    pub device: *const c_char,
    /// Nonzero: other users whom the broker admits may use the semaphore, if this call creates it.
    pub shared: u8,
}

/// Opens a semaphore of `permits` permits, and creates it if it does not exist; otherwise it has as many. `options` may be
/// null. The caller owns `*semaphore` and closes it with `pw_semaphore_close`. Blocks for a round trip to the broker.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `semaphore` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_semaphore_open(
    domain: *const pw_domain,
    name: *const c_char,
    permits: u32,
    options: *const pw_semaphore_options,
    semaphore: *mut *mut pw_semaphore,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(semaphore, || {
            let options = argument::options(options)?;
            let known = handle::get::<Domain>(domain)?.semaphore_options(text(name, "name")?, permits);
            let device = device_gpu(options.device)?;
            Ok(OpenSemaphore { semaphore: known.shared(options.shared != 0).open()?, device })
        })
    })
}

/// Closes a semaphore. Permits that this process holds stay. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_semaphore_close(semaphore: *mut pw_semaphore) -> pw_status {
    call(|| handle::close::<OpenSemaphore>(semaphore))
}

/// What `pw_semaphore_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_semaphore_info {
    /// `sizeof(pw_semaphore_info)`, which the caller sets.
    pub size: usize,
    /// How many permits there are.
    pub permits: u32,
    /// How many of them are free.
    pub available: u32,
    /// How many threads of all processes wait for one.
    pub waiting: u32,
}

/// Stores what is known about a semaphore now. Takes time in proportion to the number of permits.
///
/// # Safety
/// No other thread closes `semaphore`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_semaphore_info_get(
    semaphore: *const pw_semaphore,
    info: *mut pw_semaphore_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenSemaphore { semaphore, .. } = handle::get::<OpenSemaphore>(semaphore)?;
        let (permits, available) = (semaphore.maximum(), semaphore.available());
        store_info(info, pw_semaphore_info { size: 0, permits, available, waiting: semaphore.waiting() })
    })
}

impl OpenSemaphore {
    fn held(&self, permit: Permit) -> HeldPermit {
        HeldPermit { permit, domain: self.semaphore.domain().clone(), device: self.device }
    }
}

/// Takes a permit, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns `*permit` and
/// closes it.
///
/// # Safety
/// No other thread closes `semaphore`; `permit` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_semaphore_acquire(
    semaphore: *const pw_semaphore,
    timeout_ns: i64,
    permit: *mut *mut pw_permit,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(permit, || {
            let shared = handle::get::<OpenSemaphore>(semaphore)?;
            Ok(shared.held(shared.semaphore.acquire(timeout(timeout_ns))?))
        })
    })
}

/// Takes a permit that is free now; otherwise stores null, which is no failure. Does not block.
///
/// # Safety
/// As `pw_semaphore_acquire`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_semaphore_try_acquire(
    semaphore: *const pw_semaphore,
    permit: *mut *mut pw_permit,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give_some(permit, || {
            let shared = handle::get::<OpenSemaphore>(semaphore)?;
            Ok(shared.semaphore.try_acquire()?.map(|permit| shared.held(permit)))
        })
    })
}

/// Gives a permit back. Null is ignored. Does not block.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_permit_close(permit: *mut pw_permit) -> pw_status {
    call(|| if permit.is_null() { Ok(()) } else { Ok(handle::take::<HeldPermit>(permit)?.permit.release()?) })
}

/// Gives a permit back once the work that is on `stream` now is done. Does not wait. Null is the legacy default stream.
/// On failure the permit is still the caller's.
///
/// # Safety
/// No other thread uses the handle; `stream` is a stream of the primary context of the semaphore's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_permit_close_on(permit: *mut pw_permit, stream: *mut c_void) -> pw_status {
    call(|| {
        handle::consume(permit, |HeldPermit { permit, domain, device }| {
            let gpu = match gpu_of(&domain, device) {
                Ok(gpu) => gpu,
                Err(error) => return Err((error.into(), HeldPermit { permit, domain, device })),
            };
            // SAFETY: the caller's promise.
            let stream = unsafe { argument::stream(&gpu, stream) };
            permit.release_on(stream).map_err(|failed| {
                let permit = *failed.value;
                (failed.error.into(), HeldPermit { permit, domain, device })
            })
        })
    })
}
