//! The driver's entry points, looked up once in `libcuda.so.1` at run time, and called through thin checked methods.
//!
//! These are the lower two of the crate's three levels: each entry point is a function pointer in [`Entries`] and a
//! method of [`Driver`] that turns the driver's code into a `Result` whose error names the call. The methods are unsafe
//! and private to the crate; the other modules are the safe owners.
//!
//! Where `cuda.h` redirects a name to a `_v2` symbol, the `_v2` symbol is bound: the plain one is an older function.
#![allow(unsafe_code)] // loads the driver, calls through its function pointers

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use partywall_os::{environment, lock::IgnorePoison};

use crate::abi::{
    AllocationHandle, BatchMemOpNodeParams, DevicePtr, Handle, HostFunction, IpcHandle, MemAccessDesc,
    MemAllocationProp, RawDevice, RawUuid,
};
use crate::{CuResult, CudaError};

/// The CUDA driver of this process.
///
/// Loaded by [`Driver::load`], never unloaded. `Send` and `Sync`: the driver's functions may be called from any thread.
pub struct Driver {
    entries: Entries,
    library: String,
    simulated: bool,
    /// The number of requested copies.
    copies: AtomicU64,
    /// The first failure of a `Drop` outside of contexts, kept for [`Driver::take_drop_error`].
    drop_error: Mutex<Option<CudaError>>,
    /// Keeps the function pointers valid; `None` if they are the program's own.
    _keep: Option<Library>,
}

/// The reason why this process has no usable CUDA driver.
///
/// This is not a fault of the caller: it is the normal result on a machine without a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic linker did not find or could not load the library: no driver is installed, or a container was
    /// started without it.
    #[error("cannot load the CUDA driver library {tried}: {reason}")]
    Library {
        /// The name or path that was tried.
        tried: String,
        /// The text of `dlerror`, without the name.
        reason: String,
    },
    /// The library lacks a required entry point: it is older than this crate supports, or it is a stub.
    #[error("the CUDA driver library {library} has no entry point {symbol}")]
    MissingSymbol {
        /// The name or path of the library.
        library: String,
        /// The entry point, with its version suffix.
        symbol: &'static str,
    },
    /// [`Driver::LIBRARY_VARIABLE`] is [`Driver::SIMULATED`], and the simulated driver is not installed.
    #[error(
        "{variable}={SIMULATED} chooses the simulated CUDA driver: the program partywall-lab contains it, and there is \
         no {SIMULATOR} beside this program or on PATH",
        variable = Driver::LIBRARY_VARIABLE,
        SIMULATED = Driver::SIMULATED
    )]
    NoSimulator,
}

