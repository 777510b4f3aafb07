//! The taker: accepts blocks, tries what must fail, kills a holder, and reports which beliefs are refuted.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let pool = session.domain().pool(POOL).blocks(BLOCKS).block_bytes(BLOCK_BYTES).place(session.place).create()?;
    let holder = session.partner();
    let mut taker = Taker { session, pool, holder };
    for experiment in
        [Taker::alloc, Taker::hand_over, Taker::take_twice, Taker::stale, Taker::exhausted, Taker::killed, Taker::whole]
    {
        session.report(experiment(&mut taker)?)?;
    }
    taker.holder.end();
    Ok(())
}

struct Taker<'a> {
    session: &'a Session,
    pool: Pool,
    /// The other process, which may run in its own terminal, and is not killed.
    holder: Peer,
}

impl Taker<'_> {
    fn alloc(&mut self) -> Result<Step, Failure> {
        let block = self.pool.alloc(TIMEOUT)?;
        let before = (block.index(), block.generation());
        block.release()?;
        let start = Instant::now();
        for _ in 0..PAIRS {
            self.pool.alloc(TIMEOUT)?.release()?;
        }
        let pair = start.elapsed() / PAIRS;
        let start = Instant::now();
        for _ in 0..QUESTIONS {
            self.pool.domain().ping()?;
        }
        let question = start.elapsed() / QUESTIONS;
        let block = self.pool.alloc(TIMEOUT)?;
        let after = (block.index(), block.generation());
        let shown = |(index, generation)| format!("block {index}, generation {generation}");
        Ok(Step::new(
            "alloc",
            format!("A pool of {BLOCKS} blocks, with one block taken and released repeatedly"),
            "All blocks are in one segment, which each process maps once. Taking a block is one compare-and-swap on a \
             shared word, without the driver or the broker. The word contains a counter: a block never has the same \
             generation twice.",
        )
        .value("taken first", shown(before))
        .value(format!("taken after {PAIRS} more"), shown(after))
        .value("taken and released in", format!("{} ns", pair.as_nanos()))
        .value("a ping of the broker takes", format!("{} ns", question.as_nanos()))
        .says(ASKS, pair > question)
        .judge(
            before != after,
            "a block that is taken again has another generation",
            "a generation was repeated",
        ))
    }

    fn hand_over(&mut self) -> Result<Step, Failure> {
        let (text, reference) = self.offer()?;
        let mut block = self.pool.accept(&reference)?;
        let found = first_byte(&block, self.pool.place())?;
        // The block belongs to this process now, which may write to it.
        fill(&mut block, self.pool.place(), OTHER_MARK)?;
        let right = found == MARK;
        Ok(Step::new(
            "hand-over",
            "A block that another process has written",
            "The holder offers the block to any process that knows its reference, and sends the reference: here as \
             text over a socket. The bytes stay where they are; only the word that names the owner changes.",
        )
        .value("reference", text)
        .value("first byte, written there", format!("{MARK:#04x}"))
        .value("first byte, read here", format!("{found:#04x}"))
        .says(COPIED, !right)
        .judge(right, "the bytes of the other process, in place", "not the bytes that were written"))
    }

    fn take_twice(&mut self) -> Result<Step, Failure> {
        let (_, reference) = self.offer()?;
        let block = self.pool.accept(&reference)?;
        let second = self.pool.accept(&reference);
        let step = Step::new(
            "take-twice",
            "A reference that is used twice",
            "Accepting a block is one compare-and-swap from `offered` to `held`, with the generation in the same word. \
             If two processes try, one fails.",
        )
        .value("first", format!("block {}", block.index()))
        .value("second", answer(&second));
        Ok(refusal(step, &second, |step, refused| step.says(TWICE, !refused)))
    }

    fn stale(&mut self) -> Result<Step, Failure> {
        let (_, reference) = self.offer()?;
        self.pool.accept(&reference)?.release()?;
        let free = self.pool.accept(&reference);
        self.holder.ask::<()>(Command::TakeAll(OTHER_MARK))?;
        let others = self.pool.accept(&reference);
        let step = Step::new(
            "stale",
            "A reference to a block that another process has taken since",
            "A reference is the number of the block and a generation. The block has a newer generation now, so an old \
             reference is an error and never gives access to other data.",
        )
        .value("after its release", answer(&free))
        .value("after another process took it", answer(&others));
        Ok(refusal(step, &others, |step, refused| step.says(STALE, !refused)))
    }

    fn exhausted(&mut self) -> Result<Step, Failure> {
        let at_once = self.pool.try_alloc()?;
        let limited = self.pool.alloc(MOMENT);
        self.holder.ask::<()>(Command::GiveOneBack)?;
        let start = Instant::now();
        let waited = self.pool.alloc(TIMEOUT).map(|block| (block.index(), start.elapsed()));
        let right = at_once.is_none() && matches!(limited, Err(Error::Timeout { .. })) && waited.is_ok();
        Ok(Step::new(
            "exhausted",
            "All blocks are taken",
            "A process that finds no free block takes a place in a queue, and sleeps until a block is handed to it. \
             Every wait has a limit.",
        )
        .value("without waiting", if at_once.is_none() { "none" } else { "a block" })
        .value(format!("waited {} ms", MOMENT.as_millis()), limited.map_or_else(name, |_| "a block".into()))
        .value(
            "waited until one was released",
            waited.map_or_else(name, |(index, time): (u32, Duration)| format!("block {index} after {}", millis(time))),
        )
        .judge(
            right,
            "an error or a wait, as asked",
            "a block came although none was free, or none came although one was free",
        ))
    }

    fn killed(&mut self) -> Result<Step, Failure> {
        self.holder.ask::<()>(Command::GiveAllBack)?;
        let mut victim = self.session.spawn("holder")?;
        victim.ask::<()>(Command::TakeAll(MARK))?;
        let held = BLOCKS - self.pool.stats().free;
        victim.kill();
        let start = Instant::now();
        let block = self.pool.alloc(TIMEOUT);
        let time = start.elapsed();
        let came = block.is_ok();
        drop(block);
        Ok(Step::new(
            "killed",
            "Another holder is killed with all blocks",
            "The broker waits until the process is proved dead, with a settle time of 100 ms, and hands its blocks to \
             waiting processes. On a GPU under MPS the blocks stay in quarantine until an operator frees them, because \
             the dead process's work may still write.",
        )
        .value("killed", format!("process {}, with {held} of {BLOCKS} blocks", victim.pid))
        .value("time until one of them is available", if came { millis(time) } else { "never".into() })
        .says(LOST, !came)
        .judge(came && held == BLOCKS, "they are returned", "they are not returned"))
    }

    fn whole(&mut self) -> Result<Step, Failure> {
        // The last blocks of the dead process may be returned a moment after the first.
        until(TIMEOUT, Duration::from_millis(1), || Ok(self.pool.stats().free == BLOCKS))?;
        let free = self.pool.stats().free;
        Ok(Step::new("whole", "What is left", "Each block is free, or belongs to a live process.")
            .value("free blocks", format!("{free}, of {BLOCKS}"))
            .judge(free == BLOCKS, "nothing was lost", "something was lost"))
    }

    /// Asks the holder to offer a block.
    fn offer(&mut self) -> Result<(String, BlockRef), Failure> {
        let reference: String = self.holder.ask(Command::Offer(MARK))?;
        let parsed = reference.parse().map_err(|_| unexpected("the holder sent an invalid reference"))?;
        Ok((reference, parsed))
    }
}

/// Ends a step about a reference that must be refused as stale.
fn refusal(step: Step, answer: &Result<Block, Error>, says: impl FnOnce(Step, bool) -> Step) -> Step {
    let refused = matches!(answer, Err(Error::Gone(Gone::Block { .. })));
    says(step, refused).judge(refused, "refused, as expected", "not refused as stale")
}

fn answer(result: &Result<Block, Error>) -> String {
    match result {
        Ok(block) => format!("block {}", block.index()),
        Err(error) => error.to_string(),
    }
}

fn name(error: Error) -> String {
    error.to_string()
}
