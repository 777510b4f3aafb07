//! A topic between languages: `cargo run -p partywall --example frames -- publish 300` in one terminal and `… subscribe`
//! in another, in any order; or the same roles of `examples/c/frames.cpp` and `python/examples/frames.py`. Number `n` of
//! the frames is filled with `n`. Frames are copied, so that they may be on any device, which is the last argument:
//! `host` (the default), `cuda:0`, `auto`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Duration;

use partywall::{DType, DeviceChoice, Domain, Policy, Result, Topic, gpu};

const SHAPE: [u64; 2] = [48, 64];
const PIXELS: usize = 48 * 64;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

pub(crate) fn run(arguments: &[&str]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let (count, device) = match *arguments {
        ["publish", count] => (Some(count.parse()?), "host"),
        ["publish", count, device] => (Some(count.parse()?), device),
        ["subscribe", device] => (None, device),
        _ => (None, "host"),
    };
    let (place, _) = gpu::resolve(device.parse::<DeviceChoice>()?)?;
    let domain = Domain::connect()?;
    let topic = domain.topic("examples/frames").dtype(DType::U8).shape(&SHAPE).place(place).open_or_create()?;
    match count {
        Some(count) => publish(&topic, count)?,
        None => subscribe(&topic)?,
    }
    Ok(())
}

fn publish(topic: &Topic, count: u32) -> Result<()> {
    let publisher = topic.publisher()?;
    publisher.wait_for_subscribers(1, TIMEOUT)?;
    for number in 0..count {
        publisher.send(DType::U8, &SHAPE, &[number as u8; PIXELS], TIMEOUT)?;
    }
    Ok(())
}

fn subscribe(topic: &Topic) -> Result<()> {
    let subscriber = topic.subscribe(Policy::Block).until_idle(true).join()?;
    let mut received = 0_u32;
    let mut right = 0;
    for sample in &subscriber {
        let mut pixels = [0; PIXELS];
        sample?.read_at(0, &mut pixels)?;
        right += u32::from(pixels == [received as u8; PIXELS]);
        received += 1;
    }
    println!("{received} frames, {right} of them right");
    Ok(())
}
