//! Calls that sharing code must not make, made on purpose. Each returns the driver's answer.
//!
//! They are for labs that show how sharing fails, and for the tests of facts that this crate relies on. None of them
//! can harm host memory. Some of them can end CUDA in the process, so labs make those in a separate process.
#![allow(unsafe_code)] // driver calls

mod coherency;
mod images;

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

pub use coherency::{
    Coherency, Handover, Load, PairsReport, PollReport, Polling, Scope, Store, StoreReport, TurnsReport, WORDS_BYTES,
};
pub use images::{Image, Images};

use crate::abi::{DevicePtr, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, MEM_ATTACH_GLOBAL};
use crate::allocation::Allocation;
use crate::context::CallContext;
use crate::kernels::ptx;
use crate::mapping::rule;
use crate::node::cpu_rule;
use crate::parts::{AddressRange, Parts};
use crate::{
    Access, AccessError, Context, CuResult, CudaError, DeviceSlice, Driver, Event, Function, IpcEventHandle,
    IpcMapping, Kernels, LaunchConfig, Module, PhysicalMemory, StreamRef,
};

/// Device memory of kinds that have no 64-byte handle and that nothing else in this crate allocates. Dropping it frees
/// it; a failure goes to [`Context::take_drop_error`].
#[derive(Debug)]
pub struct UnshareableMemory {
    context: Context,
    pointer: DevicePtr,
}

impl UnshareableMemory {
    /// Allocates managed memory (`cuMemAllocManaged`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for 0 bytes, `CUDA_ERROR_NOT_SUPPORTED` if the device has no managed memory.
    pub fn managed(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; a context is current.
        unsafe { context.driver().mem_alloc_managed(&mut pointer, bytes, MEM_ATTACH_GLOBAL) }?;
        Ok(Self { context: context.clone(), pointer })
    }

    /// Allocates memory of the device's own pool (`cuMemAllocAsync`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for 0 bytes, `CUDA_ERROR_NOT_SUPPORTED` if the device has no pools.
    pub fn pooled(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let stream = StreamRef::legacy_default(context);
        let _guard = context.guard_relaxed()?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; a context is current; the legacy default stream always exists.
        unsafe { context.driver().mem_alloc_async(&mut pointer, bytes, stream.handle()) }?;
        let memory = Self { context: context.clone(), pointer };
        stream.synchronize()?;
        Ok(memory)
    }

    /// Returns the address.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.pointer
    }
}

impl Drop for UnshareableMemory {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: allocated once, freed once; this call frees both kinds.
            unsafe { driver.mem_free(self.pointer) }
        });
    }
}

