//! Stream memory operations: a stream writes a word of memory, or waits until a word has reached a value.
//!
//! The word lies in device memory, or in host memory that is registered with CUDA and given by its device address. So
//! streams of several processes order each other without a host in between, and every process that can write the word
//! can release a stream that waits for it.
//!
//! Bound to the `_v2` entry points. The plain ones are an older interface, which drivers refuse unless their kernel
//! module was loaded with an option; the device attributes 92 and 93 are about that one. [`probe_device_word`]
//! and [`probe_host_word`] find out by trying whether the operations work here.
//!
//! # Traps
//!
//! - **The comparison is cyclic and signed**: a wait for `value` ends when `word - value`, wrapped to the width of the
//!   word, is not negative. A word that is more than half the number range ahead counts as behind: 2⁶⁴ − 1 does not
//!   end a wait for 1, since it is −1. Counters that shall be poisoned stay below the poison by less than 2⁶³.
//! - **A wait cannot be cancelled.** Only the value ends it, or the end of the process. A wait is therefore enqueued
//!   only on words that another process can still write when the expected writer is gone.
//! - **Device code that arrives behind a pending wait waits as well**, whatever stream it is for (measured, driver
//!   580). Loading a module blocks. A kernel whose function is first requested behind the wait does not run. A launch
//!   blocks if the kernel needs more local memory than any before it, and so does any kernel's first launch by the
//!   runtime API. A function that was requested before the wait is launched and runs at once. Everything that
//!   synchronises a device blocks too: freeing, copies of pageable memory, allocating (field reports). Load and warm up
//!   before the first wait.
//! - **The driver does not know this order.** A wait may stand in front of the very write that would end it if both are
//!   enqueued on one stream in that order, or on streams that share a hardware queue (vendor's documentation). Enqueue
//!   the write first, or have another process or the host do it.
//! - **Host memory**: a plain store of the CPU, by any process that maps the memory, ends a wait (measured, 20 µs).
//!   **Device memory**: only a stream's write does so reliably; copies from the host were reported not to.
//! - The work of a stream before a write is visible to every observer of the value: the write fences the stream.
#![allow(unsafe_code)] // driver calls

use std::sync::Arc;
use std::time::{Duration, Instant};

use partywall_os::map::SharedMap;

use crate::abi::{STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT};
use crate::{
    AccessError, Context, CuResult, CudaError, CurrentStream, DeviceBuffer, DeviceSlice, HostRegistration, Stream,
    StreamRef,
};

impl CurrentStream<'_> {
    /// Enqueues writing `value` to the first 4 bytes of `word`, which are aligned to 4, after everything that is on the
    /// stream now.
    ///
    /// # Errors
    /// The range is too short, misaligned or read-only; `CUDA_ERROR_NOT_SUPPORTED`, or `CUDA_ERROR_NOT_FOUND` from a
    /// driver that lacks the call.
    pub fn enqueue_write_u32(&self, word: DeviceSlice<'_>, value: u32) -> Result<(), AccessError> {
        word.require_writable()?;
        let pointer = first_word(word, 4)?;
        // SAFETY: the word is aligned device memory that may be written, by the promise of DeviceSlice; the stream is
        // live, and its context current.
        unsafe { self.driver().stream_write_value_32(self.handle(), pointer, value, STREAM_WRITE_VALUE_DEFAULT) }?;
        Ok(())
    }

    /// Enqueues writing `value` to the first 8 bytes of `word`, which are aligned to 8, after everything that is on the
    /// stream now. In one piece: no reader sees half of it.
    ///
    /// # Errors
    /// As for [`enqueue_write_u32`](Self::enqueue_write_u32).
    pub fn enqueue_write_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<(), AccessError> {
        word.require_writable()?;
        let pointer = first_word(word, 8)?;
        // SAFETY: as for `enqueue_write_u32`.
        unsafe { self.driver().stream_write_value_64(self.handle(), pointer, value, STREAM_WRITE_VALUE_DEFAULT) }?;
        Ok(())
    }

    /// Enqueues waiting until the first 4 bytes of `word`, aligned to 4, are at least `value`, by the cyclic comparison
    /// of [the module](self). What is enqueued later runs after that. While it waits the GPU runs others' work.
    ///
    /// # Errors
    /// The range is too short or misaligned; `CUDA_ERROR_NOT_SUPPORTED`, or `CUDA_ERROR_NOT_FOUND` from a driver that
    /// lacks the call.
    pub fn enqueue_wait_u32(&self, word: DeviceSlice<'_>, value: u32) -> Result<(), AccessError> {
        let pointer = first_word(word, 4)?;
        // SAFETY: the word is aligned device memory, by the promise of DeviceSlice; the stream is live, and its
        // context current.
        unsafe { self.driver().stream_wait_value_32(self.handle(), pointer, value, STREAM_WAIT_VALUE_GEQ) }?;
        Ok(())
    }

    /// The same for the first 8 bytes, aligned to 8.
    ///
    /// # Errors
    /// As for [`enqueue_wait_u32`](Self::enqueue_wait_u32).
    pub fn enqueue_wait_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<(), AccessError> {
        let pointer = first_word(word, 8)?;
        // SAFETY: as for `enqueue_wait_u32`.
        unsafe { self.driver().stream_wait_value_64(self.handle(), pointer, value, STREAM_WAIT_VALUE_GEQ) }?;
        Ok(())
    }
}

