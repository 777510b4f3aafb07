//! A member's requests in, the registry's effects out.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use partywall_os::{Errno, process};
use partywall_wire::{self as wire, Kill, Refusal, Reply, Request, frame, limits::MAX_MESSAGE};
use rustix::process::Signal;

use crate::{
    Exit,
    registry::{self, Call, Effect, Event, FdId, Guarded, MemberId, RequestId},
    server::{
        admission::no_fds,
        connection::{Broken, Channel, Connection, ConnectionId, Message, Phase, Sent},
        event_loop::{Server, now},
        fds::missing,
        in_flight::Room,
        timers::Timer,
        translate,
    },
};

impl Server {
    /// A message of a member.
    pub(super) fn on_request(&mut self, id: ConnectionId, member: MemberId, message: Message) {
        let request: Request = match message.frame.decode() {
            Ok(request) => request,
            Err(error) => return self.hang_up(id, &error.to_string()),
        };
        let Some(connection) = self.connections.get(&id) else { return };
        if connection.is_closed(Channel::Call) && only_asks(&request.call) {
            // Nobody would read the answer, and finding it may have its cost.
            return;
        }
        let operator = self.members.note_request(member);
        if may_bring_descriptors(&request.call) {
            match self.in_flight.room(connection.process(), operator) {
                Room::Free => {}
                Room::Refused(refusal) => return self.refuse_request(id, member, request.id, refusal),
                Room::Later(_) => return self.park(id, message, operator),
            }
        }
        let Message { frame, fds } = message;
        tracing::trace!(%member, request = request.id, call = ?request.call, "request");
        let arrived = fds.len();
        // Whatever becomes of the request: closing GPU memory is nothing for this thread.
        let fds: Vec<_> = fds.into_iter().map(|fd| self.reclaimer.keep(fd)).collect();
        let call = if arrived < frame.fds {
            tracing::warn!(%member, arrived, sent = frame.fds, "no free file descriptor for what came");
            Err(missing(arrived))
        } else {
            translate::call(request.call, fds, &mut self.store, self.registry.is_simulated(), self.about.instance)
        };
        let call = call.and_then(|call| self.provide(member, call));
        match call {
            Ok(call) => self.apply(Event::Request { member, request: RequestId(request.id), call }),
            Err(refusal) => self.refuse_request(id, member, request.id, refusal),
        }
    }

    fn refuse_request(&mut self, id: ConnectionId, member: MemberId, request: u64, refusal: Refusal) {
        let reply = Reply { id: request, outcome: Err(refusal) };
        if let Err(broken) = self.send(member, Channel::Call, &reply, &[]) {
            self.hang_up(id, &broken.to_string());
        }
    }

    /// Has a message wait until descriptors of other processes are read, for [`PARKED`] at most.
    pub(super) fn park(&mut self, id: ConnectionId, message: Message, operator: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.is_parked = true;
        let until = Instant::now() + PARKED;
        self.parked.push_back(Parked { connection: id, message, operator, until });
        // Nothing is to be sent: this only stops the kernel from reporting what the client sends meanwhile. The socket is
        // known to the kernel, so this does not fail.
        let _ = self.after_sending(id, Channel::Call, Ok(Sent::All));
    }

    /// Has messages whose turn has come done, and refuses those that have waited for too long.
    pub(super) fn unpark(&mut self) {
        while let Some(front) = self.parked.front() {
            let Parked { connection: id, operator, until, .. } = *front;
            let gone = self.connections.get(&id).is_none_or(|connection| !connection.is_parked);
            let process = self.connections.get(&id).map(Connection::process);
            let room = process.filter(|_| !gone).map(|process| self.in_flight.room(process, operator));
            let is_late = until <= Instant::now();
            if matches!(room, Some(Room::Later(_))) && !is_late {
                return;
            }
            let Some(Parked { message, .. }) = self.parked.pop_front() else { return };
            let Some(connection) = self.connections.get_mut(&id).filter(|_| !gone) else {
                message.fds.into_iter().for_each(|fd| drop(self.reclaimer.keep(fd)));
                continue;
            };
            connection.is_parked = false;
            let phase = connection.phase();
            match (room, phase) {
                (Some(Room::Later(refusal)), Phase::Member(member)) => {
                    message.fds.into_iter().for_each(|fd| drop(self.reclaimer.keep(fd)));
                    if let Ok(request) = message.frame.decode::<Request>() {
                        self.refuse_request(id, member, request.id, refusal);
                    }
                }
                (Some(Room::Later(refusal)), _) => self.send_away(id, refusal),
                (_, Phase::Member(member)) => self.on_request(id, member, message),
                (_, _) => self.on_hello(id, message),
            }
            self.go_on_later(id);
        }
    }

