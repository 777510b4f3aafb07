//! Semaphores under contention, and among processes that are killed and stopped.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    time::{Duration, Instant},
};

use partywall::{DType, Domain, Error, Place as At, Semaphore};

use super::{
    Dice, WATCHDOG, eventually,
    place::{Actor, Place, linger, say},
    rounds,
};

/// The number of permits of the semaphores, unless a test states another.
const PERMITS: u32 = 2;

pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    match words[0] {
        // Repeatedly adds 1 to a number that only one process may access at a time.
        "adding" => {
            let semaphore = domain.semaphore("one", 1).unwrap();
            let counter = domain.opener("counter").read_write().open().unwrap();
            let number = counter.tensor("x").unwrap().shared::<u64>().unwrap();
            say("ready");
            linger();
            for _ in 0..words[1].parse().unwrap() {
                let permit = semaphore.acquire(WATCHDOG).unwrap();
                number.set(0, number.get(0) + 1);
                permit.release().unwrap();
            }
        }
        "churning" => {
            let semaphore = domain.semaphore("some", PERMITS).unwrap();
            let mut dice = Dice(words[1].parse().unwrap());
            say("ready");
            loop {
                churn(&semaphore, &mut dice);
            }
        }
        other => panic!("{other}"),
    }
}

/// Calls one of all operations of semaphores.
fn churn(semaphore: &Semaphore, dice: &mut Dice) {
    let permit = match dice.below(4) {
        0 => semaphore.try_acquire().unwrap(),
        1 => match semaphore.acquire(Duration::from_micros(dice.below(300))) {
            Ok(permit) => Some(permit),
            Err(Error::Timeout { .. }) => None,
            Err(error) => panic!("{error}"),
        },
        _ => Some(semaphore.acquire(WATCHDOG).unwrap()),
    };
    if dice.below(20) == 0 {
        std::thread::sleep(Duration::from_micros(dice.below(2000)));
    }
    drop(permit);
}

#[test]
fn many_operations_of_several_processes_lose_no_permit() {
    const PROCESSES: usize = 4;
    let each = rounds(250_000);
    let place = Place::new();
    let domain = place.connect();
    let semaphore = domain.semaphore("one", 1).unwrap();
    let build = domain.create("counter", At::Host).tensor("x", DType::U64, &[1]).mutable(true).allocate().unwrap();
    let counter = build.commit().unwrap();
    let mut adders: Vec<_> = (0..PROCESSES).map(|_| place.play(&format!("semaphore adding {each}"))).collect();
    let start = Instant::now();
    for adder in &mut adders {
        adder.proceed();
    }
    for adder in &mut adders {
        assert!(adder.join().success());
    }
    let number = counter.tensor("x").unwrap().shared::<u64>().unwrap();
    assert_eq!(number.get(0), (PROCESSES * each) as u64);
    eprintln!("{} turns in {:?}", PROCESSES * each, start.elapsed());
    eventually("all gave back", || semaphore.available() == 1);
}

/// Holders, waiters, and processes that are about to release or hand on a permit are killed at any moment.
#[test]
fn processes_killed_at_any_moment_take_no_permit_along() {
    let place = Place::new();
    let domain = place.connect();
    let semaphore = domain.semaphore("some", PERMITS).unwrap();
    let done = AtomicBool::new(false);
    let kills = rounds(60);
    let mut turns = 0;
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| {
            let mut dice = Dice(1);
            let mut turns = 0;
            while !done.load(Ordering::Relaxed) {
                churn(&semaphore, &mut dice);
                turns += 1;
            }
            turns
        });
        let mut dice = Dice(3);
        let mut victims: Vec<Actor> = (0..3).map(|i| place.play(&format!("semaphore churning {i}"))).collect();
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(dice.below(20_000)));
            let victim = dice.below(3) as usize;
            victims[victim].kill();
            victims[victim] = place.play(&format!("semaphore churning {}", 100 + kill));
        }
        drop(victims);
        done.store(true, Ordering::Relaxed);
        turns = survivor.join().unwrap();
    });
    eventually("the permits of the dead come back", || semaphore.available() == PERMITS);
    assert_eq!(semaphore.waiting(), 0);
    eprintln!("{kills} kills, {turns} turns of the survivor");
}

/// One process at a time is stopped, with at most one permit; the others continue with the other permit.
#[test]
fn processes_stopped_at_any_moment_block_no_other() {
    let place = Place::new();
    let semaphore = place.connect().semaphore("some", PERMITS).unwrap();
    let mut dice = Dice(5);
    let mut actors: Vec<Actor> = (0..3).map(|i| place.play(&format!("semaphore churning {i}"))).collect();
    for round in 0..rounds(30) {
        std::thread::sleep(Duration::from_micros(dice.below(5_000)));
        let stopped = dice.below(3) as usize;
        actors[stopped].stop();
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    semaphore.acquire(WATCHDOG).unwrap().release().unwrap();
                }
                sender.send(()).unwrap();
            });
            receiver.recv_timeout(WATCHDOG).expect("the stopped one is in the way");
        });
        // One process is never continued.
        if round == 10 {
            actors[stopped].kill();
            actors[stopped] = place.play("semaphore churning 99");
        } else {
            actors[stopped].resume();
        }
    }
    drop(actors);
    eventually("the permits of the dead come back", || semaphore.available() == PERMITS);
}
