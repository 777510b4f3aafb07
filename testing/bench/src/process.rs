//! Processes of a subject that obey commands. The standard input of each is one end of a [`Line`], which carries lines
//! of text in both directions.
//!
//! Every wait for an answer has a timeout, after which the process is killed: a stream that waits for a value that is
//! never written ends only with its process.

use std::{
    collections::VecDeque,
    fmt::Display,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use partywall_measure::Failure;
use partywall_os::{
    Errno,
    process::{kill, pidfd},
    socket::{self, Ready},
};
use rustix::process::{Signal, set_parent_process_death_signal};

/// How long an answer may take, including the work for it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// How long a process may take to end when its line has ended.
const FAREWELL: Duration = Duration::from_secs(20);

/// Another process. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Process {
    /// `None` once the process has been waited for.
    line: Option<Line>,
    child: Child,
    pidfd: OwnedFd,
}

impl Process {
    /// Starts a process whose standard input is the other end of a new line.
    pub(crate) fn start(command: &mut Command) -> Result<Self, Failure> {
        let (ours, theirs) = socket::pair()?;
        let child = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        // The process has not been waited for, so no other process can have its pid.
        let pidfd = pidfd(child.id())?;
        Ok(Self { line: Some(Line::new(ours)), child, pidfd })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable once the process has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(crate) fn send(&self, text: impl Display) -> Result<(), Failure> {
        self.line.as_ref().ok_or("the process was ended")?.send(text)
    }

    /// Sends a line of text and a file descriptor.
    pub(crate) fn send_with(&self, text: impl Display, fd: impl AsFd) -> Result<(), Failure> {
        self.line.as_ref().ok_or("the process was ended")?.send_with(text, &[fd.as_fd()])
    }

    /// Returns its next message.
    pub(crate) fn receive(&mut self) -> Result<String, Failure> {
        let received = self.line.as_mut().ok_or("the process was ended")?.receive(Some(TIMEOUT));
        match received {
            Ok(Some(text)) => Ok(text),
            Ok(None) => Err(format!("process {} has ended: {}", self.pid(), self.finish()?).into()),
            Err(error) => Err(format!("process {}: {error}", self.pid()).into()),
        }
    }

    /// Kills the process without waiting for it.
    pub(crate) fn kill(&self) -> Result<(), Failure> {
        Ok(kill(&self.pidfd, Signal::KILL)?)
    }

    /// Closes its line and waits for the process.
    pub(crate) fn finish(&mut self) -> Result<ExitStatus, Failure> {
        self.line = None;
        if !socket::wait(&self.pidfd, Ready::Read, Some(Instant::now() + FAREWELL))? {
            self.kill()?;
        }
        Ok(self.child.wait()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.line.is_some() && self.finish().is_err() {
            // If this fails, the process ends with this one at the latest.
            let _ = self.child.kill();
        }
    }
}

/// One end of a line.
#[derive(Debug)]
pub(crate) struct Line {
    socket: OwnedFd,
    unread: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Line {
    /// Returns the line of a process that [`Process::start`] started. From now on the kernel kills this process when
    /// the one that started it ends, because it may be waiting for a GPU and not read its line.
    pub(crate) fn of_this_process() -> Result<Self, Failure> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        Ok(Self::new(std::io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// Returns the line of this process as [`Line::of_this_process`] does, for a process that is not killed: it has to
    /// clean up when the other end is closed.
    pub(crate) fn of_this_process_that_ends_itself() -> Result<Self, Failure> {
        Ok(Self::new(std::io::stdin().as_fd().try_clone_to_owned()?))
    }

    fn new(socket: OwnedFd) -> Self {
        Self { socket, unread: Vec::new(), fds: VecDeque::new() }
    }

    pub(crate) fn send(&self, text: impl Display) -> Result<(), Failure> {
        self.send_with(text, &[])
    }

    fn send_with(&self, text: impl Display, mut fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let text = format!("{text}\n");
        let mut left = text.as_bytes();
        let deadline = Instant::now() + TIMEOUT;
        while !left.is_empty() {
            match socket::send(&self.socket, left, fds) {
                Ok(sent) => {
                    left = &left[sent..];
                    fds = &[];
                }
                Err(Errno::AGAIN) if socket::wait(&self.socket, Ready::Write, Some(deadline))? => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Returns the next line of text, or `None` if the other end is closed. Without a limit it waits for ever.
    pub(crate) fn receive(&mut self, limit: Option<Duration>) -> Result<Option<String>, Failure> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let text = self.unread.drain(..=end).take(end).collect();
                return Ok(Some(String::from_utf8(text)?));
            }
            if !socket::wait(&self.socket, Ready::Read, deadline)? {
                return Err(format!("no answer within {:?}", limit.unwrap_or_default()).into());
            }
            let mut buffer = [0; 4096];
            match socket::recv_now(&self.socket, &mut buffer, &mut self.fds) {
                Ok(received) if received.bytes == 0 => return Ok(None),
                Ok(received) => self.unread.extend_from_slice(&buffer[..received.bytes]),
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Returns the next file descriptor that arrived with a line.
    pub(crate) fn fd(&mut self) -> Result<OwnedFd, Failure> {
        Ok(self.fds.pop_front().ok_or("no file descriptor arrived")?)
    }
}
