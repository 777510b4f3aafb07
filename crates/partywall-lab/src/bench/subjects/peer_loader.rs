//! Batches of 256 MiB and 1 MiB that worker processes decode for a trainer on a GPU: by a topic in pinned memory and by
//! the loader of the package, beside torch's DataLoader with as many workers.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{DATA_LOADER, Programs},
    },
    broker::Broker,
};

const DECODERS: [&str; 3] = ["memcpy", "small", "jpeg"];

const WORKERS: &str = "4";

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for decoder in DECODERS {
        // All start at the same time, because they and the workers of the loaders import torch.
        let theirs = programs.spawn(DATA_LOADER, &[&"torch", &decoder, &WORKERS]);
        let mut loader = programs.spawn(DATA_LOADER, &[&"loader", &decoder, &WORKERS, &broker.socket()])?;
        let mut topic = programs.spawn(DATA_LOADER, &[&"topic", &decoder, &WORKERS, &broker.socket()])?;
        let Some(mut theirs) = Programs::await_rival(bench, theirs) else { continue };
        loader.await_ready()?;
        topic.await_ready()?;
        let plan = bench.plan(SAMPLES).warm_up(1).block(1);
        let case =
            |by: &str| Case::new(by, Unit::PerSecond).parameter("decoding", decoder).parameter("workers", WORKERS);
        for (name, ours) in [("a pinned topic", &mut topic), ("the loader of the package", &mut loader)] {
            let comparison = Comparison::new(case(&format!("batches by {name}")), ours.sampler(1))
                .rival(case("torch DataLoader"), theirs.sampler(1));
            bench.run(comparison, plan)?;
        }
    }
    Ok(())
}

/// Runs over 24 batches, over 400 of 1 MiB, or over 8 that are decoded.
const SAMPLES: usize = 5;
