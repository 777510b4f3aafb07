//! Copies from the host to device memory at full speed, piece by piece.
#![allow(unsafe_code)] // asynchronous copies

use crate::{AccessError, Context, CudaError, DeviceSlice, Event, PinnedBuffer, Stream};

/// Copies host bytes to the device through two page-locked buffers, on a stream of its own: while the device copies
/// from one, the host fills the other. `Send`, for one thread at a time.
///
/// Dropping it waits for the copies that are under way, which complete without help.
#[derive(Debug)]
pub struct Upload {
    stream: Stream,
    slots: [UploadSlot; 2],
    current: usize,
}

#[derive(Debug)]
struct UploadSlot {
    buffer: PinnedBuffer,
    copied: Event,
}

impl Upload {
    /// Creates two buffers of `bytes` bytes each.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the host cannot lock so much memory; `CUDA_ERROR_INVALID_VALUE` for 0 bytes.
    pub fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let slot = || Ok(UploadSlot { buffer: PinnedBuffer::new(context, bytes)?, copied: Event::new(context)? });
        Ok(Self { slots: [slot()?, slot()?], stream: Stream::new(context)?, current: 0 })
    }

    /// Returns the buffer for the next pieces. Waits until its last copy is complete.
    ///
    /// # Errors
    /// The error of an earlier copy.
    pub fn buffer(&mut self) -> Result<&mut [u8], CudaError> {
        let slot = &mut self.slots[self.current];
        // An event that was never recorded counts as reached.
        slot.copied.synchronize()?;
        Ok(&mut slot.buffer)
    }

    /// Enqueues copies of parts of the buffer to the device: from each offset, as many bytes as the destination has.
    /// Returns before they are complete; the next [`Upload::buffer`] is the other one.
    ///
    /// # Errors
    /// A part is outside the buffer, a destination is read-only, or the driver refuses.
    pub fn submit(&mut self, parts: &[(usize, DeviceSlice<'_>)]) -> Result<(), AccessError> {
        let slot = &self.slots[self.current];
        for (start, destination) in parts {
            let available = slot.buffer.len();
            let end = usize::try_from(destination.len()).ok().and_then(|len| start.checked_add(len));
            let source = end.and_then(|end| slot.buffer.get(*start..end)).ok_or(AccessError::OutOfRange {
                offset: *start as u64,
                len: destination.len(),
                available: available as u64,
            })?;
            // SAFETY: the buffer is not given out again before `copied` is reached, and neither freed: `drop` waits
            // for the stream, which is ours alone, so that no other code captures it.
            unsafe { self.stream.as_ref().enqueue_copy_from_host(*destination, source) }?;
        }
        slot.copied.record(self.stream.as_ref())?;
        self.current = 1 - self.current;
        Ok(())
    }

    /// Waits until all copies are complete.
    ///
    /// # Errors
    /// The error of a copy.
    pub fn finish(self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // If the wait fails, the context is lost, and the copies with it.
        let waited = self.stream.synchronize();
        self.stream.as_ref().context().record_drop(waited);
    }
}
