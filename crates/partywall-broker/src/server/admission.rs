//! New connections and their handshakes: members and operators that join, and members that resume.
//!
//! The broker admits a limited number of members, and at most a quarter of them from one process. Processes are told
//! apart by pid, or by the inode of their pidfd if the kernel shows no pid (Linux 6.9; before that each connection
//! counts as a process).
//!
//! *Operators* are tools that only inspect and tidy up. The registry refuses them every request that grants something,
//! does not list them, and forgets them when they hang up. A few extra places are kept for them, and one that has been
//! idle for a second makes room for the next. Their welcome carries pidfds of the worker and its supervisor:
//! `SO_PEERCRED` names the process that called listen(2), which may be dead, and its pid may be another process's by
//! now.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::{process, socket};
use partywall_wire::{
    BrokerHello, ClientHello, Limit, Refusal, Token, Welcome,
    handshake::{self, Speaker},
    limits::PROTOCOL,
};
use rustix::event::epoll::EventFlags;

use crate::{
    bind::own_user,
    config::{OPERATORS, OPERATORS_OF_GUESTS},
    registry::{Event, MemberId, event::Identity},
    server::{
        Server,
        acceptor::{Of, spare},
        connection::{Channel, Connection, ConnectionId, Message},
        fds::no_fds,
        in_flight::{Process, Room},
        membership::{Identified, identify, presentable, random},
        peers::RETRY,
        reactor::EventSource,
        reclaimer::ClientSocket,
        supervised::{Record, Supervised},
        timers::Timer,
    },
};

