//! `torch.multiprocessing` with the reductions of Partywall, and with torch's own: sends of one tensor, and memory that
//! exports leave behind if they are read several times or never.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::Bench,
    broker::Broker,
    python::{Programs, TORCH_MULTIPROCESSING},
};

/// The name of each case, the argument of the program for it, its unit and its goal.
const SHAPES: [(&str, &str, Unit, &str); 3] = [
    ("a tensor that is sent again and again", "sent", Unit::PerSecond, ">= 1x torch's own reductions"),
    ("stranded by 5 exports of 256 MiB, each read 4 times", "rebuilt", Unit::Bytes, "<= 0 B"),
    ("stranded by 5 exports of 256 MiB that nobody reads", "dropped", Unit::Bytes, "<= 0 B"),
];

/// The case of the rival, to which the first goal refers.
const RIVAL: &str = "torch's own reductions";

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack()?;
    for (what, shape, unit, goal) in SHAPES {
        let mut ours = programs.start(TORCH_MULTIPROCESSING, &[&shape, &broker.socket()])?;
        let mut torch = programs.start_rival(bench, TORCH_MULTIPROCESSING, &[&shape]);
        let plan = bench.plan(3).warm_up(0).block(1);
        let comparison = Comparison::new(Case::new(what, unit), ours.sampler(1));
        let comparison = match torch.as_mut() {
            Some(torch) => comparison.rival(Case::new(RIVAL, unit), torch.sampler(1)).goal(goal.parse()?),
            None => comparison,
        };
        bench.run(comparison, plan)?;
    }
    Ok(())
}
