//! The broker, and the watcher of an MPS daemon, as daemons.
#![allow(unsafe_code)] // calls for processes that have one thread and own nothing yet

use std::{
    os::fd::RawFd,
    process::{Command, Stdio},
};

use partywall::ErrorKind;
use partywall_broker::{
    Exit,
    replacement::execute,
    supervisor::{Calls, Supervisor, SupervisorError, Worker, exit_code},
};
use partywall_os::{
    process::Starter,
    supervision::{LeftOpen, fork_sharing_files},
};

use crate::failure::{self, Failure};

/// Detaches this process from its starter; see [`partywall_os::process::daemonize`]. Only `serve` and `mps watch` may
/// call it, before everything else.
pub(in crate::commands) fn daemonize() -> Result<Starter, Failure> {
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    if !matches!(threads, Ok(1) | Err(_)) {
        return Err(Failure::new(ErrorKind::Refused, "a process with several threads cannot become a daemon", ""));
    }
    // SAFETY:
    // - The process has one thread: only `main` and `run` of the command have run, and parsing arguments and reading
    //   the environment starts no thread. Where /proc is mounted, the threads were counted above.
    // - Nothing in the process owns a file descriptor above 2: none was opened except for that count, which closed it.
    unsafe { partywall_os::process::daemonize() }.map_err(|errno| Failure::system("becoming a daemon", errno))
}

/// Returns what the program that has executed this one has left open. Must be called before anything is opened.
pub(super) fn left_open() -> Result<LeftOpen, Failure> {
    // The kernel may have named the process after a number.
    let _ = rustix::thread::set_name(c"partywall");
    // SAFETY: this process has just executed its program, which owns nothing beside the standard streams yet. The
    // worker of the former program has ended, and no other process has the table.
    let left = unsafe { LeftOpen::except(&(0..3).collect()) };
    left.map_err(|errno| Failure::system("listing the open files", errno))
}

/// Runs a supervisor in this process, which must have one thread. `ready` closes the descriptor `starter`.
pub(super) fn supervise(
    supervisor: Supervisor,
    work: impl Fn(Worker, LeftOpen) -> u8,
    ready: impl FnOnce(u32),
    starter: Option<RawFd>,
) -> Result<Exit, SupervisorError> {
    let serve = |worker: Worker| {
        if worker.former_workers() == 0 {
            return work(worker, LeftOpen::none());
        }
        // SAFETY:
        // - This is a process that has just been cloned from the supervisor. It uses what the supervisor has open,
        //   which is excepted, and nothing else yet.
        // - No other process has the table: the former worker is dead, as the supervisor waits for its end.
        let left = unsafe { LeftOpen::except(worker.of_supervisor()) };
        left.map_or(exit_code(None), |left| work(worker, left))
    };
    // SAFETY:
    // - The process has one thread: `serve` starts none before, and the supervisor starts none.
    // - The worker and the supervisor share the socket, the journal and the supervisor's page. The supervisor drops
    //   none of them while a worker lives; the worker drops them at the end of the domain only, when the supervisor
    //   uses them no more.
    let fork = |child: &mut dyn FnMut() -> u8| unsafe { fork_sharing_files(child) };
    supervisor.run(Calls { fork, serve, execute }, ready, starter)
}

/// Reports to the starter why the daemon cannot start.
pub(in crate::commands) fn report(starter: Starter, failure: &Failure) {
    starter.failed(failure.code(), &format!("{}\n{}\n", failure.message, failure.advice));
}

/// Starts a daemon in a process of its own, which prints that it is ready. Returns the reason if it cannot start.
pub(super) fn start() -> Result<(), Failure> {
    let failed = |error| Failure::system("starting the broker", error);
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--detach");
    let child = command.stdin(Stdio::null()).stdout(Stdio::inherit()).stderr(Stdio::piped()).output();
    let child = child.map_err(|source| partywall::Error::starting("the broker", source))?;
    if child.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&child.stderr);
    let (message, advice) = said.trim().split_once('\n').unwrap_or((said.trim(), "`partywall serve` shows more"));
    Err(Failure::new(failure::kind_of(child.status.code()), message, advice))
}
