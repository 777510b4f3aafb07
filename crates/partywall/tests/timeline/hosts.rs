// Holds 16.
//! Timelines between hosts.

use std::{
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use partywall::{
    Domain, Error, MAX_VALUE, TimelineEnding,
    error::{Busy, InvalidArgument, Unreachable},
};
use partywall_os::socket::{self, Ready};

use super::{
    scenes::{ended, is_pending},
    world::{TIMEOUT, World, eventually, next_order, say},
};

/// A process that signals or waits on request.
pub(crate) fn play(name: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let mut writer = None;
    let waiter = domain.timeline(name).unwrap();
    say("ready");
    while let Some(order) = next_order() {
        let (order, v) = order.split_once(' ').unwrap_or((&order, "0"));
        let v: u64 = v.parse().unwrap();
        match order {
            "write" => {
                writer = Some(domain.timeline_writer(name).unwrap());
                say("done");
            }
            "signal" => {
                writer.as_ref().unwrap().signal(v).unwrap();
                say("done");
            }
            "close" => {
                drop(writer.take());
                say("done");
            }
            "wait" => say(&match waiter.wait(v, TIMEOUT) {
                Ok(()) => "done".to_owned(),
                Err(error) => format!("done {}", error.anchor()),
            }),
            other => panic!("nobody knows how to {other}"),
        }
    }
}

// Holds 167.
#[test]
fn memory_of_shared_timelines_that_were_dropped_is_unmapped() {
    let world = World::new();
    let domain = world.connect();
    let open = |name: &str| domain.timeline_options(name).shared(true).writer().unwrap();
    let kept = open("kept");
    for number in 0..300 {
        open(&format!("line-{number}")).signal(1).unwrap();
    }
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("partywall:slab of timelines").count();
    eventually("the broker of this process has unmapped them, too", || mapped() < 100);
    kept.signal(1).unwrap();
    domain.timeline("kept").unwrap().wait(1, Duration::ZERO).unwrap();
}

#[test]
fn signal_ends_a_wait_of_another_process() {
    let world = World::new();
    let domain = world.connect();
    let mut waiter = world.play("host steps");
    // It waits before there is a writer, and longer than a spin.
    waiter.send("wait 1");
    thread::sleep(Duration::from_millis(20));
    let writer = domain.timeline_writer("steps").unwrap();
    assert_eq!((writer.timeline().value(), writer.timeline().announced(), writer.timeline().ending()), (0, 0, None));
    writer.signal(1).unwrap();
    assert_eq!(waiter.expect("done"), "");
    // A jump by 2^32, which leaves the lower half of the word unchanged.
    waiter.send(&format!("wait {}", (1_u64 << 32) + 1));
    thread::sleep(Duration::from_millis(20));
    writer.signal((1 << 32) + 1).unwrap();
    assert_eq!(waiter.expect("done"), "");
    assert_eq!(waiter.request("wait 7"), "", "what is below has been reached, too");

    waiter.request("close");
    waiter.send(&format!("wait {MAX_VALUE}"));
    thread::sleep(Duration::from_millis(20));
    drop(writer);
    assert_eq!(waiter.expect("done"), "timeline-closed");
}

#[test]
fn wait_for_a_signal_of_another_process() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("steps").unwrap();
    let mut writer = world.play("host steps");
    writer.request("write");
    thread::scope(|scope| {
        // Many waits at a time, each for a value of its own.
        let waiters: Vec<_> = (1..=8)
            .map(|v| {
                scope.spawn({
                    let timeline = &timeline;
                    move || timeline.wait(v, TIMEOUT)
                })
            })
            .collect();
        for v in 1..=8 {
            assert!(is_pending(&timeline, v));
            writer.request(&format!("signal {v}"));
        }
        for waiter in waiters {
            waiter.join().unwrap().unwrap();
        }
    });
    assert_eq!(timeline.value(), 8);
    timeline.check().unwrap();
}

#[test]
fn values_only_grow_and_end_at_their_limit() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    let refused = |result: Result<(), Error>, last| match result {
        Err(Error::InvalidArgument(InvalidArgument::Value { name, last: found, .. })) => {
            assert_eq!((name.as_str(), found), ("x", last))
        }
        other => panic!("{other:?}"),
    };
    refused(writer.signal(0), 0);
    writer.signal(5).unwrap();
    refused(writer.signal(5), 5);
    refused(writer.signal(4), 5);
    refused(writer.signal(MAX_VALUE + 1), 5);
    refused(writer.signal(u64::MAX), 5);
    refused(timeline.wait(MAX_VALUE + 1, TIMEOUT), 5);
    refused(timeline.wait(u64::MAX, TIMEOUT), 5);
    refused(timeline.event(u64::MAX).map(drop), 5);
    assert!(is_pending(&timeline, MAX_VALUE));
    writer.signal(MAX_VALUE - 1).unwrap();
    assert!(is_pending(&timeline, MAX_VALUE));
    writer.signal(MAX_VALUE).unwrap();
    timeline.wait(MAX_VALUE, TIMEOUT).unwrap();
    refused(writer.signal(MAX_VALUE), MAX_VALUE);
    drop(writer);
    timeline.wait(MAX_VALUE, Duration::ZERO).unwrap();
    assert_eq!((timeline.value(), timeline.ending()), (MAX_VALUE, Some(TimelineEnding::Closed)));
}

