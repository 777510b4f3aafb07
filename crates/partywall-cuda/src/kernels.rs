//! The embedded kernels: a test pattern, its check, a change that a reader can see, and a read for timing.
//!
//! Their source is `kernels/partywall.cu`; the PTX beside it is what NVRTC 12.4 makes of that (`cargo xtask ptx`), for
//! compute capability 7.0 in PTX ISA 8.4, so that drivers from 550 on load it.
#![allow(unsafe_code)] // launches with parameters that match the kernels

use std::ffi::{CStr, c_void};
use std::sync::Mutex;

use partywall_os::lock::IgnorePoison;

use crate::memop::first_word;
use crate::{
    AccessError, Context, CuResult, CudaError, DeviceAttribute, DeviceBuffer, DeviceSlice, Function, LaunchConfig,
    Module, PinnedBuffer, Stream, StreamRef,
};

/// The embedded kernels, loaded into one context and launched once each. `Send` and `Sync`.
///
/// **Load before any stream waits for another process.** Loading behind such a wait blocks until it ends (measured).
/// A loaded kernel runs at once, whatever other streams wait for.
///
/// The pattern is one 32-bit word an element, [`expected`]. Ranges are therefore multiples of 4 bytes at multiples of
/// 4, of 16 for [`Kernels::enqueue_read`].
#[derive(Debug)]
pub struct Kernels {
    fill: Function,
    verify: Function,
    double: Function,
    read: Function,
    /// Blocks that fill the device; more are of no use to loops that stride over the grid.
    most_blocks: u32,
    /// The word to which `read` would write its result; it is never read.
    sink: DeviceBuffer,
    /// Serialises checks.
    result: Mutex<VerifyResult>,
}

/// The word that `verify` reports in, on the device, and its copy on the host. The copy is page-locked and as
/// long-lived as the kernels: a copy that a failing stream leaves behind cannot land in memory that means something
/// else by then.
#[derive(Debug)]
struct VerifyResult {
    device: DeviceBuffer,
    host: PinnedBuffer,
}

/// Returns the word that [`Kernels::enqueue_fill`] writes at an index, for checking or making the pattern on the host.
#[must_use]
pub const fn expected(index: u64) -> u32 {
    // The kernel, too, uses the low 32 bits of the index.
    (index as u32).wrapping_mul(2).wrapping_add(1337) ^ 0xDEAD_BEEF
}

impl Kernels {
    /// Loads the kernels into a context, launches each once on no data and waits for that. Host-synchronous; the first
    /// time on a machine the driver compiles the PTX, after that it has it in its cache.
    ///
    /// # Errors
    /// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION` if the driver is older than 550; out of memory; a lost context.
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::from_ptx(context, PTX).map_err(|error| match error.code {
            CuResult::UNSUPPORTED_PTX_VERSION => error.with_context("the kernels need driver 550 (CUDA 12.4) or newer"),
            _ => error,
        })?;
        let processors = context.device().attribute(DeviceAttribute::MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let kernels = Self {
            fill: module.function(c"pw_fill")?,
            verify: module.function(c"pw_verify")?,
            double: module.function(c"pw_double")?,
            read: module.function(c"pw_read")?,
            most_blocks: processors.max(1).saturating_mul(BLOCKS_PER_PROCESSOR),
            sink: DeviceBuffer::new(context, 16)?,
            result: Mutex::new(VerifyResult {
                device: DeviceBuffer::new(context, RESULT_BYTES as u64)?,
                host: PinnedBuffer::new(context, RESULT_BYTES as u64)?,
            }),
        };
        kernels.warm_up(context)?;
        Ok(kernels)
    }

    /// Enqueues writing the pattern: word `i` of `data` becomes [`expected`]`(i)`.
    ///
    /// # Errors
    /// The range is read-only or not of whole aligned words; the driver refuses.
    pub fn enqueue_fill(&self, stream: StreamRef<'_>, data: DeviceSlice<'_>) -> Result<(), AccessError> {
        data.require_writable()?;
        self.launch_over(&self.fill, stream, data, 4, &mut [])
    }

    /// Enqueues doubling every word of `data`, wrapping at 32 bits.
    ///
    /// # Errors
    /// As for [`Kernels::enqueue_fill`].
    pub fn enqueue_double(&self, stream: StreamRef<'_>, data: DeviceSlice<'_>) -> Result<(), AccessError> {
        data.require_writable()?;
        self.launch_over(&self.double, stream, data, 4, &mut [])
    }

    /// Enqueues reading all of `data` once, at the full speed of the memory, keeping nothing.
    ///
    /// # Errors
    /// The range is not of whole aligned 16-byte words; the driver refuses.
    pub fn enqueue_read(&self, stream: StreamRef<'_>, data: DeviceSlice<'_>) -> Result<(), AccessError> {
        let mut sink = self.sink.as_slice().device_ptr();
        self.launch_over(&self.read, stream, data, 16, &mut [(&raw mut sink).cast()])
    }

