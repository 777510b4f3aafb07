//! A driver made of Rust functions, for testing the owners without a GPU: it hands out numbers as handles, knows which
//! are live, and refuses whatever the real one would. Each thread has its own, so that tests do not meet.
#![allow(unsafe_code)] // functions with the driver's signatures

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::{DevicePtr, Handle, IpcHandle, MemAccessDesc, MemAllocationProp};
use crate::memop::{self, ProbeError};
use crate::{Access, AccessError, Context, CuResult, Device, DeviceBuffer, Driver, Event, IpcEvent, IpcEventHandle};
use crate::{Kernels, Mapping};
use crate::{MemoryInfo, PhysicalMemory, PinnedBuffer, RawStream, Stream, StreamRef};

mod sharing;

const GRANULARITY: usize = 2 << 20;

/// What is live, what was called, what shall fail.
#[derive(Default)]
struct State {
    last: u64,
    /// Kind and number of everything that must be given back.
    live: BTreeSet<(&'static str, u64)>,
    contexts: Vec<Handle>,
    capture_mode: u32,
    /// The capture mode at each call that allocates, imports or maps.
    modes_seen: Vec<u32>,
    /// The access flags of the last cuMemSetAccess.
    access_flags: u32,
    capturing: bool,
    launches: u32,
    /// Words that streams wrote, by address.
    words: BTreeMap<DevicePtr, u64>,
    /// What streams wait for: stream, address, value.
    waits: Vec<(Handle, DevicePtr, u64)>,
    /// Streams wait for nothing.
    waits_are_ignored: bool,
    /// What cuPointerGetAttributes answers, by attribute; 0 for the others.
    pointer: BTreeMap<u32, u64>,
    /// What cuMemGetAddressRange answers.
    range: (DevicePtr, usize),
    /// Whether an address that is asked about is in a mapping of cuMemMap.
    mapped: bool,
    /// Whether cuMemHostGetFlags knows what it is asked about.
    driver_host: bool,
    /// The flags of the last cuMemHostRegister.
    register_flags: u32,
    /// The call of this name fails with this code, once it has worked so many times.
    fail: Option<(&'static str, u32)>,
    works_before: u32,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Runs a call: the injected failure if there is one, else what it does.
fn call(name: &'static str, action: impl FnOnce(&mut State) -> u32) -> CuResult {
    STATE.with_borrow_mut(|state| {
        CuResult(match state.fail {
            Some((failing, code)) if failing == name && state.works_before == 0 => code,
            Some((failing, _)) if failing == name => {
                state.works_before -= 1;
                action(state)
            }
            _ => action(state),
        })
    })
}

impl State {
    fn make(&mut self, kind: &'static str) -> u64 {
        self.last += 1;
        self.live.insert((kind, self.last));
        self.last
    }

    fn end(&mut self, kind: &'static str, number: u64) -> u32 {
        if self.live.remove(&(kind, number)) { 0 } else { 1 }
    }

    fn in_context(&mut self) -> bool {
        self.modes_seen.push(self.capture_mode);
        !self.contexts.is_empty()
    }

    fn need_context(&mut self, action: impl FnOnce(&mut Self)) -> u32 {
        if !self.in_context() {
            return 201;
        }
        action(self);
        0
    }
}

/// Addresses are far apart, so that a range is told from another by its number.
const ADDRESS_SHIFT: u32 = 44;
/// The most that are reserved at once.
const ADDRESSES: u64 = 1 << ADDRESS_SHIFT;

macro_rules! simulated {
    ($(fn $function:ident for $symbol:literal ($($argument:ident: $type:ty),*) $body:expr;)*) => {
        $(unsafe extern "C" fn $function($($argument: $type),*) -> CuResult {
            call($symbol, $body)
        })*

        fn find(symbol: &CStr) -> *const c_void {
            match symbol.to_str().unwrap() {
                $($symbol => $function as *const c_void,)*
                // Everything else exists, and no test calls it.
                _ => never_called as *const c_void,
            }
        }
    };
}

unsafe extern "C" fn never_called() -> CuResult {
    std::process::abort()
}

/// Stores a result where the driver would.
fn store<T>(to: *mut T, value: T) {
    // SAFETY: the caller is this crate, which passes pointers to live values.
    unsafe { to.write(value) }
}

simulated! {
    fn init for "cuInit" (_flags: u32) |_| 0;
    fn count for "cuDeviceGetCount" (count: *mut c_int) |_| { store(count, 2); 0 };
    fn device for "cuDeviceGet" (device: *mut c_int, ordinal: c_int) |_| {
        if ordinal >= 2 { return 101; }
        store(device, ordinal);
        0
    };
    fn name for "cuDeviceGetName" (text: *mut c_char, length: c_int, _device: c_int) |_| {
        assert!(length > 4);
        store(text.cast::<[u8; 4]>(), *b"GPU\0");
        0
    };
    fn uuid for "cuDeviceGetUuid_v2" (uuid: *mut [u8; 16], device: c_int) |_| { store(uuid, [device as u8 + 1; 16]); 0 };
    fn attribute for "cuDeviceGetAttribute" (value: *mut c_int, attribute: u32, _device: c_int) |_| {
        if attribute > 200 { return 1; }
        store(value, attribute as c_int);
        0
    };
    fn retain for "cuDevicePrimaryCtxRetain" (context: *mut Handle, _device: c_int) |state| {
        store(context, state.make("context") as Handle);
        0
    };
    fn release for "cuDevicePrimaryCtxRelease_v2" (_device: c_int) |state| {
        let context = state.live.iter().find(|(kind, _)| *kind == "context").copied();
        context.map_or(1, |(kind, number)| state.end(kind, number))
    };
    fn push for "cuCtxPushCurrent_v2" (context: Handle) |state| { state.contexts.push(context); 0 };
    fn pop for "cuCtxPopCurrent_v2" (context: *mut Handle) |state| {
        let Some(top) = state.contexts.pop() else { return 201 };
        store(context, top);
        0
    };
    fn exchange for "cuThreadExchangeStreamCaptureMode" (mode: *mut u32) |state| {
        // SAFETY: as for `store`.
        std::mem::swap(unsafe { &mut *mode }, &mut state.capture_mode);
        0
    };
    fn info for "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize) |_| { store(free, 7); store(total, 9); 0 };
    fn granularity for "cuMemGetAllocationGranularity" (bytes: *mut usize, _p: *const MemAllocationProp, _o: u32) |_| {
        store(bytes, GRANULARITY);
        0
    };
    fn create for "cuMemCreate" (handle: *mut u64, bytes: usize, p: *const MemAllocationProp, _f: u64) |state| {
        // SAFETY: as for `store`.
        let p = unsafe { p.read() };
        assert_eq!((p.kind, p.requested_handle_types, p.location.kind), (1, 1, 1));
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) { return 1; }
        state.need_context(|state| store(handle, state.make("memory")))
    };
    fn release_memory for "cuMemRelease" (handle: u64) |state| state.end("memory", handle);
    fn export for "cuMemExportToShareableHandle" (to: *mut c_void, _handle: u64, _kind: u32, _flags: u64) |_| {
        // A descriptor that survives exec, as the driver might make it.
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        store(to.cast::<c_int>(), file.into_raw_fd());
        0
    };
    fn import for "cuMemImportFromShareableHandle" (handle: *mut u64, _fd: usize, kind: u32) |state| {
        assert_eq!(kind, 1);
        state.need_context(|state| store(handle, state.make("memory")))
    };
    fn reserve for "cuMemAddressReserve" (to: *mut DevicePtr, bytes: usize, _a: usize, _h: DevicePtr, _f: u64) |state| {
        if bytes as u64 > ADDRESSES { return 2; }
        state.need_context(|state| store(to, state.make("addresses") << ADDRESS_SHIFT))
    };
    fn free_addresses for "cuMemAddressFree" (pointer: DevicePtr, _bytes: usize) |state| {
        if state.live.contains(&("mapping", pointer)) { return 1; }
        state.end("addresses", pointer >> ADDRESS_SHIFT)
    };
    fn map for "cuMemMap" (pointer: DevicePtr, _bytes: usize, offset: usize, handle: u64, _flags: u64) |state| {
        if offset != 0 { return 801; }
        if !state.live.contains(&("memory", handle)) { return 1; }
        state.need_context(|state| { state.live.insert(("mapping", pointer)); })
    };
    fn unmap for "cuMemUnmap" (pointer: DevicePtr, _bytes: usize) |state| state.end("mapping", pointer);
    fn set_access for "cuMemSetAccess" (_p: DevicePtr, _b: usize, access: *const MemAccessDesc, count: usize) |state| {
        assert_eq!(count, 1);
        // SAFETY: as for `store`.
        state.access_flags = unsafe { access.read() }.flags;
        0
    };
    fn properties for "cuMemGetAllocationPropertiesFromHandle" (p: *mut MemAllocationProp, _handle: u64) |_| {
        let mut properties = MemAllocationProp::default();
        properties.location.id = 1;
        store(p, properties);
        0
    };
    fn alloc for "cuMemAlloc_v2" (to: *mut DevicePtr, _bytes: usize) |state|
        state.need_context(|state| store(to, state.make("buffer") << ADDRESS_SHIFT));
    fn alloc_managed for "cuMemAllocManaged" (to: *mut DevicePtr, bytes: usize, _flags: u32) |state| {
        if bytes == 0 { return 1; }
        state.need_context(|state| store(to, state.make("buffer") << ADDRESS_SHIFT))
    };
    fn alloc_async for "cuMemAllocAsync" (to: *mut DevicePtr, bytes: usize, _stream: Handle) |state| {
        if bytes == 0 { return 1; }
        state.need_context(|state| store(to, state.make("buffer") << ADDRESS_SHIFT))
    };
    fn free for "cuMemFree_v2" (pointer: DevicePtr) |state| state.end("buffer", pointer >> ADDRESS_SHIFT);
    fn host_alloc for "cuMemHostAlloc" (to: *mut *mut c_void, bytes: usize, _flags: u32) |state|
        state.need_context(|state| {
            let bytes = Box::leak(vec![0xAA_u8; bytes].into_boxed_slice()); // leaked: a test's few bytes
            state.live.insert(("host", bytes.as_ptr() as u64));
            store(to, bytes.as_mut_ptr().cast());
        });
    fn free_host for "cuMemFreeHost" (pointer: *mut c_void) |state| state.end("host", pointer as u64);
    fn pointer_attributes for "cuPointerGetAttributes" (
        count: u32, attributes: *mut u32, data: *mut *mut c_void, _pointer: DevicePtr
    ) |state| {
        for index in 0..count as usize {
            // SAFETY: as for `store`: as many of both as the count says, each place of eight bytes.
            let (attribute, to) = unsafe { (attributes.add(index).read(), data.add(index).read()) };
            store(to.cast::<u64>(), state.pointer.get(&attribute).copied().unwrap_or_default());
        }
        0
    };
    fn address_range for "cuMemGetAddressRange_v2" (base: *mut DevicePtr, bytes: *mut usize, pointer: DevicePtr) |state| {
        if pointer.wrapping_sub(state.range.0) >= state.range.1 as u64 { return 500; }
        store(base, state.range.0);
        store(bytes, state.range.1);
        0
    };
    fn retain_memory for "cuMemRetainAllocationHandle" (handle: *mut u64, _address: *mut c_void) |state| {
        if !state.mapped { return 1; }
        store(handle, state.make("memory"));
        0
    };
    fn host_flags for "cuMemHostGetFlags" (flags: *mut u32, _pointer: *mut c_void) |state| {
        store(flags, 1);
        u32::from(!state.driver_host)
    };
    fn host_register for "cuMemHostRegister_v2" (pointer: *mut c_void, bytes: usize, flags: u32) |state| {
        if bytes == 0 { return 1; }
        if !state.live.insert(("registration", pointer as u64)) { return 712; }
        state.register_flags = flags;
        0
    };
    fn host_unregister for "cuMemHostUnregister" (pointer: *mut c_void) |state|
        state.end("registration", pointer as u64);
    fn host_pointer for "cuMemHostGetDevicePointer_v2" (to: *mut DevicePtr, pointer: *mut c_void, _flags: u32) |_| {
        store(to, pointer as u64 + 1);
        0
    };
    fn ipc_handle for "cuIpcGetMemHandle" (handle: *mut IpcHandle, pointer: DevicePtr) |_| {
        store(handle, IpcHandle([(pointer >> ADDRESS_SHIFT) as u8; 64]));
        0
    };
    fn ipc_open for "cuIpcOpenMemHandle_v2" (to: *mut DevicePtr, _handle: IpcHandle, flags: u32) |state| {
        assert_eq!(flags, 1);
        // Threads share the registry of open mappings, so the addresses must differ between them.
        static OPENED: AtomicU64 = AtomicU64::new(0x1000);
        state.need_context(|state| {
            let pointer = OPENED.fetch_add(1, Ordering::Relaxed) << ADDRESS_SHIFT;
            state.live.insert(("import", pointer));
            state.range = (pointer, GRANULARITY);
            store(to, pointer);
        })
    };
    fn ipc_close for "cuIpcCloseMemHandle" (pointer: DevicePtr) |state| state.end("import", pointer);
    fn set for "cuMemsetD8Async" (_p: DevicePtr, _v: u8, _bytes: usize, _stream: Handle) |_| 0;
    fn upload for "cuMemcpyHtoDAsync_v2" (_to: DevicePtr, _from: *const c_void, _b: usize, _stream: Handle) |_| 0;
    fn download for "cuMemcpyDtoHAsync_v2" (to: *mut c_void, _from: DevicePtr, bytes: usize, _stream: Handle) |_| {
        // SAFETY: as for `store`. Every check finds nothing bad.
        unsafe { to.cast::<u8>().write_bytes(0xFF, bytes) };
        0
    };
    fn stream_create for "cuStreamCreate" (stream: *mut Handle, flags: u32) |state| {
        assert_eq!(flags, 1);
        state.need_context(|state| store(stream, state.make("stream") as Handle))
    };
    fn stream_destroy for "cuStreamDestroy_v2" (stream: Handle) |state| state.end("stream", stream as u64);
    fn stream_synchronize for "cuStreamSynchronize" (_stream: Handle) |_| 0;
    fn stream_query for "cuStreamQuery" (stream: Handle) |state| {
        let words = &state.words;
        let waits = state.waits.iter().any(|(waiter, pointer, value)| {
            *waiter == stream && (words.get(pointer).copied().unwrap_or(0).wrapping_sub(*value) as i64) < 0
        });
        if waits && !state.waits_are_ignored { 600 } else { 0 }
    };
    fn write_32 for "cuStreamWriteValue32_v2" (_stream: Handle, pointer: DevicePtr, value: u32, flags: u32) |state| {
        assert_eq!(flags, 0);
        state.words.insert(pointer, value.into());
        0
    };
    fn write_64 for "cuStreamWriteValue64_v2" (_stream: Handle, pointer: DevicePtr, value: u64, flags: u32) |state| {
        assert_eq!(flags, 0);
        state.words.insert(pointer, value);
        0
    };
    fn wait_32 for "cuStreamWaitValue32_v2" (stream: Handle, pointer: DevicePtr, value: u32, flags: u32) |state| {
        assert_eq!(flags, 0);
        state.waits.push((stream, pointer, value.into()));
        0
    };
    fn wait_64 for "cuStreamWaitValue64_v2" (stream: Handle, pointer: DevicePtr, value: u64, flags: u32) |state| {
        assert_eq!(flags, 0);
        state.waits.push((stream, pointer, value));
        0
    };
    fn is_capturing for "cuStreamIsCapturing" (_stream: Handle, status: *mut u32) |state| {
        store(status, u32::from(state.capturing));
        0
    };
    fn event_create for "cuEventCreate" (event: *mut Handle, flags: u32) |state| {
        if flags & 6 == 4 { return 1; } // between processes there is no time
        state.need_context(|state| store(event, state.make("event") as Handle))
    };
    fn export_event for "cuIpcGetEventHandle" (handle: *mut IpcHandle, event: Handle) |_| {
        store(handle, IpcHandle([event as u8; 64]));
        0
    };
    fn open_event for "cuIpcOpenEventHandle" (event: *mut Handle, handle: IpcHandle) |state| {
        if handle.0[63] == 0 { return 1; }
        state.need_context(|state| store(event, state.make("event") as Handle))
    };
    fn record for "cuEventRecord" (_event: Handle, _stream: Handle) |_| 0;
    fn wait_event for "cuStreamWaitEvent" (_stream: Handle, _event: Handle, _flags: u32) |_| 0;
    fn event_query for "cuEventQuery" (_event: Handle) |_| 600;
    fn event_destroy for "cuEventDestroy_v2" (event: Handle) |state| state.end("event", event as u64);
    fn elapsed for "cuEventElapsedTime" (milliseconds: *mut f32, _start: Handle, _end: Handle) |_| {
        store(milliseconds, -1.5);
        0
    };
    fn load_module for "cuModuleLoadData" (module: *mut Handle, _image: *const c_void) |state|
        state.need_context(|state| store(module, state.make("module") as Handle));
    fn unload_module for "cuModuleUnload" (module: Handle) |state| state.end("module", module as u64);
    fn function for "cuModuleGetFunction" (function: *mut Handle, _module: Handle, _name: *const c_char) |state| {
        state.last += 1;
        store(function, state.last as Handle);
        0
    };
    fn launch for "cuLaunchKernel" (
        _function: Handle, grid: u32, _gy: u32, _gz: u32, block: u32, _by: u32, _bz: u32, _shared: u32,
        _stream: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) |state| {
        if grid == 0 || block == 0 { return 1; }
        state.launches += 1;
        0
    };
}

fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    // SAFETY: `find` gives functions with the driver's signatures, or one that ends the process.
    DRIVER.get_or_init(|| unsafe { Driver::simulated(find) }.unwrap())
}

fn context() -> Context {
    Context::retain(Device::by_ordinal(driver(), 0).unwrap()).unwrap()
}

fn fail(call: &'static str, code: u32) {
    STATE.with_borrow_mut(|state| state.fail = Some((call, code)));
}

fn fail_after(works: u32, call: &'static str, code: u32) {
    fail(call, code);
    STATE.with_borrow_mut(|state| state.works_before = works);
}

fn fail_nothing() {
    STATE.with_borrow_mut(|state| (state.fail, state.works_before) = (None, 0));
}

/// What is still live apart from contexts, and whether the thread is as it was.
#[track_caller]
fn assert_all_given_back() {
    STATE.with_borrow(|state| {
        let live: Vec<_> = state.live.iter().filter(|(kind, _)| *kind != "context").collect();
        assert!(live.is_empty(), "{live:?}");
        assert!(state.contexts.is_empty() && state.capture_mode == 0);
    });
}

#[test]
fn devices_are_found_by_their_identity() {
    let all = Device::all(driver()).unwrap();
    assert_eq!(all.iter().map(Device::ordinal).collect::<Vec<_>>(), [0, 1]);
    let second = Device::by_uuid(driver(), all[1].uuid().unwrap()).unwrap().unwrap();
    assert_eq!((second.ordinal(), second.name().unwrap().as_str()), (1, "GPU"));
    assert!(Device::by_uuid(driver(), crate::DeviceUuid([9; 16])).unwrap().is_none());
    assert!(second.supports_vmm().unwrap() && second.supports_posix_fd().unwrap());
    assert_eq!(Device::by_ordinal(driver(), 2).unwrap_err().code, CuResult::INVALID_DEVICE);
    assert_eq!(
        Device::by_ordinal(driver(), u32::MAX).unwrap_err().to_string(),
        "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101): device 4294967295"
    );
}

#[test]
fn everything_goes_back_in_the_right_order() {
    let context = context();
    let memory = PhysicalMemory::create(&context, GRANULARITY as u64).unwrap();
    let mapping = Mapping::new(memory, Access::ReadOnly).unwrap();
    let again = Mapping::new(mapping.memory().clone(), Access::ReadWrite).unwrap();
    let imported = {
        let descriptor = mapping.memory().export().unwrap();
        use std::os::fd::AsFd;
        PhysicalMemory::import(&context, descriptor.as_fd(), GRANULARITY as u64).unwrap()
    };
    assert!(imported.is_imported() && imported.device_ordinal().unwrap() == 1);
    let owners = (
        Stream::new(&context).unwrap(),
        Event::new(&context).unwrap(),
        DeviceBuffer::new(&context, 64).unwrap(),
        PinnedBuffer::new(&context, 64).unwrap(),
    );
    again.close().unwrap();
    drop((mapping, imported, owners));
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
    drop(context);
    STATE.with_borrow(|state| assert!(state.live.is_empty()));
}

#[test]
fn a_mapping_that_fails_half_way_leaves_nothing() {
    for step in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        let context = context();
        fail(step, 999);
        let error = PhysicalMemory::create(&context, GRANULARITY as u64)
            .and_then(|memory| Mapping::new(memory, Access::ReadWrite))
            .unwrap_err();
        assert_eq!((error.call, error.code), (step, CuResult::UNKNOWN));
        fail_nothing();
        assert_eq!(context.take_drop_error(), None, "{step}");
        assert_all_given_back();
    }
}

