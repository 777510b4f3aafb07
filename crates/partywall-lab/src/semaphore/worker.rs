//! A worker: acquires a permit, works while it holds the permit, and releases it. On a GPU the work is a kernel.

use partywall::cuda::experiment::Delay;

use super::*;
use crate::device::Working;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let device = session.gpu_if_any()?.map(|gpu| Working::new(&gpu, Delay::load)).transpose()?;
    let worker = Worker { semaphore: session.domain().semaphore(SEMAPHORE, PERMITS)?, device };
    session.parent().say(())?;
    while let Some(command) = session.parent().next()? {
        match command {
            Command::Turns(count, reports) => {
                let turns = (0..count).map_while(|_| worker.turn().transpose()).collect::<Result<Vec<_>, _>>()?;
                if reports {
                    session.report(describe(&turns))?;
                }
                session.parent().say(turns)?;
            }
            Command::Keep => {
                let permit = worker.semaphore.acquire(TIMEOUT)?;
                session.parent().say(())?;
                // The watcher kills this process.
                thread::sleep(TIMEOUT);
                drop(permit);
            }
            Command::OnStream => {
                let Some(device) = &worker.device else {
                    return Err(unexpected("a worker without a GPU has no stream"));
                };
                broker::prepare(session.domain(), &device.stream);
                let permit = worker.semaphore.acquire(TIMEOUT)?;
                device.kernels.enqueue(device.stream.as_ref(), SLOW).doing("launching a kernel")?;
                let before = Moment::now();
                permit.release_on(device.stream.as_ref()).map_err(|refused| refused.error)?;
                session.parent().say(Handed { before, after: Moment::now() })?;
                device.stream.synchronize().doing("running a kernel")?;
                session.parent().say(())?;
            }
        }
    }
    Ok(())
}

struct Worker {
    semaphore: Semaphore,
    /// `None` in host memory.
    device: Option<Working<Delay>>,
}

impl Worker {
    /// Works while it holds a permit. Returns `None` if no permit came in time.
    fn turn(&self) -> Result<Option<Turn>, Failure> {
        let asked = Moment::now();
        let permit = match self.semaphore.acquire(TIMEOUT) {
            Err(Error::Timeout { .. }) => return Ok(None),
            permit => permit?,
        };
        let got = Moment::now();
        self.work()?;
        let gave = Moment::now();
        permit.release()?;
        Ok(Some(Turn { asked, got, gave }))
    }

    fn work(&self) -> Result<(), Failure> {
        let Some(device) = &self.device else {
            thread::sleep(WORK);
            return Ok(());
        };
        device.kernels.enqueue(device.stream.as_ref(), WORK).doing("launching a kernel")?;
        device.stream.synchronize().doing("running a kernel")
    }
}

fn describe(turns: &[Turn]) -> Step {
    let waited: Vec<_> = turns.iter().map(|turn| turn.got.since(turn.asked)).collect();
    let had: Vec<_> = turns.iter().map(|turn| turn.gave.since(turn.got)).collect();
    Step::new(
        "turns",
        "The turns of one worker, while all workers work",
        "acquire takes a free permit by one compare-and-swap in shared memory, without the broker. If none is free, \
         the worker sleeps in a queue until one is handed to it.",
    )
    .value("turns", turns.len().to_string())
    .value("waited for a permit", spread(&waited))
    .value("held it, at work", spread(&had))
    .judge(turns.len() == TURNS, "it got every turn", "it did not get every turn")
}
