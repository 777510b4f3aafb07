//! Tasks of a queue: to a sleeping worker, to several workers, and with many other tasks pending.

use std::time::{Duration, Instant};

use partywall::{ClaimedTask, Place, Queue, Task};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};

use super::ordering::{pair::Pair, semaphore::pairs};
use crate::{
    bench::{Bench, peer, placement::Placement},
    broker::Broker,
    lab::Session,
    peer::Peer,
    prelude::TIMEOUT,
};

/// The number of tasks in one sample.
const TASKS: u32 = 1_000;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    wakes(bench, broker)?;
    for workers in [1, 2, 4, 8] {
        cycles(bench, broker, workers)?;
    }
    for pending in [1_000, 100_000] {
        among(bench, broker, pending)?;
    }
    Ok(())
}

fn wakes(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let pair = Pair::start(bench, broker, None, None)?;
    let placement = Placement::TwoProcessors;
    if !pair.place(placement)? {
        bench.note("queues: without wakes: there is one processor for two processes");
        return Ok(());
    }
    let case = |what| placement.of(Case::new(what, Unit::Microseconds));
    let (plan, batch) = Pair::plan(bench, 500);
    let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
    let comparison = Comparison::new(case("submit to claim of a sleeper"), sampler("task-wake"))
        .floor(case("futex to wake of a sleeper"), sampler("wake-raw"));
    bench.run(comparison, plan)
}

/// Measures tasks without blocks, submitted one by one, to worker processes that only complete them.
fn cycles(bench: &Bench<'_>, broker: &Broker, workers: usize) -> Result<(), Failure> {
    let name = format!("cycles.{workers}");
    let queue = broker.connect()?.queue(&name).tasks(TASKS).place(Place::Host).create()?;
    let _workers = start_workers(bench, broker, &name, workers)?;
    let case = Case::new("submit, claim, complete and take, a task", Unit::Nanoseconds).parameter("workers", workers);
    let sampler: Sampler<'_> = Box::new(|| {
        let start = Instant::now();
        let submit = |_| queue.submit(Task::new("count"), TIMEOUT).map_err(|refused| refused.error);
        let tickets = (0..TASKS).map(submit).collect::<Result<Vec<_>, _>>()?;
        for ticket in &tickets {
            ticket.wait(TIMEOUT)?;
        }
        Ok(start.elapsed().as_nanos() as f64 / f64::from(TASKS))
    });
    let plan = Plan::new(bench.fewer(50)).warm_up(2).block(5);
    bench.run(Comparison::new(case, sampler), plan)
}

/// Measures one process that submits, claims, completes and takes tasks while other tasks are pending.
fn among(bench: &Bench<'_>, broker: &Broker, pending: u32) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let create = |name: &str, pending: u32| {
        let queue = domain.queue(&format!("{name}.{pending}")).tasks(pending + 1).place(Place::Host).create()?;
        let tasks = (0..pending).map(|_| Task::new("count"));
        queue.submit_all(tasks, TIMEOUT).map_err(|refused| refused.error)?;
        Ok::<_, Failure>(queue)
    };
    fn sampler(queue: &Queue) -> Sampler<'_> {
        pairs(|| {
            queue.submit(Task::new("count"), TIMEOUT).map_err(|refused| refused.error)?;
            let task = queue.claim(TIMEOUT)?;
            let ticket = queue.ticket(&task.task())?;
            task.complete()?;
            ticket.wait(TIMEOUT)?;
            Ok(())
        })
    }
    let (many, one) = (create("many", pending)?, create("one", 1)?);
    let case = |pending| {
        Case::new("submit, claim, complete and take, in one process", Unit::Nanoseconds).parameter("pending", pending)
    };
    let comparison = Comparison::new(case(pending), sampler(&many)).floor(case(1), sampler(&one));
    let plan = Plan::new(bench.fewer(100)).warm_up(5).block(10);
    bench.run(comparison, plan)
}

/// Starts processes that complete the tasks of a queue, and waits until they are ready.
pub(super) fn start_workers(
    bench: &Bench<'_>,
    broker: &Broker,
    name: &str,
    workers: usize,
) -> Result<Vec<Peer>, Failure> {
    let start = |_| {
        let mut worker = bench.start(broker, peer::TASK_WORKER)?;
        worker.ask::<()>(name)?;
        Ok(worker)
    };
    (0..workers).map(start).collect()
}

/// The role of a worker: completes every task until it has to end.
pub(crate) fn work(session: &mut Session) -> Result<(), Failure> {
    let name: String = session.parent().hear()?;
    let queue = session.domain().queue(&name).open()?;
    session.parent().say(())?;
    std::thread::spawn(move || {
        for task in queue.claims(Duration::MAX) {
            if let Err(error) = task.and_then(complete) {
                eprintln!("a worker ends: {error}");
                return;
            }
        }
    });
    while session.parent().next::<()>()?.is_some() {}
    Ok(())
}

/// Completes a task. If it has an output, that is the square root of its argument.
fn complete(mut task: ClaimedTask) -> partywall::Result<()> {
    if task.output_bytes() > 0 {
        let number = task.arguments().try_into().map_or(f64::NAN, f64::from_ne_bytes);
        task.output_mut()?.as_mut_slice::<f64>()?[0] = number.sqrt();
    }
    task.complete()
}