impl StreamRef<'_> {
    /// See [`CurrentStream::enqueue_write_u32`].
    ///
    /// # Errors
    /// The same.
    pub fn enqueue_write_u32(&self, word: DeviceSlice<'_>, value: u32) -> Result<(), AccessError> {
        self.current()?.enqueue_write_u32(word, value)
    }

    /// See [`CurrentStream::enqueue_write_u64`].
    ///
    /// # Errors
    /// The same.
    pub fn enqueue_write_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<(), AccessError> {
        self.current()?.enqueue_write_u64(word, value)
    }

    /// See [`CurrentStream::enqueue_wait_u32`].
    ///
    /// # Errors
    /// The same.
    pub fn enqueue_wait_u32(&self, word: DeviceSlice<'_>, value: u32) -> Result<(), AccessError> {
        self.current()?.enqueue_wait_u32(word, value)
    }

    /// See [`CurrentStream::enqueue_wait_u64`].
    ///
    /// # Errors
    /// The same.
    pub fn enqueue_wait_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<(), AccessError> {
        self.current()?.enqueue_wait_u64(word, value)
    }
}

/// The failures that a probe of memory operations can find.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The driver refuses them, or something that the probe needs.
    #[error(transparent)]
    Refused(#[from] AccessError),
    /// A stream went on although the word had not reached the value.
    #[error("a stream did not wait for a word that had not reached the value")]
    DidNotWait,
    /// The word had reached the value and the stream still waited when the time was over.
    #[error("a stream still waited {limit:?} after {writer} had written the {bits}-bit value")]
    StillWaits {
        /// The width of the word.
        bits: u32,
        /// The writer of the value.
        writer: &'static str,
        /// How long the probe waited.
        limit: Duration,
    },
}

impl ProbeError {
    /// Returns the error of a call on a machine whose memory operations do not work.
    #[must_use]
    pub fn into_refusal(self) -> CudaError {
        match self {
            Self::Refused(AccessError::Driver(error)) => error,
            other => CudaError::new("cuStreamWaitValue64", CuResult::NOT_SUPPORTED).with_context(other.to_string()),
        }
    }
}

impl From<CudaError> for ProbeError {
    fn from(error: CudaError) -> Self {
        Self::Refused(error.into())
    }
}

/// Proves by doing that streams of this context can write words in device memory and wait for them, in both widths.
///
/// Each wait is ended by the probe itself, and none of them is polled for longer than `limit`. A stream that waits
/// for ever all the same stays allocated with its word, because freeing them would wait too. The probe allocates, so it
/// belongs before the first wait for another process.
///
/// # Errors
/// [`ProbeError`].
pub fn probe_device_word(context: &Context, limit: Duration) -> Result<(), ProbeError> {
    let word = DeviceBuffer::new(context, WORD_BYTES)?;
    let probe = WordProbe { writer: Stream::new(context)?, waiter: Stream::new(context)?, limit };
    let result = probe.run(word.as_slice(), None);
    if probe.may_still_wait() {
        std::mem::forget((probe, word));
    }
    result
}

