//! The holder: takes blocks, writes into them, and hands them over.

use std::thread;

use super::{Hello, LAB, MOMENT, Meet, Offered, Ready, TIMEOUT, TITLE, Wish, fill, open};
use crate::{Context, MemoryOptions, broker, failure::Failure, peer::Peer, step::Step, teller::Teller};

/// Plays the role.
pub(super) fn run(context: &Context, options: &MemoryOptions, teller: &mut Teller) -> Result<(), Failure> {
    let place = context.place(options.device)?;
    let hello = Hello { pid: std::process::id(), place: place.to_string() };
    if options.on_standard_input {
        let mut peer = Peer::on_standard_input("taker")?;
        return play(hello, &mut peer, teller).map_err(|failure| peer.give_up(failure));
    }
    teller.header_at(TITLE, place)?;
    let mut peer = Peer::meet(context, LAB, "taker", teller)?;
    play(hello, &mut peer, teller).map_err(|failure| peer.give_up(failure))?;
    teller.remark("The taker has seen enough, and says which beliefs held.");
    Ok(())
}

fn play(hello: Hello, peer: &mut Peer, teller: &mut Teller) -> Result<(), Failure> {
    peer.say(hello, &[])?;
    let Meet { socket } = peer.hear(teller)?;
    let pool = open(&broker::connect(&socket)?)?;
    peer.say(Ready, &[])?;
    let mut kept = Vec::new();
    let mut told = false;
    loop {
        match peer.hear(teller)? {
            Wish::End => return Ok(()),
            Wish::Offer(mark) => {
                let mut block = pool.alloc(TIMEOUT)?;
                fill(&mut block, pool.place(), mark)?;
                let shown = format!("{}, generation {}", block.index(), block.generation());
                let reference = block.offer()?.to_string();
                if !std::mem::replace(&mut told, true) {
                    peer.tell(teller, describe(shown, mark, &reference))?;
                }
                peer.say(Offered { reference }, &[])?;
            }
            Wish::TakeAll(mark) => {
                while let Some(mut block) = pool.try_alloc()? {
                    fill(&mut block, pool.place(), mark)?;
                    kept.push(block);
                }
                peer.say(Ready, &[])?;
            }
            Wish::GiveOneBack => {
                peer.say(Ready, &[])?;
                thread::sleep(MOMENT);
                drop(kept.pop());
            }
            Wish::GiveAllBack => {
                kept.clear();
                peer.say(Ready, &[])?;
            }
        }
    }
}

fn describe(block: String, mark: u8, reference: &str) -> Step {
    Step::new(
        "offer",
        "A block is taken, written, and offered to whoever gets the reference",
        "Until somebody takes it over the block is the giver's, and dies with the giver.",
    )
    .value("block", block)
    .value("written into each byte", format!("{mark:#04x}"))
    .value("reference", reference)
    .judge(true, "offered", "")
}
