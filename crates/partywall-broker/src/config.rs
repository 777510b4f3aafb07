//! The configuration of a broker.

use std::{collections::BTreeSet, os::fd::AsFd, path::PathBuf, time::Duration};

use partywall_os::{
    dir::DirAccess,
    socket::{self, Connecting, Peer},
};
use partywall_shm::members::MAX_ROWS;
use partywall_wire::limits::{MAX_FDS, MAX_MESSAGE, MIN_MESSAGE};

use crate::{StartError, registry::types::Quota};

/// The configuration of a broker. [`Config::new`] sets defaults for everything optional.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen. This user must own the directory, with mode 0700, or 0711 if other users are admitted. It is
    /// created if only its last component is missing.
    pub socket: PathBuf,
    /// The domain's name, for the log.
    pub domain: String,
    /// The release, shown to people.
    pub version: String,
    /// The limits on what members use.
    pub limits: Limits,
    /// The users that may connect besides the broker's own.
    pub admission: Admission,
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
    /// Whether the broker may execute the program of its process to check memory: that program then answers by
    /// [`MemoryCheck`](crate::memory_check::MemoryCheck).
    pub checks_memory: bool,
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
            admission: Admission::default(),
            idle_exit: Some(Duration::from_secs(60)),
            settle: Duration::from_millis(100),
            unproven_after: None,
            handshake_timeout: Duration::from_secs(2),
            log_path: None,
            checks_memory: false,
            starter_holds_lock: false,
        }
    }
}

/// The users that may connect to a broker besides its own; none by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Admission {
    /// These users.
    pub uids: BTreeSet<u32>,
    /// The members of this group. A process counts by the groups that it had when it connected.
    pub group: Option<u32>,
}

impl Admission {
    /// Returns whether a process may connect. `own` is the broker's user.
    pub(crate) fn admits(&self, own: u32, peer: Peer, call: impl AsFd) -> bool {
        let is_in = |group| peer.gid == group || socket::peer_groups(call).is_ok_and(|groups| groups.contains(&group));
        peer.uid == own || self.uids.contains(&peer.uid) || self.group.is_some_and(is_in)
    }

    /// Returns whether other users than `own` may connect.
    pub(crate) fn is_wide(&self, own: u32) -> bool {
        self.group.is_some() || self.uids.iter().any(|uid| *uid != own)
    }

    /// Returns the users that the kernel is to let connect. Single users cannot be expressed by a file's mode, so the
    /// kernel then lets everybody connect, and the broker refuses.
    pub(crate) fn connecting(&self, own: u32) -> Connecting {
        match self.group {
            _ if !self.is_wide(own) => Connecting::User,
            Some(group) if self.uids.iter().all(|uid| *uid == own) => Connecting::Group(group),
            _ => Connecting::Everybody,
        }
    }

    /// Returns the processes that are to enter the socket's directory.
    pub(crate) fn entry(&self, own: u32) -> DirAccess {
        if self.is_wide(own) { DirAccess::Passable } else { DirAccess::Private }
    }
}

/// The limits on what members use. Exceeding a limit has its own error and never ends the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all versions and control memory together. 16 TiB by default.
    pub bytes: u64,
    /// Bytes of pinned memory on each NUMA node; by default not less than all bytes.
    pub pinned: Option<u64>,
    /// Names. 65,536 by default.
    pub names: u64,
    /// File descriptors held for versions and control memory; by default the process's limit of open files minus those
    /// of clients, at least 64.
    pub fds: Option<u64>,
    /// Members, without those in quarantine, at most 65,535; by default 4,096 or a sixteenth of the process's limit of
    /// open files, whichever is less, but at least 16.
    pub clients: Option<u64>,
    /// Bytes of a message's body, between [`MIN_MESSAGE`] and `u32::MAX`. [`MAX_MESSAGE`] by default.
    pub message: usize,
    /// Waiting requests of all members together. 65,536 by default.
    pub waits: u64,
    /// Waiting requests of one member. 1,024 by default.
    pub member_waits: u64,
    /// Leases of all members together. 262,144 by default: a restarted broker restores them in a fraction of a second.
    pub leases: u64,
    /// Leases of one member. 65,536 by default.
    pub member_leases: u64,
    /// Timelines. 65,536 by default. At most twice as many cells are created.
    pub timelines: u64,
    /// Semaphores. 4,096 by default.
    pub semaphores: u64,
    /// The limits on each user.
    pub per_uid: UserLimits,
}

