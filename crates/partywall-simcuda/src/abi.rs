//! Result codes, handles, structs and constants, as `cuda.h` has them on 64-bit Linux.

use std::ffi::c_int;

/// `CUdevice`: the ordinal of a device in this process.
pub(crate) type RawDevice = c_int;
/// `CUdeviceptr`.
pub(crate) type DevicePtr = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUmemoryPool`: opaque, never followed.
pub(crate) type Handle = usize;
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;
/// `CUipcMemHandle` and `CUipcEventHandle`, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IpcHandle(pub(crate) [u8; 64]);

/// `CUresult`: a number, because a caller may pass any number.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub(crate) u32);

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[allow(dead_code, reason = "the list is that of the codes a caller may see, injected ones included")]
        impl Code {
            $(#[doc = $text] pub const $name: Self = Self($number);)*

            /// Returns the driver's name of the code and its sentence, both NUL-terminated.
            pub(crate) fn texts(self) -> Option<(&'static str, &'static str)> {
                Some(match self {
                    Self::SUCCESS => ("CUDA_SUCCESS\0", "no error\0"),
                    $(Self::$name => (concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
                    _ => return None,
                })
            }
        }
    };
}

impl Code {
    pub(crate) const SUCCESS: Self = Self(0);

    /// Returns the code as an error unless it is success.
    pub(crate) fn ok(self) -> Result<(), Self> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self) }
    }
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    DEVICE_UNAVAILABLE = 46, "device busy or unavailable";
    NO_DEVICE = 100, "no device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping failed";
    UNMAP_FAILED = 206, "unmapping failed";
    ALREADY_MAPPED = 208, "resource already mapped";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error";
    PEER_ACCESS_UNSUPPORTED = 217, "no peer access between the devices";
    INVALID_PTX = 218, "the PTX cannot be compiled";
    UNSUPPORTED_PTX_VERSION = 222, "the PTX is newer than the driver";
    OPERATING_SYSTEM = 304, "a call of the operating system failed";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ASSERT = 710, "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the memory is already registered";
    HOST_MEMORY_NOT_REGISTERED = 713, "the pointer is not registered memory";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing one";
    STREAM_CAPTURE_WRONG_THREAD = 908, "the capture was begun by another thread";
    UNKNOWN = 999, "unknown error";
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemLocation {
    pub(crate) kind: u32,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemAllocationProp {
    pub(crate) kind: u32,
    pub(crate) requested_handle_types: u32,
    pub(crate) location: MemLocation,
    pub(crate) win32_handle_meta_data: usize,
    pub(crate) alloc_flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: u32,
}
