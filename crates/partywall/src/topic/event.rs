//! File descriptors that report samples to event loops.
//!
//! The descriptor is an eventfd. Its state is set under a lock, after a check of the ring: by the service thread
//! periodically, because a publisher in another process wakes no descriptor, and by each thread that has received a
//! sample. The later of two such threads sees what the earlier one did, so a descriptor does not stay readable once the
//! last sample is received.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use partywall_os::lock::IgnorePoison;
use rustix::event::{EventfdFlags, eventfd};

use super::subscriber::SubscriberShared;
use crate::{
    backoff::Backoff,
    domain::PollReason,
    error::{Error, Result},
};

/// A file descriptor that is readable while [`try_recv`](super::Subscriber::try_recv) of a subscriber would return a
/// sample or an error ([`Subscriber::event`](super::Subscriber::event)). Poll it for reading; there is nothing to read
/// from it.
///
/// A sample makes it readable within a millisecond or so. The call that receives the last sample, by whatever method,
/// makes it unreadable before it returns. Of several threads that wait for the descriptor all may wake up for one
/// sample: those that come late find none, and wait again.
///
/// The connection's service thread polls for samples, with pauses of up to 1 ms, until this is dropped.
#[derive(Debug)]
pub struct SubscriberEvent {
    fd: OwnedFd,
    /// The descriptor follows it as long as an event has it.
    _signal: Arc<Signal>,
}

/// The eventfd that all events of a subscriber duplicate.
#[derive(Debug)]
pub(super) struct Signal {
    fd: OwnedFd,
    is_readable: Mutex<bool>,
}

impl SubscriberEvent {
    pub(super) fn new(shared: &Arc<SubscriberShared>) -> Result<Self> {
        let open = &shared.open;
        let failed = |errno| Error::system(format!("an event of topic {:?}", open.name()), errno);
        open.domain().link().require_ours()?;
        let mut known = shared.port.signal().lock().ignore_poison();
        let signal = match known.upgrade() {
            Some(signal) => signal,
            None => {
                let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
                let signal = Arc::new(Signal { fd, is_readable: Mutex::default() });
                *known = Arc::downgrade(&signal);
                poll(shared, &signal);
                signal
            }
        };
        // Duplicates are registered separately in an epoll instance, so each waiter may have one of its own.
        let fd = rustix::io::fcntl_dupfd_cloexec(&signal.fd, 3).map_err(failed)?;
        drop(known);
        shared.port.update_signal(shared.is_full());
        Ok(Self { fd, _signal: signal })
    }
}

/// Has the service thread set the signal until no event uses it.
fn poll(shared: &Arc<SubscriberShared>, signal: &Arc<Signal>) {
    let signal = Arc::downgrade(signal);
    let port = shared.port.clone();
    // The connection may end with the subscriber, and not on the service thread.
    let weak = Arc::downgrade(shared);
    let held = shared.open.shape.held as usize;
    let mut backoff = Backoff::new();
    shared.open.domain().poll_tasks().add(Duration::ZERO, move |reason| {
        let signal = signal.upgrade()?;
        let is_full = Weak::strong_count(&weak) > held;
        if signal.set(|| port.is_ready(is_full) || reason == PollReason::Closing) {
            backoff = Backoff::new();
        }
        (reason == PollReason::Due).then(|| backoff.next())
    });
}

impl Signal {
    /// Makes the descriptor readable if `is_ready` says so, otherwise unreadable. Returns what it is now.
    pub(super) fn set(&self, is_ready: impl FnOnce() -> bool) -> bool {
        let mut is_readable = self.is_readable.lock().ignore_poison();
        let is_ready = is_ready();
        // Neither call blocks, or fails: the counter is 1 or 0.
        let _ = match (*is_readable, is_ready) {
            (false, true) => rustix::io::write(&self.fd, &1_u64.to_ne_bytes()),
            (true, false) => rustix::io::read(&self.fd, &mut [0; 8]),
            _ => Ok(0),
        };
        *is_readable = is_ready;
        is_ready
    }
}

impl AsFd for SubscriberEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
