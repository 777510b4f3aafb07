//! Signal dispositions of child processes.

use std::sync::{Arc, Once};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// The signals that tests send, and that the process that starts the tests may ignore.
const SENT: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Makes processes that are started from now on begin with the default action of every signal.
///
/// A shell ignores SIGINT in background processes, `nohup` ignores SIGHUP, and child processes inherit ignored signals.
/// A *handled* signal, in contrast, has its default action after `exec`. This process therefore installs handlers that
/// do nothing for the signals that it ignores.
///
/// # Panics
/// If the kernel does not report which signals are ignored.
pub(crate) fn reset_in_children() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = ignored();
        for signal in SENT.into_iter().filter(|signal| ignored & (1 << (signal - 1)) != 0) {
            signal_hook::flag::register(signal, Arc::default()).expect("these signals may be handled");
        }
    });
}

/// Returns the set of signals that this process ignores, one bit each (proc_pid_status(5)).
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a status has SigIgn");
    u64::from_str_radix(set.trim(), 16).unwrap()
}
