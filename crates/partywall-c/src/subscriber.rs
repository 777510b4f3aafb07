//! Subscribers, and the samples that they receive.

use std::{
    ffi::{c_int, c_void},
    os::fd::{AsFd, AsRawFd},
};

use partywall::{Policy, Sample, Subscriber, SubscriberEvent, Topic};

use crate::{
    argument::{self, array_mut, copy_out, store, store_bytes, store_info, stream_gpu, structs, timeout},
    error::{Failure, call, pw_status},
    handle::{self, object},
    topic::pw_topic,
};

/// Publishers wait for the subscriber, so it misses nothing.
pub const PW_BLOCK: u32 = 0;
/// A subscriber that falls too far behind misses the oldest samples. No publisher waits for it.
pub const PW_DROP_OLDEST: u32 = 1;
/// The subscriber receives the latest sample and misses earlier ones. No publisher waits for it.
pub const PW_LATEST: u32 = 2;

/// A subscriber of a topic. Any thread may use it; each sample is received once.
pub struct pw_subscriber {
    _opaque: (),
}

/// A sample that was received. Any thread may use it. Its block stays as it is until it is closed.
pub struct pw_sample {
    _opaque: (),
}

/// A subscriber and the descriptor that shows its samples, once a caller wanted one.
struct Receiver {
    subscriber: Subscriber,
    event: std::sync::OnceLock<SubscriberEvent>,
}

object!(Receiver, pw_subscriber, 5, "subscriber");
object!(Sample, pw_sample, 6, "sample");
structs!(pw_subscriber_options, pw_sample_info);

/// How a subscriber joins. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_subscriber_options {
    /// `sizeof(pw_subscriber_options)`.
    pub size: usize,
    /// `PW_BLOCK`, `PW_DROP_OLDEST` or `PW_LATEST`.
    pub policy: u32,
    /// How many samples it may be behind, with `PW_DROP_OLDEST`; the default is what the ring keeps.
    pub queue: u32,
    /// How many samples published before it joined it receives, if `has_history` is not zero; otherwise the topic says.
    pub history: u32,
    /// Nonzero: `history` counts.
    pub has_history: u8,
    /// Nonzero: receiving ends with `PW_GONE` once the last publisher has left and every sample is received.
    pub until_idle: u8,
    /// Nonzero: measure the ages of samples.
    pub measure_ages: u8,
}

/// Joins a topic as a subscriber. `options` may be null: then publishers wait for it. The caller owns `*subscriber` and
/// closes it with `pw_subscriber_close`.
///
/// # Safety
/// No other thread closes `topic`; `options` is null or valid; `subscriber` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_subscriber_open(
    topic: *const pw_topic,
    options: *const pw_subscriber_options,
    subscriber: *mut *mut pw_subscriber,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(subscriber, || {
            let (topic, options) = (handle::get::<Topic>(topic)?, argument::options(options)?);
            let policy = match options.policy {
                PW_BLOCK => Policy::Block,
                PW_DROP_OLDEST => Policy::DropOldest,
                PW_LATEST => Policy::Latest,
                other => {
                    let why = format!("{other} is no policy of a subscriber");
                    return Err(Failure::argument(why, "pass PW_BLOCK, PW_DROP_OLDEST or PW_LATEST"));
                }
            };
            let mut known = topic.subscribe(policy).until_idle(options.until_idle != 0);
            known = known.measure_ages(options.measure_ages != 0);
            if options.has_history != 0 {
                known = known.history(options.history);
            }
            if options.queue != 0 {
                known = known.queue(options.queue);
            }
            Ok(Receiver { subscriber: known.join()?, event: std::sync::OnceLock::new() })
        })
    })
}

/// Detaches the subscriber from its topic. Samples that it has received stay. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_subscriber_close(subscriber: *mut pw_subscriber) -> pw_status {
    call(|| handle::close::<Receiver>(subscriber))
}

/// Receives the next sample, and waits for it up to `timeout_ns`; negative means without end. The caller owns `*sample`
/// and closes it with `pw_sample_close`.
///
/// # Safety
/// No other thread closes `subscriber`; `sample` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_subscriber_recv(
    subscriber: *const pw_subscriber,
    timeout_ns: i64,
    sample: *mut *mut pw_sample,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let receive = || Ok(handle::get::<Receiver>(subscriber)?.subscriber.recv(timeout(timeout_ns))?);
        handle::give(sample, receive)
    })
}

/// Receives a sample that is there already; otherwise stores null, which is no failure. Does not block.
///
/// # Safety
/// As `pw_subscriber_recv`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_subscriber_try_recv(
    subscriber: *const pw_subscriber,
    sample: *mut *mut pw_sample,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give_some(sample, || Ok(handle::get::<Receiver>(subscriber)?.subscriber.try_recv()?)) })
}

/// Stores a file descriptor that is readable while `pw_subscriber_try_recv` would store a sample or fail, for `poll` and
/// `epoll`. It belongs to the subscriber, and is closed with it; there is nothing to read from it.
///
/// # Safety
/// No other thread closes `subscriber`; `fd` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_subscriber_fd(subscriber: *const pw_subscriber, fd: *mut c_int) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let receiver = unsafe { handle::get::<Receiver>(subscriber) }?;
        let event = match receiver.event.get() {
            Some(event) => event,
            None => {
                let event = receiver.subscriber.event()?;
                receiver.event.get_or_init(|| event)
            }
        };
        // SAFETY: the caller's promise.
        unsafe { store(fd, event.as_fd().as_raw_fd(), "fd") }
    })
}

