//! The directory of a domain's MPS daemon, and the locks in it.
//!
//! It is `NAME.mps` beside the socket `NAME.sock`, and has mode 0700. It exists while a daemon runs or is wanted, and
//! after a daemon that was not stopped, for the sake of its logs:
//!
//! | path | content |
//! |---|---|
//! | the directory itself | its lock is held while the daemon is started or stopped |
//! | `pipe/` | the daemon's sockets, which clients find by `CUDA_MPS_PIPE_DIRECTORY` |
//! | `log/` | the logs of the daemon and its servers |
//! | `holds` | a shared lock is held by each process that may still become a client; see [`MpsHold`] |
//! | `watcher` | the watcher holds its lock, and writes its pid into it |
//!
//! All locks are flock(2): the kernel releases them with the last process that holds them, so a killed process leaves
//! none. A lock of a directory that was removed meanwhile is worth nothing: each is checked against the path once it is
//! held.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use partywall_os::dir::{DirLock, PrivateDir, Unsafe};
use rustix::io::{Errno, FdFlags};

use super::control::ControlProgram;
use crate::{
    domain::Location,
    error::{Error, ErrorKind, MpsFault, Result},
};

/// The directory of a daemon.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    root: PathBuf,
    /// The socket's directory.
    parent: PathBuf,
}

/// Keeps a domain's MPS daemon from being stopped because it is idle, as long as this value or a process that inherited
/// it exists. For a process that may become a client later.
#[derive(Debug)]
pub struct MpsHold {
    file: File,
}

impl MpsHold {
    /// Lets programs that replace this process, and children, hold the daemon, too.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn inherit(&self) -> Result<()> {
        rustix::io::fcntl_setfd(&self.file, FdFlags::empty())
            .map_err(|errno| Error::system("keeping a file open", errno))
    }
}

