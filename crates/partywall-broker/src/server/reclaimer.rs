//! Closes file descriptors outside the event loop.
//!
//! Closing the last file descriptor of GPU memory frees the memory inside the driver, which may be slow or stall. A
//! separate thread closes descriptors so that no member waits for that.
//!
//! A client may also send a file whose close never ends, such as a socket that lingers. Whatever is not known to be
//! memory, or control memory of the broker, is therefore closed by a thread of its own, and delays no memory.

use std::{
    cell::Cell,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use partywall_os::{Errno, lock::IgnorePoison, thread};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::ioctl_fionread,
    net::{Shutdown, shutdown},
};

use crate::registry::CloseId;

/// A handle to the reclaimer threads.
#[derive(Debug)]
pub(super) struct Reclaimer {
    /// Closes memory that was checked, and control memory.
    memory: Closer,
    /// Closes everything else.
    unchecked: Closer,
    reports: Arc<Reports>,
}

/// A thread that closes descriptors.
#[derive(Debug)]
struct Closer {
    queue: CloseQueue,
    /// How many descriptors were closed when the loop last gave up waiting for room.
    gave_up_at: Cell<Option<usize>>,
    done: Receiver<()>,
}

/// The way to such a thread.
#[derive(Debug, Clone)]
struct CloseQueue {
    jobs: Sender<Job>,
    counts: Arc<CloseCounts>,
}

/// How many descriptors a thread was ever to close, and how many it has.
#[derive(Debug, Default)]
struct CloseCounts {
    dropped: AtomicUsize,
    closed: AtomicUsize,
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
        let readable = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let reports = Arc::new(Reports { closed: Mutex::default(), readable });
        let [memory, unchecked] = ["reclaimer", "unchecked-fds"].map(|name| Closer::start(name, &reports));
        Ok(Self { memory: memory?, unchecked: unchecked?, reports })
    }

    /// Takes ownership of `fd`. When the result is dropped, the thread of unchecked descriptors closes it.
    pub(super) fn keep(&self, fd: OwnedFd) -> Donated {
        Donated { fd: Some(fd), queue: self.unchecked.queue.clone() }
    }

    /// Notes that a descriptor was checked, so that it is closed with memory.
    pub(super) fn trust(&self, mut fd: Donated) -> Donated {
        fd.queue = self.memory.queue.clone();
        fd
    }

    /// Takes ownership of the socket of a client.
    pub(super) fn keep_socket(&self, socket: OwnedFd) -> ClientSocket {
        ClientSocket(self.keep(socket))
    }

    /// Reports `id` once all memory that was dropped before this call is closed.
    pub(super) fn report(&self, id: CloseId) {
        // Fails only if the thread has ended, at the end of the broker, when no report is expected.
        let _ = self.memory.queue.jobs.send(Job::Report(id));
    }

    /// Lets the threads close descriptors for a moment, if many wait for that. Otherwise a client that sends
    /// descriptors faster than they are closed would fill the table of open files.
    ///
    /// If more than `room` wait, the next message may not fit into the table, and the kernel would drop descriptors of
    /// any client. Then the wait is long enough for a thread that a busy machine keeps from running. A thread that has
    /// not closed anything since is not waited for so long again: a client may have sent a file whose close never ends.
    pub(super) fn catch_up(&self, room: usize) {
        let begun = Instant::now();
        while let Some(timeout) = self.timeout(room) {
            if begun.elapsed() >= timeout {
                if timeout == NO_ROOM {
                    self.closers().for_each(Closer::give_up);
                }
                return;
            }
            std::thread::sleep(CATCH_UP / 10);
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

    /// Returns how long the loop waits for the threads at most; `None` if it does not wait.
    fn timeout(&self, room: usize) -> Option<Duration> {
        match self.backlog() {
            waiting if waiting > room && self.closers().any(Closer::moves) => Some(NO_ROOM),
            waiting if waiting > room.min(MAX_BACKLOG) => Some(CATCH_UP),
            _ => None,
        }
    }

    fn backlog(&self) -> usize {
        self.closers().map(|closer| closer.queue.counts.backlog()).sum()
    }

    fn closers(&self) -> impl Iterator<Item = &Closer> {
        [&self.memory, &self.unchecked].into_iter()
    }

    /// Waits until everything is closed, for `timeout` at most. The kernel closes the rest when the process exits.
    pub(super) fn finish(self, timeout: Duration) {
        let Self { memory, unchecked, .. } = self;
        let until = Instant::now() + timeout;
        for Closer { queue, done, .. } in [memory, unchecked] {
            drop(queue);
            if done.recv_timeout(until.saturating_duration_since(Instant::now())).is_err() {
                tracing::warn!("closing file descriptors takes long; leaving that to the kernel");
            }
        }
    }
}

impl Closer {
    fn start(name: &str, reports: &Arc<Reports>) -> Result<Self, Errno> {
        let (jobs, inbox) = channel::<Job>();
        let (report, done) = channel();
        let reports = Arc::clone(reports);
        let counts = Arc::new(CloseCounts::default());
        let of_thread = Arc::clone(&counts);
        let thread = thread::spawn(name, move || {
            for job in inbox {
                match job {
                    Job::Close(fd) => {
                        drop(fd);
                        of_thread.closed.fetch_add(1, Ordering::Relaxed);
                    }
                    Job::Report(id) => reports.put(id),
                }
            }
            // Fails if the broker has stopped waiting.
            let _ = report.send(());
        });
        thread.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        Ok(Self { queue: CloseQueue { jobs, counts }, gave_up_at: Cell::new(None), done })
    }

    /// Returns whether descriptors wait that the thread may still close in time.
    fn moves(&self) -> bool {
        self.queue.counts.backlog() > 0 && self.gave_up_at.get() != Some(self.queue.counts.closed())
    }

    fn give_up(&self) {
        self.gave_up_at.set(Some(self.queue.counts.closed()));
    }
}

impl CloseCounts {
    /// Returns how many descriptors wait to be closed.
    fn backlog(&self) -> usize {
        let closed = self.closed();
        // Read later, so never less.
        self.dropped.load(Ordering::Relaxed).saturating_sub(closed)
    }

    fn closed(&self) -> usize {
        self.closed.load(Ordering::Relaxed)
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
    queue: CloseQueue,
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
            self.queue.counts.dropped.fetch_add(1, Ordering::Relaxed);
            // If the thread has ended, the failed send drops the descriptor, which closes it here.
            let _ = self.queue.jobs.send(Job::Close(fd));
        }
    }
}

