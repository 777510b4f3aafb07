//! Events of the kernel, and timers.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{Errno, socket};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use crate::{
    registry::MemberId,
    server::{
        connection::{Channel, ConnectionId},
        timers::{Timer, Timers},
    },
};

/// An epoll instance and timers.
#[derive(Debug)]
pub(super) struct Reactor {
    epoll: OwnedFd,
    timers: Timers,
}

impl Reactor {
    pub(super) fn create() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, timers: Timers::default() })
    }

    /// Registers `interest` in a file descriptor. Its end is always reported.
    pub(super) fn watch(&self, fd: impl AsFd, source: EventSource, interest: EventFlags) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, source.data(), interest)
    }

    /// Changes the interest in a watched file descriptor.
    pub(super) fn change(&self, fd: impl AsFd, source: EventSource, interest: EventFlags) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, source.data(), interest)
    }

    /// Stops watching a file descriptor. Closing it does not suffice: another process, or
    /// [`InFlight`](super::in_flight::InFlight), may still have the same file open.
    pub(super) fn unwatch(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub(super) fn set_timer(&mut self, after: Duration, timer: Timer) {
        self.timers.set(Instant::now() + after, timer);
    }

    /// Returns the next timer that is due.
    pub(super) fn pop_due(&mut self) -> Option<Timer> {
        self.timers.pop_due()
    }

    /// Discards pointless timers at the head of the queue.
    pub(super) fn discard_timers(&mut self, pointless: impl Fn(Timer) -> bool) {
        self.timers.discard(pointless);
    }

    /// Waits for events until the next timer is due, for `limit` at most.
    pub(super) fn wait(&self, events: &mut Vec<Event>, limit: Option<Duration>) -> Result<(), Errno> {
        let pause = match (self.timers.wait(), limit) {
            (Some(wait), Some(limit)) => Some(wait.min(limit)),
            (wait, limit) => wait.or(limit),
        };
        let timeout = pause.map(socket::timespec);
        events.clear();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

/// The source of an event of the kernel. Numbers are never reused, so an event whose source is gone has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventSource {
    Listener,
    Stop,
    /// The reclaimer has closed something.
    Closed,
    /// The supervisor wants a sign of life.
    Poke,
    /// A program says whether it can continue, or has ended.
    Answer,
    /// A child says whether memory is lost, or has ended.
    MemoryCheck,
    Socket(Channel, ConnectionId),
    Exit(MemberId),
}

impl EventSource {
    pub(super) fn of(token: u64) -> Self {
        let id = token >> 2;
        match token & 3 {
            0 => Self::Socket(Channel::Call, ConnectionId(id)),
            1 => Self::Socket(Channel::Events, ConnectionId(id)),
            2 => Self::Exit(MemberId(id)),
            _ if id == 0 => Self::Listener,
            _ if id == 1 => Self::Stop,
            _ if id == 2 => Self::Closed,
            _ if id == 3 => Self::Poke,
            _ if id == 4 => Self::Answer,
            _ => Self::MemoryCheck,
        }
    }

    fn data(self) -> EventData {
        EventData::new_u64(match self {
            Self::Socket(Channel::Call, id) => id.0 << 2,
            Self::Socket(Channel::Events, id) => id.0 << 2 | 1,
            Self::Exit(member) => member.0 << 2 | 2,
            Self::Listener => 3,
            Self::Stop => 1 << 2 | 3,
            Self::Closed => 2 << 2 | 3,
            Self::Poke => 3 << 2 | 3,
            Self::Answer => 4 << 2 | 3,
            Self::MemoryCheck => 5 << 2 | 3,
        })
    }
}
