//! Binds and removes the socket at which members look for the broker.

use std::{
    ffi::OsStr,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::Config;
use partywall_os::{
    Errno,
    dir::{DirAccess, DirLock, PrivateDir, Unsafe},
    socket::{self, Connecting},
};
use rustix::{
    fs::{self, Access, FileType},
    io::{DupFlags, dup3},
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt},
    process::{Resource, getrlimit},
};
use serde::{Deserialize, Serialize};

/// Why a broker did not start. A failed start changes nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The directory of the socket is unsafe or inaccessible.
    #[error("the directory {path} cannot be used: {why}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: Unsafe,
    },
    /// Another process has held the lock on the directory for too long.
    #[error("the directory {path} has been locked by another process for {} s", .waited.as_secs())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// How long this process waited.
        waited: Duration,
    },
    /// A broker listens already, perhaps at a socket whose file was removed.
    #[error("a broker{} listens already at {socket}", .pid.map_or_else(String::new, |pid| format!(" with pid {pid}")))]
    AlreadyRunning {
        /// The socket.
        socket: PathBuf,
        /// Its pid; absent if it is not visible in this PID namespace.
        pid: Option<u32>,
    },
    /// The socket's path names something other than a socket, which is left as it is.
    #[error("{path} exists and is {found}, not a socket; it has not been touched")]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The kind of file found there.
        found: String,
    },
    /// The socket that a service manager has passed is not the one that members look for.
    #[error("the socket that the service manager has passed cannot be used: {why}")]
    Inherited {
        /// What is wrong with it.
        why: String,
    },
    /// What the former process of a supervised broker knew cannot be restored.
    #[error("the journal of the broker cannot be read: {why}")]
    Journal {
        /// What is wrong with it.
        why: String,
    },
    /// The path exceeds the maximum length of a socket address.
    #[error("the socket's path {} has {} bytes, and the limit is 107", path.display(), path.as_os_str().len())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The process may open too few files for the requested number of members.
    #[error(
        "cannot serve {clients} members with {open_files} open files: {needed} are needed, 4 for each member, \
         {memory} for memory and the rest for the broker itself"
    )]
    TooFewFiles {
        /// The process's limit of open files.
        open_files: u64,
        /// Files that are needed.
        needed: u64,
        /// The requested number of members.
        clients: u64,
        /// The number of members that these files allow.
        room: u64,
        /// Files that are kept free for memory.
        memory: u64,
    },
    /// A limit is outside of its bounds, or a user's share exceeds the limit of all users together.
    #[error("cannot serve with {option} {value}: {}", if value < least { format!("the least is {least}") } else { format!("the most here is {most}") })]
    Limit {
        /// The option of `partywall serve`.
        option: &'static str,
        /// Its value.
        value: u64,
        /// The smallest value.
        least: u64,
        /// The largest value beside the other limits.
        most: u64,
    },
    /// The kernel refused.
    #[error("{what}: {errno}{}", limit_behind(errno))]
    Errno {
        /// The action that failed.
        what: String,
        /// The reason.
        #[source]
        errno: io::Error,
    },
}

impl StartError {
    pub(crate) fn errno(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        let what = what.into();
        move |errno| Self::Errno { what, errno: errno.into() }
    }

    /// As [`StartError::errno`], for an action on a path.
    fn at(action: &str, path: &Path) -> impl FnOnce(Errno) -> Self {
        move |errno| match errno {
            Errno::NAMETOOLONG => Self::PathTooLong { path: path.to_owned() },
            errno => Self::errno(format!("{action} {}", path.display()))(errno),
        }
    }
}

/// Returns the limit of this process that most likely led to an error, as the end of a sentence; nothing if none did.
fn limit_behind(error: &io::Error) -> String {
    let errno = Errno::from_io_error(error);
    let (resource, unit, name) = match errno {
        Some(Errno::FBIG) => (Resource::Fsize, 1024, "ulimit -f"),
        Some(Errno::NOMEM | Errno::AGAIN) => (Resource::As, 1024, "ulimit -v"),
        Some(Errno::MFILE) => (Resource::Nofile, 1, "ulimit -n"),
        _ => return String::new(),
    };
    let Some(limit) = getrlimit(resource).current else { return String::new() };
    format!("; this process is limited by `{name} {}`", limit / unit)
}

/// A listening socket and its file.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    /// Non-blocking.
    pub(crate) listener: OwnedFd,
    pub(crate) file: SocketFile,
}

impl BoundSocket {
    /// Listens where `config` says, or takes `listener` from a service manager.
    pub(crate) fn for_broker(config: &Config, listener: Option<OwnedFd>) -> Result<Self, StartError> {
        let entry = config.admission.entry(own_user());
        match listener {
            Some(listener) => Self::inherit(&config.socket, entry, listener),
            None => {
                let connecting = config.admission.connecting(own_user());
                Self::take(&config.socket, entry, connecting, config.starter_holds_lock)
            }
        }
    }

