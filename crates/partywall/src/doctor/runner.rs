//! Child processes with a time limit.

use std::{
    ffi::OsString,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use partywall_os::{
    process,
    socket::{self, Ready},
    thread,
};

use super::{Doctor, Probe, finding::Finding};

/// How a child ended.
#[derive(Debug)]
pub struct ChildEnd {
    /// `None` if the child exceeded the time limit and was killed.
    pub status: Option<ExitStatus>,
    /// Its standard output.
    pub stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// True if the child still runs after it was killed.
    immortal: bool,
}

/// Runs a command without input, and kills it after `limit`. A child that does not die is left to the system.
///
/// # Errors
/// The child could not be started or waited for.
pub fn run_within(command: &mut Command, limit: Duration) -> std::io::Result<ChildEnd> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let deadline = Instant::now() + limit;
    let mut child = process::spawn(command)?;
    let outputs = child.stdout.take().map(drain).transpose().and_then(|stdout| {
        let stderr = child.stderr.take().map(drain).transpose()?;
        Ok((stdout, stderr))
    });
    let (stdout, stderr) = outputs.inspect_err(|_| {
        // No thread reads what it writes, so it might not end by itself.
        let _ = wait(&mut child, Instant::now());
    })?;
    let status = wait(&mut child, deadline)?;
    let immortal = matches!(child.try_wait(), Ok(None));
    // Its output does not end before the child does, nor before children of its own that outlive it.
    let read = |output: Option<Receiver<Vec<u8>>>| {
        output.filter(|_| !immortal).and_then(|it| it.recv_timeout(FAREWELL).ok()).unwrap_or_default()
    };
    Ok(ChildEnd { status, stdout: read(stdout), stderr: read(stderr), immortal })
}

impl Doctor {
    /// Returns the command of the child that runs a probe.
    pub(super) fn command(&self, probe: Probe) -> Command {
        let mut words = self.child.iter().cloned().chain([OsString::from(probe.title())]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }

    /// Runs a probe in a child.
    pub(super) fn probe(&self, probe: Probe) -> Finding {
        let ended = match run_within(&mut self.command(probe), self.limit) {
            Ok(ended) => ended,
            Err(error) => return Finding::failed(format!("a child process could not be run: {error}")),
        };
        let log = "look into the kernel's log (dmesg), then try again";
        match (Finding::receive(&ended.stdout), ended.status) {
            (Some(finding), _) => finding,
            (None, None) => {
                let fate = if ended.immortal { "cannot be killed: it sleeps inside a driver" } else { "was killed" };
                Finding::failed(format!("it did not end within {} s and {fate}", self.limit.as_secs_f64()))
                    .means("something that it needs hangs: the GPU's driver, or a file system")
                    .fix(log)
            }
            (None, Some(status)) => Finding::failed(format!("its process ended with {status}: {}", ended.last_words()))
                .means("something that it needs crashes: most likely the GPU's driver")
                .fix(log),
        }
    }
}

impl ChildEnd {
    /// Returns the last line of the child's standard error.
    pub fn last_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        text.trim().lines().last().unwrap_or("it said nothing").to_owned()
    }
}

/// Waits for the child's end. After `deadline`, kills it and returns no status.
pub(super) fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    let status = ends_by(child, deadline);
    if !matches!(status, Ok(Some(_))) {
        let _ = child.kill();
        // A child that sleeps inside the driver does not die before it wakes, which may never happen.
        let _ = ends_by(child, Instant::now() + FAREWELL);
    }
    status
}

/// Returns how the child ended, if it ends in time.
fn ends_by(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    // A child that has not been waited for keeps its pid, so this is its pidfd, and `kill` hits no other process.
    match process::pidfd(child.id()).and_then(|pidfd| socket::wait(pidfd, Ready::Read, Some(deadline))) {
        Ok(true) => child.wait().map(Some),
        Ok(false) => Ok(None),
        // Without pidfds, which have their own probe: poll the child.
        Err(_) => loop {
            match child.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                other => break other,
            }
        },
    }
}

/// Reads to the end on a thread, and then sends the bytes.
fn drain(mut from: impl Read + Send + 'static) -> std::io::Result<Receiver<Vec<u8>>> {
    let (sender, receiver) = channel();
    thread::spawn("partywall-output", move || {
        let mut bytes = Vec::new();
        // Bytes before an error still count. If the receiver is gone, they are not needed.
        let _ = from.read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    })?;
    Ok(receiver)
}

/// How long a killed process may take to end.
const FAREWELL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hung_child_is_killed() {
        let shell = |script: &str, limit| run_within(Command::new("sh").args(["-c", script]), limit).unwrap();
        let ended = shell("echo out; echo first >&2; echo last >&2; exit 3", Duration::from_secs(60));
        assert_eq!((ended.status.unwrap().code(), ended.stdout.as_slice()), (Some(3), &b"out\n"[..]));
        assert_eq!(ended.last_words(), "last");
        let ended = shell("echo out; exec sleep 1000", Duration::from_millis(1));
        assert!(ended.status.is_none() && !ended.immortal);
    }

    #[test]
    fn surviving_grandchild_blocks_no_probe() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        let mut command = Command::new("sh");
        // It keeps the output open until the test writes into the pipe.
        command.args(["-c", "mkfifo \"$1\" && { cat \"$1\" & exit 4; }", "sh"]).arg(&pipe);
        let ended = run_within(&mut command, Duration::from_secs(60)).unwrap();
        assert_eq!(ended.status.unwrap().code(), Some(4));
        drop(std::fs::OpenOptions::new().write(true).open(&pipe).unwrap());
    }

    #[test]
    fn failed_start_of_a_child_is_an_error() {
        run_within(&mut Command::new("/nonexistent/program"), Duration::from_secs(1)).unwrap_err();
    }
}
