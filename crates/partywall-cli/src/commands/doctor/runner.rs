//! Child processes with a time limit.

use std::{
    ffi::OsStr,
    io::Read,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use partywall_os::{
    process,
    socket::{self, Ready},
};

use super::{Probe, finding::Finding};
use crate::Context;

/// Starts children of this program.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    context: &'a Context,
    limit: Duration,
}

/// How a child ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Absent if its time was over and it was killed.
    pub(super) status: Option<ExitStatus>,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl<'a> Runner<'a> {
    pub(super) fn new(context: &'a Context, limit: Duration) -> Self {
        Self { context, limit }
    }

    /// Runs a probe in a child.
    pub(super) fn probe(&self, probe: Probe) -> Finding {
        let mut arguments = self.context.arguments();
        arguments.extend(["doctor".into(), "--probe".into(), name(probe).into()]);
        let ended = match self.run(&arguments, None) {
            Ok(ended) => ended,
            Err(error) => return Finding::failed(format!("a child process could not be run: {error}")),
        };
        match (Finding::receive(&ended.stdout), ended.status) {
            (Some(finding), _) => finding,
            (None, None) => {
                Finding::failed(format!("it did not end within {} s and was killed", self.limit.as_secs_f64()))
                    .means("something that it needs hangs: the GPU's driver, or a file system")
                    .fix("look into the kernel's log (dmesg), then try again")
            }
            (None, Some(status)) => Finding::failed(format!("its process ended with {status}: {}", ended.last_words()))
                .means("something that it needs crashes: most likely the GPU's driver")
                .fix("look into the kernel's log (dmesg), then try again"),
        }
    }

    /// Runs this program with `arguments`; `state` is where its broker shall write its log, if it starts one.
    pub(super) fn run(&self, arguments: &[impl AsRef<OsStr>], state: Option<&Path>) -> std::io::Result<Ended> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(state) = state {
            command.env("XDG_STATE_HOME", state);
        }
        let deadline = Instant::now() + self.limit;
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().map(drain);
        let stderr = child.stderr.take().map(drain);
        let status = wait(&mut child, deadline)?;
        let read = |reader: Option<JoinHandle<Vec<u8>>>| reader.and_then(|it| it.join().ok()).unwrap_or_default();
        Ok(Ended { status, stdout: read(stdout), stderr: read(stderr) })
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }
}

impl Ended {
    /// The last line of its standard error.
    pub(super) fn last_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        text.trim().lines().last().unwrap_or("it said nothing").to_owned()
    }
}

/// What a probe is called on the command line.
pub(super) fn name(probe: Probe) -> String {
    probe.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Waits for the child's end. After `deadline` it is killed, and there is no status.
pub(super) fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    // A child that has not been waited for keeps its pid, so this is its pidfd, and `kill` meets nobody else.
    let in_time = process::pidfd(child.id()).and_then(|pidfd| socket::wait(pidfd, Ready::Read, Some(deadline)));
    let status = match in_time {
        Ok(true) => child.wait().map(Some),
        Ok(false) => Ok(None),
        // No pidfds here, which is for their own probe to say: look at the child itself from time to time.
        Err(_) => loop {
            match child.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                other => break other,
            }
        },
    };
    let _ = child.kill();
    let _ = child.wait();
    status
}

fn drain(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is still worth reading.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}
