//! `torch.multiprocessing` with the reductions of Partywall, and with torch's own: sends of one tensor, and memory that
//! exports leave behind if they are read several times or never.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{Programs, TORCH_MULTIPROCESSING},
    },
    broker::Broker,
};

/// The name of each case, the argument of the program for it, its unit, and how many samples are taken.
const SHAPES: [(&str, &str, Unit, usize); 3] = [
    ("a tensor that is sent again and again", "sent", Unit::PerSecond, 20),
    ("stranded by 5 exports of 256 MiB, each read 4 times", "rebuilt", Unit::Bytes, 3),
    ("stranded by 5 exports of 256 MiB that nobody reads", "dropped", Unit::Bytes, 3),
];

/// The case of the rival, to which the first goal refers.
const RIVAL: &str = "torch's own reductions";

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for (what, shape, unit, samples) in SHAPES {
        let mut ours = programs.start(TORCH_MULTIPROCESSING, &[&shape, &broker.socket()])?;
        let mut torch = programs.start_rival(bench, TORCH_MULTIPROCESSING, &[&shape]);
        // The first send publishes the tensor.
        let plan = bench.plan(samples).warm_up(1).block(1);
        let comparison = Comparison::new(Case::new(what, unit), ours.sampler(1));
        let comparison = match torch.as_mut() {
            Some(torch) => comparison.rival(Case::new(RIVAL, unit), torch.sampler(1)),
            None => comparison,
        };
        bench.run(comparison, plan)?;
    }
    Ok(())
}