/// The version of the CUDA driver API (12.4 for driver 550).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverVersion {
    /// 12 in 12.4.
    pub major: u32,
    /// 4 in 12.4.
    pub minor: u32,
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Driver {
    /// The environment variable that selects a driver other than `libcuda.so.1`: the path of a library, or
    /// [`SIMULATED`](Self::SIMULATED).
    pub const LIBRARY_VARIABLE: &'static str = "PARTYWALL_LIBCUDA";

    /// The value of [`LIBRARY_VARIABLE`](Self::LIBRARY_VARIABLE) that selects the simulated driver. The program
    /// `partywall-lab` contains it. Other programs load `libsimcuda.so`, from their own directory or from one on
    /// `PATH`.
    pub const SIMULATED: &'static str = "simulated";

    /// Makes [`SIMULATED`](Self::SIMULATED) select the driver whose functions `find` returns. Only the first call
    /// counts. Call it before [`load`](Self::load).
    ///
    /// # Safety
    /// For each name `find` returns null, or the address of a function with the signature that `cuda.h` gives to the
    /// name, which stays valid until the process ends.
    pub unsafe fn link_simulated(find: fn(&CStr) -> *const c_void) {
        LINKED.get_or_init(|| find);
    }

    /// Returns the driver of this process. The first call loads it, which takes a few milliseconds and does not
    /// initialise CUDA. Later calls return the same result, also if it is an error.
    ///
    /// # Errors
    /// The library or one of its entry points is missing.
    pub fn load() -> Result<&'static Self, LoadError> {
        LOADED
            .get_or_init(|| {
                let library = environment::place(Self::LIBRARY_VARIABLE).unwrap_or_else(|| OsString::from(LIBRARY));
                if library == Self::SIMULATED { Self::simulated() } else { Self::open(&library) }
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Initialises CUDA in this process, which takes about 210 ms the first time (measured) and almost no time later.
    /// The constructors of [`Device`] call it.
    ///
    /// In a child that was forked after this call, every call fails with `CUDA_ERROR_NOT_INITIALIZED`, and the child's
    /// copies of the GPU files keep the parent's memory alive.
    ///
    /// # Errors
    /// `CUDA_ERROR_NO_DEVICE`, or a kernel driver that does not match the library.
    ///
    /// [`Device`]: crate::Device
    pub fn initialize(&self) -> Result<(), CudaError> {
        // SAFETY: takes a number; flags must be 0, which they are.
        unsafe { self.init(0) }
    }

    /// Returns whether CUDA is initialised in this process, by this crate or by another library. Loads no driver and
    /// initialises nothing.
    ///
    /// A forked child of a process that has initialised CUDA counts as not initialised; it cannot use CUDA.
    #[must_use]
    pub fn is_initialized() -> bool {
        if loaded().is_none() {
            let library = environment::place(Self::LIBRARY_VARIABLE).unwrap_or_else(|| OsString::from(LIBRARY));
            // SAFETY: with this flag the linker only looks for a library that is loaded already: no initialiser runs.
            if unsafe { Library::open(Some(&library), RTLD_NOW | RTLD_NOLOAD) }.is_err() {
                return false;
            }
        }
        let mut count: c_int = 0;
        // The library is loaded, so this only looks up its entry points.
        Self::load().is_ok_and(|driver| {
            // SAFETY: the pointer is to a live c_int.
            let counted = unsafe { driver.device_get_count(&mut count) };
            counted.err().is_none_or(|error| error.code != CuResult::NOT_INITIALIZED)
        })
    }

    /// Returns the version of the driver API that this driver offers.
    ///
    /// # Errors
    /// The driver's error; only a null argument is documented.
    pub fn version(&self) -> Result<DriverVersion, CudaError> {
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { self.driver_get_version(&mut version) }?;
        let version = version.unsigned_abs();
        Ok(DriverVersion { major: version / 1000, minor: version % 1000 / 10 })
    }

    /// Returns the library that was loaded, as the dynamic linker was given it, or [`SIMULATED`](Self::SIMULATED).
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Returns whether this is Partywall's simulated driver, which has a function that the vendor's lacks.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.simulated
    }

    /// Returns how many copies this crate has requested in this process. Tests use it to show that an operation makes
    /// no copy.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// Counts one copy. Call it with each.
    pub(crate) fn count_copy(&self) {
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the first failure that a `Drop` of memory of a NUMA node met since the last call, as
    /// [`Context::take_drop_error`](crate::Context::take_drop_error) does for everything that has a context.
    #[must_use]
    pub fn take_drop_error(&self) -> Option<CudaError> {
        self.drop_error.lock().ignore_poison().take()
    }

    /// Stores the failure of a `Drop`, if it is the first one.
    pub(crate) fn record_drop(&self, result: Result<(), CudaError>) {
        if let Err(error) = result {
            self.drop_error.lock().ignore_poison().get_or_insert(error);
        }
    }

    /// Loads one library. Separate from [`Driver::load`], so that a test of a failure does not affect the process.
    fn open(library: &OsStr) -> Result<Self, LoadError> {
        let name = library.to_string_lossy().into_owned();
        // SAFETY: running the library's initialisers is what loading the driver means. The name is that of the
        // vendor's driver, or was chosen by the environment of this process.
        let loaded = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            let text = linker_text(&error);
            let reason = text.strip_prefix(&format!("{name}: ")).unwrap_or(&text).to_owned();
            LoadError::Library { tried: name.clone(), reason }
        })?;
        let find = |symbol: &CStr| {
            // SAFETY: read as a plain address, not called; `resolve` gives it its type.
            let found = unsafe { loaded.get::<*const c_void>(symbol) };
            found.map_or(std::ptr::null(), |symbol| *symbol)
        };
        // SAFETY: the addresses come from a library that is the CUDA driver or stands in for it, under the names that
        // cuda.h gives to these signatures.
        let found = unsafe { Self::from_functions(name, find) }?;
        Ok(Self { _keep: Some(loaded), ..found })
    }

    /// Returns the simulated driver: the one that is part of the program, else the installed library.
    fn simulated() -> Result<Self, LoadError> {
        if let Some(find) = LINKED.get() {
            // SAFETY: `link_simulated`'s caller has promised it.
            return unsafe { Self::from_functions(Self::SIMULATED.to_owned(), find) };
        }
        let mut installed = environment::program_directories().into_iter().map(|directory| directory.join(SIMULATOR));
        Self::open(installed.find(|library| library.is_file()).ok_or(LoadError::NoSimulator)?.as_os_str())
    }

    /// # Safety
    /// As for [`Entries::resolve`].
    unsafe fn from_functions(library: String, find: impl Fn(&CStr) -> *const c_void) -> Result<Self, LoadError> {
        let simulated = !find(c"simcuda_version").is_null();
        // SAFETY: the caller's promise.
        match unsafe { Entries::resolve(find) } {
            Ok(entries) => Ok(Self {
                entries,
                library,
                simulated,
                copies: AtomicU64::new(0),
                drop_error: Mutex::default(),
                _keep: None,
            }),
            Err(symbol) => Err(LoadError::MissingSymbol { library, symbol }),
        }
    }

    /// Returns the driver's own name for a code.
    pub(crate) fn error_name(&self, code: CuResult) -> Option<&'static str> {
        // SAFETY: the pointer is to a live pointer; on success the driver stores the address of a static string there.
        unsafe { static_text(|text| self.get_error_name(code, text)) }
    }

    /// Returns the driver's own sentence for a code.
    pub(crate) fn error_text(&self, code: CuResult) -> Option<&'static str> {
        // SAFETY: as above.
        unsafe { static_text(|text| self.get_error_string(code, text)) }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("library", &self.library).finish_non_exhaustive()
    }
}

