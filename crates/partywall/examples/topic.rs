//! Samples that are published once and received in place: `cargo run -p partywall --example topic`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{thread, time::Duration};

use partywall::{DType, Domain, Place, Policy, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    run(&Domain::connect()?, &Domain::connect()?)
}

/// One connection publishes, two subscribers of the other one receive.
pub(crate) fn run(camera: &Domain, viewers: &Domain) -> Result<()> {
    let frames = |domain: &Domain| {
        domain.topic("example/camera").dtype(DType::U8).shape(&[480, 640]).place(Place::Host).open_or_create()
    };
    let topic = frames(viewers)?;
    // It misses nothing, and ends when the last publisher has left.
    let recorder = topic.subscribe(Policy::Block).until_idle(true).join()?;
    // It takes the newest sample and misses those before.
    let screen = topic.subscribe(Policy::Latest).until_idle(true).join()?;
    let publisher = frames(camera)?.publisher()?;
    thread::scope(|scope| {
        let recording = scope.spawn(move || recorder.iter().try_fold(0, |count, sample| sample.map(|_| count + 1)));
        for number in 0..10 {
            let mut frame = publisher.loan(DType::U8, &[480, 640], TIMEOUT)?;
            frame.as_mut_slice::<u8>()?.fill(number);
            frame.filled().publish(TIMEOUT)?; // from here on it cannot change
        }
        drop(publisher);
        let newest = screen.recv(TIMEOUT)?;
        println!("the newest frame is {}, {} were missed", newest.as_slice::<u8>()?[0], newest.missed());
        let recorded: u32 = recording.join().expect("the recorder does not panic")?;
        println!("{recorded} frames were recorded");
        Ok(())
    })
}
