//! Ctrl-C and `kill`: the command undoes or closes its work before the process ends. And the end of its parent.

use std::{
    fs,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use partywall::ErrorKind;
use rustix::process::{RawPid, Signal, getppid, set_parent_process_death_signal};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag, low_level,
};

use crate::failure::Failure;

/// Returns a flag that the first Ctrl-C, SIGTERM or end of the terminal sets. A second signal ends the process
/// immediately.
///
/// # Errors
/// If the kernel refuses the handler.
pub fn cancel_flag() -> Result<Arc<AtomicBool>, Failure> {
    let refused = |error| Failure::system("handling signals", error);
    let stop = Arc::new(AtomicBool::new(false));
    // `nohup` starts programs that outlive their terminal.
    let hang_up = if is_ignored(SIGHUP) { None } else { Some(SIGHUP) };
    for signal in [SIGINT, SIGTERM].into_iter().chain(hang_up) {
        flag::register_usize(signal, RECEIVED.clone(), signal as usize).map_err(refused)?;
        // Registered before the handler that sets the flag: the first signal must find the flag unset.
        flag::register_conditional_default(signal, stop.clone()).map_err(refused)?;
        flag::register(signal, stop.clone()).map_err(refused)?;
    }
    Ok(stop)
}

/// Ends the process by the signal that has set the flag of [`cancel_flag`], so that a shell sees what has ended it.
/// Returns if there was none.
pub(crate) fn end_by_received() {
    let signal = RECEIVED.load(Ordering::Relaxed);
    if signal != 0 {
        // A failure leaves the exit code to the caller.
        let _ = low_level::emulate_default_handler(signal as i32);
    }
}

/// Has the kernel kill this process when the thread of its parent that has started it ends: at once if that has ended.
/// What a killed command has begun ends with it.
pub(crate) fn end_with(parent: RawPid) -> Result<(), Failure> {
    let refused = |errno| Failure::system("asking for a signal", errno);
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(refused)?;
    // A parent that ended before the request sends no signal. One in another PID namespace has no pid here to compare.
    if getppid().is_none_or(|found| found.as_raw_pid() == parent) {
        return Ok(());
    }
    let message = format!("process {parent}, with which this one is to end, is not its parent, or has ended");
    Err(Failure::new(ErrorKind::Usage, message, "leave --with-parent to programs that start this one"))
}

/// Returns whether the process was started with this signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    set & (1 << (signal - 1)) != 0
}

/// The last signal that has set a flag of [`cancel_flag`]; 0 if there was none.
static RECEIVED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// Returns a flag that Ctrl-C, SIGTERM and the end of the terminal set. No number of signals ends the process: it has
/// the terminal to restore first.
///
/// # Errors
/// If the kernel refuses the handler.
pub(crate) fn end_flag() -> Result<Arc<AtomicBool>, Failure> {
    let end = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, end.clone()).map_err(|error| Failure::system("handling signals", error))?;
    }
    Ok(end)
}
