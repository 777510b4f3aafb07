//! The loop: waits for the kernel, feeds the registry, carries out its effects.
//!
//! One request costs one wait, one read and one write; everything else here is for when something goes wrong.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant, SystemTime},
};

use partywall_os::{Errno, process::raise_fd_limit, socket};
use partywall_shm::{members::MAX_ROWS, timeline::CELLS};
use partywall_wire::{
    Limit,
    limits::{MAX_CHUNKS, MAX_GROWTHS, MAX_SLABS},
};
use rustix::{
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    Config, Exit, RunError, StartError,
    bind::Place,
    config::Resolved,
    registry::{Bounds, Effect, Event, MemberId, Registry},
    server::{
        connection::{Broken, Channel, Connection, ConnectionId, Phase, Read, Sent},
        control::Control,
        fds::FdStore,
        ids::IdMap,
        in_flight::{InFlight, ProcessKey},
        membership::Membership,
        reclaimer::Reclaimer,
        requests::{Parked, UNPARK},
        timers::{Timer, Timers},
        translate::About,
    },
};

/// A broker that listens.
#[derive(Debug)]
pub(crate) struct Server {
    pub(super) epoll: OwnedFd,
    pub(super) place: Place,
    /// A pipe through which any byte ends the broker. The end that is read stays open because it is watched.
    _stop: OwnedFd,
    stopper: OwnedFd,
    pub(super) registry: Registry,
    pub(super) store: FdStore,
    pub(super) control: Control,
    /// What is closed once all permits and blocks of the dead are back, and who is told of that.
    pub(super) behind_permits: Vec<Effect>,
    pub(super) members: Membership,
    pub(super) connections: IdMap<ConnectionId, Connection>,
    /// Connections that have sent something since they had their turn.
    readable: Vec<ConnectionId>,
    /// Connections whose messages did not all get their turn.
    unfinished: BTreeSet<ConnectionId>,
    pub(super) in_flight: InFlight,
    /// Messages that wait until they can be answered with descriptors, the longest first.
    pub(super) parked: VecDeque<Parked>,
    /// Connections that have not said yet who they are, the oldest first, their processes, and since when.
    pub(super) unauthenticated: BTreeMap<ConnectionId, (ProcessKey, Instant)>,
    pub(super) last_connection: u64,
    pub(super) timers: Timers,
    pub(super) reclaimer: Reclaimer,
    /// Given up for a moment to refuse a connection when no other file descriptor is left.
    pub(super) spare: Option<OwnedFd>,
    /// Whether the kernel tells us of new connections.
    pub(super) accepting: bool,
    /// Whether a timer is set for unread descriptors.
    watching_unread: bool,
    /// Whether a timer is set for cells that have to be guarded.
    pub(super) guarding: bool,
    pub(super) limits: Resolved,
    pub(super) about: About,
    pub(super) settle: Duration,
    pub(super) unproven_after: Option<Duration>,
    pub(super) handshake_timeout: Duration,
    pub(super) idle_exit: Option<Duration>,
    pub(super) idle_since: Option<Instant>,
    pub(super) exit: Option<Exit>,
    /// Reused by every read.
    buffer: Vec<u8>,
}

