// Holds 58.
//! Names that are withdrawn with a deadline: what their readers learn, and what happens to those that do not drop them.

use std::{io::BufRead, time::Duration};

use partywall::{
    Domain, Error, Policy, Queue, Result, Segment, Task, Then,
    error::{Busy, Gone, InvalidArgument, NotFound},
    info::{Change, MemberState},
};
use partywall_harness::place;

use super::{
    TIMEOUT,
    world::{Actor, World, commit, eventually, value},
};

/// A deadline so far away that it does not pass during a test.
const FAR: Duration = Duration::from_secs(3600);

/// Runs a process that has `x` open and carries out requests.
#[allow(clippy::print_stdout)] // it is how a role talks to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    if role == "withdrawals remover" {
        domain.withdraw("x", Duration::from_millis(300), Then::Evict).unwrap();
        println!("ready");
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let mut segment = Some(domain.open("x", TIMEOUT).unwrap());
    let first = value(segment.as_ref().unwrap());
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        match (line.unwrap().as_str(), &segment) {
            ("wait", Some(segment)) => {
                let notice = segment.wait_withdrawn(TIMEOUT).unwrap().expect("it has a deadline");
                println!("done told {} {}", notice.pid, notice.then.name());
            }
            ("check", Some(segment)) => {
                // The deadline may pass between two of these.
                let before = is_stale(&segment.check());
                let reading = is_stale(&segment.tensor("x").unwrap().to_vec());
                let after = is_stale(&segment.check());
                assert!(before <= reading && reading <= after, "{before} {reading} {after}");
                println!("done {}", if after { "stale" } else { "fine" });
            }
            ("ping", _) => println!("done {}", if domain.ping().is_ok() { "fine" } else { "refused" }),
            ("drop", _) => {
                segment = None;
                println!("done dropped");
            }
            other => panic!("{other:?} after {first}"),
        }
    }
}

fn is_stale<T>(result: &Result<T>) -> bool {
    match result {
        Ok(_) => false,
        Err(Error::Gone(Gone::Withdrawn { .. })) => true,
        Err(other) => panic!("{other}"),
    }
}

fn reader(world: &World) -> Actor {
    world.play("withdrawals reader")
}

/// Returns whether any version of `x` exists.
fn is_held(domain: &Domain) -> bool {
    domain.names().unwrap().iter().any(|name| name.name == "x")
}

fn state(domain: &Domain, pid: u32) -> Option<MemberState> {
    Some(domain.members().unwrap().into_iter().find(|member| member.pid == pid)?.state)
}

// Holds 57.
#[test]
fn readers_learn_the_deadline_and_drop_the_name_before_it() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "x", 7, true));
    let mut reader = reader(&world);
    let removed = domain.withdraw("x", FAR, Then::Evict).unwrap();
    let notice = removed.notice.unwrap();
    assert_eq!((notice.pid, notice.then, notice.until - notice.at), (std::process::id(), Then::Evict, 3_600_000));
    assert_eq!(removed.holders.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [reader.pid()]);
    assert_eq!(reader.request("wait"), format!("told {} evict", std::process::id()));
    assert!(
        matches!(domain.open("x", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))),
        "it is gone at once"
    );
    let listed = domain.names().unwrap().pop().unwrap();
    assert_eq!((listed.latest, listed.notice), (None, Some(notice)));
    assert_eq!(domain.inspect("x").unwrap().version.notice, Some(notice));
    assert_eq!(reader.request("check"), "fine");
    assert_eq!(reader.request("drop"), "dropped");
    assert!(!is_held(&domain), "its memory is free");
    assert_eq!(reader.request("ping"), "fine");
}

