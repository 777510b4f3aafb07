// Holds 71.
//! Publications that their publisher has left, in large numbers and when something fails.

use std::{
    fs,
    sync::{Arc, Weak},
    time::Duration,
};

use partywall::{
    DType, Domain, Error, Segment, WatchEvent,
    cuda::{DeviceBuffer, ForeignMemory},
    error::{Gone, Unreachable},
};
use partywall_harness::{Actor, Sandbox, Signal, commit, eventually, next_order, say, simulated};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::{
    deaths::in_a_child,
    world::{TIMEOUT, World, buffer, gpu, value_of},
};

/// How many publications a test leaves. A member may wait for 1,024 events.
const MANY: usize = 1200;

fn name(number: usize) -> String {
    format!("payload/{number}")
}

/// Publishes memory that lasts as long as others have it open. Returns what tells whether it is freed, too.
fn payload(domain: &Domain, name: &str, value: u8) -> (Segment, Weak<DeviceBuffer>) {
    let memory = buffer(&gpu(domain), 4096, value);
    let freed = Arc::downgrade(&memory);
    let memory = ForeignMemory::try_from(memory).unwrap();
    let publication = domain.publish(name).tensor("x", DType::U8, &[4096], &memory);
    (publication.until_unused(true).commit().unwrap(), freed)
}

pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let (role, number) = role.rsplit_once(' ').unwrap();
    let number = number.parse().unwrap();
    match role {
        "reader of" => read(&domain, number),
        "publisher of" => publish(&domain, number),
        other => panic!("no role is called {other:?}"),
    }
}

/// Opens payloads, and closes those whose numbers it is sent.
fn read(domain: &Domain, number: usize) {
    let mut open: Vec<_> = (0..number).map(|i| Some(domain.open(&name(i), TIMEOUT).unwrap())).collect();
    say("ready");
    while let Some(order) = next_order() {
        for number in order.split_whitespace() {
            let segment = open[number.parse::<usize>().unwrap()].take().unwrap();
            assert_eq!(value_of(&segment, "x"), 7);
        }
        say("done");
    }
}

/// Publishes payloads, leaves them when it is told to, and says when their memory is freed.
fn publish(domain: &Domain, number: usize) {
    let (published, freed): (Vec<_>, Vec<_>) = (0..number).map(|i| payload(domain, &name(i), 7)).unzip();
    say("ready");
    next_order();
    published.into_iter().for_each(|published| published.leave_name().unwrap());
    eventually("they are freed", || alive(&freed) == 0);
    say("freed");
}

/// Returns how many threads of this process wait for the ends of left versions.
fn threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().map(|task| fs::read(task.unwrap().path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name == b"partywall-name\n")).count()
}

fn alive(freed: &[Weak<DeviceBuffer>]) -> usize {
    freed.iter().filter(|memory| memory.strong_count() > 0).count()
}

#[test]
fn many_left_publications_need_one_thread_and_one_wait_on_the_simulated_gpu() {
    simulated("left::many_left_publications_need_one_thread_and_one_wait_on_the_simulated_gpu", |_| {
        let world = World::with(|config| config.limits.member_waits = 2);
        let domain = world.connect();
        let other = world.connect();
        let (published, freed): (Vec<_>, Vec<_>) = (0..MANY).map(|i| payload(&domain, &name(i), 7)).unzip();
        let mut reader = world.play(&format!("left: reader of {MANY}"));
        published.into_iter().for_each(|published| published.leave_name().unwrap());
        eventually("the publisher has left them", || other.status().unwrap().leases == MANY as u64);
        assert_eq!((alive(&freed), threads()), (MANY, 1));
        let absent = domain.open("absent", Duration::from_millis(1));
        assert!(matches!(absent, Err(Error::Timeout { .. })), "a wait is left: {absent:?}");

        // 7 and the number of publications have no common divisor.
        let order: Vec<_> = (0..MANY).map(|i| i * 7 % MANY).collect();
        let (single, rest) = order.split_at(20);
        let mut left = MANY;
        for batch in single.chunks(1).chain(rest.chunks(149)) {
            let numbers: Vec<_> = batch.iter().map(usize::to_string).collect();
            reader.request(&numbers.join(" "));
            left -= batch.len();
            eventually("these are freed", || batch.iter().all(|i| freed[*i].strong_count() == 0));
            assert_eq!(alive(&freed), left, "and no others");
            assert!(threads() <= 1);
        }
        eventually("the thread ends", || threads() == 0);
        drop(domain);
        eventually("the connection ends", || other.members().unwrap().len() == 2);
    });
}

