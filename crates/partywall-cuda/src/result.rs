//! Results of driver calls: the driver's number, its name, and the error that carries both with the call.
//!
//! The code stays a number. A newer driver may return a code that this crate has no name for, and a Rust enum that
//! holds such a value would be undefined behaviour.

use std::fmt;

/// A `CUresult`, as the driver returned it: 0 is success, everything else an error.
///
/// The constants are the codes that Partywall distinguishes or documents, held against generated bindings by a test.
/// The loaded driver names all others. Prints as `CUDA_ERROR_OUT_OF_MEMORY (2)`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CuResult(pub u32);

/// Free and total memory of one device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that an allocation could get, at the moment of the call.
    pub free: u64,
    /// Bytes of the device.
    pub total: u64,
}

/// A driver call that failed.
///
/// Prints as `cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)`, followed by the context where there is one. Many
/// codes come late: a failing call may report what earlier asynchronous work did (driver docs, "Note that this
/// function may also return error codes from previous, asynchronous launches").
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaError {
    /// The entry point that failed, without its version suffix.
    pub call: &'static str,
    /// What it returned.
    pub code: CuResult,
    /// The context of the call, if it helps: sizes, ids, the likely cause.
    pub context: Option<String>,
    /// For an allocation that ran out of memory: how much there was.
    pub memory: Option<MemoryInfo>,
}

impl CudaError {
    /// Returns the error of a call that returned `code`.
    pub fn new(call: &'static str, code: CuResult) -> Self {
        Self { call, code, context: None, memory: None }
    }

    /// Adds a text about the context of the call.
    #[must_use]
    pub fn with_context(mut self, context: impl Into<String>) -> Self {
        self.context = Some(context.into());
        self
    }

    /// Returns whether the process must be restarted to use the device again: see [`CuResult::is_sticky`].
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.code.is_sticky()
    }
}

/// Turns one code into `None`: a "no" of the driver that is no failure of the call.
pub(crate) fn none_if<T>(answer: Result<T, CudaError>, code: CuResult) -> Result<Option<T>, CudaError> {
    match answer {
        Err(error) if error.code == code => Ok(None),
        other => other.map(Some),
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.code)?;
        if let Some(context) = &self.context {
            write!(f, ": {context}")?;
        }
        if let Some(memory) = &self.memory {
            write!(f, " ({} of {} bytes are free)", memory.free, memory.total)?;
        }
        Ok(())
    }
}

impl std::error::Error for CudaError {}

impl CuResult {
    /// Returns whether this is `CUDA_SUCCESS`.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::SUCCESS
    }

    /// Returns whether the context is lost with this code: every later call in this process fails too, and only a
    /// restart of the process helps. Driver docs: "This leaves the process in an inconsistent state and any further
    /// CUDA work will return the same error. To continue using CUDA, the process must be terminated and relaunched."
    ///
    /// Also counted: uncorrectable ECC and NVLink errors, for which the docs do not promise that the context survives.
    /// Under MPS a neighbour's fault shows up with the same codes.
    #[must_use]
    pub fn is_sticky(self) -> bool {
        matches!(
            self,
            Self::ECC_UNCORRECTABLE
                | Self::NVLINK_UNCORRECTABLE
                | Self::CONTAINED
                | Self::ILLEGAL_ADDRESS
                | Self::LAUNCH_TIMEOUT
                | Self::ASSERT
                | Self::HARDWARE_STACK_ERROR
                | Self::ILLEGAL_INSTRUCTION
                | Self::MISALIGNED_ADDRESS
                | Self::INVALID_ADDRESS_SPACE
                | Self::INVALID_PC
                | Self::LAUNCH_FAILED
                | Self::TENSOR_MEMORY_LEAK
                | Self::MPS_CLIENT_TERMINATED
        )
    }

    /// Returns the driver's sentence for this code, if a driver is loaded in this process and knows the code.
    #[must_use]
    pub fn description(self) -> Option<&'static str> {
        crate::table::loaded()?.error_text(self)
    }

    /// Returns the name in `cuda.h`: from this crate's table, else from the loaded driver, else nothing.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        self.known_name().or_else(|| crate::table::loaded()?.error_name(self))
    }
}

impl fmt::Display for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "unknown CUDA result ({})", self.0),
        }
    }
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

macro_rules! results {
    ($($name:ident = $value:literal, $symbol:literal;)*) => {
        impl CuResult {
            $(
                #[doc = concat!("`", $symbol, "`.")]
                pub const $name: Self = Self($value);
            )*

            fn known_name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($symbol),)*
                    _ => None,
                }
            }
        }
    };
}

results! {
    SUCCESS = 0, "CUDA_SUCCESS";
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    MAP_FAILED = 205, "CUDA_ERROR_MAP_FAILED";
    ALREADY_MAPPED = 208, "CUDA_ERROR_ALREADY_MAPPED";
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
    PEER_ACCESS_UNSUPPORTED = 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX";
    NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE";
    UNSUPPORTED_PTX_VERSION = 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    CONTAINED = 226, "CUDA_ERROR_CONTAINED";
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    ASSERT = 710, "CUDA_ERROR_ASSERT";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR";
    ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION";
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
    INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE";
    INVALID_PC = 718, "CUDA_ERROR_INVALID_PC";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    TENSOR_MEMORY_LEAK = 721, "CUDA_ERROR_TENSOR_MEMORY_LEAK";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    MPS_CLIENT_TERMINATED = 810, "CUDA_ERROR_MPS_CLIENT_TERMINATED";
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_call_and_code() {
        let error = CudaError::new("cuMemCreate", CuResult::OUT_OF_MEMORY);
        assert_eq!(error.to_string(), "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
        let mut error = error.with_context("4096 bytes on GPU 0");
        error.memory = Some(MemoryInfo { free: 1, total: 2 });
        assert_eq!(
            error.to_string(),
            "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): 4096 bytes on GPU 0 (1 of 2 bytes are free)"
        );
    }

    #[test]
    fn a_code_of_a_newer_driver_stays_a_number() {
        assert_eq!(CuResult(4242).to_string(), "unknown CUDA result (4242)");
        assert_eq!(CuResult(4242).name(), None);
    }

    #[test]
    fn faults_are_sticky_and_refusals_are_not() {
        for code in [214, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 810] {
            assert!(CuResult(code).is_sticky(), "{}", CuResult(code));
        }
        for code in [0, 1, 2, 46, 201, 304, 400, 600, 701, 709, 712, 801, 807, 900, 919, 999] {
            assert!(!CuResult(code).is_sticky(), "{}", CuResult(code));
        }
    }
}
