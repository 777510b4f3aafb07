//! The supervisor: keeps a domain alive when the process that serves it dies.
//!
//! The supervisor binds the socket and then starts the *worker*, which does everything else. The worker is a copy of
//! the supervisor, made by clone(2) with `CLONE_FILES`, so both have one table of file descriptors: what a worker has
//! opened survives that worker, under its number. If the worker is killed, panics or hangs, the supervisor starts the
//! next one, and the journal (`journal`) says what the open descriptors are.
//!
//! A worker ends without unwinding, because dropping its state would close the memory that the next worker continues
//! with. Only the end of the domain drops it.
//!
//! A worker that cannot be started, or finds too little memory, no thread or no free descriptor to continue with, is
//! started again, for a minute: nothing is lost meanwhile.
//!
//! The supervisor has one thread, because a copy of it is what the next worker begins as. While a worker runs, the
//! supervisor opens nothing. There are two exceptions: `ready` may open something for a moment, such as a socket of the
//! service manager; and once a worker has served, the supervisor itself may, because that worker no longer takes a
//! number for one that its predecessor left. The supervisor closes a descriptor only if the worker does not use that
//! number. It is also the process in which another program continues ([`replacement`]).
//!
//! The supervisor polls for turns of the worker's loop every 2 s, and pokes the worker, so that an idle one turns, too.
//! It polls a new worker after 0.2 s and 0.4 s. Five workers in a row that die at once end the domain: what kills them
//! would kill the next one, too. A worker that has served for two polls of its supervisor, or has answered a request,
//! is not one of them, however it dies later.
//!
//! If the socket's file is gone, the supervisor binds the socket again, under the former number (dup3(2)). The worker
//! must not do that: the kernel names the process that called listen(2) to clients. A process that finds no file looks
//! for the socket in `/proc/net/unix` before it starts a broker or takes the broker for dead.
//!
//! Signals that would end a process without a reason end neither: the supervisor passes them on to the worker, which
//! notes them in the log when it is poked.

use std::{
    collections::BTreeSet,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_os::{
    Errno,
    process::raise_fd_limit,
    supervision::{LeftOpen, WaitedSignals, open_numbers, pass_on, stray_signals},
};
use partywall_shm::crash::point;
use rustix::{
    event::{EventfdFlags, eventfd},
    io,
    process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid},
};

use crate::{
    Broker, Config, Exit, StartError,
    bind::BoundSocket,
    config::Resolved,
    journal::Journal,
    log::RotatingLog,
    page::{LACKS, Page},
    replacement::{self, Continuation, Handover},
    server::Supervised,
};

pub use crate::page::Death;

/// A domain whose broker is restarted when it dies.
#[derive(Debug)]
pub struct Supervisor {
    /// What each worker begins with. Taken only in the copy that becomes a worker.
    worker: Option<Worker>,
    page: Page,
    /// Wakes the worker's loop.
    poke: Arc<OwnedFd>,
    signals: Signals,
    /// Whether this program continues for another one, which had a worker.
    continues: bool,
    /// The file of that program, until the first worker of this one serves.
    former: Option<OwnedFd>,
    /// Keeps the lock on the log while no worker writes it.
    log: Option<RotatingLog>,
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
    bound: BoundSocket,
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
    /// The first worker could not begin to serve.
    #[error("the broker cannot start: {why}")]
    CannotStart {
        /// What it said.
        why: String,
    },
    /// The worker could not wait for events, or could not continue what its predecessor did.
    #[error("the broker's worker cannot continue: {why}")]
    CannotContinue {
        /// What it said.
        why: String,
    },
    /// Workers died again and again as soon as they were started.
    #[error("{deaths} workers of the broker died in a row as soon as they were started; the last one {last}")]
    Deaths {
        /// How many.
        deaths: u64,
        /// How the last of them ended.
        last: Death,
    },
}

/// The signals that a supervisor waits for.
#[derive(Debug)]
struct Signals {
    all: WaitedSignals,
    /// Those that a worker handles by itself, at once.
    of_worker: WaitedSignals,
    /// Those that it only notes in the log.
    stray: WaitedSignals,
    /// Their numbers.
    strays: Vec<i32>,
}