#[test]
fn memory_is_mapped_behind_other_memory_or_not_at_all() {
    let context = context();
    let bytes = GRANULARITY as u64;
    let memory = || PhysicalMemory::create(&context, bytes).unwrap();
    let mapping = Mapping::with_reservation(memory(), Access::ReadWrite, 4 * bytes).unwrap();
    assert_eq!((mapping.len(), mapping.reserved()), (bytes, 4 * bytes));
    let before = mapping.as_slice();
    mapping.extend([memory(), memory()]).unwrap().publish();
    assert_eq!((mapping.len(), before.len()), (3 * bytes, bytes));
    assert_eq!(mapping.slice(bytes - 4, 8).unwrap().device_ptr(), before.device_ptr() + bytes - 4);
    STATE.with_borrow(|state| {
        let at: Vec<_> = state.live.iter().filter(|(kind, _)| *kind == "mapping").map(|(_, at)| *at).collect();
        assert_eq!(at, [0, bytes, 2 * bytes].map(|offset| before.device_ptr() + offset));
    });
    // One fits, the second does not; and whatever else fails takes both away.
    let refused = mapping.extend([memory(), memory()]).unwrap_err();
    let expected = AccessError::OutOfRange { offset: 4 * bytes, len: bytes, available: 4 * bytes };
    assert_eq!(refused, expected);
    for step in ["cuMemMap", "cuMemSetAccess"] {
        let more = memory();
        fail(step, 2);
        assert!(matches!(mapping.extend([more]), Err(AccessError::Driver(error)) if error.call == step));
        fail_nothing();
    }
    drop(mapping.extend([memory()]).unwrap());
    assert_eq!(mapping.len(), 3 * bytes);
    mapping.close().unwrap();
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}

