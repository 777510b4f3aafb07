//! Ends of tasks in event loops.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use partywall_shm::queue::Event;
use rustix::event::{EventfdFlags, eventfd};

use super::{Open, Queue};
use crate::{
    backoff::Backoff,
    domain::PollReason,
    error::{Error, Result},
};

/// A file descriptor that becomes readable when tasks of a queue have ended ([`Queue::event`]). Poll it for reading,
/// [clear](Self::clear) it, then look at the tickets.
///
/// The connection's service thread polls for ends, with pauses of up to 1 ms, and looks for leases that have ended. Dropping
/// this ends that.
#[derive(Debug)]
pub struct QueueEvent {
    fd: Arc<OwnedFd>,
    open: Arc<Open>,
}

impl Queue {
    /// A file descriptor for event loops: readable when tasks have a result, are dead letters or are gone since it was cleared.
    /// It may be readable without any of that, and is not when the broker has gone: call [`QueueEvent::clear`] now and then.
    ///
    /// # Errors
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors),
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn event(&self) -> Result<QueueEvent> {
        self.open.require_ours()?;
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::system(format!("an event of queue {:?}", self.name()), errno))?;
        let fd = Arc::new(fd);
        let watched = Arc::downgrade(&fd);
        let control = self.open.control.clone();
        let mut backoff = Backoff::new();
        // From now on it counts ends.
        let mut seen = control.queue.prepare(Event::Result);
        self.domain().poll_tasks().add(Duration::ZERO, move |reason| {
            let fd = watched.upgrade()?;
            control.queue.tend(control.pools());
            let now = control.queue.prepare(Event::Result);
            if now != seen || reason == PollReason::Closing {
                seen = now;
                backoff = Backoff::new();
                // It fails only if it is readable already.
                let _ = rustix::io::write(&fd, &1_u64.to_ne_bytes());
            }
            (reason == PollReason::Due).then(|| backoff.next())
        });
        Ok(QueueEvent { fd, open: self.open.clone() })
    }
}

impl QueueEvent {
    /// Makes it unreadable until further tasks end. To be called before the tickets are looked at, so that nothing is missed.
    ///
    /// # Errors
    /// [`Unreachable::Gone`](crate::error::Unreachable::Gone): the broker has gone, and the tasks of dead workers stay theirs.
    pub fn clear(&self) -> Result<()> {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        self.open.domain().link().require_broker()
    }
}

impl AsFd for QueueEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
