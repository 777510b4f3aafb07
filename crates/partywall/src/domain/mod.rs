//! Domains: the connection to a broker and to everything that is shared through it.

mod connect;
#[cfg(feature = "tokio")]
mod future;
mod health;
mod inbox;
mod lease;
mod link;
mod locate;
mod members;
mod objects;
mod poll_tasks;
mod refusal;
mod reported_waits;
mod service;
mod stream_waits;
mod timeline_memory;
mod watch;

use std::{
    any::Any,
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use partywall_cuda::DeviceUuid;
use partywall_os::{lock::IgnorePoison, process, socket};
use partywall_shm::members::now;
use partywall_wire::{Access as WireAccess, Answer, Call, Deadline, LeaseId, Name, Then, limits};

#[cfg(feature = "tokio")]
pub(crate) use self::future::{blocking, stream};
#[cfg(test)]
pub(crate) use self::poll_tasks::Schedule;
use self::service::Service;
pub use self::{
    connect::VERSION,
    locate::{DEFAULT_DOMAIN, Location},
    watch::{Watch, WatchEvent},
};
pub(crate) use self::{
    connect::{StarterFailed, check_foreign, own_user, run_starter},
    health::{Health, Lost},
    lease::LeaseGuard,
    link::{Link, withdrawn},
    locate::{CLAIM_DIRECTORY, ChosenBy, broker_binary},
    poll_tasks::{PollReason, PollTasks},
    reported_waits::{HostWait, HostWaits},
    stream_waits::{StreamWaits, TrackWaits},
    timeline_memory::{CellRef, MappedSlab, PrivateWord, TimelineMemory, Word},
};
use crate::{
    completion::{Completions, Workers},
    error::{Error, InvalidArgument, NotFound, Result, Unreachable, nothing_came},
    gpu::{Gpu, Gpus},
    info::{self, NameInfo, Removed, SegmentInfo, StatusInfo},
    recorder::Recorder,
    wait::Wait,
};

/// A place where processes share memory by name: a connection to one broker.
///
/// Cheap to clone, and usable from any thread. Clones, segments and builds share the connection, which ends with the
/// last of them. A block or sample that was dropped while the GPU may still use it keeps the connection until the GPU
/// is idle; the connection then ends on another thread. [`Block::release_on`](crate::Block::release_on) and
/// [`Sample::release_on`](crate::Sample::release_on) do not keep it.
///
/// After a fork the child must connect anew: every call there returns [`Unreachable::Forked`], and dropping does
/// nothing.
#[derive(Debug, Clone)]
pub struct Domain {
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    link: Arc<Link>,
    service: Service,
    gpus: Arc<Gpus>,
    extensions: Extensions,
    /// For an operator: the broker's processes when it connected.
    processes: Vec<OwnedFd>,
}

/// What the kinds of objects keep with a connection: one value of each type.
#[derive(Default)]
struct Extensions(Mutex<Vec<Arc<dyn Any + Send + Sync>>>);

impl Extensions {
    fn get<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut all = self.0.lock().ignore_poison();
        let found = all.iter().find_map(|one| one.clone().downcast().ok());
        found.unwrap_or_else(|| {
            let new = Arc::new(T::default());
            all.push(new.clone());
            new
        })
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Extensions")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.link.require_ours().is_err() {
            self.service.forget();
            self.gpus.health.forget();
            return;
        }
        self.gpus.health.stop();
        self.service.end(self.gpus.health.check().is_err());
    }
}

/// Options of a connection.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until connect()"]
pub struct DomainOptions {
    domain: Option<String>,
    socket: Option<PathBuf>,
    start: bool,
    operator: bool,
    program: Option<PathBuf>,
    mps: bool,
}

impl DomainOptions {
    /// Sets the domain's name. By default `PARTYWALL_SOCKET` or `PARTYWALL_DOMAIN` decide; without them it is
    /// `default`.
    pub fn domain(mut self, name: impl Into<String>) -> Self {
        self.domain = Some(name.into());
        self
    }

