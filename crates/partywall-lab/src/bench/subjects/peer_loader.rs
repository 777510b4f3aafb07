//! Batches of 256 MiB that worker processes decode for a trainer on a GPU: by a topic in pinned memory, beside torch's
//! DataLoader with as many workers.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{DATA_LOADER, Programs},
    },
    broker::Broker,
};

const DECODERS: [&str; 2] = ["memcpy", "jpeg"];

const WORKERS: &str = "4";

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for decoder in DECODERS {
        // Both start at the same time, because they and the workers of the rival import torch.
        let theirs = programs.spawn(DATA_LOADER, &[&"torch", &decoder, &WORKERS]);
        let mut ours = programs.spawn(DATA_LOADER, &[&"ours", &decoder, &WORKERS, &broker.socket()])?;
        let Some(mut theirs) = Programs::await_rival(bench, theirs) else { continue };
        ours.await_ready()?;
        let plan = bench.plan(SAMPLES).warm_up(1).block(1);
        let case =
            |by: &str| Case::new(by, Unit::PerSecond).parameter("decoding", decoder).parameter("workers", WORKERS);
        let comparison = Comparison::new(case("batches of 256 MiB by a pinned topic"), ours.sampler(1))
            .rival(case("torch DataLoader"), theirs.sampler(1));
        bench.run(comparison, plan)?;
    }
    Ok(())
}

/// Runs over 24 batches, or over 8 that are decoded.
const SAMPLES: usize = 5;