#[test]
fn a_range_of_addresses_that_is_too_long_is_done_without() {
    let context = context();
    let memory = PhysicalMemory::create(&context, GRANULARITY as u64).unwrap();
    let mapping = Mapping::with_reservation(memory, Access::ReadOnly, ADDRESSES + GRANULARITY as u64).unwrap();
    assert_eq!(mapping.reserved(), GRANULARITY as u64);
    drop(mapping);
    assert_all_given_back();
}

#[test]
fn every_step_of_loading_the_kernels_may_fail() {
    for step in [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemAlloc_v2",
        "cuMemHostAlloc",
        "cuStreamCreate",
        "cuLaunchKernel",
        "cuMemsetD8Async",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
    ] {
        let context = context();
        fail(step, 2);
        let error = Kernels::load(&context).unwrap_err();
        assert_eq!((error.call, error.code), (step.trim_end_matches("_v2"), CuResult::OUT_OF_MEMORY));
        fail_nothing();
        assert_eq!(context.take_drop_error(), None, "{step}");
        assert_all_given_back();
    }
}

#[test]
fn a_drop_that_fails_is_reported_once_and_does_not_panic() {
    let context = context();
    let mapping =
        Mapping::new(PhysicalMemory::create(&context, GRANULARITY as u64).unwrap(), Access::ReadWrite).unwrap();
    fail("cuMemUnmap", 700);
    drop(mapping);
    fail_nothing();
    let error = context.take_drop_error().unwrap();
    assert_eq!(error.to_string(), "cuMemUnmap failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    assert!(error.is_sticky());
    assert_eq!(context.take_drop_error(), None);

    let mapping =
        Mapping::new(PhysicalMemory::create(&context, GRANULARITY as u64).unwrap(), Access::ReadWrite).unwrap();
    fail("cuMemUnmap", 700);
    assert_eq!(mapping.close().unwrap_err().code, CuResult::ILLEGAL_ADDRESS);
}

#[test]
fn out_of_memory_says_how_much_there_is() {
    let context = context();
    fail("cuMemCreate", 2);
    let error = PhysicalMemory::create(&context, 1 << 40).unwrap_err();
    assert_eq!(error.memory, Some(MemoryInfo { free: 7, total: 9 }));
    assert_eq!(
        error.to_string(),
        "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): 1099511627776 bytes on device 0 (7 of 9 bytes are free)"
    );
    fail_nothing();
    assert_eq!(PhysicalMemory::create(&context, 4096).unwrap_err().code, CuResult::INVALID_VALUE);
    assert_eq!(DeviceBuffer::new(&context, 0).unwrap_err().code, CuResult::INVALID_VALUE);
}

#[test]
fn an_exported_descriptor_does_not_survive_exec() {
    let context = context();
    let memory = PhysicalMemory::create(&context, GRANULARITY as u64).unwrap();
    let descriptor = memory.export().unwrap();
    assert_eq!(rustix::io::fcntl_getfd(&descriptor).unwrap(), rustix::io::FdFlags::CLOEXEC);
}

#[test]
fn sharing_calls_run_in_relaxed_capture_mode() {
    let context = context();
    STATE.with_borrow_mut(|state| state.modes_seen.clear());
    drop(Mapping::new(PhysicalMemory::create(&context, GRANULARITY as u64).unwrap(), Access::ReadWrite).unwrap());
    STATE.with_borrow(|state| assert_eq!(state.modes_seen, [2, 2, 2], "create, reserve, map"));
    assert_all_given_back();

    // A driver without the call still works.
    fail("cuThreadExchangeStreamCaptureMode", 500);
    drop(PhysicalMemory::create(&context, GRANULARITY as u64).unwrap());
    fail_nothing();
    assert_eq!(context.take_drop_error(), None);
    assert_all_given_back();
}

#[test]
fn access_reaches_the_driver_and_the_ranges() {
    let context = context();
    let memory = PhysicalMemory::create(&context, GRANULARITY as u64).unwrap();
    let mut mapping = Mapping::new(memory, Access::ReadWrite).unwrap();
    STATE.with_borrow(|state| assert_eq!(state.access_flags, 3));
    fail("cuMemSetAccess", 1);
    mapping.set_access(Access::ReadOnly).unwrap_err();
    fail_nothing();
    assert_eq!(mapping.access(), Access::ReadWrite);
    mapping.set_access(Access::ReadOnly).unwrap();
    STATE.with_borrow(|state| assert_eq!(state.access_flags, 1));
    let stream = StreamRef::legacy_default(&context);
    let slice = mapping.slice(0, 4).unwrap();
    assert_eq!(stream.copy_from_host(slice, &[0; 4]), Err(AccessError::ReadOnly));
    assert_eq!(stream.enqueue_set(slice, 0), Err(AccessError::ReadOnly));
    assert!(matches!(mapping.slice(1, GRANULARITY as u64), Err(AccessError::OutOfRange { .. })));
    assert_eq!(mapping.slice(4096, 16).unwrap().device_ptr(), mapping.device_ptr() + 4096);
}

#[test]
fn kernels_are_warm_when_loaded_and_check_what_they_are_given() {
    let context = context();
    let kernels = Kernels::load(&context).unwrap();
    STATE.with_borrow(|state| assert_eq!(state.launches, 4, "each kernel once"));
    let buffer = DeviceBuffer::new(&context, 64).unwrap();
    let stream = Stream::new(&context).unwrap();
    assert_eq!(kernels.verify(stream.as_ref(), buffer.as_slice(), 1), Ok(None));
    let odd = buffer.slice(2, 8).unwrap();
    assert!(matches!(kernels.enqueue_fill(stream.as_ref(), odd), Err(AccessError::Misaligned { element: 4, .. })));
    let short = buffer.slice(0, 20).unwrap();
    assert!(matches!(kernels.enqueue_read(stream.as_ref(), short), Err(AccessError::Misaligned { element: 16, .. })));
    STATE.with_borrow_mut(|state| state.capturing = true);
    assert_eq!(kernels.verify(stream.as_ref(), buffer.as_slice(), 1), Err(AccessError::Capturing));
    STATE.with_borrow_mut(|state| state.capturing = false);
    drop((kernels, buffer, stream));
    assert_all_given_back();
}

#[test]
fn streams_copy_only_what_fits() {
    let context = context();
    let buffer = DeviceBuffer::new(&context, 8).unwrap();
    // SAFETY: the null stream is a default stream.
    let stream = unsafe { StreamRef::borrow(&context, RawStream::NULL) };
    assert_eq!(
        stream.copy_from_host(buffer.as_slice(), &[0; 4]),
        Err(AccessError::LengthMismatch { source_len: 4, destination_len: 8 })
    );
    let mut bytes = [0; 8];
    stream.copy_to_host(&mut bytes, buffer.as_slice()).unwrap();
    assert_eq!(bytes, [0xFF; 8]);
    stream.enqueue_wait_u64(buffer.as_slice(), 1).unwrap();
    assert_eq!(stream.is_done(), Ok(false));
    stream.enqueue_write_u64(buffer.as_slice(), 1).unwrap();
    assert_eq!(stream.is_done(), Ok(true));
    STATE.with_borrow_mut(|state| state.capturing = true);
    assert_eq!(stream.copy_to_host(&mut bytes, buffer.as_slice()), Err(AccessError::Capturing));
}

#[test]
fn memory_operations_take_aligned_words_that_they_may_touch() {
    let context = context();
    let mapping =
        Mapping::new(PhysicalMemory::create(&context, GRANULARITY as u64).unwrap(), Access::ReadOnly).unwrap();
    let stream = Stream::new(&context).unwrap();
    let stream = stream.as_ref();
    assert_eq!(stream.enqueue_write_u32(mapping.as_slice(), 1), Err(AccessError::ReadOnly));
    assert_eq!(stream.enqueue_write_u64(mapping.as_slice(), 1), Err(AccessError::ReadOnly));
    stream.enqueue_wait_u32(mapping.slice(4, 4).unwrap(), 1).unwrap();
    let [odd, short] = [(2, 8), (0, 3)].map(|(offset, len)| mapping.slice(offset, len).unwrap());
    assert!(matches!(stream.enqueue_wait_u32(odd, 1), Err(AccessError::Misaligned { element: 4, .. })));
    assert!(matches!(stream.enqueue_wait_u32(short, 1), Err(AccessError::OutOfRange { available: 3, .. })));
    let half = mapping.slice(4, 8).unwrap();
    assert!(matches!(stream.enqueue_wait_u64(half, 1), Err(AccessError::Misaligned { element: 8, .. })));
}

#[test]
fn a_probe_of_memory_operations_tells_the_ways_of_failing_apart() {
    let limit = std::time::Duration::from_millis(1);
    let context = context();
    memop::probe_device_word(&context, limit).unwrap();
    assert_all_given_back();
    for call in ["cuStreamWriteValue32_v2", "cuStreamWaitValue64_v2"] {
        fail(call, 801);
        let Err(ProbeError::Refused(error)) = memop::probe_device_word(&context, limit) else { panic!("{call}") };
        let call = call.trim_end_matches("_v2");
        assert_eq!(error.to_string(), format!("{call} failed: CUDA_ERROR_NOT_SUPPORTED (801)"));
        fail_nothing();
        assert_all_given_back();
    }
    STATE.with_borrow_mut(|state| state.waits_are_ignored = true);
    assert_eq!(memop::probe_device_word(&context, limit), Err(ProbeError::DidNotWait));
    assert_all_given_back();
}

#[test]
fn what_a_stream_still_waits_for_is_never_freed() {
    let context = context();
    fail_after(2, "cuStreamWriteValue64_v2", 719);
    let error = memop::probe_device_word(&context, std::time::Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, ProbeError::Refused(_)), "{error}");
    let left = STATE.with_borrow(|state| state.live.iter().map(|(kind, _)| *kind).collect::<Vec<_>>());
    assert_eq!(left, ["buffer", "context", "stream", "stream"]);
}