/// What the watcher holds as long as it runs.
#[derive(Debug)]
pub(super) struct WatcherLock(#[expect(dead_code, reason = "its lock ends with it")] File);

impl Directory {
    /// Returns the directory of a domain's daemon, which may not exist.
    pub(super) fn of(location: &Location) -> Self {
        let mut name = location.socket.file_stem().unwrap_or_default().to_owned();
        name.push(".mps");
        Self { root: location.directory().join(name), parent: location.directory().to_owned() }
    }

    pub(super) fn pipes(&self) -> PathBuf {
        self.root.join("pipe")
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.root.join("log")
    }

    pub(super) fn control(&self) -> ControlProgram {
        ControlProgram { pipes: self.pipes(), logs: self.logs() }
    }

    /// Returns whether the directory exists.
    pub(super) fn exists(&self) -> bool {
        self.root.exists()
    }

    /// Checks that the directory is private, or can be made, and that a daemon can have its sockets in it.
    pub(super) fn check(&self) -> Result<()> {
        self.check_length()?;
        PrivateDir::open(&self.parent, true).map_err(|why| Error::directory(&self.parent, why))?;
        match PrivateDir::open(&self.root, false) {
            Ok(_) | Err(Unsafe::Errno(Errno::NOENT)) => Ok(()),
            Err(why) => Err(Error::directory(&self.root, why)),
        }
    }

    /// Takes the lock under which the daemon is started and stopped, and makes the directory if it does not exist.
    /// Returns `None` at the deadline.
    pub(super) fn try_lock(&self, deadline: Instant) -> Result<Option<DirLock>> {
        loop {
            let directory = self.open()?;
            let lock = directory.lock(deadline).map_err(|errno| self.failed("locking", errno))?;
            let Some(lock) = lock else { return Ok(None) };
            let held: OwnedFd = lock.share().map_err(|errno| self.failed("locking", errno))?;
            if is_at(&self.root, &held) {
                return Ok(Some(lock));
            }
        }
    }

    /// Takes the lock as [`Self::try_lock`] does. A passed deadline is an error.
    pub(super) fn lock(&self, deadline: Instant) -> Result<DirLock> {
        self.try_lock(deadline)?.ok_or_else(busy)
    }

    /// Makes empty directories for a daemon, where none runs. What a killed daemon has left is removed. Called under
    /// the lock.
    pub(super) fn prepare(&self) -> Result<()> {
        for path in [self.pipes(), self.logs()] {
            remove_all(&path).map_err(|error| self.failed("clearing", errno_of(&error)))?;
            PrivateDir::open(&path, true).map_err(|why| Error::directory(&path, why))?;
        }
        Ok(())
    }

    /// Removes everything that a daemon which has ended has left, and the directory itself unless a process holds the
    /// daemon. Called under the lock.
    pub(super) fn remove(&self) -> Result<()> {
        self.remove_pipes()?;
        let deadline = Instant::now() + GLANCE;
        loop {
            match self.lock_holds()? {
                // Its lock is kept until the directory is gone, so that a process that wants to hold the daemon waits
                // for that.
                Some(_unheld) => {
                    return remove_all(&self.root).map_err(|error| self.failed("removing", errno_of(&error)));
                }
                // A process that only asks whether the daemon is held has the lock for a moment.
                None if Instant::now() < deadline => std::thread::sleep(POLL),
                None => return Ok(()),
            }
        }
    }

    /// Removes what clients of a daemon that has ended would find. Its logs stay. Called under the lock.
    pub(super) fn remove_pipes(&self) -> Result<()> {
        remove_all(&self.pipes()).map_err(|error| self.failed("clearing", errno_of(&error)))
    }

    /// Holds the daemon. Waits while it is being stopped.
    pub(super) fn hold(&self, deadline: Instant) -> Result<MpsHold> {
        loop {
            self.open()?;
            let Some(file) = self.file("holds", true)? else { continue };
            match file.try_lock_shared() {
                Ok(()) if is_at(&self.root.join("holds"), &file) => return Ok(MpsHold { file }),
                Ok(()) => {}
                Err(TryLockError::Error(error)) => return Err(self.failed("locking", errno_of(&error))),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => return Err(busy()),
            }
        }
    }

    /// Returns the lock that no process can hold the daemon against, or `None` if a process does.
    pub(super) fn lock_holds(&self) -> Result<Option<File>> {
        let Some(file) = self.file("holds", true)? else { return Ok(None) };
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(self.failed("locking", errno_of(&error))),
        }
    }

    /// Returns whether a process holds the daemon.
    pub(super) fn is_held(&self) -> bool {
        let file = self.file("holds", false).ok().flatten();
        file.is_some_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Becomes the watcher, unless there is one. Called under the lock.
    pub(super) fn lock_watcher(&self) -> Result<Option<WatcherLock>> {
        let Some(mut file) = self.file("watcher", true)? else { return Ok(None) };
        let deadline = Instant::now() + GLANCE;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                // A process that only asks whether there is a watcher has the lock for a moment.
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(self.failed("locking", errno_of(&error))),
            }
        }
        let pid = std::process::id().to_string();
        let written = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(pid.as_bytes()));
        written.map_err(|error| self.failed("writing to", errno_of(&error)))?;
        Ok(Some(WatcherLock(file)))
    }

    /// Returns the pid of the watcher, if there is one.
    pub(super) fn watcher(&self) -> Option<u32> {
        let mut file = self.file("watcher", false).ok().flatten()?;
        if !matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
            return None;
        }
        let mut pid = String::new();
        file.read_to_string(&mut pid).ok()?;
        pid.trim().parse().ok()
    }

    fn check_length(&self) -> Result<()> {
        let pipes = self.pipes();
        if pipes.join(LONGEST_SOCKET).as_os_str().len() > MAX_SOCKET_PATH {
            return Err(MpsFault::PathTooLong { pipes, most: MAX_SOCKET_PATH }.into());
        }
        Ok(())
    }

    fn open(&self) -> Result<PrivateDir> {
        self.check_length()?;
        // The broker, which makes this directory otherwise, may not run.
        PrivateDir::open(&self.parent, true).map_err(|why| Error::directory(&self.parent, why))?;
        PrivateDir::open(&self.root, true).map_err(|why| match why {
            Unsafe::NoParent(_) => Error::directory(&self.parent, Unsafe::Errno(Errno::NOENT)),
            why => Error::directory(&self.root, why),
        })
    }

    /// Opens a file of the directory. Returns `None` if it does not exist, or if the directory was removed.
    fn file(&self, name: &str, create: bool) -> Result<Option<File>> {
        let path = self.root.join(name);
        let opened = OpenOptions::new().read(true).write(true).create(create).truncate(false).mode(0o600).open(&path);
        match opened {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed("opening a file in", errno_of(&error))),
        }
    }

    fn failed(&self, what: &str, errno: Errno) -> Error {
        Error::system(format!("{what} {}", self.root.display()), errno)
    }
}

