//! Allocations of torch in a pool of Partywall, beside torch's own caching allocator: of memory that torch has cached,
//! and of memory that comes from the driver.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        python::{Programs, TORCH_ALLOCATION},
    },
    broker::Broker,
};

/// The requests, their units, and how many samples of each are taken.
const REQUESTS: [(&str, Unit, usize); 2] = [("cached", Unit::Microseconds, 100), ("fresh", Unit::Milliseconds, 20)];

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    let mut ours = programs.start(TORCH_ALLOCATION, &[&"pool", &broker.socket()])?;
    let mut theirs = programs.start(TORCH_ALLOCATION, &[&"torch"])?;
    for (request, unit, samples) in REQUESTS {
        let case = |by: &str| Case::new(by, unit).parameter("memory", request);
        let comparison = Comparison::new(case("torch_pool"), ours.sampler_of(request, 1))
            .rival(case("torch"), theirs.sampler_of(request, 1));
        let plan = bench.plan(samples).warm_up(1).block(1);
        bench.run(comparison, plan)?;
    }
    Ok(())
}
