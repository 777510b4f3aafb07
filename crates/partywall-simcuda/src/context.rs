//! Primary contexts, the stack of contexts of each thread, and faults that stay.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle, RawDevice};
use crate::device::{self, losses};
use crate::entry::{entry_points, store};
use crate::ledger;

/// A primary context.
pub(crate) struct Ctx {
    pub(crate) handle: Handle,
    /// The ordinal of its device.
    pub(crate) device: usize,
    /// A code that every call in the context returns until the process ends; 0 if there is none. The device keeps the
    /// code: releasing and retaining the primary context does not clear it.
    fault: Arc<AtomicU32>,
    /// How often the device had lost its memory when the context was made.
    losses: usize,
    destroyed: AtomicBool,
    /// The most local memory, in bytes per thread, that a kernel has needed so far.
    local_bytes: AtomicU64,
    /// Devices whose memory this context may use, by `cuCtxEnablePeerAccess`.
    peers: Mutex<BTreeSet<usize>>,
}

impl Ctx {
    /// Records a fault of work in this context. Only the first fault is kept.
    pub(crate) fn fault(&self, code: Code) {
        let _ = self.fault.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// # Errors
    /// The fault, if there is one.
    pub(crate) fn check(&self) -> Result<(), Code> {
        if losses(device::all()[self.device].physical) != self.losses {
            self.fault(Code::ECC_UNCORRECTABLE);
        }
        Code(self.fault.load(Ordering::Acquire)).ok()
    }

    /// Notes that a kernel needs this much local memory. Returns whether it is more than any before: that memory cannot
    /// grow while work runs.
    pub(crate) fn grows_local_memory(&self, bytes: u64) -> bool {
        self.local_bytes.fetch_max(bytes, Ordering::AcqRel) < bytes
    }

    /// Notes that its last reference was released.
    pub(crate) fn destroy(&self) {
        self.destroyed.store(true, Ordering::Release);
    }

    /// Returns whether work in this context may use memory that lives on the device and was not shared by other means.
    pub(crate) fn reaches(&self, device: usize) -> bool {
        self.device == device || lock(&self.peers).contains(&device)
    }

    /// Lets this context use the device's memory. Returns whether that was not allowed before.
    pub(crate) fn enable_peer(&self, device: usize) -> bool {
        lock(&self.peers).insert(device)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

static CONTEXTS: LazyLock<Mutex<Contexts>> = LazyLock::new(|| {
    let primary = device::all().iter().map(|_| Primary::default()).collect();
    Mutex::new(Contexts { primary, made: 0 })
});

/// Locks the contexts. Do not hold the lock while waiting for a stream.
pub(crate) fn all() -> MutexGuard<'static, Contexts> {
    lock(&CONTEXTS)
}

/// The primary context of each device.
pub(crate) struct Contexts {
    primary: Vec<Primary>,
    made: usize,
}

#[derive(Default)]
struct Primary {
    retained: u32,
    context: Option<Arc<Ctx>>,
    fault: Arc<AtomicU32>,
}

impl Contexts {
    /// Returns the context of a handle, if it lives.
    pub(crate) fn find(&self, handle: Handle) -> Option<&Arc<Ctx>> {
        self.primary.iter().filter_map(|primary| primary.context.as_ref()).find(|context| context.handle == handle)
    }

    /// Returns whether a device has a primary context.
    pub(crate) fn lives(&self, device: usize) -> bool {
        self.primary[device].context.is_some()
    }

    /// Returns whether a context of the process has a fault.
    fn any_fault(&self) -> bool {
        self.primary.iter().any(|primary| primary.fault.load(Ordering::Acquire) != 0)
    }

    pub(crate) fn retain(&mut self, device: usize) -> Handle {
        let primary = &mut self.primary[device];
        primary.retained += 1;
        let context = primary.context.get_or_insert_with(|| {
            self.made += 1;
            Arc::new(Ctx {
                handle: FIRST_HANDLE + self.made * 0x100,
                device,
                fault: primary.fault.clone(),
                losses: losses(device::all()[device].physical),
                destroyed: AtomicBool::new(false),
                local_bytes: AtomicU64::new(LOCAL_BYTES),
                peers: Mutex::default(),
            })
        });
        context.handle
    }

    /// Returns the context that ends with this release, if it was the last.
    pub(crate) fn release(&mut self, device: usize) -> Result<Option<Arc<Ctx>>, Code> {
        let primary = &mut self.primary[device];
        primary.retained = primary.retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        Ok(if primary.retained == 0 { primary.context.take() } else { None })
    }
}

/// The local memory in bytes per thread that a context has at its creation: the default limit of a thread's stack.
pub(crate) const LOCAL_BYTES: u64 = 1024;
/// Handles differ from pointers and from small numbers, so that a confusion shows.
const FIRST_HANDLE: Handle = 0xC0DA_0000_0000;

thread_local! {
    /// The contexts of this thread, the current one last. Kept alive here, so that a destroyed context is distinguished
    /// from none.
    static STACK: RefCell<Vec<Arc<Ctx>>> = const { RefCell::new(Vec::new()) };
}

/// Returns the context of this thread.
///
/// # Errors
/// `INVALID_CONTEXT` if there is none, `CONTEXT_IS_DESTROYED` if its last reference was released, else its fault.
pub(crate) fn current() -> Result<Arc<Ctx>, Code> {
    let context = STACK.with_borrow(|stack| stack.last().cloned()).ok_or(Code::INVALID_CONTEXT)?;
    if context.destroyed.load(Ordering::Acquire) {
        return Err(Code::CONTEXT_IS_DESTROYED);
    }
    context.check()?;
    Ok(context)
}

/// Checks for a call that needs no context, but fails if the current context has a fault.
///
/// # Errors
/// The fault.
pub(crate) fn healthy() -> Result<(), Code> {
    STACK.with_borrow(|stack| stack.last().map_or(Ok(()), |context| context.check()))
}

/// Checks a handle that the caller gave.
pub(crate) fn live(handle: Handle) -> Result<Arc<Ctx>, Code> {
    all().find(handle).cloned().ok_or(Code::INVALID_CONTEXT)
}

entry_points! {
    fn cuCtxPushCurrent_v2(context: Handle) {
        let context = live(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut Handle) {
        let top = STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { store(context, top.handle) }
    }
    fn cuCtxSetCurrent(context: Handle) {
        let context = if context == 0 { None } else { Some(live(context)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(context);
        });
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut Handle) {
        store(context, STACK.with_borrow(|stack| stack.last().map_or(0, |context| context.handle)))
    }
    fn cuCtxGetDevice(device: *mut RawDevice) {
        let top = STACK.with_borrow(|stack| stack.last().map(|context| context.device));
        store(device, top.ok_or(Code::INVALID_CONTEXT)? as RawDevice)
    }
    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let context = current()?;
        let peer = live(peer)?;
        if flags != 0 { return Err(Code::INVALID_VALUE); }
        if context.device == peer.device { return Err(Code::INVALID_DEVICE); }
        if context.enable_peer(peer.device) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }
    fn cuCtxDisablePeerAccess(peer: Handle) {
        let context = current()?;
        let peer = live(peer)?;
        if lock(&context.peers).remove(&peer.device) { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    }
}

/// Runs when the process ends by `exit` or by returning from `main`, but not when it is killed.
extern "C" fn write_ledger() {
    ledger::write(|| all().any_fault());
}

#[used]
// SAFETY: the linker's list of functions without arguments that run at the end.
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = write_ledger;