/// The limits on what one user uses. By default a quarter of the domain's limit for every user but the broker's own,
/// which has no other limit than the domain's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserLimits {
    /// Bytes of versions and control memory.
    pub bytes: Option<u64>,
    /// Bytes of pinned memory on each NUMA node.
    pub pinned: Option<u64>,
    /// Names, including timelines and semaphores.
    pub names: Option<u64>,
    /// File descriptors held for versions and control memory.
    pub fds: Option<u64>,
    /// Members, including those in quarantine.
    pub clients: Option<u64>,
    /// Leases of its members on versions, timelines and semaphores.
    pub leases: Option<u64>,
    /// Timelines.
    pub timelines: Option<u64>,
    /// Semaphores.
    pub semaphores: Option<u64>,
    /// Waiting requests of its members.
    pub waits: Option<u64>,
    /// Seats: connections at a time that are not members, for `ps`, `ls` and the like. Does not limit the broker's own
    /// user.
    pub operators: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 16 << 40,
            pinned: None,
            names: 1 << 16,
            fds: None,
            clients: None,
            message: MAX_MESSAGE,
            waits: 1 << 16,
            member_waits: 1024,
            leases: 1 << 18,
            member_leases: 1 << 16,
            timelines: 1 << 16,
            semaphores: 4096,
            per_uid: UserLimits::default(),
        }
    }
}

impl Limits {
    /// Resolves the limits that depend on the process's limit of open files.
    ///
    /// # Errors
    /// [`StartError::TooFewFiles`] if members would leave too few descriptors for memory, [`StartError::Limit`] for a
    /// limit that no broker can have.
    pub(crate) fn resolve(&self, open_files: u64) -> Result<Resolved, StartError> {
        let memory = self.fds.unwrap_or(MIN_FDS_FOR_MEMORY);
        let of_ours = FDS_OF_OURS + unclaimed(open_files);
        let room = open_files.saturating_sub(of_ours).saturating_sub(memory) / FDS_PER_CLIENT;
        let clients = match self.clients {
            Some(clients) => checked("--max-clients", clients, 1, MAX_ROWS as u64)?,
            None => (open_files / 16).min(room).clamp(MIN_CLIENTS, MAX_DEFAULT_CLIENTS),
        };
        if clients > room {
            let others = (clients * FDS_PER_CLIENT + FDS_OF_OURS).saturating_add(memory);
            let needed = others.saturating_add(unclaimed(others.saturating_add(MAX_FDS as u64)));
            return Err(StartError::TooFewFiles { open_files, needed, clients, room, memory });
        }
        let fds = self.fds.unwrap_or(open_files - clients * FDS_PER_CLIENT - of_ours);
        self.check(fds, clients)?;
        Ok(Resolved { fds, clients, unclaimed: unclaimed(open_files) as usize, given: self.clone() })
    }

    /// Returns the limit on the bytes of pinned memory on each NUMA node.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned.unwrap_or(self.bytes)
    }

    /// Refuses a limit that would refuse everything, and a share that is more than the whole. Such a number is a
    /// mistake, and the broker would otherwise start and fail its first member.
    fn check(&self, fds: u64, clients: u64) -> Result<(), StartError> {
        let of_user = &self.per_uid;
        let message = self.message as u64;
        let all = [
            ("--max-bytes", Some(self.bytes), 1, u64::MAX),
            ("--max-pinned-bytes", self.pinned, 1, self.bytes),
            ("--max-names", Some(self.names), 1, u64::MAX),
            ("--max-fds", Some(fds), 1, u64::MAX),
            ("--max-leases", Some(self.leases), 1, u64::MAX),
            ("--max-timelines", Some(self.timelines), 1, u64::MAX),
            ("--max-semaphores", Some(self.semaphores), 1, u64::MAX),
            ("--max-waits", Some(self.waits), 1, u64::MAX),
            ("--max-message", Some(message), MIN_MESSAGE as u64, u64::from(u32::MAX)),
            ("--max-bytes-per-uid", of_user.bytes, 1, self.bytes),
            ("--max-pinned-bytes-per-uid", of_user.pinned, 1, self.pinned()),
            ("--max-names-per-uid", of_user.names, 1, self.names),
            ("--max-fds-per-uid", of_user.fds, 1, fds),
            ("--max-clients-per-uid", of_user.clients, 1, clients),
            ("--max-leases-per-uid", of_user.leases, 1, self.leases),
            ("--max-timelines-per-uid", of_user.timelines, 1, self.timelines),
            ("--max-semaphores-per-uid", of_user.semaphores, 1, self.semaphores),
            ("--max-waits-per-uid", of_user.waits, 1, self.waits),
            ("--max-seats-per-uid", of_user.operators, 1, OPERATORS_OF_GUESTS),
        ];
        for (option, value, least, most) in all {
            value.map(|value| checked(option, value, least, most)).transpose()?;
        }
        Ok(())
    }
}