impl Server {
    pub(crate) fn bind(config: Config) -> Result<Self, StartError> {
        let failed = StartError::errno;
        let limits = config.limits.resolve(raise_fd_limit())?;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed("make an epoll instance"))?;
        let (stop, stopper) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(failed("make a pipe for the stop signal"))?;
        let spare = spare().map_err(failed("open a spare file descriptor"))?;
        let mut instance = [0; 8];
        random(&mut instance).map_err(failed("draw random numbers"))?;
        let reclaimer = Reclaimer::start()
            .map_err(|errno| StartError::Errno { what: "start the reclaimer thread".into(), errno })?;
        let control = Control::create(&reclaimer).map_err(failed("make the members' rows"))?;
        let place = Place::take(&config.socket, config.starter_holds_lock)?;
        let watched = epoll::add(&epoll, &place.listener, Source::Listener.data(), EventFlags::IN)
            .and_then(|()| epoll::add(&epoll, &stop, Source::Stop.data(), EventFlags::IN))
            .and_then(|()| epoll::add(&epoll, reclaimer.reports(), Source::Closed.data(), EventFlags::IN));
        if let Err(errno) = watched {
            place.file.remove();
            return Err(failed("watch the listening socket")(errno));
        }
        let about = About {
            pid: std::process::id(),
            version: config.version,
            instance: u64::from_le_bytes(instance),
            started_at: now(),
            log: config.log_path.map(|path| path.display().to_string()),
            limits: vec![
                (Limit::Bytes, limits.bytes),
                (Limit::Names, limits.names),
                (Limit::Fds, limits.fds),
                (Limit::Clients, limits.clients),
                (Limit::Message, limits.message as u64),
                (Limit::Waits, limits.waits),
                (Limit::Leases, limits.leases),
                (Limit::Timelines, limits.timelines),
                (Limit::Semaphores, limits.semaphores),
            ],
        };
        tracing::info!(
            domain = config.domain, socket = %place.file.path().display(), pid = about.pid, version = about.version,
            instance = about.instance, clients = limits.clients, fds = limits.fds, "listening"
        );
        Ok(Self {
            epoll,
            place,
            _stop: stop,
            stopper,
            registry: Registry::new(Bounds {
                members: limits.clients,
                rows: MAX_ROWS as u64,
                bytes: limits.bytes,
                names: limits.names,
                fds: limits.fds,
                waits: limits.waits,
                log: WATCH_LOG,
                leases: limits.leases,
                chunks: MAX_CHUNKS as u64,
                growths: MAX_GROWTHS,
                timelines: limits.timelines,
                slabs: u64::from(MAX_SLABS),
                cells: u64::from(CELLS),
                rest: REST,
                semaphores: limits.semaphores,
            }),
            store: FdStore::default(),
            control,
            behind_permits: Vec::new(),
            members: Membership::default(),
            connections: IdMap::default(),
            readable: Vec::new(),
            unfinished: BTreeSet::new(),
            in_flight: InFlight::default(),
            parked: VecDeque::new(),
            unauthenticated: BTreeMap::new(),
            last_connection: 0,
            timers: Timers::default(),
            reclaimer,
            spare: Some(spare),
            accepting: true,
            watching_unread: false,
            guarding: false,
            limits,
            about,
            settle: config.settle,
            unproven_after: config.unproven_after,
            handshake_timeout: config.handshake_timeout,
            idle_exit: config.idle_exit,
            idle_since: None,
            exit: None,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Serves until somebody ends it or nobody needs it.
    pub(crate) fn run(mut self) -> Result<Exit, RunError> {
        let mut events = Vec::with_capacity(EVENTS);
        let outcome = loop {
            self.note_idleness();
            if let Some(exit) = self.exit {
                break Ok(exit);
            }
            self.discard_timers();
            self.control.begin_turn();
            let more = self.control.is_clearing() || !self.unfinished.is_empty();
            let pause = match self.timers.wait() {
                _ if more => Some(Duration::ZERO),
                wait if self.parked.is_empty() => wait,
                wait => Some(wait.map_or(UNPARK, |wait| wait.min(UNPARK))),
            };
            let timeout = pause.map(socket::timespec);
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => break Err(RunError(errno.into())),
            }
            for event in &events {
                let token = event.data.u64();
                let flags = event.flags;
                self.on_event(Source::of(token), flags);
            }
            self.serve();
            self.unpark();
            while let Some(timer) = self.timers.pop_due() {
                self.on_timer(timer);
            }
            let effects = self.clear();
            self.carry_out(effects);
        };
        self.finish();
        outcome
    }

    /// A file descriptor to which any byte may be written to end the broker.
    pub(crate) fn stopper(&self) -> BorrowedFd<'_> {
        self.stopper.as_fd()
    }

    pub(crate) fn instance(&self) -> u64 {
        self.about.instance
    }

