//! Brokers that cannot be used.

use std::{path::PathBuf, time::Duration};

use partywall_os::environment::is_privileged;
use partywall_wire::FdFault;

use super::{
    Error, ErrorKind, Help,
    text::{driver_name, fd_fault, seconds},
};

/// There is no broker, or none that this process can use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unreachable {
    /// No broker runs, and no program was found to start as one.
    #[error("no broker program was found; tried {}", .tried.join(", "))]
    NoProgram {
        /// The paths that were tried.
        tried: Vec<String>,
    },
    /// A broker could not be started.
    #[error("the broker could not be started: {why}")]
    NotStarted {
        /// The message of the broker or the kernel.
        why: String,
        /// The advice of the broker, if any.
        advice: Option<String>,
    },
    /// No process answers at the socket, and no broker was to be started.
    #[error("no broker answers at {}: {why}", socket.display())]
    NoAnswer {
        /// The socket.
        socket: PathBuf,
        /// Why.
        why: String,
    },
    /// The file of a living broker's socket was removed, and the broker cannot bind the socket again. It serves those
    /// that are connected.
    #[error(
        "the broker with pid {pid} cannot be reached: its socket {} was removed, and the directory {} cannot be used: {why}",
        socket.display(), directory.display()
    )]
    Unbound {
        /// The socket.
        socket: PathBuf,
        /// The broker's pid.
        pid: u32,
        /// The directory of the socket.
        directory: PathBuf,
        /// What is wrong with it.
        why: String,
        /// Its parent, if that is missing.
        parent: Option<PathBuf>,
    },
    /// The broker of this connection is gone. Mapped memory stays readable; names are lost. A call in progress may have
    /// taken effect.
    #[error("the broker at {} is gone", socket.display())]
    Gone {
        /// Its socket.
        socket: PathBuf,
    },
    /// The broker is another build with another protocol.
    #[error(
        "this is Partywall {ours} (protocol {our_protocol}), the broker with pid {pid} at {} is {theirs} (protocol {their_protocol})", socket.display()
    )]
    Version {
        /// The broker's socket.
        socket: PathBuf,
        /// Our release.
        ours: String,
        /// Our protocol.
        our_protocol: u32,
        /// The broker's release.
        theirs: String,
        /// Its protocol.
        their_protocol: u32,
        /// Its pid.
        pid: u32,
    },
    /// The directory of the socket is not safe to use.
    #[error("cannot use the directory {} for sockets: {why}", path.display())]
    UnsafeDirectory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Neither the directory of the socket nor its parent exists.
    #[error("cannot make the directory {}: its parent directory {} does not exist", path.display(), parent.display())]
    NoDirectory {
        /// The directory.
        path: PathBuf,
        /// Its parent.
        parent: PathBuf,
    },
    /// The broker is another user's, and one of the two does not want the other.
    #[error("the broker at {} runs as user {broker}, this process as user {ours}, {why}", socket.display())]
    User {
        /// The socket.
        socket: PathBuf,
        /// The broker's user.
        broker: u32,
        /// Ours.
        ours: u32,
        /// Why they do not come together.
        why: ForeignBroker,
    },
    /// The socket, or a directory on the way to it, is another user's and closed to this process. Whether a broker runs
    /// there cannot be seen.
    #[error("this process runs as user {ours}, which may not use {}: it belongs to user {owner}", path.display())]
    Barred {
        /// The socket, or the deepest directory that is visible.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Our user.
        ours: u32,
    },
    /// Members on the simulated CUDA driver and on the real one never share a domain.
    #[error("the domain at {} runs on the {} CUDA driver, this process on the {} one", socket.display(), driver_name(*simulated), driver_name(!*simulated))]
    Driver {
        /// The socket.
        socket: PathBuf,
        /// True if the domain is the simulated one.
        simulated: bool,
    },
    /// The broker cannot tell which process has connected.
    #[error("the broker cannot identify this process: {0}")]
    NoPidfd(String),
    /// The clock of this process does not agree with the broker's, so leases would end at the wrong time. One of the
    /// two is in a time namespace, and the kernel could not be asked for its offset.
    #[error(
        "the clock of this process is {} {} that of the broker at {}",
        seconds(*by), if *ahead { "ahead of" } else { "behind" }, socket.display()
    )]
    Clock {
        /// The broker's socket.
        socket: PathBuf,
        /// True if this process's clock is ahead of the broker's.
        ahead: bool,
        /// The difference.
        by: Duration,
    },
    /// The broker refused a file descriptor of a commit.
    #[error("the broker refused file descriptor {index} of the commit: {}", fd_fault(fault))]
    FileDescriptor {
        /// The index in the commit.
        index: u32,
        /// The fault.
        fault: FdFault,
    },
    /// The connection was made before a fork and is used in the child.
    #[error("this connection was made before a fork, by process {parent}")]
    Forked {
        /// The process that made it.
        parent: u32,
    },
    /// The broker sent something that this library does not understand.
    #[error("the broker broke the protocol: {0}")]
    Protocol(String),
    /// The broker refused for another reason.
    #[error("the broker refused: {0}")]
    Refused(String),
}