    /// The broker's socket.
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Sets whether to start a broker if none runs. True by default.
    pub fn start(mut self, start: bool) -> Self {
        self.start = start;
        self
    }

    /// Sets whether to connect as an operator, which is not a member of the domain. False by default.
    ///
    /// Such a connection can list, show, evict, remove, and end the broker; every other call returns
    /// [`Denied::NotMember`](crate::error::Denied::NotMember). The broker keeps room for a few operators even when it
    /// accepts no more members. Operators are not listed among the members.
    pub fn operator(mut self, operator: bool) -> Self {
        self.operator = operator;
        self
    }

    /// Sets the program to start as the broker, for front ends that include one. `PARTYWALL_BIN` takes precedence.
    /// Without either, the program is `partywall` beside this process's executable, or on `PATH`.
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Sets whether to connect only if this process would become a client of an MPS daemon. False by default.
    ///
    /// This only checks that a daemon listens in the directory that `CUDA_MPS_PIPE_DIRECTORY` names: a program with
    /// threads cannot set the variable safely. `partywall run --mps COMMAND` sets it. See [`mps`](crate::mps).
    pub fn mps(mut self, mps: bool) -> Self {
        self.mps = mps;
        self
    }

    /// Returns the location that these options select.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`] if the domain cannot be a file name.
    pub fn location(&self) -> Result<Location> {
        Location::find(self.domain.as_deref(), self.socket.as_deref())
    }

    /// Returns the program that [`connect`](Self::connect) would start as the broker, for its other commands.
    ///
    /// # Errors
    /// [`Unreachable::NoProgram`].
    pub fn find_program(&self) -> Result<PathBuf> {
        broker_binary(self.program.as_deref())
    }

    /// Connects to the domain's broker, and starts one if none runs and [`start`](Self::start) allows it.
    ///
    /// ```no_run
    /// # use partywall::Domain;
    /// let domain = Domain::options().domain("training").start(false).connect()?;
    /// println!("connected at {}", domain.socket().display());
    /// # Ok::<(), partywall::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Unreachable::NoAnswer`] if no broker runs and none may be started, [`Unreachable::NoProgram`] or
    /// [`Unreachable::NotStarted`] if none can be started, [`Unreachable::Version`], [`Unreachable::User`],
    /// [`Unreachable::Barred`], [`Unreachable::UnsafeDirectory`], [`Unreachable::Clock`],
    /// [`LimitReached::Broker`](crate::error::LimitReached::Broker);
    /// [`MpsFault::NoDaemon`](crate::error::MpsFault::NoDaemon) and [`MpsFault::User`](crate::error::MpsFault::User)
    /// with [`mps`](Self::mps).
    pub fn connect(&self) -> Result<Domain> {
        if self.mps {
            crate::mps::check(&crate::mps::pipes())?;
        }
        let location = self.location()?;
        let begun = now();
        let (instance, mut greeted) = connect::connect(&location, self.start, self.program.as_deref(), self.operator)?;
        let processes = std::mem::take(&mut greeted.processes);
        let (link, events, members) = Link::new(location, instance, greeted);
        let link = Arc::new(link);
        let lost: Arc<OnceLock<Lost>> = Arc::default();
        let service = Service::start(link.clone(), events, &members, begun, lost.clone()).inspect_err(|_| {
            // Otherwise the broker would keep a member without a connection until this process ends.
            let _ = link.leave();
        })?;
        let reporter = link.clone();
        let worker = service.shared().workers.broker.clone();
        let health = Health::new(lost, move |lost| {
            let reporter = reporter.clone();
            let gpu = lost.gpu.0;
            worker.run(move || reporter.call_later(Call::ContextLost { gpu: Some(gpu) }, usize::MAX));
        });
        let gpus = Arc::new(Gpus::new(link.clone(), health));
        let extensions = Extensions::default();
        Ok(Domain { connection: Arc::new(Connection { link, service, gpus, extensions, processes }) })
    }
}