/// The same for a word in host memory, the first of `map`, which is registered with CUDA for as long as the probe takes
/// (0.4 ms per MiB, measured). Proves besides that a store of the host ends a wait. The word is 2 afterwards.
///
/// # Errors
/// [`ProbeError`], with [`ProbeError::Refused`] also for a mapping that cannot be registered, is read-only, or has no 8
/// bytes.
pub fn probe_host_word(context: &Context, map: &Arc<SharedMap>, limit: Duration) -> Result<(), ProbeError> {
    probe_registered_word(HostRegistration::shared(context, Arc::clone(map))?, 0, limit).map(drop)
}

/// Proves the same for memory that stays registered, and its word `offset` bytes from the beginning. The probe frees
/// nothing whose release would wait for running work.
///
/// # Errors
/// As [`probe_host_word`]. The registration is then gone; or, if a stream waits for ever, never given back.
pub fn probe_registered_word(
    registration: HostRegistration,
    offset: usize,
    limit: Duration,
) -> Result<HostRegistration, ProbeError> {
    let word = registration.slice(offset as u64, WORD_BYTES)?;
    word.require_writable()?;
    let host = registration
        .shared_words()
        .and_then(|map| map.slice::<u64>(offset, 1))
        .ok_or(AccessError::OutOfRange { offset: offset as u64, len: WORD_BYTES, available: registration.len() })?;
    let writer = Stream::new(registration.context())?;
    let waiter = Stream::new(registration.context())?;
    let probe = WordProbe { writer, waiter, limit };
    let result = probe.run(word, Some(&|value| host.set(0, value)));
    if probe.may_still_wait() {
        std::mem::forget((probe, registration));
        return Err(result.err().unwrap_or(ProbeError::StillWaits { bits: 64, writer: A_STREAM, limit }));
    }
    result.map(|()| registration)
}

/// Two streams, one of which waits for the other.
struct WordProbe {
    writer: Stream,
    waiter: Stream,
    limit: Duration,
}

impl WordProbe {
    /// Probes one word with arbitrary contents. `store` writes the word from the host, if the host can.
    fn run(&self, word: DeviceSlice<'_>, store: Option<&dyn Fn(u64)>) -> Result<(), ProbeError> {
        let writer = self.writer.as_ref();
        let waiter = self.waiter.as_ref();
        // The writes come first, so that a driver that refuses them leaves no stream waiting.
        writer.enqueue_write_u32(word, 1)?;
        waiter.enqueue_wait_u32(word, 1)?;
        self.wait_is_over(32, A_STREAM)?;
        writer.enqueue_write_u64(word, 1)?;
        waiter.enqueue_wait_u64(word, 1)?;
        self.wait_is_over(64, A_STREAM)?;

        waiter.enqueue_wait_u64(word, 2)?;
        // A stream that does not wait has the time of another operation to show it.
        writer.enqueue_write_u64(word, 1)?;
        self.ends(writer)?;
        let waited = !waiter.is_done()?;
        let released = match store {
            Some(store) => {
                store(2);
                self.wait_is_over(64, "the host")
            }
            None => Ok(()),
        };
        writer.enqueue_write_u64(word, 2)?;
        self.wait_is_over(64, A_STREAM)?;
        released?;
        if waited { Ok(()) } else { Err(ProbeError::DidNotWait) }
    }

    fn wait_is_over(&self, bits: u32, writer: &'static str) -> Result<(), ProbeError> {
        if self.ends(self.waiter.as_ref())? {
            Ok(())
        } else {
            Err(ProbeError::StillWaits { bits, writer, limit: self.limit })
        }
    }

    /// Returns whether the work on the stream ends within the limit.
    fn ends(&self, stream: StreamRef<'_>) -> Result<bool, CudaError> {
        let deadline = Instant::now() + self.limit;
        loop {
            match stream.is_done()? {
                true => return Ok(true),
                false if Instant::now() > deadline => return Ok(false),
                false => std::thread::sleep(LOOK_AGAIN),
            }
        }
    }

    /// Returns whether freeing the word could block for good.
    fn may_still_wait(&self) -> bool {
        self.waiter.as_ref().is_done() == Ok(false)
    }
}

/// Returns the address of the word that a range begins with.
pub(crate) fn first_word(range: DeviceSlice<'_>, bytes: u64) -> Result<u64, AccessError> {
    let word = range.slice(0, bytes)?;
    word.elements(bytes)?;
    Ok(word.device_ptr())
}

const A_STREAM: &str = "a stream";

const WORD_BYTES: u64 = 8;

/// How often a stream is polled: a wait that ends does so within 20 µs of the value.
const LOOK_AGAIN: Duration = Duration::from_micros(20);
