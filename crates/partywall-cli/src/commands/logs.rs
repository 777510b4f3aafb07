//! `partywall logs`. With `--json` one object a line: `log` (its path) and `line`; and with `--follow`, when the broker
//! has ended, `log` and `ended` (its pid, or null if there was none).
//!
//! It needs no broker: the log of a broker that has ended remains. While it follows the log it is not a member, so it
//! keeps no broker running.

use std::{
    fs::{self, File},
    io::{self, ErrorKind as IoErrorKind, Read, Seek},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{ErrorKind, Location};
use partywall_os::{
    process,
    socket::{self, Ready},
};
use serde_json::json;

use crate::{Context, failure::Failure, output::Output, repeat::pause, signals, text::parse_number};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Print new lines until Ctrl-C or until the broker ends
    #[arg(short, long)]
    follow: bool,
    /// Print only the last N lines
    #[arg(short = 'n', long, value_name = "N", value_parser = parse_number::<u64>)]
    lines: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let output = context.output();
    let stop = signals::cancel_flag()?;
    let (path, broker) = find(context)?;
    let mut log = Log::open(&path).map_err(|error| unreadable(&path, &error))?;
    let all = log.all().map_err(|error| unreadable(&path, &error))?;
    let skipped =
        arguments.lines.map_or(0, |lines| all.len().saturating_sub(usize::try_from(lines).unwrap_or(usize::MAX)));
    for line in &all[skipped..] {
        print(output, &path, line);
    }
    if !arguments.follow {
        return Ok(());
    }
    loop {
        // Checked before the log is read, so that the last lines of a broker that has just ended are read too.
        let has_ended = broker.has_ended();
        for line in log.added().map_err(|error| unreadable(&path, &error))? {
            print(output, &path, &line);
        }
        if has_ended {
            output.remark(broker.farewell());
            output.value(&json!({ "log": path, "ended": broker.pid }));
            return Ok(());
        }
        if !pause(output, POLL, &stop) {
            return Ok(());
        }
    }
}

fn print(output: Output, path: &Path, line: &str) {
    output.line(line);
    output.value(&json!({ "log": path, "line": line }));
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    if error.kind() == IoErrorKind::NotFound {
        let advice = "check --domain and PARTYWALL_SOCKET; `partywall serve` starts a broker, which creates the log";
        return Failure::new(ErrorKind::NotFound, format!("no log exists at {}", path.display()), advice);
    }
    let what = format!("cannot read the log {}: {error}", path.display());
    Failure::new(ErrorKind::Refused, what, "check the path and its permissions")
}

/// Returns the path of the log and its writer, from the broker or derived from the socket.
fn find(context: &Context) -> Result<(PathBuf, LogWriter), Failure> {
    let options = context.options().start(false).operator(true);
    let location = options.location()?;
    // A broker that cannot be reached is itself a reason to read its log.
    let Some(status) = options.connect().and_then(|domain| domain.status()).ok() else {
        return Ok((latest(location.logs()), LogWriter { pid: None, pidfd: None, location }));
    };
    let Some(path) = status.log.as_ref().map(PathBuf::from) else {
        let what = format!("the broker with pid {} keeps no log", status.pid);
        let advice = "see the message at its start; `partywall serve` repeats it";
        return Err(Failure::new(ErrorKind::NotFound, what, advice));
    };
    // The pid of a broker in another PID namespace means nothing here.
    let pidfd = partywall::broker_pid(&location).ok().flatten().and_then(|pid| process::pidfd(pid).ok());
    Ok((path, LogWriter { pid: Some(status.pid), pidfd, location }))
}

/// Returns the log that was written last. A broker writes beside its socket if it cannot write in the usual place, such
/// as when another broker writes the log there.
fn latest(places: Vec<PathBuf>) -> PathBuf {
    let written = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let last = |path: &PathBuf| written(path).max(written(&predecessor(path)));
    // Of equals, as of logs that do not exist, the first is the usual place.
    places.into_iter().rev().max_by_key(last).unwrap_or_default()
}

