//! The supervisor: keeps a domain alive when the process that serves it dies.
//!
//! The supervisor binds the socket and then starts the *worker*, a copy of itself that shares its table of file
//! descriptors and does everything else. If the worker is killed, panics or hangs, the supervisor starts the next one. The
//! descriptors that the former worker held are still open, and the journal (`journal`) says what they are.
//!
//! The supervisor has one thread. Once the worker runs, it opens, closes and allocates nothing: a copy of it is what the
//! next worker begins as.

use std::{
    collections::BTreeSet,
    os::fd::{OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    map::{Part, SharedMap},
    memfd::Draft,
    process::raise_fd_limit,
    supervision::{LeftOpen, WaitedSignals, open_numbers},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    io,
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid},
};

use crate::{Broker, Config, Exit, StartError, bind::Place, config::Resolved, journal::Journal, server::Supervised};

/// A domain whose broker is restarted when it dies.
#[derive(Debug)]
pub struct Supervisor {
    /// What each worker begins with. Taken only in the copy that becomes a worker.
    worker: Option<Worker>,
    page: Page,
    /// Wakes the worker's loop.
    poke: Arc<OwnedFd>,
    signals: WaitedSignals,
}

/// A process that is to serve a domain, before it starts to.
#[derive(Debug)]
pub struct Worker {
    config: Config,
    limits: Resolved,
    place: Place,
    supervised: Supervised,
    /// The numbers of the descriptors that the supervisor has open.
    of_supervisor: BTreeSet<RawFd>,
}

/// Why a supervised domain ended, if neither a member nor a signal ended it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SupervisorError {
    /// A system call failed.
    #[error("{what}: {errno}")]
    System {
        /// The action that failed.
        what: &'static str,
        /// The reason.
        #[source]
        errno: std::io::Error,
    },
    /// The worker ended before it served.
    #[error("the broker's worker {0} while it started")]
    NotStarted(Death),
    /// The worker could not wait for events, or could not continue what its predecessor did.
    #[error("the broker's worker cannot continue; its log has the reason")]
    CannotContinue,
    /// Workers died again and again without serving any request.
    #[error("{deaths} workers of the broker died in a row without answering a request; the last one {last}")]
    Deaths {
        /// How many.
        deaths: u64,
        /// How the last of them ended.
        last: Death,
    },
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// By a signal.
    Signal(i32),
    /// By itself, with an exit code that stands for nothing.
    Code(i32),
}

impl std::fmt::Display for Death {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Self::Code(code) => write!(f, "exited with code {code}"),
        }
    }
}

