//! What the observer does to a process from outside, without its help.

use partywall_os::{Errno, process};
use rustix::{
    net::{Shutdown, shutdown},
    process::{Pid, PidfdGetfdFlags, Rlimit, Signal, getrlimit, kill_process, pidfd_getfd, prlimit},
};

use super::{history::Resource, *};

/// A process that this one has started and not waited for yet, so that its pid is its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Victim(pub(super) u32);

/// A limit that ends when it is lifted.
#[derive(Debug)]
pub(super) struct ResourceLimit {
    pub(super) of: Resource,
    pub(super) until: Instant,
    pub(super) was: Rlimit,
}

impl Victim {
    /// Sends it a signal.
    pub(super) fn signal(self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.0.cast_signed()) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Shuts down its connections, but not its standard input, by which the observer talks to it. Returns false if the
    /// kernel does not let this process do so.
    pub(super) fn close_sockets(self) -> bool {
        let Ok(pidfd) = process::pidfd(self.0) else { return false };
        let socket =
            |path: &PathBuf| fs::read_link(path).ok().filter(|link| link.to_string_lossy().starts_with("socket:"));
        let ours = socket(&PathBuf::from(format!("/proc/{}/fd/0", self.0)));
        let entries = fs::read_dir(format!("/proc/{}/fd", self.0)).into_iter().flatten().flatten();
        let theirs = entries.map(|entry| entry.path()).filter(|path| socket(path).is_some_and(|it| Some(it) != ours));
        for path in theirs {
            let number = path.file_name().and_then(|name| name.to_str()?.parse().ok()).unwrap_or_default();
            match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
                // Fails for a socket that is not connected.
                Ok(socket) => drop(shutdown(socket, Shutdown::Both)),
                Err(Errno::PERM | Errno::NOSYS) => return false,
                // It has closed the socket, or has ended.
                Err(_) => {}
            }
        }
        true
    }

    /// Leaves it without more of a resource than it has. Returns `None` if it has ended.
    pub(super) fn limit(self, of: Resource, time: Duration) -> Option<ResourceLimit> {
        let has = match of {
            // Not fewer than it has, because poll(2) then fails.
            Resource::Descriptors => {
                let entries = fs::read_dir(format!("/proc/{}/fd", self.0)).ok()?.flatten();
                let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
                numbers.max()? + 1
            }
            Resource::Memory => {
                let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
                let kib = |line: &str| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
                status.lines().find_map(kib)? << 10
            }
        };
        let was = self.set(of, Rlimit { current: Some(has), maximum: getrlimit(kernels(of)).maximum })?;
        Some(ResourceLimit { of, until: Instant::now() + time, was })
    }

    /// Sets a limit and returns the one before.
    pub(super) fn set(self, of: Resource, limit: Rlimit) -> Option<Rlimit> {
        prlimit(Pid::from_raw(self.0.cast_signed()), kernels(of), limit).ok()
    }
}

fn kernels(of: Resource) -> rustix::process::Resource {
    match of {
        Resource::Descriptors => rustix::process::Resource::Nofile,
        Resource::Memory => rustix::process::Resource::As,
    }
}
