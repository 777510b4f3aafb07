//! Sums the producer's array, before or after it was started: `cargo run -p partywall --example consumer`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Duration;

use partywall::{Domain, Place};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = Domain::connect()?;
    let segment = domain.open("example", Duration::from_secs(60))?; // waits for the producer
    let x = segment.tensor("x")?;
    println!("{}: {} {:?} on {}", segment.name(), x.dtype(), x.shape(), segment.place());

    let mut copy = vec![0_f32; x.elements() as usize];
    let values: &[f32] = match segment.place() {
        Place::Host | Place::Pinned(_) => x.as_slice()?, // the producer's own memory
        Place::Gpu(_) => {
            x.read_at(0, bytemuck::cast_slice_mut(&mut copy))?; // your kernels take x.device()?.device_ptr()
            &copy
        }
    };
    println!("its sum is {}", values.iter().map(|value| f64::from(*value)).sum::<f64>());
    Ok(())
}