impl Supervisor {
    /// Listens where members look for the broker of `config`'s domain, or takes `listener` from a service manager, as
    /// [`Broker::bind`] does. Starts no process. From now on SIGTERM and SIGINT wait for [`Supervisor::run`].
    ///
    /// # Errors
    /// [`StartError`]. A failed bind changes nothing.
    pub fn bind(config: Config, listener: Option<OwnedFd>) -> Result<Self, StartError> {
        let failed = StartError::errno;
        let limits = config.limits.resolve(raise_fd_limit())?;
        let page = Page::create().map_err(failed("make the page of the supervisor"))?;
        let journal = Journal::create().map_err(failed("make the journal"))?;
        let poke = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed("make an eventfd"))?;
        let poke = Arc::new(poke);
        let signals = WaitedSignals::block(&[Signal::CHILD, Signal::TERM, Signal::INT]);
        let signals = signals.map_err(failed("block signals"))?;
        let place = Place::for_broker(&config, listener)?;
        let supervised = Supervised::new(journal, page.clone(), Arc::clone(&poke), std::process::id());
        let worker = Worker { config, limits, place, supervised, of_supervisor: BTreeSet::new() };
        Ok(Self { worker: Some(worker), page, poke, signals })
    }

    /// Starts workers until one of them ends the domain.
    ///
    /// `fork` is [`fork_sharing_files`](partywall_os::supervision::fork_sharing_files), which the caller calls because it
    /// is unsafe. `serve` runs in a worker: it calls [`Worker::start`] and [`Broker::run`], and returns
    /// [`exit_code`] of the result. `ready` runs in the supervisor with the first worker's pid, once that serves. It may close
    /// the descriptor `until_ready`, whose number the worker may then use.
    ///
    /// # Errors
    /// [`SupervisorError`]. The socket's file is removed then, too.
    pub fn run(
        mut self,
        fork: impl Fn(&mut dyn FnMut() -> u8) -> Result<Pid, Errno>,
        mut serve: impl FnMut(Worker) -> u8,
        ready: impl FnOnce(u32),
        until_ready: Option<RawFd>,
    ) -> Result<Exit, SupervisorError> {
        let failed = |what| move |errno: Errno| SupervisorError::System { what, errno: errno.into() };
        let mut numbers = open_numbers().map_err(failed("list the open files"))?;
        if let Some(closed) = until_ready {
            numbers.remove(&closed);
        }
        if let Some(worker) = &mut self.worker {
            worker.of_supervisor = numbers;
        }
        let mut ready = Some(ready);
        let mut stop = None;
        let ended = loop {
            let worker = &mut self.worker;
            let signals = &self.signals;
            let started = fork(&mut || {
                signals.unblock();
                // Only this copy takes it: the supervisor's memory is not this memory.
                worker.take().map_or(CANNOT_CONTINUE, &mut serve)
            });
            let pid = match started {
                Ok(pid) => pid,
                Err(errno) => break Err(failed("start the worker")(errno)),
            };
            let death = match self.watch(pid, &mut stop, &mut ready) {
                // It has removed the socket's file.
                Ok(WorkerEnd::Exited(code)) => match decode(code) {
                    Some(outcome @ Ok(_)) => {
                        std::mem::forget(self.worker);
                        return outcome;
                    }
                    Some(outcome) => break outcome,
                    None => Death::Code(code.into()),
                },
                Ok(WorkerEnd::Died(death)) => death,
                Err(errno) => break Err(failed("wait for the worker")(errno)),
            };
            if self.page.is_ending() || stop.is_some() {
                break Ok(Exit::Signalled);
            }
            if ready.is_some() {
                break Err(SupervisorError::NotStarted(death));
            }
            if self.page.is_unrecorded() {
                break Err(SupervisorError::CannotContinue);
            }
            let deaths = self.page.add_death(death);
            if deaths >= MAX_DEATHS {
                break Err(SupervisorError::Deaths { deaths, last: death });
            }
            // What a worker lacked may be there a moment later.
            if deaths > 1
                && let Ok(Some(signal)) = self.signals.wait(PAUSE)
            {
                stop = [Signal::TERM, Signal::INT].into_iter().find(|wanted| wanted.as_raw() == signal);
            }
        };
        // The worker was killed before it could remove it.
        if let Some(worker) = &self.worker {
            worker.place.file.remove();
        }
        // Descriptors that a worker dropped when it ended the domain are closed here, too.
        std::mem::forget(self.worker);
        ended
    }

    /// Waits until the worker has ended. Passes signals on, and kills a worker that has been silent for too long.
    fn watch(
        &self,
        pid: Pid,
        stop: &mut Option<Signal>,
        ready: &mut Option<impl FnOnce(u32)>,
    ) -> Result<WorkerEnd, Errno> {
        let mut silence = Silence::new(&self.page);
        if let Some(signal) = *stop {
            let _ = kill_process(pid, signal);
        }
        loop {
            let pause = if ready.is_some() { STARTING } else { PULSE };
            let signal = self.signals.wait(pause)?;
            // Before the worker's end is noticed: no other worker is started then.
            for wanted in [Signal::TERM, Signal::INT] {
                if signal == Some(wanted.as_raw()) {
                    *stop = Some(wanted);
                    // The pid is the worker's until it has been waited for, below.
                    let _ = kill_process(pid, wanted);
                }
            }
            // Other children do not exist, and several of their signals may have become one.
            if let Some((_, status)) = io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::NOHANG))? {
                return Ok(WorkerEnd::of(status));
            }
            if self.page.is_ready()
                && let Some(ready) = ready.take()
            {
                ready(u32::try_from(pid.as_raw_nonzero().get()).unwrap_or_default());
            }
            if ready.is_none() && signal.is_none() && silence.is_too_long(&self.page) {
                let _ = kill_process(pid, Signal::KILL);
            }
            if signal.is_none() && ready.is_none() {
                // A full counter has the same effect.
                let _ = io::write(&self.poke, &1_u64.to_ne_bytes());
            }
        }
    }
}

