//! Two processes that share one table of file descriptors, signals that one of them waits for, and its replacement by
//! another program.
//!
//! What one process of a table opens, the other has open under the same number, and what one closes is closed for both.
//! The kernel drops a table with its last process. Descriptors therefore survive the death of the process that opened
//! them: its supervisor has them too, and the next worker finds them by number. A process that executes another program
//! keeps its table, apart from the descriptors that close on exec.
#![allow(unsafe_code)]

use std::{
    collections::BTreeSet,
    ffi::{CString, OsString, c_char},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{ffi::OsStringExt, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    ptr,
    time::{Duration, Instant},
};

use rustix::{
    io::{self, Errno},
    process::{self, Pid, Resource, Signal},
};

/// Starts a copy of this process that shares its table of file descriptors (clone(2) with `CLONE_FILES`). The copy runs
/// `child` and exits with its result, without dropping what it has inherited. Returns its pid; the caller has to wait
/// for its end.
///
/// # Safety
/// - This process has one thread.
/// - What the copy drops, this process does not use afterwards, and the reverse: each would close the other's
///   descriptors.
///
/// # Errors
/// As clone(2).
pub unsafe fn fork_sharing_files(child: &mut dyn FnMut() -> u8) -> io::Result<Pid> {
    let flags = libc::c_long::from(libc::CLONE_FILES | libc::SIGCHLD);
    // SAFETY: without a stack of its own and without `CLONE_VM` the copy continues here in a copy of this memory, as
    // after fork(2). The process has one thread (the caller's promise), so the copy inherits no lock that another
    // thread holds, and the C library has nothing to prepare. The remaining arguments are unused with these flags, in
    // any order.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) } {
        -1 => Err(last_errno()),
        0 => {
            let code = child();
            // SAFETY: ends the copy without running destructors or handlers of the process that it is a copy of.
            unsafe { libc::_exit(i32::from(code)) }
        }
        pid => i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH),
    }
}

/// Returns the numbers of this process's open file descriptors.
///
/// # Errors
/// As getdents64(2).
pub fn open_numbers() -> io::Result<BTreeSet<RawFd>> {
    // SAFETY: the number is only asked for; if no file is open under it, the call fails.
    let is_open = |number: &RawFd| *number >= 0 && io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(*number) }).is_ok();
    let listed = match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect::<Vec<_>>(),
        // Without /proc each possible number is tried.
        Err(_) => {
            let limit = process::getrlimit(Resource::Nofile).current.unwrap_or(MOST_NUMBERS).min(MOST_NUMBERS);
            (0..RawFd::try_from(limit).unwrap_or(RawFd::MAX)).collect()
        }
    };
    // The descriptor by which the folder was read is closed by now.
    Ok(listed.into_iter().filter(is_open).collect())
}

/// Sets whether a program that this process executes has these file descriptors. Numbers under which no file is open
/// are skipped.
pub fn set_inherited(numbers: &BTreeSet<RawFd>, inherited: bool) {
    let flags = if inherited { io::FdFlags::empty() } else { io::FdFlags::CLOEXEC };
    for number in numbers.iter().filter(|number| **number >= 0) {
        // SAFETY: only a flag of the number is set; if no file is open under it, the call fails.
        let _ = io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(*number) }, flags);
    }
}

/// The arguments and the environment of this process, for another program.
#[derive(Debug)]
pub struct Invocation {
    /// Null-terminated arrays of pointers into `strings`, as execve(2) takes them.
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    _strings: Vec<CString>,
}

// SAFETY: the pointers lead into strings that the value owns and that nothing changes.
unsafe impl Send for Invocation {}
// SAFETY: as for `Send`.
unsafe impl Sync for Invocation {}

impl Invocation {
    /// Copies the arguments and the environment of this process, in which `variable` is `value`.
    pub fn of_this_process(variable: &str, value: &str) -> Self {
        // Neither can contain a zero byte.
        let string = |text: OsString| CString::new(text.into_vec()).unwrap_or_default();
        let arguments: Vec<_> = std::env::args_os().map(string).collect();
        let others = std::env::vars_os().filter(|(name, _)| name != variable);
        let pair = |(name, value): (OsString, OsString)| string([name, value].join("=".as_ref()));
        let environment: Vec<_> = others.chain([(variable.into(), value.into())]).map(pair).collect();
        let pointers = |strings: &[CString]| strings.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
        Self {
            arguments: pointers(&arguments),
            environment: pointers(&environment),
            // Moved: the bytes stay where they are.
            _strings: arguments.into_iter().chain(environment).collect(),
        }
    }

    /// Executes the file `program` in this process. Returns only if that fails, and then why. Makes one system call.
    pub fn execute(&self, program: RawFd) -> Errno {
        let arguments = self.arguments.as_ptr();
        let environment = self.environment.as_ptr();
        // SAFETY: both arrays end with a null pointer and lead to strings that `self` owns. The kernel copies them
        // before it replaces the memory of this process.
        unsafe {
            libc::syscall(libc::SYS_execveat, program, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH);
        }
        last_errno()
    }
}