    /// Makes the memory that a request needs.
    fn provide(&mut self, member: MemberId, mut call: Call) -> Result<Call, Refusal> {
        // A new writer could do nothing with a cell that has ended.
        if let Call::OpenTimeline(open) = &call
            && open.writer
            && self.registry.live_cell(&open.name).is_some_and(|at| self.control.has_ended(at))
        {
            self.apply(Event::TimelineEnded { name: open.name.clone() });
        }
        while let Some(needed) = self.registry.control_needed(member, &call) {
            let made = match self.control.make(needed, &mut self.store, &self.reclaimer) {
                Ok(made) => made,
                Err(error) => {
                    tracing::warn!(%error, ?needed, "control memory could not be made");
                    self.carry_out(vec![Effect::Close(call.fds())]);
                    return Err(not_created(&error));
                }
            };
            match &mut call {
                Call::OpenTimeline(open) => open.slab = Some(made),
                Call::OpenSemaphore(open) => open.memory = Some(made),
                Call::Commit(commit) => commit.made.push(made),
                _ => self.carry_out(vec![Effect::Close(vec![made.fd])]),
            }
        }
        Ok(call)
    }

    /// Looks after cells that have ended and may still be written.
    pub(super) fn guard_cells(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        for Guarded { at, given_back } in self.registry.guarded() {
            self.control.guard(at);
            if given_back && self.control.is_complete(at) {
                effects.extend(self.registry.apply(Event::CellSettled { at }, now()));
            }
        }
        self.guarding = !self.registry.guarded().is_empty();
        if self.guarding {
            self.timers.set(Instant::now() + GUARD, Timer::Guard);
        }
        effects
    }

