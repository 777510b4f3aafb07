//! Binds and removes the socket at which members look for the broker.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    dir::{DirLock, PrivateDir, Unsafe},
    socket,
};
use rustix::{
    fs::{self, FileType},
    net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};

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
    /// A broker listens already.
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
    /// The path exceeds the maximum length of a socket address.
    #[error("the socket's path {} has {} bytes, and the limit is 107", path.display(), path.as_os_str().len())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The process may open too few files for the requested number of members.
    #[error(
        "cannot serve {clients} members with {open_files} open files: {needed} are needed, 3 for each member, \
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
    /// The kernel refused.
    #[error("{what}: {errno}")]
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

/// A listening socket and its file.
#[derive(Debug)]
pub(crate) struct Place {
    /// Non-blocking.
    pub(crate) listener: OwnedFd,
    pub(crate) file: SocketFile,
}

impl Place {
    /// Listens at `path`. Replaces only the socket file of a dead broker.
    pub(crate) fn take(path: &Path, starter_holds_lock: bool) -> Result<Self, StartError> {
        let path = std::path::absolute(path)
            .map_err(|errno| StartError::Errno { what: format!("resolve {}", path.display()), errno })?;
        // The lock makes the second of two brokers that start at once find the first one's socket.
        let directory = open_directory(&path, true)?;
        let _lock = if starter_holds_lock { None } else { Some(lock(directory)?) };
        clear(&path)?;
        let listener = socket::listen(&path).map_err(StartError::at("listen at", &path))?;
        let file = SocketFile::of(path)?;
        Ok(Self { listener, file })
    }
}

/// Another process is looking for a broker.
#[derive(Debug)]
pub(crate) struct Sought;

/// The file of a socket that this process created.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: PathBuf) -> Result<Self, StartError> {
        let stat = fs::lstat(&path).map_err(StartError::at("stat", &path))?;
        Ok(Self { identity: (stat.st_dev, stat.st_ino), path })
    }

    /// Removes the file, unless another process has replaced it.
    pub(crate) fn remove(&self) {
        let ours = |stat: fs::Stat| (stat.st_dev, stat.st_ino) == self.identity;
        if fs::lstat(&self.path).is_ok_and(ours)
            && let Err(error) = fs::unlink(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }

    /// Locks the directory against processes that look for a broker. Returns `Err` if such a process holds the lock.
    /// Returns no lock if the directory is gone or unsafe: no process looks for a broker there.
    pub(crate) fn lock_directory(&self) -> Result<Option<DirLock>, Sought> {
        let Ok(directory) = open_directory(&self.path, false) else { return Ok(None) };
        match directory.lock(Instant::now()) {
            Ok(Some(lock)) => Ok(Some(lock)),
            Ok(None) | Err(_) => Err(Sought),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn open_directory(socket: &Path, create: bool) -> Result<PrivateDir, StartError> {
    let path = socket.parent().unwrap_or(Path::new("/"));
    PrivateDir::open(path, create).map_err(|why| StartError::Directory { path: path.to_owned(), why })
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
    let found = match fs::lstat(path) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(StartError::at("stat", path)(errno)),
    };
    if found != FileType::Socket {
        return Err(StartError::NotASocket { path: path.to_owned(), found: describe(found) });
    }
    match probe(path) {
        Ok(pid) => Err(StartError::AlreadyRunning { socket: path.to_owned(), pid }),
        Err(Errno::CONNREFUSED | Errno::NOENT) => {
            tracing::info!(path = %path.display(), "replacing the socket of a dead broker");
            match fs::unlink(path) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(StartError::at("unlink", path)(errno)),
            }
        }
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

/// Starting a broker takes milliseconds. A process that holds the lock for this long is stopped or hangs.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
