//! A log file of bounded size.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
};

use partywall_os::{Errno, lock::IgnorePoison};
use rustix::fs::{FlockOperation, fcntl_lock};

/// A log file that is renamed to `<path>.1` when it is full, replacing the previous `<path>.1`. Both files together
/// never exceed twice [`RotatingLog::FILE_BYTES`].
///
/// Another program may rename, remove or truncate the file, as logrotate does: the next line then begins a new file at
/// the same path.
///
/// One broker writes a file at a time: it holds a lock on the file (fcntl(2)). The lock belongs to the table of file
/// descriptors, which a supervisor shares with its workers, so each of them may open the log. Closing any descriptor of
/// the file gives the lock up, as a worker does with what its predecessor has left, so each line takes it again.
///
/// `&RotatingLog` writes too, so an `Arc` of it is a writer for `tracing_subscriber`. One call of [`Write::write`] is
/// one line. A line is never split between the files. A line longer than a file is cut off.
#[derive(Debug)]
pub struct RotatingLog {
    path: PathBuf,
    limit: u64,
    state: Mutex<LogState>,
}

#[derive(Debug)]
struct LogState {
    file: File,
    bytes: u64,
}

impl RotatingLog {
    /// The maximum length of one file, in bytes.
    pub const FILE_BYTES: u64 = 5 << 20;

    /// Opens the log at `path` to append to it. Creates the file and its directories if needed, for this user alone.
    ///
    /// # Errors
    /// As mkdir(2) and open(2); [`ErrorKind::ResourceBusy`](io::ErrorKind::ResourceBusy) if another broker writes it.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        Self::with_limit(path.into(), Self::FILE_BYTES)
    }

    fn with_limit(path: PathBuf, limit: u64) -> io::Result<Self> {
        let state = Mutex::new(LogState::open(&path)?);
        Ok(Self { path, limit, state })
    }

    /// Returns the path of the current file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of the open file.
    pub(crate) fn number(&self) -> RawFd {
        self.state().file.as_raw_fd()
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        // A panic while a line is written leaves at worst half a line.
        self.state.lock().ignore_poison()
    }
}

impl Write for &RotatingLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let kept = &line[..line.len().min(usize::try_from(self.limit).unwrap_or(usize::MAX))];
        let mut state = self.state();
        state.follow(&self.path)?;
        if state.bytes + kept.len() as u64 > self.limit {
            let mut former = self.path.clone().into_os_string();
            former.push(".1");
            fs::rename(&self.path, former)?;
            *state = LogState::open(&self.path)?;
        }
        state.file.write_all(kept)?;
        state.bytes += kept.len() as u64;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.state().file.flush()
    }
}

impl LogState {
    fn open(path: &Path) -> io::Result<Self> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        // The mode applies to the directories created here. The log may be in the socket's directory, which must be
        // 0700.
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        let bytes = file.metadata()?.len();
        let state = Self { file, bytes };
        state.lock()?;
        Ok(state)
    }

    /// Takes the lock on the file, or keeps it. Where the file system has no locks, the file is taken to be this
    /// broker's.
    fn lock(&self) -> io::Result<()> {
        match fcntl_lock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN | Errno::ACCESS) => {
                Err(io::Error::new(io::ErrorKind::ResourceBusy, "another broker writes this file"))
            }
            _ => Ok(()),
        }
    }

    /// Opens the log anew if another file, or none, is at its path by now. If that fails, the log goes on in the former
    /// file.
    ///
    /// # Errors
    /// [`LogState::lock`]'s, if another broker has begun to write the file.
    fn follow(&mut self, path: &Path) -> io::Result<()> {
        let identity = |file: &Metadata| (file.dev(), file.ino());
        match (fs::metadata(path), self.file.metadata()) {
            // It may have been truncated.
            (Ok(there), Ok(ours)) if identity(&there) == identity(&ours) => self.bytes = there.len(),
            _ => {
                if let Ok(state) = Self::open(path) {
                    *self = state;
                }
            }
        }
        self.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(path: &Path) -> (u64, Option<u64>) {
        let former = path.with_extension("log.1");
        (fs::metadata(path).unwrap().len(), fs::metadata(former).ok().map(|m| m.len()))
    }

    #[test]
    fn log_never_exceeds_two_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.log");
        let log = RotatingLog::with_limit(path.clone(), 100).unwrap();
        let mut log = &log;
        log.write_all(&[b'a'; 60]).unwrap();
        assert_eq!(sizes(&path), (60, None));
        log.write_all(&[b'b'; 40]).unwrap();
        assert_eq!(sizes(&path), (100, None));
        log.write_all(b"c").unwrap();
        assert_eq!(sizes(&path), (1, Some(100)));
        log.write_all(&[b'd'; 1000]).unwrap();
        assert_eq!(sizes(&path), (100, Some(1)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    // Holds 131.
    #[test]
    fn log_that_another_program_moves_or_removes_goes_on_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("state");
        let path = folder.join("d.log");
        let log = RotatingLog::with_limit(path.clone(), 100).unwrap();
        let write = |line: &str| (&log).write_all(line.as_bytes()).unwrap();
        write("1\n");
        let moved = folder.join("d.log-20260101");
        fs::rename(&path, &moved).unwrap();
        write("2\n");
        assert_eq!(
            (fs::read_to_string(&moved).unwrap(), fs::read_to_string(&path).unwrap()),
            ("1\n".into(), "2\n".into())
        );
        fs::remove_dir_all(&folder).unwrap();
        write("3\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "3\n");
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        // A copy was made of it, and it was truncated: it does not count as full.
        write(&"4".repeat(98));
        File::options().write(true).truncate(true).open(&path).unwrap();
        write("5\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "5\n");
        assert!(!folder.join("d.log.1").exists());
        // Where no new file can be made, lines are still written.
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        write("6\n");
        assert_eq!(fs::read_to_string(&moved).unwrap(), "5\n6\n");
    }

    #[test]
    fn reopened_log_continues_where_it_ended() {
        let dir = tempfile::tempdir().unwrap();
        for line in ["first\n", "second\n"] {
            (&RotatingLog::open(dir.path().join("d.log")).unwrap()).write_all(line.as_bytes()).unwrap();
        }
        let text = fs::read_to_string(dir.path().join("d.log")).unwrap();
        assert_eq!(text, "first\nsecond\n");
    }
}
