//! The event loop: waits for the kernel, serves clients in turns, and carries out the registry's effects.

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::Duration,
};

use partywall_os::{Errno, numa::highest_node, supervision::LeftOpen};
use partywall_shm::{members::MAX_ROWS, queue::MAX_ATTACHMENTS, timeline::CELLS};
use partywall_wire::{
    Limit,
    limits::{MAX_CHUNKS, MAX_GROWTHS, MAX_SLABS},
};
use rustix::{
    event::epoll::EventFlags,
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    Config, Exit, RunError, StartError,
    bind::{BoundSocket, own_user},
    config::Resolved,
    page::lack,
    registry::{Bounds, Event, Registry},
    server::{
        Server,
        acceptor::{Acceptor, spare},
        answers::About,
        audit::Audit,
        connection::{Channel, ConnectionId, Phase},
        control::Control,
        fds::FdStore,
        membership::{Membership, random},
        memory_checks::{Memory, MemoryChecks},
        peers::{Peers, UNPARK},
        reactor::{EventSource, Reactor},
        reclaimer::Reclaimer,
        replacement::Replacement,
        restart::Past,
        supervised::{State, Supervised},
        timers::{Timer, now},
    },
};

impl Server {
    /// Returns a server that listens on a bound socket: for a new domain, or for the one that a former process has served.
    pub(crate) fn new(
        config: Config,
        limits: Resolved,
        bound: BoundSocket,
        supervised: Option<(Supervised, LeftOpen)>,
    ) -> Result<Self, StartError> {
        let file = bound.file.clone();
        let is_supervised = supervised.is_some();
        Self::start(config, limits, bound, supervised).inspect_err(|_| {
            if !is_supervised {
                file.remove();
            }
        })
    }

