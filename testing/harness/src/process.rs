//! Child processes under a watchdog.

use std::{
    io::{BufRead, BufReader, Read},
    os::fd::OwnedFd,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Mutex,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use partywall_os::{
    process,
    socket::{self, Ready},
};
use rustix::process::Signal;

use crate::{WATCHDOG, signals::reset_in_children};

/// The exit code and the output of a process that has ended.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Output {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard output as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Fails unless the exit code is this one.
    ///
    /// # Panics
    /// If it is another.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        let Self { stdout, stderr, .. } = &self;
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {stderr}", String::from_utf8_lossy(stdout));
        self
    }
}

/// A process that runs. It is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    pidfd: OwnedFd,
    /// Behind a lock, so that threads may share the process.
    lines: Mutex<Receiver<Vec<u8>>>,
    seen: Vec<u8>,
    stderr: Option<JoinHandle<String>>,
}

impl Running {
    /// Starts a process, with pipes for its standard streams.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(command: &mut Command) -> Self {
        reset_in_children();
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let pidfd = process::pidfd(child.id()).expect("a child that was not reaped has a pidfd");
        let stdout = child.stdout.take().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                match stdout.read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) if sender.send(line).is_err() => return,
                    Ok(_) => {}
                }
            }
        });
        let stderr = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Self { child, pidfd, lines: Mutex::new(lines), seen: Vec::new(), stderr: Some(stderr) }
    }

    /// Returns the pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the standard input; dropping it closes the pipe.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("standard input is taken once")
    }

    /// Returns the next line of standard output without its line feed.
    ///
    /// # Panics
    /// If the output has ended, or the watchdog ends the wait.
    pub fn line(&mut self) -> String {
        match self.lines.get_mut().unwrap().recv_timeout(WATCHDOG) {
            Ok(line) => {
                self.seen.extend_from_slice(&line);
                String::from_utf8_lossy(&line).trim_end().to_owned()
            }
            Err(RecvTimeoutError::Timeout) => panic!("watchdog: no line comes"),
            Err(RecvTimeoutError::Disconnected) => {
                let stderr = self.stderr.take().and_then(|thread| thread.join().ok());
                panic!("the process has ended its output: {stderr:?}")
            }
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        // Fails only for a process that has already ended.
        let _ = process::kill(&self.pidfd, signal);
    }

    /// Returns whether the process has ended.
    ///
    /// # Panics
    /// If the kernel does not report it.
    pub fn has_ended(&self) -> bool {
        socket::wait(&self.pidfd, Ready::Read, Some(Instant::now())).unwrap()
    }

    /// Returns whether a signal has stopped all threads of the process.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // The state follows the name, which is in parentheses and may itself contain parentheses (proc_pid_stat(5)).
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    }

    /// Waits until the process has ended. The watchdog starts anew with each line of standard output, so that a process
    /// may take minutes if it says how far it is.
    ///
    /// # Panics
    /// If the watchdog ends the wait.
    pub fn wait(mut self) -> Output {
        drop(self.child.stdin.take());
        let mut stdout = std::mem::take(&mut self.seen);
        // The output ends with the last process that has inherited it.
        loop {
            match self.lines.get_mut().unwrap().recv_timeout(WATCHDOG) {
                Ok(line) => stdout.extend_from_slice(&line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if self.has_ended() => {
                    panic!("watchdog: a process keeps standard output open")
                }
                Err(RecvTimeoutError::Timeout) => panic!("watchdog: process {} does not end", self.pid()),
            }
        }
        let status = self.reap();
        let stderr = self.stderr.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        Output { code: status.code(), stdout, stderr }
    }

    /// Kills it and waits for its end.
    pub fn kill(self) -> Output {
        self.signal(Signal::KILL);
        self.wait()
    }

    pub(crate) fn reap(&mut self) -> ExitStatus {
        let ended = socket::wait(&self.pidfd, Ready::Read, Some(Instant::now() + WATCHDOG)).unwrap();
        if !ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
            panic!("watchdog: process {} does not end", self.child.id());
        }
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a pidfd of a process that this test has started, directly or not. A signal through it reaches no other
/// process.
///
/// # Panics
/// If there is no such process.
pub fn pidfd_of(pid: u32) -> OwnedFd {
    process::pidfd(pid).unwrap_or_else(|errno| panic!("process {pid}: {errno}"))
}

/// Kills a process that this test has started, directly or not.
///
/// # Panics
/// If there is no such process.
pub fn kill(pid: u32) {
    process::kill(pidfd_of(pid), Signal::KILL).unwrap();
}
