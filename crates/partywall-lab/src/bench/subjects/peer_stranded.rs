//! Two uses in which torch.multiprocessing keeps memory until its process ends: an export that is read several times,
//! and one that no process reads. The result is the number of bytes that the driver counts as missing after everything
//! was released.

use partywall::WhenSome;
use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{OURS, Programs, TORCH_MULTIPROCESSING},
    },
    broker::Broker,
};

/// The name of each case, and the argument of the programs for it.
const SHAPES: [(&str, &str); 2] = [
    ("stranded by 5 exports of 256 MiB, each read 4 times", "rebuilt"),
    ("stranded by 5 exports of 256 MiB that nobody reads", "dropped"),
];

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for (what, shape) in SHAPES {
        let case = |by: &str| Case::new(what, Unit::Bytes).parameter("by", by);
        let mut ours = programs.start(OURS, &[&shape, &broker.socket()])?;
        let mut torch = programs.start_rival(bench, TORCH_MULTIPROCESSING, &[&shape]);
        let plan = bench.plan(3).warm_up(0).block(1);
        let comparison = Comparison::new(case("Partywall"), ours.sampler(1));
        let rival = torch.as_mut().map(|torch| (case("torch.multiprocessing"), torch.sampler(1)));
        let comparison = comparison.when_some(rival, |comparison, (case, it)| comparison.rival(case, it));
        bench.run(comparison, plan)?;
    }
    Ok(())
}