/// The process that writes the log.
struct LogWriter {
    pid: Option<u32>,
    pidfd: Option<OwnedFd>,
    location: Location,
}

impl LogWriter {
    fn has_ended(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => socket::wait(pidfd, Ready::Read, Some(Instant::now())).unwrap_or(false),
            None => socket::nobody_listens(&self.location.socket),
        }
    }

    fn farewell(&self) -> String {
        match self.pid {
            Some(pid) => format!("the broker with pid {pid} has ended"),
            None => format!("no broker runs at {}", self.location.socket.display()),
        }
    }
}

/// A log, which the broker renames to `<path>.1` when it is full. Another program may do the same, or remove it.
struct Log {
    path: PathBuf,
    /// The log, or its predecessor if the broker has not begun the next one yet.
    file: File,
    /// The beginning of an incomplete line.
    rest: Vec<u8>,
}

/// Returns the path of the log before this one.
fn predecessor(path: &Path) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(".1");
    name.into()
}

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path).or_else(|error| File::open(predecessor(path)).map_err(|_| error))?;
        Ok(Self { path: path.to_owned(), file, rest: Vec::new() })
    }

    /// Returns all lines, also those of `<path>.1`.
    fn all(&mut self) -> io::Result<Vec<String>> {
        let mut lines = Vec::new();
        if let Ok(mut older) = File::open(predecessor(&self.path))
            // The log may have been renamed just now.
            && older.metadata()?.ino() != self.file.metadata()?.ino()
        {
            older.read_to_end(&mut self.rest)?;
            lines = self.take_lines();
        }
        lines.extend(self.added()?);
        Ok(lines)
    }

    /// Returns the lines since the last call, also those of a log that was started meanwhile.
    fn added(&mut self) -> io::Result<Vec<String>> {
        // Checked before the file is read to its end: once the log has been renamed, it no longer grows.
        let is_new =
            fs::metadata(&self.path).is_ok_and(|path| self.file.metadata().is_ok_and(|ours| ours.ino() != path.ino()));
        if self.file.metadata()?.len() < self.file.stream_position()? {
            // It was truncated, because a copy was made of it.
            self.file.rewind()?;
        }
        self.file.read_to_end(&mut self.rest)?;
        if is_new {
            self.file = File::open(&self.path)?;
            self.file.read_to_end(&mut self.rest)?;
        }
        Ok(self.take_lines())
    }

    /// Removes and returns the complete lines.
    fn take_lines(&mut self) -> Vec<String> {
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let whole: Vec<u8> = self.rest.drain(..end).collect();
        String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect()
    }
}

/// How often the log is polled.
const POLL: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_is_followed_across_its_rotation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("d.log");
        let write = |text: &str| {
            io::Write::write_all(&mut File::options().append(true).create(true).open(&path).unwrap(), text.as_bytes())
        };
        write("1\n2\n3").unwrap();
        let mut log = Log::open(&path).unwrap();
        assert_eq!(log.all().unwrap(), ["1", "2"], "half a line is held back until its end is written");
        write("3\n").unwrap();
        assert_eq!(log.added().unwrap(), ["33"]);
        write("4\n").unwrap();
        fs::rename(&path, directory.path().join("d.log.1")).unwrap();
        assert_eq!(log.added().unwrap(), ["4"], "the new one is not there yet");
        let mut alone = Log::open(&path).unwrap();
        assert_eq!(alone.all().unwrap(), ["1", "2", "33", "4"]);
        write("5\n").unwrap();
        assert_eq!(log.added().unwrap(), ["5"]);
        assert_eq!(alone.added().unwrap(), ["5"]);
        assert_eq!(Log::open(&path).unwrap().all().unwrap(), ["1", "2", "33", "4", "5"]);
        File::options().write(true).truncate(true).open(&path).unwrap();
        assert_eq!(log.added().unwrap(), [""; 0]);
        write("8\n").unwrap();
        assert_eq!(log.added().unwrap(), ["8"]);
    }
}