/// Memory of a NUMA node that another process exported, attached by as few driver calls as possible and never handed
/// out, to measure how long the driver takes. Dropping it unmaps it; a failure goes to [`Driver::take_drop_error`].
pub struct NodeAttachment(#[expect(dead_code, reason = "kept for its drop")] Parts);

impl NodeAttachment {
    /// Imports `bytes` bytes of `node`, maps them, and lets the device of `device` and, if `cpu`, the CPU read them:
    /// one import, one reservation, one mapping, and one `cuMemSetAccess` for both.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(
        driver: &'static Driver,
        node: u32,
        (bytes, descriptor): (u64, BorrowedFd<'_>),
        cpu: bool,
        device: Option<&Context>,
    ) -> Result<Self, CudaError> {
        driver.initialize()?;
        let memory = Allocation::import(CallContext::Any(driver), descriptor, bytes)?;
        let cpu = cpu.then(|| cpu_rule(node, Access::ReadOnly));
        let device = device.map(|context| rule(context, Access::ReadOnly));
        let rules: Vec<_> = cpu.into_iter().chain(device).collect();
        Parts::new(Arc::new(memory), 0, &rules).map(Self)
    }
}

/// Allocates memory of the device's own pool and frees it, both in the order of `stream` (`cuMemAllocAsync`,
/// `cuMemFreeAsync`), to measure how long a pool of the driver takes.
///
/// # Errors
/// As for [`UnshareableMemory::pooled`].
pub fn allocate_and_free_on(stream: StreamRef<'_>, bytes: usize) -> Result<(), CudaError> {
    let context = stream.context();
    let _guard = context.guard_relaxed()?;
    let mut pointer = 0;
    // SAFETY: the pointer is to a live address; a context is current; the owner of the stream keeps it alive.
    unsafe { context.driver().mem_alloc_async(&mut pointer, bytes, stream.handle()) }?;
    // SAFETY: allocated just now on the same stream, freed once; the address was not handed out.
    unsafe { context.driver().mem_free_async(pointer, stream.handle()) }
}

/// Frees the memory behind a mapping of another process's allocation (`cuMemFree`), which only its owner may do. After
/// a success the mapping may be invalid: work on it may then end CUDA in this process.
///
/// # Errors
/// The driver's answer.
pub fn free_mapping(mapping: &IpcMapping) -> Result<(), CudaError> {
    let context = mapping.context();
    let _guard = context.guard_relaxed()?;
    // SAFETY: device memory that no Rust reference is ever made to. Whether it stays mapped concerns the device alone.
    unsafe { context.driver().mem_free(mapping.device_ptr()) }
}

/// Closes a mapping, then closes its address again, and returns the answer to the second call. That call takes the
/// memory from any other mapping of the same handle in this process.
///
/// # Errors
/// The driver's answer.
pub fn close_twice(mapping: IpcMapping) -> Result<(), CudaError> {
    let context = mapping.context().clone();
    let pointer = mapping.device_ptr();
    drop(mapping);
    let _guard = context.guard_relaxed()?;
    // SAFETY: as for `free_mapping`.
    unsafe { context.driver().ipc_close_mem_handle(pointer) }
}

/// Returns a range of the 2 MiB block in which a mapping begins, beyond the shared memory: the memory that a kernel
/// reaches if it runs past the end. `offset` counts from the mapping's first byte. Work on it may end CUDA in this
/// process.
///
/// # Errors
/// [`AccessError::OutOfRange`] beyond the block.
pub fn beyond(mapping: &IpcMapping, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
    let available = BLOCK - mapping.device_ptr() % BLOCK;
    // SAFETY: not all of it need be mapped, which is the experiment: it concerns the device alone. None of it is the
    // host's: the device maps 2 MiB at a time, and the driver gives such a block of addresses to nothing else.
    let block = unsafe { DeviceSlice::from_raw(mapping.device_ptr(), available, Access::ReadOnly) };
    block.slice(offset, len)
}

/// Maps a part of an allocation, or maps it from an offset on. The driver documents that as impossible.
///
/// # Errors
/// The driver's answer. `CUDA_ERROR_NOT_SUPPORTED` (measured).
pub fn map_part(memory: &PhysicalMemory, offset: usize, bytes: u64) -> Result<(), CudaError> {
    let context = memory.context();
    let _guard = context.guard_relaxed()?;
    let range = AddressRange::reserve(&CallContext::Of(context.clone()), bytes)?;
    let driver = context.driver();
    // SAFETY: the range was just reserved and nothing is mapped there; the handle is live while `memory` is.
    unsafe { driver.mem_map(range.pointer, range.bytes, offset, memory.as_raw(), 0) }?;
    // SAFETY: exactly the range that was mapped.
    unsafe { driver.mem_unmap(range.pointer, range.bytes) }
}

/// Creates an event with or without the two flags that sharing needs, requests its handle, and destroys the event, so
/// the handle is invalid.
///
/// # Errors
/// The answer of the call that failed; [`CudaError::call`] names it.
pub fn event_handle(context: &Context, interprocess: bool, timing: bool) -> Result<IpcEventHandle, CudaError> {
    let flags = if interprocess { EVENT_INTERPROCESS } else { 0 } | if timing { 0 } else { EVENT_DISABLE_TIMING };
    IpcEventHandle::of(&Event::with_flags(context, flags)?)
}

/// Forks children now, while CUDA is initialised in this process, and calls the driver in them. Returns each call with
/// the driver's answer, `CUDA_ERROR_NOT_INITIALIZED` (measured).
///
/// # Errors
/// As fork(2).
pub fn calls_in_forked_children(context: &Context) -> std::io::Result<[(&'static str, CuResult); 3]> {
    let driver = context.driver();
    let code = |answer: Result<(), CudaError>| {
        let code = answer.map_or_else(|error| error.code, |()| CuResult::SUCCESS);
        u8::try_from(code.0).unwrap_or(u8::MAX)
    };
    let init = || {
        // SAFETY: takes a number.
        code(unsafe { driver.init(0) })
    };
    let count = || {
        let mut count = 0;
        // SAFETY: the pointer is to a live number.
        code(unsafe { driver.device_get_count(&mut count) })
    };
    let allocate = || {
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address.
        code(unsafe { driver.mem_alloc(&mut pointer, 4096) })
    };
    let calls: [(_, &dyn Fn() -> u8); 3] = [("cuInit", &init), ("cuDeviceGetCount", &count), ("cuMemAlloc", &allocate)];
    let mut answers = [("", CuResult::SUCCESS); 3];
    for (answer, (name, call)) in answers.iter_mut().zip(calls) {
        // SAFETY: in a forked child the driver refuses a call before it takes a lock (measured); nothing else runs
        // there.
        let code = unsafe { partywall_os::process::in_fork(call) }?;
        *answer = (name, CuResult(code.into()));
    }
    Ok(answers)
}

/// A kernel that runs for a given time, like one that has much to do.
#[derive(Debug)]
pub struct Delay {
    kernel: Function,
}

impl Delay {
    /// Loads the kernel. Call it before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`].
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        Ok(Self { kernel: lab_module(context)?.function(c"pw_delay")? })
    }

    /// Enqueues the kernel for this time, at most a minute.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enqueue(&self, stream: StreamRef<'_>, time: Duration) -> Result<(), CudaError> {
        // SAFETY: its one parameter is a 64-bit number; it touches no memory.
        unsafe { launch(&self.kernel, stream, [1, 1], [time.as_nanos() as u64]) }
    }
}

