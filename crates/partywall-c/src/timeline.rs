//! Timelines: values that only grow, which hosts and streams wait for.

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use partywall::{DeviceUuid, Domain, Gpu, Timeline, TimelineEvent, TimelineOptions, TimelineWriter};

use crate::{
    argument::{self, check_out, device_gpu, store, store_info, structs, text, timeout},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// A timeline to wait for. Any thread may use it.
pub struct pw_timeline {
    _opaque: (),
}

/// The one writer of a timeline. Any thread may use it.
pub struct pw_writer {
    _opaque: (),
}

/// A descriptor that shows that a timeline has come to a value. Any thread may use it.
pub struct pw_timeline_event {
    _opaque: (),
}

/// An object that streams use, and their GPU if the caller named it.
struct OnGpu<T>(T, Option<DeviceUuid>);

object!(OnGpu<Timeline>, pw_timeline, 14, "timeline");
object!(OnGpu<TimelineWriter>, pw_writer, 15, "writer");
object!(TimelineEvent, pw_timeline_event, 16, "timeline event");
structs!(pw_timeline_options, pw_timeline_info);

/// Returns the GPU of a caller's streams.
pub(crate) fn gpu_of(domain: &Domain, device: Option<DeviceUuid>) -> partywall::Result<Arc<Gpu>> {
    device.map_or_else(|| domain.default_gpu(), |device| domain.gpu(device))
}

/// How a timeline is opened. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_timeline_options {
    /// `sizeof(pw_timeline_options)`.
    pub size: usize,
    /// The GPU of the streams that calls get: "cuda:0", a UUID; null for the first that this connection used, else the
    /// one whose context is current on the calling thread.
    pub device: *const c_char,
    /// Nonzero: other users whom the broker admits may use the timeline, if this call creates it.
    pub shared: u8,
}

/// Returns the options as the library has them, and the GPU of streams.
///
/// # Safety
/// The duties of `pw_timeline_open`.
unsafe fn options_of(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_timeline_options,
) -> Result<(TimelineOptions, Option<DeviceUuid>), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let options = argument::options(options)?;
        let known = handle::get::<Domain>(domain)?.timeline_options(text(name, "name")?);
        Ok((known.shared(options.shared != 0), device_gpu(options.device)?))
    }
}

/// Opens a timeline to wait for it, and creates it at 0 if it does not exist. `options` may be null. The caller owns
/// `*timeline` and closes it with `pw_timeline_close`. Blocks for a round trip to the broker. Any thread may call it.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `timeline` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_timeline_options,
    timeline: *mut *mut pw_timeline,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(timeline, || {
            let (options, device) = options_of(domain, name, options)?;
            Ok(OnGpu(options.open()?, device))
        })
    })
}

/// Opens a timeline to signal it, from its present value on. Fails with `PW_BUSY` while it has another writer. Otherwise
/// as `pw_timeline_open`.
///
/// # Safety
/// As `pw_timeline_open`; `writer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_writer_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_timeline_options,
    writer: *mut *mut pw_writer,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(writer, || {
            let (options, device) = options_of(domain, name, options)?;
            Ok(OnGpu(options.writer()?, device))
        })
    })
}

/// Closes a timeline that was opened to wait for it. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_close(timeline: *mut pw_timeline) -> pw_status {
    call(|| handle::close::<OnGpu<Timeline>>(timeline))
}

/// What `pw_timeline_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_timeline_info {
    /// `sizeof(pw_timeline_info)`, which the caller sets.
    pub size: usize,
    /// The last value that was signalled.
    pub value: u64,
    /// The highest value whose signal is enqueued.
    pub announced: u64,
    /// 1 if it has ended: its writer closed it, died or was evicted, or it was abandoned.
    pub has_ended: u8,
}

/// Stores how far a timeline is. Does not block; takes nanoseconds.
///
/// # Safety
/// No other thread closes `timeline`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_info_get(timeline: *const pw_timeline, info: *mut pw_timeline_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OnGpu(timeline, _) = handle::get::<OnGpu<Timeline>>(timeline)?;
        let has_ended = timeline.ending().is_some().into();
        store_info(
            info,
            pw_timeline_info { size: 0, value: timeline.value(), announced: timeline.announced(), has_ended },
        )
    })
}