impl Worker {
    /// Returns the numbers of the descriptors that belong to the supervisor. The worker owns none of them alone.
    pub fn of_supervisor(&self) -> &BTreeSet<RawFd> {
        &self.of_supervisor
    }

    /// Returns how often the broker was restarted, and how the last worker ended.
    pub fn restarts(&self) -> (u64, Option<Death>) {
        self.supervised.page.restarts()
    }

    /// Starts to serve: the domain as it begins, or as the former worker left it. `left` is what that worker had open.
    ///
    /// # Errors
    /// [`StartError`], [`StartError::Journal`] if the former worker's state cannot be restored.
    pub fn start(self, left: LeftOpen) -> Result<Broker, StartError> {
        let Self { config, limits, place, supervised, .. } = self;
        Broker::of_worker(config, limits, place, supervised, left)
    }
}

/// Returns the exit code of a worker that ends the domain for this reason.
pub fn exit_code(exit: Option<Exit>) -> u8 {
    match exit {
        Some(Exit::Stopped) => 0,
        Some(Exit::Signalled) => 1,
        Some(Exit::Idle) => 2,
        None => CANNOT_CONTINUE,
    }
}

fn decode(code: u8) -> Option<Result<Exit, SupervisorError>> {
    Some(match code {
        0 => Ok(Exit::Stopped),
        1 => Ok(Exit::Signalled),
        2 => Ok(Exit::Idle),
        CANNOT_CONTINUE => Err(SupervisorError::CannotContinue),
        _ => return None,
    })
}

/// How a worker ended, as the kernel reports it.
enum WorkerEnd {
    Exited(u8),
    Died(Death),
}

impl WorkerEnd {
    fn of(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => u8::try_from(code).map_or(Self::Died(Death::Code(code)), Self::Exited),
            (None, signal) => Self::Died(Death::Signal(signal.unwrap_or_default())),
        }
    }
}

/// How long the worker has been silent, measured in turns of the supervisor: if both are stopped, as by Ctrl-Z, neither
/// is silent.
struct Silence {
    turns: u64,
    pulses: u32,
    last: Instant,
}

impl Silence {
    fn new(page: &Page) -> Self {
        Self { turns: page.turns(), pulses: 0, last: Instant::now() }
    }

    /// Notes that another pulse has passed.
    fn is_too_long(&mut self, page: &Page) -> bool {
        let turns = page.turns();
        let was_stopped = self.last.elapsed() > 2 * PULSE;
        self.last = Instant::now();
        if turns != self.turns || was_stopped {
            self.turns = turns;
            self.pulses = 0;
            return false;
        }
        self.pulses += 1;
        self.pulses > MAX_SILENT_PULSES
    }
}

/// A page that the supervisor shares with its workers. Each word has one writer at a time, and none guards other memory,
/// so all accesses are relaxed: the next process sees them because fork(2) and waitpid(2) order them.
#[derive(Debug, Clone)]
pub(crate) struct Page(Arc<Part<AtomicU64>>);

/// The words of the page.
#[derive(Debug, Clone, Copy)]
enum Word {
    /// Whether a worker serves.
    Ready,
    /// Turns of the worker's loop.
    Turns,
    /// Deaths since the last answered request.
    Deaths,
    Restarts,
    /// How the last worker died: a signal, or 256 plus a code.
    LastDeath,
    /// The request that the worker handles: the member, or 0.
    Member,
    Request,
    /// The request that was handled at the last death.
    FormerMember,
    FormerRequest,
    /// Whether the domain ends.
    Ending,
    /// Whether something happened that the journal has no record of.
    Unrecorded,
}