/// Returns the driver if this process has loaded it. Does not load it.
pub(crate) fn loaded() -> Option<&'static Driver> {
    LOADED.get()?.as_ref().ok()
}

/// # Safety
/// On success `look_up` leaves null, or stores a NUL-terminated string that is never freed: the driver is never
/// unloaded.
unsafe fn static_text(look_up: impl FnOnce(*mut *const c_char) -> Result<(), CudaError>) -> Option<&'static str> {
    let mut text = std::ptr::null();
    look_up(&raw mut text).ok()?;
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// Returns the text of `dlerror`, which libloading keeps as the source of its own error.
fn linker_text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn check(call: &'static str, code: CuResult) -> Result<(), CudaError> {
    if code.is_success() { Ok(()) } else { Err(CudaError::new(call, code)) }
}

/// Returns the name of a call for errors: the symbol without the suffix of its version.
const fn unversioned(symbol: &'static str) -> &'static str {
    match symbol.as_bytes() {
        [name @ .., b'_', b'v', b'2' | b'3'] => symbol.split_at(name.len()).0,
        _ => symbol,
    }
}

/// Generates the struct of function pointers, its lookup, and the checked methods of [`Driver`] from one list.
///
/// A line contains: need, method, symbol, arguments. `required` symbols must exist. A call of an `optional` one that is
/// missing fails with `CUDA_ERROR_NOT_FOUND`.
macro_rules! entry_points {
    (@pointer required ($($type:ty),*)) => { unsafe extern "C" fn($($type),*) -> CuResult };
    (@pointer optional ($($type:ty),*)) => { Option<unsafe extern "C" fn($($type),*) -> CuResult> };
    (@found required $address:ident, $symbol:literal, $pointer:ty) => {{
        if $address.is_null() {
            return Err($symbol);
        }
        // SAFETY: not null, and of this signature by the promise of `resolve`'s caller.
        unsafe { std::mem::transmute::<*const c_void, $pointer>($address) }
    }};
    (@found optional $address:ident, $symbol:literal, $pointer:ty) => {
        // SAFETY: null becomes None; else of this signature by the promise of `resolve`'s caller.
        unsafe { std::mem::transmute::<*const c_void, $pointer>($address) }
    };
    (@call required $entry:expr, $call:expr, ($($argument:ident),*)) => {
        // SAFETY: the method's caller upholds the function's contract.
        check($call, unsafe { $entry($($argument),*) })
    };
    (@call optional $entry:expr, $call:expr, ($($argument:ident),*)) => {
        match $entry {
            // SAFETY: the method's caller upholds the function's contract.
            Some(entry) => check($call, unsafe { entry($($argument),*) }),
            None => Err(CudaError::new($call, CuResult::NOT_FOUND).with_context("this driver has no such entry point")),
        }
    };
    ($($page:literal { $(
        $(#[$only:meta])* $need:ident $method:ident = $symbol:literal ($($argument:ident: $type:ty),* $(,)?);
    )* })*) => {
        /// The function pointers, grouped as in the vendor's documentation.
        struct Entries {
            $($($(#[$only])* $method: entry_points!(@pointer $need ($($type),*)),)*)*
        }

        impl Entries {
            /// Looks up every symbol. The error is the first required symbol that is missing.
            ///
            /// # Safety
            /// `find` returns null or the address of a function with the signature that `cuda.h` gives to the name,
            /// which stays valid for as long as the entries are used.
            unsafe fn resolve(find: impl Fn(&CStr) -> *const c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($($(#[$only])* $method: {
                        let name = const {
                            match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => panic!("a symbol contains a NUL byte"),
                            }
                        };
                        let address = find(name);
                        entry_points!(@found $need address, $symbol, entry_points!(@pointer $need ($($type),*)))
                    },)*)*
                })
            }
        }

        impl Driver {
            $($(
                #[doc = concat!(
                    "[`", $symbol, "`](https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__", $page, ".html)."
                )]
                ///
                /// # Safety
                /// The contract of the driver's function: pointers are valid for what it reads and writes, handles
                /// are live and came from the driver.
                #[allow(clippy::too_many_arguments)] // the driver's signatures
                $(#[$only])*
                pub(crate) unsafe fn $method(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    entry_points!(@call $need (self.entries.$method), const { unversioned($symbol) }, ($($argument),*))
                }
            )*)*
        }
    };
}

entry_points! {
    "INITIALIZE" {
        required init = "cuInit" (flags: u32);
    }
    "VERSION" {
        required driver_get_version = "cuDriverGetVersion" (version: *mut c_int);
    }
    "ERROR" {
        optional get_error_name = "cuGetErrorName" (code: CuResult, text: *mut *const c_char);
        optional get_error_string = "cuGetErrorString" (code: CuResult, text: *mut *const c_char);
    }
    "DEVICE" {
        required device_get_count = "cuDeviceGetCount" (count: *mut c_int);
        required device_get = "cuDeviceGet" (device: *mut RawDevice, ordinal: c_int);
        required device_get_name = "cuDeviceGetName" (name: *mut c_char, length: c_int, device: RawDevice);
        required device_get_uuid = "cuDeviceGetUuid_v2" (uuid: *mut RawUuid, device: RawDevice);
        required device_total_mem = "cuDeviceTotalMem_v2" (bytes: *mut usize, device: RawDevice);
        required device_get_attribute = "cuDeviceGetAttribute" (value: *mut c_int, attribute: u32, device: RawDevice);
    }
    "PEER__ACCESS" {
        required device_can_access_peer = "cuDeviceCanAccessPeer" (can: *mut c_int, device: RawDevice, peer: RawDevice);
        optional device_get_p2p_attribute = "cuDeviceGetP2PAttribute" (
            value: *mut c_int, attribute: u32, from: RawDevice, to: RawDevice,
        );
    }
    "PRIMARY__CTX" {
        required primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut Handle, device: RawDevice);
        required primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" (device: RawDevice);
        required primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (
            device: RawDevice, flags: *mut u32, active: *mut c_int,
        );
    }
    "CTX" {
        required ctx_push_current = "cuCtxPushCurrent_v2" (context: Handle);
        required ctx_pop_current = "cuCtxPopCurrent_v2" (context: *mut Handle);
        required ctx_set_current = "cuCtxSetCurrent" (context: Handle);
        required ctx_get_current = "cuCtxGetCurrent" (context: *mut Handle);
        required ctx_get_device = "cuCtxGetDevice" (device: *mut RawDevice);
        required ctx_synchronize = "cuCtxSynchronize" ();
        required ctx_get_limit = "cuCtxGetLimit" (value: *mut usize, limit: u32);
    }
    "MEM" {
        required mem_get_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
        required mem_alloc = "cuMemAlloc_v2" (pointer: *mut DevicePtr, bytes: usize);
        #[cfg(feature = "experiment")]
        optional mem_alloc_managed = "cuMemAllocManaged" (pointer: *mut DevicePtr, bytes: usize, flags: u32);
        required mem_free = "cuMemFree_v2" (pointer: DevicePtr);
        required mem_host_alloc = "cuMemHostAlloc" (pointer: *mut *mut c_void, bytes: usize, flags: u32);
        required mem_free_host = "cuMemFreeHost" (pointer: *mut c_void);
        optional mem_get_address_range = "cuMemGetAddressRange_v2" (
            base: *mut DevicePtr, bytes: *mut usize, address: DevicePtr,
        );
        optional mem_host_get_flags = "cuMemHostGetFlags" (flags: *mut u32, pointer: *mut c_void);
        optional mem_host_register = "cuMemHostRegister_v2" (pointer: *mut c_void, bytes: usize, flags: u32);
        optional mem_host_unregister = "cuMemHostUnregister" (pointer: *mut c_void);
        optional mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (
            device: *mut DevicePtr, pointer: *mut c_void, flags: u32,
        );
        optional ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut IpcHandle, pointer: DevicePtr);
        optional ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" (pointer: *mut DevicePtr, handle: IpcHandle, flags: u32);
        optional ipc_close_mem_handle = "cuIpcCloseMemHandle" (pointer: DevicePtr);
        required memset_d8_async = "cuMemsetD8Async" (pointer: DevicePtr, value: u8, bytes: usize, stream: Handle);
        required memcpy_htod_async = "cuMemcpyHtoDAsync_v2" (
            to: DevicePtr, from: *const c_void, bytes: usize, stream: Handle,
        );
        required memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2" (
            to: *mut c_void, from: DevicePtr, bytes: usize, stream: Handle,
        );
        required memcpy_dtod_async = "cuMemcpyDtoDAsync_v2" (
            to: DevicePtr, from: DevicePtr, bytes: usize, stream: Handle,
        );
        optional ipc_get_event_handle = "cuIpcGetEventHandle" (handle: *mut IpcHandle, event: Handle);
        optional ipc_open_event_handle = "cuIpcOpenEventHandle" (event: *mut Handle, handle: IpcHandle);
    }
    "VA" {
        required mem_get_allocation_granularity = "cuMemGetAllocationGranularity" (
            granularity: *mut usize, properties: *const MemAllocationProp, option: u32,
        );
        required mem_create = "cuMemCreate" (
            handle: *mut AllocationHandle, bytes: usize, properties: *const MemAllocationProp, flags: u64,
        );
        required mem_release = "cuMemRelease" (handle: AllocationHandle);
        required mem_export = "cuMemExportToShareableHandle" (
            shareable: *mut c_void, handle: AllocationHandle, kind: u32, flags: u64,
        );
        required mem_import = "cuMemImportFromShareableHandle" (
            handle: *mut AllocationHandle, shareable: usize, kind: u32,
        );
        required mem_address_reserve = "cuMemAddressReserve" (
            pointer: *mut DevicePtr, bytes: usize, alignment: usize, hint: DevicePtr, flags: u64,
        );
        required mem_address_free = "cuMemAddressFree" (pointer: DevicePtr, bytes: usize);
        required mem_map = "cuMemMap" (
            pointer: DevicePtr, bytes: usize, offset: usize, handle: AllocationHandle, flags: u64,
        );
        required mem_unmap = "cuMemUnmap" (pointer: DevicePtr, bytes: usize);
        required mem_set_access = "cuMemSetAccess" (
            pointer: DevicePtr, bytes: usize, access: *const MemAccessDesc, count: usize,
        );
        required mem_get_allocation_properties = "cuMemGetAllocationPropertiesFromHandle" (
            properties: *mut MemAllocationProp, handle: AllocationHandle,
        );
        optional mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (
            handle: *mut AllocationHandle, address: *mut c_void,
        );
    }
    "MALLOC__ASYNC" {
        #[cfg(feature = "experiment")]
        optional mem_alloc_async = "cuMemAllocAsync" (pointer: *mut DevicePtr, bytes: usize, stream: Handle);
        #[cfg(feature = "experiment")]
        optional mem_free_async = "cuMemFreeAsync" (pointer: DevicePtr, stream: Handle);
    }
    "UNIFIED" {
        optional pointer_get_attributes = "cuPointerGetAttributes" (
            count: u32, attributes: *mut u32, data: *mut *mut c_void, pointer: DevicePtr,
        );
    }
    "STREAM" {
        required stream_create = "cuStreamCreate" (stream: *mut Handle, flags: u32);
        required stream_destroy = "cuStreamDestroy_v2" (stream: Handle);
        required stream_synchronize = "cuStreamSynchronize" (stream: Handle);
        required stream_query = "cuStreamQuery" (stream: Handle);
        required stream_is_capturing = "cuStreamIsCapturing" (stream: Handle, status: *mut u32);
        optional stream_get_id = "cuStreamGetId" (stream: Handle, id: *mut u64);
        optional stream_wait_event = "cuStreamWaitEvent" (stream: Handle, event: Handle, flags: u32);
        optional stream_begin_capture = "cuStreamBeginCapture_v2" (stream: Handle, mode: u32);
        optional stream_end_capture = "cuStreamEndCapture" (stream: Handle, graph: *mut Handle);
        optional stream_get_capture_info = "cuStreamGetCaptureInfo_v3" (
            stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle,
            edges: *mut *const c_void, count: *mut usize,
        );
        optional stream_update_capture_dependencies = "cuStreamUpdateCaptureDependencies_v2" (
            stream: Handle, dependencies: *const Handle, edges: *const c_void, count: usize, flags: u32,
        );
        optional thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut u32);
    }
    "EVENT" {
        required event_create = "cuEventCreate" (event: *mut Handle, flags: u32);
        required event_destroy = "cuEventDestroy_v2" (event: Handle);
        required event_record = "cuEventRecord" (event: Handle, stream: Handle);
        required event_synchronize = "cuEventSynchronize" (event: Handle);
        optional event_query = "cuEventQuery" (event: Handle);
        required event_elapsed_time = "cuEventElapsedTime" (milliseconds: *mut f32, start: Handle, end: Handle);
    }
    "MEMOP" {
        optional stream_wait_value_32 = "cuStreamWaitValue32_v2" (
            stream: Handle, pointer: DevicePtr, value: u32, flags: u32,
        );
        optional stream_wait_value_64 = "cuStreamWaitValue64_v2" (
            stream: Handle, pointer: DevicePtr, value: u64, flags: u32,
        );
        optional stream_write_value_32 = "cuStreamWriteValue32_v2" (
            stream: Handle, pointer: DevicePtr, value: u32, flags: u32,
        );
        optional stream_write_value_64 = "cuStreamWriteValue64_v2" (
            stream: Handle, pointer: DevicePtr, value: u64, flags: u32,
        );
    }
    "GRAPH" {
        optional graph_add_batch_mem_op_node = "cuGraphAddBatchMemOpNode" (
            node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize,
            parameters: *const BatchMemOpNodeParams,
        );
        optional graph_destroy = "cuGraphDestroy" (graph: Handle);
        optional graph_exec_batch_mem_op_node_set_params = "cuGraphExecBatchMemOpNodeSetParams" (
            exec: Handle, node: Handle, parameters: *const BatchMemOpNodeParams,
        );
        optional graph_exec_destroy = "cuGraphExecDestroy" (exec: Handle);
        optional graph_instantiate = "cuGraphInstantiateWithFlags" (exec: *mut Handle, graph: Handle, flags: u64);
        optional graph_launch = "cuGraphLaunch" (exec: Handle, stream: Handle);
        optional graph_node_get_dependencies = "cuGraphNodeGetDependencies_v2" (
            node: Handle, dependencies: *mut Handle, edges: *mut c_void, count: *mut usize,
        );
    }
    "MODULE" {
        required module_load_data = "cuModuleLoadData" (module: *mut Handle, image: *const c_void);
        required module_unload = "cuModuleUnload" (module: Handle);
        required module_get_function = "cuModuleGetFunction" (
            function: *mut Handle, module: Handle, name: *const c_char,
        );
    }
    "EXEC" {
        required launch_kernel = "cuLaunchKernel" (
            function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
            shared_bytes: u32, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
        optional launch_host_func = "cuLaunchHostFunc" (stream: Handle, function: HostFunction, data: *mut c_void);
    }
}