/// Returns the value of an option, or refuses it.
fn checked(option: &'static str, value: u64, least: u64, most: u64) -> Result<u64, StartError> {
    if (least..=most).contains(&value) { Ok(value) } else { Err(StartError::Limit { option, value, least, most }) }
}

/// Returns how many descriptors of unfinished messages a broker keeps that may open this many files. The library sends
/// a message at once, so that messages of honest processes are rarely unfinished.
fn unclaimed(open_files: u64) -> u64 {
    if open_files < MANY_FILES { MAX_FDS as u64 } else { 4 * MAX_FDS as u64 }
}

/// Limits with every value resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) fds: u64,
    pub(crate) clients: u64,
    /// Descriptors of unfinished messages, of all connections together.
    pub(crate) unclaimed: usize,
    /// The limits that do not depend on the process's limit of open files.
    pub(crate) given: Limits,
}

impl Resolved {
    /// Returns the limits on one user: the broker's own, or another.
    pub(crate) fn quota(&self, is_own: bool) -> Quota {
        let of_user = &self.given.per_uid;
        let share = |given: Option<u64>, of_all: u64| match given {
            Some(given) => given,
            None if is_own => u64::MAX,
            None => (of_all / GUESTS_SHARE).max(1),
        };
        Quota {
            members: share(of_user.clients, self.clients),
            names: share(of_user.names, self.given.names),
            fds: share(of_user.fds, self.fds),
            bytes: share(of_user.bytes, self.given.bytes),
            pinned: share(of_user.pinned, self.given.pinned()),
            leases: share(of_user.leases, self.given.leases),
            timelines: share(of_user.timelines, self.given.timelines),
            semaphores: share(of_user.semaphores, self.given.semaphores),
            waits: share(of_user.waits, self.given.waits),
        }
    }

    /// Returns the number of operators that one user may have at a time. The broker's own user may have all, so that it
    /// can always look at the broker, and end it.
    pub(crate) fn operators(&self, is_own: bool) -> u64 {
        if is_own { OPERATORS } else { self.given.per_uid.operators.unwrap_or(OPERATORS / GUESTS_SHARE) }
    }
}

/// The divisor for the share of a limit that a user other than the broker's has by default.
const GUESTS_SHARE: u64 = 4;

/// File descriptors of a client: the call socket, the events socket, the pidfd; and its former call socket, for a
/// moment after a restart of the broker.
pub(crate) const FDS_PER_CLIENT: u64 = 4;

/// Connections for operators, which are not members: enough for a few `ps` and `stop` while no further member is
/// admitted.
pub(crate) const OPERATORS: u64 = 16;

/// The operators that users other than the broker's may have together. The other half is kept for the broker's own
/// user.
pub(crate) const OPERATORS_OF_GUESTS: u64 = OPERATORS / 2;

/// Other files: standard streams, listener, epoll and log; operators; unauthenticated connections; descriptors of a
/// message that is being read.
const FDS_OF_OURS: u64 = 64 + OPERATORS * FDS_PER_CLIENT + 64 + MAX_FDS as u64;

/// A broker that may open this many files keeps the descriptors of more than one unfinished message.
const MANY_FILES: u64 = 8192;

/// A broker with fewer file descriptors for memory would refuse commits soon after it has started.
const MIN_FDS_FOR_MEMORY: u64 = 64;

/// The smallest default for the number of members.
const MIN_CLIENTS: u64 = 16;