    fn on_event(&mut self, source: Source, flags: EventFlags) {
        match source {
            Source::Listener => self.accept(),
            Source::Stop => {
                tracing::info!("asked to stop by a signal");
                self.exit = Some(Exit::Signalled);
            }
            Source::Exit(member) => self.on_exit(member),
            Source::Closed => {
                for id in self.reclaimer.closed() {
                    self.apply(Event::Closed { id });
                }
            }
            Source::Socket(channel, id) => {
                if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    self.discard(id, channel);
                    self.readable.push(id);
                    return;
                }
                if flags.contains(EventFlags::IN) {
                    self.readable.push(id);
                }
                if flags.contains(EventFlags::OUT) {
                    self.flush(id, channel);
                }
            }
        }
    }

    /// Forgets handshakes that are over, and idleness that has ended.
    fn discard_timers(&mut self) {
        let connections = &self.connections;
        let idle = self.idle_since.is_some();
        self.timers.discard(|timer| match timer {
            Timer::Handshake(id) => connections.get(&id).is_none_or(|c| c.phase() != Phase::Handshake),
            Timer::Idle => !idle,
            Timer::Settle(_)
            | Timer::Quarantine(_)
            | Timer::Flush(_)
            | Timer::Accept
            | Timer::Guard
            | Timer::Unread => false,
        });
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Handshake(id) => {
                if self.connections.get(&id).is_some_and(|c| c.phase() == Phase::Handshake) {
                    tracing::warn!(connection = id.0, "dropped: it did not say in time who it is");
                    self.drop_connection(id);
                }
            }
            Timer::Settle(member) => self.weigh(member),
            Timer::Quarantine(member) => self.apply(Event::Expired { member }),
            Timer::Flush(id) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.awaits_retry = false;
                }
                self.flush(id, Channel::Call);
                self.flush(id, Channel::Events);
            }
            Timer::Accept => self.resume_accepting(),
            Timer::Unread => {
                self.in_flight.settle();
                self.watch_unread();
            }
            Timer::Guard => {
                let effects = self.guard_cells();
                self.carry_out(effects);
            }
            Timer::Idle => self.leave_if_idle(),
        }
    }

    /// Does what clients ask for, those first that have cost the least recently, until the turn is over. So a client that
    /// asks now and then waits for one turn at most, however many others ask without pause.
    fn serve(&mut self) {
        if self.unfinished.is_empty() && self.readable.len() <= 1 {
            // With nobody else to be answered the order is no question.
            if let Some(id) = self.readable.pop() {
                self.hear(id);
            }
            return;
        }
        let readable: BTreeSet<_> = self.readable.drain(..).collect();
        let now = Instant::now();
        let mut turn: Vec<_> = readable
            .union(&self.unfinished)
            .filter_map(|id| Some((self.connections.get(id)?.recent_cost(now), *id)))
            .collect();
        turn.sort_unstable();
        self.unfinished.retain(|id| self.connections.contains_key(id));
        let mut last = now;
        for (_, id) in turn {
            if readable.contains(&id) {
                self.hear(id);
            } else if self.unfinished.remove(&id) {
                self.go_on(id);
            }
            let done = Instant::now();
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.charge(done - last, done);
            }
            if done - now >= TURN {
                // The kernel reports those again that still have something to be read.
                return;
            }
            last = done;
        }
    }

    /// Reads what a client has sent and does it. One that has closed its events socket may have said good-bye on the other
    /// one before; as long as it goes on there, it is a client like others.
    pub(super) fn hear(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let is_half = connection.is_closed(Channel::Events);
        let thoroughness = if is_half { Thoroughness::Final } else { Thoroughness::Usual };
        if self.on_readable(id, thoroughness) && is_half {
            self.hang_up(id, "its events socket has ended");
        }
    }

    /// Reads what a client has sent and does it, as much as one turn allows. Whether nothing is left to read.
    fn on_readable(&mut self, id: ConnectionId, thoroughness: Thoroughness) -> bool {
        if self.unfinished.remove(&id) && !self.go_on(id) {
            return false;
        }
        // Taken out for the time of its use, because what it brings concerns all of `self`.
        let mut buffer = std::mem::take(&mut self.buffer);
        let drained = self.read_and_do(id, thoroughness, &mut buffer);
        self.buffer = buffer;
        drained
    }

    fn read_and_do(&mut self, id: ConnectionId, thoroughness: Thoroughness, buffer: &mut [u8]) -> bool {
        for _ in 0..READS_IN_TURN {
            let Some(connection) = self.connections.get_mut(&id) else { return true };
            if connection.is_busy() {
                return true;
            }
            match connection.read(buffer) {
                Ok(Read::Nothing) => return true,
                Ok(Read::End) => {
                    self.on_end(id);
                    return true;
                }
                Ok(Read::Bytes { full }) => {
                    if !self.go_on(id) {
                        return false;
                    }
                    // A full buffer is the sign that more is waiting; else asking would cost a call for nothing.
                    if !full && thoroughness == Thoroughness::Usual {
                        return false;
                    }
                }
                Err(broken) => {
                    self.hang_up(id, &broken.to_string());
                    return true;
                }
            }
        }
        false
    }

    /// Does what the messages say that have been read, as many as one turn allows. Whether that was all.
    fn go_on(&mut self, id: ConnectionId) -> bool {
        let begun = Instant::now();
        for _ in 0..MESSAGES_IN_TURN {
            let Some(connection) = self.connections.get_mut(&id).filter(|_| self.exit.is_none()) else { return true };
            let phase = connection.phase();
            if connection.is_busy() {
                // Its next message has its turn when this one is answered.
                return true;
            }
            if matches!(phase, Phase::Lingering(_)) {
                connection.take_received().into_iter().for_each(|fd| drop(self.reclaimer.keep(fd)));
                return true;
            }
            match (connection.next_message(), phase) {
                (Ok(None), _) => return true,
                (Ok(Some(message)), Phase::Member(member)) => self.on_request(id, member, message),
                (Ok(Some(message)), _) => self.on_hello(id, message),
                (Err(broken), _) => {
                    self.hang_up(id, &broken.to_string());
                    return true;
                }
            }
            if begun.elapsed() >= SLICE {
                break;
            }
        }
        self.unfinished.insert(id);
        false
    }

    /// Looks for further messages of a client when others have had their turn.
    pub(super) fn go_on_later(&mut self, id: ConnectionId) {
        self.unfinished.insert(id);
    }

    /// Goes on sending what waits for a client.
    fn flush(&mut self, id: ConnectionId, channel: Channel) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let sent = connection.flush(channel, &mut self.in_flight);
        if let Err(broken) = self.after_sending(id, channel, sent) {
            self.hang_up(id, &broken.to_string());
        } else if channel == Channel::Call {
            // Requests that came meanwhile were left until now.
            self.go_on_later(id);
        }
    }

    /// Gives up what waits for a client that no longer reads.
    fn discard(&mut self, id: ConnectionId, channel: Channel) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.discard(channel, &mut self.in_flight);
        // As if it had read everything. The socket is known to the kernel, so this does not fail.
        let _ = self.after_sending(id, channel, Ok(Sent::All));
    }

    /// Looks again later for descriptors that have been read, as long as some are not.
    pub(super) fn watch_unread(&mut self) {
        self.watching_unread = !self.in_flight.is_empty();
        if self.watching_unread {
            self.timers.set(Instant::now() + SETTLE_UNREAD, Timer::Unread);
        }
    }

    /// Arranges for the rest to be sent, if there is a rest.
    pub(super) fn after_sending(
        &mut self,
        id: ConnectionId,
        channel: Channel,
        sent: Result<Sent, Broken>,
    ) -> Result<(), Broken> {
        let sent = sent?;
        if !self.watching_unread {
            self.watch_unread();
        }
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        if sent == Sent::NoRoom && !std::mem::replace(&mut connection.awaits_retry, true) {
            self.timers.set(Instant::now() + RETRY, Timer::Flush(id));
        }
        if let Some(interest) = connection.change_of_interest(channel, sent)
            && let Some(socket) = connection.socket(channel)
        {
            epoll::modify(&self.epoll, socket, Source::Socket(channel, id).data(), interest)?;
        }
        Ok(())
    }

    /// Feeds the registry and does what it says.
    pub(super) fn apply(&mut self, event: Event) {
        let effects = self.registry.apply(event, now());
        self.carry_out(effects);
    }
}