/// Waits until the timeline has reached `value`, up to `timeout_ns`; negative means without end. Fails with `PW_GONE` as
/// soon as it has ended before.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_wait(timeline: *const pw_timeline, value: u64, timeout_ns: i64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OnGpu<Timeline>>(timeline) }?.0.wait(value, timeout(timeout_ns))?))
}

/// Makes a stream wait until the timeline has reached `value`, before work that is enqueued from now on. Does not block.
/// If the timeline ends before, the stream continues, and `pw_timeline_check` says so. Null is the legacy default stream.
///
/// # Safety
/// No other thread closes `timeline`; `stream` is a stream of the primary context of the timeline's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_wait_on(
    timeline: *const pw_timeline,
    stream: *mut c_void,
    value: u64,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OnGpu(timeline, device) = handle::get::<OnGpu<Timeline>>(timeline)?;
        let gpu = gpu_of(timeline.domain(), *device)?;
        Ok(timeline.wait_on(argument::stream(&gpu, stream), value)?)
    })
}

/// Fails with `PW_GONE` if the timeline ended before a value that a stream waited for, and with `PW_INVALID_DATA` if such
/// a value rests on a timeline that has failed. Call it when that work is done, before you use its results. Does not
/// block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_check(timeline: *const pw_timeline) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OnGpu<Timeline>>(timeline) }?.0.check()?))
}

/// Ends a timeline of any process: all waits for it end with `PW_GONE`. Blocks for a round trip to the broker.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_abandon(timeline: *const pw_timeline) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OnGpu<Timeline>>(timeline) }?.0.abandon()?))
}

/// Makes a descriptor for `poll` and `epoll`, which becomes readable, and stays so, once the timeline has reached `value`
/// or ended before. It belongs to `*event`, which the caller owns, and is closed with it; there is nothing to read from
/// it. Does not block.
///
/// # Safety
/// No other thread closes `timeline`; `event` and `fd` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_event_open(
    timeline: *const pw_timeline,
    value: u64,
    event: *mut *mut pw_timeline_event,
    fd: *mut c_int,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        check_out(fd, "fd")?;
        handle::give(event, || {
            let made = handle::get::<OnGpu<Timeline>>(timeline)?.0.event(value)?;
            store(fd, made.as_fd().as_raw_fd(), "fd")?;
            Ok(made)
        })
    })
}

/// Closes an event and its descriptor. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_timeline_event_close(event: *mut pw_timeline_event) -> pw_status {
    call(|| handle::close::<TimelineEvent>(event))
}

/// Signals that the work which `value` stands for is done; values only grow. Does not block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_writer_signal(writer: *const pw_writer, value: u64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OnGpu<TimelineWriter>>(writer) }?.0.signal(value)?))
}

/// Signals `value` once the work that is on `stream` now is done. Does not block. Null is the legacy default stream.
///
/// # Safety
/// No other thread closes `writer`; `stream` is a stream of the primary context of the writer's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_writer_signal_on(writer: *const pw_writer, stream: *mut c_void, value: u64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OnGpu(writer, device) = handle::get::<OnGpu<TimelineWriter>>(writer)?;
        let gpu = gpu_of(writer.timeline().domain(), *device)?;
        Ok(writer.signal_on(argument::stream(&gpu, stream), value)?)
    })
}

/// Notes that the values which are signalled from now on are made from those of `input`: if that fails, so have they.
///
/// # Safety
/// No other thread closes the handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_writer_rests_on(writer: *const pw_writer, input: *const pw_timeline) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OnGpu(input, _) = handle::get::<OnGpu<Timeline>>(input)?;
        handle::get::<OnGpu<TimelineWriter>>(writer)?.0.rests_on(input);
        Ok(())
    })
}

/// Closes a writer: waits for values that it has not signalled end with `PW_GONE`. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_writer_close(writer: *mut pw_writer) -> pw_status {
    call(|| handle::close::<OnGpu<TimelineWriter>>(writer))
}
