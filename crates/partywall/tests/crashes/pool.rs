// Holds 180.
//! Pools: if a process crashes while it hands a block to another, one of the two has the block, and the block is not
//! lost. Taking blocks, waiting for them and giving them back works as with the permits of semaphores, whose tests
//! cover it.

use std::{fs::File, os::fd::OwnedFd};

use partywall_harness::{
    crash::{self, at_each_point},
    eventually,
};
use partywall_shm::{
    pool::Pool,
    slots::{Attempt, OVERDUE, SlotAudit},
};

use super::{
    points::{SLOT_ACCEPTED, SLOT_OFFERED, SLOT_REVOKED, SLOTS_RECOVERED, assert_passed},
    slots::Takers,
};

/// The row of the process that crashes.
const CRASHING: u16 = 1;
/// The row of a process that was dead before.
const DEAD: u16 = 7;
/// The row of the test.
const OURS: u16 = 20;
/// The role of the process that accepts the first block; the block's generation follows it.
const TAKES_OVER: &str = "takes over ";

pub(crate) fn play(role: &str, memory: File) {
    let pool = Pool::map(memory).unwrap();
    if let Some(generation) = role.strip_prefix(TAKES_OVER) {
        crash::arm();
        let held = pool.accept(CRASHING, 0, generation.parse().unwrap()).unwrap();
        pool.free(&held).unwrap();
        return crash::disarm();
    }
    match role {
        "takes a block and offers it" => {
            crash::arm();
            let held = pool.try_take(CRASHING).unwrap();
            pool.offer(&held).unwrap();
        }
        "takes back what it has offered" => {
            let held = pool.try_take(CRASHING).unwrap();
            crash::arm();
            pool.offer(&held).unwrap();
            // The test may have been quicker.
            if let Some(held) = pool.accept(CRASHING, held.index(), held.generation()) {
                pool.free(&held).unwrap();
            }
        }
        "takes for another what that one does not take" => {
            pool.revoke_overdue();
            std::thread::sleep(OVERDUE);
            crash::arm();
            pool.revoke_overdue();
        }
        "is the broker" => {
            eventually("another waits", || pool.audit().waiting == 1);
            crash::arm();
            pool.recover(|row| row == DEAD);
        }
        _ => panic!("{role}"),
    }
    crash::disarm();
}

/// Starts a thread that waits for a block.
fn taker(memory: &OwnedFd, tends: bool) -> Takers {
    Takers::start(OURS + 1..OURS + 2, tends, || Pool::map(memory).unwrap())
}

fn start(what: &str, blocks: u32) -> (std::process::Command, OwnedFd, Pool) {
    let memory = Pool::create(blocks).unwrap();
    let pool = Pool::map(&memory).unwrap();
    (super::role(&format!("pool {what}"), &memory), memory, pool)
}

/// The generation of the next block that is taken from an unused pool.
fn next_generation(pool: &Pool) -> u64 {
    let held = pool.try_take(OURS).unwrap();
    pool.free(&held).unwrap();
    held.generation() + 1
}

fn idle(pool: &Pool) -> SlotAudit {
    SlotAudit { free: pool.count(), ..SlotAudit::default() }
}

#[test]
fn crash_in_offer_loses_no_block() {
    let points = at_each_point(
        || {
            let (command, memory, pool) = start("takes a block and offers it", 1);
            let generation = next_generation(&pool);
            (command, (memory, pool, generation))
        },
        |crashed, (memory, pool, generation)| {
            let what = format!("{crashed:?}");
            let other = taker(&memory, true);
            let is_offered = crashed.point.contains("offered");
            let now = pool.audit();
            assert_eq!(
                (now.held, now.offered, now.free),
                (!is_offered as u32, is_offered as u32, 0),
                "{what}: {now:?}"
            );
            // A process that has the reference can accept the block, whether its giver is dead or paused.
            let taken = is_offered.then(|| pool.accept(OURS, 0, generation).expect("it is offered"));
            let is_dead = crashed.is_dead_in_the_end();
            // A paused process has continued and offered the block by now, unless the block was accepted before.
            let taken = taken.or_else(|| (!is_dead).then(|| pool.accept(OURS, 0, generation).expect("it is offered")));
            assert_eq!(pool.recover(|row| row == CRASHING), taken.is_none() as u32, "{what}");
            taken.iter().for_each(|held| assert!(pool.free(held).is_ok(), "{what}"));
            other.finish();
            assert_eq!(pool.audit(), idle(&pool), "{what}");
        },
    );
    assert_passed(&points, &[SLOT_OFFERED]);
}