/// A kernel that computes square roots.
#[derive(Debug)]
pub struct SquareRoots {
    kernel: Function,
}

impl SquareRoots {
    /// Loads the kernel. Call it before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`].
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        Ok(Self { kernel: lab_module(context)?.function(c"pw_square_roots")? })
    }

    /// Enqueues a computation of the square roots of all floats of `from`, 32 bits each and rounded to nearest, into
    /// the beginning of `to`.
    ///
    /// # Errors
    /// `to` is shorter or read-only; memory is not aligned to 4 bytes or contains a part of a float; the driver
    /// refuses.
    pub fn enqueue(
        &self,
        stream: StreamRef<'_>,
        from: DeviceSlice<'_>,
        to: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        let to = to.slice(0, from.len())?;
        to.require_writable()?;
        to.elements(4)?;
        let floats = from.elements(4)?;
        // SAFETY: the parameters are those of the kernel. It reads the floats of `from` and writes as many to `to`,
        // which has room for them.
        Ok(unsafe { launch(&self.kernel, stream, [64, 256], [from.device_ptr(), to.device_ptr(), floats]) }?)
    }
}

/// Kernels of one thread that follow a chain through memory, to measure the time of a load or a store.
///
/// Each link of the chain is a word of 64 bits that contains the index of the next word.
#[derive(Debug)]
pub struct Chains {
    reading: Function,
    writing: Function,
}

impl Chains {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As for [`Kernels::load`].
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = lab_module(context)?;
        Ok(Self { reading: module.function(c"pw_follow")?, writing: module.function(c"pw_follow_writing")? })
    }

    /// Enqueues following this many links of `chain`, from the word whose index is in `at`. Afterwards `at` contains
    /// the index at the end; a link that leads out of the chain ends it. With `writing`, the kernel writes the word
    /// behind each link and executes a fence before it reads the link.
    ///
    /// # Errors
    /// `at` is shorter than a word or read-only, or `chain` is with `writing`; memory is not aligned to 8 bytes; the
    /// driver refuses.
    pub fn enqueue(
        &self,
        stream: StreamRef<'_>,
        chain: DeviceSlice<'_>,
        links: u64,
        at: DeviceSlice<'_>,
        writing: bool,
    ) -> Result<(), AccessError> {
        at.require_writable()?;
        at.slice(0, 8)?.elements(8)?;
        // Each link is followed by a word.
        chain.slice(0, 16)?;
        let last = chain.elements(8)? - 2;
        let kernel = if writing {
            chain.require_writable()?;
            &self.writing
        } else {
            &self.reading
        };
        // SAFETY: the parameters are those of the kernel. It reads words of `chain` up to the last but one, and writes
        // the word at `at`, and with `writing` the words behind those that it reads.
        Ok(unsafe { launch(kernel, stream, [1, 1], [chain.device_ptr(), last, links, at.device_ptr()]) }?)
    }
}

/// Enqueues a kernel that writes to an address without a mapping. It ends CUDA in this process, and under MPS in every
/// client of the server.
///
/// # Errors
/// The driver refuses the launch. The fault itself is reported by a later call.
pub fn fault(kernels: &Kernels, stream: StreamRef<'_>) -> Result<(), AccessError> {
    // SAFETY: nothing is mapped there, which is the experiment: it concerns the device alone.
    let nowhere = unsafe { DeviceSlice::from_raw(NOWHERE, 4, Access::ReadWrite) };
    kernels.enqueue_fill(stream, nowhere)
}

fn lab_module(context: &Context) -> Result<Module, CudaError> {
    Module::from_ptx(context, LAB_PTX)
}

/// Launches a kernel with `blocks` blocks of `threads` threads. Its parameters are numbers and addresses of 32 or 64
/// bits.
///
/// # Safety
/// As for [`Function::launch`]. A parameter of 32 bits is the low half of its value.
unsafe fn launch<const N: usize>(
    kernel: &Function,
    stream: StreamRef<'_>,
    [blocks, threads]: [u32; 2],
    mut values: [u64; N],
) -> Result<(), CudaError> {
    const { assert!(cfg!(target_endian = "little"), "the low half of a value comes first") };
    let config = LaunchConfig { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 };
    // SAFETY: the caller's promise; the values outlive the call.
    unsafe { kernel.launch(stream, config, &mut values.each_mut().map(|value| std::ptr::from_mut(value).cast())) }
}

const LAB_PTX: &CStr = ptx(concat!(include_str!("../../kernels/lab.ptx"), "\0"));

/// An address in the first pages, where the driver never maps anything.
const NOWHERE: u64 = 4096;

/// The device maps memory of `cuMemAlloc` in blocks of this size (vendor's documentation of inter-process
/// communication).
const BLOCK: u64 = 2 << 20;
