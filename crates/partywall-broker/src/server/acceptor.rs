//! New connections: the listening socket and unauthenticated connections.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{Errno, dir::DirLock, socket};
use partywall_wire::{
    BrokerHello, Limit, LimitHolder, Refusal,
    handshake::{self, Speaker},
};
use rustix::event::{EventfdFlags, epoll::EventFlags, eventfd};

use crate::{
    bind::{BoundSocket, Sought, check, own_user},
    config::{Admission, Config},
    registry::largest,
    server::{
        connection::{Channel, Connection, ConnectionId},
        event_loop::Server,
        in_flight::{Process, ProcessKey},
        peers::RETRY,
        reactor::{EventSource, Reactor},
        reclaimer::{ClientSocket, Reclaimer},
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
    timeout: Duration,
    /// This broker's number, which refusals contain.
    instance: u64,
    /// The release that refusals name.
    version: String,
    /// The users that may connect.
    admission: Admission,
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
    fn pause(&mut self, reactor: &mut Reactor, pause: Duration) {
        if reactor.change(&self.bound.listener, EventSource::Listener, EventFlags::empty()).is_ok() {
            self.accepting = false;
        }
        reactor.set_timer(pause, Timer::Accept);
    }

    /// Refuses one connection because no file descriptor is free, by means of the spare descriptor.
    fn turn_away_one(&mut self, reclaimer: &Reclaimer) -> bool {
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

    fn send_refusal(&self, call: impl AsFd, refusal: Refusal) {
        let hello = BrokerHello { instance: self.instance, outcome: Err(refusal) };
        match handshake::encode(&Speaker::new(&self.version), &hello, 0) {
            // A new socket has room for this message, and a closed one needs no message.
            Ok(bytes) => drop(socket::send(call, &bytes, &[])),
            Err(error) => tracing::error!(%error, "a refusal could not be encoded"),
        }
    }

    /// Returns the processes of a user that have most of the unauthenticated connections.
    fn introducing(&self, uid: u32) -> Vec<LimitHolder> {
        let mut counts = BTreeMap::<(u32, u32), u64>::new();
        let of_user = self.unauthenticated.values().filter(|(process, _)| Of::User(uid).includes(process));
        for (process, _) in of_user {
            if let ProcessKey::Pid(pid) = process.key {
                *counts.entry((uid, pid)).or_default() += 1;
            }
        }
        largest(counts)
    }

    fn count(&self, of: Of) -> usize {
        self.unauthenticated.values().filter(|(process, _)| of.includes(process)).count()
    }
}

/// Unauthenticated connections that share a limit.
#[derive(Debug, Clone, Copy)]
enum Of {
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

impl Server {
    /// Accepts pending connections, at most as many as one turn allows.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_IN_TURN {
            if self.acceptor.unauthenticated.len() >= MAX_HANDSHAKES && !self.drop_silent(Of::All) {
                // Pending connections wait until one of these completes its handshake or times out.
                return self.acceptor.pause(&mut self.reactor, HANDSHAKE_RETRY);
            }
            match socket::accept(&self.acceptor.bound.listener) {
                Ok(None) => return,
                Ok(Some(call)) => self.greet(self.runner.store.reclaimer().keep_socket(call)),
                Err(errno) => {
                    tracing::warn!(%errno, "a connection could not be accepted");
                    if !self.acceptor.turn_away_one(self.runner.store.reclaimer()) {
                        return self.acceptor.pause(&mut self.reactor, RETRY);
                    }
                }
            }
        }
    }

    fn greet(&mut self, call: ClientSocket) {
        let ours = own_user();
        let peer = match socket::peer(&call) {
            Ok(peer) if !self.acceptor.admission.admits(ours, peer, &call) => {
                // A process that may not connect must not be able to fill the log.
                let refusal = Refusal::WrongUser { broker: ours, peer: peer.uid };
                self.audit.not_admitted(peer);
                return self.acceptor.send_refusal(&call, refusal);
            }
            Ok(peer) => peer,
            Err(errno) => return tracing::warn!(%errno, "dropped a connection whose peer is unknown"),
        };
        let id = self.acceptor.next_id();
        let process = Process::of(call.as_fd(), peer, id);
        let of_process = Of::Process(process.key);
        while self.acceptor.count(of_process) >= MAX_HANDSHAKES_OF_PROCESS && self.drop_silent(of_process) {}
        if process.is_guest {
            // Processes of other users must not keep those of the broker's from connecting.
            let shares = [(Of::User(process.uid), MAX_HANDSHAKES / 4), (Of::Guests, MAX_HANDSHAKES / 2)];
            for (of, allowed) in shares {
                if self.acceptor.count(of) >= allowed && !self.drop_silent(of) {
                    let needed = allowed as u64 + 1;
                    let holders = self.acceptor.introducing(process.uid);
                    let refusal = Refusal::Limit { limit: Limit::Handshakes, allowed: allowed as u64, needed, holders };
                    return self.acceptor.refuse(&call, refusal);
                }
            }
        }
        if let Err(errno) = self.reactor.watch(&call, EventSource::Socket(Channel::Call, id), EventFlags::IN) {
            return tracing::warn!(%errno, "dropped a connection that cannot be watched");
        }
        self.reactor.set_timer(self.acceptor.timeout, Timer::Handshake(id));
        self.acceptor.unauthenticated.insert(id, (process, Instant::now()));
        self.peers.connections.insert(id, Connection::new(id, call, process));
    }

    /// Drops the connection that has been silent for longest, of those that are meant. Returns false if none has been
    /// silent for long: a first message may be on its way.
    fn drop_silent(&mut self, of: Of) -> bool {
        let Some((id, since)) = self.oldest_silent(of) else { return false };
        if since.elapsed() < SILENT {
            return false;
        }
        // Its first message may have arrived without having been read.
        self.hear(id);
        if self.oldest_silent(of).is_some_and(|(oldest, _)| oldest == id) {
            tracing::warn!(connection = id.0, "dropped: too many unauthenticated connections");
            self.drop_connection(id);
        }
        true
    }

    /// Returns the unauthenticated connection that has been silent for longest, of those that are meant, and since
    /// when.
    fn oldest_silent(&self, of: Of) -> Option<(ConnectionId, Instant)> {
        let is_silent = |id| self.peers.connections.get(id).is_some_and(|connection| !connection.is_parked);
        let mut unauthenticated = self.acceptor.unauthenticated.iter();
        let found = unauthenticated.find(|(id, (process, _))| of.includes(process) && is_silent(id));
        found.map(|(id, (_, since))| (*id, *since))
    }

    /// Refuses a connection and drops it.
    pub(super) fn send_away(&mut self, id: ConnectionId, refusal: Refusal) {
        if let Some(connection) = self.peers.connections.get(&id) {
            self.acceptor.refuse(connection.call(), refusal);
        }
        self.drop_connection(id);
    }
}

/// Opens a spare file descriptor.
pub(super) fn spare() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC)
}

/// Returns the refusal of a request because no file descriptor is free.
pub(super) fn no_fds() -> Refusal {
    let open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    Refusal::Limit { limit: Limit::Fds, allowed: open_files, needed: open_files.saturating_add(1), holders: Vec::new() }
}

/// Connections accepted in one turn of the loop.
const ACCEPTS_IN_TURN: usize = 64;

/// Unauthenticated connections at once. Clients send their handshake as soon as they are connected.
const MAX_HANDSHAKES: usize = 64;

/// A connection that has been silent for this long may be dropped to make room.
const SILENT: Duration = Duration::from_millis(100);

/// How long to pause before accepting again.
const HANDSHAKE_RETRY: Duration = Duration::from_millis(5);

/// Unauthenticated connections of one process.
const MAX_HANDSHAKES_OF_PROCESS: usize = MAX_HANDSHAKES / 4;
