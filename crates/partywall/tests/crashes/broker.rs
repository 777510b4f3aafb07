// Holds 12.
//! The broker's worker is killed between any two steps of each request, and of a restart. Its supervisor starts the
//! next one; every call is answered as if nothing had happened, and takes effect once.
#![allow(unsafe_code)] // processes that share their file descriptors

use std::{
    cell::Cell,
    collections::BTreeSet,
    fmt::Display,
    fs::{self, File},
    os::fd::{AsFd, RawFd},
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, NoReplacement, OpenOrBuild, Place, Policy, Task, Then, WatchEvent,
    error::{Denied, Unreachable},
    info::{Change, NameEvent, StatusInfo},
};
use partywall_broker::{
    Config,
    replacement::{Continuation, Purpose},
    supervisor::{Calls, Supervisor, Worker, exit_code},
};
use partywall_harness::{WATCHDOG, assert_contains, commit, crash, eventually, kill, send, wire};
use partywall_os::{
    Errno, memfd,
    supervision::{LeftOpen, WaitedSignals, fork_sharing_files},
};
use partywall_shm::timeline::{Slab, cell_offset};
use partywall_wire::{Answer, Call};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};

use super::points::{CONTINUING, EXECUTING, GUARDING, HANDING_OVER, SERVING, assert_passed};

/// The role of a supervisor, whose worker is killed at a crash point, or which is.
pub(crate) const ROLE: &str = "broker supervised";

/// The socket, and which process is killed: the supervisor, or one of its workers, by its number from 0.
const SOCKET: &str = "PARTYWALL_SOCKET";
const VICTIM: &str = "PARTYWALL_TEST_VICTIM";
const SUPERVISOR: &str = "supervisor";

/// How another program behaves that is to continue.
const OTHER: &str = "PARTYWALL_TEST_OTHER";
const OTHER_FORMAT: &str = "reads another format";
const NOT_EXECUTED: &str = "is not executed";

/// What workers lack that follow a dead one, each in turn.
const LACKS: &str = "PARTYWALL_TEST_LACKS";
const PROCESSES: &str = "processes";
const DESCRIPTORS: &str = "descriptors";

/// Makes each worker survive the signal of a file that would grow beyond the limit of its process.
const MEMORY: &str = "memory";

/// No worker can be started any more.
const ALL_PROCESSES: &str = "all processes";

/// How many workers lack processes.
const WITHOUT_PROCESS: usize = 3;

/// Limits the numbers of this worker's descriptors, or ends the limit. Each worker has room for one more than the one
/// before, so that each lacks another one.
#[allow(clippy::print_stdout, reason = "it is how a role talks to the test")]
fn limit_descriptors(former_workers: Option<u64>) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = former_workers.map_or(maximum, |number| {
        println!("lacking");
        Some(2 + number)
    });
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).unwrap();
}

fn lacks(what: &str) -> bool {
    std::env::var(LACKS).is_ok_and(|lacks| lacks == what)
}

fn is_other(how: &str) -> bool {
    std::env::var(OTHER).is_ok_and(|other| other == how)
}

fn config() -> Config {
    let mut config = Config::new(std::env::var_os(SOCKET).unwrap(), "test", partywall::VERSION);
    config.idle_exit = None;
    config.settle = Duration::from_millis(1);
    config
}

/// Supervises until the broker is stopped; or checks whether this program can continue.
pub(crate) fn play() {
    if let Some(Purpose::Check(check)) = Purpose::of_this_process() {
        let change = |state: &mut Vec<u8>| state[0] += u8::from(is_other(OTHER_FORMAT));
        check.answer(&config(), change).unwrap();
        return;
    }
    let start = || {
        let supervisor = Supervisor::bind(config(), None).unwrap();
        if std::env::var(VICTIM).unwrap() == SUPERVISOR {
            crash::arm();
        }
        supervise(supervisor)
    };
    // SAFETY: a supervisor has one thread, and this program has others; they hold no lock that it needs, as they wait
    // for this test.
    assert_eq!(unsafe { partywall_os::process::in_fork(start) }, Ok(0));
}

