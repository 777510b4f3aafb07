//! Closes file descriptors off the loop.
//!
//! Closing the last file descriptor of GPU memory gives the memory back, inside the driver, which may take its time or
//! stall. That must cost no member a reply: a thread of its own does nothing but close.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

/// The thread, seen from the loop.
#[derive(Debug)]
pub(super) struct Reclaimer {
    doomed: Sender<OwnedFd>,
    done: Receiver<()>,
}

impl Reclaimer {
    pub(super) fn start() -> io::Result<Self> {
        let (doomed, inbox) = channel::<OwnedFd>();
        let (report, done) = channel();
        thread::Builder::new().name("reclaimer".into()).spawn(move || {
            inbox.into_iter().for_each(drop);
            // Nobody listens if the broker had no patience.
            let _ = report.send(());
        })?;
        Ok(Self { doomed, done })
    }

    /// Takes `fd` into keeping: it is closed by the thread, whoever drops the result, and wherever.
    pub(super) fn keep(&self, fd: OwnedFd) -> Donated {
        Donated { fd: Some(fd), doomed: self.doomed.clone() }
    }

    /// Waits until everything is closed, but not for ever: the kernel does the rest when the process exits.
    pub(super) fn finish(self, patience: Duration) {
        drop(self.doomed);
        if self.done.recv_timeout(patience).is_err() {
            tracing::warn!("closing file descriptors takes long; leaving that to the kernel");
        }
    }
}

/// A file descriptor that a member has given us.
#[derive(Debug)]
pub(super) struct Donated {
    /// Present until the value is dropped.
    fd: Option<OwnedFd>,
    doomed: Sender<OwnedFd>,
}

impl Donated {
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Donated {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            // Without the thread, at the very end, it is closed here.
            let _ = self.doomed.send(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_drops_it_last_it_is_closed() {
        let reclaimer = Reclaimer::start().unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let shared = std::sync::Arc::new(reclaimer.keep(write));
        let in_flight = std::sync::Arc::clone(&shared);
        drop(shared);
        assert!(in_flight.fd().is_some());
        drop(in_flight);
        // Ends when the other end is closed.
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
        reclaimer.finish(Duration::from_secs(60));
    }
}
