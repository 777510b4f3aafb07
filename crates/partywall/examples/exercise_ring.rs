//! Exercise 3, a ring buffer: `cargo run -p partywall --example exercise_ring`. A fast producer and a slow consumer,
//! two processes, share four slots.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{env, error::Error, process::Command, thread, time::Duration};

use partywall::{DType, Domain, Place, Policy, Result, Topic};

const NAME: &str = "exercise/ring";
const SLOTS: u32 = 4;
const NUMBERS: u64 = 1024;
const SAMPLES: u64 = 40;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let domain = Domain::connect()?;
    if env::args().nth(1).as_deref() == Some("produce") {
        return Ok(produce(&ring(&domain)?)?);
    }
    // change it: `Policy::Latest` makes the consumer miss samples, and the producer never waits
    let consumer = ring(&domain)?.subscribe(Policy::Block).until_idle(true).join()?;
    let mut producer = Command::new(env::current_exe()?).arg("produce").spawn()?;
    let mut received = 0;
    let mut whole = 0;
    let mut missed = 0;
    // The loop ends when the producer has left, even if it was killed.
    for sample in &consumer {
        let sample = sample?; // its slot is not overwritten as long as this exists
        thread::sleep(Duration::from_millis(2)); // change it: print in the producer how long each `publish` takes
        let numbers = sample.as_slice::<u64>()?; // in the slot: nothing is copied
        received += 1;
        missed += sample.missed();
        whole += u64::from(numbers.iter().all(|number| *number == numbers[0]));
    }
    println!("{received} samples received, {whole} of them whole, {missed} missed");
    println!("the producer: {}", producer.wait()?);
    Ok(())
}

/// Opens the ring, or creates it: either process may start first.
fn ring(domain: &Domain) -> Result<Topic> {
    domain.topic(NAME).dtype(DType::U64).shape(&[NUMBERS]).depth(SLOTS).place(Place::Host).open_or_create()
}

fn produce(ring: &Topic) -> Result<()> {
    let producer = ring.publisher()?;
    for number in 0..SAMPLES {
        let mut slot = producer.loan(DType::U64, &[NUMBERS], TIMEOUT)?;
        slot.as_mut_slice::<u64>()?.fill(number); // change it: abort here, and see what the consumer gets
        slot.filled().publish(TIMEOUT)?; // waits while the ring is full
    }
    Ok(())
}