#[test]
fn crash_in_accept_loses_no_block() {
    let points = at_each_point(
        || {
            let memory = Pool::create(1).unwrap();
            let pool = Pool::map(&memory).unwrap();
            let held = pool.try_take(OURS).unwrap();
            pool.offer(&held).unwrap();
            let command = super::role(&format!("pool {TAKES_OVER}{}", held.generation()), &memory);
            (command, (memory, pool, held.generation()))
        },
        |crashed, (memory, pool, generation)| {
            let what = format!("{crashed:?}");
            let other = taker(&memory, true);
            assert_eq!(pool.accept(OURS, 0, generation), None, "{what}: the other process has accepted it");
            assert_eq!(pool.recover(|row| row == OURS), 0, "{what}: the giver no longer holds it");
            if crashed.is_dead_in_the_end() {
                pool.recover(|row| row == CRASHING);
            }
            other.finish();
            assert_eq!(pool.audit(), idle(&pool), "{what}");
        },
    );
    assert_passed(&points, &[SLOT_ACCEPTED]);
}

#[test]
fn crash_in_withdrawal_of_an_offer_loses_no_block() {
    at_each_point(
        || {
            let (command, memory, pool) = start("takes back what it has offered", 1);
            let generation = next_generation(&pool);
            (command, (memory, pool, generation))
        },
        |crashed, (memory, pool, generation)| {
            let what = format!("{crashed:?}");
            let other = taker(&memory, true);
            let taken = pool.accept(OURS, 0, generation);
            assert_eq!(taken.is_some(), crashed.point.contains("offered"), "{what}");
            if crashed.is_dead_in_the_end() {
                pool.recover(|row| row == CRASHING);
            }
            taken.iter().for_each(|held| assert!(pool.free(held).is_ok(), "{what}"));
            other.finish();
            assert_eq!(pool.audit(), idle(&pool), "{what}");
        },
    );
}

/// The broker dies while it reclaims the held and offered blocks of a dead member. The next attempt, by this or another
/// broker, starts again.
#[test]
fn crash_in_reclaim_of_offered_blocks_loses_no_block() {
    let points = at_each_point(
        || {
            let (command, memory, pool) = start("is the broker", 2);
            let [held, offered] = [(); 2].map(|()| pool.try_take(DEAD).unwrap());
            pool.offer(&offered).unwrap();
            let other = taker(&memory, true);
            (command, (memory, pool, held, offered, other))
        },
        |crashed, (_memory, pool, held, offered, other)| {
            crashed.is_dead_in_the_end();
            pool.recover(|row| row == DEAD);
            other.finish();
            assert!(pool.free(&held).is_err(), "it was taken back");
            assert_eq!(pool.accept(OURS, offered.index(), offered.generation()), None, "it is stale");
            // A block may have been handed to the process that holds the other one: any process that looks for a block
            // takes it.
            let end = pool.audit();
            assert_eq!((end.free + end.stale, end.waiting, end.granted, end.invalid), (2, 0, 0, 0), "{end:?}");
            let all = [(); 2].map(|()| pool.try_take(OURS).expect("all blocks are available"));
            all.iter().for_each(|held| assert!(pool.free(held).is_ok()));
            assert_eq!(pool.audit(), idle(&pool));
        },
    );
    assert_passed(&points, &[SLOTS_RECOVERED]);
}

/// A block was handed to a stopped process, which does not take it. After a while another process revokes it for the
/// next waiter, and crashes.
#[test]
fn crash_in_take_of_a_granted_block_loses_no_block() {
    let points = at_each_point(
        || {
            let (command, memory, pool) = start("takes for another what that one does not take", 1);
            let held = pool.try_take(OURS).unwrap();
            // Waits in the row of the stopped process, which neither polls nor cancels.
            let Attempt::Waiting(stopped) = pool.take(DEAD) else { panic!("there is no block") };
            std::mem::forget(stopped);
            let other = taker(&memory, false);
            eventually("another waits behind it", || pool.audit().waiting == 2);
            pool.free(&held).unwrap();
            (command, (memory, pool, other))
        },
        |crashed, (_memory, pool, other)| {
            other.finish();
            let what = format!("{crashed:?}");
            crashed.is_dead_in_the_end();
            pool.recover(|row| row == CRASHING || row == DEAD);
            assert_eq!(pool.audit(), idle(&pool), "{what}");
        },
    );
    assert_passed(&points, &[SLOT_REVOKED]);
}
