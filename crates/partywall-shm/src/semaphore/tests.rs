#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use partywall_os::map::SharedMap;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::slots::{Attempt, HeldSlot, MAX_WAITERS, OVERDUE, Polled, SlotAudit, Waiter};

fn semaphore(maximum: u32) -> Semaphore {
    Semaphore::map(Semaphore::create(maximum).unwrap()).unwrap()
}

fn idle(maximum: u32) -> SlotAudit {
    SlotAudit { free: maximum, ..SlotAudit::default() }
}

/// Sleeps until it has a permit.
fn acquire(semaphore: &Semaphore, row: u16) -> HeldSlot {
    loop {
        match semaphore.take(row) {
            Attempt::Held(held) => return held,
            Attempt::Waiting(mut waiter) => loop {
                match waiter.poll() {
                    Polled::Held(held) => return held,
                    Polled::Waiting => {
                        waiter.sleep(Duration::MAX);
                        semaphore.revoke_overdue();
                    }
                    Polled::Lost => break,
                }
            },
            Attempt::Crowded => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn waiter(semaphore: &Semaphore, row: u16) -> Waiter<'_> {
    match semaphore.take(row) {
        Attempt::Waiting(waiter) => waiter,
        other => panic!("{other:?}"),
    }
}

#[test]
fn permits_are_taken_and_given_back_once() {
    let semaphore = semaphore(3);
    let held: Vec<_> = (0..3).map(|row| semaphore.try_take(row % 2).unwrap()).collect();
    assert_eq!(semaphore.try_take(2), None);
    assert_eq!(semaphore.holders(), [(0, 2), (1, 1)]);
    assert_eq!(semaphore.audit(), SlotAudit { held: 3, ..SlotAudit::default() });
    for held in held {
        semaphore.free(&held).unwrap();
        assert!(semaphore.free(&held).is_err(), "given back before");
    }
    assert_eq!(semaphore.audit(), idle(3));
    assert!(semaphore.audit().is_idle());
}

// Holds 318.
#[test]
fn waiters_are_served_in_order() {
    let semaphore = semaphore(1);
    let mut held = semaphore.try_take(0).unwrap();
    let mut waiters: VecDeque<_> = (1..=5).map(|row| waiter(&semaphore, row)).collect();
    assert_eq!(semaphore.audit().waiting, 5);
    assert_eq!(semaphore.waiters(), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]);
    let again = waiter(&semaphore, 2);
    assert_eq!(semaphore.waiters()[1], (2, 2));
    assert_eq!(again.cancel(), None);
    // The third waiter cancels, and no later one overtakes the others.
    assert_eq!(waiters.remove(2).unwrap().cancel(), None);
    for row in [1, 2, 4, 5] {
        semaphore.free(&held).unwrap();
        assert_eq!(semaphore.try_take(9), None, "it is handed to a waiter");
        let mut first = waiters.pop_front().unwrap();
        assert!(waiters.iter_mut().all(|waiter| waiter.poll() == Polled::Waiting));
        let Polled::Held(permit) = first.poll() else { panic!("row {row} is first") };
        assert_eq!(first.poll(), Polled::Lost, "it waits no more");
        assert_eq!(semaphore.holders(), [(row, 1)]);
        held = permit;
    }
    semaphore.free(&held).unwrap();
    assert_eq!(semaphore.audit(), idle(1));
    assert_eq!(semaphore.waiters(), []);
}

#[test]
fn a_permit_granted_as_its_waiter_gives_up_goes_to_it_or_the_next() {
    let semaphore = semaphore(1);
    let held = semaphore.try_take(0).unwrap();
    let first = waiter(&semaphore, 1);
    let second = waiter(&semaphore, 2);
    let mut third = waiter(&semaphore, 3);
    semaphore.free(&held).unwrap();
    let held = first.cancel().expect("it had been granted");
    semaphore.free(&held).unwrap();
    drop(second);
    assert!(matches!(third.poll(), Polled::Held(_)));
}

#[test]
fn dead_processes_hold_nothing_and_wait_for_nothing() {
    let semaphore = semaphore(2);
    let [dead, alive] = [7, 8].map(|row| semaphore.try_take(row).unwrap());
    let mut dead_waiter = waiter(&semaphore, 7);
    let mut granted = waiter(&semaphore, 7);
    let mut next = waiter(&semaphore, 9);
    semaphore.free(&alive).unwrap();
    assert_eq!(semaphore.audit(), SlotAudit { held: 1, handed: 1, granted: 1, waiting: 2, ..SlotAudit::default() });
    assert_eq!(semaphore.recover(|row| row == 7), 2);
    assert_eq!((dead_waiter.poll(), granted.poll()), (Polled::Lost, Polled::Lost));
    assert!(semaphore.free(&dead).is_err());
    assert!(matches!(next.poll(), Polled::Held(_)));
    assert_eq!(semaphore.recover(|row| row == 7), 0);
    assert_eq!(semaphore.audit(), SlotAudit { held: 1, free: 1, ..SlotAudit::default() });
}

// Holds 179.
#[test]
fn an_untaken_permit_goes_to_the_next_waiter() {
    let semaphore = semaphore(1);
    let held = semaphore.try_take(0).unwrap();
    let mut stopped = waiter(&semaphore, 1);
    let mut next = waiter(&semaphore, 2);
    semaphore.free(&held).unwrap();
    let start = Instant::now();
    let held = loop {
        semaphore.revoke_overdue();
        match next.poll() {
            Polled::Held(held) => break held,
            Polled::Waiting => next.sleep(Duration::from_millis(10)),
            Polled::Lost => panic!("it looks"),
        }
    };
    assert!(start.elapsed() >= OVERDUE, "it is not overdue any earlier");
    assert_eq!(stopped.poll(), Polled::Lost);
    assert_eq!(semaphore.holders(), [(2, 1)]);
    semaphore.free(&held).unwrap();
    assert_eq!(semaphore.audit(), idle(1));
}

#[test]
fn more_wait_than_there_is_room_for() {
    let semaphore = semaphore(1);
    let held = semaphore.try_take(0).unwrap();
    let mut waiters: VecDeque<_> = (0..MAX_WAITERS).map(|_| waiter(&semaphore, 1)).collect();
    assert!(matches!(semaphore.take(1), Attempt::Crowded));
    // A waiter that was granted a permit and is stopped before it takes it keeps its entry. Others continue.
    let stopped = waiters.pop_front().unwrap();
    semaphore.free(&held).unwrap();
    for _ in 1..MAX_WAITERS {
        assert_eq!(waiters.pop_front().unwrap().cancel(), None);
    }
    for _ in 0..3 * MAX_WAITERS {
        assert_eq!(waiter(&semaphore, 2).cancel(), None);
    }
    let held = stopped.cancel().unwrap();
    semaphore.free(&held).unwrap();
    assert_eq!(semaphore.audit(), idle(1));
}

#[test]
fn wrong_hints_cost_time_and_no_permit() {
    let fd = Semaphore::create(2).unwrap();
    let semaphore = Semaphore::map(&fd).unwrap();
    let map = SharedMap::writable(&fd).unwrap();
    let [look, head, tail] = [72, 128, 192].map(|offset| &map.atomics::<AtomicU64>(offset, 1).unwrap()[0]);
    for garbage in [0, 1, 5, 1 << 20, 1 << 45, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
        let held = [(); 2].map(|()| semaphore.try_take(0).unwrap());
        let mut waiter = waiter(&semaphore, 1);
        let before = (head.load(Ordering::Relaxed), tail.load(Ordering::Relaxed));
        for word in [look, head, tail] {
            word.store(garbage, Ordering::Relaxed);
        }
        for held in held {
            semaphore.free(&held).unwrap();
        }
        // As after a sleep that ended without a permit.
        waiter.sleep(Duration::from_millis(1));
        let Polled::Held(held) = waiter.poll() else { panic!("hints {garbage}: {:?}", semaphore.audit()) };
        semaphore.free(&held).unwrap();
        assert_eq!(semaphore.audit(), idle(2));
        head.store(before.0, Ordering::Relaxed);
        tail.store(before.1, Ordering::Relaxed);
    }
}

#[test]
fn positions_may_wrap_around() {
    let fd = Semaphore::create(1).unwrap();
    let semaphore = Semaphore::map(&fd).unwrap();
    let map = SharedMap::writable(&fd).unwrap();
    // As after 2⁴⁰ - 3 waits.
    let count = (1 << 40) - 3_u64;
    for offset in [128, 192] {
        map.atomics::<AtomicU64>(offset, 1).unwrap()[0].store(count, Ordering::Relaxed);
    }
    let ring = map.atomics::<[AtomicU64; 8]>(320, MAX_WAITERS as usize).unwrap();
    for (index, entry) in ring.iter().enumerate() {
        let lap = if index < 1021 { 0 } else { (1 << 30) - 1 };
        entry[0].store(lap << 34, Ordering::Relaxed);
    }
    for _ in 0..3 * MAX_WAITERS {
        let held = semaphore.try_take(0).unwrap();
        let mut first = waiter(&semaphore, 1);
        let mut second = waiter(&semaphore, 2);
        semaphore.free(&held).unwrap();
        let Polled::Held(held) = first.poll() else { panic!("it is first") };
        semaphore.free(&held).unwrap();
        let Polled::Held(held) = second.poll() else { panic!("it is second") };
        semaphore.free(&held).unwrap();
    }
    assert_eq!(semaphore.audit(), idle(1));
}

#[test]
fn threads_of_all_sorts_lose_no_permit() {
    const PERMITS: u32 = 3;
    let fd = Semaphore::create(PERMITS).unwrap();
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8_u16 {
            let semaphore = Semaphore::map(&fd).unwrap();
            let inside = &inside;
            scope.spawn(move || {
                for turn in 0..5_000_u32 {
                    let held = match (turn + u32::from(thread)) % 4 {
                        0 => semaphore.try_take(thread),
                        1 => match semaphore.take(thread) {
                            Attempt::Held(held) => Some(held),
                            Attempt::Waiting(waiter) => waiter.cancel(),
                            Attempt::Crowded => None,
                        },
                        _ => Some(acquire(&semaphore, thread)),
                    };
                    let Some(held) = held else { continue };
                    assert!(inside.fetch_add(1, Ordering::Relaxed) < PERMITS);
                    inside.fetch_sub(1, Ordering::Relaxed);
                    semaphore.free(&held).unwrap();
                }
            });
        }
    });
    assert_eq!(Semaphore::map(&fd).unwrap().audit(), idle(PERMITS));
}

