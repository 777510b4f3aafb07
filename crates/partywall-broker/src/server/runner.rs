//! Carries out the registry's effects: files, control memory, closes.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    time::Duration,
};

use partywall_os::{Errno, process};
use partywall_wire::{self as wire, Kill, Refusal, Reply};
use rustix::process::Signal;

use crate::{
    Exit,
    registry::{Call, Effect, Event, FdId, Guarded, MemberId, types::BlockControl},
    server::{
        acceptor::no_fds,
        connection::Channel,
        control::Control,
        event_loop::{Server, now},
        fds::FdStore,
        membership::Membership,
        timers::Timer,
        translate,
    },
};

/// What effects act on, apart from sockets.
#[derive(Debug)]
pub(super) struct Runner {
    /// Every file descriptor that the registry knows by number.
    pub(super) store: FdStore,
    /// Maps of those among them that are control memory.
    pub(super) control: Control,
    /// What came of [`Effect::Kill`], until the reply that says so.
    kills: Kills,
    /// Whether a timer is set for cells that have to be guarded: always while there are any.
    guarding: bool,
    /// How long what a dead member held stays in quarantine; for ever if absent.
    unproven_after: Option<Duration>,
}

/// What came of killing members.
pub(super) type Kills = BTreeMap<MemberId, Kill>;

impl Runner {
    pub(super) fn new(store: FdStore, unproven_after: Option<Duration>) -> Result<Self, Errno> {
        let control = Control::create(&store)?;
        Ok(Self { store, control, kills: Kills::new(), guarding: false, unproven_after })
    }

    /// Creates the control memory of a pool, topic or queue.
    pub(super) fn provide_blocks(&mut self, shape: wire::Control) -> Result<BlockControl, Refusal> {
        self.control.provide_blocks(shape, &mut self.store).map_err(not_created)
    }

    /// Closes file descriptors for good, and unmaps what is mapped of them.
    pub(super) fn close(&mut self, fds: &[FdId]) {
        self.control.forget(fds);
        self.store.close(fds);
    }

    /// Closes everything, waiting for `timeout` at most.
    pub(super) fn finish(self, timeout: Duration) {
        let Self { store, control, .. } = self;
        // It holds a file descriptor, too.
        drop(control);
        store.finish(timeout);
    }

    /// Sends SIGKILL to a member's process. By pidfd only: a pid may be another process's by now.
    fn kill(&mut self, member: MemberId, members: &Membership) {
        let outcome = match members.pidfd(member).map(|pidfd| process::kill(pidfd, Signal::KILL)) {
            Some(Ok(())) => Kill::Sent,
            Some(Err(Errno::SRCH)) => Kill::Exited,
            Some(Err(errno)) => Kill::Refused(errno.raw_os_error()),
            None if members.has_exited(member) => Kill::Exited,
            None => Kill::NoPidfd,
        };
        tracing::warn!(%member, ?outcome, "killing an evicted member");
        self.kills.insert(member, outcome);
    }
}

impl Server {
    /// Creates the control memory that a request needs and that depends on the registry's state.
    pub(super) fn provide(&mut self, member: MemberId, mut call: Call) -> Result<Call, Refusal> {
        // A new writer could do nothing with a cell that has ended.
        if let Call::OpenTimeline(open) = &call
            && open.writer
            && self.registry.live_cell(&open.name).is_some_and(|at| self.runner.control.has_ended(at))
        {
            self.apply(Event::TimelineEnded { name: open.name.clone() });
        }
        let Some(needed) = self.registry.control_needed(member, &call) else { return Ok(call) };
        let created = Some(self.runner.control.provide(needed, &mut self.runner.store).map_err(not_created)?);
        match &mut call {
            Call::OpenTimeline(open) => open.slab = created,
            Call::OpenSemaphore(open) => open.memory = created,
            _ => {}
        }
        Ok(call)
    }

    /// Feeds the registry and does what it says.
    pub(super) fn apply(&mut self, event: Event) {
        let effects = self.registry.apply(event, now());
        self.carry_out(effects);
    }

    /// Does what the registry says, in order, and then what follows from that.
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Reply { member, request, outcome, fds } => {
                    let outcome = translate::outcome(outcome, &self.about, &self.runner.control, &self.runner.kills);
                    self.runner.kills.clear();
                    let reply = Reply { id: request.0, outcome };
                    effects.extend(self.send(member, Channel::Call, &reply, &fds));
                }
                Effect::Notify { member, ticket, outcome, fds } => {
                    let outcome = translate::outcome(outcome, &self.about, &self.runner.control, &self.runner.kills);
                    let completion = wire::Event::Completion { ticket: ticket.0, outcome };
                    effects.extend(self.send(member, Channel::Events, &completion, &fds));
                }
                Effect::Close(fds) => self.runner.close(&fds),
                Effect::Confirm(id) => self.runner.store.reclaimer().report(id),
                Effect::StartCell { at, from, incarnation } => self.runner.control.start(at, from, incarnation),
                Effect::EndCell { at, ending } => {
                    self.runner.control.end(at, ending);
                    if !self.runner.guarding {
                        effects.extend(self.guard_cells());
                    }
                }
                Effect::SettleCell(at) if self.runner.control.is_complete(at) => {
                    effects.extend(self.registry.apply(Event::CellSettled { at }, now()));
                }
                // It is guarded, and each time it is asked whether it is complete.
                Effect::SettleCell(_) => {}
                Effect::Return { control, row } => self.runner.control.give_back(control, row, self.registry.slabs()),
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
                        effects.extend(self.hang_up_quietly(id, "it has said good-bye, and its end is awaited"));
                    }
                }
                Effect::Quarantined(member) => {
                    if let Some(timeout) = self.runner.unproven_after {
                        self.reactor.set_timer(timeout, Timer::Quarantine(member));
                    }
                }
                Effect::Kill(member) => self.runner.kill(member, &self.peers.members),
                Effect::RemoveSocket => self.acceptor.place.file.remove(),
                Effect::Stop => {
                    tracing::info!("asked to stop by a member");
                    self.exit = Some(Exit::Stopped);
                }
            }
        }
    }

    /// Gives what members that are gone have in control memory to others, as much as this turn allows.
    pub(super) fn clear(&mut self) -> Vec<Effect> {
        let cleared = self.runner.control.clear(self.registry.slabs()).into_iter();
        cleared.flat_map(|row| self.registry.apply(Event::RowCleared { row }, now())).collect()
    }

    /// Restores the end of cells in which something was stored afterwards.
    pub(super) fn guard_cells(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        for Guarded { at, given_back } in self.registry.guarded() {
            self.runner.control.guard(at);
            if given_back && self.runner.control.is_complete(at) {
                effects.extend(self.registry.apply(Event::CellSettled { at }, now()));
            }
        }
        self.runner.guarding = !self.registry.guarded().is_empty();
        if self.runner.guarding {
            self.reactor.set_timer(GUARD, Timer::Guard);
        }
        effects
    }

    /// Sends a message to a member. Returns what follows if its connection is broken.
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

/// The refusal of a request for which control memory could not be created.
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

/// How often cells are guarded: a stream that waits for a value that never comes waits no longer for it to be undone.
const GUARD: Duration = Duration::from_millis(100);
