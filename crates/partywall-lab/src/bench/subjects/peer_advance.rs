//! A model of torch of 8 billion parameters that gets another version, in place or by swapping its tensors: how long
//! the stream of the worker stands still, which has work meanwhile, and how long the call takes without such work.

use std::time::Duration;

use partywall::Drain;
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use crate::{
    bench::{
        Bench, clocked, milliseconds,
        python::{OURS, Programs},
        size,
    },
    broker::Broker,
};

const NAME: &str = "advance";

/// The tensors of the model, and of a quick run's, of 32 MiB each.
const TENSORS: u64 = 500;
const FEW: u64 = 20;
const TENSOR: u64 = 32 << 20;

const SAMPLES: usize = 50;

/// What is measured without a goal, and the requests for it.
const OTHERS: [(&str, &str); 2] =
    [("pause of a stream, tensors swapped", "swapped"), ("whole call in place, without work", "call")];

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let tensors = if bench.quick { FEW } else { TENSORS };
    let case = |what: &str| {
        Case::new(what, Unit::Milliseconds).parameter("size", size(tensors * TENSOR)).parameter("tensors", tensors)
    };
    let programs = Programs::unpack(broker)?;
    let mut python = programs.start(OURS, &[&"advance", &broker.socket(), &tensors.to_string()])?;
    let mut weights = domain.opener(NAME).open()?;
    let rust: Sampler<'_> = Box::new(|| {
        let other = if weights.version() == 1 { 2 } else { 1 };
        let next = weights.newer(Some(other), Duration::ZERO)?.ok_or("the segment has this version already")?;
        Ok(milliseconds(clocked(|| weights.advance(next, Drain::All(&[])))?.0))
    });
    let plan = bench.plan(SAMPLES).warm_up(1).block(1);
    let comparison = Comparison::new(case("pause of a stream, advance in place"), python.sampler_of("in-place", 1))
        .floor(case("advance from Rust, of a version that is open"), rust);
    bench.run(comparison, plan)?;
    for (what, request) in OTHERS {
        let plan = bench.plan(SAMPLES).warm_up(1).block(1);
        bench.run(Comparison::new(case(what), python.sampler_of(request, 1)), plan)?;
    }
    Ok(())
}
