//! Blocks that go round between processes: `cargo run -p partywall --example pool`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{sync::mpsc, thread, time::Duration};

use partywall::{Domain, Place, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    run(&Domain::connect()?, &Domain::connect()?)
}

/// One connection fills blocks and hands them over, the other one takes and returns them.
pub(crate) fn run(camera: &Domain, display: &Domain) -> Result<()> {
    let frames = |domain: &Domain| {
        domain.pool("example/frames").blocks(4).block_bytes(640 * 480).place(Place::Host).open_or_create()
    };
    let (sender, references) = mpsc::channel::<String>(); // between processes: a pipe, a socket, a queue
    thread::scope(|scope| {
        let consumer = scope.spawn(move || {
            let frames = frames(display)?;
            for reference in references {
                let frame = frames.accept(&reference.parse()?)?; // the very block: nothing is copied
                println!("a frame of {} bytes, all {}", frame.bytes()?.len(), frame.bytes()?[0]);
            } // dropping the block returns it to the pool
            Ok(())
        });
        let frames = frames(camera)?;
        for number in 0..10 {
            let mut frame = frames.alloc(TIMEOUT)?; // waits while all four are in use
            frame.bytes_mut()?.fill(number);
            // The receiver has hung up only if it has failed, and then says so below.
            _ = sender.send(frame.offer()?.to_string());
        }
        drop(sender);
        consumer.join().expect("the consumer does not panic")
    })
}
