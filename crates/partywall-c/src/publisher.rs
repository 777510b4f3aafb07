//! Publishers, and their loans.

use std::ffi::c_void;

use partywall::{Failed, Filled, Loan, Published, Publisher, Topic};

use crate::{
    argument::{self, array, dtype, store_bytes, store_optional, stream_gpu, timeout},
    error::{Failure, call, pw_status},
    handle::{self, object},
    subscriber::{pw_sample, sample},
    topic::pw_topic,
};

/// A publisher of a topic. Any thread may use it.
pub struct pw_publisher {
    _opaque: (),
}

/// A block that is being filled. One thread may use it at a time.
pub struct pw_loan {
    _opaque: (),
}

/// How far a loan is.
pub(crate) enum Stage {
    Writing(Loan),
    /// It could not be published, and may be published again.
    Filled(Filled),
}

object!(Publisher, pw_publisher, 3, "publisher");
object!(Stage, pw_loan, 4, "loan");

impl Stage {
    pub(crate) fn writing(&mut self) -> Result<&mut Loan, Failure> {
        match self {
            Self::Writing(loan) => Ok(loan),
            Self::Filled(_) => Err(Failure::argument(
                "the loan is filled: pw_loan_publish or pw_loan_publish_on was called",
                "publish it again, or close it",
            )),
        }
    }

    fn filled(self) -> Filled {
        match self {
            Self::Writing(loan) => loan.filled(),
            Self::Filled(filled) => filled,
        }
    }
}

/// Joins a topic as a publisher. The caller owns `*publisher` and closes it with `pw_publisher_close`. Blocks for a
/// round trip to the broker at most.
///
/// # Safety
/// No other thread closes `topic`; `publisher` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_open(topic: *const pw_topic, publisher: *mut *mut pw_publisher) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { handle::give(publisher, || Ok(handle::get::<Topic>(topic)?.publisher()?)) })
}

/// Removes the publisher from its topic, once its loans are published or closed. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_close(publisher: *mut pw_publisher) -> pw_status {
    call(|| handle::close::<Publisher>(publisher))
}

/// Publishes a copy of `length` bytes, in any kind of memory. The type and shape give the same number of bytes. Waits up
/// to `timeout_ns` for a free block and for subscribers that must not miss the sample; negative means without end. Stores
/// in `*sequence` how many samples this publisher had published before, unless it is null.
///
/// # Safety
/// No other thread closes `publisher`; `shape` has `rank` lengths; `bytes` may be read; `sequence` is null or may be
/// written.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // the tensor, as C has it
pub unsafe extern "C" fn pw_publisher_send(
    publisher: *const pw_publisher,
    element: u32,
    shape: *const u64,
    rank: usize,
    bytes: *const c_void,
    length: usize,
    timeout_ns: i64,
    sequence: *mut u64,
) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (publisher, shape, bytes) = unsafe {
            let publisher = handle::get::<Publisher>(publisher)?;
            (publisher, array(shape, rank, "shape")?, array(bytes.cast::<u8>(), length, "bytes")?)
        };
        let published = publisher.send(dtype(element)?, shape, bytes, timeout(timeout_ns))?;
        // SAFETY: the caller's promise.
        unsafe { store_optional(sequence, published.sequence) };
        Ok(())
    })
}

/// Borrows a block for a sample of this type and shape, and waits up to `timeout_ns` for a free one; negative means
/// without end. The caller owns `*loan`, and publishes or closes it.
///
/// # Safety
/// No other thread closes `publisher`; `shape` has `rank` lengths; `loan` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_loan(
    publisher: *const pw_publisher,
    element: u32,
    shape: *const u64,
    rank: usize,
    timeout_ns: i64,
    loan: *mut *mut pw_loan,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(loan, || {
            let (publisher, shape) = (handle::get::<Publisher>(publisher)?, array(shape, rank, "shape")?);
            Ok(Stage::Writing(publisher.loan(dtype(element)?, shape, timeout(timeout_ns))?))
        })
    })
}

/// Waits until the topic has at least `least` subscribers, up to `timeout_ns`; negative means without end.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_wait_for_subscribers(
    publisher: *const pw_publisher,
    least: u32,
    timeout_ns: i64,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Publisher>(publisher) }?.wait_for_subscribers(least, timeout(timeout_ns))?))
}

/// Waits until the streams have completed all samples that were published on them, up to `timeout_ns`; negative means
/// without end.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_drain(publisher: *const pw_publisher, timeout_ns: i64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Publisher>(publisher) }?.drain(timeout(timeout_ns))?))
}

/// Fails if the topic cannot be found by its name any more, or if this publisher cannot publish. Does not block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_publisher_check(publisher: *const pw_publisher) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Publisher>(publisher) }?.check()?))
}