#[test]
fn timeline_has_one_writer_at_a_time() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    let second = world.connect();
    for other in [&domain, &second] {
        match other.timeline_writer("x") {
            Err(Error::Busy(Busy::Writer { name, pid })) => assert_eq!((name.as_str(), pid), ("x", std::process::id())),
            refused => panic!("{refused:?}"),
        }
    }
    writer.signal(3).unwrap();
    drop(writer);
    assert_eq!(ended(timeline.wait(4, TIMEOUT)), (TimelineEnding::Closed, 4, 3));
    assert!(!timeline.follow().unwrap(), "there is no other writer yet");
    let writer = second.timeline_writer("x").unwrap();
    assert_eq!(writer.timeline().value(), 3, "it goes on where the former one was");
    assert_eq!(ended(timeline.wait(4, TIMEOUT)), (TimelineEnding::Closed, 4, 3));
    assert!(timeline.follow().unwrap());
    assert!(!timeline.follow().unwrap());
    assert!(is_pending(&timeline, 4));
    writer.signal(4).unwrap();
    timeline.wait(4, TIMEOUT).unwrap();
    // The name ends with its last handle.
    drop((timeline, writer));
    assert_eq!(domain.timeline("x").unwrap().value(), 0);
}

// Holds 175.
#[test]
fn follower_keeps_a_constant_number_of_cells() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    // More incarnations than a slab has cells.
    for v in 1..=1100 {
        let writer = domain.timeline_writer("x").unwrap();
        timeline.follow().unwrap();
        writer.signal(v).unwrap();
        timeline.wait(v, TIMEOUT).unwrap();
    }
    let status = domain.status().unwrap();
    assert_eq!((status.fds, status.leases), (1, 1), "one slab is enough");
}

#[test]
fn early_close_ends_waits_immediately() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| timeline.wait(2, TIMEOUT));
        let announced = scope.spawn(|| timeline.wait_announced(2, TIMEOUT));
        thread::sleep(Duration::from_millis(20));
        writer.signal(1).unwrap();
        writer.close();
        assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::Closed, 2, 1));
        assert_eq!(ended(announced.join().unwrap()), (TimelineEnding::Closed, 2, 1));
    });
    timeline.wait(1, TIMEOUT).unwrap();
    timeline.check().unwrap();
}

#[test]
fn abandoning_a_timeline_ends_all_waits_and_its_writer() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    writer.signal(1).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| timeline.wait(2, TIMEOUT));
        thread::sleep(Duration::from_millis(20));
        timeline.abandon().unwrap();
        assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::Abandoned, 2, 1));
    });
    assert_eq!(ended(writer.signal(2)), (TimelineEnding::Abandoned, 2, 1));
    drop(writer);
    let writer = domain.timeline_writer("x").unwrap();
    writer.signal(2).unwrap();
    assert!(timeline.follow().unwrap());
    timeline.wait(2, TIMEOUT).unwrap();
}

#[test]
fn wait_ends_with_its_timeout() {
    let world = World::new();
    let timeline = world.connect().timeline("x").unwrap();
    for limit in [Duration::ZERO, Duration::from_micros(1), Duration::from_millis(150)] {
        let start = Instant::now();
        match timeline.wait(1, limit) {
            Err(Error::Timeout { what, after }) => {
                assert_eq!((what.as_str(), after), ("value 1 of timeline \"x\" was not reached", limit))
            }
            other => panic!("{other:?}"),
        }
        assert!(start.elapsed() >= limit);
        assert!(matches!(timeline.wait_announced(1, limit), Err(Error::Timeout { .. })));
    }
}

#[test]
fn timeline_event_wakes_an_event_loop() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    let readable = |event: &dyn AsFd, until| socket::wait(event, Ready::Read, Some(until)).unwrap();
    let soon = || Instant::now() + TIMEOUT;
    let first = timeline.event(1).unwrap();
    let second = timeline.event(2).unwrap();
    assert!(!readable(&first, Instant::now()) && first.outcome().is_none());
    writer.signal(1).unwrap();
    assert!(readable(&first, soon()));
    assert!(readable(&first, soon()), "it stays so");
    first.outcome().unwrap().unwrap();
    assert!(second.outcome().is_none());
    let at_once = timeline.event(1).unwrap();
    assert!(readable(&at_once, Instant::now()));
    // Events outlive their handle.
    drop(timeline);
    drop(writer);
    assert!(readable(&second, soon()));
    assert_eq!(ended(second.outcome().unwrap()), (TimelineEnding::Closed, 2, 1));
    assert!(!domain.objects().unwrap().is_empty(), "events keep the name");
    drop((first, second, at_once));
    eventually("the end of the name", || domain.objects().unwrap().is_empty());
}

