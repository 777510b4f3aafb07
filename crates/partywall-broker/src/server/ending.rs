//! The end of the broker: because it is idle, on request, or because another program continues.
//! [`crate::replacement`] lists the steps of the last, and what a kill between any two of them leaves.

use std::{
    thread,
    time::{Duration, Instant},
};

use partywall_os::{
    process::shares_namespaces,
    socket::{self, Ready},
};
use partywall_shm::crash::point;
use partywall_wire::{Answer, NoReplacement, OtherUsers, Refusal, Reply, TimelineEnding};

use crate::{
    Exit,
    bind::own_user,
    registry::{MemberId, RequestId, effect::Audited},
    server::{
        Server,
        connection::{Channel, Connection, ConnectionId, Phase, Sent},
        fds::missing,
        in_flight::Process,
        reactor::Reactor,
        reclaimer::Donated,
        replacement::Replacement,
        supervised::encode,
        timers::Timer,
    },
};

impl Server {
    /// Starts or stops the idle time: the time without members, names and connections.
    pub(super) fn note_idleness(&mut self) {
        let Some(idle_exit) = self.idle_exit else { return };
        if !self.registry.is_idle() || !self.peers.connections.is_empty() {
            self.idle_since = None;
        } else if self.idle_since.is_none() {
            self.idle_since = Some(Instant::now());
            self.reactor.set_timer(idle_exit, Timer::Idle);
        }
    }

    /// Ends the broker if it has been idle for long enough and no process is looking for it.
    pub(super) fn leave_if_idle(&mut self) {
        let (Some(idle_exit), Some(since)) = (self.idle_exit, self.idle_since) else { return };
        if since.elapsed() < idle_exit {
            return;
        }
        // A process that holds the lock is looking for a broker, and must find this one.
        let Ok(_lock) = self.acceptor.lock_directory() else {
            self.reactor.set_timer(IDLE_RETRY, Timer::Idle);
            return;
        };
        self.accept();
        if !self.peers.connections.is_empty() {
            return;
        }
        self.set_ending();
        self.acceptor.bound.file.remove();
        tracing::info!("ending: the broker is idle");
        self.exit = Some(Exit::Idle);
    }

    /// Removes the socket, sends pending output and closes everything.
    pub(super) fn finish(mut self) {
        self.set_ending();
        self.acceptor.bound.file.remove();
        for cell in self.registry.objects().cells.live() {
            self.control.end(cell, TimelineEnding::BrokerGone);
        }
        self.turn_away_the_rest();
        let deadline = Instant::now() + TIMEOUT;
        let unread_until = Instant::now() + UNREAD;
        for connection in self.peers.connections.values_mut() {
            while connection.owes_reply() {
                let is_worth_trying = match connection.flush(Channel::Call, &mut self.peers.in_flight) {
                    Ok(Sent::Blocked) => socket::wait(connection.call(), Ready::Write, Some(deadline)) == Ok(true),
                    // The kernel does not report when a client has read.
                    Ok(Sent::Unread) if Instant::now() < unread_until => {
                        thread::sleep(UNREAD_RETRY);
                        true
                    }
                    _ => false,
                };
                if !is_worth_trying {
                    break;
                }
            }
        }
        let Self { peers, store, control, acceptor, .. } = self;
        // The control memory also holds file descriptors.
        drop((peers, acceptor, control));
        store.finish(TIMEOUT);
        tracing::info!("ended");
    }

    /// Notes that the domain ends: no worker follows this one, even if it is killed before the end.
    pub(super) fn set_ending(&self) {
        if let Some(supervised) = &self.supervised {
            supervised.page.set_ending();
        }
    }

    /// Starts the check of the program that a member has sent.
    pub(super) fn begin_replacement(
        &mut self,
        id: ConnectionId,
        member: MemberId,
        request: RequestId,
        fds: Vec<Donated>,
    ) -> Result<(), Refusal> {
        let refused = |why| Err(Refusal::NotReplaced { why });
        if let Some(process) = self.peers.connections.get(&id).map(Connection::process).filter(|it| it.is_guest) {
            let Process { uid, pid, .. } = process;
            let owner = own_user();
            let what = OtherUsers::Replace;
            let pid = pid.unwrap_or_default();
            self.audit.note(&Audited::OtherUser { uid, pid, what: what.clone(), owner, granted: false });
            return Err(Refusal::OtherUser { what, owner, uid });
        }
        if !self.supervised.as_ref().is_some_and(|supervised| supervised.can_be_replaced()) {
            return refused(NoReplacement::Unsupervised);
        }
        match &mut self.replacement {
            // It has lost its connection meanwhile, and repeats its request.
            Some(running) if running.member == member => {
                running.request = request;
                return Ok(());
            }
            Some(_) => return refused(NoReplacement::InProgress),
            None => {}
        }
        if let Err(found) = self.may_replace(id, member) {
            return refused(NoReplacement::Elsewhere { found });
        }
        let mut fds = fds.into_iter();
        let program = fds.next().ok_or_else(|| missing(0))?;
        let state = self.supervised.as_ref().map(|supervised| encode(&self.state(supervised)));
        let replacement = Replacement::start(&mut self.reactor, member, request, program, state.and_then(Result::ok));
        self.replacement = Some(replacement.map_err(|error| {
            let said = format!("it could not be executed: {error}");
            Refusal::NotReplaced { why: NoReplacement::Program { said } }
        })?);
        tracing::info!(%member, "asked to hand over to another program");
        Ok(())
    }

