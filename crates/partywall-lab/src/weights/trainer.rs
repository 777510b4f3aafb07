//! The trainer: commits a version once a second, or is killed in the middle of one.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    match session.parent().hear()? {
        Job::Serve { first, mib } => serve(session, first, mib),
        Job::Half { number, mib } => {
            let mut build = tensors::create(session, number, mib).allocate()?;
            tensors::Patterns::default().write(&mut build, number, tensors::TENSORS / 2)?;
            session.await_kill("the rollout did not kill this trainer in the middle of a version")
        }
    }
}

fn serve(session: &mut Session, first: u64, mib: u64) -> Result<(), Failure> {
    let mut all = Vec::new();
    let mut patterns = tensors::Patterns::default();
    let mut due = Instant::now();
    for number in first.. {
        let start = Instant::now();
        let mut build = tensors::create(session, number, mib).allocate()?;
        patterns.write(&mut build, number, tensors::TENSORS)?;
        let written_in = start.elapsed();
        let start = Instant::now();
        // The name is kept: the version stays when this process drops it.
        build.commit()?.release()?;
        let committed = Committed { number, written_in, committed_in: start.elapsed() };
        session.parent().say(committed)?;
        all.push(committed);
        // After a version that took longer, the next one is not committed earlier.
        due = (due + INTERVAL).max(Instant::now());
        let parent = &*session.parent();
        if !Peer::wait_any(&[parent], due.saturating_duration_since(Instant::now()))?.is_empty() {
            break;
        }
    }
    session.parent().hear::<()>()?;
    session.report(describe(&all, mib))?;
    // Ends the messages: the rollout has received all of them.
    session.finish(None::<Committed>)
}

fn describe(all: &[Committed], mib: u64) -> Step {
    let times = |time: fn(&Committed) -> Duration| spread(&all.iter().map(time).collect::<Vec<_>>());
    Step::new(
        "commit",
        "A new version of the weights, once a second",
        "The trainer writes into memory that no other process sees. The commit freezes it and makes it the latest version \
         in one step. An old version is freed when its last reader drops it.",
    )
    .value("versions", format!("{} of {} in {} tensors", all.len(), bytes(mib << 20), tensors::TENSORS))
    .value("allocated and written in", times(|committed| committed.written_in))
    .value("committed in", times(|committed| committed.committed_in))
    .judge(true, "committed", "")
}