/// Returns whether an open file is the one that the path names now.
fn is_at(path: &Path, file: impl AsFd) -> bool {
    let named = fs::symlink_metadata(path);
    let held = rustix::fs::fstat(file);
    matches!((named, held), (Ok(named), Ok(held)) if (named.dev(), named.ino()) == (held.st_dev, held.st_ino))
}

fn remove_all(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn busy() -> Error {
    let why = "another process has been starting or stopping it for too long".to_owned();
    MpsFault::NotStarted { why, advice: Some("try again".to_owned()), kind: ErrorKind::TimedOut }.into()
}

/// How often a lock is tried.
const POLL: Duration = Duration::from_millis(5);

/// How long a process may have a lock that it only asks about.
const GLANCE: Duration = Duration::from_millis(200);

/// The longest name of a socket that the vendor's daemon makes.
const LONGEST_SOCKET: &str = "control_privileged";

/// The longest path of a socket that the kernel accepts.
const MAX_SOCKET_PATH: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(at: &Path) -> Directory {
        let location = Location::find(None, Some(&at.join("pw/default.sock"))).unwrap();
        Directory::of(&location)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn directory_is_private_and_beside_the_socket() {
        let at = tempfile::tempdir().unwrap();
        let directory = directory(at.path());
        assert_eq!(directory.pipes(), at.path().join("pw/default.mps/pipe"));
        let lock = directory.lock(soon()).unwrap();
        directory.prepare().unwrap();
        for path in [directory.root.clone(), directory.pipes(), directory.logs()] {
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700, "{}", path.display());
        }
        directory.remove().unwrap();
        assert!(!directory.exists());
        drop(lock);
        let long = at.path().join("x".repeat(100)).join("default.sock");
        let directory = Directory::of(&Location::find(None, Some(&long)).unwrap());
        for refused in [directory.check().unwrap_err(), directory.hold(soon()).unwrap_err()] {
            assert!(matches!(refused, Error::Mps(MpsFault::PathTooLong { .. })), "{refused}");
        }
        assert!(!directory.exists());
    }

    #[test]
    fn held_directory_stays_and_its_pipes_go() {
        let at = tempfile::tempdir().unwrap();
        let directory = directory(at.path());
        let hold = directory.hold(soon()).unwrap();
        assert!(directory.is_held() && directory.lock_holds().unwrap().is_none());
        let _lock = directory.lock(soon()).unwrap();
        directory.prepare().unwrap();
        directory.remove().unwrap();
        assert!(directory.exists() && !directory.pipes().exists());
        assert!(directory.is_held(), "it is still the same hold");
        drop(hold);
        directory.remove().unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn lock_of_a_removed_directory_is_taken_again() {
        let at = tempfile::tempdir().unwrap();
        let directory = directory(at.path());
        let lock = directory.lock(soon()).unwrap();
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| directory.lock(soon()));
            // The other thread may wait already or come later. In neither case may it return with the lock of the
            // removed directory.
            directory.remove().unwrap();
            drop(lock);
            let held = waiting.join().unwrap().unwrap();
            assert!(is_at(&directory.root, held.share().unwrap()));
            assert!(directory.try_lock(Instant::now()).unwrap().is_none());
        });
    }

    #[test]
    fn there_is_one_watcher_at_a_time() {
        let at = tempfile::tempdir().unwrap();
        let directory = directory(at.path());
        assert_eq!(directory.watcher(), None);
        let _lock = directory.lock(soon()).unwrap();
        let watcher = directory.lock_watcher().unwrap().expect("there is none");
        assert!(directory.lock_watcher().unwrap().is_none());
        assert_eq!(directory.watcher(), Some(std::process::id()));
        drop(watcher);
        assert_eq!(directory.watcher(), None, "the file alone is no watcher");
    }
}