    /// Checks that a process of the broker's user, at the other end of a connection, could as well start programs by
    /// itself where the broker runs. A process in a container that has been given the broker's socket could not.
    fn may_replace(&self, id: ConnectionId, member: MemberId) -> Result<(), String> {
        let connection = self.peers.connections.get(&id).ok_or("its connection has ended")?;
        // Not the pid that it has told, which is checked only if the kernel knows one.
        let pid = connection.process().pid.ok_or("it is not visible here")?;
        match shares_namespaces(pid) {
            Ok(true) => {}
            Ok(false) => return Err(format!("process {pid} is in another namespace")),
            Err(errno) => return Err(format!("the namespaces of process {pid} cannot be read: {errno}")),
        }
        // The pid has not been given to another process: the one that connected still runs.
        match self.peers.members.pidfd(member).map(|pidfd| socket::wait(pidfd, Ready::Read, Some(Instant::now()))) {
            Some(Ok(false)) => Ok(()),
            Some(_) => Err(format!("process {pid} has ended")),
            None => Err(format!("process {pid} has no pidfd, so it may be another process by now")),
        }
    }

    /// Goes on with the check of the program, and refuses the request if `step` does.
    pub(super) fn check_program(&mut self, step: fn(&mut Replacement, &Reactor) -> Result<(), String>) {
        let Some(replacement) = &mut self.replacement else { return };
        if let Err(said) = step(replacement, &self.reactor)
            && let Some(refused) = self.replacement.take()
        {
            self.refuse_replacement(&refused, said);
        }
    }

    fn refuse_replacement(&mut self, Replacement { member, request, .. }: &Replacement, said: String) {
        tracing::warn!(said, "not handing over to another program");
        if let Some(id) = self.peers.members.current(*member) {
            self.refuse_request(id, *member, *request, Refusal::NotReplaced { why: NoReplacement::Program { said } });
        }
    }

    /// Leaves everything to the program that was accepted, if there is one. Returns whether this process has to end
    /// now, without closing anything.
    pub(super) fn hand_over(&mut self) -> bool {
        let Some(replacement) = self.replacement.take_if(|replacement| replacement.accepted().is_some()) else {
            return false;
        };
        let Replacement { member, request, ref program, .. } = replacement;
        let (Some(release), Some(number)) = (replacement.accepted(), program.number()) else { return false };
        if self.peers.members.current(member).is_none() {
            tracing::warn!("not handing over to another program: the process that asked for it is gone");
            return false;
        }
        // The program finds a snapshot alone, and no event of this one.
        if !self.write_snapshot() {
            self.refuse_replacement(&replacement, "there is no memory for the state".into());
            return false;
        }
        point("broker: snapshot for another program written, request not answered");
        let reply = Reply { id: request, outcome: Ok(Answer::Done) };
        // The asking process can see the outcome without it.
        let _ = self.peers.send(&mut self.reactor, member, Channel::Call, &reply, Vec::new());
        point("broker: replacement answered, not noted");
        let Some(supervised) = &self.supervised else { return false };
        supervised.page.set_program(number);
        point("broker: replacement noted, not handed over");
        tracing::info!(release, "handing over to another program");
        // Its number is noted, so it has to stay open.
        std::mem::forget(replacement);
        true
    }

    /// Refuses the connections that wait to be accepted, because the broker is about to end.
    fn turn_away_the_rest(&mut self) {
        self.acceptor.spare = None;
        while let Ok(Some(call)) = socket::accept(&self.acceptor.bound.listener) {
            self.acceptor.refuse(&call, Refusal::ShuttingDown);
        }
        for connection in self.peers.connections.values() {
            if connection.phase() == Phase::Handshake {
                self.acceptor.refuse(connection.call(), Refusal::ShuttingDown);
            }
        }
    }
}

/// How long to postpone the end when a process is looking for a broker.
const IDLE_RETRY: Duration = Duration::from_secs(1);

/// How long to wait for clients to read sent messages, so that they get the rest.
const UNREAD: Duration = Duration::from_millis(200);

/// How often to check whether clients have read.
const UNREAD_RETRY: Duration = Duration::from_millis(1);

/// The longest that the broker waits for other processes before it exits.
const TIMEOUT: Duration = Duration::from_secs(5);
