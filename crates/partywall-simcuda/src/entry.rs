//! The entry of every call into the simulation: all functions go through [`enter`].
//!
//! A call is counted, and when it returns it is written to the log that `SIMCUDA_CALLS` names, as one line
//! `PID INDEX FUNCTION CODE`. A fault that `SIMCUDA_FAULTS` requests takes the place of a call. Names of functions are
//! without their `_v2` or `_v3`. Like the vendor's driver, a call before `cuInit`, or in a child that forked after it,
//! returns `NOT_INITIALIZED`, and a call in a host function `NOT_PERMITTED`. A panic is a bug of the simulation: it is
//! printed and ends the process, because the caller is C.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::faults::{self, Action};

/// Defines functions of the driver, which [`crate::functions`] lists. The body is that of a closure that returns
/// `Result<(), Code>`; the arguments are those of `cuda.h`. A name that `cuda.h` redirects to `_v2` or `_v3` has that
/// suffix.
macro_rules! entry_points {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$attribute])*
            #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
            #[allow(clippy::too_many_arguments)] // the driver's signatures
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::abi::Code {
                $crate::entry::enter(stringify!($name), || -> Result<(), $crate::abi::Code> { $body })
            }
        )*
    };
}
pub(crate) use entry_points;

/// A call of this process, as the log, the faults and the ledger identify it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) function: &'static str,
    /// Counts the calls of the process from 1.
    pub(crate) index: u64,
}

/// The process that called `cuInit`; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static ON_STREAM: Cell<bool> = const { Cell::new(false) };
    /// Whether the calls of this thread are left out of the count.
    static APART: bool = {
        // The name comes from the kernel, because the program and the simulation have separate copies of Rust's
        // library.
        let own = rustix::thread::name().unwrap_or_default();
        std::env::var_os("SIMCUDA_APART").is_some_and(|name| name.as_encoded_bytes() == own.to_bytes())
    };
    static CURRENT: Cell<Call> = const { Cell::new(Call { function: "", index: 0 }) };
}

/// Returns the call that this thread is in, or was in last.
pub(crate) fn current() -> Call {
    CURRENT.get()
}

/// Runs one function.
pub(crate) fn enter(name: &'static str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    let function = name.strip_suffix("_v2").or_else(|| name.strip_suffix("_v3")).unwrap_or(name);
    // In a forked child, locks may be held for ever by threads that exist only in the parent, so no lock is used.
    if is_forked() {
        return Code::NOT_INITIALIZED;
    }
    // Such a thread calls periodically. If its calls were counted, the numbers of other calls would differ in each run.
    let apart = APART.with(|apart| *apart);
    let (index, action) = if apart { (0, None) } else { count(function) };
    CURRENT.set(Call { function, index });
    let code = match action {
        Some(Action::Kill) => {
            log(index, function, "kill");
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).ok();
            std::process::abort()
        }
        Some(Action::Answer(code)) => {
            if GIVES_BACK.contains(&function) {
                let _ = body();
            }
            code
        }
        None if !is_initialized() && !BEFORE_INIT.contains(&function) => Code::NOT_INITIALIZED,
        None if ON_STREAM.get() => Code::NOT_PERMITTED,
        None => catch_unwind(AssertUnwindSafe(body)).map_or_else(
            |_| {
                eprintln!("the simulated CUDA driver panicked in {function}, call {index}");
                std::process::abort()
            },
            |result| result.err().unwrap_or(Code::SUCCESS),
        ),
    };
    if !apart {
        log(index, function, code.0);
    }
    code
}

pub(crate) fn is_initialized() -> bool {
    OWNER.load(Ordering::Acquire) != 0
}

/// Returns whether this process is a child of the one that initialised CUDA: there is no CUDA in it.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != std::process::id()
}

/// Notes that CUDA is initialised, in this process.
pub(crate) fn set_initialized() {
    OWNER.store(std::process::id(), Ordering::Release);
}

/// Makes this thread a stream's: host functions must not call the driver.
pub(crate) fn forbid_calls() {
    ON_STREAM.set(true);
}

/// Returns a handle that no stream, event, module or function had before.
pub(crate) fn new_handle() -> Handle {
    static LAST: AtomicUsize = AtomicUsize::new(0xC0DB_0000_0000);
    LAST.fetch_add(0x10, Ordering::Relaxed)
}

/// Returns the version of the simulation. The vendor's driver has no such function, which distinguishes the two.
pub extern "C" fn simcuda_version() -> u32 {
    1
}

/// Stores a result at the caller's pointer.
///
/// # Errors
/// `INVALID_VALUE` for a null pointer.
pub(crate) fn store<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null; that it is valid for a write of its type is the caller's part of the C contract. It may lie in
    // a packed struct of the caller's.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Counts a call. Returns its index, and the requested fault, if any.
fn count(function: &'static str) -> (u64, Option<Action>) {
    static COUNTS: LazyLock<Mutex<(u64, HashMap<&'static str, u64>)>> = LazyLock::new(Mutex::default);
    let mut counts = COUNTS.lock().ignore_poison();
    counts.0 += 1;
    let index = counts.0;
    let of_function = counts.1.entry(function).or_default();
    *of_function += 1;
    (index, faults::action(function, *of_function, index))
}

/// Writes a line to the log. Each line is a single write at the end of the file, so that lines of several processes do
/// not mix.
fn log(index: u64, function: &str, code: impl std::fmt::Display) {
    static LOG: LazyLock<Option<File>> = LazyLock::new(|| {
        let path = std::env::var_os("SIMCUDA_CALLS")?;
        let opened = File::options().append(true).create(true).open(&path);
        Some(opened.unwrap_or_else(|error| panic!("SIMCUDA_CALLS={}: {error}", path.display())))
    });
    if let Some(mut file) = LOG.as_ref() {
        let line = format!("{} {index} {function} {code}\n", std::process::id());
        file.write_all(line.as_bytes()).expect("the file that SIMCUDA_CALLS names takes lines");
    }
}

/// Calls that do their work even if a fault is requested: the driver may return errors of earlier work from them, but
/// the resource is released nevertheless.
const GIVES_BACK: [&str; 15] = [
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuEventDestroy",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy",
    "cuThreadExchangeStreamCaptureMode",
];

/// The functions that work before `cuInit`.
const BEFORE_INIT: [&str; 2] = ["cuInit", "cuDriverGetVersion"];