/// Stores the address and length of the bytes of a loan in host or pinned memory, for writing by the CPU. They are valid
/// until the loan is published or closed. If `pw_loan_device` was called, first waits until the work of this process on
/// that GPU is done.
///
/// # Safety
/// No other thread uses `loan`; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_data(loan: *mut pw_loan, data: *mut *mut c_void, length: *mut usize) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let bytes = handle::get_mut::<Stage>(loan)?.writing()?.bytes_mut()?;
        store_bytes(data, bytes.as_mut_ptr().cast(), length, bytes.len() as u64)
    })
}

/// Stores the device address and length of a loan, on its GPU or the one that uses pinned memory, for the caller's
/// kernels and copies. They are valid until the loan is published or closed. Does not block.
///
/// # Safety
/// No other thread uses `loan`; `address` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_device(
    loan: *mut pw_loan,
    address: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let range = handle::get_mut::<Stage>(loan)?.writing()?.device()?;
        store_bytes(address, argument::address(range.device_ptr()), length, range.bytes())
    })
}

/// Fills a loan with a copy of `length` bytes, as many as it has, in any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread uses `loan`; `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_write(loan: *mut pw_loan, bytes: *const c_void, length: usize) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (stage, bytes) = unsafe { (handle::get_mut::<Stage>(loan)?, array(bytes.cast::<u8>(), length, "bytes")?) };
        Ok(stage.writing()?.write(bytes)?)
    })
}

/// Sets the header of the sample, a copy of `length` bytes.
///
/// # Safety
/// No other thread uses `loan`; `header` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_set_header(loan: *mut pw_loan, header: *const c_void, length: usize) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (stage, header) =
            unsafe { (handle::get_mut::<Stage>(loan)?, array(header.cast::<u8>(), length, "header")?) };
        Ok(stage.writing()?.header(header)?)
    })
}

/// Notes that the sample is made from `input`: if that fails, this sample has failed, too.
///
/// # Safety
/// No other thread uses `loan` or closes `input`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_rests_on(loan: *mut pw_loan, input: *const pw_sample) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (stage, input) = unsafe { (handle::get_mut::<Stage>(loan)?, sample(input)?) };
        Ok(stage.writing()?.rests_on(input)?)
    })
}

/// Publishes what the CPU has written. Waits up to `timeout_ns` for subscribers that must not miss the sample; negative
/// means without end. Stores in `*sequence` how many samples this publisher had published before, unless it is null.
///
/// On success the loan is closed. On failure it is still the caller's, who may publish it again or close it, but can no
/// longer write it.
///
/// # Safety
/// No other thread uses `loan`; `sequence` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_publish(loan: *mut pw_loan, timeout_ns: i64, sequence: *mut u64) -> pw_status {
    call(|| {
        let published = handle::consume(loan, |stage: Stage| given_back(stage.filled().publish(timeout(timeout_ns))))?;
        // SAFETY: the caller's promise.
        unsafe { store_optional(sequence, published.sequence) };
        Ok(())
    })
}

/// Publishes what work on a stream writes, which is already enqueued, and does not wait for that work: receivers' streams
/// do. Null is the legacy default stream. Otherwise as `pw_loan_publish`.
///
/// # Safety
/// As `pw_loan_publish`; `stream` is a stream of the primary context of the topic's GPU (cudaStream_t or CUstream).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_publish_on(
    loan: *mut pw_loan,
    stream: *mut c_void,
    timeout_ns: i64,
    sequence: *mut u64,
) -> pw_status {
    call(|| {
        let published = handle::consume(loan, |stage: Stage| {
            let filled = stage.filled();
            let gpu = match stream_gpu(filled.domain(), filled.gpu()) {
                Ok(gpu) => gpu,
                Err(error) => return Err((error.into(), Stage::Filled(filled))),
            };
            // SAFETY: the caller's promise.
            let stream = unsafe { argument::stream(&gpu, stream) };
            given_back(filled.publish_on(stream, timeout(timeout_ns)))
        })?;
        // SAFETY: the caller's promise.
        unsafe { store_optional(sequence, published.sequence) };
        Ok(())
    })
}

fn given_back(published: Result<Published, Failed<Filled>>) -> Result<Published, (Failure, Stage)> {
    published.map_err(|failed| (failed.error.into(), Stage::Filled(*failed.value)))
}

/// Gives the block of a loan back that is not to be published. Null is ignored.
///
/// # Safety
/// No other thread uses the handle; enqueued work that writes the block is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_loan_close(loan: *mut pw_loan) -> pw_status {
    call(|| handle::close::<Stage>(loan))
}
