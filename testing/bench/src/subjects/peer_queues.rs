//! Tasks from Python to Python workers: beside `multiprocessing.Pool` and beside lists in Redis, with the same tasks.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::Bench,
    broker::Broker,
    python::{Programs, TASK_QUEUE},
};

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack()?;
    for workers in ["1", "2", "4", "8"] {
        let mut ours = programs.start(TASK_QUEUE, &[&"ours", &workers, &broker.socket()])?;
        for (system, name) in [("pool", "multiprocessing.Pool"), ("redis", "Redis lists")] {
            let Some(mut rival) = programs.start_rival(bench, TASK_QUEUE, &[&system, &workers]) else { continue };
            let plan = bench.plan(SAMPLES).warm_up(2).block(2);
            let case = |what| Case::new(what, Unit::Microseconds).parameter("workers", workers);
            let comparison = Comparison::new(case("a task and its result, in Python"), ours.sampler(plan.block))
                .rival(case(name), rival.sampler(plan.block))
                .goal(format!("<= 0.1x {name}").parse()?);
            bench.run(comparison, plan)?;
        }
    }
    Ok(())
}

/// Rounds of 1,000 tasks.
const SAMPLES: usize = 20;