impl Domain {
    /// Connects to the default domain, starting its broker if there is none.
    ///
    /// ```no_run
    /// # use partywall::Domain;
    /// let domain = Domain::connect()?;
    /// for name in domain.names()? {
    ///     println!("{}", name.name);
    /// }
    /// # Ok::<(), partywall::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`DomainOptions::connect`].
    pub fn connect() -> Result<Self> {
        Self::options().connect()
    }

    /// Returns options to connect to another domain, or without starting a broker.
    pub fn options() -> DomainOptions {
        DomainOptions { domain: None, socket: None, start: true, operator: false, program: None, mps: false }
    }

    /// Removes `name`. Processes that have it open keep it; its memory is freed with the last of them.
    ///
    /// # Errors
    /// [`NotFound::Name`].
    pub fn remove(&self, name: &str) -> Result<Removed> {
        self.remove_by(name, None)
    }

    /// Removes `name`, and sets its readers a deadline to drop it. The name cannot be opened any more, as after
    /// [`remove`](Self::remove). Readers learn of the deadline by
    /// [`Segment::wait_withdrawn`](crate::Segment::wait_withdrawn); `then` says what happens to those that are left at
    /// the deadline. A version that is committed under the name meanwhile is not affected.
    ///
    /// The deadline holds even if this process ends before it. A deadline cannot be changed.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Then};
    /// # let domain = Domain::connect()?;
    /// // Readers that still have it open after ten seconds are evicted.
    /// domain.withdraw("weights", Duration::from_secs(10), Then::Evict)?;
    /// # Ok::<(), partywall::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NotFound::Name`]; [`Busy::Withdrawing`](crate::error::Busy::Withdrawing) if readers of the withdrawn name
    /// already have a deadline; [`InvalidArgument::Deadline`] if it is more than a year away.
    pub fn withdraw(&self, name: &str, deadline: Duration, then: Then) -> Result<Removed> {
        let after = u64::try_from(deadline.as_millis()).ok().filter(|after| *after <= limits::MAX_DEADLINE);
        let after = after.ok_or(InvalidArgument::Deadline { after: deadline })?;
        self.remove_by(name, Some(Deadline { after, then }))
    }

    fn remove_by(&self, name: &str, deadline: Option<Deadline>) -> Result<Removed> {
        let removed = self.link().call(Call::Remove { name: check_name(name)?, deadline })?;
        answered!(removed, Answer::Removed { version, bytes_kept, holders, queues, notice } => {
            Removed { version, bytes_kept, holders, queues, notice }
        })
    }

