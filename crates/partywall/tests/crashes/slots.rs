//! Takers of slots, which pools and semaphores consist of.

use std::{
    ops::Deref,
    sync::mpsc::{Receiver, channel},
    thread::{JoinHandle, spawn},
    time::Duration,
};

use partywall_harness::WATCHDOG;
use partywall_shm::slots::{Attempt, HeldSlot, Polled, Slots};

/// Sleeps until it holds a slot. With `tends`, also revokes slots that were handed to stopped processes.
pub(crate) fn take(slots: &Slots, row: u16, tends: bool) -> HeldSlot {
    loop {
        let mut waiter = match slots.take(row) {
            Attempt::Held(held) => return held,
            Attempt::Waiting(waiter) => waiter,
            Attempt::Crowded => panic!("there is room"),
        };
        loop {
            match waiter.poll() {
                Polled::Held(held) => return held,
                Polled::Waiting => waiter.sleep(Duration::MAX),
                // It was stopped when its turn came.
                Polled::Lost => break,
            }
            if tends {
                slots.revoke_overdue();
            }
        }
    }
}

/// Threads of the test that each wait for a slot, and give it back when they have it.
pub(crate) struct Takers(Receiver<()>, Vec<JoinHandle<()>>);

impl Takers {
    /// Starts as many threads as there are `rows`.
    pub(crate) fn start<S>(rows: std::ops::Range<u16>, tends: bool, map: impl Fn() -> S) -> Self
    where
        S: Deref<Target = Slots> + Send + 'static,
    {
        let (sender, receiver) = channel();
        let threads = rows.map(|row| {
            let slots = map();
            let sender = sender.clone();
            spawn(move || {
                let held = take(&slots, row, tends);
                slots.free(&held).unwrap();
                sender.send(()).unwrap();
            })
        });
        Self(receiver, threads.collect())
    }

    /// Waits until each of them has had a slot.
    pub(crate) fn finish(self) {
        for _ in &self.1 {
            self.0.recv_timeout(WATCHDOG).expect("watchdog: a waiter got no slot");
        }
        for thread in self.1 {
            thread.join().unwrap();
        }
    }
}
