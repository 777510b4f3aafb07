// Holds 19.
//! Semaphores: permits that go round between processes, and come back when one of them dies.

use std::{
    collections::VecDeque,
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::channel,
    },
    time::Duration,
};

use partywall::{
    Domain, Error, MAX_PERMITS, Permit, Semaphore, Wait,
    error::{InvalidArgument, Mismatch, NotFound, Unreachable},
};
use partywall_harness::linger;
use partywall_wire::ObjectKind;

use super::{
    TIMEOUT,
    world::{World, eventually},
};

/// The roles of a process that holds a permit, or waits for one, when it is killed.
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    match role {
        "permit holder" => {
            let _permit = semaphore.acquire(Duration::ZERO).unwrap();
            linger();
        }
        "permit waiter" => {
            std::thread::scope(|scope| {
                scope.spawn(|| semaphore.acquire(TIMEOUT));
                linger();
            });
        }
        // Says good-bye with a permit that it has forgotten.
        "permit loser" => {
            std::mem::forget(semaphore.acquire(Duration::ZERO).unwrap());
            linger();
        }
        _ => panic!("{role}"),
    }
}

#[test]
fn semaphore_grants_at_most_its_maximum() {
    let world = World::new();
    let one = world.connect();
    let other = world.connect();
    let ours = one.semaphore("seats", 3).unwrap();
    let theirs = other.semaphore("seats", 3).unwrap();
    assert_eq!((ours.name(), ours.maximum(), ours.available(), ours.waiting()), ("seats", 3, 3, 0));
    let mut permits = vec![ours.acquire(Duration::ZERO).unwrap(), theirs.try_acquire().unwrap().unwrap()];
    permits.push(ours.acquire(TIMEOUT).unwrap());
    assert_eq!((ours.available(), theirs.available()), (0, 0));
    assert!(ours.try_acquire().unwrap().is_none());
    assert!(matches!(theirs.acquire(Duration::ZERO), Err(Error::Timeout { .. })));
    assert!(matches!(theirs.acquire(Duration::from_millis(20)), Err(Error::Timeout { .. })));
    assert_eq!(ours.waiting(), 0, "a waiter that timed out is not counted");
    permits.pop().unwrap().release().unwrap();
    let again = theirs.acquire(Duration::ZERO).unwrap();
    drop((again, permits));
    assert_eq!(ours.available(), 3);
}

#[test]
fn waiters_are_served_in_order() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let permit = semaphore.acquire(TIMEOUT).unwrap();
    let (sender, order) = channel();
    std::thread::scope(|scope| {
        for number in 0..5 {
            let semaphore = world.connect().semaphore("seats", 1).unwrap();
            let sender = sender.clone();
            scope.spawn(move || {
                let permit = semaphore.acquire(TIMEOUT).unwrap();
                sender.send(number).unwrap();
                drop(permit);
            });
            eventually("it waits", || domain.semaphore("seats", 1).unwrap().waiting() == number + 1);
        }
        drop(permit);
    });
    assert!(order.try_iter().eq(0..5));
}

// Holds 244.
#[test]
fn interrupted_waiter_keeps_its_place() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    let permit = semaphore.acquire(TIMEOUT).unwrap();
    let asked = AtomicU32::new(0);
    let (sender, order) = channel();
    std::thread::scope(|scope| {
        let first = sender.clone();
        let second = sender;
        let semaphore = &semaphore;
        let asked = &asked;
        let ask = || {
            asked.fetch_add(1, Ordering::Relaxed);
            false
        };
        scope.spawn(move || {
            let permit = semaphore.acquire(Wait::from(TIMEOUT).cancelled_by(&ask)).unwrap();
            first.send(1).unwrap();
            drop(permit);
        });
        eventually("the first one waits", || semaphore.waiting() == 1);
        scope.spawn(move || {
            let permit = semaphore.acquire(TIMEOUT).unwrap();
            second.send(2).unwrap();
            drop(permit);
        });
        eventually("the second one waits", || semaphore.waiting() == 2);
        eventually("the first one was asked", || asked.load(Ordering::Relaxed) > 3);
        let cancelled = semaphore.acquire(Wait::from(TIMEOUT).cancelled_by(&|| true));
        assert!(matches!(cancelled, Err(Error::Cancelled { .. })));
        assert_eq!(semaphore.waiting(), 2, "a cancelled waiter is not counted");
        drop(permit);
    });
    assert!(order.try_iter().eq([1, 2]));
}

