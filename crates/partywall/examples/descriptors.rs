//! Passes a segment to a program in another language as file descriptors:
//! `cargo run -p partywall --example descriptors -- PROGRAM NAME TENSOR`. The program that goes with it is
//! `descriptors.c`.
//!
//! Start the example `producer` first; its name is `example` and its tensor `x`.

use std::{process::Command, time::Duration};

use partywall::Domain;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().collect();
    let [_, program, name, tensor] = &arguments[..] else {
        return Err("usage: descriptors PROGRAM NAME TENSOR".into());
    };

    // No CUDA in this process: the program imports the memory.
    let segment = Domain::connect()?.descriptors(name, Duration::from_secs(60))?;
    let tensor = segment.table().find(tensor).ok_or("there is no such tensor")?;
    let place = [tensor.chunk() as u64, tensor.offset(), tensor.bytes()];

    let mut command = Command::new(program);
    command.arg(segment.place().to_string()).args(place.map(|number| number.to_string()));
    for (fd, chunk) in segment.pass_to(&mut command)?.into_iter().zip(segment.chunks()) {
        command.arg(format!("{fd}:{}", chunk.bytes()));
    }
    let status = command.status()?; // the lease is held meanwhile
    if status.success() { Ok(()) } else { Err(format!("{program}: {status}").into()) }
}
