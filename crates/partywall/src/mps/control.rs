//! The vendor's control program: it starts a daemon, and passes requests to one.
//!
//! The program prints its answer and exits with 0 for most failures, too, so an answer counts by what it says: pids are
//! lines of digits, and other lines are messages for people.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use partywall_os::{environment, process};

use super::PIPES;
use crate::error::{Error, ErrorKind, MpsFault, Result};

/// The control program, in the directories of one daemon.
#[derive(Debug, Clone)]
pub(super) struct ControlProgram {
    pub(super) pipes: PathBuf,
    pub(super) logs: PathBuf,
}

impl ControlProgram {
    /// Starts a daemon. Returns when the vendor's program has ended, which is not yet a proof that the daemon answers.
    pub(super) fn start(&self, deadline: Instant) -> Result<()> {
        // A daemon may keep the streams of the program that started it, so they are a file and not a pipe.
        let said = self.logs.join("start.log");
        let open = || File::create(&said);
        let output = open().and_then(|out| Ok((out.try_clone()?, out)));
        let (out, err) = output.map_err(|error| not_started(format!("{}: {error}", said.display())))?;
        let mut command = self.command();
        // Ordinals of clients count the daemon's GPUs, so it gets all of them whatever its starter sees.
        command.arg("-d").env_remove("CUDA_VISIBLE_DEVICES");
        command.stdin(Stdio::null()).stdout(Stdio::from(out)).stderr(Stdio::from(err));
        let mut child = spawn(&mut command)?;
        let status = wait(&mut child, deadline);
        let said = fs::read_to_string(&said).unwrap_or_default();
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) if said.trim().is_empty() => Err(not_started(format!("{PROGRAM} -d: {status}"))),
            Some(_) => Err(not_started(one_line(&said))),
            None => Err(not_started(format!("{PROGRAM} -d does not end"))),
        }
    }

    /// Asks the daemon. Returns the answer, or `None` if there was none in time or the daemon is not there.
    pub(super) fn ask(&self, request: &str, deadline: Instant) -> Result<Option<String>> {
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = spawn(&mut command)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that has ended already does not read it; its status shows that.
            let _ = stdin.write_all(format!("{request}\n").as_bytes());
        }
        let status = wait(&mut child, deadline);
        let mut said = String::new();
        // The program has ended, so the pipe ends, too: it starts no other process for a request.
        if let (Some(_), Some(mut stdout)) = (status, child.stdout.take()) {
            let _ = stdout.read_to_string(&mut said);
        }
        Ok(status.is_some_and(|status| status.success()).then_some(said))
    }

    /// Returns the pids of the servers, or `None` if the daemon does not answer.
    pub(super) fn servers(&self, deadline: Instant) -> Result<Option<Vec<u32>>> {
        Ok(self.ask("get_server_list", deadline)?.map(|said| pids(&said)))
    }

    /// Returns the pids of the clients of a server.
    pub(super) fn clients(&self, server: u32, deadline: Instant) -> Result<Option<Vec<u32>>> {
        Ok(self.ask(&format!("get_client_list {server}"), deadline)?.map(|said| pids(&said)))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        environment::shield(&mut command);
        command.env(PIPES, &self.pipes).env("CUDA_MPS_LOG_DIRECTORY", &self.logs);
        command
    }
}

/// Returns the first words of the end of a log, for an error.
pub(super) fn end_of(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    one_line(&lines[lines.len().saturating_sub(3)..].join("; "))
}

fn spawn(command: &mut Command) -> Result<Child> {
    process::spawn(command).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MpsFault::NoProgram { program: PROGRAM }.into(),
        _ => not_started(format!("{PROGRAM}: {error}")),
    })
}

/// Waits for the end of a program, which is killed at the deadline.
fn wait(child: &mut Child, deadline: Instant) -> Option<std::process::ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            // An error: this process ignores SIGCHLD, so the kernel has reaped the child.
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

fn not_started(why: String) -> Error {
    MpsFault::NotStarted { why, advice: None, kind: ErrorKind::Device }.into()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn pids(said: &str) -> Vec<u32> {
    said.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// The vendor's program.
pub(super) const PROGRAM: &str = "nvidia-cuda-mps-control";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_of_digits_are_pids() {
        assert_eq!(pids("12\n 34 \n"), [12, 34]);
        assert_eq!(pids("Server 12 not found\n\n"), [0; 0]);
    }

    #[test]
    fn error_has_the_end_of_the_log_on_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("control.log");
        assert_eq!(end_of(&log), "");
        std::fs::write(&log, "a\nb\n\n c  d\ne\n").unwrap();
        assert_eq!(end_of(&log), "b; c d; e");
    }
}