/// Makes the calling thread unable to start others.
pub(crate) fn forbid_threads() {
    let rules = [(libc::SYS_clone, Vec::new()), (libc::SYS_clone3, Vec::new())];
    let refused = SeccompAction::Errno(libc::EAGAIN as u32);
    let filter =
        SeccompFilter::new(rules.into(), SeccompAction::Allow, refused, std::env::consts::ARCH.try_into().unwrap());
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

#[test]
fn left_publication_outlasts_a_thread_that_cannot_be_started_on_the_simulated_gpu() {
    simulated("left::left_publication_outlasts_a_thread_that_cannot_be_started_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let other = world.connect();
        let (published, freed) = payload(&domain, &name(0), 7);
        let mut reader = world.play("left: reader of 1");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                forbid_threads();
                assert!(std::thread::Builder::new().spawn(|| ()).is_err());
                published.leave_name().unwrap();
            });
        });
        assert!(freed.strong_count() > 0, "a reader has it");
        eventually("the publisher has left it", || other.inspect(&name(0)).unwrap().version.leases == 1);
        assert!(freed.strong_count() > 0, "a reader still has it");
        reader.request("0");
        eventually("it is freed", || freed.strong_count() == 0);
    });
}

#[test]
fn left_publication_that_is_no_longer_the_latest_lasts_for_its_readers_on_the_simulated_gpu() {
    simulated(
        "left::left_publication_that_is_no_longer_the_latest_lasts_for_its_readers_on_the_simulated_gpu",
        |world| {
            let domain = world.connect();
            let other = world.connect();
            for is_removed in [true, false] {
                let (published, freed) = payload(&domain, &name(0), 7);
                let mut reader = world.play("left: reader of 1");
                published.leave_name().unwrap();
                eventually("the publisher has left it", || other.inspect(&name(0)).unwrap().version.leases == 1);
                let newer = match is_removed {
                    true => other.remove(&name(0)).map(|_| None).unwrap(),
                    false => Some(payload(&domain, &name(0), 8)),
                };
                // The thread has seen the end of the former version as soon as it has seen that of a later one.
                let (last, last_freed) = payload(&domain, &name(1), 9);
                last.leave_name().unwrap();
                eventually("the last one is freed", || last_freed.strong_count() == 0);
                assert!(freed.strong_count() > 0, "a reader has it");
                reader.request("0");
                eventually("it is freed", || freed.strong_count() == 0);
                drop(newer);
            }
        },
    );
}

#[test]
fn end_is_seen_although_its_event_was_missed_on_the_simulated_gpu() {
    simulated("left::end_is_seen_although_its_event_was_missed_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let mut publisher = world.play("left: publisher of 2");
        let mut reader = world.play("left: reader of 2");
        publisher.proceed();
        eventually("the publisher has left them", || domain.status().unwrap().leases == 2);
        let mut watch = domain.watch("*").unwrap();
        publisher.stop();
        // The first event ends the publisher's wait, so the second one waits for its next question.
        reader.request("0");
        reader.request("1");
        // The broker keeps 1 MiB of events.
        let others = format!("others/{}", "x".repeat(200));
        (0..4000).for_each(|_| drop(commit(&domain, &others, 1)));
        let missed = watch.next(TIMEOUT).unwrap();
        assert!(matches!(missed, Some(WatchEvent::Missed { .. })), "{missed:?}");
        publisher.resume();
        publisher.expect("freed");
    });
}

/// Publishes payloads in the domain of a sandbox, and starts a reader of them.
fn with_a_reader(sandbox: &Sandbox, domain: &Domain, number: usize) -> (Vec<Segment>, Vec<Weak<DeviceBuffer>>, Actor) {
    let (published, freed) = (0..number).map(|i| payload(domain, &name(i), 7)).unzip();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let role = format!("left: reader of {number}");
    let mut reader = Actor::start(command.env("PARTYWALL_SOCKET", sandbox.socket()), &role);
    reader.expect("ready");
    (published, freed, reader)
}