/// An attempt that overtakes a waiter had begun before the waiter was in the queue.
// Holds 179.
#[test]
fn waiter_is_overtaken_only_by_earlier_acquirers() {
    const THREADS: u64 = 8;
    let fd = Semaphore::create(1).unwrap();
    // Counts attempts in the order in which a waiter sees them.
    let begun = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let passed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 1..THREADS {
            let semaphore = Semaphore::map(&fd).unwrap();
            let begun = &begun;
            let passed = &passed;
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let mine = begun.fetch_add(1, Ordering::SeqCst);
                    let held = acquire(&semaphore, 1);
                    // The holder publishes the number of its attempt.
                    passed.store(mine, Ordering::SeqCst);
                    semaphore.free(&held).unwrap();
                }
            });
        }
        let semaphore = Semaphore::map(&fd).unwrap();
        let _end = End(&done);
        for _ in 0..2_000 {
            let mut waiter = match semaphore.take(2) {
                Attempt::Waiting(waiter) => waiter,
                Attempt::Held(held) => {
                    semaphore.free(&held).unwrap();
                    continue;
                }
                Attempt::Crowded => panic!("there is room"),
            };
            // Attempts from here on began after this waiter was in the queue.
            let first_later = begun.load(Ordering::SeqCst);
            let mut overtaken = std::collections::BTreeSet::new();
            loop {
                let last = passed.load(Ordering::SeqCst);
                match waiter.poll() {
                    Polled::Held(held) => {
                        semaphore.free(&held).unwrap();
                        break;
                    }
                    Polled::Waiting => {
                        assert!(last < first_later, "attempt {last} overtook a waiter of {first_later}");
                        overtaken.insert(last);
                        std::thread::yield_now();
                    }
                    Polled::Lost => panic!("no process revoked it"),
                }
            }
            // One attempt a thread, and the permits in use when it began to wait.
            assert!(overtaken.len() as u64 <= THREADS, "{overtaken:?}");
        }
    });
    assert_eq!(Semaphore::map(&fd).unwrap().audit(), idle(1));
}

