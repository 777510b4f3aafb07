//! The configuration of a broker.

use std::{path::PathBuf, time::Duration};

use partywall_shm::members::MAX_ROWS;
use partywall_wire::limits::{MAX_MESSAGE, MIN_MESSAGE};

use crate::StartError;

/// The configuration of a broker. [`Config::new`] sets defaults for everything optional.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen. This user must own the directory, with mode 0700. It is created if only its last component is
    /// missing.
    pub socket: PathBuf,
    /// The domain's name, for the log.
    pub domain: String,
    /// The release, shown to people.
    pub version: String,
    /// The limits on what members use.
    pub limits: Limits,
    /// How long the broker runs without members and names; without a limit if absent.
    pub idle_exit: Option<Duration>,
    /// The settle time: how long after a process has exited and closed its connections it counts as dead. Until then
    /// the driver may still write on its behalf.
    pub settle: Duration,
    /// How long a dead member's leases stay in quarantine if its death does not prove that its work is over. If absent,
    /// until an operator frees them.
    pub unproven_after: Option<Duration>,
    /// How long a connection may take to complete its handshake.
    pub handshake_timeout: Duration,
    /// The log file, for `status` to report. The broker itself logs only through `tracing`.
    pub log_path: Option<PathBuf>,
    /// Whether the process that started this one locks the socket's directory until the broker is ready.
    pub starter_holds_lock: bool,
}

impl Config {
    /// Returns the defaults for a broker of `domain` at `socket` that runs release `version`.
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

/// The limits on what members use. Exceeding a limit has its own error and never ends the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all versions and control memory together. 16 TiB by default.
    pub bytes: u64,
    /// Names. 65,536 by default.
    pub names: u64,
    /// File descriptors held for versions and control memory; by default the process's limit of open files minus those
    /// of clients, at least 64.
    pub fds: Option<u64>,
    /// Members, without those in quarantine, at most 65,535; by default 4,096 or an eighth of the process's limit of
    /// open files, whichever is less, but at least 16.
    pub clients: Option<u64>,
    /// Bytes of a message's body, between [`MIN_MESSAGE`] and `u32::MAX`. [`MAX_MESSAGE`] by default.
    pub message: usize,
    /// Waiting requests of one member. 1,024 by default.
    pub waits: u64,
    /// Leases of one member. 65,536 by default.
    pub leases: u64,
    /// Timelines. 65,536 by default. At most twice as many cells are created.
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
    /// Resolves the limits that depend on the process's limit of open files.
    ///
    /// # Errors
    /// [`StartError::TooFewFiles`] if members would leave too few descriptors for memory.
    pub(crate) fn resolve(&self, open_files: u64) -> Result<Resolved, StartError> {
        let memory = self.fds.unwrap_or(MIN_FDS_FOR_MEMORY);
        let for_clients = open_files.saturating_sub(FDS_OF_OURS).saturating_sub(memory);
        let room = for_clients / FDS_PER_CLIENT;
        let clients = match self.clients {
            Some(clients) => clients.min(MAX_ROWS as u64),
            None => (open_files / 8).min(room).clamp(MIN_CLIENTS, MAX_DEFAULT_CLIENTS),
        };
        if clients > room {
            let needed = (clients * FDS_PER_CLIENT).saturating_add(FDS_OF_OURS).saturating_add(memory);
            return Err(StartError::TooFewFiles { open_files, needed, clients, room, memory });
        }
        Ok(Resolved {
            fds: self.fds.unwrap_or(open_files - clients * FDS_PER_CLIENT - FDS_OF_OURS),
            clients,
            given: Self { message: self.message.clamp(MIN_MESSAGE, u32::MAX as usize), ..self.clone() },
        })
    }
}

/// Limits with every value resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) fds: u64,
    pub(crate) clients: u64,
    /// The limits that do not depend on the process's limit of open files.
    pub(crate) given: Limits,
}

/// File descriptors of a client: the call socket, the events socket, the pidfd; and its former call socket, for a moment after
/// a restart of the broker.
const FDS_PER_CLIENT: u64 = 4;

/// Connections for operators, which are not members: enough for a few `ps` and `stop` while no further member is admitted.
pub(crate) const OPERATORS: u64 = 16;

/// Other files: standard streams, listener, epoll, log, descriptors of a message, operators, and unauthenticated
/// connections.
const FDS_OF_OURS: u64 = 64 + OPERATORS * FDS_PER_CLIENT + 64;

/// A broker with fewer file descriptors for memory would refuse commits soon after it has started.
const MIN_FDS_FOR_MEMORY: u64 = 64;

/// The smallest default for the number of members.
const MIN_CLIENTS: u64 = 16;

/// The default for the number of members, if the limit of open files allows it.
const MAX_DEFAULT_CLIENTS: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_and_versions_share_the_fd_limit() {
        let few = Limits::default().resolve(1024).unwrap();
        assert_eq!((few.clients, few.fds), (128, 1024 - 4 * 128 - FDS_OF_OURS));
        let many = Limits::default().resolve(1 << 30).unwrap();
        assert_eq!((many.clients, many.fds), (4096, (1 << 30) - 4 * 4096 - FDS_OF_OURS));
        let rows = Limits { clients: Some(1 << 20), ..Limits::default() }.resolve(1 << 30).unwrap();
        assert_eq!(rows.clients, (1 << 16) - 1);
        let given = Limits { fds: Some(7), clients: Some(5), message: 1, ..Limits::default() }.resolve(1024).unwrap();
        assert_eq!((given.clients, given.fds, given.given.message), (5, 7, MIN_MESSAGE));
    }

    /// Resolves limits that must be refused. Returns the number of files that are needed and of members that fit.
    fn refused(limits: &Limits, open_files: u64) -> (u64, u64) {
        match limits.resolve(open_files) {
            Err(StartError::TooFewFiles { needed, room, .. }) => (needed, room),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn limits_without_room_for_memory_are_refused_with_sufficient_numbers() {
        let crowded = Limits { clients: Some(12_000), ..Limits::default() };
        let (needed, room) = refused(&crowded, 20_000);
        assert_eq!((needed, room), (48_256, 4936));
        assert_eq!(crowded.resolve(needed).unwrap().fds, MIN_FDS_FOR_MEMORY);
        assert!(Limits { clients: Some(room), ..Limits::default() }.resolve(20_000).is_ok());

        let (needed, _) = refused(&Limits::default(), 32);
        let least = Limits::default().resolve(needed).unwrap();
        assert_eq!((least.clients, least.fds), (MIN_CLIENTS, MIN_FDS_FOR_MEMORY));
        for open_files in 0..needed {
            assert_eq!(refused(&Limits::default(), open_files).0, needed);
        }

        let given = Limits { fds: Some(10_000), ..Limits::default() };
        let (needed, _) = refused(&given, 1024);
        assert_eq!(given.resolve(needed).unwrap().fds, 10_000);
        refused(&Limits { fds: Some(u64::MAX), ..Limits::default() }, 1024);
    }
}
