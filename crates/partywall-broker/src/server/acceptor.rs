//! New connections: the listening socket and unauthenticated connections.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{Errno, dir::DirLock, socket};
use partywall_wire::{
    BrokerHello, LimitHolder, Refusal,
    handshake::{self, Speaker},
};
use rustix::event::{EventfdFlags, epoll::EventFlags, eventfd};

use crate::{
    bind::{BoundSocket, Sought, check, own_user},
    config::{Admission, Config},
    registry::largest,
    server::{
        connection::ConnectionId,
        fds::no_fds,
        in_flight::{Process, ProcessKey},
        reactor::{EventSource, Reactor},
        reclaimer::Reclaimer,
        timers::Timer,
    },
};

/// The listening socket and the unauthenticated connections.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) bound: BoundSocket,
    /// A spare file descriptor, closed briefly to refuse a connection when no other descriptor is left. It is absent
    /// only if it could not be reopened; a timer then retries.
    pub(super) spare: Option<OwnedFd>,
    /// Whether the kernel reports new connections. A timer is set while it does not.
    accepting: bool,
    /// Unauthenticated connections, oldest first, with their processes and times of arrival. Each is also among the
    /// peers' connections, and has a timer that expires after [`Acceptor::timeout`].
    unauthenticated: BTreeMap<ConnectionId, (Process, Instant)>,
    /// The number of the last connection.
    last: u64,
    /// How long a handshake may take.
    pub(super) timeout: Duration,
    /// This broker's number, which refusals contain.
    instance: u64,
    /// The release that refusals name.
    version: String,
    /// The users that may connect.
    pub(super) admission: Admission,
}

impl Acceptor {
    /// `last` is the number of the last connection of former processes, or more.
    pub(super) fn new(config: &Config, bound: BoundSocket, spare: OwnedFd, instance: u64, last: u64) -> Self {
        Self {
            bound,
            spare: Some(spare),
            accepting: true,
            unauthenticated: BTreeMap::new(),
            last,
            timeout: config.handshake_timeout,
            instance,
            version: config.version.clone(),
            admission: config.admission.clone(),
        }
    }

    /// Locks the socket's directory; see [`SocketFile::lock_directory`](crate::bind::SocketFile::lock_directory).
    pub(super) fn lock_directory(&self) -> Result<Option<DirLock>, Sought> {
        self.bound.file.lock_directory(self.admission.entry(own_user()))
    }

    /// Returns why no process can connect, if the socket's file was removed or replaced: what keeps the supervisor from
    /// binding it again, as far as this process sees it.
    pub(super) fn lost(&self) -> Option<String> {
        let file = &self.bound.file;
        file.is_lost().then(|| match check(file.path(), self.admission.entry(own_user())) {
            Ok(()) => "the supervisor has not bound it again yet".into(),
            Err(error) => error.to_string(),
        })
    }

    /// Returns the number of the next connection.
    pub(super) fn next_id(&mut self) -> ConnectionId {
        self.last += 1;
        ConnectionId(self.last)
    }

    /// Notes a new connection of a process.
    pub(super) fn remember(&mut self, id: ConnectionId, process: Process) {
        self.unauthenticated.insert(id, (process, Instant::now()));
    }

    /// Forgets a connection that is authenticated, or gone.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        self.unauthenticated.remove(&id);
    }

    /// Accepts connections again after a pause.
    pub(super) fn resume(&mut self, reactor: &Reactor) {
        if self.spare.is_none() {
            self.spare = spare().ok();
        }
        if !self.accepting && reactor.change(&self.bound.listener, EventSource::Listener, EventFlags::IN).is_ok() {
            self.accepting = true;
        }
    }

    /// Watches the listener if the supervisor has put another socket under its number, because the file of the former
    /// one was removed. Returns whether it has.
    pub(super) fn follow_listener(&mut self, reactor: &Reactor) -> bool {
        // The kernel refuses to watch the same socket twice.
        let is_new = reactor.watch(&self.bound.listener, EventSource::Listener, EventFlags::IN).is_ok();
        if is_new {
            self.accepting = true;
            self.bound.file.follow();
        }
        is_new
    }

    /// Stops accepting for a while. Otherwise the kernel would report a connection that cannot be accepted in every
    /// turn.
    pub(super) fn pause(&mut self, reactor: &mut Reactor, pause: Duration) {
        if reactor.change(&self.bound.listener, EventSource::Listener, EventFlags::empty()).is_ok() {
            self.accepting = false;
        }
        reactor.set_timer(pause, Timer::Accept);
    }

    /// Refuses one connection because no file descriptor is free, by means of the spare descriptor.
    pub(super) fn turn_away_one(&mut self, reclaimer: &Reclaimer) -> bool {
        if self.spare.take().is_none() {
            return false;
        }
        if let Ok(Some(call)) = socket::accept(&self.bound.listener) {
            self.refuse(reclaimer.keep_socket(call), no_fds());
        }
        self.spare = spare().ok();
        self.spare.is_some()
    }

    /// Sends a client the reason for its refusal.
    pub(super) fn refuse(&self, call: impl AsFd, refusal: Refusal) {
        tracing::info!(?refusal, "refused a connection");
        self.send_refusal(call, refusal);
    }

    pub(super) fn send_refusal(&self, call: impl AsFd, refusal: Refusal) {
        let hello = BrokerHello { instance: self.instance, outcome: Err(refusal) };
        match handshake::encode(&Speaker::new(&self.version), &hello, 0) {
            // A new socket has room for this message, and a closed one needs no message.
            Ok(bytes) => drop(socket::send(call, &bytes, &[])),
            Err(error) => tracing::error!(%error, "a refusal could not be encoded"),
        }
    }

    /// Returns the processes of a user that have most of the unauthenticated connections.
    pub(super) fn introducing(&self, uid: u32) -> Vec<LimitHolder> {
        let mut counts = BTreeMap::<(u32, u32), u64>::new();
        let of_user = self.unauthenticated.values().filter(|(process, _)| Of::User(uid).includes(process));
        for (process, _) in of_user {
            if let ProcessKey::Pid(pid) = process.key {
                *counts.entry((uid, pid)).or_default() += 1;
            }
        }
        largest(counts)
    }

    /// Returns the oldest silent connection of those that are meant, and since when it exists.
    pub(super) fn oldest(&self, of: Of, is_silent: impl Fn(&ConnectionId) -> bool) -> Option<(ConnectionId, Instant)> {
        let mut all = self.unauthenticated.iter();
        let found = all.find(|(id, (process, _))| of.includes(process) && is_silent(id));
        found.map(|(id, (_, since))| (*id, *since))
    }

    pub(super) fn count(&self, of: Of) -> usize {
        self.unauthenticated.values().filter(|(process, _)| of.includes(process)).count()
    }
}

/// Unauthenticated connections that share a limit.
#[derive(Debug, Clone, Copy)]
pub(super) enum Of {
    All,
    Process(ProcessKey),
    /// Of one user.
    User(u32),
    /// Of all users other than the broker's.
    Guests,
}

impl Of {
    fn includes(self, process: &Process) -> bool {
        match self {
            Self::All => true,
            Self::Process(key) => process.key == key,
            Self::User(uid) => process.uid == uid,
            Self::Guests => process.is_guest,
        }
    }
}

/// Opens a spare file descriptor.
pub(super) fn spare() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC)
}