/// Ends the other threads, even if this one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn semaphore_has_one_to_65536_permits() {
    assert_eq!(Semaphore::create(0).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert!(Semaphore::create(MAX_PERMITS + 1).is_err());
    assert_eq!(Semaphore::map(Semaphore::create(MAX_PERMITS).unwrap()).unwrap().count(), MAX_PERMITS);
}

#[test]
fn last_of_many_permits_is_found() {
    let semaphore = semaphore(MAX_PERMITS);
    let held: Vec<_> = (0..MAX_PERMITS).map(|i| semaphore.try_take(i as u16).unwrap()).collect();
    let mut waiter = waiter(&semaphore, 0);
    semaphore.free(&held[MAX_PERMITS as usize - 1]).unwrap();
    let Polled::Held(last) = waiter.poll() else { panic!("it was given back") };
    assert_eq!((semaphore.holders().len(), semaphore.holders()[0]), (MAX_PERMITS as usize - 1, (0, 2)));
    semaphore.free(&last).unwrap();
}

#[derive(Debug, Clone)]
enum Step {
    Try(u16),
    Acquire(u16),
    Poll(usize),
    Cancel(usize),
    Release(usize),
    Die(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let row = 0..4_u16;
    prop_oneof![
        1 => row.clone().prop_map(Step::Try),
        3 => row.clone().prop_map(Step::Acquire),
        2 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::Cancel),
        3 => any::<usize>().prop_map(Step::Release),
        1 => row.prop_map(Step::Die),
    ]
}

