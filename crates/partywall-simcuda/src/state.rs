//! The state of the process: whether and where CUDA was initialised, the devices, the tables of the other modules.
//!
//! One lock guards the whole state: calls are short, and a thread never waits for a stream while it holds the lock.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::context::Contexts;
use crate::device::Device;
use crate::memory::Tables;

/// The state that the lock guards.
pub(crate) struct State {
    pub(crate) contexts: Contexts,
    pub(crate) memory: Tables,
}

static STATE: OnceLock<Mutex<State>> = OnceLock::new();
static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
/// The process that called `cuInit`; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Initialises CUDA, for `cuInit`.
pub(crate) fn initialize() -> Result<(), Code> {
    let devices = DEVICES.get_or_init(Device::visible);
    if devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    STATE.get_or_init(|| {
        Mutex::new(State { contexts: Contexts::new(devices.len()), memory: Tables::new(devices.len()) })
    });
    OWNER.store(std::process::id(), Ordering::Release);
    Ok(())
}

pub(crate) fn initialized() -> bool {
    OWNER.load(Ordering::Acquire) != 0
}

/// Returns whether this process is a child of the one that initialised CUDA: there is no CUDA in it.
pub(crate) fn forked() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != std::process::id()
}

/// Returns a handle that no stream, event, module or function had before.
pub(crate) fn new_handle() -> Handle {
    static LAST: AtomicUsize = AtomicUsize::new(0xC0DB_0000_0000);
    LAST.fetch_add(0x10, Ordering::Relaxed)
}

/// Locks the state. Do not hold the lock while waiting for a stream.
pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.get().expect("a call runs after cuInit").lock().ignore_poison()
}

/// Returns the devices that this process sees, by ordinal.
pub(crate) fn devices() -> &'static [Device] {
    DEVICES.get().expect("a call runs after cuInit")
}

/// Returns a device by the number that the caller gave.
///
/// # Errors
/// `INVALID_DEVICE`.
pub(crate) fn device(ordinal: i32) -> Result<(usize, &'static Device), Code> {
    let ordinal = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    Ok((ordinal, devices().get(ordinal).ok_or(Code::INVALID_DEVICE)?))
}