    fn start(
        config: Config,
        limits: Resolved,
        bound: BoundSocket,
        supervised: Option<(Supervised, LeftOpen)>,
    ) -> Result<Self, StartError> {
        let failed = StartError::errno;
        let (mut supervised, left) = supervised.unzip();
        let contents = match &mut supervised {
            Some(supervised) => supervised.journal.read().map_err(failed("read the journal"))?,
            None => None,
        };
        let past = match (contents, left) {
            (Some(contents), Some(left)) => Some(Past::read(&contents, left)?),
            _ => None,
        };
        let continues = past.is_some();
        // From here on, what can fail takes nothing of the former worker's: returning an error would close it.
        let failed = |what: &'static str| {
            move |errno: Errno| {
                let error = StartError::errno(what)(errno);
                if continues { lack(&error) } else { error }
            }
        };
        let reactor = Reactor::create().map_err(failed("make an epoll instance"))?;
        let (stop, stopper) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(failed("make a pipe for the stop signal"))?;
        let reclaimer = Reclaimer::start().map_err(failed("start the reclaimer thread"))?;
        let spare = spare().map_err(failed("open a spare file descriptor"))?;
        let restarts = supervised.as_ref().map_or(0, |supervised| supervised.page.restarts().0);
        let former_workers = supervised.as_ref().map_or(0, |supervised| supervised.page.former_workers());
        let (beginning, unfinished) = match past {
            Some(past) => {
                let (state, rows_fd, fds, unfinished) = past.split();
                let store = FdStore::restore(reclaimer, fds, state.last_fd);
                let control = Control::restore(rows_fd, &state.registry, &store, state.undone);
                if let Some(supervised) = &mut supervised {
                    supervised.fatal = state.fatal;
                }
                let members = Membership::after(state.last_member);
                let State { started_at, registry, .. } = state;
                (Beginning { started_at, registry, store, control, members }, Some(unfinished))
            }
            None => {
                let store = FdStore::new(reclaimer);
                let mut control = Control::default();
                control.provide_rows(own_user(), &store).map_err(failed("make the members' rows"))?;
                let mut instance = [0; 8];
                random(&mut instance).map_err(failed("draw random numbers"))?;
                let registry = Registry::new(bounds(&limits), u64::from_le_bytes(instance));
                let members = Membership::default();
                (Beginning { started_at: now(), registry, store, control, members }, None)
            }
        };
        let Beginning { started_at, registry, store, control, members } = beginning;
        let instance = registry.instance();
        let acceptor = Acceptor::new(&config, bound, spare, instance, former_workers << WORKER_SHIFT);
        reactor
            .watch(&acceptor.bound.listener, EventSource::Listener, EventFlags::IN)
            .and_then(|()| reactor.watch(&stop, EventSource::Stop, EventFlags::IN))
            .and_then(|()| reactor.watch(store.reclaimer().reports(), EventSource::Closed, EventFlags::IN))
            .and_then(|()| match &supervised {
                Some(supervised) => {
                    reactor.watch(supervised.poke(), EventSource::Poke, EventFlags::IN | EventFlags::ET)
                }
                None => Ok(()),
            })
            .map_err(failed("watch the listening socket"))?;
        let about = About {
            pid: std::process::id(),
            uid: own_user(),
            supervisor: None,
            restarts,
            version: config.version,
            instance,
            started_at,
            log: config.log_path.map(|path| path.display().to_string()),
            limits: vec![
                (Limit::Bytes, limits.given.bytes),
                (Limit::Pinned(None), limits.given.pinned()),
                (Limit::Names, limits.given.names),
                (Limit::Fds, limits.fds),
                (Limit::Clients, limits.clients),
                (Limit::Message, limits.given.message as u64),
                (Limit::Waits, limits.given.waits),
                (Limit::WaitsOfMember, limits.given.member_waits),
                (Limit::Leases, limits.given.leases),
                (Limit::LeasesOfMember, limits.given.member_leases),
                (Limit::Timelines, limits.given.timelines),
                (Limit::Semaphores, limits.given.semaphores),
            ],
            highest_node: highest_node(),
            seats: [limits.operators(true), limits.operators(false)],
        };
        tracing::info!(
            domain = config.domain, socket = %acceptor.bound.file.path().display(), pid = about.pid, version = about.version,
            instance = about.instance, clients = limits.clients, fds = limits.fds, "listening"
        );
        let mut server = Self {
            reactor,
            _stop: stop,
            stopper,
            registry,
            acceptor,
            audit: Audit::default(),
            peers: Peers::new(members, limits.unclaimed),
            store,
            control,
            guarding: false,
            unproven_after: config.unproven_after,
            limits,
            about,
            supervised,
            replacement: None,
            memory_checks: MemoryChecks::new(config.checks_memory),
            is_carrying_out: false,
            settle: config.settle,
            idle_exit: config.idle_exit,
            idle_since: None,
            exit: None,
            buffer: vec![0; READ_BYTES],
        };
        let left = unfinished.map(|unfinished| server.resume_service(unfinished));
        server.write_snapshot();
        if let Some(supervised) = &server.supervised {
            supervised.page.set_ready();
        }
        if let Some(left) = left {
            server.close_left(left);
        }
        Ok(server)
    }

    /// Serves until the broker is stopped or has been idle for long enough.
    pub(crate) fn run(mut self) -> Result<Exit, RunError> {
        let mut events = Vec::with_capacity(EVENTS);
        let outcome = loop {
            self.note_idleness();
            if let Some(supervised) = &self.supervised {
                supervised.page.turn();
            }
            if let Some(exit) = self.exit {
                break Ok(exit);
            }
            if self.hand_over() {
                // What is open stays open.
                std::mem::forget(self);
                return Ok(Exit::HandedOver);
            }
            self.discard_timers();
            if self.supervised.as_ref().is_some_and(Supervised::wants_snapshot) {
                self.write_snapshot();
            }
            self.control.begin_turn();
            let limit = if self.control.is_clearing() || !self.peers.unfinished.is_empty() {
                Some(Duration::ZERO)
            } else {
                (!self.peers.parked.is_empty()).then_some(UNPARK)
            };
            if let Err(errno) = self.reactor.wait(&mut events, limit) {
                break Err(RunError(errno.into()));
            }
            for event in &events {
                let token = event.data.u64();
                let flags = event.flags;
                self.on_event(EventSource::of(token), flags);
            }
            self.serve();
            self.unpark();
            while let Some(timer) = self.reactor.pop_due() {
                self.on_timer(timer);
            }
            let effects = self.clear();
            self.carry_out(effects);
        };
        if let (Err(error), Some(supervised)) = (&outcome, &self.supervised) {
            supervised.page.set_reason(error);
        }
        self.finish();
        outcome
    }

    /// Returns the file descriptor to which any byte can be written to end the broker.
    pub(crate) fn stopper(&self) -> BorrowedFd<'_> {
        self.stopper.as_fd()
    }

    pub(crate) fn instance(&self) -> u64 {
        self.about.instance
    }

    fn on_event(&mut self, source: EventSource, flags: EventFlags) {
        match source {
            EventSource::Listener => self.accept(),
            EventSource::Stop => {
                tracing::info!("asked to stop by a signal");
                self.exit = Some(Exit::Signalled);
            }
            // The turn of the loop is the sign of life that the supervisor wants.
            EventSource::Poke => self.on_poke(),
            EventSource::Answer => self.check_program(Replacement::on_answer),
            EventSource::MemoryCheck => self.check_memory(MemoryChecks::on_answer),
            EventSource::Exit(member) => self.on_exit(member),
            EventSource::Closed => {
                for id in self.store.reclaimer().closed() {
                    self.apply(Event::Closed { id });
                }
            }
            EventSource::Socket(channel, id) => {
                if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    self.peers.discard(&mut self.reactor, id, channel);
                    self.peers.readable.push(id);
                    return;
                }
                if flags.contains(EventFlags::IN) {
                    self.peers.readable.push(id);
                }
                if flags.contains(EventFlags::OUT) {
                    self.flush(id, channel);
                }
            }
        }
    }

    /// Discards timers of completed handshakes and of withdrawals that are over, and the idle timer if the broker is
    /// not idle any more.
    fn discard_timers(&mut self) {
        let connections = &self.peers.connections;
        let idle = self.idle_since.is_some();
        let registry = &self.registry;
        self.reactor.discard_timers(|timer| match timer {
            Timer::Handshake(id) => connections.get(&id).is_none_or(|c| c.phase() != Phase::Handshake),
            Timer::Deadline(id) => !registry.awaits(id),
            Timer::Idle => !idle,
            Timer::Settle(_)
            | Timer::Quarantine(_)
            | Timer::Flush(_)
            | Timer::Accept
            | Timer::Guard
            | Timer::Answer
            | Timer::MemoryCheck
            | Timer::Unread => false,
        });
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Handshake(id) => {
                if self.peers.connections.get(&id).is_some_and(|c| c.phase() == Phase::Handshake) {
                    tracing::warn!(connection = id.0, "dropped: its handshake timed out");
                    self.drop_connection(id);
                }
            }
            Timer::Settle(member) => self.weigh(member),
            Timer::Quarantine(member) => self.apply(Event::Expired { member }),
            Timer::Deadline(id) => self.apply(Event::DeadlinePassed { id }),
            Timer::Flush(id) => {
                if let Some(connection) = self.peers.connections.get_mut(&id) {
                    connection.awaits_retry = false;
                }
                self.flush(id, Channel::Call);
                self.flush(id, Channel::Events);
            }
            Timer::Accept => self.acceptor.resume(&self.reactor),
            Timer::Unread => {
                self.peers.in_flight.settle();
                self.peers.watch_unread(&mut self.reactor);
            }
            Timer::Guard => {
                let effects = self.guard_cells();
                self.carry_out(effects);
            }
            Timer::Idle => self.leave_if_idle(),
            Timer::Answer => self.check_program(Replacement::end_if_late),
            Timer::MemoryCheck => self.check_memory(MemoryChecks::on_timer),
        }
    }

    /// Looks after what other processes may have changed, because the supervisor has asked for a sign of life.
    fn on_poke(&mut self) {
        let is_new = self.acceptor.follow_listener(&self.reactor);
        let Some(supervised) = &mut self.supervised else { return };
        supervised.on_poke(is_new, self.acceptor.lost());
        if self.about.log.as_ref().is_some_and(|log| !Path::new(log).exists()) {
            // This line is the first one of the next file.
            tracing::info!("the former log was renamed or removed");
        }
    }

    /// Goes on with the checks of memory, and ends what is lost.
    fn check_memory(&mut self, step: fn(&mut MemoryChecks, &mut Reactor) -> Option<Event>) {
        if let Some(lost) = step(&mut self.memory_checks, &mut self.reactor) {
            self.apply(lost);
        }
        let memory = Memory { reactor: &mut self.reactor, registry: &self.registry, store: &self.store };
        self.memory_checks.go_on(memory);
    }

    /// Sends pending output of a client.
    fn flush(&mut self, id: ConnectionId, channel: Channel) {
        if let Err(broken) = self.peers.flush(&mut self.reactor, id, channel) {
            self.hang_up(id, &broken.to_string());
        }
    }
}

