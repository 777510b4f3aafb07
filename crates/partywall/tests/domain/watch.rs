// Holds 112.
//! Watching names across connections that are lost and processes that die.

use std::{io::Read, time::Duration};

use partywall::{
    Domain, Error, WatchEvent,
    error::{InvalidArgument, Unreachable},
    info::{Change, NameEvent, Named, Point},
};
use partywall_harness::cut_connections;

use super::{
    TIMEOUT,
    world::{World, commit},
};

/// Runs the other process of these tests: it watches, and between two events its connection is cut.
#[allow(clippy::print_stdout)] // it is how it talks to the test
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let mut watch = domain.watch("*").unwrap();
    println!("ready");
    loop {
        match watch.next(TIMEOUT).unwrap().unwrap() {
            WatchEvent::Name(NameEvent { sequence, name, .. }) => println!("told {sequence} {name}"),
            other => panic!("{other:?}"),
        }
        let _ = std::io::stdin().read(&mut [0]);
        cut_connections();
        println!("cut");
    }
}

fn next(watch: &mut partywall::Watch) -> (String, Change) {
    match watch.next(TIMEOUT).unwrap() {
        Some(WatchEvent::Name(NameEvent { name, change, named: Named::Segment, .. })) => (name, change),
        other => panic!("{other:?}"),
    }
}

#[test]
fn events_are_reported_in_order() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    let pid = std::process::id();
    drop(commit(&other, "before", 1, true));
    let mut watch = domain.watch("o*").unwrap();
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    assert_eq!(watch.next(Duration::from_millis(20)).unwrap(), None);

    let mut owner = world.play("owner");
    let actor = owner.pid();
    assert_eq!(next(&mut watch), ("owned".into(), Change::Created { pid: actor }));
    let (_, committed) = next(&mut watch);
    let Change::Committed { version: 1, bytes, pid } = committed else { panic!("{committed:?}, {pid}") };
    assert_eq!(pid, actor);
    owner.kill();
    assert_eq!(next(&mut watch), ("owned".into(), Change::OwnerDied { pid: actor }));
    assert_eq!(next(&mut watch), ("owned".into(), Change::Reclaimed { version: 1, bytes }));
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
}

#[test]
fn nothing_is_lost_with_a_connection() {
    let world = World::new();
    let domain = world.connect();
    let mut actor = world.play("watcher");
    // In each round it has received the first of two events, and is cut off from the second.
    for round in 0..5_u64 {
        drop(commit(&domain, &format!("name{round}"), 1, true));
        assert_eq!(actor.expect("told "), format!("{} name{round}", 2 * round + 1));
        actor.proceed();
        actor.expect("cut");
        assert_eq!(actor.expect("told "), format!("{} name{round}", 2 * round + 2));
        actor.proceed();
        actor.expect("cut");
    }
}

#[test]
fn watch_from_long_ago_reports_missed_events_of_host_memory() {
    let world = World::new();
    let domain = world.connect();
    let watch = domain.watch("*").unwrap();
    let begin = watch.point();
    let name = |i: u32| format!("{}{i}", "n".repeat(200));
    for i in 0..3000 {
        drop(commit(&domain, &name(i), 1, true));
    }
    let mut late = domain.watch_after("*", begin).unwrap();
    let Some(WatchEvent::Missed { events: Some(missed) }) = late.next(TIMEOUT).unwrap() else {
        panic!("a mebibyte of events is kept, not more")
    };
    assert!(late.point().sequence == begin.sequence + missed && missed > 1000, "{missed}");
    let mut reported = 0;
    while let Some(event) = late.next(Duration::ZERO).unwrap() {
        let WatchEvent::Name(event) = event else { panic!("{event:?}") };
        reported += 1;
        assert_eq!(event.sequence, begin.sequence + missed + reported, "no hole after the one that was reported");
        assert_eq!(late.point().sequence, event.sequence);
    }
    assert_eq!(missed + reported, 6000);
    // Another watch goes on where this one is.
    let mut next = domain.watch_after("*", late.point()).unwrap();
    assert_eq!(next.next(Duration::ZERO).unwrap(), None);

    let elsewhere = Point { instance: begin.instance ^ 1, sequence: 7 };
    let never = Point { sequence: u64::MAX, ..begin };
    for point in [elsewhere, never] {
        let mut lost = domain.watch_after(&name(2999), point).unwrap();
        assert_eq!(lost.next(TIMEOUT).unwrap(), Some(WatchEvent::Missed { events: None }));
        assert!(matches!(lost.next(TIMEOUT).unwrap(), Some(WatchEvent::Name(event)) if event.name == name(2999)));
    }
}

#[test]
fn watch_ends_with_its_broker() {
    let mut world = World::new();
    let domain = world.connect();
    let mut watch = domain.watch("*").unwrap();
    let waiting = std::thread::spawn(move || watch.events().collect::<Vec<_>>());
    std::thread::sleep(Duration::from_millis(20));
    world.end_broker();
    let events = waiting.join().unwrap();
    assert!(matches!(&events[..], [Err(Error::Unreachable(Unreachable::Gone { .. }))]), "{events:?}");
}

#[test]
fn impossible_pattern_is_refused() {
    let world = World::new();
    let domain = world.connect();
    for pattern in ["", "a b", "[ab]", &"x".repeat(300)] {
        assert!(
            matches!(domain.watch(pattern), Err(Error::InvalidArgument(InvalidArgument::Pattern { .. }))),
            "{pattern}"
        );
    }
}
