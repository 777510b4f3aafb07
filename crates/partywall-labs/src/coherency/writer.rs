//! The writer: makes the memory, and launches the kernels that store to it when the reader wants them.

use std::os::fd::AsFd;

use super::{HANDOVERS, Hello, LAB, Over, RACE, STORES, Stored, TIMEOUT, TITLE, TURNS, Wish, shared::Shared};
use crate::{
    Context, Options,
    device::{self, copy_failed, failed},
    failure::Failure,
    peer::Peer,
    teller::Teller,
};

/// Plays the role.
pub(super) fn run(context: &Context, options: &Options, teller: &mut Teller) -> Result<(), Failure> {
    if options.on_standard_input {
        let mut peer = Peer::on_standard_input("reader")?;
        return play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure));
    }
    let gpu = device::open(options.device())?;
    teller.header(TITLE, &gpu).map_err(failed("asking about the GPU"))?;
    let mut peer = Peer::meet(context, LAB, "reader", teller)?;
    play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure))?;
    teller.remark("The reader has seen enough, and says which beliefs held.");
    Ok(())
}

fn play(options: &Options, peer: &mut Peer, teller: &mut Teller) -> Result<(), Failure> {
    let gpu = device::open(options.device())?;
    let (mut shared, [memory, file]) = Shared::make(&gpu)?;
    let hello = Hello { uuid: gpu.uuid().to_string(), bytes: shared.bytes() };
    peer.say(hello, &[memory.as_fd(), file.as_fd()])?;
    drop((memory, file));
    peer.tell(teller, shared.describe())?;
    let failed = copy_failed("storing to shared memory");
    loop {
        match peer.hear(teller)? {
            Wish::End => return Ok(()),
            Wish::Store { memory, how, value, limit } => {
                let (kernels, words, _) = shared.parts(memory)?;
                let (_, store) = STORES[how % STORES.len()];
                let stored = kernels.store(gpu.stream(), words, store, value, limit).map_err(&failed)?;
                peer.say(Stored { at: stored.at, answered: stored.answered }, &[])?;
            }
            Wish::Turns { memory } => {
                let (kernels, words, _) = shared.parts(memory)?;
                kernels.take_turns(gpu.stream(), words, true, TURNS, TIMEOUT).map_err(&failed)?;
                peer.say(Over, &[])?;
            }
            Wish::Pairs { memory, how } => {
                let (kernels, words, _) = shared.parts(memory)?;
                let (_, handover, _) = HANDOVERS[how % HANDOVERS.len()];
                kernels.write_pairs(gpu.stream(), words, handover, RACE).map_err(&failed)?;
                peer.say(Over, &[])?;
            }
        }
    }
}