    /// Returns the index of the first word of `data` that is not `factor` times the pattern (wrapping at 32 bits), or
    /// nothing if all are: factor 1 after a fill, 2 after one doubling.
    ///
    /// In stream order, and host-synchronous: it waits for the stream. Threads that check through the same `Kernels`
    /// wait for each other.
    ///
    /// # Errors
    /// The range is not of whole aligned words, the stream is captured, or what the stream's work failed with.
    pub fn verify(
        &self,
        stream: StreamRef<'_>,
        data: DeviceSlice<'_>,
        factor: u32,
    ) -> Result<Option<u64>, AccessError> {
        data.elements(4)?;
        stream.require_not_capturing()?;
        // A panicked thread leaves no relevant state: each check sets the word again.
        let mut result = self.result.lock().ignore_poison();
        let VerifyResult { device, host } = &mut *result;
        let enqueued = stream.enqueue_set(device.as_slice(), 0xFF).and_then(|()| {
            self.enqueue_verify(stream, data, factor, device.as_slice())?;
            // SAFETY: `host` is locked and untouched until the wait below; it outlives a failing stream, see its type.
            unsafe { stream.enqueue_copy_to_host(host, device.as_slice()) }
        });
        // Wait even after a partial enqueue, because the caller may free the data.
        let waited = stream.synchronize();
        enqueued?;
        waited?;
        let mut bytes = [0; RESULT_BYTES];
        bytes.copy_from_slice(host);
        let first_bad = u64::from_ne_bytes(bytes);
        Ok((first_bad != u64::MAX).then_some(first_bad))
    }

    /// Enqueues a check that lowers the 64-bit word at the beginning of `first_bad` to the index of the first word of
    /// `data` that is not `factor` times the pattern. Set it to all ones before; several checks may lower one word.
    ///
    /// # Errors
    /// A range is not of whole aligned words, or `first_bad` is too short or read-only; the driver refuses.
    pub fn enqueue_verify(
        &self,
        stream: StreamRef<'_>,
        data: DeviceSlice<'_>,
        factor: u32,
        first_bad: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        first_bad.require_writable()?;
        let mut factor = factor;
        let mut first_bad = first_word(first_bad, RESULT_BYTES as u64)?;
        self.launch_over(&self.verify, stream, data, 4, &mut [(&raw mut factor).cast(), (&raw mut first_bad).cast()])
    }

    /// Returns the context in which the kernels are loaded.
    #[must_use]
    pub fn context(&self) -> &Context {
        // Every function is of the same module.
        self.fill.module().context()
    }

    /// Launches a kernel whose first two parameters are `data` and the number of its elements.
    fn launch_over(
        &self,
        kernel: &Function,
        stream: StreamRef<'_>,
        data: DeviceSlice<'_>,
        element: u64,
        more: &mut [*mut c_void],
    ) -> Result<(), AccessError> {
        let mut count = data.elements(element)?;
        let mut pointer = data.device_ptr();
        let mut parameters = vec![(&raw mut pointer).cast(), (&raw mut count).cast()];
        parameters.extend_from_slice(more);
        let blocks = count.div_ceil(u64::from(THREADS_PER_BLOCK)).clamp(1, u64::from(self.most_blocks));
        let config = LaunchConfig {
            // At most `most_blocks`, which is 32 bits wide.
            grid: [blocks as u32, 1, 1],
            block: [THREADS_PER_BLOCK, 1, 1],
            shared_bytes: 0,
        };
        // SAFETY: each kernel here takes a 64-bit pointer and a 64-bit count, and `more` is what its caller above
        // knows it to take besides. The loops stay below the count, inside `data`; what else they write is a word that
        // `self` owns, or the caller's own, which was checked. A range that is unmapped too early faults on the device,
        // see `Mapping`.
        unsafe { kernel.launch(stream, config, &mut parameters) }?;
        Ok(())
    }

    /// Launches everything once, so that no later launch waits for code to arrive. The driver that was measured needs
    /// that only of the memset of a check, which is one of its own kernels; others may load code at the first launch.
    fn warm_up(&self, context: &Context) -> Result<(), CudaError> {
        let stream = Stream::new(context)?;
        let nothing = self.sink.slice(0, 0);
        let warmed = nothing.and_then(|nothing| {
            self.enqueue_fill(stream.as_ref(), nothing)?;
            self.enqueue_double(stream.as_ref(), nothing)?;
            self.enqueue_read(stream.as_ref(), nothing)?;
            self.verify(stream.as_ref(), nothing, 1)
        });
        match warmed {
            Ok(_) => Ok(()),
            Err(AccessError::Driver(error)) => Err(error),
            // The range, its alignment and the stream are our own and valid.
            Err(other) => Err(CudaError::new("cuLaunchKernel", CuResult::UNKNOWN).with_context(other.to_string())),
        }
    }
}

const PTX: &CStr = ptx(concat!(include_str!("../kernels/partywall.ptx"), "\0"));

/// Returns checked-in PTX as the driver takes it: closed by a NUL, which the caller has added.
pub(crate) const fn ptx(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("the PTX contains a NUL byte"),
    }
}

const THREADS_PER_BLOCK: u32 = 256;

/// 2,048 resident threads a multiprocessor at most, on every GPU so far.
const BLOCKS_PER_PROCESSOR: u32 = 8;

/// The index that `verify` reports is 64 bits wide.
const RESULT_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ptx_has_the_kernels_and_runs_on_old_drivers() {
        let ptx = PTX.to_str().unwrap();
        for kernel in ["pw_fill", "pw_verify", "pw_double", "pw_read"] {
            assert!(ptx.contains(&format!(".visible .entry {kernel}(")), "{kernel}");
        }
        assert!(ptx.contains("\n.version 8.4\n") && ptx.contains("\n.target sm_70\n"));
    }

    #[test]
    fn memory_of_other_processes_is_never_read_through_the_non_coherent_path() {
        assert!(!PTX.to_str().unwrap().contains(".nc"));
    }

    #[test]
    fn pattern_is_checked_on_the_host() {
        assert_eq!(expected(0), 1337 ^ 0xDEAD_BEEF);
        assert_eq!(expected(1), 1339 ^ 0xDEAD_BEEF);
        assert_eq!(expected(1 << 31), expected(0), "the pattern repeats after 2^31 words");
        assert_eq!(expected(u64::MAX), (u32::MAX - 1).wrapping_add(1337) ^ 0xDEAD_BEEF);
    }
}