/// Starts the file `program` in a child process with the arguments and the environment of this process, except that
/// `variable` has the value that `value` returns for the numbers of `fds` in the child. The child has no standard
/// streams and no other file descriptor, and is killed when the calling thread ends.
///
/// # Errors
/// As fork(2) and execveat(2).
pub fn start_program(
    program: impl AsFd,
    fds: &[BorrowedFd<'_>],
    variable: &str,
    value: impl FnOnce(&[RawFd]) -> String,
) -> std::io::Result<Child> {
    let mut command = Command::new("");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let numbers = crate::process::inherit(&mut command, fds)?;
    let invocation = Invocation::of_this_process(variable, &value(&numbers));
    let program = io::fcntl_dupfd_cloexec(program, 3)?;
    let parent = process::getpid();
    // SAFETY: the closure only makes system calls on values that it owns. It takes no lock and allocates nothing: an
    // errno becomes an error without a heap allocation.
    unsafe {
        command.pre_exec(move || {
            crate::thread::unblock_all();
            process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have ended before the request; then no signal comes.
            if process::getppid() != Some(parent) {
                return Err(Errno::SRCH.into());
            }
            Err(invocation.execute(program.as_raw_fd()).into())
        });
    }
    command.spawn()
}

/// The file descriptors that the former process of a table has left open.
#[derive(Debug)]
pub struct LeftOpen(BTreeSet<RawFd>);

impl LeftOpen {
    /// Takes possession of all open file descriptors except `others`.
    ///
    /// # Safety
    /// Nothing in this process owns or uses a descriptor that is not among `others`, and no other process of the table
    /// does.
    ///
    /// # Errors
    /// As [`open_numbers`].
    pub unsafe fn except(others: &BTreeSet<RawFd>) -> io::Result<Self> {
        Ok(Self(open_numbers()?.difference(others).copied().collect()))
    }

    /// Returns no descriptors, for the first process of a table.
    pub fn none() -> Self {
        Self(BTreeSet::new())
    }

    /// Returns the descriptor with this number; `None` if it is not among those, or was taken before.
    pub fn take(&mut self, number: RawFd) -> Option<OwnedFd> {
        // SAFETY: open, and owned by nothing else: the caller's promise when it made this set. It leaves the set, so
        // it has one owner.
        self.0.remove(&number).then(|| unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Returns all remaining descriptors.
    pub fn take_rest(&mut self) -> Vec<OwnedFd> {
        let numbers: Vec<_> = self.0.iter().copied().collect();
        numbers.into_iter().filter_map(|number| self.take(number)).collect()
    }
}

/// Signals that the calling thread blocks, in order to wait for them.
#[derive(Debug, Clone, Copy)]
pub struct WaitedSignals(libc::sigset_t);

impl WaitedSignals {
    /// Blocks `signals`, given by their numbers, in the calling thread, and gives them their default action, so that
    /// the end of a child is reported even if the parent of this process ignored `SIGCHLD`. Child processes inherit
    /// both; see [`WaitedSignals::unblock`]. So does a program that this process executes: signals that are pending
    /// stay pending.
    ///
    /// # Errors
    /// As pthread_sigmask(3).
    pub fn block(signals: &[i32]) -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initializes the set.
        let mut set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            set.assume_init()
        };
        for signal in signals {
            // SAFETY: the set is initialized, and the default action runs no code of ours. A number that is none only
            // makes the calls fail.
            unsafe {
                libc::sigaddset(&raw mut set, *signal);
                libc::signal(*signal, libc::SIG_DFL);
            }
        }
        // SAFETY: the set is initialized and outlives the call.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) } {
            0 => Ok(Self(set)),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Lets the signals arrive in the calling thread, as a child process does that handles them itself.
    pub fn unblock(&self) {
        // SAFETY: the set is initialized and outlives the call, which fails only for an unknown action.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const self.0, ptr::null_mut()) };
    }

    /// Returns the next of the signals; `None` if none arrives within `timeout`.
    ///
    /// # Errors
    /// As sigtimedwait(2), without `EAGAIN` and `EINTR`.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<i32>> {
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            let left = libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: libc::c_long::from(left.subsec_nanos()),
            };
            // SAFETY: the set and the time are initialized and outlive the call, which stores nothing.
            match unsafe { libc::sigtimedwait(&raw const self.0, ptr::null_mut(), &raw const left) } {
                -1 => match last_errno() {
                    Errno::AGAIN => return Ok(None),
                    // The process was stopped and continues, for example.
                    Errno::INTR => {}
                    errno => return Err(errno),
                },
                signal => return Ok(Some(signal)),
            }
        }
    }
}

/// Returns the signals that end a process by default although nothing is wrong in it: those that people, shells,
/// terminals, timers and service managers send, without `SIGTERM`, `SIGINT` and `SIGKILL`.
///
/// `SIGPIPE` and `SIGXFSZ` are not among them: they report what a system call returns as an error, too.
pub fn stray_signals() -> Vec<i32> {
    let named = [
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::USR2,
        Signal::ALARM,
        Signal::VTALARM,
        Signal::PROF,
        Signal::IO,
        Signal::POWER,
        Signal::STKFLT,
        Signal::XCPU,
    ];
    // The C library keeps the first realtime signals for itself.
    named.iter().map(|signal| signal.as_raw()).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).collect()
}

