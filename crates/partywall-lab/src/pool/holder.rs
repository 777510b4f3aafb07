//! The holder: takes blocks, writes to them, and hands them over.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    // The taker creates the pool; opening waits until it exists.
    let pool = session.domain().pool(POOL).timeout(TIMEOUT).open()?;
    let mut kept = Vec::new();
    let mut reported = false;
    while let Some(command) = session.parent().next()? {
        match command {
            Command::Offer(mark) => {
                let mut block = pool.alloc(TIMEOUT)?;
                fill(&mut block, pool.place(), mark)?;
                let shown = format!("{}, generation {}", block.index(), block.generation());
                let reference = block.offer()?.to_string();
                if !mem::replace(&mut reported, true) {
                    session.report(describe(shown, mark, &reference))?;
                }
                session.parent().say(reference)?;
            }
            Command::TakeAll(mark) => {
                while let Some(mut block) = pool.try_alloc()? {
                    fill(&mut block, pool.place(), mark)?;
                    kept.push(block);
                }
                session.parent().say(())?;
            }
            Command::GiveOneBack => {
                session.parent().say(())?;
                thread::sleep(MOMENT);
                drop(kept.pop());
            }
            Command::GiveAllBack => {
                kept.clear();
                session.parent().say(())?;
            }
        }
    }
    Ok(())
}

fn describe(block: String, mark: u8, reference: &str) -> Step {
    Step::new(
        "offer",
        "A block is taken, written, and offered by its reference",
        "Until another process accepts it, the block belongs to the offering process, and is released if that process \
         dies.",
    )
    .value("block", block)
    .value("written into each byte", format!("{mark:#04x}"))
    .value("reference", reference)
    .judge(true, "offered", "")
}
