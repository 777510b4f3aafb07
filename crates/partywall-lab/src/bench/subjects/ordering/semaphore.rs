//! Permits: taken and given back by one process alone, and by several that compete for them.

use std::{
    cell::{Cell, RefCell},
    os::fd::AsFd,
    sync::atomic::Ordering,
};

use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};
use serde::{Deserialize, Serialize};

use crate::{
    bench::{
        Bench,
        board::{Board, now, yield_until},
        peer,
        posix::{FutexMutex, PosixSemaphore},
        samplers,
    },
    broker::Broker,
    lab::Session,
    peer::Peer,
    prelude::TIMEOUT,
};

pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    alone(bench, broker)?;
    for (workers, permits) in [(2, 1), (4, 1), (4, 2)] {
        contended(bench, broker, workers, permits)?;
    }
    Ok(())
}

/// Counts operations, each of which takes or gives back a permit, and checks that no permit is lost. Sometimes a holder
/// yields the processor, so that other processes have to wait for its permit even on few processors.
pub(crate) fn count(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    const WORKERS: usize = 4;
    const PERMITS: u32 = 2;
    const PAIRS: usize = 50_000;
    let crowd = Crowd::start(bench, broker, WORKERS, PERMITS)?;
    let plan = Plan::new(bench.fewer(100)).warm_up(0).block(1);
    let operations = 2 * PAIRS * plan.samples;
    let case = case("take and give back, counted", WORKERS, PERMITS).parameter("operations", operations);
    bench.run(Comparison::new(case, crowd.sampler(Way::Crowded, PAIRS)), plan)?;
    crowd.check(broker)?;
    bench.note(format!(
        "ordering_count: {operations} operations by {WORKERS} processes: no permit was lost, and never were more than \
         {PERMITS} taken at once; {}",
        crowd.waited()
    ));
    Ok(())
}

fn alone(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let semaphore = broker.connect()?.semaphore("alone", 1)?;
    let (board, _fd) = Board::create()?;
    let mutex = FutexMutex(board.futex(MUTEX));
    let posix = PosixSemaphore::create(&board, POSIX, 1)?;
    let ours = pairs(|| {
        drop(semaphore.acquire(TIMEOUT)?);
        Ok(())
    });
    let raw = pairs(|| {
        mutex.lock();
        mutex.unlock();
        Ok(())
    });
    let theirs = pairs(|| {
        posix.wait()?;
        posix.post()
    });
    let case = |what| Case::new(what, Unit::Nanoseconds);
    let comparison = Comparison::new(case("take a permit and give it back, alone"), ours)
        .rival(case("futex mutex"), raw)
        .rival(case("POSIX semaphore"), theirs);
    let plan = bench.plan(2_000);
    bench.run(comparison, plan)
}

/// Returns nanoseconds of one pair of calls, in the mean of a thousand.
pub(crate) fn pairs<'a>(pair: impl FnMut() -> Result<(), Failure> + 'a) -> Sampler<'a> {
    samplers::pairs(Unit::Nanoseconds, 1_000, pair)
}

fn contended(bench: &Bench<'_>, broker: &Broker, workers: usize, permits: u32) -> Result<(), Failure> {
    let crowd = Crowd::start(bench, broker, workers, permits)?;
    let pairs = bench.fewer(100_000);
    let case = |what| case(what, workers, permits);
    let mut comparison = Comparison::new(case("take and give back, contended"), crowd.sampler(Way::Semaphore, pairs))
        .rival(case("POSIX semaphore"), crowd.sampler(Way::Posix, pairs));
    if permits == 1 {
        comparison = comparison.rival(case("futex mutex"), crowd.sampler(Way::Mutex, pairs));
    }
    bench.run(comparison, Plan::new(10).warm_up(1).block(1))?;
    crowd.check(broker)?;
    let waited = crowd.waited();
    bench.note(format!("ordering_permits: {workers} processes and {permits} permits: {waited}"));
    Ok(())
}

fn case(what: &str, workers: usize, permits: u32) -> Case {
    Case::new(what, Unit::PerSecond).parameter("processes", workers).parameter("permits", permits)
}

/// What workers take and give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    Semaphore,
    /// A permit of ours, and sometimes a holder yields the processor.
    Crowded,
    Posix,
    Mutex,
}

/// Processes that compete for the same permits. Dropping this ends them.
struct Crowd {
    workers: RefCell<Vec<Peer>>,
    permits: u32,
    board: Board,
    /// The number of permits of ours that were taken, and of those that a process had to wait for.
    taken: Cell<(usize, usize)>,
}

