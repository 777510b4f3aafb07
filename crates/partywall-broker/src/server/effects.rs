//! Events of the registry: decided, recorded, and their effects carried out.

use std::{collections::VecDeque, time::Duration};

use partywall_shm::crash::point;
use partywall_wire::{self as wire, Refusal, Reply};

use crate::{
    Exit,
    registry::{Call, Effect, Event, FdId, Guarded, MemberId, Outcome, Received, Registry, Unread},
    replacement::Format,
    server::{
        Server, answers,
        connection::Channel,
        control::not_created,
        supervised::{Record, State, Supervised, to_give_back},
        timers::{Timer, now},
    },
};

impl Server {
    /// Does in control memory what a request needs and what depends on the registry's state: creates it, or ends an
    /// attachment.
    pub(super) fn provide(
        &mut self,
        member: MemberId,
        call: &Call,
        mut received: Received,
    ) -> Result<Received, Refusal> {
        // Members may have ended the cell themselves. The new writer needs a cell that has not ended.
        if let Call::OpenTimeline { name, writer: true, .. } = call
            && self.registry.objects().live_cell(name).is_some_and(|at| self.control.has_ended(at))
        {
            self.apply(Event::TimelineEnded { name: name.clone() });
        }
        if let Some((object, attachment)) = self.registry.to_detach(member, call) {
            received.in_use = self.control.begin_detach(object, attachment);
        }
        if let Some(needed) = self.registry.control_needed(member, call) {
            received.created = Some(self.control.provide(needed, &mut self.store).map_err(not_created)?);
        }
        Ok(received)
    }

    /// Adds to the result of a member's request what the registry does not know.
    fn completed(&self, member: MemberId, outcome: Outcome, unread: Unread) -> Outcome {
        let control = &self.control;
        let members = &self.peers.members;
        let sources = answers::Sources { about: &self.about, control, members, registry: &self.registry };
        match outcome {
            Ok(mut answer) => {
                answers::complete(&mut answer, unread, sources);
                Ok(answer)
            }
            Err(refusal) => Err(match self.registry.people().row_of(member) {
                Some((uid, _)) => self.registry.with_holders(refusal, uid),
                None => refusal,
            }),
        }
    }

    /// Applies an event to the registry and carries out the effects.
    pub(super) fn apply(&mut self, event: Event) {
        let effects = self.decide(event);
        self.carry_out(effects);
    }

    /// Applies an event to the registry and records it. Starts the cells that it needs; returns the other effects.
    pub(super) fn decide(&mut self, event: Event) -> Vec<Effect> {
        let at = now();
        // Requests that only ask change nothing, nor do refused ones, except for descriptors that came with them.
        let (only_asks, brings) = match &event {
            Event::Request { call, received, .. } => (call.only_asks(), !received.all().is_empty()),
            _ => (false, true),
        };
        let mut recording = self.supervised.as_mut().filter(|_| !only_asks);
        recording.take_if(|supervised| {
            let fds = self.store.unrecorded();
            !supervised.prepare(&Record::Event { at, begins: !self.is_carrying_out, fds, event: &event })
        });
        let mut effects = self.registry.apply(event, at);
        effects.retain(|effect| match effect {
            Effect::StartCell { at, from, incarnation } => {
                self.control.start(*at, *from, *incarnation);
                false
            }
            _ => true,
        });
        point("broker: decided, not recorded");
        let is_refused = |effect: &Effect| matches!(effect, Effect::Reply { outcome: Err(_), .. });
        if let Some(supervised) = recording
            && (brings || !effects.iter().any(is_refused))
        {
            self.store.set_recorded();
            supervised.commit();
            point("broker: recorded, effects not carried out");
        }
        effects
    }

    /// Records something that the registry does not know.
    pub(super) fn record(&mut self, record: &Record<()>) {
        if let Some(supervised) = &mut self.supervised {
            supervised.record(record);
        }
        point("broker: recorded beside the registry");
    }

    /// Makes room in the journal for what a client asks for.
    pub(super) fn make_room(&mut self) -> Result<(), Refusal> {
        let Some(supervised) = &mut self.supervised else { return Ok(()) };
        supervised.make_room(self.limits.given.message as u64, &self.registry)
    }

    /// Begins the journal anew with a snapshot. Returns whether it consists of that alone.
    pub(super) fn write_snapshot(&mut self) -> bool {
        // Taken out for as long as the state borrows the server.
        let Some(mut supervised) = self.supervised.take() else { return false };
        supervised.journal.keep(to_give_back(&self.registry));
        let state = self.state(&supervised);
        point("broker: state collected, no snapshot");
        let is_written = supervised.begin_journal(&state);
        self.supervised = Some(supervised);
        if is_written {
            self.store.set_recorded();
        }
        is_written
    }

    /// Collects everything that this worker knows.
    pub(super) fn state(&self, supervised: &Supervised) -> State<&Registry> {
        State {
            format: Format::OURS,
            started_at: self.about.started_at,
            registry: &self.registry,
            rows: self.control.rows_numbers(),
            fds: self.store.numbers(),
            last_fd: self.store.last(),
            members: self.peers.files(),
            last_member: self.peers.members.last(),
            clearing: self.control.clearing().clone(),
            undone: self.control.undone().clone(),
            fatal: supervised.fatal,
        }
    }

