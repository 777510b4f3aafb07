//! Closes file descriptors outside the event loop.
//!
//! Closing the last file descriptor of GPU memory frees the memory inside the driver, which may be slow or stall. A
//! separate thread closes descriptors so that no member waits for that.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use partywall_os::{Errno, lock::IgnorePoison};
use rustix::event::{EventfdFlags, eventfd};

use crate::registry::CloseId;

/// A handle to the reclaimer thread.
#[derive(Debug)]
pub(super) struct Reclaimer {
    jobs: Sender<Job>,
    /// Descriptors that wait to be closed.
    backlog: Arc<AtomicUsize>,
    reports: Arc<Reports>,
    done: Receiver<()>,
}

#[derive(Debug)]
enum Job {
    Close(OwnedFd),
    /// Report that everything before is closed.
    Report(CloseId),
}

/// The reports of the thread.
#[derive(Debug)]
struct Reports {
    closed: Mutex<Vec<CloseId>>,
    /// Readable while there is a report.
    readable: OwnedFd,
}

impl Reclaimer {
    pub(super) fn start() -> Result<Self, Errno> {
        let (jobs, inbox) = channel::<Job>();
        let (report, done) = channel();
        let readable = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let reports = Arc::new(Reports { closed: Mutex::default(), readable });
        let ours = Arc::clone(&reports);
        let backlog = Arc::new(AtomicUsize::new(0));
        let waiting = Arc::clone(&backlog);
        let thread = thread::Builder::new().name("reclaimer".into()).spawn(move || {
            for job in inbox {
                match job {
                    Job::Close(fd) => {
                        drop(fd);
                        waiting.fetch_sub(1, Ordering::Relaxed);
                    }
                    Job::Report(id) => ours.put(id),
                }
            }
            // Fails if the broker has stopped waiting.
            let _ = report.send(());
        });
        thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        Ok(Self { jobs, backlog, reports, done })
    }

    /// Takes ownership of `fd`. When the result is dropped, the thread closes it.
    pub(super) fn keep(&self, fd: OwnedFd) -> Donated {
        Donated { fd: Some(fd), jobs: self.jobs.clone(), backlog: Arc::clone(&self.backlog) }
    }

    /// Reports `id` once everything that was dropped before this call is closed.
    pub(super) fn report(&self, id: CloseId) {
        // Fails only if the thread has ended, at the end of the broker, when no report is expected.
        let _ = self.jobs.send(Job::Report(id));
    }

    /// Lets the thread close descriptors for a moment, if many wait for that. Otherwise a client that sends descriptors faster
    /// than they are closed would fill the table of open files.
    pub(super) fn catch_up(&self) {
        let deadline = Instant::now() + CATCH_UP;
        while self.backlog.load(Ordering::Relaxed) > MAX_BACKLOG && Instant::now() < deadline {
            thread::sleep(CATCH_UP / 10);
        }
    }

    /// Returns a descriptor that is readable when there is a report.
    pub(super) fn reports(&self) -> BorrowedFd<'_> {
        self.reports.readable.as_fd()
    }

    /// Returns the reports since the last call.
    pub(super) fn closed(&self) -> Vec<CloseId> {
        // The eventfd is read first, so a later report makes it readable again.
        let _ = rustix::io::read(&self.reports.readable, &mut [0; 8]);
        std::mem::take(&mut *self.reports.closed.lock().ignore_poison())
    }

    /// Waits until everything is closed, for `timeout` at most. The kernel closes the rest when the process exits.
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
        // The counter cannot overflow, because every turn of the loop reads it.
        let _ = rustix::io::write(&self.readable, &1_u64.to_ne_bytes());
    }
}

/// A file descriptor that a member donated.
#[derive(Debug)]
pub(super) struct Donated {
    /// Present until the value is dropped.
    fd: Option<OwnedFd>,
    jobs: Sender<Job>,
    backlog: Arc<AtomicUsize>,
}

impl Donated {
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Returns the kernel's number.
    pub(super) fn number(&self) -> Option<RawFd> {
        self.fd.as_ref().map(AsRawFd::as_raw_fd)
    }
}

impl Drop for Donated {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.backlog.fetch_add(1, Ordering::Relaxed);
            // If the thread has ended, the failed send drops the descriptor, which closes it here.
            let _ = self.jobs.send(Job::Close(fd));
        }
    }
}

/// Descriptors that may wait to be closed while clients are served without delay.
const MAX_BACKLOG: usize = 256;

/// How long one turn of the loop lets the thread catch up: it may stand still, because the driver does.
const CATCH_UP: Duration = Duration::from_millis(1);

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