#[test]
fn killed_writer_is_reported_and_its_successor_continues() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let mut last = 0;
    // A second death has the same effect as the first.
    for round in 1..=3 {
        let mut writer = world.play("host x");
        writer.request("write");
        timeline.follow().unwrap();
        assert_eq!(timeline.value(), last);
        writer.request(&format!("signal {}", 10 * round));
        last = 10 * round;
        thread::scope(|scope| {
            let waiter = scope.spawn(|| timeline.wait(last + 1, TIMEOUT));
            thread::sleep(Duration::from_millis(20));
            writer.kill();
            assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::OwnerDied, last + 1, last));
        });
        timeline.wait(last, Duration::ZERO).unwrap();
        timeline.check().unwrap();
    }
}

#[test]
fn loss_of_the_broker_ends_waits_and_signals() {
    let mut world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    writer.signal(1).unwrap();
    let event = timeline.event(2).unwrap();
    let mut other = world.play("host x");
    other.send("wait 2");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| timeline.wait(2, TIMEOUT));
        thread::sleep(Duration::from_millis(20));
        world.end_broker();
        assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::BrokerGone, 2, 1));
    });
    assert_eq!(other.expect("done"), "timeline-lost");
    assert!(socket::wait(&event, Ready::Read, Some(Instant::now() + TIMEOUT)).unwrap());
    assert_eq!(ended(writer.signal(2)), (TimelineEnding::BrokerGone, 2, 1));
    timeline.wait(1, TIMEOUT).unwrap();
}

#[test]
fn two_domains_of_one_process_are_independent() {
    let one = World::new();
    let other = World::new();
    let one = one.connect();
    let other = other.connect();
    let ours = one.timeline_writer("x").unwrap();
    let theirs = other.timeline_writer("x").unwrap();
    let waits = one.timeline("x").unwrap();
    let waits_too = other.timeline("x").unwrap();
    ours.signal(1).unwrap();
    waits.wait(1, TIMEOUT).unwrap();
    assert!(is_pending(&waits_too, 1));
    theirs.signal(2).unwrap();
    waits_too.wait(2, TIMEOUT).unwrap();
    assert_eq!((waits.value(), waits_too.value()), (1, 2));
}

#[test]
fn forked_child_has_no_timelines() {
    let world = World::new();
    let domain = world.connect();
    let timeline = domain.timeline("x").unwrap();
    let writer = domain.timeline_writer("x").unwrap();
    let event = timeline.event(5).unwrap();
    let mut writer = Some(writer);
    let forked = |result: Result<(), Error>| matches!(result, Err(Error::Unreachable(Unreachable::Forked { .. })));
    let outcome = super::world::in_a_child(|| {
        let writer = writer.take().unwrap();
        let calls = [
            forked(writer.signal(1)),
            forked(timeline.wait(1, Duration::ZERO)),
            forked(timeline.wait_announced(1, TIMEOUT)),
            forked(timeline.event(1).map(drop)),
            forked(timeline.follow().map(drop)),
            forked(timeline.abandon()),
            forked(domain.timeline("y").map(drop)),
        ];
        // A drop in the child gives nothing back, and closes nothing.
        drop(writer);
        calls.iter().all(|refused| *refused)
    });
    assert!(outcome);
    writer.as_ref().unwrap().signal(5).unwrap();
    event.outcome().unwrap().unwrap();
    timeline.wait(5, TIMEOUT).unwrap();
}

#[test]
fn two_processes_exchange_two_hundred_thousand_values() {
    let world = World::new();
    let here = world.connect();
    let there = world.connect();
    let ping = here.timeline_writer("ping").unwrap();
    let pong = there.timeline_writer("pong").unwrap();
    let hears_ping = there.timeline("ping").unwrap();
    let hears_pong = here.timeline("pong").unwrap();
    let rounds = 100_000;
    thread::scope(|scope| {
        scope.spawn(|| {
            for v in 1..=rounds {
                hears_ping.wait(v, TIMEOUT).unwrap();
                pong.signal(v).unwrap();
            }
        });
        for v in 1..=rounds {
            ping.signal(v).unwrap();
            hears_pong.wait(v, TIMEOUT).unwrap();
        }
    });
}