    /// Removes all names that end with this connection: those that it has committed and that are neither kept nor given
    /// to another member, and those that were given to it. Open segments stay usable.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn withdraw_names(&self) -> Result<()> {
        self.link().call(Call::WithdrawNames).map(drop)
    }

    /// Returns everything about a name, without opening it.
    ///
    /// # Errors
    /// [`NotFound::Name`], [`NotFound::Version`].
    pub fn inspect(&self, name: &str) -> Result<SegmentInfo> {
        let (name, version) = split_version(name)?;
        let (answer, fds) = self.link().call_with(Call::Inspect { name: check_name(&name)?, version }, &[])?;
        info::segment(answered!(answer, Answer::Info(info) => *info)?, fds)
    }

    /// Returns all names, in order.
    ///
    /// # Errors
    /// The errors of every call: [`Unreachable::Gone`], [`Unreachable::Forked`].
    pub fn names(&self) -> Result<Vec<NameInfo>> {
        let ask =
            |after| answered!(self.link().call(Call::List { after })?, Answer::Names { names, more } => (names, more));
        pages("names", |row: &NameInfo| row.name.clone(), ask)
    }

    /// Returns the state of the broker: its holdings, its limits, its log.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn status(&self) -> Result<StatusInfo> {
        answered!(self.link().call(Call::Status)?, Answer::Status(status) => *status)
    }

    /// Returns pidfds of the broker's processes when this operator connected: of the one that served, then of its
    /// supervisor. Unlike a pid, a pidfd never comes to mean another process. Either may be missing: in a sandbox
    /// without pidfds, and after the death of the supervisor. A connection that is no operator's has none.
    pub fn broker_processes(&self) -> &[OwnedFd] {
        &self.connection.processes
    }

    /// Returns whether the broker is known to be gone for good, with all names. Asks nobody.
    pub fn is_gone(&self) -> bool {
        self.link().require_broker().is_err()
    }

    /// Makes a call that does nothing, to check or measure the connection to the broker.
    ///
    /// # Errors
    /// The errors of every call.
    pub fn ping(&self) -> Result<()> {
        self.link().call(Call::Ping).map(drop)
    }

    /// Ends the broker, with `force` even while names and members exist. All names are dropped; mapped memory stays
    /// mapped.
    ///
    /// # Errors
    /// [`Busy::BrokerInUse`](crate::error::Busy::BrokerInUse) without `force` while something exists.
    pub fn stop_broker(&self, force: bool) -> Result<()> {
        self.link().call(Call::Stop { force }).map(drop)
    }

    /// Has another program continue as the broker, with everything that the broker knows and holds. Members notice only
    /// that a call takes longer. `program` is the file of a `partywall` program.
    ///
    /// Returns once the program has said that it can continue. The next call is answered by it; or by the former
    /// program, if the new one ends before it serves.
    ///
    /// # Errors
    /// [`Denied::Replacement`](crate::error::Denied::Replacement) if the broker goes on as it was.
    pub fn replace_broker(&self, program: BorrowedFd<'_>) -> Result<()> {
        self.link().call_with(Call::Replace, &[program]).map(drop)
    }

    /// The broker's socket.
    pub fn socket(&self) -> &Path {
        self.link().socket_path()
    }

    pub(crate) fn link(&self) -> &Link {
        &self.connection.link
    }

    pub(crate) fn gpus(&self) -> Result<&Arc<Gpus>> {
        self.link().require_ours()?;
        Ok(&self.connection.gpus)
    }

    pub(crate) fn health(&self) -> &Health {
        &self.connection.gpus.health
    }

    /// Returns a guard for a lease on a timeline or a semaphore.
    pub(crate) fn keep(&self, lease: LeaseId) -> LeaseGuard {
        LeaseGuard::new(lease, self.connection.link.clone(), self.workers().broker.clone())
    }

    pub(crate) fn poll_tasks(&self) -> &PollTasks {
        &self.connection.service.shared().poll_tasks
    }

    pub(crate) fn completions(&self) -> &Arc<Completions> {
        &self.connection.service.shared().completions
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.connection.service.shared().workers
    }

    /// Returns the value of this type that the connection keeps. Objects of one kind share it; only they know the type.
    pub(crate) fn extension<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        self.connection.extensions.get()
    }

    pub(crate) fn timeline_memory(&self) -> &TimelineMemory {
        &self.connection.service.shared().timeline_memory
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.connection.service.shared().recorder
    }

    pub(crate) fn host_waits(&self) -> &Arc<HostWaits> {
        &self.connection.service.shared().host_waits
    }

    pub(crate) fn stream_waits(&self) -> &StreamWaits {
        &self.connection.service.shared().stream_waits
    }

    /// Returns a GPU, which is opened once per connection.
    ///
    /// # Errors
    /// As [`Gpu::open`]; [`Unreachable::Forked`].
    pub fn gpu(&self, uuid: DeviceUuid) -> Result<Arc<Gpu>> {
        self.gpus()?.get(uuid)
    }

    /// Returns the GPU that uses pinned memory unless another one is named: the one that this connection opened first,
    /// else the one whose context is current on the calling thread, else the first.
    ///
    /// # Errors
    /// As [`gpu`](Self::gpu).
    pub fn default_gpu(&self) -> Result<Arc<Gpu>> {
        self.gpus()?.preferred()
    }

    /// Opens a version, waiting for it, and returns the broker's answer.
    pub(crate) fn ask_to_open(
        &self,
        name: &str,
        version: Option<u64>,
        access: WireAccess,
        wait: Wait<'_>,
    ) -> Result<link::Answered> {
        let checked = check_name(name)?;
        let open = |wait| Call::Open(partywall_wire::Open { name: checked.clone(), version, access, wait });
        let waiting = wait.begin();
        if waiting.timeout().is_zero() {
            return self.link().call_with(open(false), &[]);
        }
        if let Some(answered) = self.link().call_waiting(|| open(true), &waiting)? {
            return Ok(answered);
        }
        // One more request without waiting: the version may just have been committed, or the name may have ended.
        match self.link().call_with(open(false), &[]) {
            Err(refusal @ Error::NotFound(NotFound::Name { .. } | NotFound::Version { .. })) => {
                let name = info::with_version(name, version);
                Err(waiting.error(format!("cannot open {name}: {}", nothing_came(&refusal))))
            }
            answered => answered,
        }
    }
}

