//! A topic between languages: `cargo run -p partywall --example frames -- publish 300` in one terminal and `… subscribe`
//! in another, in any order; or the same roles of `examples/c/frames.cpp`. Number `n` of the frames is filled with `n`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Duration;

use partywall::{DType, Domain, Policy, Result, Topic};

const SHAPE: [u64; 2] = [48, 64];
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let domain = Domain::connect()?;
    let topic = domain.topic("examples/frames").dtype(DType::U8).shape(&SHAPE).open_or_create()?;
    let arguments: Vec<_> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "publish", count] => publish(&topic, count.parse().unwrap_or(0)),
        _ => subscribe(&topic),
    }
}

fn publish(topic: &Topic, count: u32) -> Result<()> {
    let publisher = topic.publisher()?;
    publisher.wait_for_subscribers(1, TIMEOUT)?;
    for number in 0..count {
        let mut loan = publisher.loan(DType::U8, &SHAPE, TIMEOUT)?;
        loan.as_mut_slice::<u8>()?.fill(number as u8);
        loan.filled().publish(TIMEOUT)?;
    }
    Ok(())
}

fn subscribe(topic: &Topic) -> Result<()> {
    let subscriber = topic.subscribe(Policy::Block).until_idle(true).join()?;
    let mut received = 0_u32;
    let mut right = 0;
    for sample in &subscriber {
        right += u32::from(sample?.as_slice::<u8>()?.iter().all(|pixel| *pixel == received as u8));
        received += 1;
    }
    println!("{received} frames, {right} of them right");
    Ok(())
}