/// The versioned name. The unversioned one exists only where a toolkit is installed, and may be the toolkit's stub.
const LIBRARY: &str = "libcuda.so.1";

/// The library of the simulated driver, for programs that do not contain it.
const SIMULATOR: &str = "libsimcuda.so";

/// The flag of dlopen(3) with which it loads nothing, on Linux.
const RTLD_NOLOAD: c_int = 4;

static LOADED: OnceLock<Result<Driver, LoadError>> = OnceLock::new();

/// Looks up functions of the simulated driver that is part of the program.
static LINKED: OnceLock<fn(&CStr) -> *const c_void> = OnceLock::new();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_error_names_the_path() {
        let error = Driver::open(OsStr::new("/nonexistent/libcuda.so.1")).unwrap_err();
        let LoadError::Library { tried, reason } = &error else { panic!("{error:?}") };
        assert_eq!(tried, "/nonexistent/libcuda.so.1");
        assert!(!reason.is_empty() && !reason.contains("libcuda"), "the linker's own text, but the name: {reason}");
        let expected = format!("cannot load the CUDA driver library /nonexistent/libcuda.so.1: {reason}");
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_library_without_the_entry_points_is_refused_by_name() {
        let error = Driver::open(OsStr::new("libc.so.6")).unwrap_err();
        assert_eq!(error, LoadError::MissingSymbol { library: "libc.so.6".to_owned(), symbol: "cuInit" });
        assert_eq!(error.to_string(), "the CUDA driver library libc.so.6 has no entry point cuInit");
    }

    #[test]
    fn only_required_symbols_must_exist() {
        let all_but = |missing: &'static CStr| {
            let find = move |symbol: &CStr| match symbol == missing {
                true => std::ptr::null(),
                false => std::ptr::NonNull::<c_void>::dangling().as_ptr().cast_const(),
            };
            // SAFETY: nothing is ever called.
            unsafe { Entries::resolve(find) }
        };
        assert_eq!(all_but(c"cuMemMap").err(), Some("cuMemMap"));
        let entries = all_but(c"cuGetErrorName").unwrap_or_else(|symbol| panic!("{symbol}"));
        let copies = AtomicU64::new(0);
        let driver = Driver {
            entries,
            library: String::new(),
            simulated: false,
            copies,
            drop_error: Mutex::default(),
            _keep: None,
        };
        assert_eq!(driver.error_name(CuResult::OUT_OF_MEMORY), None);
    }

    #[test]
    fn asking_for_the_driver_never_panics() {
        match Driver::load() {
            Ok(driver) => assert!(driver.version().unwrap() >= DriverVersion { major: 11, minor: 0 }),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn the_driver_may_be_shared_between_threads() {
        const fn shared<T: Send + Sync>() {}
        const { shared::<Driver>() };
        const { shared::<LoadError>() };
    }
}
