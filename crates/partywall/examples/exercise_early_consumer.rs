//! Exercise 2, the consumer comes too early: `cargo run -p partywall --example exercise_early_consumer`. The consumer
//! is there first. It starts a producer that dies half-way, and then one that finishes.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{env, error::Error, process, process::Command, thread, time::Duration};

use partywall::{DType, Domain, Place, Result};

const NAME: &str = "exercise/early";
const ELEMENTS: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    match env::args().nth(1).as_deref() {
        Some("dies") => produce(true)?,
        Some("produces") => produce(false)?,
        _ => consume()?,
    }
    Ok(())
}

fn consume() -> std::result::Result<(), Box<dyn Error>> {
    let start = |role: &str| Command::new(env::current_exe()?).arg(role).spawn();
    let domain = Domain::connect()?;
    let is_there = || domain.open(NAME, Duration::ZERO).is_ok(); // does not wait

    println!("before any producer the array is there: {}", is_there());
    println!("the first producer: {}", start("dies")?.wait()?);
    println!("after a producer that died half-way the array is there: {}", is_there());

    let mut second = start("produces")?;
    let segment = domain.open(NAME, TIMEOUT)?; // change it: wait for 50 ms only, and handle the error
    let ones = segment.tensor("x")?.as_slice::<u8>()?.iter().filter(|byte| **byte == 1).count();
    println!("after the wait {ones} of {ELEMENTS} bytes are written");
    println!("the second producer: {}", second.wait()?);
    domain.remove(NAME)?;
    Ok(())
}

fn produce(dies: bool) -> Result<()> {
    let draft = Domain::connect()?.create(NAME, Place::Host).kept(true); // kept: the name outlives this process
    let mut build = draft.tensor("x", DType::U8, &[ELEMENTS]).allocate()?;
    let (first_half, rest) = build.as_mut_slice::<u8>("x")?.split_at_mut(ELEMENTS as usize / 2);
    first_half.fill(1);
    if dies {
        process::abort(); // no other process ever sees the half; change it: commit, then abort
    }
    thread::sleep(Duration::from_millis(300)); // change it: the consumer waits as long as this takes
    rest.fill(1);
    drop(build.commit()?); // from here on the array can be opened
    Ok(())
}
