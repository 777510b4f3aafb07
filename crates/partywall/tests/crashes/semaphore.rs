//! Semaphores: a process that crashes keeps its permits until its death is proved, and blocks no other process.

use std::{fs::File, os::fd::OwnedFd};

use partywall_harness::{
    crash::{self, Crashed, at_each_point},
    eventually,
};
use partywall_shm::{
    semaphore::Semaphore,
    slots::{Attempt, SlotAudit},
};

use super::{
    points::{SLOT_GIVEN_UP, SLOT_HANDED, SLOT_TAKEN, SLOT_WAITED_FOR, SLOTS_RECOVERED, assert_passed},
    slots::{Takers, take},
};

/// The row of the process that crashes.
const CRASHING: u16 = 1;
/// The row of a process that was dead before.
const DEAD: u16 = 7;

pub(crate) fn play(role: &str, memory: File) {
    let semaphore = Semaphore::map(memory).unwrap();
    let try_acquire = || semaphore.try_take(CRASHING).unwrap();
    match role {
        "takes a permit and gives it back" => {
            crash::arm();
            let held = try_acquire();
            let _ = semaphore.free(&held);
        }
        // The test holds the permit, and gives it back as soon as a process waits.
        "waits" => {
            crash::arm();
            let held = take(&semaphore, CRASHING, true);
            let _ = semaphore.free(&held);
        }
        "gives up waiting" => {
            crash::arm();
            let Attempt::Waiting(waiter) = semaphore.take(CRASHING) else { panic!("the test holds it") };
            // If the process was paused, it may have got the permit meanwhile.
            if let Some(held) = waiter.cancel() {
                let _ = semaphore.free(&held);
            }
        }
        "gives a permit to those who wait" => {
            let held = try_acquire();
            eventually("others wait", || semaphore.audit().waiting == 2);
            crash::arm();
            let _ = semaphore.free(&held);
        }
        "is the broker" => {
            eventually("another waits", || semaphore.audit().waiting == 2);
            crash::arm();
            semaphore.recover(|row| row == DEAD);
        }
        _ => panic!("{role}"),
    }
    crash::disarm();
}

/// Starts threads that wait for a permit.
fn takers(memory: &OwnedFd, count: u16) -> Takers {
    Takers::start(20..20 + count, true, || Semaphore::map(memory).unwrap())
}

/// Checks what follows a crash at any point.
fn others_go_on(memory: &OwnedFd, semaphore: &Semaphore, crashed: Crashed, others: Takers) {
    let what = format!("{:?} at {:?}", crashed.fate, crashed.point);
    let others = if crashed.point.contains("slot held") {
        // No other process gets the permit before the death is proved.
        let now = semaphore.audit();
        assert_eq!((now.held, now.free, now.stale, now.invalid), (1, 0, 0, 0), "{what}: {now:?}");
        Some(others)
    } else {
        // Whether it waits or hands permits on, even a process that is stopped for ever blocks no other.
        others.finish();
        takers(memory, 3).finish();
        None
    };
    // A process that was only paused continues as if nothing had happened.
    if crashed.is_dead_in_the_end() {
        semaphore.recover(|row| row == CRASHING);
    }
    if let Some(others) = others {
        others.finish();
    }
    let end = semaphore.audit();
    assert_eq!(end, SlotAudit { free: semaphore.count(), ..SlotAudit::default() }, "{what}");
}

fn start(what: &str, maximum: u32) -> (std::process::Command, OwnedFd, Semaphore) {
    let memory = Semaphore::create(maximum).unwrap();
    let semaphore = Semaphore::map(&memory).unwrap();
    (super::role(&format!("semaphore {what}"), &memory), memory, semaphore)
}

#[test]
fn crash_in_acquire_or_release_loses_no_permit() {
    let points = at_each_point(
        || {
            let (command, memory, semaphore) = start("takes a permit and gives it back", 1);
            (command, (memory, semaphore))
        },
        |crashed, (memory, semaphore)| {
            let others = takers(&memory, 2);
            others_go_on(&memory, &semaphore, crashed, others);
        },
    );
    assert_passed(&points, &[SLOT_TAKEN]);
}

#[test]
fn crash_in_wait_loses_no_permit() {
    let points = at_each_point(
        || {
            let (command, memory, semaphore) = start("waits", 1);
            // The permit is given once the crashing process waits, or once it is dead.
            let held = semaphore.try_take(20).unwrap();
            let giver = Semaphore::map(&memory).unwrap();
            let giving = std::thread::spawn(move || {
                eventually("the other process waits", || giver.audit().waiting == 1);
                giver.free(&held).unwrap();
            });
            (command, (memory, semaphore, giving))
        },
        |crashed, (memory, semaphore, giving)| {
            giving.join().unwrap();
            let others = takers(&memory, 2);
            others_go_on(&memory, &semaphore, crashed, others);
        },
    );
    assert_passed(&points, &[SLOT_WAITED_FOR]);
}

#[test]
fn crash_in_abandoned_wait_loses_no_permit() {
    let points = at_each_point(
        || {
            let (command, memory, semaphore) = start("gives up waiting", 1);
            let held = semaphore.try_take(20).unwrap();
            (command, (memory, semaphore, held))
        },
        |crashed, (memory, semaphore, held)| {
            let others = takers(&memory, 2);
            semaphore.free(&held).unwrap();
            others_go_on(&memory, &semaphore, crashed, others);
        },
    );
    assert_passed(&points, &[SLOT_GIVEN_UP]);
}

#[test]
fn crash_in_hand_over_loses_no_permit() {
    let points = at_each_point(
        || {
            let (command, memory, semaphore) = start("gives a permit to those who wait", 1);
            // The waiters begin once the crashing process has the permit.
            let theirs = Semaphore::map(&memory).unwrap();
            let own = memory.try_clone().unwrap();
            let others = std::thread::spawn(move || {
                eventually("the permit is taken", || theirs.audit().held == 1);
                takers(&own, 2)
            });
            (command, (memory, semaphore, others))
        },
        |crashed, (memory, semaphore, others)| {
            others_go_on(&memory, &semaphore, crashed, others.join().unwrap());
        },
    );
    assert_passed(&points, &[SLOT_HANDED]);
}

/// The broker dies while it reclaims the permits of a dead member. The next attempt, by this or another broker, starts
/// again.
#[test]
fn crash_in_reclaim_of_a_dead_member_loses_no_permit() {
    let points = at_each_point(
        || {
            let (command, memory, semaphore) = start("is the broker", 2);
            // Two permits are held, one of them by the dead process, which also waits for another, ahead of a living
            // process.
            let dead = semaphore.try_take(DEAD).unwrap();
            let held = semaphore.try_take(20).unwrap();
            let Attempt::Waiting(waiter) = semaphore.take(DEAD) else { panic!("both are held") };
            std::mem::forget(waiter);
            let others = takers(&memory, 1);
            (command, (memory, semaphore, dead, held, others))
        },
        |crashed, (_memory, semaphore, dead, held, others)| {
            crashed.is_dead_in_the_end();
            semaphore.recover(|row| row == DEAD);
            others.finish();
            assert!(semaphore.free(&dead).is_err(), "it was taken back");
            semaphore.free(&held).unwrap();
            assert_eq!(semaphore.audit(), SlotAudit { free: 2, ..SlotAudit::default() });
        },
    );
    assert_passed(&points, &[SLOTS_RECOVERED]);
}