    /// Carries out effects in order, then the effects that result from them.
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>) {
        let was_carrying_out = std::mem::replace(&mut self.is_carrying_out, true);
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            point("broker: effect not carried out");
            match effect {
                Effect::Reply { member, request, outcome, fds, unread } => {
                    let outcome = self.completed(member, outcome, unread);
                    let reply = Reply { id: request, outcome };
                    effects.extend(self.send(member, Channel::Call, &reply, &fds));
                    if let Some(supervised) = &self.supervised {
                        supervised.page.forget_deaths();
                    }
                }
                Effect::Notify { member, ticket, outcome, fds } => {
                    let outcome = self.completed(member, outcome, Unread::Nothing);
                    let completion = wire::Event::Completion { ticket, outcome };
                    effects.extend(self.send(member, Channel::Events, &completion, &fds));
                }
                Effect::Close(fds) => {
                    self.control.forget(&fds);
                    self.store.close(&fds);
                }
                Effect::Confirm(id) => self.store.reclaimer().report(id),
                // Done before the event was recorded.
                Effect::StartCell { .. } => {}
                Effect::EndCell { at, ending } => {
                    self.control.end(at, ending);
                    if !self.guarding {
                        effects.extend(self.guard_cells());
                    }
                }
                Effect::SettleCell(at) if self.control.is_complete(at) => {
                    effects.extend(self.decide(Event::CellSettled { at }));
                }
                // The cell is guarded, and each guard timer checks whether it is complete.
                Effect::SettleCell(_) => {}
                Effect::Attach { object, attachment } => self.control.attach(object, attachment),
                Effect::Return { control, row } => self.control.give_back(control, row, &self.registry),
                Effect::Detach { object, row, ending } => {
                    self.control.detach_later(object, row, ending);
                    effects.extend(self.clear());
                }
                Effect::ClearRow { row, control } => {
                    self.control.clear_row(row, control);
                    effects.extend(self.clear());
                }
                Effect::Disconnect(member) => {
                    tracing::info!(%member, "left");
                    self.forget(member);
                }
                Effect::HangUp(member) => {
                    if let Some(id) = self.peers.members.current(member) {
                        effects.extend(
                            self.hang_up_quietly(
                                id,
                                "it has left, but its process must end before its leases are freed",
                            ),
                        );
                    }
                }
                Effect::Quarantined(member) => self.await_end_of_quarantine(member),
                Effect::AwaitDeadline { id, after } => {
                    self.reactor.set_timer(Duration::from_millis(after), Timer::Deadline(id));
                }
                Effect::Stale { member, leases } => {
                    effects.extend(self.send(member, Channel::Events, &wire::Event::Stale { leases }, &[]));
                }
                Effect::Audit(audited) => self.audit.note(&audited),
                Effect::Kill(member) => self.peers.members.kill(member),
                Effect::RemoveSocket => {
                    self.set_ending();
                    self.acceptor.bound.file.remove();
                }
                Effect::Stop => {
                    tracing::info!("asked to stop by a member");
                    self.exit = Some(Exit::Stopped);
                }
            }
        }
        self.is_carrying_out = was_carrying_out;
    }

    /// Sets the timer that frees the leases of a dead member, if they are freed by a timer.
    pub(super) fn await_end_of_quarantine(&mut self, member: MemberId) {
        if let Some(timeout) = self.unproven_after {
            self.reactor.set_timer(timeout, Timer::Quarantine(member));
        }
    }

    /// Returns permits and blocks of departed members, as many as this turn of the loop allows.
    pub(super) fn clear(&mut self) -> Vec<Effect> {
        let (detached, cleared) = self.control.clear(&self.registry);
        if detached > 0 {
            point("broker: detached, not recorded");
        }
        for _ in 0..detached {
            self.record(&Record::Detached);
        }
        cleared.into_iter().flat_map(|row| self.decide(Event::RowCleared { row })).collect()
    }

    /// Undoes stores to cells after their end.
    pub(super) fn guard_cells(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        for Guarded { at, given_back } in self.registry.objects().cells.guarded() {
            if let Some(late) = self.control.late_store(at) {
                point("broker: late store seen, not recorded");
                // Before it is undone: the value may be the last one that was promised, and nobody else knows it then.
                self.record(&Record::Undone { at, value: late.value() });
                self.control.undo(at, late);
            }
            if given_back && self.control.is_complete(at) {
                effects.extend(self.decide(Event::CellSettled { at }));
            }
        }
        self.guarding = !self.registry.objects().cells.guarded().is_empty();
        if self.guarding {
            self.reactor.set_timer(GUARD, Timer::Guard);
        }
        effects
    }

    /// Sends a message to a member. Returns the resulting effects if its connection is broken.
    fn send<T: serde::Serialize>(
        &mut self,
        member: MemberId,
        channel: Channel,
        message: &T,
        fds: &[FdId],
    ) -> Vec<Effect> {
        let fds = self.store.share(fds);
        let sent = self.peers.send(&mut self.reactor, member, channel, message, fds);
        match (sent, self.peers.members.current(member)) {
            (Err(broken), Some(id)) => self.hang_up_quietly(id, &broken.to_string()),
            _ => Vec::new(),
        }
    }
}

/// How often cells are guarded. A late store makes waiting streams miss the end of the timeline; they wait at most this
/// long for it to be undone.
const GUARD: Duration = Duration::from_millis(100);
