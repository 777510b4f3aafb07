//! The supervisor: keeps a domain alive when the process that serves it dies.
//!
//! The supervisor binds the socket and then starts the *worker*, a copy of itself that shares its table of file
//! descriptors and does everything else. If the worker is killed, panics or hangs, the supervisor starts the next one.
//! The descriptors that the former worker held are still open, and the journal (`journal`) says what they are.
//!
//! A worker that cannot be started, or finds too little memory or no thread to continue with, is started again, for a
//! minute: nothing is lost meanwhile.
//!
//! The supervisor has one thread, because a copy of it is what the next worker begins as. While a worker runs, the
//! supervisor keeps nothing open that it had not open before; only `ready` may open something for a moment, such as a
//! socket of the service manager. It closes a descriptor only if the worker does not use that number. The supervisor is
//! also the process in which another program continues ([`replacement`]).

use std::{
    collections::BTreeSet,
    os::fd::{AsRawFd, OwnedFd, RawFd},
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
use partywall_shm::crash::point;
use rustix::{
    event::{EventfdFlags, eventfd},
    io,
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid},
};

use crate::{
    Broker, Config, Exit, StartError,
    bind::Place,
    config::Resolved,
    journal::Journal,
    replacement::{self, Continuation, Handover},
    server::Supervised,
};

/// A domain whose broker is restarted when it dies.
#[derive(Debug)]
pub struct Supervisor {
    /// What each worker begins with. Taken only in the copy that becomes a worker.
    worker: Option<Worker>,
    page: Page,
    /// Wakes the worker's loop.
    poke: Arc<OwnedFd>,
    signals: WaitedSignals,
    /// Whether this program continues for another one, which had a worker.
    continues: bool,
    /// The file of that program, until the first worker of this one serves.
    former: Option<OwnedFd>,
}

/// What a supervisor calls because it is unsafe, or because a test does it in another way.
#[derive(Debug)]
pub struct Calls<F, S, E> {
    /// [`fork_sharing_files`](partywall_os::supervision::fork_sharing_files).
    pub fork: F,
    /// Runs in a worker: calls [`Worker::start`] and [`Broker::run`], and returns [`exit_code`] of the result.
    pub serve: S,
    /// [`replacement::execute`].
    pub execute: E,
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

/// Blocks the signals that a supervisor waits for.
fn block_signals() -> Result<WaitedSignals, StartError> {
    WaitedSignals::block(&[Signal::CHILD, Signal::TERM, Signal::INT]).map_err(StartError::errno("block signals"))
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
        let signals = block_signals()?;
        let place = Place::for_broker(&config, listener)?;
        let supervised = Supervised::new(journal, page.clone(), Arc::clone(&poke), std::process::id());
        let worker = Worker { config, limits, place, supervised, of_supervisor: BTreeSet::new() };
        Ok(Self { worker: Some(worker), page, poke, signals, continues: false, former: None })
    }

    /// Continues in the process of a supervisor that has executed this program. `left` is what that had open. If this
    /// program cannot continue, `execute` executes the former one again.
    ///
    /// # Errors
    /// [`StartError`] if neither program can continue.
    pub fn resume(
        config: Config,
        continuation: Continuation,
        mut left: LeftOpen,
        execute: impl FnOnce(RawFd, Continuation) -> Errno,
    ) -> Result<Self, StartError> {
        let handover = Handover::read(continuation, &mut left)?;
        replacement::close_on_exec(open_numbers().map_err(StartError::errno("list the open files"))?);
        point("supervisor: handover read, nothing taken");
        let Handover { former, listener, ref file, journal: [first, second], page, poke, ref of_supervisor } = handover;
        let mut take = |number: RawFd| {
            let why = || format!("descriptor {number}, which the former program has left, is not open");
            left.take(number).ok_or_else(|| StartError::Journal { why: why() })
        };
        let place = Place { listener: take(listener)?, file: file.clone() };
        let journal = Journal::of([take(first)?, take(second)?]);
        let page = take(page)?;
        let poke = Arc::new(take(poke)?);
        let former_file = former.map(take).transpose()?;
        // Called while all of them are open.
        let mut execute = Some(execute);
        let mut failed = |error: StartError| {
            if let (Some(former), Some(execute)) = (former, execute.take()) {
                // Returns only if it fails, too.
                let _ = Handover { former: None, ..handover.clone() }.execute(former, execute);
            }
            error
        };
        let limits = config.limits.resolve(raise_fd_limit()).map_err(&mut failed)?;
        let signals = block_signals().map_err(&mut failed)?;
        let page = match Page::of(&page) {
            Ok(words) => Page { words, file: Arc::new(page) },
            Err(errno) => return Err(failed(StartError::errno("map the page of the supervisor")(errno))),
        };
        let mut of_supervisor = of_supervisor.clone();
        of_supervisor.extend(former);
        let supervised = Supervised::new(journal, page.clone(), Arc::clone(&poke), std::process::id());
        let worker = Worker { config, limits, place, supervised, of_supervisor };
        page.clear_ready();
        Ok(Self { worker: Some(worker), page, poke, signals, continues: true, former: former_file })
    }