#[allow(clippy::print_stdout, reason = "it is how a role talks to the test")]
fn supervise(supervisor: Supervisor) -> u8 {
    let work = |worker: Worker| {
        partywall_shm::crash::disarm();
        // SAFETY: the process was just cloned from the supervisor, and uses nothing but what that has open.
        let left = unsafe { LeftOpen::except(worker.of_supervisor()) }.unwrap();
        let number = worker.former_workers();
        let is_victim = std::env::var(VICTIM).unwrap() == number.to_string();
        // A broker that dies before it has served at all is not restarted.
        if is_victim && number > 0 {
            crash::arm();
        }
        if lacks(MEMORY) {
            WaitedSignals::block(&[Signal::XFSZ.as_raw()]).unwrap();
        }
        if number > 0 && lacks(DESCRIPTORS) {
            limit_descriptors(Some(number));
        }
        let broker = worker.start(left).unwrap();
        limit_descriptors(None);
        if is_victim && number == 0 {
            crash::arm();
        }
        exit_code(broker.run().ok())
    };
    let forks = Cell::new(0);
    let fork = |child: &mut dyn FnMut() -> u8| {
        forks.set(forks.get() + 1);
        let fails = lacks(PROCESSES) && (2..2 + WITHOUT_PROCESS).contains(&forks.get());
        if fails || lacks(ALL_PROCESSES) && forks.get() > 1 {
            println!("lacking");
            return Err(Errno::AGAIN);
        }
        // SAFETY: this process has one thread, and its workers end before it.
        unsafe { fork_sharing_files(child) }
    };
    let ended = supervisor.run(Calls { fork, serve: work, execute }, |pid| println!("ready {pid}"), None);
    u8::from(ended.is_err())
}

/// Continues in this process as another program would.
#[allow(clippy::print_stdout, reason = "it is how a role talks to the test")]
fn execute(_program: RawFd, continuation: Continuation) -> Errno {
    if is_other(NOT_EXECUTED) {
        return Errno::NOEXEC;
    }
    println!("executed");
    // SAFETY: the former supervisor does nothing any more, as if this were another program.
    let left = unsafe { LeftOpen::except(&(0..3).collect()) }.unwrap();
    let supervisor = Supervisor::resume(config(), continuation, left, execute).unwrap();
    std::process::exit(supervise(supervisor).into())
}

/// A supervised broker for one run.
struct Broker {
    process: partywall_harness::Running,
    directory: tempfile::TempDir,
}

impl Broker {
    /// Starts a broker whose worker `victim` is killed at a crash point: after so many others, or at the first of this
    /// name.
    fn start(victim: u64, point: impl Display) -> Self {
        Self::start_with(&victim.to_string(), point, "")
    }

    fn start_with(victim: &str, point: impl Display, other: &str) -> Self {
        Self::start_where(victim, point, |command| _ = command.env(OTHER, other))
    }

    fn start_where(victim: &str, point: impl Display, change: impl FnOnce(&mut Command)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "play", "--nocapture"]).env(super::ROLE, ROLE);
        command.env(SOCKET, socket(&directory)).env(VICTIM, victim);
        command.env("PARTYWALL_TEST_CRASH", format!("{point} killed"));
        change(&mut command);
        let mut broker = Self { process: partywall_harness::Running::spawn(&mut command), directory };
        broker.expect("ready ");
        broker
    }

    fn connect(&self) -> Domain {
        Domain::options().socket(socket(&self.directory)).start(false).connect().unwrap()
    }

    fn expect(&mut self, word: &str) -> String {
        loop {
            if let Some((_, rest)) = self.process.line().split_once(word) {
                return rest.to_owned();
            }
        }
    }

    fn kill_worker(&self, domain: &Domain) {
        kill(domain.status().unwrap().pid);
    }

    /// Ends the broker. Returns what it has said since it was ready.
    fn end(self, domain: Domain) -> String {
        // The crash may strike only here. Then the next worker ends the domain, and no broker is left to say so.
        let stopped = domain.stop_broker(true);
        assert!(matches!(stopped, Ok(()) | Err(Error::Unreachable(Unreachable::Gone { .. }))), "{stopped:?}");
        drop(domain);
        self.process.wait().expect(0).text()
    }
}

/// Has this program continue for the broker.
fn replace(domain: &Domain) -> Result<(), Error> {
    domain.replace_broker(File::open(std::env::current_exe().unwrap()).unwrap().as_fd())
}