/// Splits `NAME@V`.
pub(crate) fn split_version(text: &str) -> Result<(String, Option<u64>)> {
    let Some((name, version)) = text.rsplit_once('@') else {
        return Ok((text.to_owned(), None));
    };
    match parse_version(version) {
        Some(version) => Ok((name.to_owned(), Some(version))),
        None => Err(InvalidArgument::Version { name: name.to_owned(), version: version.to_owned() }.into()),
    }
}

/// A version in digits: 1, 2, …
pub(crate) fn parse_version(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|version| *version > 0 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Checks a name before it is sent.
pub(crate) fn check_name(name: &str) -> Result<Name> {
    Name::new(name).map_err(|why| InvalidArgument::name(name, why))
}

pub(crate) fn unexpected(answer: &Answer) -> Error {
    Unreachable::protocol(format!("its answer does not belong to the call: {answer:?}"))
}

/// Extracts a value from the answer that a call expects. For any other answer of the broker, evaluates to an error.
macro_rules! answered {
    ($answer:expr, $expected:pat => $value:expr) => {
        match $answer {
            $expected => Ok($value),
            other => Err($crate::domain::unexpected(&other)),
        }
    };
}

pub(crate) use answered;

/// Requests a list page by page. `ask` returns the rows after a key, in ascending order, and whether more follow.
fn pages<T, K: PartialOrd>(
    what: &str,
    key: impl Fn(&T) -> K,
    ask: impl Fn(Option<K>) -> Result<(Vec<T>, bool)>,
) -> Result<Vec<T>> {
    let mut all: Vec<T> = Vec::new();
    loop {
        let (page, more) = ask(all.last().map(&key))?;
        let after = all.last().map(&key);
        if page.iter().any(|row| after.as_ref().is_some_and(|after| key(row) <= *after)) {
            return Err(Unreachable::protocol(format!("its list of {what} does not advance")));
        }
        let more = more && !page.is_empty();
        all.extend(page);
        if !more {
            return Ok(all);
        }
    }
}

/// Returns a pidfd of the process that listens on a domain's socket, by connecting without a greeting. The kernel makes
/// it; `None` before Linux 6.5, and if that process has ended while another one serves its socket.
///
/// # Errors
/// As [`broker_pid`].
pub fn broker_pidfd(location: &Location) -> Result<Option<OwnedFd>> {
    Ok(process::peer_pidfd(connect::open(location)?))
}

/// Returns the pid of the process that listens on a domain's socket, by connecting without a greeting.
///
/// # Errors
/// [`Unreachable::NoAnswer`] if no process listens there, [`Unreachable::User`], [`Unreachable::Barred`].
pub fn broker_pid(location: &Location) -> Result<Option<u32>> {
    let call = connect::open(location)?;
    socket::peer(&call).map(|peer| peer.pid).map_err(|e| Error::system("asking for the pid of the broker", e))
}
