// Holds 32.
//! Other versions of an open segment's name, and which of them can take its place.

use std::{thread, time::Duration};

use partywall::{
    DType, Domain, Drain, Error, Place,
    error::{Mismatch, NotFound},
};
use partywall_harness::{linger, place};

use super::{
    TIMEOUT,
    world::{World, commit, eventually, value},
};

/// The role of another process: a trainer that is killed before its commit.
#[allow(clippy::print_stdout)] // it is how it talks to the test
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let builder = domain.create("w", place()).tensor("x", DType::U32, &[4]).kept(true);
    let mut build = builder.allocate().unwrap();
    build.write("x", &[9; 16]).unwrap();
    println!("ready");
    linger();
}

#[test]
fn latest_version_is_found() {
    let world = World::new();
    let domain = world.connect();
    let first = commit(&domain, "w", 1, true);
    let open = domain.open("w", Duration::ZERO).unwrap();
    assert!(open.newer(None, Duration::ZERO).unwrap().is_none());
    assert!(open.newer(None, Duration::from_millis(1)).unwrap().is_none(), "none came in time");
    let second = commit(&domain, "w", 2, true);
    let third = commit(&domain, "w", 3, true);
    let newer = open.newer(None, Duration::ZERO).unwrap().unwrap();
    assert_eq!((newer.version(), value(&newer), value(&open)), (3, 3, 1));
    assert_eq!(newer.place(), open.place());
    assert!(newer.newer(None, Duration::ZERO).unwrap().is_none());
    assert_eq!(value(&newer.newer(Some(2), Duration::ZERO).unwrap().unwrap()), 2);
    assert!(newer.newer(Some(3), Duration::ZERO).unwrap().is_none());
    drop((second, first, third));
    let gone = newer.newer(Some(2), Duration::ZERO).unwrap_err();
    assert!(matches!(gone, Error::NotFound(NotFound::Version { version: 2, .. })), "{gone}");
    assert!(matches!(newer.newer(Some(4), Duration::from_millis(1)), Err(Error::Timeout { .. })));
}

#[test]
fn next_version_is_awaited_also_after_the_name_has_ended() {
    let world = World::new();
    let domain = world.connect();
    let first = commit(&domain, "w", 1, true);
    let open = domain.open("w", Duration::ZERO).unwrap();
    let await_newer = || {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| open.newer(None, TIMEOUT).unwrap().unwrap());
            let committed = commit(&domain, "w", 7, true);
            let newer = waiting.join().unwrap();
            assert_eq!((newer.version(), value(&newer)), (committed.version(), 7));
        })
    };
    await_newer();
    domain.remove("w").unwrap();
    drop(first);
    assert!(open.newer(None, Duration::ZERO).unwrap().is_none());
    assert!(open.newer(None, Duration::from_millis(1)).unwrap().is_none());
    await_newer();
}

// Holds 49.
#[test]
fn killed_trainer_leaves_readers_on_their_version() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "w", 1, true));
    let open = domain.open("w", Duration::ZERO).unwrap();
    world.play_until("trainer", "ready").kill();
    eventually("the trainer is gone", || domain.members().unwrap().len() == 1);
    assert!(open.newer(None, Duration::ZERO).unwrap().is_none());
    assert_eq!(value(&open), 1);
    drop(commit(&domain, "w", 2, true));
    let newer = open.newer(None, Duration::ZERO).unwrap().unwrap();
    assert_eq!((newer.version(), value(&newer)), (2, 2));
}

#[test]
fn host_memory_cannot_advance_in_place() {
    let world = World::new();
    let domain = world.connect();
    let commit = |byte: u8| {
        let mut build = domain.create("w", Place::Host).tensor("x", DType::U8, &[4]).allocate().unwrap();
        build.write("x", &[byte; 4]).unwrap();
        build.commit().unwrap()
    };
    let _first = commit(1);
    let mut open = domain.open("w", Duration::ZERO).unwrap();
    let _second = commit(2);
    let next = open.newer(None, Duration::ZERO).unwrap().unwrap();
    let refused = open.advance(next, Drain::All(&[])).unwrap_err();
    assert_eq!((refused.value.version(), refused.value.tensor("x").unwrap().to_vec().unwrap()), (2, vec![2; 4]));
    let refused = refused.error;
    assert!(matches!(refused, Error::Mismatch(Mismatch::Kind { has: "host", .. })), "{refused}");
    assert_eq!((open.version(), open.tensor("x").unwrap().to_vec().unwrap()), (1, vec![1; 4]));
}
