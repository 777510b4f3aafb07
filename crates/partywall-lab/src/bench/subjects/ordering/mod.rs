//! Order between processes: timelines and semaphores, against the driver, futexes and cache lines alone.
//!
//! Work on a GPU, and anything that may have to be killed, runs in separate processes.

pub(crate) mod deaths;
mod messages;
pub(crate) mod pair;
pub(crate) mod semaphore;
pub(crate) mod streams;
mod tasks;
pub(crate) mod wakes;

use partywall_measure::Failure;

use self::{pair::Side, streams::Device};
use crate::{bench::board::Board, lab::Session};

/// The role of one side of a [`pair`]: follows orders until it has to end.
pub(crate) fn play(session: &mut Session) -> Result<(), Failure> {
    let (first, gpu): (bool, Option<(String, u64)>) = session.parent().hear()?;
    let board = Board::open(&session.parent().take_fd()?)?;
    let gpu = gpu.map(|(gpu, large)| Ok::<_, Failure>((gpu.parse()?, large))).transpose()?;
    let side = Side::new(session.domain().clone(), first, board, gpu)?;
    session.parent().say(side.device().ok().map(Device::is_under_mps).transpose()?.unwrap_or(false))?;
    while let Some((name, count)) = session.parent().next::<(String, usize)>()? {
        let mut ways = wakes::WAYS.iter().chain(streams::WAYS).chain(messages::WAYS).chain(tasks::WAYS);
        let (_, run) = ways.find(|(known, _)| *known == name).ok_or_else(|| format!("no way {name:?}"))?;
        side.meet()?;
        session.parent().say(run(&side, count)?)?;
    }
    Ok(())
}