#[test]
fn left_publications_outlast_a_stopped_broker_on_the_simulated_gpu() {
    simulated("left::left_publications_outlast_a_stopped_broker_on_the_simulated_gpu", |_| {
        let sandbox = Sandbox::new();
        let broker = partywall_harness::pidfd_of(sandbox.broker());
        let domain = sandbox.domain();
        let (published, freed, mut reader) = with_a_reader(&sandbox, &domain, 4);
        let signal = |signal| partywall_os::process::kill(&broker, signal).unwrap();
        let mut published = published.into_iter();
        published.by_ref().take(2).for_each(|published| published.leave_name().unwrap());
        signal(Signal::STOP);
        published.for_each(|published| published.leave_name().unwrap());
        // The calls of the thread fail, too.
        let refused = domain.ping();
        assert!(matches!(refused, Err(Error::Unreachable(Unreachable::NoAnswer { .. }))), "{refused:?}");
        assert_eq!(alive(&freed), 4);
        signal(Signal::CONT);
        eventually("the publisher has left them", || {
            (0..4).all(|i| domain.inspect(&name(i)).is_ok_and(|info| info.version.leases == 1))
        });
        for (number, memory) in freed.iter().enumerate() {
            assert_eq!(alive(&freed), 4 - number);
            reader.request(&number.to_string());
            eventually("it is freed", || memory.strong_count() == 0);
        }
        drop((domain, reader));
    });
}

#[test]
fn left_publications_outlast_a_killed_worker_of_the_broker_on_the_simulated_gpu() {
    simulated("left::left_publications_outlast_a_killed_worker_of_the_broker_on_the_simulated_gpu", |_| {
        let sandbox = Sandbox::new();
        let domain = sandbox.domain();
        let (published, freed, mut reader) = with_a_reader(&sandbox, &domain, 3);
        for (round, published) in published.into_iter().enumerate() {
            let broker = sandbox.broker();
            published.leave_name().unwrap();
            partywall_harness::kill(broker);
            eventually("another worker serves", || domain.status().is_ok_and(|status| status.pid != broker));
            eventually("the publisher has left it", || domain.inspect(&name(round)).unwrap().version.leases == 1);
            assert_eq!(alive(&freed), 3 - round);
            reader.request(&round.to_string());
            eventually("it is freed", || freed[round].strong_count() == 0);
        }
        drop((domain, reader));
    });
}

#[test]
fn left_publications_end_with_the_broker_on_the_simulated_gpu() {
    simulated("left::left_publications_end_with_the_broker_on_the_simulated_gpu", |_| {
        let mut world = World::new();
        let domain = world.connect();
        let (published, freed): (Vec<_>, Vec<_>) = (0..3).map(|i| payload(&domain, &name(i), 7)).unzip();
        let _reader = world.play("left: reader of 3");
        published.into_iter().for_each(|published| published.leave_name().unwrap());
        world.end_broker();
        eventually("they are freed", || alive(&freed) == 0);
        eventually("the thread ends", || threads() == 0);
    });
}

#[test]
fn forked_child_drops_no_left_publication_on_the_simulated_gpu() {
    simulated("left::forked_child_drops_no_left_publication_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let (published, freed): (Vec<_>, Vec<_>) = (0..2).map(|i| payload(&domain, &name(i), 7)).unzip();
        let mut reader = world.play("left: reader of 2");
        let [first, second] = published.try_into().unwrap();
        first.leave_name().unwrap();
        assert!(in_a_child(move || match (second.leave_name(), freed[0].strong_count()) {
            (Err(Error::Unreachable(Unreachable::Forked { .. })), 1..) => Ok(()),
            other => Err(format!("{other:?}")),
        }));
        reader.request("0");
    });
}

#[test]
fn evicted_publisher_keeps_no_left_publication_on_the_simulated_gpu() {
    simulated("left::evicted_publisher_keeps_no_left_publication_on_the_simulated_gpu", |world| {
        let domain = world.connect();
        let (published, freed): (Vec<_>, Vec<_>) = (0..3).map(|i| payload(&domain, &name(i), 7)).unzip();
        let _reader = world.play("left: reader of 3");
        published.into_iter().for_each(|published| published.leave_name().unwrap());
        let mut evictor = world.play("heap: evictor");
        assert_eq!(evictor.line(), "evicted");
        eventually("they are freed", || alive(&freed) == 0);
        eventually("the thread ends", || threads() == 0);
        assert!(matches!(domain.ping(), Err(Error::Gone(Gone::Evicted { .. }))));
    });
}
