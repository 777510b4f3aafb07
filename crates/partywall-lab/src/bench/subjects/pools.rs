//! Blocks of a pool, taken and given back by two processes that share it.

use std::{cell::RefCell, os::fd::AsFd, sync::atomic::Ordering};

use partywall::{Place, Pool};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};

use crate::{
    bench::{
        Bench,
        board::{Board, now, yield_until},
        peer,
    },
    broker::Broker,
    lab::Session,
    prelude::TIMEOUT,
};

/// Bytes of a block.
const BYTES: u64 = 4096;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    for blocks in [1, 64] {
        contended(bench, broker, blocks)?;
    }
    Ok(())
}

fn create(broker: &Broker, name: &str, place: Place, blocks: u32, bytes: u64) -> Result<Pool, Failure> {
    Ok(broker.connect()?.pool(name).place(place).blocks(blocks).block_bytes(bytes).create()?)
}

fn case(what: &str, unit: Unit, blocks: u32) -> Case {
    Case::new(what, unit).parameter("blocks", blocks)
}

/// Measures pairs of operations per second, of two processes together.
fn contended(bench: &Bench<'_>, broker: &Broker, blocks: u32) -> Result<(), Failure> {
    const WORKERS: usize = 2;
    let pool = create(broker, CONTENDED, Place::Host, blocks, BYTES)?;
    let (board, fd) = Board::create()?;
    let start = |_| {
        let mut worker = bench.start(broker, peer::ALLOCATOR)?;
        worker.say_with(WORKERS as u64, &[fd.as_fd()])?;
        worker.hear::<()>()?;
        Ok(worker)
    };
    let workers = RefCell::new((0..WORKERS).map(start).collect::<Result<Vec<_>, Failure>>()?);
    let each = bench.fewer(200_000);
    let sampler: Sampler<'_> = Box::new(|| {
        let mut workers = workers.borrow_mut();
        board.word(ARRIVED).store(0, Ordering::Release);
        for worker in &*workers {
            worker.say(each)?;
        }
        let mut from = u64::MAX;
        let mut to = 0_u64;
        for worker in &mut *workers {
            let (start, end): (u64, u64) = worker.hear()?;
            from = from.min(start);
            to = to.max(end);
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

/// The role of a process that takes blocks and gives them back: follows orders until it has to end.
pub(crate) fn allocate(session: &mut Session) -> Result<(), Failure> {
    let workers: u64 = session.parent().hear()?;
    let board = Board::open(&session.parent().take_fd()?)?;
    let pool = session.domain().pool(CONTENDED).open()?;
    session.parent().say(())?;
    while let Some(pairs) = session.parent().next::<usize>()? {
        board.word(ARRIVED).fetch_add(1, Ordering::AcqRel);
        yield_until(board.word(ARRIVED), workers)?;
        let start = now();
        for _ in 0..pairs {
            pool.alloc(TIMEOUT)?.release()?;
        }
        session.parent().say((start, now()))?;
    }
    Ok(())
}
