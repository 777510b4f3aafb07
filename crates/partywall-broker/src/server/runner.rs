//! Carries out the registry's effects.

use std::{collections::VecDeque, io, time::Duration};

use partywall_os::Errno;
use partywall_shm::crash::point;
use partywall_wire::{self as wire, Refusal, Reply};

use crate::{
    Exit,
    registry::{Call, Effect, Event, FdId, Guarded, MemberId, Outcome, Received, Unread, types::BlockControl},
    server::{
        acceptor::no_fds, answers, connection::Channel, control::Control, event_loop::Server, fds::FdStore,
        supervised::Record, timers::Timer,
    },
};

/// The state that effects act on, apart from sockets.
#[derive(Debug)]
pub(super) struct Runner {
    /// The file descriptors that the registry knows by number.
    pub(super) store: FdStore,
    /// The mappings of control memory.
    pub(super) control: Control,
    /// Whether a timer is set for guarded cells. It is set while there are any.
    pub(super) guarding: bool,
    /// How long a dead member's leases stay in quarantine; without a limit if absent.
    unproven_after: Option<Duration>,
}

impl Runner {
    pub(super) fn new(store: FdStore, control: Control, unproven_after: Option<Duration>) -> Self {
        Self { store, control, guarding: false, unproven_after }
    }

    /// Creates the control memory of a pool, topic or queue.
    pub(super) fn provide_blocks(&mut self, shape: wire::Control) -> Result<BlockControl, Refusal> {
        self.control.provide_blocks(shape, &mut self.store).map_err(not_created)
    }

    /// Closes file descriptors and unmaps their control memory.
    pub(super) fn close(&mut self, fds: &[FdId]) {
        self.control.forget(fds);
        self.store.close(fds);
    }

    /// Closes everything, and waits for that for `timeout` at most.
    pub(super) fn finish(self, timeout: Duration) {
        let Self { store, control, .. } = self;
        // The control memory also holds a file descriptor.
        drop(control);
        store.finish(timeout);
    }
}

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
            && self.registry.objects().live_cell(name).is_some_and(|at| self.runner.control.has_ended(at))
        {
            self.apply(Event::TimelineEnded { name: name.clone() });
        }
        if let Some((object, attachment)) = self.registry.to_detach(member, call) {
            received.in_use = self.runner.control.begin_detach(object, attachment);
        }
        if let Some(needed) = self.registry.control_needed(member, call) {
            let created = self.runner.control.provide(needed, &mut self.runner.store).map_err(not_created)?;
            received.created = Some(created);
        }
        Ok(received)
    }

    /// Adds to the result of a member's request what the registry does not know.
    fn completed(&self, member: MemberId, outcome: Outcome, unread: Unread) -> Outcome {
        let control = &self.runner.control;
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
                Effect::Close(fds) => self.runner.close(&fds),
                Effect::Confirm(id) => self.runner.store.reclaimer().report(id),
                // Done before the event was recorded.
                Effect::StartCell { .. } => {}
                Effect::EndCell { at, ending } => {
                    self.runner.control.end(at, ending);
                    if !self.runner.guarding {
                        effects.extend(self.guard_cells());
                    }
                }
                Effect::SettleCell(at) if self.runner.control.is_complete(at) => {
                    effects.extend(self.decide(Event::CellSettled { at }));
                }
                // The cell is guarded, and each guard timer checks whether it is complete.
                Effect::SettleCell(_) => {}
                Effect::Attach { object, attachment } => self.runner.control.attach(object, attachment),
                Effect::Return { control, row } => self.runner.control.give_back(control, row, &self.registry),
                Effect::Detach { object, row, ending } => {
                    self.runner.control.detach_later(object, row, ending);
                    effects.extend(self.clear());
                }
                Effect::ClearRow { row, control } => {
                    self.runner.control.clear_row(row, control);
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
        if let Some(timeout) = self.runner.unproven_after {
            self.reactor.set_timer(timeout, Timer::Quarantine(member));
        }
    }

    /// Returns permits and blocks of departed members, as many as this turn of the loop allows.
    pub(super) fn clear(&mut self) -> Vec<Effect> {
        let (detached, cleared) = self.runner.control.clear(&self.registry);
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
            if let Some(late) = self.runner.control.late_store(at) {
                point("broker: late store seen, not recorded");
                // Before it is undone: the value may be the last one that was promised, and nobody else knows it then.
                self.record(&Record::Undone { at, value: late.value() });
                self.runner.control.undo(at, late);
            }
            if given_back && self.runner.control.is_complete(at) {
                effects.extend(self.decide(Event::CellSettled { at }));
            }
        }
        self.runner.guarding = !self.registry.objects().cells.guarded().is_empty();
        if self.runner.guarding {
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
        let fds = self.runner.store.share(fds);
        let sent = self.peers.send(&mut self.reactor, member, channel, message, fds);
        match (sent, self.peers.members.current(member)) {
            (Err(broken), Some(id)) => self.hang_up_quietly(id, &broken.to_string()),
            _ => Vec::new(),
        }
    }
}

/// Returns the refusal of a request whose control memory could not be created.
fn not_created(error: io::Error) -> Refusal {
    tracing::warn!(%error, "control memory could not be created");
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => no_fds(),
        errno => Refusal::System {
            what: "creating control memory".into(),
            errno: errno.unwrap_or(Errno::INVAL).raw_os_error(),
        },
    }
}

/// How often cells are guarded. A late store makes waiting streams miss the end of the timeline; they wait at most this
/// long for it to be undone.
const GUARD: Duration = Duration::from_millis(100);
