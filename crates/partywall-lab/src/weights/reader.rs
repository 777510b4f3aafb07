//! A reader: opens the latest version and checks every word, again and again; or loads a file.

use std::sync::atomic::AtomicBool;

use partywall::{TableBuilder, files};

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    match session.parent().hear()? {
        Reading::File(path) => load(session, &path),
        Reading::Name => read(session),
    }
}

/// Reads until the rollout ends this process.
fn read(session: &mut Session) -> Result<(), Failure> {
    let mut seen = Progress::default();
    let mut patterns = tensors::Patterns::default();
    loop {
        let start = Instant::now();
        let segment = session.domain().open(NAME, TIMEOUT)?;
        let after = start.elapsed();
        if seen.checks == 0 {
            session.parent().say(ReaderReady { at: Moment::now(), after })?;
        }
        let (number, is_whole) = patterns.check(&segment)?;
        segment.release()?;
        seen.slowest = seen.slowest.max(after);
        seen.changes += u64::from(seen.checks > 0 && number > seen.newest);
        seen.newest = number;
        seen.checks += 1;
        seen.mixed += u64::from(!is_whole);
        while session.parent().has_spoken()? {
            match session.parent().next::<()>()? {
                Some(()) => session.parent().say(seen)?,
                None => return Ok(()),
            }
        }
    }
}

/// Loads the file into memory of this process, as a process without shared memory does after a restart.
fn load(session: &mut Session, path: &Path) -> Result<(), Failure> {
    let start = Instant::now();
    let plan = files::Plan::from_path(path).map_err(Error::from)?;
    let mut table = TableBuilder::new();
    plan.add_to(&mut table).map_err(Error::from)?;
    // Never committed, so no other process sees it.
    let mut build = session.domain().create("loaded", session.place).table(table).allocate()?;
    let copied = plan.copy_to(&build.uploader()?, files::default_threads(), &|_| (), &AtomicBool::new(false));
    copied.map_err(Error::from)?;
    session.finish(ReaderReady { at: Moment::now(), after: start.elapsed() })
}
