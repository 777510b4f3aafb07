//! The broker, and the watcher of an MPS daemon, as daemons.
#![allow(unsafe_code)] // one call, for a process that has done nothing yet

use std::process::{Command, Stdio};

use partywall::ErrorKind;
use partywall_os::process::Starter;

use crate::failure::{self, Failure};

/// Detaches this process from its starter; see [`partywall_os::process::daemonize`]. Only `serve` and `mps watch` may call
/// it, before everything else.
pub(in crate::commands) fn daemonize() -> Result<Starter, Failure> {
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    if !matches!(threads, Ok(1) | Err(_)) {
        return Err(Failure::new(ErrorKind::Refused, "a process with several threads cannot become a daemon", ""));
    }
    // SAFETY:
    // - The process has one thread: only `main` and `run` of the command have run, and parsing arguments and reading the
    //   environment starts no thread. Where /proc is mounted, the threads were counted above.
    // - Nothing in the process owns a file descriptor above 2: none was opened except for that count, which closed it.
    unsafe { partywall_os::process::daemonize() }.map_err(|errno| Failure::system("becoming a daemon", errno))
}

/// Reports to the starter why the daemon cannot start.
pub(in crate::commands) fn report(starter: Starter, failure: &Failure) {
    starter.failed(failure.code(), &format!("{}\n{}\n", failure.message(), failure.advice()));
}

/// Starts a daemon in a process of its own, which prints that it is ready. Returns the reason if it cannot start.
pub(super) fn start() -> Result<(), Failure> {
    let failed = |error| Failure::system("starting the broker", error);
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--detach");
    let child = command.stdin(Stdio::null()).stdout(Stdio::inherit()).stderr(Stdio::piped()).output();
    let child = child.map_err(failed)?;
    if child.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&child.stderr);
    let (message, advice) = said.trim().split_once('\n').unwrap_or((said.trim(), "`partywall serve` shows more"));
    Err(Failure::new(failure::kind_of(child.status.code()), message, advice))
}
