//! Blocks of a pool: taken and given back by one process alone, and by two that share a pool.

use std::{cell::RefCell, path::Path, sync::atomic::Ordering};

use partywall::{Place, Pool};
use partywall_lab::bench::samplers::{allocation, allocation_in_order, block, touched};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};

use super::{gpu_open, ordering::semaphore::pairs};
use crate::{
    bench::{Bench, size},
    board::{Board, now, yield_until},
    broker::{Broker, connect},
    process::{Line, Process, TIMEOUT},
    role,
};

/// The goal for taking a block and giving it back.
const GOAL: &str = "<= 150 ns";

/// Bytes of a block, for cases that do not depend on its size.
const BYTES: u64 = 4096;

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    for blocks in [1, 64, 4096] {
        let pool = create(broker, &format!("alone.{blocks}"), Place::Host, blocks, BYTES)?;
        let comparison = Comparison::new(case("alloc and free", Unit::Nanoseconds, blocks), pairs(|| block(&pool)))
            .rival(
                case("POSIX malloc and free of as much, touched", Unit::Nanoseconds, blocks),
                pairs(|| touched(BYTES)),
            )
            .goal(GOAL.parse()?);
        let plan = bench.plan(2_000);
        bench.run(comparison, plan)?;
    }
    for blocks in [1, 64] {
        contended(bench, broker, blocks)?;
    }
    Ok(())
}

/// Measures blocks of 4 MiB, against the driver's memory of the same size.
pub(super) fn on_gpu(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    const BYTES: u64 = 4 << 20;
    let place = Place::Gpu(gpu_open::first()?);
    let pool = create(broker, "on-gpu", place, 64, BYTES)?;
    let gpu = pool.gpu().ok_or("a pool on a GPU without one")?;
    gpu.context().make_current()?;
    let case = |what| case(what, Unit::Nanoseconds, 64).parameter("size", size(BYTES));
    let driver = pairs(|| allocation(gpu, BYTES));
    let ordered = pairs(|| allocation_in_order(gpu, BYTES));
    let comparison = Comparison::new(case("alloc and free"), pairs(|| block(&pool)))
        .rival(case("cuMemAllocAsync and cuMemFreeAsync"), ordered)
        .rival(case("cuMemAlloc and cuMemFree"), driver)
        .goal(GOAL.parse()?);
    let plan = bench.plan(200);
    bench.run(comparison, plan)
}

fn create(broker: &Broker, name: &str, place: Place, blocks: u32, bytes: u64) -> Result<Pool, Failure> {
    Ok(broker.connect()?.pool(name).place(place).blocks(blocks).block_bytes(bytes).create()?)
}

fn case(what: &str, unit: Unit, blocks: u32) -> Case {
    Case::new(what, unit).parameter("blocks", blocks)
}

/// Measures pairs of operations per second, of two processes together.
fn contended(bench: &mut Bench, broker: &Broker, blocks: u32) -> Result<(), Failure> {
    const WORKERS: usize = 2;
    let pool = create(broker, CONTENDED, Place::Host, blocks, BYTES)?;
    let (board, fd) = Board::create()?;
    let start = |_| {
        let mut command = role::command(role::ALLOCATOR, [broker.socket()])?;
        let mut worker = Process::start(command.arg(WORKERS.to_string()))?;
        worker.send_with("board", &fd)?;
        worker.receive()?;
        Ok(worker)
    };
    let workers = RefCell::new((0..WORKERS).map(start).collect::<Result<Vec<_>, Failure>>()?);
    let each = bench.fewer(200_000);
    let sampler: Sampler<'_> = Box::new(|| {
        let mut workers = workers.borrow_mut();
        board.word(ARRIVED).store(0, Ordering::Release);
        for worker in &*workers {
            worker.send(each)?;
        }
        let mut from = u64::MAX;
        let mut to = 0_u64;
        for worker in &mut *workers {
            let answer = worker.receive()?;
            let (start, end) = answer.split_once(' ').ok_or("a worker sent an unexpected answer")?;
            from = from.min(start.parse()?);
            to = to.max(end.parse()?);
        }
        Ok((each * WORKERS) as f64 * 1e9 / to.saturating_sub(from) as f64)
    });
    let case = case("alloc and free, contended", Unit::PerSecond, blocks).parameter("processes", WORKERS);
    bench.run(Comparison::new(case, sampler), Plan::new(20).warm_up(1).block(1))?;
    drop(workers);
    match pool.stats().free {
        free if free == blocks => Ok(pool.domain().remove(CONTENDED).map(drop)?),
        free => Err(format!("only {free} of {blocks} blocks are free, although no process holds one").into()),
    }
}

/// The pool of all contending processes.
const CONTENDED: &str = "contended";

/// Word of the board: how many workers are ready to begin.
const ARRIVED: usize = 1;

/// The role of a process that takes blocks and gives them back: obeys commands until its line ends.
pub(crate) fn allocate(socket: &Path, workers: u64) -> Result<(), Failure> {
    let mut line = Line::of_this_process()?;
    line.receive(Some(TIMEOUT))?;
    let board = Board::open(&line.fd()?)?;
    let pool = connect(socket)?.pool(CONTENDED).open()?;
    line.send("ready")?;
    while let Some(order) = line.receive(None)? {
        let pairs: usize = order.parse()?;
        board.word(ARRIVED).fetch_add(1, Ordering::AcqRel);
        yield_until(board.word(ARRIVED), workers)?;
        let start = now();
        for _ in 0..pairs {
            pool.alloc(TIMEOUT)?.release()?;
        }
        line.send(format_args!("{start} {}", now()))?;
    }
    Ok(())
}