    /// Listens at `path`. Replaces only the socket file of a dead broker.
    fn take(
        path: &Path,
        entry: DirAccess,
        connecting: Connecting,
        starter_holds_lock: bool,
    ) -> Result<Self, StartError> {
        let path = absolute(path)?;
        // The lock makes the second of two brokers that start at once find the first one's socket.
        let directory = open_directory(&path, entry, true)?;
        let _lock = if starter_holds_lock { None } else { Some(lock(directory)?) };
        clear(&path)?;
        // It binds the socket again as soon as it notices.
        if let Some(pid) = socket::listener_of(&path) {
            return Err(StartError::AlreadyRunning { socket: path, pid: Some(pid) });
        }
        let listener = socket::listen_for(&path, connecting).map_err(StartError::at("listen at", &path))?;
        let file = SocketFile::of(path, false)?;
        Ok(Self { listener, file })
    }

    /// Listens at the same path again, under the same descriptor number, after the socket's file or its directory was
    /// removed, or a socket on which nobody listens was put in its place. Members that are connected stay so.
    /// Connections that nobody has accepted yet end. A socket of a service manager, which no process can reach any
    /// more, is replaced by one of the broker.
    ///
    /// # Errors
    /// [`StartError`], [`StartError::Locked`] while another process looks for a broker there. Nothing has changed then.
    pub(crate) fn bind_again(&mut self, config: &Config) -> Result<(), StartError> {
        let path = self.file.path.clone();
        let directory = open_directory(&path, config.admission.entry(own_user()), true)?;
        let at = directory.path().to_owned();
        let locked = directory.lock(Instant::now() + BIND_AGAIN_TIMEOUT).map_err(StartError::at("lock", &at))?;
        let Some(_lock) = locked else { return Err(StartError::Locked { path: at, waited: BIND_AGAIN_TIMEOUT }) };
        let connecting = config.admission.connecting(own_user());
        clear(&path)?;
        // Fails if another process was faster.
        let listener = socket::listen_for(&path, connecting).map_err(StartError::at("listen at", &path))?;
        let file = SocketFile::of(path.clone(), false)?;
        // The worker has the same table of files, so it listens at the new socket, too.
        dup3(&listener, &mut self.listener, DupFlags::CLOEXEC).map_err(StartError::at("listen at", &path))?;
        self.file = file;
        Ok(())
    }

    /// Serves a socket that a service manager has bound to `path`. Its mode is the manager's to choose.
    fn inherit(path: &Path, entry: DirAccess, listener: OwnedFd) -> Result<Self, StartError> {
        let path = absolute(path)?;
        open_directory(&path, entry, false)?;
        let why = |why: String| StartError::Inherited { why };
        let bound = bound_to(&listener).map_err(why)?;
        if bound != path {
            return Err(why(format!(
                "it listens at {}, and this broker's socket is {}",
                bound.display(),
                path.display()
            )));
        }
        // Members learn from the kernel which process called `listen` last: that must be this one.
        net::listen(&listener, socket::BACKLOG).map_err(StartError::at("listen at", &path))?;
        socket::set_nonblocking(&listener).map_err(StartError::at("listen at", &path))?;
        let file = SocketFile::of(path, true)?;
        Ok(Self { listener, file })
    }
}

/// Returns the path of a listening Unix stream socket, or why it is none.
fn bound_to(listener: &OwnedFd) -> Result<PathBuf, String> {
    let kind = |errno: Errno| match errno {
        Errno::NOTSOCK => "it is not a socket".to_owned(),
        errno => errno.to_string(),
    };
    if sockopt::socket_domain(listener).map_err(kind)? != AddressFamily::UNIX
        || sockopt::socket_type(listener).map_err(kind)? != SocketType::STREAM
    {
        return Err("it is not a Unix stream socket".into());
    }
    if !sockopt::socket_acceptconn(listener).map_err(kind)? {
        return Err("it does not listen".into());
    }
    let address = net::getsockname(listener).and_then(SocketAddrUnix::try_from).map_err(kind)?;
    let path = address.path_bytes().ok_or("it has no path in the file system")?;
    Ok(PathBuf::from(OsStr::from_bytes(path)))
}

/// Returns the user that this process runs as.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Checks whether [`BoundSocket::take`] can succeed, and changes nothing.
pub(crate) fn check(socket: &Path, entry: DirAccess) -> Result<(), StartError> {
    let path = absolute(socket)?;
    SocketAddrUnix::new(&path).map_err(StartError::at("listen at", &path))?;
    match open_directory(&path, entry, false) {
        // A missing directory is created, but not its parent.
        Err(StartError::Directory { path: directory, why: Unsafe::Errno(Errno::NOENT) }) => {
            let parent = directory.parent().unwrap_or(Path::new("/"));
            let why = match fs::access(parent, Access::EXISTS | Access::WRITE_OK | Access::EXEC_OK) {
                Ok(()) => return Ok(()),
                Err(Errno::NOENT) => Unsafe::NoParent(parent.to_owned()),
                Err(errno) => Unsafe::Errno(errno),
            };
            Err(StartError::Directory { path: directory, why })
        }
        Err(error) => Err(error),
        Ok(_) => stale(&path).map(drop),
    }
}

