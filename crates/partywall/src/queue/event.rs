//! File descriptors that report the ends of tasks to event loops.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use partywall_shm::queue::QueueCondition;
use rustix::event::{EventfdFlags, eventfd};

use super::{OpenQueue, Queue};
use crate::{
    backoff::Backoff,
    domain::PollReason,
    error::{Error, Result},
};

/// A file descriptor that becomes readable when tasks of a queue have ended ([`Queue::event`]). Poll it for reading,
/// [clear](Self::clear) it, then check the tickets.
///
/// While this exists, the connection's service thread polls for ended tasks, with pauses of up to 1 ms, and for leases
/// that have ended.
#[derive(Debug)]
pub struct QueueEvent {
    fd: Arc<OwnedFd>,
    open: Arc<OpenQueue>,
}

impl Queue {
    /// Returns a file descriptor for event loops: it is readable when tasks have got a result, have become dead letters
    /// or are over since it was cleared. It may be readable without such a task. When the broker has gone it does not
    /// become readable, so call [`QueueEvent::clear`] now and then.
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
        // From now on the counter counts ended tasks.
        let mut seen = control.queue.prepare(QueueCondition::Result);
        self.domain().poll_tasks().add(Duration::ZERO, move |reason| {
            let fd = watched.upgrade()?;
            control.queue.tend(control.pools());
            let now = control.queue.prepare(QueueCondition::Result);
            if now != seen || reason == PollReason::Closing {
                seen = now;
                backoff = Backoff::new();
                // The write fails only if the descriptor is readable already.
                let _ = rustix::io::write(&fd, &1_u64.to_ne_bytes());
            }
            (reason == PollReason::Due).then(|| backoff.next())
        });
        Ok(QueueEvent { fd, open: self.open.clone() })
    }
}

impl QueueEvent {
    /// Makes the descriptor unreadable until further tasks end. Call it before you check the tickets, so that none is
    /// missed.
    ///
    /// # Errors
    /// [`Unreachable::Gone`](crate::error::Unreachable::Gone) if the broker has gone: tasks of dead workers then stay
    /// claimed.
    pub fn clear(&self) -> Result<()> {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        self.open.inputs.require_live()
    }
}

impl AsFd for QueueEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
