//! Directories in which only this user can create files, and locks on them.

use std::{
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{self, FileType, FlockOperation, Mode, OFlags},
    io::{self, Errno},
};

/// Why a directory is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unsafe {
    /// It is a symbolic link, or no directory at all.
    NotADirectory,
    /// It belongs to this user.
    Owner(u32),
    /// Its mode does not allow what it should, or allows more.
    Mode {
        /// Its mode.
        found: u32,
        /// The processes that are to enter it.
        wanted: DirAccess,
    },
    /// It does not exist and cannot be created, because this parent of it does not exist.
    NoParent(PathBuf),
    /// The kernel refused to create or open it.
    Errno(Errno),
}

impl fmt::Display for Unsafe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotADirectory => write!(f, "it is a symbolic link or no directory"),
            Self::Owner(uid) => write!(f, "it belongs to user {uid}, not to us"),
            Self::Mode { found, wanted: DirAccess::Private } => {
                write!(f, "its mode is {found:04o}, so others may enter; it must be 0700")
            }
            Self::Mode { found, wanted: DirAccess::Passable } => write!(
                f,
                "its mode is {found:04o}; with other users admitted it must be 0711: they pass through it, and \
                 cannot list, change or lock it"
            ),
            Self::NoParent(parent) => write!(f, "its parent directory {} does not exist", parent.display()),
            Self::Errno(e) => write!(f, "{e}"),
        }
    }
}

/// The processes that may enter a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirAccess {
    /// Those of this user alone: mode 0700.
    Private,
    /// All, but only to reach files whose names they know: mode 0711. A process that can read a directory can lock it.
    Passable,
}

impl DirAccess {
    fn mode(self) -> u32 {
        match self {
            Self::Private => 0o700,
            Self::Passable => 0o711,
        }
    }
}

/// A directory that is no symbolic link, and in which only this user can create files.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    fd: OwnedFd,
}

impl PrivateDir {
    /// Opens `path`. If it does not exist and `create` is set, creates it with mode 0700, whatever the umask is, but
    /// not its parents.
    ///
    /// # Errors
    /// [`Unsafe::Errno`] with `ENOENT` if it does not exist; any other [`Unsafe`] if it must not be used.
    pub fn open(path: &Path, create: bool) -> Result<Self, Unsafe> {
        Self::open_for(path, create, DirAccess::Private)
    }

    /// Opens `path` as [`PrivateDir::open`] does, with the mode of `entry`.
    ///
    /// # Errors
    /// As [`PrivateDir::open`].
    pub fn open_for(path: &Path, create: bool, entry: DirAccess) -> Result<Self, Unsafe> {
        if create {
            match fs::mkdir(path, Mode::RWXU) {
                // The umask may have removed bits.
                Ok(()) => fs::chmod(path, Mode::from(entry.mode())).map_err(Unsafe::Errno)?,
                Err(Errno::EXIST) => complete_mode(path, entry)?,
                Err(Errno::NOENT) => return Err(Unsafe::NoParent(path.parent().unwrap_or(path).to_owned())),
                Err(e) => return Err(Unsafe::Errno(e)),
            }
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let fd = match fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(Unsafe::NotADirectory),
            Err(e) => return Err(Unsafe::Errno(e)),
        };
        // The open directory is checked, not the path, which may name another one a moment later.
        let stat = fs::fstat(&fd).map_err(Unsafe::Errno)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Unsafe::NotADirectory);
        }
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Unsafe::Owner(stat.st_uid));
        }
        if stat.st_mode & 0o777 != entry.mode() {
            return Err(Unsafe::Mode { found: stat.st_mode & 0o7777, wanted: entry });
        }
        Ok(Self { path: path.to_owned(), fd })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the directory against other lockers. Returns `None` if `deadline` came first. The lock ends with the
    /// returned value or with the process, and leaves no file behind.
    ///
    /// # Errors
    /// As flock(2).
    pub fn lock(self, deadline: Instant) -> io::Result<Option<DirLock>> {
        // flock has no timeout, and its holder may be stopped, so the loop polls.
        loop {
            match fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(DirLock { fd: self.fd })),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() >= deadline => return Ok(None),
                Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(5)),
                Err(e) => return Err(e),
            }
        }
    }
}

/// Gives this user the bits of its own directory that the umask of its creator has removed: that process was killed
/// before it set the mode, or is about to set it.
fn complete_mode(path: &Path, entry: DirAccess) -> Result<(), Unsafe> {
    let Ok(stat) = fs::lstat(path) else { return Ok(()) };
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        && stat.st_uid == rustix::process::geteuid().as_raw();
    let mode = stat.st_mode & 0o777;
    // A directory that lets others do more stays refused.
    if is_ours && mode & 0o700 != 0o700 && mode & !entry.mode() == 0 {
        fs::chmod(path, Mode::from(entry.mode())).map_err(Unsafe::Errno)?;
    }
    Ok(())
}

/// A lock on a directory, held until it is dropped, here and wherever it is [shared](DirLock::share).
#[derive(Debug)]
pub struct DirLock {
    fd: OwnedFd,
}

impl DirLock {
    /// Returns a descriptor that also holds the lock and may be sent to another process. The lock ends with its last
    /// holder.
    ///
    /// # Errors
    /// As dup(2).
    pub fn share(&self) -> io::Result<OwnedFd> {
        io::fcntl_dupfd_cloexec(&self.fd, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    // Holds 130, 147.
    #[test]
    fn only_a_private_directory_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pw");
        assert_eq!(PrivateDir::open(&path, false).unwrap_err(), Unsafe::Errno(Errno::NOENT));
        PrivateDir::open(&path, true).unwrap();
        PrivateDir::open(&path, true).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let wrong = |wanted| Unsafe::Mode { found: 0o755, wanted };
        assert_eq!(PrivateDir::open(&path, true).unwrap_err(), wrong(DirAccess::Private));
        // A process of another user that can read the directory can also lock it.
        assert_eq!(PrivateDir::open_for(&path, true, DirAccess::Passable).unwrap_err(), wrong(DirAccess::Passable));
        let passable = dir.path().join("passable");
        PrivateDir::open_for(&passable, true, DirAccess::Passable).unwrap();
        assert_eq!(std::fs::metadata(&passable).unwrap().permissions().mode() & 0o777, 0o711);
        // What a creator has left that was killed before it set the mode.
        for mode in [0o300, 0o500, 0o600, 0o000] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            PrivateDir::open(&path, true).unwrap();
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(
            PrivateDir::open(&path, true).unwrap_err(),
            Unsafe::Mode { found: 0o640, wanted: DirAccess::Private }
        );
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(PrivateDir::open(&link, true).unwrap_err(), Unsafe::NotADirectory);
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(PrivateDir::open(&file, true).unwrap_err(), Unsafe::NotADirectory);
    }

    #[test]
    fn one_lock_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pw");
        let open = || PrivateDir::open(&path, true).unwrap();
        let held = open().lock(Instant::now()).unwrap().expect("free");
        assert!(open().lock(Instant::now() + Duration::from_millis(20)).unwrap().is_none());
        let shared = held.share().unwrap();
        drop(held);
        assert!(open().lock(Instant::now()).unwrap().is_none(), "another holds it");
        drop(shared);
        // A child that another test has forked holds it, too, until it ends.
        assert!(open().lock(Instant::now() + Duration::from_secs(60)).unwrap().is_some());
    }
}