#[test]
fn events_between_processes_go_back_too() {
    let context = context();
    let event = IpcEvent::new(&context).unwrap();
    let handle = event.export().unwrap();
    assert_eq!(format!("{handle:?}"), "IpcEventHandle(..)");
    let opened = IpcEvent::open(&context, &handle).unwrap();
    let stream = StreamRef::legacy_default(&context);
    event.record(stream).unwrap();
    opened.enqueue_wait(stream).unwrap();
    assert_eq!(opened.is_done(), Ok(false));
    assert_eq!(IpcEvent::open(&context, &IpcEventHandle([0; 64])).unwrap_err().code, CuResult::INVALID_VALUE);
    drop((event, opened));
    assert_all_given_back();
}

#[test]
fn page_locked_memory_begins_as_zero() {
    let context = context();
    let mut buffer = PinnedBuffer::new(&context, 16).unwrap();
    assert_eq!(&buffer[..], [0; 16]);
    buffer[3] = 7;
    assert_eq!(buffer.iter().sum::<u8>(), 7);
}

#[test]
fn time_does_not_run_backwards() {
    let context = context();
    let (first, second) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
    assert_eq!(second.elapsed_since(&first), Ok(std::time::Duration::ZERO));
}

#[test]
fn binary_images_are_not_taken_for_text() {
    let error = crate::Module::from_ptx(&context(), c"\x7fELF\x02").unwrap_err();
    assert_eq!(error.code, CuResult::INVALID_IMAGE);
}

#[test]
fn a_missing_entry_point_is_named() {
    // SAFETY: nothing is ever called.
    let error =
        unsafe { Driver::simulated(|symbol| if symbol == c"cuMemMap" { std::ptr::null() } else { find(symbol) }) }
            .unwrap_err();
    assert!(matches!(error, crate::LoadError::MissingSymbol { symbol: "cuMemMap", .. }));
    // An optional one is not missed before it is called.
    // SAFETY: as for `driver`.
    let driver = unsafe {
        Driver::simulated(|symbol| if symbol == c"cuGetErrorName" { std::ptr::null() } else { find(symbol) })
    }
    .unwrap();
    assert_eq!(driver.error_name(CuResult(2)), None);
}
