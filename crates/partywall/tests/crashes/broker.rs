//! The broker's worker is killed between any two steps of each request, and of a restart. Its supervisor starts the next one;
//! every call is answered as if nothing had happened, and takes effect once.
#![allow(unsafe_code)] // processes that share their file descriptors

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, OpenOrBuild, Place, Policy, Publisher, Task, Then, WatchEvent,
    error::Unreachable,
    info::{Change, NameEvent, StatusInfo},
};
use partywall_broker::{
    Config,
    supervisor::{Supervisor, Worker, exit_code},
};
use partywall_harness::{WATCHDOG, crash};
use partywall_os::supervision::{LeftOpen, fork_sharing_files};

use super::points::{CONTINUING, SERVING, assert_passed};

/// The role of a supervisor, whose worker is killed at a crash point.
pub(crate) const ROLE: &str = "broker supervised";

/// The socket, and which worker is killed: the first one, or the one after it.
const SOCKET: &str = "PARTYWALL_SOCKET";
const VICTIM: &str = "PARTYWALL_TEST_VICTIM";

/// Supervises until the test closes standard input.
#[allow(clippy::print_stdout, reason = "it is how a role talks to the test")]
pub(crate) fn play() {
    let mut config = Config::new(std::env::var_os(SOCKET).unwrap(), "test", partywall::VERSION);
    config.idle_exit = None;
    config.settle = Duration::from_millis(1);
    let victim: u64 = std::env::var(VICTIM).unwrap().parse().unwrap();
    let supervise = move || {
        let supervisor = Supervisor::bind(config, None).unwrap();
        let work = |worker: Worker| {
            // SAFETY: the process was just cloned from the supervisor, and uses nothing but what that has open.
            let left = unsafe { LeftOpen::except(worker.of_supervisor()) }.unwrap();
            let is_victim = worker.restarts().0 == victim;
            // A broker that dies before it has served at all is not restarted.
            if is_victim && victim > 0 {
                crash::arm();
            }
            let broker = worker.start(left).unwrap();
            if is_victim && victim == 0 {
                crash::arm();
            }
            exit_code(broker.run().ok())
        };
        // SAFETY: this process has one thread, and its workers end before it.
        let ended =
            supervisor.run(|child| unsafe { fork_sharing_files(child) }, work, |pid| println!("ready {pid}"), None);
        u8::from(ended.is_err())
    };
    // SAFETY: a supervisor has one thread, and this program has others; they hold no lock that it needs, as they wait for
    // this test.
    assert_eq!(unsafe { partywall_os::process::in_fork(supervise) }, Ok(0));
}

/// A supervised broker for one run.
struct Broker {
    process: partywall_harness::Running,
    directory: tempfile::TempDir,
}

impl Broker {
    /// Starts a broker whose worker `victim` is killed after it has passed `points` crash points.
    fn start(victim: u64, points: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "play", "--nocapture"]).env(super::ROLE, ROLE);
        command.env(SOCKET, socket(&directory)).env(VICTIM, victim.to_string());
        command.env("PARTYWALL_TEST_CRASH", format!("{points} killed"));
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
        let pidfd = partywall_harness::pidfd_of(domain.status().unwrap().pid);
        partywall_os::process::kill(pidfd, partywall_harness::Signal::KILL).unwrap();
    }

    fn end(self, domain: Domain) {
        // The crash may strike only here. Then the next worker ends the domain, and no broker is left to say so.
        let stopped = domain.stop_broker(true);
        assert!(matches!(stopped, Ok(()) | Err(Error::Unreachable(Unreachable::Gone { .. }))), "{stopped:?}");
        drop(domain);
        self.process.wait().expect(0);
    }
}

fn socket(directory: &tempfile::TempDir) -> PathBuf {
    directory.path().join("sockets/test.sock")
}

fn commit(domain: &Domain, name: &str, value: u8) -> partywall::Segment {
    let mut build = domain.create(name, Place::Host).tensor("x", DType::U8, &[64]).kept(true).allocate().unwrap();
    build.write("x", &[value; 64]).unwrap();
    build.commit().unwrap()
}

fn send(publisher: &Publisher, value: u8) {
    let mut loan = publisher.loan(DType::U8, &[8], WATCHDOG).unwrap();
    loan.bytes_mut().unwrap().fill(value);
    loan.filled().publish(WATCHDOG).unwrap();
}

fn assert_contains(segment: &partywall::Segment, value: u8) {
    assert_eq!(segment.tensor("x").unwrap().to_vec().unwrap(), [value; 64]);
}

/// What exists, apart from the process that serves.
fn contents(domain: &Domain) -> StatusInfo {
    StatusInfo { pid: 0, supervisor: None, restarts: 0, ..domain.status().unwrap() }
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
    let deadline = Instant::now() + Duration::from_secs(10);
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

/// Runs the requests with a worker that is killed at each point in turn. Returns the points' names.
fn killed_at_each_point(victim: u64) -> BTreeSet<String> {
    let mut points = BTreeSet::new();
    for number in 0.. {
        let mut broker = Broker::start(victim, number);
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
        if status.restarts == victim {
            broker.end(domain);
            return points;
        }
        assert_eq!(status.restarts, victim + 1);
        points.insert(broker.expect("crash point: "));
        broker.end(domain);
    }
    unreachable!("there are not that many points")
}

#[test]
fn worker_killed_between_any_two_steps_loses_and_repeats_nothing() {
    assert_passed(&killed_at_each_point(0), &[SERVING]);
}

#[test]
fn worker_killed_while_it_continues_is_replaced_too() {
    assert_passed(&killed_at_each_point(1), &[SERVING, CONTINUING]);
}