impl Signals {
    fn block() -> Result<Self, StartError> {
        let block = |signals: &[i32]| WaitedSignals::block(signals).map_err(StartError::errno("block signals"));
        let of_worker = [Signal::CHILD, Signal::TERM, Signal::INT].map(Signal::as_raw);
        let strays = stray_signals();
        Ok(Self {
            all: block(&[&of_worker[..], &strays].concat())?,
            of_worker: block(&of_worker)?,
            stray: block(&strays)?,
            strays,
        })
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
        let signals = Signals::block()?;
        let bound = BoundSocket::for_broker(&config, listener)?;
        let supervised = Supervised::new(journal, page.clone(), Arc::clone(&poke), std::process::id(), signals.stray);
        let worker = Worker { config, limits, bound, supervised, of_supervisor: BTreeSet::new() };
        Ok(Self { worker: Some(worker), page, poke, signals, continues: false, former: None, log: None })
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
        let bound = BoundSocket { listener: take(listener)?, file: file.clone() };
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
        let signals = Signals::block().map_err(&mut failed)?;
        let page = match Page::open(page) {
            Ok(page) => page,
            // Open until the former program continues.
            Err((_page, errno)) => return Err(failed(StartError::errno("map the page of the supervisor")(errno))),
        };
        let mut of_supervisor = of_supervisor.clone();
        of_supervisor.extend(former);
        let supervised = Supervised::new(journal, page.clone(), Arc::clone(&poke), std::process::id(), signals.stray);
        let worker = Worker { config, limits, bound, supervised, of_supervisor };
        page.clear_ready();
        Ok(Self { worker: Some(worker), page, poke, signals, continues: true, former: former_file, log: None })
    }