    /// Starts workers until one of them ends the domain.
    ///
    /// `ready` runs in the supervisor with the first worker's pid, once that serves. It may close the descriptor
    /// `until_ready`, whose number the worker may then use.
    ///
    /// # Errors
    /// [`SupervisorError`]. The socket's file is removed then, too.
    pub fn run(
        mut self,
        calls: Calls<
            impl Fn(&mut dyn FnMut() -> u8) -> Result<Pid, Errno>,
            impl FnMut(Worker) -> u8,
            impl Fn(RawFd, Continuation) -> Errno,
        >,
        ready: impl FnOnce(u32),
        until_ready: Option<RawFd>,
    ) -> Result<Exit, SupervisorError> {
        let failed = |what| move |errno: Errno| SupervisorError::System { what, errno: errno.into() };
        let Calls { fork, mut serve, execute } = calls;
        if let Some(worker) = self.worker.as_mut().filter(|_| !self.continues) {
            worker.of_supervisor = open_numbers().map_err(failed("list the open files"))?;
            worker.of_supervisor.retain(|number| Some(*number) != until_ready);
        }
        let mut ready = Some(ready);
        let mut stop = None;
        // Since when workers have been lacking something.
        let mut lacking = None;
        let ended = loop {
            self.page.add_worker();
            let worker = &mut self.worker;
            let signals = &self.signals;
            let started = fork(&mut || {
                signals.unblock();
                // Only this copy takes it: the supervisor's memory is not this memory.
                worker.take().map_or(CANNOT_CONTINUE, &mut serve)
            });
            let ended = match started {
                Ok(pid) => self.watch(pid, &mut stop, &mut ready).map_err(failed("wait for the worker")),
                Err(errno) => Ok(WorkerEnd::Lacked(failed("start the worker")(errno))),
            };
            if self.page.is_ready() {
                self.forget_former();
            }
            let death = match ended {
                Ok(WorkerEnd::Exited(HANDED_OVER)) if stop.is_none() => {
                    point("supervisor: worker has handed over, nothing executed");
                    let refused = self.page.program().map(|program| self.replace(program, true, &execute));
                    self.page.set_refused(refused.unwrap_or(Errno::BADF));
                    lacking = None;
                    continue;
                }
                Ok(WorkerEnd::Lacked(error)) => {
                    let is_first = ready.is_some() && !self.continues;
                    if stop.is_some() {
                        break Ok(Exit::Signalled);
                    }
                    if is_first || lacking.get_or_insert_with(Instant::now).elapsed() >= LACKING {
                        self.go_back(&execute);
                        break Err(error);
                    }
                    self.page.add_lack();
                    self.pause(&mut stop);
                    continue;
                }
                // It has removed the socket's file.
                Ok(WorkerEnd::Exited(code)) => match decode(code) {
                    Some(outcome @ Ok(_)) => {
                        std::mem::forget(self.worker);
                        return outcome;
                    }
                    Some(outcome) => {
                        self.go_back(&execute);
                        break outcome;
                    }
                    None => Death::Code(code.into()),
                },
                Ok(WorkerEnd::Died(death)) => death,
                Err(error) => break Err(error),
            };
            if self.page.is_ending() || stop.is_some() {
                break Ok(Exit::Signalled);
            }
            lacking = None;
            self.page.clear_program();
            if ready.is_some() {
                if !self.continues {
                    break Err(SupervisorError::NotStarted(death));
                }
                self.go_back(&execute);
            }
            if self.page.is_unrecorded() {
                break Err(SupervisorError::CannotContinue);
            }
            let deaths = self.page.add_death(death);
            if deaths >= MAX_DEATHS {
                break Err(SupervisorError::Deaths { deaths, last: death });
            }
            // What a worker lacked may be there a moment later.
            if deaths > 1 {
                self.pause(&mut stop);
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

    /// Waits for a moment before the next worker, or for a signal that ends the domain.
    fn pause(&self, stop: &mut Option<Signal>) {
        if let Ok(Some(signal)) = self.signals.wait(PAUSE) {
            *stop = [Signal::TERM, Signal::INT].into_iter().find(|wanted| wanted.as_raw() == signal);
        }
    }

    /// Executes the former program again, unless a worker of this one has served. Returns only if that fails; then
    /// another worker of this program may serve.
    fn go_back(&self, execute: impl FnOnce(RawFd, Continuation) -> Errno) {
        if let Some(former) = self.former.as_ref().map(AsRawFd::as_raw_fd) {
            self.page.set_refused(Errno::CANCELED);
            let _ = self.replace(former, false, execute);
            let _ = self.page.take_handover();
        }
    }

    /// Executes a program in this process, with everything open; `may_return` leaves it a way back. Returns only if
    /// that fails, and then why.
    fn replace(&self, program: RawFd, may_return: bool, execute: impl FnOnce(RawFd, Continuation) -> Errno) -> Errno {
        let Some(worker) = &self.worker else { return Errno::INVAL };
        // Without /proc there is no way back.
        let former = if may_return { replacement::this_program().ok() } else { None };
        let mut of_supervisor = worker.of_supervisor.clone();
        of_supervisor.remove(&program);
        let handover = Handover {
            listener: worker.place.listener.as_raw_fd(),
            file: worker.place.file.clone(),
            journal: worker.supervised.journal.numbers(),
            page: self.page.file.as_raw_fd(),
            poke: self.poke.as_raw_fd(),
            former: former.as_ref().map(AsRawFd::as_raw_fd),
            of_supervisor,
        };
        handover.execute(program, execute)
    }

    /// Closes the file of the former program, because a worker of this one has served.
    fn forget_former(&mut self) {
        if let (Some(former), Some(worker)) = (self.former.take(), &mut self.worker) {
            worker.of_supervisor.remove(&former.as_raw_fd());
        }
    }

    /// Waits until the worker has ended. Passes signals on, and kills a worker that has been silent for too long.
    fn watch(
        &mut self,
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
                self.forget_former();
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

    /// Returns how often the broker was restarted after a death, and how the last worker that died ended.
    pub fn restarts(&self) -> (u64, Option<Death>) {
        self.supervised.page.restarts()
    }

    /// Returns how many workers the domain had before this one, those of former programs included.
    pub fn former_workers(&self) -> u64 {
        self.supervised.page.former_workers()
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
        Some(Exit::HandedOver) => HANDED_OVER,
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
    /// It could not be started, or could not continue, because the kernel lacked something. Everything is still open.
    Lacked(SupervisorError),
}

impl WorkerEnd {
    fn of(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(LACKS), _) => Self::Lacked(SupervisorError::CannotContinue),
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

/// A page that the supervisor shares with its workers. Each word has one writer at a time, and none guards other
/// memory, so all accesses are relaxed: the next process sees them because fork(2) and waitpid(2) order them. Another
/// program finds the same words ([`replacement::STATE_VERSION`]).
#[derive(Debug, Clone)]
pub(crate) struct Page {
    words: Arc<Part<AtomicU64>>,
    file: Arc<OwnedFd>,
}

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
    /// Workers that were started.
    Workers,
    /// The number of the program's file that the last worker has handed over to, plus one; 0 if it died.
    Program,
    /// Why that program was not executed, as an errno; `ECANCELED` if its worker ended before it served.
    Refused,
    /// Workers that could not be started, or could not continue, since one last served.
    Lacks,
}

impl Page {
    fn create() -> Result<Self, Errno> {
        let file = Draft::create("partywall:supervisor", PAGE_BYTES as u64)?.share()?;
        Ok(Self { words: Self::of(&file)?, file: Arc::new(file) })
    }

    /// Maps the words of a page.
    fn of(file: &OwnedFd) -> Result<Arc<Part<AtomicU64>>, Errno> {
        let map = Arc::new(SharedMap::writable(file)?);
        map.part(0, PAGE_BYTES / size_of::<AtomicU64>()).map(Arc::new).ok_or(Errno::INVAL)
    }

    fn load(&self, word: Word) -> u64 {
        self.words[word as usize].load(Ordering::Relaxed)
    }

    fn store(&self, word: Word, value: u64) {
        self.words[word as usize].store(value, Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        self.load(Word::Ready) != 0
    }

    pub(crate) fn set_ready(&self) {
        self.store(Word::Ready, 1);
    }

    /// Notes that no worker of this program has served.
    fn clear_ready(&self) {
        self.store(Word::Ready, 0);
    }

    /// Notes that a worker is about to be started.
    fn add_worker(&self) {
        self.store(Word::Workers, self.load(Word::Workers) + 1);
    }

    pub(crate) fn former_workers(&self) -> u64 {
        self.load(Word::Workers).saturating_sub(1)
    }

    /// Notes that a worker has lacked something.
    fn add_lack(&self) {
        self.store(Word::Lacks, self.load(Word::Lacks) + 1);
    }

    /// Returns how many workers have lacked something since one last served, and counts anew.
    pub(crate) fn take_lacks(&self) -> u64 {
        let lacks = self.load(Word::Lacks);
        self.store(Word::Lacks, 0);
        lacks
    }

    /// Notes the file of the program that the worker hands over to.
    pub(crate) fn set_program(&self, number: RawFd) {
        self.store(Word::Program, u64::try_from(number).map_or(0, |number| number + 1));
    }

    fn program(&self) -> Option<RawFd> {
        self.load(Word::Program).checked_sub(1).and_then(|number| RawFd::try_from(number).ok())
    }

    fn clear_program(&self) {
        self.store(Word::Program, 0);
    }

    fn set_refused(&self, errno: Errno) {
        self.store(Word::Refused, u64::from(errno.raw_os_error().unsigned_abs()));
    }

    /// Returns whether the former worker has handed over, or else why the program that it handed over to does not
    /// serve.
    pub(crate) fn take_handover(&self) -> Option<Result<(), Errno>> {
        let refused = i32::try_from(self.load(Word::Refused)).unwrap_or_default();
        let handed_over = self.program().is_some();
        self.store(Word::Refused, 0);
        self.clear_program();
        match refused {
            0 => handed_over.then_some(Ok(())),
            errno => Some(Err(Errno::from_raw_os_error(errno))),
        }
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
        // First: if this worker is killed before it has stored the rest, one death does not count as two.
        self.store(Word::Member, 0);
        self.store(Word::FormerMember, last.0);
        self.store(Word::FormerRequest, last.1);
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

    pub(crate) fn set_unrecorded(&self, is_unrecorded: bool) {
        self.store(Word::Unrecorded, u64::from(is_unrecorded));
    }
}

/// The exit code of a worker that cannot continue.
const CANNOT_CONTINUE: u8 = 3;

/// The exit code of a worker that has handed over to another program.
const HANDED_OVER: u8 = 4;

/// The exit code of a worker that could not continue because the kernel lacked something, such as memory or a thread.
pub(crate) const LACKS: i32 = 5;

/// How long workers that lack something are started again.
const LACKING: Duration = Duration::from_secs(60);

/// Bytes of the page.
const PAGE_BYTES: usize = 4096;

/// Deaths in a row, without an answered request, that end the domain.
const MAX_DEATHS: u64 = 5;

/// Pause before another worker is started, if one has died without having answered a request, or has lacked something.
const PAUSE: Duration = Duration::from_millis(50);

/// How often the supervisor looks after its worker.
const PULSE: Duration = Duration::from_secs(5);

/// Pulses without a turn of the worker's loop after which it is killed: 30 s.
const MAX_SILENT_PULSES: u32 = 6;

/// How often the supervisor checks whether the first worker serves.
const STARTING: Duration = Duration::from_millis(1);
