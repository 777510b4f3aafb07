//! Standard output that carries samples to another program.

use std::{
    io::{self, ErrorKind as IoErrorKind, IsTerminal, Write},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall::ErrorKind;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::failure::Failure;

/// Writes to the program that reads standard output. Once it has gone, everything else is discarded and the flag is set
/// that ends the command: a reader that has enough (`| head`) is not a failure. Ctrl-C ends a write to a reader that
/// has stopped reading.
pub(super) struct Stdout {
    stop: Arc<AtomicBool>,
    has_gone: bool,
}

impl Stdout {
    pub(super) fn new(stop: &Arc<AtomicBool>) -> Self {
        Self { stop: stop.clone(), has_gone: false }
    }

    /// Ends the command if the reader has gone, although there is nothing to write.
    pub(super) fn check(&mut self) {
        let _ = self.poll(PollFlags::empty(), 0);
    }

    /// Waits until the reader takes a piece, or has gone. Returns false after `seconds`.
    fn poll(&mut self, events: PollFlags, seconds: i64) -> bool {
        let stdout = io::stdout();
        let mut fds = [PollFd::new(&stdout, events)];
        let is_ready = poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
        if fds[0].revents().contains(PollFlags::ERR) {
            self.leave();
        }
        is_ready
    }

    fn leave(&mut self) {
        self.has_gone = true;
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Where a pipe is ready, so many bytes do not block.
        let piece = &bytes[..bytes.len().min(PIECE)];
        while !self.has_gone {
            let is_stopped = self.stop.load(Ordering::Relaxed);
            if !self.poll(PollFlags::OUT, TIMEOUT) {
                if is_stopped {
                    self.leave();
                }
                continue;
            }
            match rustix::io::write(io::stdout().as_fd(), piece) {
                Ok(written) => return Ok(written),
                Err(Errno::PIPE) => self.leave(),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Refuses a terminal.
///
/// # Errors
/// With `advice`, if standard output is a terminal.
pub(super) fn check_terminal(advice: String) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        let what = "standard output is a terminal, and the bytes of samples would garble it";
        return Err(Failure::new(ErrorKind::Usage, what, advice));
    }
    Ok(())
}

/// Returns the failure of a write.
pub(super) fn not_written(error: &io::Error) -> Failure {
    let advice = match error.kind() {
        IoErrorKind::StorageFull | IoErrorKind::QuotaExceeded => "make room; the samples until then were written",
        _ => "check the system error",
    };
    Failure::new(ErrorKind::Refused, format!("standard output cannot be written: {error}"), advice)
}

/// `PIPE_BUF` of Linux, see pipe(7).
const PIECE: usize = 4096;

/// How many seconds a reader has to take a piece after Ctrl-C.
const TIMEOUT: i64 = 1;
