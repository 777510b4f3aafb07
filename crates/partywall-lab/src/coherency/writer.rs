//! The writer: creates the memory, and launches kernels that store to it at the reader's command.

use super::{shared::Shared, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let (mut shared, [memory, file]) = Shared::make(&gpu)?;
    session.parent().say_with(shared.bytes(), &[memory.as_fd(), file.as_fd()])?;
    drop((memory, file));
    session.report(shared.describe())?;
    let reader = session.parent();
    let what = "storing to shared memory";
    while let Some(command) = reader.next()? {
        match command {
            Command::Store { memory, how, value, limit } => {
                let (kernels, words, _) = shared.parts(memory)?;
                let (_, store) = STORES[how % STORES.len()];
                let stored = kernels.store(gpu.stream(), words, store, value, limit).doing(what)?;
                reader.say(Stored { at: stored.at, answered: stored.answered })?;
            }
            Command::Turns { memory } => {
                let (kernels, words, _) = shared.parts(memory)?;
                kernels.take_turns(gpu.stream(), words, true, TURNS, TIMEOUT).doing(what)?;
                reader.say(())?;
            }
            Command::Pairs { memory, how } => {
                let (kernels, words, _) = shared.parts(memory)?;
                let (_, handover, _) = HANDOVERS[how % HANDOVERS.len()];
                kernels.write_pairs(gpu.stream(), words, handover, RACE).doing(what)?;
                reader.say(())?;
            }
        }
    }
    Ok(())
}
