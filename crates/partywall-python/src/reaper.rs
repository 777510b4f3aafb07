//! A thread that lets go of things when nobody can wait for that: a deleter of DLPack has no stream, may be called with
//! or without the GIL, and must not keep the garbage collector waiting for a GPU or a broker.

use std::{
    cell::Cell,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    time::Duration,
};

use partywall_os::per_process::PerProcess;
use pyo3::prelude::*;

use crate::wait;

type Job = Box<dyn FnOnce() + Send>;

/// A forked child begins with none: the thread is not there, and nothing of the parent's is to be released there.
static REAPER: PerProcess<Option<Sender<Job>>> = PerProcess::new();

/// What whoever has the GIL anyway may do, too.
static SPARE: PerProcess<Spare> = PerProcess::new();

#[derive(Default)]
struct Spare {
    jobs: Vec<Job>,
    /// The thread is going to look at them.
    watched: bool,
}

/// For how long the thread leaves things to others.
const SPARE_FOR: Duration = Duration::from_millis(5);

thread_local! {
    static IS_REAPER: Cell<bool> = const { Cell::new(false) };
}

/// Has the thread do `job`. What follows from a job is part of it.
pub(crate) fn later(job: impl FnOnce() + Send + 'static) {
    if IS_REAPER.get() {
        return job();
    }
    let mut reaper = REAPER.lock();
    let sender = reaper.get_or_insert_with(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name("partywall-reaper".into());
        // Without a thread there is nobody to send a job to, and who has it does it.
        let _ = thread.spawn(move || {
            IS_REAPER.set(true);
            jobs.into_iter().for_each(|job| job());
        });
        sender
    });
    let sent = sender.send(Box::new(job));
    // What follows from a job that is done here takes this lock, too.
    drop(reaper);
    if let Err(unsent) = sent {
        (unsent.0)();
    }
}

/// Has `job`, which needs the GIL, done by who next [helps](help), or by the thread if nobody does soon. For what comes again
/// and again: a thread that wants the GIL each time holds up those who have it.
pub(crate) fn soon(job: impl FnOnce() + Send + 'static) {
    if IS_REAPER.get() {
        return job();
    }
    let mut spare = SPARE.lock();
    spare.jobs.push(Box::new(job));
    if std::mem::replace(&mut spare.watched, true) {
        return;
    }
    drop(spare);
    later(|| {
        std::thread::sleep(SPARE_FOR);
        SPARE.lock().watched = false;
        help();
    });
}

/// Does what is to be done [soon]. To be called with the GIL.
pub(crate) fn help() {
    let jobs = std::mem::take(&mut SPARE.lock().jobs);
    jobs.into_iter().for_each(|job| job());
}

/// Waits until everything that was dropped before is released. True if that was in time.
#[pyfunction]
#[pyo3(signature = (timeout = None))]
pub(crate) fn flush(py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
    let timeout = wait::timeout(timeout)?;
    let (done, mut flushed) = mpsc::channel();
    // Nobody listens any more once the time is over.
    later(move || _ = done.send(()));
    Ok(wait::receive(py, &mut flushed, timeout)? != Err(RecvTimeoutError::Timeout))
}