impl Page {
    fn create() -> Result<Self, Errno> {
        let file = Draft::create("partywall:supervisor", 4096)?.share()?;
        let map = Arc::new(SharedMap::writable(file)?);
        map.part(0, 4096 / size_of::<AtomicU64>()).map(|words| Self(Arc::new(words))).ok_or(Errno::INVAL)
    }

    fn load(&self, word: Word) -> u64 {
        self.0[word as usize].load(Ordering::Relaxed)
    }

    fn store(&self, word: Word, value: u64) {
        self.0[word as usize].store(value, Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        self.load(Word::Ready) != 0
    }

    pub(crate) fn set_ready(&self) {
        self.store(Word::Ready, 1);
    }

    fn turns(&self) -> u64 {
        self.load(Word::Turns)
    }

    /// Notes that the worker's loop turns.
    pub(crate) fn turn(&self) {
        self.store(Word::Turns, self.turns().wrapping_add(1));
    }

    /// Records a death, and returns how many there were since the last answered request.
    fn add_death(&self, death: Death) -> u64 {
        let code = match death {
            Death::Signal(signal) => u64::from(signal.unsigned_abs()),
            Death::Code(code) => 256 + u64::from(code.unsigned_abs()),
        };
        self.store(Word::LastDeath, code);
        self.store(Word::Restarts, self.load(Word::Restarts) + 1);
        let deaths = self.load(Word::Deaths) + 1;
        self.store(Word::Deaths, deaths);
        deaths
    }

    pub(crate) fn restarts(&self) -> (u64, Option<Death>) {
        let restarts = self.load(Word::Restarts);
        let death = match self.load(Word::LastDeath) {
            code @ 256.. => Death::Code(i32::try_from(code - 256).unwrap_or_default()),
            signal => Death::Signal(i32::try_from(signal).unwrap_or_default()),
        };
        (restarts, (restarts > 0).then_some(death))
    }

    /// Notes which request the worker handles.
    pub(crate) fn begin_request(&self, member: u64, request: u64) {
        self.store(Word::Request, request);
        self.store(Word::Member, member);
    }

    pub(crate) fn end_request(&self) {
        self.store(Word::Member, 0);
    }

    /// Notes that a request was answered.
    pub(crate) fn answered(&self) {
        self.store(Word::Deaths, 0);
    }

    /// Returns the request that was handled at the last two deaths, if it was the same, and remembers the last one.
    pub(crate) fn twice_fatal(&self) -> Option<(u64, u64)> {
        let last = (self.load(Word::Member), self.load(Word::Request));
        let former = (self.load(Word::FormerMember), self.load(Word::FormerRequest));
        self.store(Word::FormerMember, last.0);
        self.store(Word::FormerRequest, last.1);
        self.store(Word::Member, 0);
        (last.0 != 0 && last == former).then_some(last)
    }

    fn is_ending(&self) -> bool {
        self.load(Word::Ending) != 0
    }

    pub(crate) fn set_ending(&self) {
        self.store(Word::Ending, 1);
    }

    fn is_unrecorded(&self) -> bool {
        self.load(Word::Unrecorded) != 0
    }

    pub(crate) fn set_unrecorded(&self) {
        self.store(Word::Unrecorded, 1);
    }
}

/// The exit code of a worker that cannot continue.
const CANNOT_CONTINUE: u8 = 3;

/// Deaths in a row, without an answered request, that end the domain.
const MAX_DEATHS: u64 = 5;

/// Pause before another worker is started, if one has died without having answered a request.
const PAUSE: Duration = Duration::from_millis(50);

/// How often the supervisor looks after its worker.
const PULSE: Duration = Duration::from_secs(5);

/// Pulses without a turn of the worker's loop after which it is killed: 30 s.
const MAX_SILENT_PULSES: u32 = 6;

/// How often the supervisor checks whether the first worker serves.
const STARTING: Duration = Duration::from_millis(1);
