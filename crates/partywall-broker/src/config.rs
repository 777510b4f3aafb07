//! What a broker is started with.

use std::{path::PathBuf, time::Duration};

use partywall_shm::members::MAX_ROWS;
use partywall_wire::limits::{MAX_MESSAGE, MIN_MESSAGE};

/// What a broker is started with. [`Config::new`] has good values for everything optional.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen. The directory must be ours with mode 0700; it is made if only its last component is missing.
    pub socket: PathBuf,
    /// The domain's name, for the log.
    pub domain: String,
    /// The release, for people.
    pub version: String,
    /// What members may use up.
    pub limits: Limits,
    /// How long to stay without members and names; for ever, if absent.
    pub idle_exit: Option<Duration>,
    /// How long after a process has exited and hung up it counts as dead: the driver may still be writing for it.
    pub settle: Duration,
    /// How long what a dead member held stays in quarantine where its death is no proof that its work is over; until
    /// somebody says so, if absent.
    pub unproven_after: Option<Duration>,
    /// How long a connection may take to say who it is.
    pub handshake_timeout: Duration,
    /// The log file, named by `status`. The broker itself only uses `tracing`.
    pub log_path: Option<PathBuf>,
    /// Whether whoever started this process holds the lock on the socket's directory until it is ready.
    pub starter_holds_lock: bool,
}

impl Config {
    /// A broker of `domain` at `socket` that runs release `version`.
    pub fn new(socket: impl Into<PathBuf>, domain: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            socket: socket.into(),
            domain: domain.into(),
            version: version.into(),
            limits: Limits::default(),
            idle_exit: Some(Duration::from_secs(60)),
            settle: Duration::from_millis(100),
            unproven_after: None,
            handshake_timeout: Duration::from_secs(2),
            log_path: None,
            starter_holds_lock: false,
        }
    }
}

/// What members may use up. Each limit is refused by its own error and never ends the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all versions and control memory together. 16 TiB by default.
    pub bytes: u64,
    /// Names. 65,536 by default.
    pub names: u64,
    /// File descriptors held for versions and control memory; by default what the process's limit of open files leaves beside the clients.
    pub fds: Option<u64>,
    /// Members, without those in quarantine, at most 65,535; by default 4,096, or an eighth of the process's limit of open files where that is less.
    pub clients: Option<u64>,
    /// Bytes of a message's body, between [`MIN_MESSAGE`] and `u32::MAX`. [`MAX_MESSAGE`] by default.
    pub message: usize,
    /// Waiting requests of one member. 1,024 by default.
    pub waits: u64,
    /// Leases of one member. 65,536 by default.
    pub leases: u64,
    /// Timelines. 65,536 by default; cells for twice as many are made at most.
    pub timelines: u64,
    /// Semaphores. 4,096 by default.
    pub semaphores: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 16 << 40,
            names: 1 << 16,
            fds: None,
            clients: None,
            message: MAX_MESSAGE,
            waits: 1024,
            leases: 1 << 16,
            timelines: 1 << 16,
            semaphores: 4096,
        }
    }
}

impl Limits {
    /// Fills in what depends on how many files the process may have open.
    pub(crate) fn resolve(&self, open_files: u64) -> Resolved {
        let clients = self.clients.unwrap_or_else(|| (open_files / 8).clamp(1, 4096)).min(MAX_ROWS as u64);
        let rest = open_files.saturating_sub(clients.saturating_mul(FDS_PER_CLIENT)).saturating_sub(FDS_OF_OURS);
        Resolved {
            bytes: self.bytes,
            names: self.names,
            fds: self.fds.unwrap_or(rest),
            clients,
            message: self.message.clamp(MIN_MESSAGE, u32::MAX as usize),
            waits: self.waits,
            leases: self.leases,
            timelines: self.timelines,
            semaphores: self.semaphores,
        }
    }
}

/// Limits without a blank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) bytes: u64,
    pub(crate) names: u64,
    pub(crate) fds: u64,
    pub(crate) clients: u64,
    pub(crate) message: usize,
    pub(crate) waits: u64,
    pub(crate) leases: u64,
    pub(crate) timelines: u64,
    pub(crate) semaphores: u64,
}

/// The call socket, the events socket, the pidfd.
const FDS_PER_CLIENT: u64 = 3;

/// Standard streams, listener, epoll, log and the like, and room for what a message brings.
const FDS_OF_OURS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_and_versions_share_the_open_files() {
        let few = Limits::default().resolve(1024);
        assert_eq!((few.clients, few.fds), (128, 1024 - 3 * 128 - 64));
        let many = Limits::default().resolve(1 << 30);
        assert_eq!((many.clients, many.fds), (4096, (1 << 30) - 3 * 4096 - 64));
        let none = Limits::default().resolve(10);
        assert_eq!((none.clients, none.fds), (1, 0));
        let rows = Limits { clients: Some(1 << 20), ..Limits::default() }.resolve(1 << 30);
        assert_eq!(rows.clients, (1 << 16) - 1);
        let given = Limits { fds: Some(7), clients: Some(5), message: 1, ..Limits::default() }.resolve(1024);
        assert_eq!((given.clients, given.fds, given.message), (5, 7, MIN_MESSAGE));
    }
}