    /// Has the workers report this log. Each of them opens it for itself. The supervisor never writes it, and keeps it
    /// open, so that no other broker takes it.
    pub fn keep_log(&mut self, log: RotatingLog) {
        if let Some(worker) = &mut self.worker {
            worker.config.log_path = Some(log.path().to_owned());
            worker.of_supervisor.insert(log.number());
        }
        self.log = Some(log);
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
                signals.of_worker.unblock();
                // Only this copy takes it: the supervisor's memory is not this memory.
                worker.take().map_or(CANNOT_CONTINUE, &mut serve)
            });
            let ended = match started {
                Ok(pid) => self.watch(pid, &mut stop, &mut ready).map_err(failed("wait for the worker")),
                Err(errno) => Ok(WorkerEnd::NotForked(errno)),
            };
            // No names exist before the first worker has served.
            let is_first = ready.is_some() && !self.continues;
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
                Ok(lacked @ (WorkerEnd::Lacked | WorkerEnd::NotForked(_))) => {
                    if stop.is_some() {
                        break Ok(Exit::Signalled);
                    }
                    if is_first || lacking.get_or_insert_with(Instant::now).elapsed() >= LACKING {
                        self.go_back(&execute);
                        break Err(match lacked {
                            WorkerEnd::NotForked(errno) => {
                                let why = StartError::errno("start the worker")(errno).to_string();
                                if is_first {
                                    SupervisorError::CannotStart { why }
                                } else {
                                    SupervisorError::CannotContinue { why }
                                }
                            }
                            _ => self.cannot_continue(is_first),
                        });
                    }
                    self.page.add_lack();
                    self.pause(&mut stop);
                    continue;
                }
                // It has removed the socket's file.
                Ok(WorkerEnd::Exited(CANNOT_CONTINUE)) => {
                    self.go_back(&execute);
                    break Err(self.cannot_continue(is_first));
                }
                Ok(WorkerEnd::Exited(code)) => match decode(code) {
                    Some(exit) => {
                        std::mem::forget(self.worker);
                        return Ok(exit);
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
                let why = format!("the former one {death} while its journal could not be written");
                break Err(SupervisorError::CannotContinue { why });
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
            worker.bound.file.remove();
        }
        // Descriptors that a worker dropped when it ended the domain are closed here, too.
        std::mem::forget(self.worker);
        ended
    }

    /// Returns why no worker continues, in the words of the last one.
    fn cannot_continue(&self, is_first: bool) -> SupervisorError {
        let why = self.page.reason().unwrap_or_else(|| "its log has the reason".into());
        if is_first { SupervisorError::CannotStart { why } } else { SupervisorError::CannotContinue { why } }
    }

    /// Waits for a moment before the next worker, or for a signal that ends the domain.
    fn pause(&self, stop: &mut Option<Signal>) {
        if let Ok(Some(signal)) = self.signals.all.wait(PAUSE) {
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
        // The next program opens the log anew, under any number.
        self.log.iter().for_each(|log| _ = of_supervisor.remove(&log.number()));
        let handover = Handover {
            listener: worker.bound.listener.as_raw_fd(),
            file: worker.bound.file.clone(),
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

    /// Binds the socket again if its file was removed or replaced. The worker learns of it when it is poked.
    fn restore_socket(&mut self) {
        if let Some(worker) = &mut self.worker
            && worker.bound.file.is_lost()
            // A worker that ends the domain says so before it removes the file.
            && !self.page.is_ending()
        {
            // Tried again after the next pulse; meanwhile the worker says in the log that the file is missing, and why.
            let _ = worker.bound.bind_again(&worker.config);
        }
    }

    /// Waits until the worker has ended. Passes signals on, and kills a worker that has been silent for too long.
    fn watch(
        &mut self,
        pid: Pid,
        stop: &mut Option<Signal>,
        ready: &mut Option<impl FnOnce(u32)>,
    ) -> Result<WorkerEnd, Errno> {
        let mut signs = SignsOfLife::new(&self.page);
        if let Some(signal) = *stop {
            let _ = kill_process(pid, signal);
        }
        loop {
            let pause = if ready.is_some() { STARTING } else { signs.until_next() };
            let signal = self.signals.all.wait(pause)?;
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
            let is_stray = signal.is_some_and(|signal| self.signals.strays.contains(&signal));
            if let Some(signal) = signal.filter(|_| is_stray) {
                // It notes the signal when it is poked.
                let _ = pass_on(signal, pid);
            }
            // Whatever has ended the wait: signals that come again and again delay nothing.
            let is_due = ready.is_none() && signs.until_next().is_zero();
            if is_due {
                signs.poll(&self.page);
                if signs.has_served() {
                    self.page.forget_deaths();
                    self.restore_socket();
                }
                if signs.is_silent_for_too_long() {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            if ready.is_none() && (is_due || is_stray) {
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
        let Self { config, limits, bound, supervised, .. } = self;
        let page = supervised.page.clone();
        Broker::of_worker(config, limits, bound, supervised, left).inspect_err(|error| page.set_reason(error))
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

fn decode(code: u8) -> Option<Exit> {
    Some(match code {
        0 => Exit::Stopped,
        1 => Exit::Signalled,
        2 => Exit::Idle,
        _ => return None,
    })
}

/// How a worker ended, as the kernel reports it.
enum WorkerEnd {
    Exited(u8),
    Died(Death),
    /// It could not continue, because the kernel lacked something. Everything is still open.
    Lacked,
    /// It could not be started, for this reason.
    NotForked(Errno),
}

impl WorkerEnd {
    fn of(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(LACKS), _) => Self::Lacked,
            (Some(code), _) => u8::try_from(code).map_or(Self::Died(Death::Code(code)), Self::Exited),
            (None, signal) => Self::Died(Death::Signal(signal.unwrap_or_default())),
        }
    }
}

/// What the supervisor has seen of its worker. It polls for turns of the worker's loop, and pokes the worker after each
/// poll, so that an idle one turns, too.
struct SignsOfLife {
    turns: u64,
    /// How many polls have found turns, as far as that matters.
    answers: u32,
    /// How long polls have found none, measured in pauses of the supervisor: if both are stopped, as by Ctrl-Z, the
    /// worker is not silent.
    silent: Duration,
    last: Instant,
}

impl SignsOfLife {
    fn new(page: &Page) -> Self {
        Self { turns: page.turns(), answers: 0, silent: Duration::ZERO, last: Instant::now() }
    }

    /// Returns the time until the next poll; zero if that is due.
    fn until_next(&self) -> Duration {
        self.pause().saturating_sub(self.last.elapsed())
    }

    /// Returns the pause between two polls.
    fn pause(&self) -> Duration {
        if self.has_served() { PULSE } else { FIRST_PULSE }
    }

    fn poll(&mut self, page: &Page) {
        let pause = self.pause();
        let was_stopped = self.last.elapsed() > 2 * pause + PULSE;
        self.last = Instant::now();
        let turns = page.turns();
        if turns != self.turns {
            self.turns = turns;
            self.answers = self.answers.saturating_add(1);
            self.silent = Duration::ZERO;
        } else if was_stopped {
            self.silent = Duration::ZERO;
        } else {
            self.silent += pause;
        }
    }

    /// Returns whether the worker has served for at least the time between two polls.
    fn has_served(&self) -> bool {
        self.answers >= 2
    }

    /// The last sign of life may be as old as the poll before the first one without.
    fn is_silent_for_too_long(&self) -> bool {
        self.silent + PULSE >= MAX_SILENCE
    }
}

/// The exit code of a worker that cannot continue.
const CANNOT_CONTINUE: u8 = 3;

/// The exit code of a worker that has handed over to another program.
const HANDED_OVER: u8 = 4;

/// How long workers that lack something are started again.
const LACKING: Duration = Duration::from_secs(60);

/// Deaths in a row, each soon after a start, that end the domain.
const MAX_DEATHS: u64 = 5;

/// Pause before another worker is started, if the former one has died soon after its start, or has lacked something.
const PAUSE: Duration = Duration::from_millis(50);

/// How often the supervisor polls its worker.
const PULSE: Duration = Duration::from_secs(2);

/// How often it polls a worker that was just started. Two polls decide whether the worker serves.
const FIRST_PULSE: Duration = Duration::from_millis(200);

/// How long a worker may be silent before it is killed.
const MAX_SILENCE: Duration = Duration::from_secs(30);

/// How often the supervisor checks whether the first worker serves.
const STARTING: Duration = Duration::from_millis(1);
