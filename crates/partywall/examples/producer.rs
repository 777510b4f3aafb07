//! Shares an array until Enter is pressed: `cargo run -p partywall --example producer -- host`, or `cuda`, `cuda:1`,
//! `auto`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use partywall::{DType, DeviceChoice, Domain, gpu};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device: DeviceChoice = std::env::args().nth(1).as_deref().unwrap_or("auto").parse()?;
    let (place, _) = gpu::resolve(device)?; // `auto`: the current or first GPU, or host memory

    let domain = Domain::connect()?; // starts the broker if none is running
    let mut build = domain.create("example", place).tensor("x", DType::F32, &[1024, 1024]).allocate()?;

    let values: Vec<f32> = (0..1024 * 1024).map(|i| i as f32).collect();
    build.write("x", bytemuck::cast_slice(&values))?;

    let segment = build.commit()?; // from here on it is visible and cannot change
    println!("{}@{} is there, on {}: press Enter to end it", segment.name(), segment.version(), segment.place());
    std::io::stdin().read_line(&mut String::new())?;
    Ok(()) // the name ends with its owner; processes that have it open keep the memory
}
