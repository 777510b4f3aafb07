//! A log file of bounded size.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
};

use partywall_os::lock::IgnorePoison;

/// A log file that is renamed to `<path>.1` when it is full, replacing the previous `<path>.1`. Both files together
/// never exceed twice [`RotatingLog::FILE_BYTES`].
///
/// `&RotatingLog` writes too, so an `Arc` of it is a writer for `tracing_subscriber`. One call of [`Write::write`] is
/// one line. A line is never split between the files. A line longer than a file is cut off.
#[derive(Debug)]
pub struct RotatingLog {
    path: PathBuf,
    limit: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    bytes: u64,
}

impl RotatingLog {
    /// The maximum length of one file, in bytes.
    pub const FILE_BYTES: u64 = 5 << 20;

    /// Opens the log at `path` to append to it, and creates the file if needed. The directory must exist.
    ///
    /// # Errors
    /// As open(2).
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        Self::with_limit(path.into(), Self::FILE_BYTES)
    }

    fn with_limit(path: PathBuf, limit: u64) -> io::Result<Self> {
        let state = Mutex::new(State::open(&path)?);
        Ok(Self { path, limit, state })
    }

    /// Returns the path of the current file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while a line is written leaves at worst half a line.
        self.state.lock().ignore_poison()
    }
}

impl Write for &RotatingLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let kept = &line[..line.len().min(usize::try_from(self.limit).unwrap_or(usize::MAX))];
        let mut state = self.state();
        if state.bytes + kept.len() as u64 > self.limit {
            let mut aside = self.path.clone().into_os_string();
            aside.push(".1");
            fs::rename(&self.path, aside)?;
            *state = State::open(&self.path)?;
        }
        state.file.write_all(kept)?;
        state.bytes += kept.len() as u64;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.state().file.flush()
    }
}

impl State {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { file, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(path: &Path) -> (u64, Option<u64>) {
        let aside = path.with_extension("log.1");
        (fs::metadata(path).unwrap().len(), fs::metadata(aside).ok().map(|m| m.len()))
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
