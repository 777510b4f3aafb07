//! Threads that no signal of the program reaches.
//!
//! The kernel gives a signal to any thread that does not block it. A program that blocks a signal in its own threads,
//! in order to take it with `sigwait` or a signalfd, would otherwise be ended by a signal that a thread of this library
//! gets.
#![allow(unsafe_code)]

use std::{
    io,
    mem::MaybeUninit,
    ptr,
    thread::{Builder, JoinHandle, Scope, ScopedJoinHandle},
};

/// Starts a thread that blocks all signals.
///
/// # Errors
/// As pthread_create(3): `EAGAIN` if a limit of threads is reached.
pub fn spawn<T: Send + 'static>(name: &str, run: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    let _blocked = Blocked::all();
    Builder::new().name(name.into()).spawn(run)
}

/// Starts a thread of `scope` that blocks all signals.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = Blocked::all();
    Builder::new().name(name.into()).spawn_scoped(scope, run)
}

/// While this lives, the calling thread blocks all signals. A thread that it starts inherits that, and so blocks them
/// from its first instruction on.
struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    fn all() -> Self {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: sigfillset initializes the set. Both sets outlive the second call, which fills `before`: it fails
        // only for an unknown action.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Self { before }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is initialized and outlives the call. This is the thread whose mask it was: the type is in no
        // public signature, and both callers drop it where they made it.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// Blocks no signal in the calling thread: a program inherits the mask of the thread that started it.
pub(crate) fn unblock_all() {
    let mut none = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set, which outlives the second call. Neither takes a lock or allocates, so a
    // child may call them between fork and exec.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::{process::Command, thread};

    use super::*;

    /// Returns a set of signals of the calling thread, one bit each (proc_pid_status(5)).
    fn blocked() -> u64 {
        blocked_in(&std::fs::read_to_string("/proc/thread-self/status").unwrap())
    }

    fn blocked_in(status: &str) -> u64 {
        let set = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a status has SigBlk");
        u64::from_str_radix(set.trim(), 16).unwrap()
    }

    /// The signals that a thread can block: all but SIGKILL, SIGSTOP, and the two that the C library keeps.
    const BLOCKABLE: u64 = !(1 << 8 | 1 << 18 | 1 << 31 | 1 << 32);

    // Holds 114.
    #[test]
    fn started_thread_blocks_all_signals_and_its_starter_none() {
        assert_eq!(blocked(), 0);
        let started = spawn("test", || (blocked(), thread::current().name().map(str::to_owned))).unwrap();
        assert_eq!(started.join().unwrap(), (BLOCKABLE, Some("test".to_owned())));
        let scoped = thread::scope(|scope| spawn_scoped(scope, "test", blocked).unwrap().join().unwrap());
        assert_eq!(scoped, BLOCKABLE);
        assert_eq!(blocked(), 0);
    }

    // Holds 114.
    #[test]
    fn program_that_such_a_thread_starts_blocks_none() {
        let status = |start: fn(&mut Command) -> io::Result<std::process::Child>| {
            spawn("test", move || {
                let mut command = Command::new("cat");
                let child = start(command.arg("/proc/self/status").stdout(std::process::Stdio::piped())).unwrap();
                blocked_in(&String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap())
            })
        };
        assert_eq!(status(crate::process::spawn).unwrap().join().unwrap(), 0);
        assert_eq!(status(Command::spawn).unwrap().join().unwrap(), BLOCKABLE, "or process::spawn is not needed");
    }
}
