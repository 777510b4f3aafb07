//! A semaphore under contention.

use std::time::Instant;

use partywall::{DType, Domain, Place as At};

use super::{
    WATCHDOG, eventually,
    place::{Place, linger, say},
    rounds,
};

/// Repeatedly adds 1 to a number that only one process may access at a time.
pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    let semaphore = domain.semaphore("one", 1).unwrap();
    let counter = domain.opener("counter").read_write().open().unwrap();
    let number = counter.tensor("x").unwrap().shared::<u64>().unwrap();
    say("ready");
    linger();
    for _ in 0..words[0].parse().unwrap() {
        let permit = semaphore.acquire(WATCHDOG).unwrap();
        number.set(0, number.get(0) + 1);
        permit.release().unwrap();
    }
}

// Holds 178.
#[test]
fn many_operations_of_several_processes_lose_no_permit() {
    const PROCESSES: usize = 4;
    let each = rounds(250_000);
    let place = Place::new();
    let domain = place.connect();
    let semaphore = domain.semaphore("one", 1).unwrap();
    let build = domain.create("counter", At::Host).tensor("x", DType::U64, &[1]).mutable(true).allocate().unwrap();
    let counter = build.commit().unwrap();
    let mut adders: Vec<_> = (0..PROCESSES).map(|_| place.play(&format!("semaphore {each}"))).collect();
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