#[test]
fn openers_state_the_same_number() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 3).unwrap();
    let error = world.connect().semaphore("seats", 4).unwrap_err();
    assert!(matches!(error, Error::Mismatch(Mismatch::Maximum { maximum: 3, asked: 4, .. })), "{error}");
    assert!(matches!(
        domain.semaphore("none", 0),
        Err(Error::InvalidArgument(InvalidArgument::Maximum { asked: 0, .. }))
    ));
    assert!(matches!(
        domain.semaphore("many", MAX_PERMITS + 1),
        Err(Error::InvalidArgument(InvalidArgument::Maximum { .. }))
    ));
    assert!(matches!(domain.semaphore("", 1), Err(Error::InvalidArgument(InvalidArgument::Name { .. }))));
    let long = domain.semaphore(&"é".repeat(10_000), 1).unwrap_err().to_string();
    assert!(long.len() < 500 && long.contains("éé\"… is not a name: a name has at most"), "{long}");
    // The semaphore ends with the last handle.
    drop(semaphore);
    assert_eq!(domain.semaphore("seats", MAX_PERMITS).unwrap().available(), MAX_PERMITS);
    // It has nothing to do with objects of other kinds that have the same name.
    assert!(matches!(domain.open("seats", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
}

#[test]
fn permit_keeps_its_semaphore() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    let permit: Permit = domain.semaphore("seats", 1).unwrap().acquire(Duration::ZERO).unwrap();
    assert_eq!(permit.semaphore(), "seats");
    drop(domain);
    assert!(other.semaphore("seats", 1).unwrap().try_acquire().unwrap().is_none());
    // On whatever thread.
    std::thread::spawn(move || drop(permit)).join().unwrap();
    assert!(matches!(
        other.inspect_object(ObjectKind::Semaphore, "seats"),
        Err(Error::NotFound(NotFound::Object { .. }))
    ));
}

#[test]
fn permits_of_the_dead_come_back() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = domain.semaphore("seats", 1).unwrap();
    for _ in 0..3 {
        let mut holder = world.play("permit holder");
        eventually("it has it", || semaphore.available() == 0);
        holder.kill();
        semaphore.acquire(TIMEOUT).unwrap().release().unwrap();
    }
}

#[test]
fn dead_waiters_are_skipped() {
    let world = World::new();
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let permit = semaphore.acquire(TIMEOUT).unwrap();
    let mut waiter = world.play("permit waiter");
    eventually("it waits", || semaphore.waiting() == 1);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| world.connect().semaphore("seats", 1).unwrap().acquire(TIMEOUT).map(drop));
        eventually("two wait", || semaphore.waiting() == 2);
        waiter.kill();
        // It is the dead waiter's turn until its death is proved.
        drop(permit);
        next.join().unwrap().unwrap();
    });
    eventually("all is given back", || semaphore.available() == 1);
    assert_eq!(semaphore.waiting(), 0);
}

#[test]
fn good_bye_releases_all_permits() {
    let world = World::new();
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let mut loser = world.play("permit loser");
    eventually("it has it", || semaphore.available() == 0);
    loser.proceed();
    semaphore.acquire(TIMEOUT).unwrap().release().unwrap();
}

// Holds 181.
#[test]
fn without_a_broker_waits_end_and_free_permits_are_passed_on() {
    let mut world = World::new();
    let domain = world.connect();
    let semaphore: Semaphore = domain.semaphore("seats", 2).unwrap();
    let mut permits: VecDeque<_> = (0..2).map(|_| semaphore.acquire(Duration::ZERO).unwrap()).collect();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| semaphore.acquire(TIMEOUT).map(drop));
        eventually("it waits", || semaphore.waiting() == 1);
        world.end_broker();
        assert!(matches!(waiter.join().unwrap(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    });
    for _ in 0..10 {
        permits.pop_front().unwrap().release().unwrap();
        permits.push_back(semaphore.acquire(Duration::ZERO).unwrap());
    }
    assert!(matches!(semaphore.acquire(TIMEOUT), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    assert_eq!(semaphore.waiting(), 0);
}