/// How far to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thoroughness {
    /// As far as is likely to bring something.
    Usual,
    /// Until the kernel says that nothing is left.
    Final,
}

/// What an event of the kernel is about. Numbers are never used twice, so an event that was waiting when its source was
/// given up finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Listener,
    Stop,
    /// What was to be closed is.
    Closed,
    Socket(Channel, ConnectionId),
    Exit(MemberId),
}

impl Source {
    fn of(token: u64) -> Self {
        let id = token >> 2;
        match token & 3 {
            0 => Self::Socket(Channel::Call, ConnectionId(id)),
            1 => Self::Socket(Channel::Events, ConnectionId(id)),
            2 => Self::Exit(MemberId(id)),
            _ if id == 0 => Self::Listener,
            _ if id == 1 => Self::Stop,
            _ => Self::Closed,
        }
    }

    pub(super) fn data(self) -> EventData {
        EventData::new_u64(match self {
            Self::Socket(Channel::Call, id) => id.0 << 2,
            Self::Socket(Channel::Events, id) => id.0 << 2 | 1,
            Self::Exit(member) => member.0 << 2 | 2,
            Self::Listener => 3,
            Self::Stop => 1 << 2 | 3,
            Self::Closed => 2 << 2 | 3,
        })
    }
}

/// Bytes of events that are kept for those who watch: some thousand.
const WATCH_LOG: u64 = 1 << 20;

/// A file descriptor without a use.
pub(super) fn spare() -> Result<OwnedFd, Errno> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
}

/// Fills `bytes` with random ones.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), Errno> {
    // Up to 256 bytes come whole, once the kernel has gathered entropy at boot (getrandom(2)).
    rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()).map(drop)
}

/// Milliseconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Bytes of one read. Nearly every message fits.
const READ_BYTES: usize = 64 * 1024;

/// Full reads of one client before others have their turn.
const READS_IN_TURN: usize = 8;

/// Messages of one client before others have their turn. A correct library sends one, and waits for its answer.
const MESSAGES_IN_TURN: usize = 32;

/// After this long others have their turn, however much the messages of a client cost.
const SLICE: Duration = Duration::from_micros(100);

/// After this long the kernel is asked who else has sent something.
const TURN: Duration = Duration::from_micros(300);

/// Events taken from the kernel at once.
const EVENTS: usize = 256;

/// Cells of timelines that rest before the first of them is used again. Whoever forgets to wait for its streams before it
/// gives a lease back harms nobody, most of the time.
const REST: u64 = 512;

/// How often to find out which descriptors have been read, where nothing depends on it.
const SETTLE_UNREAD: Duration = Duration::from_secs(1);

/// How long to wait where the kernel does not tell when it has room again.
pub(super) const RETRY: Duration = Duration::from_millis(100);