/// Another process is looking for a broker.
#[derive(Debug)]
pub(crate) struct Sought;

/// The file of the socket that this process listens on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
    /// Whether the file belongs to a service manager, which keeps listening.
    inherited: bool,
}

impl SocketFile {
    fn of(path: PathBuf, inherited: bool) -> Result<Self, StartError> {
        let stat = fs::lstat(&path).map_err(StartError::at("stat", &path))?;
        Ok(Self { identity: (stat.st_dev, stat.st_ino), path, inherited })
    }

    /// Returns whether its path leads no process to the socket: the file was removed, or another one is in its place.
    pub(crate) fn is_lost(&self) -> bool {
        match fs::lstat(&self.path) {
            Ok(stat) => (stat.st_dev, stat.st_ino) != self.identity,
            Err(errno) => matches!(errno, Errno::NOENT | Errno::NOTDIR),
        }
    }

    /// Takes the file at the same path for the socket's, which another process of this broker has bound again.
    pub(crate) fn follow(&mut self) {
        if let Ok(file) = Self::of(self.path.clone(), false) {
            *self = file;
        }
    }

    /// Removes the file, unless another process has created or replaced it.
    pub(crate) fn remove(&self) {
        if self.inherited {
            return;
        }
        let ours = |stat: fs::Stat| (stat.st_dev, stat.st_ino) == self.identity;
        if fs::lstat(&self.path).is_ok_and(ours)
            && let Err(error) = fs::unlink(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }

    /// Locks the directory against processes that look for a broker. Returns `Err` if such a process holds the lock.
    /// Returns no lock if the directory is gone or unsafe: no process looks for a broker there. `entry` is as it was
    /// when the broker began to listen.
    pub(crate) fn lock_directory(&self, entry: DirAccess) -> Result<Option<DirLock>, Sought> {
        let Ok(directory) = open_directory(&self.path, entry, false) else { return Ok(None) };
        match directory.lock(Instant::now()) {
            Ok(Some(lock)) => Ok(Some(lock)),
            Ok(None) | Err(_) => Err(Sought),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn absolute(path: &Path) -> Result<PathBuf, StartError> {
    std::path::absolute(path).map_err(|errno| StartError::Errno { what: format!("resolve {}", path.display()), errno })
}

fn open_directory(socket: &Path, entry: DirAccess, create: bool) -> Result<PrivateDir, StartError> {
    let path = socket.parent().unwrap_or(Path::new("/"));
    PrivateDir::open_for(path, create, entry).map_err(|why| StartError::Directory { path: path.to_owned(), why })
}

fn lock(directory: PrivateDir) -> Result<DirLock, StartError> {
    let path = directory.path().to_owned();
    match directory.lock(Instant::now() + LOCK_TIMEOUT) {
        Ok(Some(lock)) => Ok(lock),
        Ok(None) => Err(StartError::Locked { path, waited: LOCK_TIMEOUT }),
        Err(errno) => Err(StartError::at("lock", &path)(errno)),
    }
}

/// Removes the socket at `path` if no process listens on it.
fn clear(path: &Path) -> Result<(), StartError> {
    if !stale(path)? {
        return Ok(());
    }
    tracing::info!(path = %path.display(), "replacing the socket of a dead broker");
    match fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(StartError::at("unlink", path)(errno)),
    }
}

/// Returns whether there is a socket at `path` on which no process listens.
///
/// # Errors
/// [`StartError`] if a process listens there, or if the path names something else.
fn stale(path: &Path) -> Result<bool, StartError> {
    let found = match fs::lstat(path) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(StartError::at("stat", path)(errno)),
    };
    if found != FileType::Socket {
        return Err(StartError::NotASocket { path: path.to_owned(), found: describe(found) });
    }
    match probe(path) {
        Ok(pid) => Err(StartError::AlreadyRunning { socket: path.to_owned(), pid }),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(true),
        Err(errno) => Err(StartError::at("connect to", path)(errno)),
    }
}

/// Returns the pid of the process that listens at `path`.
fn probe(path: &Path) -> Result<Option<u32>, Errno> {
    // Non-blocking: a stopped broker with a full backlog is alive, and would block a connect.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match net::connect(&probe, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket::peer(&probe)?.pid),
        Err(Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn describe(found: FileType) -> String {
    match found {
        FileType::RegularFile => "an ordinary file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a pipe",
        _ => "a device",
    }
    .into()
}

/// The supervisor, which has to notice the end of its worker, waits no longer for the lock. It tries again.
const BIND_AGAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// Starting a broker takes milliseconds. A process that holds the lock for this long is stopped or hangs.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