// Holds 59.
#[test]
fn stale_readers_get_no_new_view_and_keep_what_they_have() {
    let world = World::new();
    let domain = world.connect();
    let own = commit(&domain, "x", 7, true);
    let view = partywall_harness::device().eq("host").then(|| own.tensor("x").unwrap().as_slice::<u32>().unwrap());
    let mut reader = reader(&world);
    domain.withdraw("x", Duration::ZERO, Then::Stale).unwrap();
    eventually("the deadline has passed", || reader.request("check") == "stale");
    eventually("so it has here", || own.check().is_err());
    assert!(view.is_none_or(|view| view == [7; 4]), "the mapping stays");
    assert!(is_stale(&own.tensor("x").unwrap().to_vec()));
    assert_eq!(reader.request("ping"), "fine", "no reader is evicted");
    // A name that is committed anew is another one.
    let again = commit(&domain, "x", 8, true);
    assert_eq!((again.version(), value(&again)), (2, 8));
    assert_eq!(reader.request("check"), "stale");
    assert_eq!(reader.request("drop"), "dropped");
    drop(own);
    assert_eq!(domain.inspect("x").unwrap().versions.len(), 1, "the first version is free");
}

#[test]
fn evicted_readers_lose_the_memory_with_their_death() {
    let world = World::new();
    let domain = world.connect();
    let own = commit(&domain, "x", 7, true);
    let mut reader = reader(&world);
    domain.withdraw("x", Duration::from_millis(20), Then::Evict).unwrap();
    eventually("it is evicted", || state(&domain, reader.pid()) == Some(MemberState::Evicted));
    assert_eq!(reader.request("ping"), "refused");
    assert_eq!(value(&own), 7, "the process that withdrew the name is not evicted, and keeps its lease");
    drop(own);
    assert!(is_held(&domain), "the reader may still read it");
    reader.kill();
    eventually("its memory is free", || !is_held(&domain));
}

#[test]
fn waiting_withdrawal_touches_no_reader() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "x", 7, true));
    let mut watch = domain.watch("x").unwrap();
    let mut reader = reader(&world);
    domain.withdraw("x", Duration::ZERO, Then::Wait).unwrap();
    let mut seen = Vec::new();
    while seen.last() != Some(&Change::DeadlinePassed { then: Then::Wait, readers: 1 }) {
        let event = watch.next(TIMEOUT).unwrap().expect("an event");
        if let partywall::WatchEvent::Name(event) = event {
            seen.push(event.change);
        }
    }
    assert!(
        matches!(seen[..], [Change::Withdrawn { .. }, Change::DeadlineSet { .. }, Change::DeadlinePassed { .. }]),
        "{seen:?}"
    );
    assert_eq!(reader.request("check"), "fine");
    assert_eq!(reader.request("ping"), "fine");
}

#[test]
fn deadline_outlives_the_process_that_set_it() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "x", 7, true));
    let reader = reader(&world);
    let mut remover = world.play("withdrawals remover");
    let pid = remover.pid();
    remover.kill();
    eventually("the reader is evicted", || state(&domain, reader.pid()) == Some(MemberState::Evicted));
    assert_eq!(domain.inspect("x").unwrap().version.notice.unwrap().pid, pid);
}

// Holds 57.
#[test]
fn killed_reader_frees_the_memory_before_the_deadline() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "x", 7, true));
    let mut reader = reader(&world);
    domain.withdraw("x", FAR, Then::Stale).unwrap();
    reader.kill();
    eventually("its memory is free", || !is_held(&domain));
    drop(commit(&domain, "x", 8, true));
    assert_eq!(domain.withdraw("x", FAR, Then::Stale).unwrap().version, 1, "nothing is left of the first withdrawal");
}

// Holds 59.
#[test]
fn name_is_withdrawn_once_and_only_with_a_possible_deadline() {
    let world = World::new();
    let domain = world.connect();
    let _own = commit(&domain, "x", 7, true);
    let years = Duration::from_secs(400 * 24 * 3600);
    for impossible in [years, Duration::MAX] {
        let refused = domain.withdraw("x", impossible, Then::Wait);
        assert!(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Deadline { .. }))), "{refused:?}");
    }
    domain.withdraw("x", FAR, Then::Wait).unwrap();
    for again in [domain.withdraw("x", Duration::ZERO, Then::Evict), domain.remove("x")] {
        let Err(Error::Busy(Busy::Withdrawing { name, pid, .. })) = again else { panic!("{again:?}") };
        assert_eq!((name.as_str(), pid), ("x", std::process::id()));
    }
    let missing = domain.withdraw("y", FAR, Then::Wait);
    assert!(matches!(missing, Err(Error::NotFound(NotFound::Name { .. }))), "{missing:?}");
    // The second version has a withdrawal of its own.
    drop(commit(&domain, "x", 8, true));
    assert_eq!(domain.withdraw("x", FAR, Then::Evict).unwrap().version, 2);
    assert_eq!(domain.inspect("x@1").unwrap().version.notice.unwrap().then, Then::Wait);
}