/// What `pw_sample_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_sample_info {
    /// `sizeof(pw_sample_info)`, which the caller sets.
    pub size: usize,
    /// The lengths of the dimensions, valid until the sample is closed.
    pub shape: *const u64,
    /// How many dimensions there are.
    pub rank: u32,
    /// The element type.
    pub dtype: u32,
    /// The length in bytes.
    pub bytes: u64,
    /// The publisher's number.
    pub publisher: u64,
    /// How many samples its publisher had published before.
    pub sequence: u64,
    /// How many samples had been published in the topic before.
    pub position: u64,
    /// How many samples this subscriber has missed between the previous sample and this one.
    pub missed: u64,
    /// The nanoseconds since it was published; -1 if the publisher did not stamp it.
    pub age_ns: i64,
}

/// Returns the sample of a handle.
///
/// # Safety
/// No other thread closes the handle during `'a`.
pub(crate) unsafe fn sample<'a>(sample: *const pw_sample) -> Result<&'a Sample, Failure> {
    // SAFETY: the caller's promise.
    unsafe { handle::get::<Sample>(sample) }
}

/// Stores what is known about a sample. Does not block; reads the clock.
///
/// # Safety
/// No other thread closes `sample`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_info_get(sample: *const pw_sample, info: *mut pw_sample_info) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let sample = unsafe { self::sample(sample) }?;
        let known = pw_sample_info {
            size: 0,
            shape: sample.shape().as_ptr(),
            rank: sample.shape().len() as u32,
            dtype: sample.dtype().code().into(),
            bytes: sample.len(),
            publisher: sample.publisher(),
            sequence: sample.sequence(),
            position: sample.position(),
            missed: sample.missed(),
            age_ns: sample.age().map_or(-1, |age| i64::try_from(age.as_nanos()).unwrap_or(i64::MAX)),
        };
        // SAFETY: the caller's promise.
        unsafe { store_info(info, known) }
    })
}

/// Stores the address and length of the bytes of a sample in host or pinned memory. They are valid until it is closed.
/// Fails with `PW_BUSY` while a stream still writes them. Does not block.
///
/// # Safety
/// No other thread closes `sample`; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_data(
    sample: *const pw_sample,
    data: *mut *const c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let bytes = self::sample(sample)?.bytes()?;
        store_bytes(data, bytes.as_ptr().cast(), length, bytes.len() as u64)
    })
}

/// Stores the device address and length of a sample on the GPU of `stream`, for work that is enqueued on it from now on:
/// it waits there for the publisher's stream. Null is the legacy default stream. Does not block.
///
/// # Safety
/// No other thread closes `sample`; `stream` is a stream of the primary context of the topic's GPU; `address` and
/// `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_device_on(
    sample: *const pw_sample,
    stream: *mut c_void,
    address: *mut *const c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let sample = self::sample(sample)?;
        let gpu = stream_gpu(sample.domain(), sample.gpu())?;
        let range = sample.device_on(argument::stream(&gpu, stream))?;
        store_bytes(address, argument::address(range.device_ptr()).cast_const(), length, range.bytes())
    })
}

/// Copies `length` bytes from `offset` on to `bytes`, from any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread closes `sample`; `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_read(
    sample: *const pw_sample,
    offset: u64,
    bytes: *mut c_void,
    length: usize,
) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (sample, bytes) = unsafe { (self::sample(sample)?, array_mut(bytes.cast::<u8>(), length, "bytes")?) };
        Ok(sample.read_at(offset, bytes)?)
    })
}

/// Copies the header that the publisher has added, at most `capacity` bytes of it, and stores its length in `*length`.
/// With a capacity of 0 `header` may be null.
///
/// # Safety
/// No other thread closes `sample`; `header` may be written; `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_header(
    sample: *const pw_sample,
    header: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        unsafe { copy_out(&self::sample(sample)?.header(), header.cast(), capacity, length) }
    })
}

/// Waits until the publisher's stream has completed the sample, up to `timeout_ns`; negative means without end.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_wait(sample: *const pw_sample, timeout_ns: i64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { self::sample(sample) }?.wait(timeout(timeout_ns))?))
}

/// Fails if the sample is not valid: `PW_INVALID_DATA` if its publisher, or that of a sample that it was made from, ended
/// before it was complete. Call it once the work that has read the sample is done, before you use its results.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_check(sample: *const pw_sample) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { self::sample(sample) }?.check()?))
}

/// Closes a sample, so that its block can be written again. If `pw_sample_device_on` was called, first waits until the
/// work of this process on that GPU is done. Null is ignored.
///
/// # Safety
/// No other thread uses the handle, and nobody the addresses that it gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_close(sample: *mut pw_sample) -> pw_status {
    call(|| if sample.is_null() { Ok(()) } else { Ok(handle::take::<Sample>(sample)?.release()?) })
}

/// Closes a sample once the work that is on `stream` now is done. Does not wait. On failure the sample is still the
/// caller's.
///
/// # Safety
/// As `pw_sample_close`; `stream` is a stream of the primary context of the topic's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_sample_close_on(sample: *mut pw_sample, stream: *mut c_void) -> pw_status {
    call(|| {
        handle::consume(sample, |sample: Sample| {
            let gpu = match stream_gpu(sample.domain(), sample.gpu()) {
                Ok(gpu) => gpu,
                Err(error) => return Err((error.into(), sample)),
            };
            // SAFETY: the caller's promise.
            let stream = unsafe { argument::stream(&gpu, stream) };
            sample.release_on(stream).map_err(|failed| (failed.error.into(), *failed.value))
        })
    })
}