/// A simple model of a semaphore.
#[derive(Default)]
struct Model {
    /// The holder of each permit that is not free, or the waiter that it was handed to.
    taken: Vec<u64>,
    queue: VecDeque<u64>,
    maximum: usize,
}

impl Model {
    fn serve(&mut self) {
        while self.taken.len() < self.maximum
            && let Some(first) = self.queue.pop_front()
        {
            self.taken.push(first);
        }
    }

    fn forget(&mut self, who: u64) {
        self.taken.retain(|other| *other != who);
        self.queue.retain(|other| *other != who);
        self.serve();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One thread acts for all members, so each step has one correct outcome.
    #[test]
    fn it_is_what_the_model_is(maximum in 1..4_u32, steps in vec(step(), 1..200)) {
        let semaphore = semaphore(maximum);
        let mut model = Model { maximum: maximum as usize, ..Model::default() };
        // Each acquisition has a number; here are those that hold and those that wait.
        let mut holders: Vec<(u64, u16, HeldSlot)> = Vec::new();
        let mut waiters: Vec<(u64, u16, Waiter<'_>)> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            let number = number as u64;
            match step {
                Step::Try(row) => {
                    let expected = model.taken.len() < model.maximum && model.queue.is_empty();
                    let held = semaphore.try_take(row);
                    prop_assert_eq!(held.is_some(), expected);
                    if let Some(held) = held {
                        model.taken.push(number);
                        holders.push((number, row, held));
                    }
                }
                Step::Acquire(row) => {
                    model.queue.push_back(number);
                    model.serve();
                    match semaphore.take(row) {
                        Attempt::Held(held) => {
                            prop_assert!(model.taken.contains(&number));
                            holders.push((number, row, held));
                        }
                        Attempt::Waiting(waiter) => {
                            prop_assert!(model.queue.contains(&number));
                            waiters.push((number, row, waiter));
                        }
                        Attempt::Crowded => prop_assert!(false, "there is room"),
                    }
                }
                Step::Poll(any) if !waiters.is_empty() => {
                    let index = any % waiters.len();
                    let (number, row, waiter) = &mut waiters[index];
                    match waiter.poll() {
                        Polled::Waiting => prop_assert!(model.queue.contains(number)),
                        Polled::Held(held) => {
                            prop_assert!(model.taken.contains(number));
                            holders.push((*number, *row, held));
                            waiters.remove(index);
                        }
                        Polled::Lost => prop_assert!(false, "it lives"),
                    }
                }
                Step::Cancel(any) if !waiters.is_empty() => {
                    let (number, row, waiter) = waiters.remove(any % waiters.len());
                    let held = waiter.cancel();
                    prop_assert_eq!(held.is_some(), model.taken.contains(&number));
                    match held {
                        Some(held) => holders.push((number, row, held)),
                        None => model.forget(number),
                    }
                }
                Step::Release(any) if !holders.is_empty() => {
                    let (number, _, held) = holders.remove(any % holders.len());
                    prop_assert!(semaphore.free(&held).is_ok());
                    model.forget(number);
                }
                Step::Die(dead) => {
                    let lost = |row: &u16| *row == dead;
                    let gone: Vec<_> = holders.iter().map(|(number, row, _)| (*number, *row))
                        .chain(waiters.iter().map(|(number, row, _)| (*number, *row)))
                        .filter_map(|(number, row)| lost(&row).then_some(number)).collect();
                    let had = gone.iter().filter(|number| model.taken.contains(number)).count();
                    prop_assert_eq!(semaphore.recover(|row| lost(&row)) as usize, had);
                    // All at once, so that no permit goes from one dead process to another.
                    model.queue.retain(|number| !gone.contains(number));
                    model.taken.retain(|number| !gone.contains(number));
                    model.serve();
                    holders.retain(|(_, row, _)| !lost(row));
                    for (_, _, mut waiter) in waiters.extract_if(.., |(_, row, _)| lost(row)) {
                        prop_assert_eq!(waiter.poll(), Polled::Lost);
                    }
                }
                Step::Poll(_) | Step::Cancel(_) | Step::Release(_) => {}
            }
            let audit = semaphore.audit();
            prop_assert_eq!(audit.held + audit.handed, model.taken.len() as u32);
            prop_assert_eq!(audit.free, maximum - model.taken.len() as u32);
            prop_assert_eq!(audit.waiting, model.queue.len() as u32);
            prop_assert_eq!((audit.stale, audit.invalid, audit.granted), (0, 0, audit.handed));
        }
        drop(waiters);
        for (_, _, held) in holders {
            prop_assert!(semaphore.free(&held).is_ok());
        }
        prop_assert_eq!(semaphore.audit(), idle(maximum));
    }

    /// A broken or hostile member may leave any bytes: every call terminates without a panic, and the broker recovers
    /// everything.
    #[test]
    fn any_bytes_can_be_recovered(
        words in vec((any::<prop::sample::Index>(), any::<u64>(), 0..4_u64), 1..400),
        maximum in 1..20_u32,
    ) {
        let fd = Semaphore::create(maximum).unwrap();
        let semaphore = Semaphore::map(&fd).unwrap();
        let map = SharedMap::writable(&fd).unwrap();
        // Behind the header, which is read only when the memory is mapped.
        let all = map.atomics::<AtomicU64>(64, map.len() / 8 - 8).unwrap();
        for (index, word, sort) in words {
            // Plausible but wrong words find more errors than noise.
            let word = match sort {
                0 => word,
                1 => word & 0xff,
                2 => (word & 0x3ff) << 18 | (word >> 32 & 3),
                _ => (word & 3) << 34 | (word & 0xf_0000) | (word >> 60 & 3),
            };
            all[index.index(all.len())].store(word, Ordering::Relaxed);
        }
        semaphore.audit();
        semaphore.holders();
        let held = semaphore.try_take(1);
        let mut attempt = semaphore.take(2);
        if let Attempt::Waiting(waiter) = &mut attempt {
            waiter.sleep(Duration::ZERO);
            waiter.poll();
        }
        if let Some(held) = held {
            semaphore.free(&held).unwrap();
        }
        drop(attempt);
        semaphore.revoke_overdue();
        if let Some(granted) = semaphore.first_granted() {
            semaphore.revoke(granted);
        }
        semaphore.recover(|row| row % 2 == 0);
        semaphore.recover(|_| true);
        prop_assert_eq!(semaphore.audit(), idle(maximum));
        let held = semaphore.try_take(3).expect("all are free, and nobody waits");
        prop_assert!(semaphore.free(&held).is_ok());
    }
}