/// Sends a signal, given by its number, to a child.
///
/// # Errors
/// As kill(2).
pub fn pass_on(signal: i32, child: Pid) -> io::Result<()> {
    // SAFETY: the call uses no memory of this process.
    match unsafe { libc::kill(child.as_raw_nonzero().get(), signal) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// More descriptors than a process may have by default (`fs.nr_open`).
const MOST_NUMBERS: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::{memfd, process::close_from};

    /// Runs a test in a process with one thread.
    fn alone(test: impl FnOnce() -> u8) {
        let alone = || {
            // Other tests may have opened hundreds of files, and a number has to fit into an exit code.
            // SAFETY: the child uses and drops nothing of the program that it is a fork of.
            let _ = unsafe { close_from(3) };
            test()
        };
        // The threads of the test program do not exist in a fork, which may do little; this test allocates, which the C
        // library permits after its own fork.
        // SAFETY: the child takes no lock of this program except the allocator's, which fork(2) of the C library makes
        // usable in the child.
        let outcome = unsafe { crate::process::in_fork(alone) };
        assert_eq!(outcome, Ok(0));
    }

    fn wait(pid: Pid) -> Option<i32> {
        let status = io::retry_on_intr(|| process::waitpid(Some(pid), process::WaitOptions::empty())).ok()??;
        status.1.exit_status()
    }

    #[test]
    fn descriptor_survives_the_process_that_opened_it() {
        alone(|| {
            let Ok(ours) = open_numbers() else { return 1 };
            // SAFETY: one thread; the child drops nothing of this process.
            let child = unsafe {
                fork_sharing_files(&mut || {
                    let Ok(file) = memfd::frozen("partywall:test", b"kept") else { return 0 };
                    let number = file.as_raw_fd();
                    std::mem::forget(file);
                    u8::try_from(number).unwrap_or(0)
                })
            };
            let Some(number) = child.ok().and_then(wait).filter(|number| *number != 0) else { return 2 };
            // SAFETY: this process opened nothing since, and the child is gone.
            let Ok(mut left) = (unsafe { LeftOpen::except(&ours) }) else { return 3 };
            let Some(file) = left.take(number) else { return 4 };
            if left.take(number).is_some() || !left.take_rest().is_empty() {
                return 5;
            }
            u8::from(memfd::len(file.as_fd()) != Ok(4))
        });
    }

    #[test]
    fn wait_for_signals_goes_on_after_a_stop() {
        alone(|| {
            let Ok(signals) = WaitedSignals::block(&[Signal::TERM.as_raw()]) else { return 1 };
            let us = process::getpid();
            // SAFETY: one thread; the child drops nothing.
            let child = unsafe {
                fork_sharing_files(&mut || {
                    // Each stop ends a wait of the kernel.
                    for signal in [Signal::STOP, Signal::CONT, Signal::STOP, Signal::CONT, Signal::TERM] {
                        std::thread::sleep(Duration::from_millis(20));
                        let _ = process::kill_process(us, signal);
                    }
                    0
                })
            };
            let Ok(child) = child else { return 3 };
            if signals.wait(Duration::from_secs(60)) != Ok(Some(Signal::TERM.as_raw())) {
                return 4;
            }
            u8::from(wait(child) != Some(0)) * 5
        });
    }

    #[test]
    fn blocked_signals_are_waited_for() {
        alone(|| {
            let waited = [Signal::TERM, Signal::CHILD].map(Signal::as_raw);
            let Ok(signals) = WaitedSignals::block(&waited) else { return 1 };
            // SAFETY: one thread; the child drops nothing.
            let Ok(child) = (unsafe { fork_sharing_files(&mut || 0) }) else { return 2 };
            if signals.wait(Duration::from_secs(60)) != Ok(Some(Signal::CHILD.as_raw())) || wait(child) != Some(0) {
                return 3;
            }
            if process::kill_process(process::getpid(), Signal::TERM).is_err() {
                return 4;
            }
            if signals.wait(Duration::from_secs(60)) != Ok(Some(Signal::TERM.as_raw())) {
                return 5;
            }
            u8::from(signals.wait(Duration::ZERO) != Ok(None)) * 6
        });
    }

    // Holds 143.
    #[test]
    fn stray_signals_end_no_process_that_waits_for_them() {
        alone(|| {
            let stray = stray_signals();
            let Ok(signals) = WaitedSignals::block(&stray) else { return 1 };
            for signal in &stray {
                // SAFETY: the signal is blocked, so nothing is interrupted.
                if unsafe { libc::raise(*signal) } != 0 || signals.wait(Duration::ZERO) != Ok(Some(*signal)) {
                    return u8::try_from(*signal).unwrap_or(u8::MAX);
                }
            }
            u8::from(!stray.contains(&libc::SIGRTMAX()) || stray.contains(&libc::SIGTERM)) * 2
        });
    }
}
