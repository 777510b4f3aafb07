//! Timelines: a process that crashes delays waiters only until its death is proved, and all processes agree on the
//! values that it had signalled.

use std::{
    collections::BTreeSet,
    fs::File,
    os::fd::OwnedFd,
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use partywall_harness::{
    WATCHDOG,
    crash::{self, Crashed, at_each_point},
};
use partywall_shm::timeline::{Cell, Progress, Slab, TimelineEnding};

use super::points::{CLOSING, ENDING, PROMISING, SIGNALLING, SLEEPING, assert_passed};

pub(crate) fn play(role: &str, memory: File) {
    let slab = Slab::map(memory).unwrap();
    let cell = slab.cell(0).unwrap();
    cell.start(0, 1);
    // A waiter sleeps, or is about to: otherwise the crashing process would wake no thread.
    cell.sleep(cell.prepare(), Duration::from_nanos(1));
    crash::arm();
    match role {
        "signals" => cell.signal(1).unwrap(),
        "promises" => cell.announce(1),
        "closes" => {
            cell.signal(1).unwrap();
            assert_eq!(cell.begin_close(), 1);
            cell.end(TimelineEnding::Closed);
        }
        "ends" => drop(cell.end(TimelineEnding::OwnerDied)),
        "waits" => cell.sleep(cell.prepare(), Duration::from_millis(1)),
        _ => panic!("{role}"),
    }
    crash::disarm();
}

/// Waits for `v` in a thread, as a host does.
fn wait(memory: &OwnedFd, v: u64) -> Receiver<Progress> {
    let slab = Slab::map(memory).unwrap();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let cell = slab.cell(0).unwrap();
        loop {
            let key = cell.prepare();
            match cell.progress(v) {
                Progress::Pending | Progress::Announced => cell.sleep(key, Duration::MAX),
                decided => return sender.send(decided),
            }
        }
    });
    receiver
}

/// Makes a writer crash at each point of an operation. Returns the points.
fn each_point_of(what: &str, test: impl Fn(&Cell, &OwnedFd, &Crashed)) -> BTreeSet<String> {
    at_each_point(
        || {
            let memory = Slab::create().unwrap();
            (super::role(&format!("timeline {what}"), &memory), memory)
        },
        |crashed, memory| {
            let slab = Slab::map(&memory).unwrap();
            let cell = slab.cell(0).unwrap();
            let waiter = wait(&memory, 2);
            test(cell, &memory, &crashed);
            let what = format!("{:?} at {:?}", crashed.fate, crashed.point);
            crashed.is_dead_in_the_end();
            // The broker has the proof of death. However far the writer got, the timeline has one ending.
            let ended = cell.end(TimelineEnding::OwnerDied);
            assert_eq!((cell.ending(), cell.value()), (Some(ended.ending), ended.last), "{what}");
            let decided = waiter.recv_timeout(WATCHDOG).expect("watchdog: a waiter sleeps for ever");
            assert!(matches!(decided, Progress::Ended(_)), "{what}: {decided:?}");
            assert_eq!(cell.progress(1) == Progress::Reached, ended.last == 1, "{what}");
            assert_eq!(cell.late_store(), None, "{what}: the value is poisoned");
            cell.start(ended.last, 2);
            cell.signal(2).unwrap();
        },
    )
}

fn recv(waiter: &Receiver<Progress>) -> Progress {
    waiter.recv_timeout(WATCHDOG).expect("watchdog: a waiter sleeps for ever")
}

#[test]
fn crash_in_signal_leaves_the_value_readable() {
    let points = each_point_of("signals", |_, memory, crashed| {
        // At each of these points the value is stored, so no waiter needs the writer's death to get it.
        assert_eq!(recv(&wait(memory, 1)), Progress::Reached, "{crashed:?}");
    });
    assert_passed(&points, &[SIGNALLING]);
}

#[test]
fn crash_in_promise_leaves_the_value_announced() {
    let points = each_point_of("promises", |cell, _, crashed| {
        assert_eq!((cell.progress(1), cell.value()), (Progress::Announced, 0), "{crashed:?}");
    });
    assert_passed(&points, &[PROMISING]);
}

#[test]
fn crash_in_close_keeps_signalled_values() {
    let points = each_point_of("closes", |_, memory, crashed| {
        assert_eq!(recv(&wait(memory, 1)), Progress::Reached, "{crashed:?}");
    });
    assert_passed(&points, &[CLOSING, ENDING]);
}

/// The broker dies while it ends a timeline. A process that reads the timeline meanwhile completes the ending.
#[test]
fn crash_of_the_broker_in_end_still_ends_waits() {
    let points = each_point_of("ends", |_, memory, crashed| {
        assert_eq!(recv(&wait(memory, 1)), Progress::Ended(TimelineEnding::OwnerDied), "{crashed:?}");
    });
    assert_passed(&points, &[ENDING]);
}

#[test]
fn crash_of_a_sleeper_does_not_delay_others() {
    let points = each_point_of("waits", |cell, memory, _| {
        cell.signal(1).unwrap();
        assert_eq!(recv(&wait(memory, 1)), Progress::Reached);
    });
    assert_passed(&points, &[SLEEPING]);
}
