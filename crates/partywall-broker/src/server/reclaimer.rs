//! Closes file descriptors off the loop.
//!
//! Closing the last file descriptor of GPU memory gives the memory back, inside the driver, which may take its time or
//! stall. That must cost no member a reply: a thread of its own does nothing but close.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use partywall_os::lock::IgnorePoison;
use rustix::event::{EventfdFlags, eventfd};

use crate::registry::CloseId;

/// The thread, seen from the loop.
#[derive(Debug)]
pub(super) struct Reclaimer {
    jobs: Sender<Job>,
    reports: Arc<Reports>,
    done: Receiver<()>,
}

#[derive(Debug)]
enum Job {
    Close(OwnedFd),
    /// Say that everything before is closed.
    Report(CloseId),
}

/// What the thread has to say.
#[derive(Debug)]
struct Reports {
    closed: Mutex<Vec<CloseId>>,
    /// Readable while there is something.
    readable: OwnedFd,
}

impl Reclaimer {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let (report, done) = channel();
        let readable = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let reports = Arc::new(Reports { closed: Mutex::default(), readable });
        let ours = Arc::clone(&reports);
        thread::Builder::new().name("reclaimer".into()).spawn(move || {
            for job in inbox {
                match job {
                    Job::Close(fd) => drop(fd),
                    Job::Report(id) => ours.put(id),
                }
            }
            // Nobody listens after the broker has stopped waiting.
            let _ = report.send(());
        })?;
        Ok(Self { jobs, reports, done })
    }

    /// Takes `fd` over: the thread closes it, wherever the result is dropped.
    pub(super) fn keep(&self, fd: OwnedFd) -> Donated {
        Donated { fd: Some(fd), jobs: self.jobs.clone() }
    }

    /// Reports `id` once all that was dropped before this call is closed.
    pub(super) fn report(&self, id: CloseId) {
        // Without the thread, at the very end, nobody waits for it.
        let _ = self.jobs.send(Job::Report(id));
    }

    /// Readable when there is a report.
    pub(super) fn reports(&self) -> BorrowedFd<'_> {
        self.reports.readable.as_fd()
    }

    /// The reports that have come since the last time.
    pub(super) fn closed(&self) -> Vec<CloseId> {
        // First the eventfd: a report that comes after this read makes it readable again.
        let _ = rustix::io::read(&self.reports.readable, &mut [0; 8]);
        std::mem::take(&mut *self.reports.closed.lock().ignore_poison())
    }

    /// Waits until everything is closed, but not for ever: the kernel does the rest when the process exits.
    pub(super) fn finish(self, timeout: Duration) {
        drop(self.jobs);
        if self.done.recv_timeout(timeout).is_err() {
            tracing::warn!("closing file descriptors takes long; leaving that to the kernel");
        }
    }
}

impl Reports {
    fn put(&self, id: CloseId) {
        self.closed.lock().ignore_poison().push(id);
        // It cannot be full: it is read as often as the loop turns.
        let _ = rustix::io::write(&self.readable, &1_u64.to_ne_bytes());
    }
}

/// A file descriptor that a member has given us.
#[derive(Debug)]
pub(super) struct Donated {
    /// Present until the value is dropped.
    fd: Option<OwnedFd>,
    jobs: Sender<Job>,
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
            let _ = self.jobs.send(Job::Close(fd));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_drop_closes_then_reports() {
        let reclaimer = Reclaimer::start().unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let shared = std::sync::Arc::new(reclaimer.keep(write));
        let in_flight = std::sync::Arc::clone(&shared);
        drop(shared);
        assert!(in_flight.fd().is_some());
        drop(in_flight);
        reclaimer.report(CloseId(7));
        partywall_os::socket::wait(reclaimer.reports(), partywall_os::socket::Ready::Read, None).unwrap();
        assert_eq!(reclaimer.closed(), [CloseId(7)]);
        // The other end is closed, or this would block.
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
        assert_eq!(reclaimer.closed(), []);
        reclaimer.finish(Duration::from_secs(60));
    }
}
