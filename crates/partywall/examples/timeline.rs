//! Order between processes by a value that only grows: `cargo run -p partywall --example timeline`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::{thread, time::Duration};

use partywall::{Domain, Error, Result, error::Gone};

const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    run(&Domain::connect()?, &Domain::connect()?)
}

/// One connection signals values, the other one waits for them.
pub(crate) fn run(producer: &Domain, consumer: &Domain) -> Result<()> {
    let ready = consumer.timeline("example/ready")?; // it may come before the writer
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            for step in 1.. {
                match ready.wait(step, TIMEOUT) {
                    Ok(()) => println!("step {step} is done"),
                    // Also if the writer's process dies: no wait lasts for ever.
                    Err(Error::Gone(Gone::Timeline { last, ending, .. })) => {
                        println!("no step follows step {last}: {ending:?}");
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        let done = producer.timeline_writer("example/ready")?;
        for step in 1..=3 {
            // Work of the GPU would be followed by `done.signal_on(stream, step)`.
            done.signal(step)?;
        }
        done.close();
        waiting.join().expect("the waiting thread does not panic")
    })
}
