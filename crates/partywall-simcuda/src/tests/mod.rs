//! The entry points, called as a program calls them. A test that needs other settings, or that ends in a fault, runs in
//! a process of its own: this binary again, with one test and a role.

mod events;
mod faults;
mod graphs;
mod memory;
mod nodes;
mod other_processes;
mod peer;
mod process;
mod sharing;
mod streams;

use std::ffi::{CStr, CString, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{ptr, thread};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::abi::{Code, DevicePtr, Handle};
use crate::functions::*;

/// Panics unless the call succeeds.
macro_rules! must {
    ($call:expr) => {{
        // SAFETY: the test passes what the function's contract asks for.
        let code = unsafe { $call };
        assert_eq!(code, $crate::abi::Code::SUCCESS, "{}", stringify!($call));
    }};
}
/// Returns the result of a call.
macro_rules! answer {
    ($call:expr) => {{
        // SAFETY: as for `must`.
        unsafe { $call }
    }};
}
use {answer, must};

/// Initialises CUDA and makes device 0's context current on this thread.
fn begin() {
    must!(cuInit(0));
    let mut context = 0;
    must!(cuDevicePrimaryCtxRetain(&mut context, 0));
    must!(cuCtxSetCurrent(context));
}

/// Returns the context of this thread, for use on another thread.
fn context_handle() -> Handle {
    let mut context = 0;
    must!(cuCtxGetCurrent(&mut context));
    context
}

fn make_current(context: Handle) {
    must!(cuCtxSetCurrent(context));
}

/// Checks for a while that `happens` stays false. Only a fault of the simulation could make it true.
fn never(happens: impl Fn() -> bool) {
    for _ in 0..100 {
        assert!(!happens());
        thread::sleep(Duration::from_millis(2));
    }
}

fn new_stream() -> Handle {
    let mut stream = 0;
    must!(cuStreamCreate(&mut stream, 1));
    stream
}

fn device_memory(bytes: usize) -> DevicePtr {
    let mut pointer = 0;
    must!(cuMemAlloc_v2(&mut pointer, bytes));
    pointer
}

/// Allocates page-locked memory, zeroed.
fn pinned(bytes: usize) -> *mut u8 {
    let mut pointer: *mut c_void = ptr::null_mut();
    must!(cuMemHostAlloc(&mut pointer, bytes, 0));
    // SAFETY: allocated a moment ago.
    unsafe { pointer.write_bytes(0, bytes) };
    pointer.cast()
}

fn is_done(stream: Handle) -> bool {
    match answer!(cuStreamQuery(stream)) {
        Code::SUCCESS => true,
        Code::NOT_READY => false,
        other => panic!("{other:?}"),
    }
}

fn synchronize(stream: Handle) {
    must!(cuStreamSynchronize(stream));
}

/// Loads Partywall's kernels once more.
fn load() -> Handle {
    let text = CString::new(include_str!("../../../partywall-cuda/kernels/partywall.ptx")).expect("text");
    let mut module = 0;
    must!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
    module
}

fn kernel(name: &CStr) -> Handle {
    function(load(), name)
}

fn function(module: Handle, name: &CStr) -> Handle {
    let mut function = 0;
    must!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// Launches a kernel whose parameters are 64 bits wide.
fn launch(function: Handle, stream: Handle, parameters: &mut [u64]) -> Code {
    let mut pointers: Vec<*mut c_void> = parameters.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
    answer!(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, pointers.as_mut_ptr(), ptr::null_mut()))
}

/// Words of shared memory that another process can map: a memfd, mapped and registered here.
struct SharedWords {
    file: OwnedFd,
    map: *mut u8,
    device: DevicePtr,
}

impl SharedWords {
    fn new(bytes: usize) -> Self {
        let file = rustix::fs::memfd_create("test", MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        Self::map(file, bytes)
    }

    /// Maps the words of the process that passed its descriptor in `WORDS`.
    fn inherited(bytes: usize) -> Self {
        let number = std::env::var("WORDS").unwrap().parse().unwrap();
        // SAFETY: inherited for this.
        Self::map(unsafe { OwnedFd::from_raw_fd(number) }, bytes)
    }

    fn map(file: OwnedFd, bytes: usize) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which stays.
        let map = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
        let mut device = 0;
        must!(cuMemHostRegister_v2(map, bytes, 2));
        must!(cuMemHostGetDevicePointer_v2(&mut device, map, 0));
        Self { file, map: map.cast(), device }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: within the mapping, which stays; other processes use atomics too.
        unsafe { AtomicU64::from_ptr(self.map.cast::<u64>().add(index)) }
    }

    /// Returns the number of its descriptor, for `WORDS`.
    fn descriptor(&self) -> String {
        self.file.as_raw_fd().to_string()
    }

    /// Waits until a word is no longer zero.
    fn wait(&self, index: usize) {
        while self.word(index).load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
    }

    fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }
}

/// Returns the role that this process plays, if it was started for one.
fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

const ROLE: &str = "SIMCUDA_TEST_ROLE";
