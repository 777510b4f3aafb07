//! A worker: asks for a permit, lets a kernel run while it has it, and gives it back.

use std::{thread, time::Duration};

use partywall::{
    Error, Semaphore,
    cuda::{Stream, experiment::Delay},
};

use super::{Handed, Hello, LAB, Meet, PERMITS, Ready, SEMAPHORE, SLOW, TIMEOUT, TITLE, TURNS, Turn, WORK, Wish};
use crate::{
    Context, Options, broker,
    clock::{Moment, spread},
    device::{self, failed},
    failure::Failure,
    peer::Peer,
    step::Step,
    teller::Teller,
};

/// Plays the role.
pub(super) fn run(context: &Context, options: &Options, teller: &mut Teller) -> Result<(), Failure> {
    if options.on_standard_input {
        let mut peer = Peer::on_standard_input("watcher")?;
        return play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure));
    }
    let gpu = device::open(options.device())?;
    teller.header(TITLE, &gpu).map_err(failed("asking about the GPU"))?;
    let mut peer = Peer::meet(context, LAB, "watcher", teller)?;
    play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure))?;
    teller.remark("The watcher has seen enough, and says which beliefs held.");
    Ok(())
}

fn play(options: &Options, peer: &mut Peer, teller: &mut Teller) -> Result<(), Failure> {
    let gpu = device::open(options.device())?;
    peer.say(Hello { pid: std::process::id(), uuid: gpu.uuid().to_string() }, &[])?;
    let Meet { socket, first } = peer.hear(teller)?;
    let domain = broker::connect(&socket)?;
    let worker = Worker {
        semaphore: domain.semaphore(SEMAPHORE, PERMITS)?,
        stream: Stream::new(gpu.context()).map_err(failed("making a stream"))?,
        delay: Delay::load(gpu.context()).map_err(failed("loading kernels"))?,
    };
    peer.say(Ready, &[])?;
    loop {
        match peer.hear(teller)? {
            Wish::End => return Ok(()),
            Wish::Turns(count) => {
                let turns = (0..count).map_while(|_| worker.turn().transpose()).collect::<Result<Vec<_>, _>>()?;
                if first && count > 1 {
                    peer.tell(teller, describe(&turns))?;
                }
                peer.say(turns, &[])?;
            }
            Wish::Keep => {
                let permit = worker.semaphore.acquire(TIMEOUT)?;
                peer.say(Ready, &[])?;
                // Whoever asked for this kills this process.
                thread::sleep(TIMEOUT);
                drop(permit);
            }
            Wish::OnStream => {
                broker::make_ready(&domain, &worker.stream);
                let permit = worker.semaphore.acquire(TIMEOUT)?;
                worker.work(SLOW)?;
                let before = Moment::now();
                permit.release_on(worker.stream.as_ref()).map_err(|refused| refused.error)?;
                peer.say(Handed { before, after: Moment::now() }, &[])?;
                worker.stream.synchronize().map_err(failed("running a kernel"))?;
                peer.say(Ready, &[])?;
            }
        }
    }
}

struct Worker {
    semaphore: Semaphore,
    stream: Stream,
    delay: Delay,
}

impl Worker {
    /// Uses the GPU while it has a permit, if one comes.
    fn turn(&self) -> Result<Option<Turn>, Failure> {
        let asked = Moment::now();
        let permit = match self.semaphore.acquire(TIMEOUT) {
            Err(Error::Timeout { .. }) => return Ok(None),
            permit => permit?,
        };
        let got = Moment::now();
        self.work(WORK)?;
        self.stream.synchronize().map_err(failed("running a kernel"))?;
        let gave = Moment::now();
        permit.release()?;
        Ok(Some(Turn { asked, got, gave }))
    }

    fn work(&self, time: Duration) -> Result<(), Failure> {
        self.delay.enqueue(self.stream.as_ref(), time).map_err(failed("launching a kernel"))
    }
}

fn describe(turns: &[Turn]) -> Step {
    let waited: Vec<_> = turns.iter().map(|turn| turn.got.since(turn.asked)).collect();
    let had: Vec<_> = turns.iter().map(|turn| turn.gave.since(turn.got)).collect();
    Step::new(
        "turns",
        "The turns of one worker, while all of them work",
        "acquire takes a free permit by one compare-and-swap in memory that all share; no broker is asked. If none is \
         free, the worker sleeps in a queue until one is handed to it.",
    )
    .value("turns", turns.len().to_string())
    .value("waited for a permit", spread(&waited))
    .value("had it, with a kernel on the GPU", spread(&had))
    .judge(turns.len() == TURNS, "each turn came", "a turn did not come")
}