impl Crowd {
    fn start(bench: &Bench<'_>, broker: &Broker, workers: usize, permits: u32) -> Result<Self, Failure> {
        let (board, fd) = Board::create()?;
        PosixSemaphore::create(&board, POSIX, permits)?;
        let start = |_| {
            let mut worker = bench.start(broker, peer::WORKER)?;
            worker.say_with((workers as u64, permits), &[fd.as_fd()])?;
            worker.hear::<()>()?;
            Ok(worker)
        };
        let workers = (0..workers).map(start).collect::<Result<_, Failure>>()?;
        Ok(Self { workers: RefCell::new(workers), permits, board, taken: Cell::default() })
    }

    /// Returns a sampler of the pairs of operations per second of all workers together.
    fn sampler(&self, way: Way, pairs: usize) -> Sampler<'_> {
        Box::new(move || {
            let mut workers = self.workers.borrow_mut();
            let each = pairs / workers.len();
            self.board.word(ARRIVED).store(0, Ordering::Release);
            for worker in &*workers {
                worker.say((way, each))?;
            }
            let mut from = u64::MAX;
            let mut to = 0;
            for worker in &mut *workers {
                let (start, end, waited): (u64, u64, usize) = worker.hear()?;
                from = from.min(start);
                to = to.max(end);
                if matches!(way, Way::Semaphore | Way::Crowded) {
                    let (all, before) = self.taken.get();
                    self.taken.set((all + each, before + waited));
                }
            }
            Ok((each * workers.len()) as f64 * 1e9 / to.saturating_sub(from) as f64)
        })
    }

    fn waited(&self) -> String {
        let (all, waited) = self.taken.get();
        format!("{waited} of {all} permits were waited for")
    }

    /// Fails unless all permits are free once no process holds one.
    fn check(&self, broker: &Broker) -> Result<(), Failure> {
        let semaphore = broker.connect()?.semaphore(&name(self.permits), self.permits)?;
        match semaphore.available() {
            there if there == self.permits => Ok(()),
            there => {
                Err(format!("only {there} of {} permits are free, although no process holds one", self.permits).into())
            }
        }
    }
}

fn name(permits: u32) -> String {
    format!("permits.{permits}")
}

/// Word of the board: the futex mutex.
const MUTEX: usize = 1;
const POSIX: usize = 2;
/// How many workers are ready to begin.
const ARRIVED: usize = 3;
/// How many have a permit now.
const INSIDE: usize = 4;

/// The role of a worker: follows orders until it has to end.
pub(crate) fn work(session: &mut Session) -> Result<(), Failure> {
    let (workers, permits): (u64, u32) = session.parent().hear()?;
    let board = Board::open(&session.parent().take_fd()?)?;
    let semaphore = session.domain().semaphore(&name(permits), permits)?;
    let mutex = FutexMutex(board.futex(MUTEX));
    let posix = PosixSemaphore::open(&board, POSIX);
    session.parent().say(())?;
    while let Some((way, pairs)) = session.parent().next::<(Way, usize)>()? {
        board.word(ARRIVED).fetch_add(1, Ordering::AcqRel);
        yield_until(board.word(ARRIVED), workers)?;
        let start = now();
        let mut waited: usize = 0;
        for pair in 0..pairs {
            match way {
                Way::Semaphore | Way::Crowded => {
                    let permit = match semaphore.try_acquire()? {
                        Some(permit) => permit,
                        None => {
                            waited += 1;
                            semaphore.acquire(TIMEOUT)?
                        }
                    };
                    be_inside(&board, permits, way == Way::Crowded && pair % 16 == 0)?;
                    permit.release()?;
                }
                Way::Posix => {
                    posix.wait()?;
                    be_inside(&board, permits, false)?;
                    posix.post()?;
                }
                Way::Mutex => {
                    mutex.lock();
                    be_inside(&board, 1, false)?;
                    mutex.unlock();
                }
            }
        }
        session.parent().say((start, now(), waited))?;
    }
    Ok(())
}

/// Checks, with a permit, that there are no more holders than permits.
fn be_inside(board: &Board, permits: u32, slow: bool) -> Result<(), Failure> {
    let inside = board.word(INSIDE).fetch_add(1, Ordering::AcqRel) + 1;
    if slow {
        std::thread::yield_now();
    }
    board.word(INSIDE).fetch_sub(1, Ordering::AcqRel);
    if inside > permits.into() {
        return Err(format!("{inside} processes had a permit at once, of {permits} permits").into());
    }
    Ok(())
}
