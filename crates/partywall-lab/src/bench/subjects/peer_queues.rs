//! Tasks from Python to Python workers: beside `multiprocessing.Pool`, beside lists in Redis, and beside Partywall from
//! Rust, with the same tasks.

use std::time::Instant;

use partywall::{Place, Queue, Task};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use super::queues;
use crate::{
    bench::{
        Bench,
        python::{Programs, TASK_QUEUE},
    },
    broker::Broker,
    peer::Peer,
    prelude::TIMEOUT,
};

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for workers in [1, 2, 4, 8] {
        let count = workers.to_string();
        let mut ours = programs.start(TASK_QUEUE, &[&"ours", &count, &broker.socket()])?;
        let rust = Rust::start(bench, broker, workers)?;
        for (system, name) in [("pool", "multiprocessing.Pool"), ("redis", "Redis lists")] {
            let Some(mut rival) = programs.start_rival(bench, TASK_QUEUE, &[&system, &count]) else { continue };
            let plan = bench.plan(SAMPLES).warm_up(2).block(2);
            let case = |what| Case::new(what, Unit::Microseconds).parameter("workers", workers);
            let comparison = Comparison::new(case("a task and its result, in Python"), ours.sampler(plan.block))
                .rival(case("a task and its result, in Rust"), rust.sampler())
                .rival(case(name), rival.sampler(plan.block));
            bench.run(comparison, plan)?;
        }
    }
    Ok(())
}

/// The same tasks as in `task_queue.py`, from this process to worker processes in Rust.
struct Rust {
    queue: Queue,
    _workers: Vec<Peer>,
}

impl Rust {
    fn start(bench: &Bench<'_>, broker: &Broker, workers: usize) -> Result<Self, Failure> {
        let name = format!("roots.{workers}");
        let options = broker.connect()?.queue(&name).tasks(2 * TASKS).outputs(2 * TASKS, size_of::<f64>() as u64);
        let queue = options.place(Place::Host).create()?;
        Ok(Self { queue, _workers: queues::start_workers(bench, broker, &name, workers)? })
    }

    fn sampler(&self) -> Sampler<'_> {
        let roots = (0..TASKS).map(|number| f64::from(number).sqrt()).sum::<f64>();
        Box::new(move || {
            let start = Instant::now();
            let submit = |number: u32| {
                let task = Task::new("sqrt").arguments(&f64::from(number).to_ne_bytes());
                let submitted = self.queue.submit(task.output(size_of::<f64>() as u64), TIMEOUT);
                submitted.map_err(|refused| refused.error)
            };
            let tickets = (0..TASKS).map(submit).collect::<Result<Vec<_>, _>>()?;
            let mut total = 0.0;
            for ticket in &tickets {
                let result = ticket.wait(TIMEOUT)?;
                let output = result.output().ok_or("a result has no output")?;
                total += output.as_slice::<f64>()?[0];
            }
            let elapsed = start.elapsed();
            if (total - roots).abs() > 1e-6 {
                return Err(format!("the roots sum up to {total} instead of {roots}").into());
            }
            Ok(elapsed.as_secs_f64() * 1e6 / f64::from(TASKS))
        })
    }
}

/// The tasks of a sample, as in `task_queue.py`.
const TASKS: u32 = 1_000;

/// Rounds of [`TASKS`].
const SAMPLES: usize = 20;