/// The default for the number of members, if the limit of open files allows it.
const MAX_DEFAULT_CLIENTS: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 147.
    #[test]
    fn mode_of_the_socket_and_its_directory_follow_the_admitted_users() {
        let own = 7;
        let of = |uids: &[u32], group| {
            let admission = Admission { uids: uids.iter().copied().collect(), group };
            (admission.connecting(own), admission.entry(own))
        };
        assert_eq!(of(&[], None), (Connecting::User, DirAccess::Private));
        assert_eq!(of(&[own], None), (Connecting::User, DirAccess::Private));
        assert_eq!(of(&[], Some(9)), (Connecting::Group(9), DirAccess::Passable));
        assert_eq!(of(&[own], Some(9)), (Connecting::Group(9), DirAccess::Passable));
        assert_eq!(of(&[8], None), (Connecting::Everybody, DirAccess::Passable));
        assert_eq!(of(&[8], Some(9)), (Connecting::Everybody, DirAccess::Passable), "user 8 need not be in the group");
    }

    #[test]
    fn users_are_admitted_by_their_id_or_their_group() {
        let (call, _other) = socket::pair().unwrap();
        let peer = Peer { pid: None, uid: 8, gid: 80 };
        let admits =
            |uids: &[u32], group| Admission { uids: uids.iter().copied().collect(), group }.admits(7, peer, &call);
        assert!(!admits(&[], None) && !admits(&[9], Some(81)));
        assert!(admits(&[8], None) && admits(&[], Some(80)));
        assert!(Admission::default().admits(8, peer, &call), "the broker's own user");
        if let Some(group) = socket::peer_groups(&call).unwrap().first() {
            assert!(admits(&[], Some(*group)), "a supplementary group");
        }
    }

    #[test]
    fn clients_and_versions_share_the_fd_limit() {
        let few = Limits::default().resolve(1024).unwrap();
        assert_eq!((few.clients, few.fds, few.unclaimed), (64, 1024 - 4 * 64 - FDS_OF_OURS - 253, 253));
        let many = Limits::default().resolve(1 << 30).unwrap();
        assert_eq!((many.clients, many.fds, many.unclaimed), (4096, (1 << 30) - 4 * 4096 - FDS_OF_OURS - 1012, 1012));
        let given = Limits { fds: Some(7), clients: Some(5), ..Limits::default() }.resolve(1024).unwrap();
        assert_eq!((given.clients, given.fds), (5, 7));
    }

    #[test]
    fn other_users_have_a_quarter_unless_more_or_less_is_given() {
        let limits =
            Limits { names: 40, bytes: 400, fds: Some(100), clients: Some(12), leases: 200, ..Limits::default() };
        let limits = Limits { timelines: 32, semaphores: 16, waits: 8, ..limits };
        let resolved = limits.resolve(1024).unwrap();
        let own = Quota {
            members: u64::MAX,
            names: u64::MAX,
            fds: u64::MAX,
            bytes: u64::MAX,
            pinned: u64::MAX,
            leases: u64::MAX,
            timelines: u64::MAX,
            semaphores: u64::MAX,
            waits: u64::MAX,
        };
        assert_eq!(resolved.quota(true), own);
        let others = Quota {
            members: 3,
            names: 10,
            fds: 25,
            bytes: 100,
            pinned: 100,
            leases: 50,
            timelines: 8,
            semaphores: 4,
            waits: 2,
        };
        assert_eq!(resolved.quota(false), others);
        assert_eq!((resolved.operators(true), resolved.operators(false)), (16, 4));
        let per_uid = UserLimits { names: Some(5), operators: Some(1), ..UserLimits::default() };
        let resolved = Limits { per_uid, ..limits }.resolve(1024).unwrap();
        assert_eq!((resolved.quota(true).names, resolved.quota(false).names), (5, 5), "for each user");
        assert_eq!(
            (resolved.operators(true), resolved.operators(false)),
            (16, 1),
            "the broker's own can always end it"
        );
        let few = Limits { names: 2, ..Limits::default() }.resolve(1024).unwrap();
        assert_eq!(few.quota(false).names, 1, "a share is never nothing");
    }

    // Holds 150.
    #[test]
    fn limits_of_nothing_and_shares_beyond_the_whole_are_refused() {
        type Change = fn(&mut Limits);
        let limits =
            Limits { names: 40, bytes: 400, fds: Some(100), clients: Some(12), leases: 200, ..Limits::default() };
        let per_uid = UserLimits {
            bytes: Some(400),
            pinned: Some(300),
            names: Some(40),
            fds: Some(100),
            clients: Some(12),
            leases: Some(200),
            timelines: Some(32),
            semaphores: Some(16),
            waits: Some(8),
            operators: Some(OPERATORS_OF_GUESTS),
        };
        let limits = Limits { message: MIN_MESSAGE, pinned: Some(300), per_uid, ..limits };
        let limits = Limits { timelines: 32, semaphores: 16, waits: 8, ..limits };
        limits.resolve(1024).unwrap();
        let wrong: [(&str, Change); 33] = [
            ("--max-bytes", |limits| limits.bytes = 0),
            ("--max-pinned-bytes", |limits| limits.pinned = Some(0)),
            ("--max-pinned-bytes", |limits| limits.pinned = Some(401)),
            ("--max-names", |limits| limits.names = 0),
            ("--max-fds", |limits| limits.fds = Some(0)),
            ("--max-clients", |limits| limits.clients = Some(0)),
            ("--max-clients", |limits| limits.clients = Some(1 << 16)),
            ("--max-leases", |limits| limits.leases = 0),
            ("--max-timelines", |limits| limits.timelines = 0),
            ("--max-semaphores", |limits| limits.semaphores = 0),
            ("--max-waits", |limits| limits.waits = 0),
            ("--max-message", |limits| limits.message = MIN_MESSAGE - 1),
            ("--max-message", |limits| limits.message = 1 << 32),
            ("--max-bytes-per-uid", |limits| limits.per_uid.bytes = Some(0)),
            ("--max-bytes-per-uid", |limits| limits.per_uid.bytes = Some(401)),
            ("--max-pinned-bytes-per-uid", |limits| limits.per_uid.pinned = Some(0)),
            ("--max-pinned-bytes-per-uid", |limits| limits.per_uid.pinned = Some(301)),
            ("--max-names-per-uid", |limits| limits.per_uid.names = Some(0)),
            ("--max-names-per-uid", |limits| limits.per_uid.names = Some(41)),
            ("--max-fds-per-uid", |limits| limits.per_uid.fds = Some(0)),
            ("--max-fds-per-uid", |limits| limits.per_uid.fds = Some(101)),
            ("--max-clients-per-uid", |limits| limits.per_uid.clients = Some(0)),
            ("--max-clients-per-uid", |limits| limits.per_uid.clients = Some(13)),
            ("--max-leases-per-uid", |limits| limits.per_uid.leases = Some(0)),
            ("--max-leases-per-uid", |limits| limits.per_uid.leases = Some(201)),
            ("--max-timelines-per-uid", |limits| limits.per_uid.timelines = Some(0)),
            ("--max-timelines-per-uid", |limits| limits.per_uid.timelines = Some(33)),
            ("--max-semaphores-per-uid", |limits| limits.per_uid.semaphores = Some(0)),
            ("--max-semaphores-per-uid", |limits| limits.per_uid.semaphores = Some(17)),
            ("--max-waits-per-uid", |limits| limits.per_uid.waits = Some(0)),
            ("--max-waits-per-uid", |limits| limits.per_uid.waits = Some(9)),
            ("--max-seats-per-uid", |limits| limits.per_uid.operators = Some(0)),
            ("--max-seats-per-uid", |limits| limits.per_uid.operators = Some(OPERATORS_OF_GUESTS + 1)),
        ];
        for (expected, change) in wrong {
            let mut limits = limits.clone();
            change(&mut limits);
            let refused = limits.resolve(1024);
            assert!(matches!(refused, Err(StartError::Limit { option, .. }) if option == expected), "{refused:?}");
        }
    }

    /// Resolves limits that must be refused. Returns the number of files that are needed and of members that fit.
    fn refused(limits: &Limits, open_files: u64) -> (u64, u64) {
        match limits.resolve(open_files) {
            Err(StartError::TooFewFiles { needed, room, .. }) => (needed, room),
            other => panic!("{other:?}"),
        }
    }

    // Holds 119.
    #[test]
    fn limits_without_room_for_memory_are_refused_with_sufficient_numbers() {
        let crowded = Limits { clients: Some(12_000), ..Limits::default() };
        let (needed, room) = refused(&crowded, 20_000);
        assert_eq!((needed, room), (49_521, 4619));
        assert_eq!(crowded.resolve(needed).unwrap().fds, MIN_FDS_FOR_MEMORY);
        assert!(Limits { clients: Some(room), ..Limits::default() }.resolve(20_000).is_ok());

        let (needed, _) = refused(&Limits::default(), 32);
        let least = Limits::default().resolve(needed).unwrap();
        assert_eq!((least.clients, least.fds), (MIN_CLIENTS, MIN_FDS_FOR_MEMORY));
        for open_files in 0..needed {
            assert_eq!(refused(&Limits::default(), open_files).0, needed);
        }

        let none = Limits { clients: Some(0), ..Limits::default() };
        assert!(matches!(none.resolve(32), Err(StartError::Limit { option: "--max-clients", .. })));

        let given = Limits { fds: Some(10_000), ..Limits::default() };
        let (needed, _) = refused(&given, 1024);
        assert_eq!(given.resolve(needed).unwrap().fds, 10_000);
        refused(&Limits { fds: Some(u64::MAX), ..Limits::default() }, 1024);
    }
}