    /// Does what the registry says, and what follows from that.
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Reply { member, request, outcome, fds } => {
                    if effects.contains(&Effect::Stop) {
                        // Whoever is told that this broker ends may start the next one at once.
                        self.place.file.remove();
                    }
                    let kill = matches!(outcome, Ok(registry::Answer::Evicted { kill: true, .. }));
                    let mut outcome = translate::outcome(outcome, &self.about, &self.control);
                    if let (true, Ok(wire::Answer::Evicted(evicted))) = (kill, &mut outcome) {
                        self.kill(evicted);
                    }
                    let sent = self.send(member, Channel::Call, &Reply { id: request.0, outcome }, &fds);
                    effects.extend(self.hang_up_if_broken(member, sent));
                }
                Effect::Notify { member, ticket, outcome, fds } => {
                    let outcome = translate::outcome(outcome, &self.about, &self.control);
                    let answer = partywall_wire::Event::Completion { ticket: ticket.0, outcome };
                    let sent = self.send(member, Channel::Events, &answer, &fds);
                    effects.extend(self.hang_up_if_broken(member, sent));
                }
                Effect::Close(_) | Effect::Confirm(_) if self.control.is_clearing() => self.behind_permits.push(effect),
                Effect::Close(fds) => {
                    self.control.forget(&fds);
                    self.store.close(&fds);
                }
                Effect::StartCell { at, from, incarnation } => self.control.start(at, from, incarnation),
                Effect::EndCell { at, ending } => {
                    self.control.end(at, ending);
                    if !self.guarding {
                        effects.extend(self.guard_cells());
                    }
                }
                Effect::SettleCell(at) if self.control.is_complete(at) => {
                    effects.extend(self.registry.apply(Event::CellSettled { at }, now()));
                }
                // The next look at it will tell.
                Effect::SettleCell(_) => {}
                Effect::Return { control, row } => self.control.give_back(control, row, self.registry.slabs()),
                Effect::Detach { topic, row, ending } => {
                    self.control.detach_later(topic, row, ending);
                    effects.extend(self.clear());
                }
                Effect::ClearRow { row, control } => {
                    self.control.clear_row(row, control);
                    effects.extend(self.clear());
                }
                Effect::Confirm(id) => self.reclaimer.report(id),
                Effect::Disconnect(member) => {
                    tracing::info!(%member, "left");
                    self.forget(member);
                }
                Effect::HangUp(member) => {
                    if let Some(id) = self.members.current(member) {
                        effects.extend(self.hang_up_quietly(id, "it has said good-bye, and its end is awaited"));
                    }
                }
                Effect::Quarantined(member) => {
                    if let Some(timeout) = self.unproven_after {
                        self.timers.set(Instant::now() + timeout, Timer::Quarantine(member));
                    }
                }
                Effect::Stop => {
                    tracing::info!("asked to stop by a member");
                    self.exit = Some(Exit::Stopped);
                }
            }
        }
    }

    /// Gives what members that are gone have in control memory to others, as much as this turn allows. Memory is freed when
    /// that is done.
    pub(super) fn clear(&mut self) -> Vec<Effect> {
        let cleared = self.control.clear(self.registry.slabs()).into_iter();
        let mut effects: Vec<_> =
            cleared.flat_map(|row| self.registry.apply(Event::RowCleared { row }, now())).collect();
        if !self.control.is_clearing() {
            effects.append(&mut self.behind_permits);
        }
        effects
    }

    /// Sends SIGKILL to the processes of evicted members. By pidfd only: a pid may be somebody else's by now.
    fn kill(&self, evicted: &mut [wire::Evicted]) {
        for evicted in evicted {
            let member = MemberId(evicted.member);
            evicted.kill = match self.members.pidfd(member).map(|pidfd| process::kill(pidfd, Signal::KILL)) {
                Some(Ok(())) => Kill::Sent,
                Some(Err(Errno::SRCH)) => Kill::Exited,
                Some(Err(errno)) => Kill::Refused(errno.raw_os_error()),
                None if self.members.has_exited(member) => Kill::Exited,
                None => Kill::NoPidfd,
            };
            tracing::warn!(%member, pid = evicted.pid, outcome = ?evicted.kill, "killing an evicted member");
        }
    }

    fn hang_up_if_broken(&mut self, member: MemberId, sent: Result<(), Broken>) -> Vec<Effect> {
        match (sent, self.members.current(member)) {
            (Err(broken), Some(id)) => self.hang_up_quietly(id, &broken.to_string()),
            _ => Vec::new(),
        }
    }

    /// Sends a message to a member, wherever it speaks now. A suspect gets nothing: it will ask again.
    fn send<T: serde::Serialize>(
        &mut self,
        member: MemberId,
        channel: Channel,
        message: &T,
        fds: &[FdId],
    ) -> Result<(), Broken> {
        let Some(id) = self.members.current(member) else { return Ok(()) };
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let bytes = frame::encode(message, fds.len(), MAX_MESSAGE).map_err(|e| Broken::Malformed(e.to_string()))?;
        let sent = connection.send(channel, bytes, self.store.share(fds), &mut self.in_flight);
        self.after_sending(id, channel, sent)
    }
}

/// A message that waits until it can be answered with descriptors.
#[derive(Debug)]
pub(super) struct Parked {
    connection: ConnectionId,
    message: Message,
    operator: bool,
    until: Instant,
}

/// Whether a call changes nothing.
fn only_asks(call: &wire::Call) -> bool {
    matches!(
        call,
        wire::Call::Ping
            | wire::Call::Status
            | wire::Call::List { .. }
            | wire::Call::Members { .. }
            | wire::Call::Objects { .. }
            | wire::Call::Inspect { .. }
            | wire::Call::InspectObject { .. }
    )
}

/// Whether the answer to a call may bring file descriptors.
fn may_bring_descriptors(call: &wire::Call) -> bool {
    match call {
        wire::Call::Commit(commit) => commit.control.is_some(),
        wire::Call::Open(_)
        | wire::Call::OpenOrBuild { .. }
        | wire::Call::Refresh { .. }
        | wire::Call::Inspect { .. }
        | wire::Call::OpenTimeline { .. }
        | wire::Call::FollowTimeline { .. }
        | wire::Call::OpenSemaphore { .. } => true,
        _ => false,
    }
}

/// The refusal of a request for which control memory could not be made.
fn not_created(error: &std::io::Error) -> Refusal {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => no_fds(),
        errno => Refusal::System {
            what: "making control memory".into(),
            errno: errno.unwrap_or(Errno::INVAL).raw_os_error(),
        },
    }
}

/// How long a message waits for descriptors of other processes to be read.
const PARKED: Duration = Duration::from_secs(1);

/// How often to find out whether they are.
pub(super) const UNPARK: Duration = Duration::from_millis(5);

/// How often cells are looked after: a stream that waits for a value that never comes waits no longer for it to be undone.
const GUARD: Duration = Duration::from_millis(100);