impl Server {
    /// Accepts pending connections, at most as many as one turn allows.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_IN_TURN {
            if self.acceptor.count(Of::All) >= MAX_HANDSHAKES && !self.drop_silent(Of::All) {
                // Pending connections wait until one of these completes its handshake or times out.
                return self.acceptor.pause(&mut self.reactor, HANDSHAKE_RETRY);
            }
            match socket::accept(&self.acceptor.bound.listener) {
                Ok(None) => return,
                Ok(Some(call)) => self.greet(self.store.reclaimer().keep_socket(call)),
                Err(errno) => {
                    tracing::warn!(%errno, "a connection could not be accepted");
                    if !self.acceptor.turn_away_one(self.store.reclaimer()) {
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
        self.acceptor.remember(id, process);
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
        let is_silent = |id: &_| self.peers.connections.get(id).is_some_and(|connection| !connection.is_parked);
        self.acceptor.oldest(of, is_silent)
    }

    /// Refuses a connection and drops it.
    pub(super) fn send_away(&mut self, id: ConnectionId, refusal: Refusal) {
        if let Some(connection) = self.peers.connections.get(&id) {
            self.acceptor.refuse(connection.call(), refusal);
        }
        self.drop_connection(id);
    }

    /// Refuses another member if the process has its share of members already, or if the maximum number is connected.
    fn check_room(&self, process: Process) -> Result<(), Refusal> {
        let share = self.peers.members.share_of(process.key);
        let allowed = (self.limits.clients / PROCESS_SHARE).max(MIN_PROCESS_SHARE);
        if share.connected >= allowed {
            return Err(Refusal::Limit {
                limit: Limit::ClientsOfProcess,
                allowed,
                needed: share.connected + 1,
                holders: Vec::new(),
            });
        }
        if share.hung_up >= MAX_HUNG_UP {
            return Err(Refusal::Limit {
                limit: Limit::HungUp,
                allowed: MAX_HUNG_UP,
                needed: share.hung_up + 1,
                holders: Vec::new(),
            });
        }
        self.registry.people().check_room(process.uid)
    }

    /// Makes room for another operator; if necessary, dismisses the one that has been idle for longest.
    fn check_operators(&mut self, process: Process) -> Result<(), Refusal> {
        let share = self.peers.members.share_of(process.key).operators;
        let allowed = OPERATORS / PROCESS_SHARE;
        if share >= allowed {
            return Err(Refusal::Limit { limit: Limit::Operators, allowed, needed: share + 1, holders: Vec::new() });
        }
        let own = |uid| uid == process.uid;
        let allowed = self.limits.operators(!process.is_guest);
        self.make_room_for_operator(own, allowed, |needed| Refusal::Quota {
            uid: process.uid,
            limit: Limit::Operators,
            allowed,
            held: needed - 1,
            needed,
            holders: Vec::new(),
        })?;
        if process.is_guest {
            let allowed = OPERATORS_OF_GUESTS;
            let limit = |needed| Refusal::Limit { limit: Limit::Operators, allowed, needed, holders: Vec::new() };
            self.make_room_for_operator(|uid| uid != own_user(), allowed, limit)?;
        }
        let limit =
            |needed| Refusal::Limit { limit: Limit::Operators, allowed: OPERATORS, needed, holders: Vec::new() };
        self.make_room_for_operator(|_| true, OPERATORS, limit)?;
        self.registry.people().check_rows()
    }

    /// Makes room for another operator among those of some users; if necessary, dismisses the one that has been idle
    /// for longest.
    fn make_room_for_operator(
        &mut self,
        of: impl Fn(u32) -> bool,
        allowed: u64,
        refusal: impl Fn(u64) -> Refusal,
    ) -> Result<(), Refusal> {
        let (number, oldest) = self.peers.members.operators(of);
        if number < allowed {
            return Ok(());
        }
        match oldest {
            Some((idle, last_request)) if last_request.elapsed() >= OPERATOR_IDLE => {
                tracing::warn!(member = %idle, "dismissed: it is idle, and another operator needs its place");
                self.apply(Event::Dismissed { member: idle });
                Ok(())
            }
            _ => Err(refusal(number + 1)),
        }
    }

    /// Handles the first message of a connection.
    pub(super) fn on_hello(&mut self, id: ConnectionId, message: Message) {
        let Some(connection) = self.peers.connections.get(&id) else { return };
        let process = connection.process();
        let (speaker, hello) = match self.read_hello(&message.frame.body) {
            Ok(Ok(hello)) => hello,
            Ok(Err(refusal)) => return self.send_away(id, refusal),
            Err(why) => return self.hang_up(id, &why),
        };
        match self.peers.in_flight.room(process, hello.operator) {
            Room::Free => {}
            Room::Refused(refusal) => return self.send_away(id, refusal),
            Room::Later(_) => return self.peers.park(&mut self.reactor, id, message, hello.operator),
        }
        let Message { frame, fds } = message;
        let lost = fds.len() < frame.fds;
        let Some(connection) = self.peers.connections.get(&id) else { return };
        // Identifying what the client sent takes a file descriptor. Without one, a pidfd would not be recognized.
        if lost || spare().is_err() {
            return self.send_away(id, no_fds());
        }
        match identify(connection.call(), &speaker, fds.into_iter().next()) {
            Ok(client) => {
                let pid = client.pid;
                let admitted = match &hello.resume {
                    Some(resume) => match self.peers.members.resumable(resume, self.about.instance, &client) {
                        Some(member) => self.resume(id, member),
                        None => Err(Refusal::CannotResume),
                    },
                    // A broker that died before it could send the welcome has recorded the member.
                    None => match self.peers.members.joined_by(hello.attempt, &client) {
                        Some(member) => self.resume(id, member),
                        None => self.join(id, client, &hello),
                    },
                };
                if let Err(refusal) = admitted {
                    let refusal = self.registry.with_holders(refusal, process.uid);
                    if process.is_guest {
                        self.audit.not_joined(process.uid, pid, &refusal);
                    }
                    self.send_away(id, refusal);
                }
            }
            Err(refusal) => self.send_away(id, refusal),
        }
    }

    /// Outer error: the peer is no Partywall process. Inner error: the peer speaks another protocol.
    fn read_hello(&self, body: &[u8]) -> Result<Result<(Speaker, ClientHello), Refusal>, String> {
        let greeting = handshake::decode(body).map_err(|e| e.to_string())?;
        if greeting.speaker.protocol != PROTOCOL {
            tracing::warn!(
                pid = greeting.speaker.pid,
                version = greeting.speaker.version,
                protocol = greeting.speaker.protocol,
                "a process speaks another protocol"
            );
            return Ok(Err(Refusal::Protocol));
        }
        let hello = greeting.decode().map_err(|e| e.to_string())?;
        Ok(Ok((greeting.speaker, hello)))
    }

    fn join(&mut self, id: ConnectionId, client: Identified, hello: &ClientHello) -> Result<(), Refusal> {
        let process = self.peers.connections.get(&id).map(Connection::process).ok_or(Refusal::ShuttingDown)?;
        if hello.operator {
            self.check_operators(process)?;
        } else {
            self.check_room(process)?;
            self.make_room()?;
        }
        if !hello.operator && !self.registry.admits(process.uid, hello.simulated) {
            return Err(Refusal::OtherDriver { simulated: !hello.simulated });
        }
        let uid = client.uid;
        if let Some(number) = self.control.provide_rows(uid, &self.store).map_err(|_| no_fds())? {
            self.record(&Record::Rows { uid, number });
        }
        let mut token = Token([0; 16]);
        random(&mut token.0).map_err(|_| Refusal::ShuttingDown)?;
        let (ours, theirs) = self.events_pair(id)?;
        let command = presentable(&hello.command);
        let pid = client.pid;
        let has_pidfd = client.pidfd.is_some();
        let member = self.peers.members.join(client, token, id, process.key, hello);
        let watched = match self.peers.members.pidfd(member) {
            Some(pidfd) => self.reactor.watch(pidfd, EventSource::Exit(member), EventFlags::IN),
            None => Ok(()),
        };
        if let Err(errno) = watched {
            tracing::warn!(%errno, "a member's pidfd cannot be watched");
            self.peers.members.remove(member);
            return Err(no_fds());
        }
        if let Some(files) = self.peers.files_of(member) {
            self.record(&Record::Joined(files));
        }
        let ClientHello { operator, simulated, .. } = *hello;
        tracing::info!(%member, pid, uid, command, simulated, operator, has_pidfd, "joined");
        if process.is_guest {
            self.audit.admitted(uid, pid, operator);
        }
        let identity = Identity { pid, uid, command: command.into(), simulated, operator, has_pidfd };
        self.apply(Event::Joined { member, identity });
        if let Some((uid, row)) = self.registry.people().row_of(member) {
            self.control.begin_row(uid, row);
        }
        self.welcome(id, member, ours, theirs, false);
        Ok(())
    }

    fn resume(&mut self, id: ConnectionId, member: MemberId) -> Result<(), Refusal> {
        let (ours, theirs) = self.events_pair(id)?;
        if let Some(old) = self.peers.members.current(member) {
            self.hang_up(old, "its member continues on another connection");
        }
        self.peers.members.resume(member, id);
        if let Some(call) = self.peers.connections.get(&id).map(|connection| connection.call().as_raw_fd()) {
            self.record(&Record::Connected { member, call });
        }
        tracing::info!(%member, "resumed");
        if let Some((uid, row)) = self.registry.people().row_of(member) {
            self.control.begin_row(uid, row);
        }
        self.welcome(id, member, ours, theirs, true);
        // After the welcome, because there is no events socket before it, and the member may be reminded of stale
        // leases.
        if self.peers.members.current(member) == Some(id) {
            self.apply(Event::Resumed { member });
        }
        Ok(())
    }

    /// Creates the events socket of a connection. Returns the client's end.
    fn events_pair(&self, id: ConnectionId) -> Result<(OwnedFd, OwnedFd), Refusal> {
        let (ours, theirs) = socket::pair().map_err(|_| no_fds())?;
        self.reactor
            .watch(&ours, EventSource::Socket(Channel::Events, id), EventFlags::empty())
            .map_err(|_| no_fds())?;
        Ok((ours, theirs))
    }

    fn welcome(&mut self, id: ConnectionId, member: MemberId, ours: OwnedFd, theirs: OwnedFd, resumed: bool) {
        let Some(token) = self.peers.members.token(member) else { return };
        let Some((uid, row)) = self.registry.people().row_of(member) else { return };
        let Some(rows) = self.control.rows_fd(uid) else { return };
        let Some(connection) = self.peers.connections.get_mut(&id) else { return };
        let ours = self.store.reclaimer().keep_socket(ours);
        connection.admit(member, ours, self.limits.given.message);
        if let Some(supervised) = &self.supervised {
            supervised.page.forget_deaths();
        }
        self.acceptor.forget(id);
        let welcome = Welcome { member, row, token, uid, resumed, max_message: self.limits.given.message as u32 };
        let hello = BrokerHello { instance: self.about.instance, outcome: Ok(welcome) };
        let mut fds = vec![self.store.adopt(theirs).into(), rows];
        if self.peers.members.is_operator(member) {
            fds.extend(self.processes().into_iter().map(|pidfd| self.store.adopt(pidfd).into()));
        }
        let sent = match handshake::encode(&Speaker::new(&self.about.version), &hello, fds.len()) {
            Ok(bytes) => self.peers.send_bytes(&mut self.reactor, id, Channel::Call, bytes, fds),
            Err(error) => return self.hang_up(id, &error.to_string()),
        };
        if let Err(broken) = sent {
            self.hang_up(id, &broken.to_string());
        }
    }
}

impl Server {
    /// Returns pidfds of this process and of its supervisor, for a client that may have to signal them.
    fn processes(&self) -> Vec<OwnedFd> {
        let Ok(own) = process::own_pidfd() else { return Vec::new() };
        let supervisor = self.supervised.as_ref().and_then(Supervised::supervisor_pidfd);
        [own].into_iter().chain(supervisor).collect()
    }
}

/// The divisor for the share of all members that one process may have.
const PROCESS_SHARE: u64 = 4;

/// Members that every process may have.
const MIN_PROCESS_SHARE: u64 = 4;

/// Members that a living process may leave behind without `Bye` before no more of its members are admitted.
const MAX_HUNG_UP: u64 = 16;

/// An operator that has been idle for this long may be dismissed to admit another one.
const OPERATOR_IDLE: Duration = Duration::from_secs(1);

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