#[test]
fn reader_that_opens_during_the_deadline_through_a_queue_is_a_reader_like_others() {
    let world = World::new();
    let domain = world.connect();
    let queue = domain.queue("work").tasks(4).inputs(4, 16).outputs(4, 8).place(place()).create().unwrap();
    let attached = queue.attach(&commit(&domain, "x", 7, true)).unwrap();
    let task = || Task::new("read").part(attached.part(..4).unwrap()).output(8);
    let opened =
        |queue: &Queue| -> Result<Option<std::sync::Arc<Segment>>> { queue.claim(TIMEOUT)?.inputs()[0].segment() };
    queue.submit(task(), TIMEOUT).unwrap();
    queue.submit(task(), TIMEOUT).unwrap();
    let early = world.connect();
    let early_queue = early.queue("work").open().unwrap();
    // Long enough for the next line on a busy machine.
    domain.withdraw("x", Duration::from_secs(2), Then::Stale).unwrap();
    let reader = opened(&early_queue).unwrap().unwrap();
    eventually("the deadline has passed", || reader.check().is_err());
    let late = world.connect();
    let late_queue = late.queue("work").open().unwrap();
    assert!(is_stale(&opened(&late_queue).map(drop)));
}

#[test]
fn pool_topic_and_queue_allow_nothing_new_once_they_are_stale() {
    let world = World::new();
    let domain = world.connect();
    let user = world.connect();
    let pool = domain.pool("pool").blocks(2).block_bytes(64).place(place()).create().unwrap();
    let users_pool = user.pool("pool").open().unwrap();
    let block = users_pool.alloc(TIMEOUT).unwrap();
    let all = users_pool.alloc(TIMEOUT).unwrap();
    let topic = domain.topic("topic").max_bytes(64).place(place()).create().unwrap();
    let users_topic = user.topic("topic").open().unwrap();
    let subscriber = users_topic.subscriber(Policy::Block).unwrap();
    let publisher = topic.publisher().unwrap();
    let queue = domain.queue("queue").tasks(2).inputs(2, 16).outputs(2, 8).place(place()).create().unwrap();
    let users_queue = user.queue("queue").open().unwrap();
    std::thread::scope(|scope| {
        // Waits that began before end, too.
        let allocating = scope.spawn(|| users_pool.alloc(TIMEOUT).map(drop));
        let receiving = scope.spawn(|| subscriber.recv(TIMEOUT).map(drop));
        let claiming = scope.spawn(|| users_queue.claim(TIMEOUT).map(drop));
        let told = scope.spawn(|| users_topic.wait_withdrawn(TIMEOUT).unwrap().unwrap().then);
        for name in ["pool", "topic", "queue"] {
            domain.withdraw(name, Duration::from_millis(50), Then::Stale).unwrap();
        }
        assert_eq!(told.join().unwrap(), Then::Stale);
        for ended in [allocating, receiving, claiming] {
            let ended = ended.join().unwrap();
            assert!(is_stale(&ended), "{ended:?}");
        }
    });
    // A wait may end before the report of the broker is read, and each connection gets a report of its own.
    eventually("all handles are stale", || {
        let ours = [pool.check(), topic.check(), queue.check()];
        let theirs = [users_pool.check(), users_topic.check(), users_queue.check()];
        ours.iter().chain(&theirs).all(is_stale)
    });
    assert!(is_stale(&users_pool.try_alloc()));
    assert!(is_stale(&users_topic.publisher()) && is_stale(&users_topic.subscriber(Policy::Latest)));
    assert!(is_stale(
        &publisher.loan(partywall::DType::U8, &[8], TIMEOUT).and_then(|loan| Ok(loan.filled().publish(TIMEOUT)?))
    ));
    let submitted = users_queue.submit(Task::new("t"), TIMEOUT).map_err(|refused| refused.error);
    assert!(is_stale(&submitted.map(drop)));
    drop((block, all));
    assert_eq!(pool.stats().free, 2, "blocks are given back as ever");
}
