//! The driver's raw entry points, in a table that is independent of Partywall's.
//!
//! The driver facts use this table, so that a fault in Partywall's layers can neither hide nor imitate the driver's
//! behaviour. A method calls the entry point of the same name, without its `cu` prefix and `_v2` suffix, and returns
//! the driver's result code.
//!
//! Device addresses and handles are plain numbers here, and the facts pass wrong ones on purpose. The driver checks
//! most of them; otherwise only the process of that one fact crashes.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::Library;
use partywall::cuda::CuResult;
use rustix::mm::{MapFlags, ProtFlags};

use crate::gpu;

/// `CUdeviceptr`.
pub(crate) type Address = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUgraph`, `CUmemGenericAllocationHandle`.
pub(crate) type Handle = u64;
/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `CUmemLocation` of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) win32_meta_data: usize,
    pub(crate) flags: [u8; 8],
}

impl Properties {
    /// Pinned memory of a device that can be exported as a file descriptor.
    pub(crate) fn exportable(device: c_int) -> Self {
        Self { kind: 1, handle_types: POSIX_FD, location: Location { kind: 1, id: device }, ..Self::default() }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessRule {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

impl AccessRule {
    pub(crate) fn of(device: c_int, flags: u32) -> Self {
        Self { location: Location { kind: 1, id: device }, flags }
    }
}

/// `CUstreamBatchMemOpParams`, as memory operations on words of 64 bits use it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryOperation {
    /// [`WAIT_64`] or [`WRITE_64`].
    pub(crate) operation: u32,
    pub(crate) address: Address,
    pub(crate) value: u64,
    pub(crate) flags: u32,
    pub(crate) rest: [u64; 2],
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryNode {
    pub(crate) context: Handle,
    pub(crate) count: u32,
    pub(crate) operations: *const MemoryOperation,
    pub(crate) flags: u32,
}

/// `CU_STREAM_MEM_OP_WAIT_VALUE_64`
pub(crate) const WAIT_64: u32 = 4;
/// `CU_STREAM_MEM_OP_WRITE_VALUE_64`
pub(crate) const WRITE_64: u32 = 5;
/// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`
pub(crate) const SET_DEPENDENCIES: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(crate) const POSIX_FD: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`
pub(crate) const READ: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
pub(crate) const READ_WRITE: u32 = 3;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
pub(crate) const LAZY_PEER: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`
pub(crate) const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(crate) const NO_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`
pub(crate) const INTERPROCESS: u32 = 4;
/// `CU_STREAM_WAIT_VALUE_GEQ`
pub(crate) const GEQ: u32 = 0;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
pub(crate) const PORTABLE_MAPPED: u32 = 3;
/// `CU_MEMHOSTREGISTER_READ_ONLY`
pub(crate) const REGISTER_READ_ONLY: u32 = 8;
/// `CU_STREAM_CAPTURE_MODE_GLOBAL`
pub(crate) const CAPTURE_GLOBAL: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub(crate) const CAPTURE_RELAXED: u32 = 2;

/// The driver's answer to a call.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) call: &'static str,
    pub(crate) code: CuResult,
}

impl Answer {
    /// Returns an error unless the call succeeded, for the steps that prepare the question of a fact.
    pub(crate) fn ok(self) -> Result<(), String> {
        if self.code.is_success() { Ok(()) } else { Err(format!("{self}, on the way to the fact")) }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}", self.call, self.code)
    }
}

/// Makes the table and its methods of one list. An entry point that the library lacks answers `NOT_FOUND` at its call.
macro_rules! entry_points {
    ($($method:ident = $symbol:literal ($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The loaded library. It stays loaded for as long as this lives, which is as long as the process.
        pub(crate) struct Cuda {
            $($method: Option<unsafe extern "C" fn($($type),*) -> CuResult>,)*
            host_function: Option<HostFunctionEntry>,
            _library: Library,
        }

        impl Cuda {
            /// Loads the library that `PARTYWALL_LIBCUDA` names, or else the vendor's. Does not initialise CUDA.
            pub(crate) fn load() -> Result<Self, String> {
                let library = gpu::open_driver()?;
                $(
                    // SAFETY: the signature is that of cuda.h for this name; a reference there is a pointer here.
                    let $method = unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok().map(|symbol| *symbol);
                )*
                // SAFETY: as above.
                let host_function = unsafe { library.get(c"cuLaunchHostFunc") }.ok().map(|symbol| *symbol);
                Ok(Self { $($method,)* host_function, _library: library })
            }

            $(
                #[allow(clippy::too_many_arguments, reason = "the driver's signatures")]
                pub(crate) fn $method(&self, $($argument: $type),*) -> Answer {
                    // SAFETY: references are to live values of the types that the driver reads and writes before it
                    // returns. Numbers may be wrong; see the head of this file.
                    let code = self.$method.map_or(CuResult::NOT_FOUND, |entry| unsafe { entry($($argument),*) });
                    Answer { call: $symbol, code }
                }
            )*
        }
    };
}

type HostFunctionEntry =
    unsafe extern "C" fn(Handle, extern "C" fn(&'static AtomicU64), &'static AtomicU64) -> CuResult;

entry_points! {
    init = "cuInit" (flags: u32);
    driver_get_version = "cuDriverGetVersion" (version: &mut c_int);
    get_error_name = "cuGetErrorName" (code: CuResult, text: &mut *const c_char);
    device_get_count = "cuDeviceGetCount" (count: &mut c_int);
    device_get = "cuDeviceGet" (device: &mut c_int, ordinal: c_int);
    device_get_uuid = "cuDeviceGetUuid_v2" (uuid: &mut [u8; 16], device: c_int);
    device_get_attribute = "cuDeviceGetAttribute" (value: &mut c_int, attribute: u32, device: c_int);
    device_can_access_peer = "cuDeviceCanAccessPeer" (can: &mut c_int, device: c_int, peer: c_int);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: &mut Handle, device: c_int);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (device: c_int, flags: &mut u32, active: &mut c_int);
    ctx_set_current = "cuCtxSetCurrent" (context: Handle);
    ctx_get_current = "cuCtxGetCurrent" (context: &mut Handle);
    ctx_get_device = "cuCtxGetDevice" (device: &mut c_int);
    ctx_get_limit = "cuCtxGetLimit" (value: &mut usize, limit: u32);
    ctx_synchronize = "cuCtxSynchronize" ();

    mem_get_info = "cuMemGetInfo_v2" (free: &mut usize, total: &mut usize);
    mem_alloc = "cuMemAlloc_v2" (address: &mut Address, bytes: usize);
    mem_alloc_managed = "cuMemAllocManaged" (address: &mut Address, bytes: usize, flags: u32);
    mem_alloc_async = "cuMemAllocAsync" (address: &mut Address, bytes: usize, stream: Handle);
    mem_free = "cuMemFree_v2" (address: Address);
    mem_free_async = "cuMemFreeAsync" (address: Address, stream: Handle);
    mem_host_alloc = "cuMemHostAlloc" (address: &mut u64, bytes: usize, flags: u32);
    mem_free_host = "cuMemFreeHost" (address: u64);
    mem_host_register = "cuMemHostRegister_v2" (address: u64, bytes: usize, flags: u32);
    mem_host_unregister = "cuMemHostUnregister" (address: u64);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (device: &mut Address, address: u64, flags: u32);
    memset_d8_async = "cuMemsetD8Async" (to: Address, value: u8, bytes: usize, stream: Handle);
    pointer_get_attribute = "cuPointerGetAttribute" (value: &mut u64, attribute: u32, address: Address);
    pointer_get_attributes = "cuPointerGetAttributes" (
        count: u32, attributes: *const u32, values: *const *mut u64, address: Address,
    );

    mem_get_allocation_granularity = "cuMemGetAllocationGranularity" (
        granularity: &mut usize, properties: &Properties, option: u32,
    );
    mem_create = "cuMemCreate" (handle: &mut Handle, bytes: usize, properties: &Properties, flags: u64);
    mem_release = "cuMemRelease" (handle: Handle);
    mem_export = "cuMemExportToShareableHandle" (descriptor: &mut c_int, handle: Handle, kind: u32, flags: u64);
    mem_import = "cuMemImportFromShareableHandle" (handle: &mut Handle, descriptor: u64, kind: u32);
    mem_get_allocation_properties = "cuMemGetAllocationPropertiesFromHandle" (
        properties: &mut Properties, handle: Handle,
    );
    mem_address_reserve = "cuMemAddressReserve" (
        address: &mut Address, bytes: usize, alignment: usize, hint: Address, flags: u64,
    );
    mem_address_free = "cuMemAddressFree" (address: Address, bytes: usize);
    mem_map = "cuMemMap" (address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64);
    mem_unmap = "cuMemUnmap" (address: Address, bytes: usize);
    mem_set_access = "cuMemSetAccess" (address: Address, bytes: usize, rule: &AccessRule, count: usize);

    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: &mut IpcHandle, address: Address);
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" (address: &mut Address, handle: IpcHandle, flags: u32);
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (address: Address);
    ipc_get_event_handle = "cuIpcGetEventHandle" (handle: &mut IpcHandle, event: Handle);
    ipc_open_event_handle = "cuIpcOpenEventHandle" (event: &mut Handle, handle: IpcHandle);

    stream_create = "cuStreamCreate" (stream: &mut Handle, flags: u32);
    stream_destroy = "cuStreamDestroy_v2" (stream: Handle);
    stream_get_id = "cuStreamGetId" (stream: Handle, id: &mut u64);
    stream_query = "cuStreamQuery" (stream: Handle);
    stream_synchronize = "cuStreamSynchronize" (stream: Handle);
    stream_wait_event = "cuStreamWaitEvent" (stream: Handle, event: Handle, flags: u32);
    stream_wait_value32 = "cuStreamWaitValue32_v2" (stream: Handle, address: Address, value: u32, flags: u32);
    stream_wait_value64 = "cuStreamWaitValue64_v2" (stream: Handle, address: Address, value: u64, flags: u32);
    stream_write_value32 = "cuStreamWriteValue32_v2" (stream: Handle, address: Address, value: u32, flags: u32);
    stream_write_value64 = "cuStreamWriteValue64_v2" (stream: Handle, address: Address, value: u64, flags: u32);
    stream_begin_capture = "cuStreamBeginCapture_v2" (stream: Handle, mode: u32);
    stream_end_capture = "cuStreamEndCapture" (stream: Handle, graph: &mut Handle);
    thread_exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: &mut u32);
    stream_get_capture_info = "cuStreamGetCaptureInfo_v3" (
        stream: Handle, status: &mut u32, id: &mut u64, graph: &mut Handle, dependencies: &mut *const Handle,
        edges: usize, count: &mut usize,
    );
    stream_update_capture_dependencies = "cuStreamUpdateCaptureDependencies_v2" (
        stream: Handle, dependencies: &Handle, edges: usize, count: usize, flags: u32,
    );
    graph_add_batch_mem_op_node = "cuGraphAddBatchMemOpNode" (
        node: &mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: &MemoryNode,
    );
    graph_destroy = "cuGraphDestroy" (graph: Handle);
    graph_exec_batch_mem_op_node_set_params = "cuGraphExecBatchMemOpNodeSetParams" (
        executable: Handle, node: Handle, parameters: &MemoryNode,
    );
    graph_exec_destroy = "cuGraphExecDestroy" (executable: Handle);
    graph_instantiate = "cuGraphInstantiateWithFlags" (executable: &mut Handle, graph: Handle, flags: u64);
    graph_launch = "cuGraphLaunch" (executable: Handle, stream: Handle);
    graph_node_get_dependencies = "cuGraphNodeGetDependencies_v2" (
        node: Handle, dependencies: *mut Handle, edges: usize, count: &mut usize,
    );

    event_create = "cuEventCreate" (event: &mut Handle, flags: u32);
    event_destroy = "cuEventDestroy_v2" (event: Handle);
    event_record = "cuEventRecord" (event: Handle, stream: Handle);
    event_query = "cuEventQuery" (event: Handle);
    event_synchronize = "cuEventSynchronize" (event: Handle);
    event_elapsed_time = "cuEventElapsedTime" (milliseconds: &mut f32, start: Handle, end: Handle);

    module_load_data = "cuModuleLoadData" (module: &mut Handle, image: *const c_char);
    module_unload = "cuModuleUnload" (module: Handle);
    module_get_function = "cuModuleGetFunction" (function: &mut Handle, module: Handle, name: *const c_char);
    launch_kernel = "cuLaunchKernel" (
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, parameters: *const *const u64, extra: usize,
    );

    checkpoint_lock = "cuCheckpointProcessLock" (pid: c_int, timeout: &[u64; 8]);
    checkpoint_checkpoint = "cuCheckpointProcessCheckpoint" (pid: c_int, arguments: usize);
    checkpoint_restore = "cuCheckpointProcessRestore" (pid: c_int, arguments: usize);
    checkpoint_unlock = "cuCheckpointProcessUnlock" (pid: c_int, arguments: usize);
    checkpoint_get_state = "cuCheckpointProcessGetState" (pid: c_int, state: &mut u32);

    memcpy_dtod_async = "cuMemcpyDtoDAsync_v2" (to: Address, from: Address, bytes: usize, stream: Handle);
    memcpy_dtoh = "cuMemcpyDtoH_v2" (to: *mut c_void, from: Address, bytes: usize);
}

impl Cuda {
    /// `cuMemcpyDtoH`: waits for the context's default stream.
    pub(crate) fn read(&self, to: &mut [u8], from: Address) -> Answer {
        self.memcpy_dtoh(to.as_mut_ptr().cast(), from, to.len())
    }

    /// `cuPointerGetAttributes`: each value has 64 bits, of which the driver writes as many as the attribute has.
    pub(crate) fn pointer_attributes<const N: usize>(
        &self,
        values: &mut [u64; N],
        attributes: [u32; N],
        address: Address,
    ) -> Answer {
        let places = values.each_mut().map(std::ptr::from_mut);
        self.pointer_get_attributes(N as u32, attributes.as_ptr(), places.as_ptr(), address)
    }

    /// `cuModuleLoadData` of PTX or another image.
    pub(crate) fn load_module(&self, module: &mut Handle, image: &CStr) -> Answer {
        self.module_load_data(module, image.as_ptr())
    }

    /// `cuModuleGetFunction`.
    pub(crate) fn function(&self, function: &mut Handle, module: Handle, name: &CStr) -> Answer {
        self.module_get_function(function, module, name.as_ptr())
    }

    /// `cuLaunchKernel` of 64 blocks of 256 threads; each parameter has 64 bits, of which the kernel reads as many as
    /// it declares.
    pub(crate) fn launch(&self, function: Handle, stream: Handle, parameters: &[u64]) -> Answer {
        let pointers: Vec<*const u64> = parameters.iter().map(std::ptr::from_ref).collect();
        self.launch_kernel(function, 64, 1, 1, 256, 1, 1, 0, stream, pointers.as_ptr(), 0)
    }

    /// `cuLaunchHostFunc`.
    pub(crate) fn launch_host_function(
        &self,
        stream: Handle,
        function: extern "C" fn(&'static AtomicU64),
        data: &'static AtomicU64,
    ) -> Answer {
        // SAFETY: function and data live as long as the program; the driver checks the stream.
        let call = |entry: HostFunctionEntry| unsafe { entry(stream, function, data) };
        Answer { call: "cuLaunchHostFunc", code: self.host_function.map_or(CuResult::NOT_FOUND, call) }
    }
}

/// 64-bit words of a memfd, mapped into this process; never unmapped, because streams may use them to the end.
pub(crate) struct Words {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: a shared `Words` gives access to its words by atomic operations alone, and the mapping is never unmapped.
unsafe impl Sync for Words {}

impl Words {
    /// Returns a new memfd of `bytes` bytes, which must be a multiple of the page size.
    pub(crate) fn file(bytes: usize) -> Result<OwnedFd, String> {
        let file = rustix::fs::memfd_create("words", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(|error| error.to_string())?;
        Ok(file)
    }

    /// Maps all of `file`, for reading only if not `writable`.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> Result<Self, String> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        Self::map_as(file, protection, MapFlags::SHARED)
    }

    /// Maps all of `file` so that what is written to the mapping stays there.
    pub(crate) fn map_private(file: impl AsFd) -> Result<Self, String> {
        Self::map_as(file, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    fn map_as(file: impl AsFd, protection: ProtFlags, flags: MapFlags) -> Result<Self, String> {
        let bytes = rustix::fs::fstat(&file).map_err(|error| error.to_string())?.st_size as usize;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) }
            .map_err(|error| error.to_string())?;
        let base = NonNull::new(base.cast()).ok_or("mmap returned null")?;
        Ok(Self { base, count: bytes / 8 })
    }

    /// Maps several files of one size, one after the other.
    pub(crate) fn map_side_by_side(files: &[OwnedFd]) -> Result<Self, String> {
        let each = rustix::fs::fstat(&files[0]).map_err(|error| error.to_string())?.st_size as usize;
        let bytes = files.len() * each;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
        let base = base.map_err(|error| error.to_string())?;
        for (index, file) in files.iter().enumerate() {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: replaces a part of the mapping that was just made, which nothing uses yet.
            let mapped = unsafe { rustix::mm::mmap(base.byte_add(index * each), each, protection, flags, file, 0) };
            mapped.map_err(|error| error.to_string())?;
        }
        let base = NonNull::new(base.cast()).ok_or("mmap returned null")?;
        Ok(Self { base, count: bytes / 8 })
    }

    /// Returns the words at an address at which the driver has given the CPU access, which nothing takes away while
    /// this lives.
    pub(crate) fn at(address: Address, bytes: usize) -> Self {
        let base = NonNull::new(address as *mut AtomicU64).expect("the driver maps nothing at 0");
        Self { base, count: bytes / 8 }
    }

    /// Reads a file from its start until all words are filled. Returns the number of bytes of the only call.
    pub(crate) fn read_from(&self, file: impl AsFd) -> Result<usize, String> {
        let file = file.as_fd().as_raw_fd();
        // SAFETY: the words are mapped for as long as this lives, and only this thread uses them now.
        let read = unsafe { libc::pread(file, self.base.as_ptr().cast(), self.bytes(), 0) };
        usize::try_from(read).map_err(|_| std::io::Error::last_os_error().to_string())
    }

    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.count * 8
    }

    pub(crate) fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: the word is inside the mapping, which is never unmapped; other processes change it only as a whole
        // word.
        unsafe { self.base.add(index).as_ref() }
    }
}

/// Runs `child` in a fork of this process and returns its exit code. This process must have no other thread of its own.
pub(crate) fn in_fork(child: impl FnOnce() -> u8) -> Result<u8, String> {
    // SAFETY: the child calls only _exit and the driver, which in a forked child takes no locks that the driver's
    // threads could hold.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().to_string()),
        0 => {
            let code = child();
            // SAFETY: ends the child without running the parent's handlers.
            unsafe { libc::_exit(i32::from(code)) }
        }
        pid => {
            let pid = rustix::process::Pid::from_raw(pid).ok_or("fork returned no pid")?;
            let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
                .map_err(|error| error.to_string())?
                .ok_or("the fork is gone")?;
            let code = status.exit_status().ok_or_else(|| format!("the fork ended with {status:?}"))?;
            u8::try_from(code).map_err(|error| error.to_string())
        }
    }
}

/// Returns the number of a descriptor, which the driver takes in place of a pointer.
pub(crate) fn number(descriptor: BorrowedFd<'_>) -> u64 {
    // A descriptor that is open is not negative.
    u64::from(descriptor.as_raw_fd().unsigned_abs())
}
