//! New weights of a model for four worker processes: as a version of a name, beside torch.multiprocessing with a handle
//! for each tensor, and with one tensor that contains all others.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{Programs, WEIGHT_UPDATES},
        size,
    },
    broker::Broker,
};

pub(super) fn on_gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    compare(bench, broker, "cuda", 4 << 20)
}

pub(super) fn on_host(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    compare(bench, broker, "host", 64 << 10)
}

/// Compares updates of weights on `device`, in tensors of `bytes` each.
fn compare(bench: &Bench<'_>, broker: &Broker, device: &str, bytes: u64) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    let [workers, tensors, each] = [WORKERS, TENSORS, bytes].map(|number| number.to_string());
    // All start at the same time, because they and their workers import torch.
    let rivals =
        RIVALS.map(|(way, name)| (name, programs.spawn(WEIGHT_UPDATES, &[&way, &device, &workers, &tensors, &each])));
    let mut ours =
        programs.spawn(WEIGHT_UPDATES, &[&"partywall", &device, &workers, &tensors, &each, &broker.socket()])?;
    let mut rivals: Vec<_> =
        rivals.into_iter().filter_map(|(name, spawned)| Some((name, Programs::await_rival(bench, spawned)?))).collect();
    ours.await_ready()?;
    for &(what, about, unit, samples) in &MEASURED {
        let case = |by: &str| {
            let case = Case::new(about, unit).parameter("by", by).parameter("workers", WORKERS);
            case.parameter("tensors", TENSORS).parameter("each", size(bytes))
        };
        let comparison = Comparison::new(case("Partywall"), ours.sampler_of(what, 1));
        let comparison = rivals
            .iter_mut()
            .fold(comparison, |comparison, (name, rival)| comparison.rival(case(name), rival.sampler_of(what, 1)));
        // The programs have made their first update.
        let plan = bench.plan(samples).warm_up(0).block(1);
        bench.run(comparison, plan)?;
    }
    Ok(())
}

/// How the rivals send tensors, and their names in the report.
const RIVALS: [(&str, &str); 2] =
    [("tensors", "torch.multiprocessing, each tensor"), ("bucket", "torch.multiprocessing, one bucket")];

/// What the programs measure, its name in the report, and the number of samples.
const MEASURED: [(&str, &str, Unit, usize); 3] = [
    ("step", "new weights until all workers have read them", Unit::Milliseconds, 50),
    ("peak", "memory of updates, beside the trainer's weights", Unit::Bytes, 3),
    ("stranded", "memory that updates leave behind", Unit::Bytes, 3),
];

const WORKERS: u64 = 4;
const TENSORS: u64 = 500;
