//! New connections: accepting, refusing, shaking hands.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_os::socket;
use partywall_wire::{
    BrokerHello, ClientHello, Limit, Refusal, Token, Welcome,
    handshake::{self, Speaker},
    limits::PROTOCOL,
};
use rustix::event::epoll::{self, EventFlags};

use crate::{
    config::OPERATORS,
    registry::{Event, MemberId, event::Identity},
    server::{
        connection::{Channel, Connection, ConnectionId, Message},
        event_loop::{RETRY, Server, Source, random, spare},
        in_flight::{Process, ProcessKey, Room},
        membership::{Identified, identify, presentable},
        timers::Timer,
        translate,
    },
};

impl Server {
    /// Takes in the connections that wait, as many as one turn allows.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_IN_TURN {
            if self.unauthenticated.len() >= MAX_HANDSHAKES && !self.drop_silent(None) {
                // Those that wait to be accepted can wait until one of these has spoken, or has been silent for long.
                return self.pause_accepting(HANDSHAKE_RETRY);
            }
            match socket::accept(&self.place.listener) {
                Ok(None) => return,
                Ok(Some(call)) => self.greet(call),
                Err(errno) => {
                    tracing::warn!(%errno, "a connection could not be accepted");
                    if !self.turn_away_one() {
                        return self.pause_accepting(RETRY);
                    }
                }
            }
        }
    }

    /// New connections may be accepted again.
    pub(super) fn resume_accepting(&mut self) {
        if self.spare.is_none() {
            self.spare = spare().ok();
        }
        if !self.accepting
            && epoll::modify(&self.epoll, &self.place.listener, Source::Listener.data(), EventFlags::IN).is_ok()
        {
            self.accepting = true;
        }
    }

    /// The kernel would report a connection that cannot be accepted over and over.
    fn pause_accepting(&mut self, pause: Duration) {
        if epoll::modify(&self.epoll, &self.place.listener, Source::Listener.data(), EventFlags::empty()).is_ok() {
            self.accepting = false;
        }
        self.timers.set(Instant::now() + pause, Timer::Accept);
    }

    /// Tells one connection that there is no file descriptor for it, by means of the spare one.
    fn turn_away_one(&mut self) -> bool {
        if self.spare.take().is_none() {
            return false;
        }
        if let Ok(Some(call)) = socket::accept(&self.place.listener) {
            self.refuse(&call, no_fds());
        }
        self.spare = spare().ok();
        self.spare.is_some()
    }

    fn greet(&mut self, call: OwnedFd) {
        let ours = rustix::process::geteuid().as_raw();
        let pid = match socket::peer(&call) {
            Ok(peer) if peer.uid != ours => {
                return self.refuse(&call, Refusal::WrongUser { broker: ours, peer: peer.uid });
            }
            Ok(peer) => peer.pid,
            Err(errno) => return tracing::warn!(%errno, "dropped a connection whose end is unknown"),
        };
        self.last_connection += 1;
        let id = ConnectionId(self.last_connection);
        let process = Process::of(call.as_fd(), pid, id);
        let is_of_same = |(of, _): &&(ProcessKey, Instant)| *of == process.key;
        while self.unauthenticated.values().filter(is_of_same).count() >= MAX_HANDSHAKES_OF_PROCESS
            && self.drop_silent(Some(process.key))
        {}
        if let Err(errno) = epoll::add(&self.epoll, &call, Source::Socket(Channel::Call, id).data(), EventFlags::IN) {
            return tracing::warn!(%errno, "dropped a connection that cannot be watched");
        }
        self.timers.set(Instant::now() + self.handshake_timeout, Timer::Handshake(id));
        self.unauthenticated.insert(id, (process.key, Instant::now()));
        self.connections.insert(id, Connection::new(id, call, process));
    }

    /// Drops the connection that has been silent for longest, of all or of one process. False if none has been silent for
    /// long: its first message may be on its way.
    fn drop_silent(&mut self, of: Option<ProcessKey>) -> bool {
        let oldest = self.unauthenticated.iter().find(|(id, (process, _))| {
            of.is_none_or(|of| of == *process)
                && self.connections.get(id).is_some_and(|connection| !connection.is_parked)
        });
        let Some((id, since)) = oldest.map(|(id, (_, since))| (*id, *since)) else { return false };
        if since.elapsed() < SILENT {
            return false;
        }
        // Its first message may be there, and only we may not have come to it yet.
        self.hear(id);
        if self.unauthenticated.contains_key(&id) && self.connections.get(&id).is_some_and(|c| !c.is_parked) {
            tracing::warn!(connection = id.0, "dropped: too many connections do not say who they are");
            self.drop_connection(id);
        }
        true
    }

    /// Refuses a seat beyond the share of a process, and one beyond all.
    fn check_seats(&self, process: ProcessKey) -> Result<(), Refusal> {
        let share = self.members.share_of(process);
        let allowed = (self.limits.clients / PROCESS_SHARE).max(MIN_PROCESS_SHARE);
        if share.connected >= allowed {
            return Err(Refusal::Limit { limit: Limit::ClientsOfProcess, allowed, needed: share.connected + 1 });
        }
        if share.hung_up >= MAX_HUNG_UP {
            return Err(Refusal::Limit { limit: Limit::HungUp, allowed: MAX_HUNG_UP, needed: share.hung_up + 1 });
        }
        self.registry.check_seats().map_err(translate::refusal)
    }

    /// Finds a place for a connection without a seat, if need be that of the one that has been idle for longest.
    fn check_operators(&mut self, process: ProcessKey) -> Result<(), Refusal> {
        let share = self.members.share_of(process).operators;
        let allowed = OPERATORS / PROCESS_SHARE;
        if share >= allowed {
            return Err(Refusal::Limit { limit: Limit::Operators, allowed, needed: share + 1 });
        }
        if let (OPERATORS.., Some((idle, last_request))) = self.members.operators() {
            if last_request.elapsed() < OPERATOR_IDLE {
                return Err(Refusal::Limit { limit: Limit::Operators, allowed: OPERATORS, needed: OPERATORS + 1 });
            }
            tracing::warn!(member = %idle, "dismissed: it asks for nothing, and another operator needs its place");
            self.apply(Event::Dismissed { member: idle });
        }
        self.registry.check_rows().map_err(translate::refusal)
    }

    /// The first message of a connection.
    pub(super) fn on_hello(&mut self, id: ConnectionId, message: Message) {
        let Some(connection) = self.connections.get(&id) else { return };
        let process = connection.process();
        let (speaker, hello) = match self.read_hello(&message.frame.body) {
            Ok(Ok(hello)) => hello,
            Ok(Err(refusal)) => return self.send_away(id, refusal),
            Err(why) => return self.hang_up(id, &why),
        };
        match self.in_flight.room(process, hello.operator) {
            Room::Free => {}
            Room::Refused(refusal) => return self.send_away(id, refusal),
            Room::Later(_) => return self.park(id, message, hello.operator),
        }
        let Message { frame, fds } = message;
        let lost = fds.len() < frame.fds;
        let Some(connection) = self.connections.get(&id) else { return };
        // Telling what the client sent takes a file descriptor: without one, a pidfd would look like anything else.
        if lost || spare().is_err() {
            return self.send_away(id, no_fds());
        }
        match identify(connection.call(), &speaker, fds.into_iter().next()) {
            Ok(client) => {
                let admitted = match &hello.resume {
                    Some(resume) => match self.members.resumable(resume, self.about.instance, &client) {
                        Some(member) => self.resume(id, member),
                        None => Err(Refusal::CannotResume),
                    },
                    None => self.join(id, client, &hello),
                };
                if let Err(refusal) = admitted {
                    self.send_away(id, refusal);
                }
            }
            Err(refusal) => self.send_away(id, refusal),
        }
    }

    /// Outer error: no Partywall process. Inner error: one that we cannot talk to.
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
        let process = self.connections.get(&id).map(Connection::process).ok_or(Refusal::ShuttingDown)?;
        if hello.operator {
            self.check_operators(process.key)?;
        } else {
            self.check_seats(process.key)?;
        }
        if !hello.operator && !self.registry.admits(hello.simulated) {
            return Err(Refusal::OtherDriver { simulated: self.registry.is_simulated() });
        }
        let mut token = Token([0; 16]);
        random(&mut token.0).map_err(|_| Refusal::ShuttingDown)?;
        let (ours, theirs) = self.events_pair(id)?;
        let command = presentable(hello);
        let pid = client.pid;
        let uid = client.uid;
        let has_pidfd = client.pidfd.is_some();
        let member = self.members.join(client, token, id, process.key, hello.operator);
        let watched = match self.members.pidfd(member) {
            Some(pidfd) => epoll::add(&self.epoll, pidfd, Source::Exit(member).data(), EventFlags::IN),
            None => Ok(()),
        };
        if let Err(errno) = watched {
            tracing::warn!(%errno, "a member's end cannot be watched");
            self.members.remove(member);
            return Err(no_fds());
        }
        let ClientHello { operator, simulated, .. } = *hello;
        tracing::info!(%member, pid, command, simulated, operator, has_pidfd, "joined");
        let identity = Identity { pid, uid, command: command.into(), simulated, operator, has_pidfd };
        self.apply(Event::Joined { member, identity });
        if let Some(row) = self.registry.row(member) {
            self.control.begin_row(row);
        }
        self.welcome(id, member, ours, theirs, false);
        Ok(())
    }

    fn resume(&mut self, id: ConnectionId, member: MemberId) -> Result<(), Refusal> {
        let (ours, theirs) = self.events_pair(id)?;
        if let Some(old) = self.members.current(member) {
            self.hang_up(old, "its member goes on at another connection");
        }
        self.members.resume(member, id);
        tracing::info!(%member, "resumed");
        self.apply(Event::Resumed { member });
        if let Some(row) = self.registry.row(member) {
            self.control.begin_row(row);
        }
        self.welcome(id, member, ours, theirs, true);
        Ok(())
    }

    /// The events socket of a connection, and the end for the client.
    fn events_pair(&self, id: ConnectionId) -> Result<(OwnedFd, OwnedFd), Refusal> {
        let (ours, theirs) = socket::pair().map_err(|_| no_fds())?;
        epoll::add(&self.epoll, &ours, Source::Socket(Channel::Events, id).data(), EventFlags::empty())
            .map_err(|_| no_fds())?;
        Ok((ours, theirs))
    }

    fn welcome(&mut self, id: ConnectionId, member: MemberId, ours: OwnedFd, theirs: OwnedFd, resumed: bool) {
        let (Some(token), Some(row)) = (self.members.token(member), self.registry.row(member)) else { return };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.admit(member, ours, self.limits.message);
        self.unauthenticated.remove(&id);
        let welcome = Welcome {
            instance: self.about.instance,
            member: member.0,
            row,
            token,
            resumed,
            max_message: self.limits.message as u32,
        };
        let hello = BrokerHello { outcome: Ok(welcome) };
        let sent = match handshake::encode(&Speaker::new(&self.about.version), &hello, 2) {
            Ok(bytes) => {
                let fds = vec![self.reclaimer.keep(theirs).into(), self.control.rows_fd()];
                connection.send(Channel::Call, bytes, fds, &mut self.in_flight)
            }
            Err(error) => return self.hang_up(id, &error.to_string()),
        };
        if let Err(broken) = self.after_sending(id, Channel::Call, sent) {
            self.hang_up(id, &broken.to_string());
        }
    }

    /// Refuses a connection and drops it.
    pub(super) fn send_away(&mut self, id: ConnectionId, refusal: Refusal) {
        if let Some(connection) = self.connections.get(&id) {
            self.refuse(connection.call(), refusal);
        }
        self.drop_connection(id);
    }

    /// Tells a client why it does not become a member. It costs nothing to ask again.
    pub(super) fn refuse(&self, call: impl AsFd, refusal: Refusal) {
        tracing::info!(?refusal, "refused a connection");
        let hello = BrokerHello { outcome: Err(refusal) };
        match handshake::encode(&Speaker::new(&self.about.version), &hello, 0) {
            // A fresh socket has room for this; a client that is gone needs no reason.
            Ok(bytes) => drop(socket::send(call, &bytes, &[])),
            Err(error) => tracing::error!(%error, "a refusal could not be encoded"),
        }
    }
}

/// This process cannot open another file.
pub(super) fn no_fds() -> Refusal {
    let open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    Refusal::Limit { limit: Limit::Fds, allowed: open_files, needed: open_files.saturating_add(1) }
}

/// Connections accepted before others have their turn.
const ACCEPTS_IN_TURN: usize = 64;

/// Connections at once that have not said yet who they are. Clients say it as soon as they are connected.
const MAX_HANDSHAKES: usize = 64;

/// A connection that has said nothing for so long may make room for others.
const SILENT: Duration = Duration::from_millis(100);

/// How soon to look for room for the next one.
const HANDSHAKE_RETRY: Duration = Duration::from_millis(5);

/// Such connections of one process.
const MAX_HANDSHAKES_OF_PROCESS: usize = MAX_HANDSHAKES / 4;

/// A process gets one part in so many of all seats.
const PROCESS_SHARE: u64 = 4;

/// Seats that a process gets in any case.
const MIN_PROCESS_SHARE: u64 = 4;

/// Members that a living process may hang up on without a good-bye before it gets no more seats.
const MAX_HUNG_UP: u64 = 16;

/// After so long without a request an operator's place may go to another one.
const OPERATOR_IDLE: Duration = Duration::from_secs(1);