/// Why a process does not use the broker of another user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignBroker {
    /// The broker does not admit the process's user.
    NotAdmitted,
    /// The socket was not named: a socket that is derived from a domain's name could be anybody's.
    NotNamed,
    /// The socket's directory belongs to a third user, who could put another socket there.
    Directory {
        /// That user.
        owner: u32,
    },
    /// Others may write the socket's directory, and could put another socket there.
    Writable {
        /// Its mode.
        mode: u32,
    },
}

impl std::fmt::Display for ForeignBroker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotAdmitted => f.write_str("which the broker does not admit"),
            Self::NotNamed => f.write_str("which did not name the socket"),
            Self::Directory { owner } => write!(f, "and the socket's directory belongs to user {owner}"),
            Self::Writable { mode } => write!(f, "and others may write the socket's directory (mode {mode:04o})"),
        }
    }
}

impl Unreachable {
    /// Returns the error that the broker broke the protocol.
    pub(crate) fn protocol(why: impl Into<String>) -> Error {
        Self::Protocol(why.into()).into()
    }

    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self) -> Help {
        match self {
            Self::NoDirectory { parent, .. } => ErrorKind::Unreachable.help("no-directory", "BrokerUnreachable", format!("make it with `mkdir -p {}`, or check --socket, PARTYWALL_SOCKET and XDG_RUNTIME_DIR", parent.display())),
            Self::NoProgram { .. } if is_privileged() => ErrorKind::Unreachable.help("broker-not-found", "BrokerUnreachable", "install the partywall program in /usr/local/bin, or name it with `DomainOptions::program`: a program with privileges reads no variable"),
            Self::NoProgram { .. } => ErrorKind::Unreachable.help("broker-not-found", "BrokerUnreachable", "set PARTYWALL_BIN to the partywall binary, or put it on PATH (cargo install --locked --path crates/partywall-cli)"),
            Self::NotStarted { advice: Some(advice), .. } => ErrorKind::Unreachable.help("broker-not-started", "BrokerUnreachable", advice.clone()),
            Self::NotStarted { .. } => ErrorKind::Unreachable.help("broker-not-started", "BrokerUnreachable", "run `partywall serve` to see why, and `partywall doctor`"),
            Self::NoAnswer { why, .. } if why == NO_SOCKET => ErrorKind::Unreachable.help("connection-refused", "BrokerUnreachable", "nothing is shared there yet: `partywall put` and `partywall serve` start a broker; if one should run, check --domain and PARTYWALL_SOCKET"),
            Self::NoAnswer { .. } => ErrorKind::Unreachable.help("connection-refused", "BrokerUnreachable", "start one with `partywall serve`, or check --domain and PARTYWALL_SOCKET"),
            Self::Unbound { parent: Some(parent), pid, .. } => ErrorKind::Unreachable.help("socket-removed", "BrokerUnreachable", format!("make it again (`mkdir -p {}`, with its former owner and mode): the broker then binds its socket within 2 s", parent.display())).about(*pid),
            Self::Unbound { directory, pid, .. } => ErrorKind::Unreachable.help("socket-removed", "BrokerUnreachable", format!("give it back to the broker's user alone (mode 0700, or 0711 with --allow-uid), or remove it (`rmdir {}`): the broker then binds its socket within 2 s", directory.display())).about(*pid),
            Self::Gone { .. } => ErrorKind::Unreachable.help("broker-gone", "BrokerGone", "connect again; the owners of names must create them again"),
            Self::Version { pid, .. } => ErrorKind::Unreachable.help("version-mismatch", "VersionMismatch", "run `partywall stop --force` (it drops all names), then try again").about(*pid),
            Self::UnsafeDirectory { path, .. } => ErrorKind::Unreachable.help("unsafe-directory", "AccessDenied", format!("give only your user access (chmod 700 {}) if it is yours, or set PARTYWALL_SOCKET to a socket in another directory", path.display())),
            Self::User { ours, why: ForeignBroker::NotAdmitted, .. } => ErrorKind::Unreachable.help("wrong-user", "AccessDenied", format!("start the broker with `partywall serve --allow-uid {ours}` or --group, run both as one user, or use another PARTYWALL_SOCKET")),
            Self::Barred { ours, .. } => ErrorKind::Unreachable.help("barred-socket", "AccessDenied", format!("start the broker with `partywall serve --allow-uid {ours}` or --group and its socket in a directory of mode 0711, run both as one user, or use another PARTYWALL_SOCKET")),
            Self::User { why: ForeignBroker::NotNamed, .. } => ErrorKind::Unreachable.help("wrong-user", "AccessDenied", "name its socket with --socket or PARTYWALL_SOCKET, and start it with --allow-uid"),
            Self::User { broker, .. } => ErrorKind::Unreachable.help("wrong-user", "AccessDenied", format!("put the socket of a broker with --allow-uid into a directory of root or of user {broker} that others cannot write (mode 0711)")),
            Self::Driver { simulated, .. } => ErrorKind::Refused.help("simulated-driver", "AccessDenied", match simulated {
                true => "choose another --domain, or set PARTYWALL_LIBCUDA as its members have",
                false => "choose another --domain, or run without PARTYWALL_LIBCUDA and --simulated",
            }),
            Self::FileDescriptor { fault, .. } => ErrorKind::Refused.help("bad-fd", "Error", match fault {
                FdFault::Missing => "the broker has no free file descriptor: remove names, or raise its limit",
                _ => BUG,
            }),
            Self::NoPidfd(_) => ErrorKind::Unreachable.help("not-identified", "BrokerUnreachable", "mount /proc where the broker runs (`mount -t proc proc /proc`), and start the broker again"),
            Self::Clock { .. } => ErrorKind::Unreachable.help("other-clock", "BrokerUnreachable", "mount /proc in both containers (`mount -t proc proc /proc`), or run both without a time namespace; a process that has made one for its children (`unshare -T`) connects in a child"),
            Self::Protocol(_) => ErrorKind::Unreachable.help("broken-protocol", "Error", BUG),
            Self::Refused(_) => ErrorKind::Refused.help("refused", "Error", BUG),
            Self::Forked { parent } => ErrorKind::Unreachable.help("forked", "Forked", "connect in the child, or start it with exec (Python: the spawn start method)").about(*parent),
        }
    }
}

const BUG: &str = "this is a bug of Partywall, or a foreign program at its socket: please report it with the broker's log (`partywall status`)";

/// Why no broker answers in a domain where none was started.
pub(crate) const NO_SOCKET: &str = "there is no socket";