/// What a server begins with.
struct Beginning {
    started_at: u64,
    registry: Registry,
    store: FdStore,
    control: Control,
    members: Membership,
}

fn bounds(limits: &Resolved) -> Bounds {
    Bounds {
        user: own_user(),
        own: limits.quota(true),
        guests: limits.quota(false),
        members: limits.clients,
        rows: MAX_ROWS as u64,
        bytes: limits.given.bytes,
        pinned: limits.given.pinned(),
        names: limits.given.names,
        fds: limits.fds,
        waits: limits.given.waits,
        member_waits: limits.given.member_waits,
        log: WATCH_LOG,
        leases: limits.given.leases,
        member_leases: limits.given.member_leases,
        chunks: MAX_CHUNKS as u64,
        growths: MAX_GROWTHS,
        timelines: limits.given.timelines,
        slabs: u64::from(MAX_SLABS),
        cells: u64::from(CELLS),
        rest: REST,
        semaphores: limits.given.semaphores,
        attachments: MAX_ATTACHMENTS,
    }
}

/// Numbers of connections are never used twice, not even by different workers: each has 2^32 of them.
const WORKER_SHIFT: u32 = 32;

/// Bytes of one read. Nearly every message fits.
const READ_BYTES: usize = 64 * 1024;

/// Events taken from the kernel at once.
const EVENTS: usize = 256;

/// Number of resting cells before the first of them is reused. If a member gives back a lease before its streams are
/// done, a late store then most likely hits a cell that is still unused.
const REST: u64 = 512;

/// Bytes of events that are kept for watchers: several thousand events.
const WATCH_LOG: u64 = 1 << 20;