/// The crash point at which a process was killed, as the output says.
fn struck(said: &str) -> Option<String> {
    said.lines().find_map(|line| line.strip_prefix("crash point: ")).map(str::to_owned)
}

fn socket(directory: &tempfile::TempDir) -> PathBuf {
    directory.path().join("sockets/test.sock")
}

/// What exists, apart from the process that serves, and from waits: members ask for these again.
fn contents(domain: &Domain) -> StatusInfo {
    let mut status = domain.status().unwrap();
    status.users.iter_mut().for_each(|user| user.waits = 0);
    StatusInfo { pid: 0, supervisor: None, restarts: 0, ..status }
}

/// Requests of each kind, one after the other, each with its only right answer.
fn every_request(broker: &Broker, domain: &Domain) {
    let before = contents(domain);
    let mut watch = domain.watch("a").unwrap();
    let first = commit(domain, "a", 1);
    assert_eq!(first.version(), 1);
    let second = commit(domain, "a", 2);
    assert_eq!(second.version(), 2);
    assert_contains(&domain.open("a", WATCHDOG).unwrap(), 2);
    assert_contains(&first, 1);
    let mut changes = Vec::new();
    while changes.len() < 3 {
        match watch.next(WATCHDOG).unwrap().unwrap() {
            WatchEvent::Name(NameEvent { change, .. }) => changes.push(change),
            other => panic!("{other:?}"),
        }
    }
    assert!(
        matches!(
            changes[..],
            [Change::Created { .. }, Change::Committed { version: 1, .. }, Change::Committed { version: 2, .. }]
        ),
        "{changes:?}"
    );
    drop(watch);

    let built = match domain.open_or_build("b", WATCHDOG).unwrap() {
        OpenOrBuild::Build(claim) => {
            let mut build = claim.create(Place::Host).tensor("x", DType::U8, &[64]).allocate().unwrap();
            build.write("x", &[3; 64]).unwrap();
            build.commit().unwrap()
        }
        OpenOrBuild::Opened(_) => panic!("it does not exist"),
    };
    assert_eq!(built.version(), 1);

    let writer = domain.timeline_writer("line").unwrap();
    let reader = broker.connect();
    let line = reader.timeline("line").unwrap();
    writer.signal(1).unwrap();
    line.wait(1, WATCHDOG).unwrap();
    writer.close();
    // Another incarnation continues with the value, in another cell.
    let writer = reader.timeline_writer("line").unwrap();
    assert_eq!(writer.timeline().value(), 1);
    writer.signal(2).unwrap();
    domain.timeline("line").unwrap().wait(2, WATCHDOG).unwrap();
    drop((writer, line));

    let semaphore = domain.semaphore("s", 2).unwrap();
    let permit = semaphore.acquire(WATCHDOG).unwrap();
    assert_eq!(reader.semaphore("s", 2).unwrap().available(), 1);
    drop(permit);
    assert_eq!(semaphore.available(), 2);
    drop(semaphore);

    let topic = domain.topic("t").max_bytes(64).depth(2).place(Place::Host).create().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let publisher = reader.topic("t").timeout(WATCHDOG).open().unwrap().publisher().unwrap();
    send(&publisher, 4);
    assert_eq!(subscriber.recv(WATCHDOG).unwrap().bytes().unwrap(), [4; 8]);
    drop((publisher, subscriber, topic));

    let queue = domain.queue("q").tasks(4).inputs(4, 64).outputs(4, 64).place(Place::Host).create().unwrap();
    let attached = queue.attach(&second).unwrap();
    let task = Task::new("sum").part(attached.part(..64).unwrap()).output(8);
    let ticket = queue.submit(task, WATCHDOG).unwrap();
    let mut claimed = queue.claim(WATCHDOG).unwrap();
    claimed.output_mut().unwrap().as_mut_slice::<u64>().unwrap()[0] = 5;
    claimed.complete().unwrap();
    assert_eq!(ticket.wait(WATCHDOG).unwrap().output().unwrap().as_slice::<u64>().unwrap()[0], 5);
    drop(ticket);
    queue.detach(&attached, WATCHDOG).unwrap();
    drop((queue, attached));

    // Members are detached from a withdrawn topic, perhaps twice, and not from the next topic of that name.
    let topic = domain.topic("u").max_bytes(64).depth(2).place(Place::Host).create().unwrap();
    let publisher = reader.topic("u").timeout(WATCHDOG).open().unwrap().publisher().unwrap();
    domain.withdraw("u", Duration::from_millis(1), Then::Stale).unwrap();
    eventually("its members are detached", || topic.check().is_err());
    drop((publisher, topic));
    let topic = domain.topic("u").max_bytes(64).depth(2).place(Place::Host).create().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let publisher = reader.topic("u").timeout(WATCHDOG).open().unwrap().publisher().unwrap();
    send(&publisher, 6);
    assert_eq!(subscriber.recv(WATCHDOG).unwrap().bytes().unwrap(), [6; 8]);
    drop((publisher, subscriber, topic));

    let third = broker.connect();
    let evicted = third.member();
    assert_eq!(domain.evict(partywall::info::Whom::Member(evicted), false).unwrap().len(), 1);
    assert!(third.open("a", Duration::ZERO).is_err());
    drop(third);

    domain.withdraw("b", Duration::from_secs(1000), Then::Stale).unwrap();
    assert_eq!(domain.remove("a").unwrap().version, 2);
    assert!(matches!(domain.open("a", Duration::ZERO), Err(Error::NotFound(_))));
    drop((first, second, built));
    drop(reader);
    // The evicted connection keeps its row until this process ends, and nothing else.
    let counts = |status: &StatusInfo| {
        let StatusInfo { names, versions, leases, timelines, semaphores, .. } = *status;
        [names, versions, leases, timelines, semaphores]
    };
    let deadline = Instant::now() + WATCHDOG;
    while counts(&contents(domain)) != counts(&before) {
        assert!(
            Instant::now() < deadline,
            "not all is given back: {:?}, not {:?}: {:?}",
            counts(&contents(domain)),
            counts(&before),
            domain.names()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the requests with a worker that is killed at a crash point: after so many others, or at the first of this name.
/// Returns the name of the point, if there was one.
fn every_request_with_a_kill(victim: u64, point: impl Display) -> Option<String> {
    let mut broker = Broker::start(victim, point);
    let domain = broker.connect();
    let instance = domain.status().unwrap().instance;
    let kept = commit(&domain, "kept", 9);
    for _ in 0..victim {
        broker.kill_worker(&domain);
    }
    every_request(&broker, &domain);
    assert_contains(&kept, 9);
    assert_contains(&broker.connect().open("kept", WATCHDOG).unwrap(), 9);
    let status = domain.status().unwrap();
    assert_eq!(status.instance, instance);
    let point = (status.restarts != victim).then(|| {
        assert_eq!(status.restarts, victim + 1);
        broker.expect("crash point: ")
    });
    broker.end(domain);
    point
}

/// Kills a worker at the crash point `first` and at each one that is a multiple of `step` later, until it has passed
/// all.
fn killed_at_every(step: usize, first: u64, victim: u64) {
    let struck = (first..).step_by(step).map_while(|number| every_request_with_a_kill(victim, number)).count();
    assert!(struck > 0, "there are no points");
}

/// Kills a worker at the first crash point of each name.
fn killed_at_each_kind(points: &[&[&str]], victim: u64) {
    for point in points.concat() {
        assert_eq!(every_request_with_a_kill(victim, point).as_deref(), Some(point));
    }
}

#[test]
fn worker_killed_between_two_steps_loses_and_repeats_nothing() {
    killed_at_each_kind(&[SERVING], 0);
    killed_at_every(16, 9, 0);
}

#[test]
fn worker_killed_while_it_continues_is_replaced_too() {
    killed_at_each_kind(&[SERVING, CONTINUING], 1);
    killed_at_every(16, 9, 1);
}

/// Defines the tests that do the same at every point, in parts that run side by side.
macro_rules! in_quarters {
    ($module:ident, $victim:literal) => {
        mod $module {
            use super::killed_at_every;

            #[test]
            fn first_quarter() {
                killed_at_every(4, 0, $victim);
            }

            #[test]
            fn second_quarter() {
                killed_at_every(4, 1, $victim);
            }

            #[test]
            fn third_quarter() {
                killed_at_every(4, 2, $victim);
            }

            #[test]
            fn fourth_quarter() {
                killed_at_every(4, 3, $victim);
            }
        }
    };
}

in_quarters!(worker_killed_at_every_crash_point, 0);
in_quarters!(next_worker_killed_at_every_crash_point, 1);

/// Memory that nobody needs any more may take long to be freed: a worker serves first.
// Holds 93.
#[test]
fn memory_that_a_dead_worker_left_is_closed_once_the_next_one_serves() {
    let mut points = BTreeSet::new();
    for number in 0.. {
        let stop = |command: &mut Command| _ = command.env("PARTYWALL_TEST_CRASH", format!("{number} stopped"));
        let mut broker = Broker::start_where("1", number, stop);
        let domain = broker.connect();
        let StatusInfo { pid, supervisor, .. } = domain.status().unwrap();
        let supervisor = supervisor.unwrap();
        // It has come with a message that is not complete, so no record names it.
        let mut client = wire::Client::join(&socket(&broker.directory));
        let memory = memfd::frozen("left", b"x").unwrap();
        let message = client.request(Call::Ping, 1);
        assert!(client.call.send(&message[..1], &[&memory]));
        drop(memory);
        eventually("it has arrived", || has_open(supervisor, "/memfd:left"));
        kill(pid);
        let point = broker.expect("crash point: ");
        let serves = !CONTINUING.contains(&&*point) && CONTINUING.iter().all(|point| points.contains(*point));
        assert!(serves || has_open(supervisor, "/memfd:left"), "{point}");
        // The next worker does the same.
        let worker = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).unwrap();
        kill(worker.trim().parse().unwrap());
        eventually("it is closed", || !has_open(supervisor, "/memfd:left"));
        assert_eq!(domain.status().unwrap().restarts, 2);
        broker.end(domain);
        if serves {
            return;
        }
        points.insert(point);
    }
}

/// Returns whether a process has a file open whose name begins so.
fn has_open(pid: u32, name: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    // One may be closed meanwhile.
    let links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    links.into_iter().any(|link| link.to_string_lossy().starts_with(name))
}

/// What a stream stores after the end of its timeline may be the last value that it has promised: the cell is free
/// then.
#[test]
fn late_store_is_not_forgotten_by_a_worker_that_is_killed_before_it_is_undone() {
    let mut points = BTreeSet::new();
    for number in 0.. {
        let broker = Broker::start(0, number);
        let domain = broker.connect();
        let before = domain.status().unwrap().fds;
        let path = socket(&broker.directory);
        let stored = std::thread::spawn(move || {
            let mut writer = wire::Client::join(&path);
            let name = || wire::called("late");
            // The memory of a shared timeline is closed with its last cell.
            let (opened, fds) = writer.ask_with(Call::OpenTimeline { name: name(), writer: true, shared: true }, &[]);
            let Ok(Answer::Timeline(opened)) = opened else { panic!("{opened:?}") };
            let slab = Slab::map(&fds[0]).unwrap();
            slab.cell(opened.cell).unwrap().announce(1);
            writer.ask(Call::AbandonTimeline { name: name() }).unwrap();
            writer.ask(Call::Release { lease: opened.lease }).unwrap();
            let value = slab.memory().slice::<u64>(cell_offset(opened.cell), 1).unwrap();
            value.set(0, 1);
            // Without a request, whose points would come between.
            eventually("it is undone", || value.get(0) != 1);
        });
        // This client does not continue after a death; then the kill came before the store.
        let stored = stored.join();
        if stored.is_ok() {
            eventually("the cell is free", || domain.status().unwrap().fds == before);
        }
        let said = broker.end(domain);
        match struck(&said) {
            Some(point) if stored.is_ok() => _ = points.insert(point),
            Some(_) => {}
            None => break,
        }
    }
    assert_passed(&points, &[GUARDING]);
}

// Holds 137.
#[test]
fn worker_is_started_again_while_the_kernel_lacks_something() {
    for what in [PROCESSES, DESCRIPTORS] {
        let broker = Broker::start_where("none", 0, |command| _ = command.env(LACKS, what));
        let domain = broker.connect();
        let instance = domain.status().unwrap().instance;
        let kept = commit(&domain, "kept", 9);
        let before = contents(&domain);
        broker.kill_worker(&domain);
        assert_eq!(contents(&domain), before, "{what}");
        assert_goes_on(&broker, &domain, instance, &kept);
        assert_eq!(domain.status().unwrap().restarts, 1, "nothing but the kill was a death");
        let said = broker.end(domain);
        assert!(said.matches("lacking").count() >= WITHOUT_PROCESS, "{what}: {said}");
    }
}

// Holds 137.
#[test]
fn signal_ends_a_domain_whose_worker_cannot_be_started() {
    let mut broker = Broker::start_where("none", 0, |command| _ = command.env(LACKS, ALL_PROCESSES));
    let domain = broker.connect();
    let status = domain.status().unwrap();
    let supervisor = partywall_harness::pidfd_of(status.supervisor.unwrap());
    kill(status.pid);
    broker.expect("lacking");
    partywall_os::process::kill(&supervisor, Signal::TERM).unwrap();
    broker.process.wait().expect(0);
    assert!(!socket(&broker.directory).exists());
}

// Holds 137.
#[test]
fn needs_minutes_domain_ends_if_no_worker_can_be_started_for_a_minute() {
    let broker = Broker::start_where("none", 0, |command| _ = command.env(LACKS, ALL_PROCESSES));
    let domain = broker.connect();
    let kept = commit(&domain, "kept", 9);
    broker.kill_worker(&domain);
    eventually("members know that it is gone", || {
        matches!(domain.status(), Err(Error::Unreachable(Unreachable::Gone { .. })))
    });
    assert!(!socket(&broker.directory).exists());
    assert_contains(&kept, 9);
}

/// The lengths of the two files of a worker's journal.
fn journal(worker: u32) -> Vec<u64> {
    let files = fs::read_dir(format!("/proc/{worker}/fd")).unwrap().map(|entry| entry.unwrap().path());
    let is_journal =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.starts_with("/memfd:partywall:journal (deleted)"));
    let mut files: Vec<_> = files.filter(is_journal).collect();
    files.sort();
    files.iter().map(|path| fs::metadata(path).unwrap().len()).collect()
}

/// Limits the length of the files that a worker writes, its journal among them.
fn limit_files(worker: u32, bytes: Option<u64>) {
    let pid = Pid::from_raw(worker.try_into().unwrap());
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

// Holds 137.
#[test]
fn what_members_hold_can_be_given_back_while_the_journal_cannot_grow() {
    let broker = Broker::start_where("none", 0, |command| _ = command.env(LACKS, MEMORY));
    let domain = broker.connect();
    let kept = commit(&domain, "kept", 9);
    let other = broker.connect();
    let worker = domain.status().unwrap().pid;
    limit_files(worker, journal(worker).into_iter().max());
    let mut held = Vec::new();
    let refused = loop {
        match other.opener("kept").open() {
            Ok(segment) => held.push(segment),
            Err(error) => break error,
        }
    };
    assert!(refused.to_string().contains("making room in the broker's journal"), "{refused}");
    let refused = Domain::options().socket(socket(&broker.directory)).start(false).connect().unwrap_err();
    assert!(refused.to_string().contains("making room in the broker's journal"), "{refused}");
    // Each of these is recorded in the memory that is left.
    let leases = domain.status().unwrap().leases;
    let opened = held.len() as u64;
    drop(held);
    eventually("all leases are given back", || domain.status().unwrap().leases == leases - opened);
    drop(other);
    eventually("it has left", || domain.members().unwrap().len() == 1);
    assert_eq!(domain.remove("kept").unwrap().version, 1);
    kill(worker);
    let after = domain.status().unwrap();
    assert_eq!((after.names, after.leases, after.restarts), (0, 1, 1));
    assert_contains(&kept, 9);
    assert_eq!(commit(&domain, "next", 1).version(), 1);
    broker.end(domain);
}

// Holds 137.
#[test]
fn journal_that_could_not_be_written_begins_anew() {
    let broker = Broker::start_where("none", 0, |command| _ = command.env(LACKS, MEMORY));
    let domain = broker.connect();
    let instance = domain.status().unwrap().instance;
    let first = commit(&domain, "first", 1);
    let kept = commit(&domain, "kept", 9);
    let worker = domain.status().unwrap().pid;
    let before = journal(worker);
    // Not even a record of what is given back can be written.
    limit_files(worker, Some(0));
    domain.remove("first").unwrap();
    drop(first);
    limit_files(worker, None);
    eventually("a snapshot is written", || {
        domain.ping().unwrap();
        let lengths = journal(worker);
        (lengths[0] == 0) != (before[0] == 0)
    });
    kill(worker);
    assert_goes_on(&broker, &domain, instance, &kept);
    assert!(matches!(domain.open("first", Duration::ZERO), Err(Error::NotFound(_))));
    broker.end(domain);
}

/// Checks that a broker knows what it knew before, and goes on.
fn assert_goes_on(broker: &Broker, domain: &Domain, instance: u64, kept: &partywall::Segment) {
    assert_contains(kept, 9);
    assert_contains(&broker.connect().open("kept", WATCHDOG).unwrap(), 9);
    let next = commit(domain, "next", 1);
    assert_eq!(next.version(), 1);
    assert_eq!(domain.remove("next").unwrap().version, 1);
    assert_eq!(domain.status().unwrap().instance, instance);
}

/// Replaces a broker whose worker `victim` is killed at each point in turn. Returns the points' names.
fn replaced_and_killed_at_each_point(victim: u64) -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    for number in 0.. {
        let broker = Broker::start(victim, number);
        let domain = broker.connect();
        let instance = domain.status().unwrap().instance;
        let kept = commit(&domain, "kept", 9);
        replace(&domain).unwrap();
        assert_goes_on(&broker, &domain, instance, &kept);
        let said = broker.end(domain);
        let executed = said.matches("executed").count();
        let Some(point) = struck(&said) else {
            assert_eq!(executed, 1, "{said}");
            return points;
        };
        // A program whose worker has not served is followed by the former one.
        assert!(victim == 0 || executed == 2 || !CONTINUING.contains(&&*point), "{said}");
        points.insert(point);
    }
    unreachable!("there are not that many points")
}

// Holds 141.
#[test]
fn worker_killed_while_it_hands_over_is_replaced_by_either_program() {
    assert_passed(&replaced_and_killed_at_each_point(0), &[HANDING_OVER]);
}

// Holds 141.
#[test]
fn program_whose_worker_is_killed_before_it_serves_leaves_the_former_one() {
    assert_passed(&replaced_and_killed_at_each_point(1), &[CONTINUING]);
}

// Holds 142.
#[test]
fn supervisor_killed_while_no_worker_runs_ends_the_domain() {
    let mut points = BTreeSet::new();
    for number in 0.. {
        let mut broker = Broker::start_with(SUPERVISOR, number, "");
        let domain = broker.connect();
        let kept = commit(&domain, "kept", 9);
        let _ = replace(&domain);
        if domain.status().is_ok() {
            broker.end(domain);
            break;
        }
        points.insert(broker.expect("crash point: "));
        eventually("members know that it is gone", || {
            matches!(domain.status(), Err(Error::Unreachable(Unreachable::Gone { .. })))
        });
        assert_contains(&kept, 9);
    }
    assert_passed(&points, &[EXECUTING]);
}

// Holds 141.
#[test]
fn program_that_is_not_executed_leaves_the_former_one() {
    let broker = Broker::start_with("none", 0, NOT_EXECUTED);
    let domain = broker.connect();
    let instance = domain.status().unwrap().instance;
    let kept = commit(&domain, "kept", 9);
    for _ in 0..2 {
        replace(&domain).unwrap();
        assert_goes_on(&broker, &domain, instance, &kept);
    }
    assert_eq!(domain.status().unwrap().restarts, 0);
    broker.end(domain);
}

// Holds 140.
#[test]
fn program_that_reads_another_format_is_refused() {
    let broker = Broker::start_with("none", 0, OTHER_FORMAT);
    let domain = broker.connect();
    let kept = commit(&domain, "kept", 9);
    let before = domain.status().unwrap();
    match replace(&domain) {
        Err(Error::Denied(Denied::Replacement { why: NoReplacement::Program { said } })) => {
            let formats = said.split("format ").skip(1).map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
            let formats: Vec<Option<u32>> = formats.map(|number| number?.parse().ok()).collect();
            // The other program's format is the next one.
            let [Some(state), Some(ours)] = formats[..] else { panic!("{said}") };
            assert!(state == ours + 1 && said.contains("the state has format"), "{said}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(domain.status().unwrap(), before);
    assert_goes_on(&broker, &domain, before.instance, &kept);
    assert!(!broker.end(domain).contains("executed"));
}