/// The socket of a client.
///
/// The kernel closes with it what the client has sent through it and nobody has read: any file, GPU memory among them.
/// If there is something, the thread closes the socket.
#[derive(Debug)]
pub(super) struct ClientSocket(Donated);

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd().expect("only the drop takes it")
    }
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        // Nothing comes after that. The peer may be gone already.
        let _ = shutdown(&self, Shutdown::Both);
        if ioctl_fionread(&self) == Ok(0) {
            self.0.fd = None;
        }
    }
}

/// Descriptors that may wait to be closed while clients are served without delay.
const MAX_BACKLOG: usize = 256;

/// How long the loop lets the threads catch up after a read: one may stand still, because the driver does.
const CATCH_UP: Duration = Duration::from_millis(1);

/// The same if there is no room for another message. The supervisor calls a worker silent after 30 s.
const NO_ROOM: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::{
        io::{self, Write},
        net::{Ipv4Addr, TcpListener, TcpStream},
    };

    use super::*;

    /// Returns a socket whose close waits until its peer has read everything, and the peer.
    fn slow_to_close() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        while (&ours).write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(100))).unwrap();
        (ours.into(), theirs)
    }

    // Holds 113, 162.
    #[test]
    fn loop_waits_for_a_slow_close_only_without_room() {
        let reclaimer = Reclaimer::start().unwrap();
        let (slow, mut peer) = slow_to_close();
        drop(reclaimer.keep(slow));
        assert_eq!((reclaimer.timeout(1), reclaimer.timeout(0)), (None, Some(NO_ROOM)));
        reclaimer.catch_up(1);
        assert_eq!(reclaimer.backlog(), 1);
        let reader = std::thread::spawn(move || io::copy(&mut peer, &mut io::sink()).unwrap());
        while reclaimer.timeout(0).is_some() {
            reclaimer.catch_up(0);
        }
        assert_eq!(reclaimer.backlog(), 0);
        reader.join().unwrap();
    }

    // Holds 113.
    #[test]
    fn loop_waits_long_for_a_close_that_does_not_end_only_once() {
        let reclaimer = Reclaimer::start().unwrap();
        let (slow, peer) = slow_to_close();
        drop(reclaimer.keep(slow));
        reclaimer.catch_up(0);
        assert_eq!((reclaimer.timeout(1), reclaimer.timeout(0)), (None, Some(CATCH_UP)));
        drop(peer);
        while reclaimer.backlog() > 0 {
            std::thread::yield_now();
        }
        let (slow, _peer) = slow_to_close();
        drop(reclaimer.keep(slow));
        assert_eq!(reclaimer.timeout(0), Some(NO_ROOM), "it has closed something since");
    }

    // Holds 93, 113.
    #[test]
    fn memory_is_closed_and_reported_beside_a_close_that_does_not_end() {
        let reclaimer = Reclaimer::start().unwrap();
        let (slow, _peer) = slow_to_close();
        drop(reclaimer.keep(slow));
        for id in 0..3 {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            drop(reclaimer.trust(reclaimer.keep(write)));
            reclaimer.report(CloseId(id));
            partywall_os::socket::wait(reclaimer.reports(), partywall_os::socket::Ready::Read, None).unwrap();
            assert_eq!(reclaimer.closed(), [CloseId(id)]);
            assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
        }
        assert_eq!((reclaimer.backlog(), reclaimer.timeout(0)), (1, Some(NO_ROOM)));
        reclaimer.catch_up(0);
        let (_read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        drop(reclaimer.trust(reclaimer.keep(write)));
        while reclaimer.backlog() > 1 {
            std::thread::yield_now();
        }
        assert_eq!(reclaimer.timeout(0), Some(CATCH_UP), "only the thread that stands still has something left");
    }

    // Holds 113.
    #[test]
    fn last_drop_closes_then_reports() {
        let reclaimer = Reclaimer::start().unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let shared = std::sync::Arc::new(reclaimer.trust(reclaimer.keep(write)));
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
