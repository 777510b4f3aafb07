//! Shares an array that cudarc computes with: `cargo run -p partywall --example cudarc --features cudarc`, on a GPU.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::Duration;

use cudarc::driver::CudaContext;
use partywall::{DType, DeviceChoice, Domain, gpu};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (place, _) = gpu::resolve(DeviceChoice::Cuda(0))?;
    let stream = CudaContext::new(0)?.new_stream()?; // the same GPU, and its primary context

    let domain = Domain::connect()?; // starts the broker if none is there
    let build = domain.create("cudarc", place).tensor("x", DType::F32, &[1024]).allocate()?;
    let values: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let mut draft = build.device("x")?.to_cudarc::<f32>(&stream)?;
    stream.memcpy_htod(&values, &mut draft.view_mut()?)?; // or a kernel, launched with the view
    stream.synchronize()?; // what is committed must be there
    drop(draft);
    let segment = build.commit()?;

    // Any other process may do this part:
    let opened = domain.open("cudarc", Duration::from_secs(10))?;
    let mut x = opened.tensor("x")?.to_cudarc::<f32>(&stream)?;
    let sum: f32 = stream.clone_dtoh(&x.view())?.iter().sum();
    println!("{}@{} on {}: its sum is {sum}", segment.name(), segment.version(), segment.place());
    assert!(x.view_mut().is_err(), "it is frozen, so there is nothing but a CudaView");
    Ok(())
}
