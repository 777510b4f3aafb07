//! A thread for releases that may block.
//!
//! DLPack's deleters have no stream, may run with or without the GIL, and must not keep the garbage collector waiting for a GPU
//! or a broker.

use std::{
    cell::Cell,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    time::Duration,
};

use partywall_os::per_process::PerProcess;
use pyo3::prelude::*;

use crate::wait;

type Job = Box<dyn FnOnce() + Send>;

/// The sender to the thread. A forked child starts without one: the thread does not exist there, and the child must release
/// nothing of the parent's.
static REAPER: PerProcess<Option<Sender<Job>>> = PerProcess::new();

/// Jobs that any thread with the GIL may run, too.
static GIL_JOBS: PerProcess<GilJobs> = PerProcess::new();

#[derive(Default)]
struct GilJobs {
    jobs: Vec<Job>,
    /// True if the thread is scheduled to run the jobs.
    scheduled: bool,
}

/// How long the thread leaves jobs to threads that have the GIL anyway.
const GIL_JOB_DELAY: Duration = Duration::from_millis(5);

thread_local! {
    static IS_REAPER: Cell<bool> = const { Cell::new(false) };
}

/// Has the thread run `job`. Releases that follow from a job run as a part of it.
pub(crate) fn later(job: impl FnOnce() + Send + 'static) {
    if IS_REAPER.get() {
        return job();
    }
    let mut reaper = REAPER.lock();
    let sender = reaper.get_or_insert_with(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name("partywall-reaper".into());
        // If the thread cannot be started, sending fails, and the caller runs the job.
        let _ = thread.spawn(move || {
            IS_REAPER.set(true);
            jobs.into_iter().for_each(|job| job());
        });
        sender
    });
    let sent = sender.send(Box::new(job));
    // A job that runs here may call `later` and take this lock again.
    drop(reaper);
    if let Err(unsent) = sent {
        (unsent.0)();
    }
}

/// Has `job`, which needs the GIL, run by the next call of [`run_gil_jobs`], or by the thread if there is none within [`GIL_JOB_DELAY`].
/// For frequent jobs: a thread that takes the GIL for each of them would delay the threads that use it.
pub(crate) fn with_gil(job: impl FnOnce() + Send + 'static) {
    if IS_REAPER.get() {
        return job();
    }
    let mut gil_jobs = GIL_JOBS.lock();
    gil_jobs.jobs.push(Box::new(job));
    if std::mem::replace(&mut gil_jobs.scheduled, true) {
        return;
    }
    drop(gil_jobs);
    later(|| {
        std::thread::sleep(GIL_JOB_DELAY);
        GIL_JOBS.lock().scheduled = false;
        run_gil_jobs();
    });
}

/// Runs the jobs given to [`with_gil`]. The caller has the GIL.
pub(crate) fn run_gil_jobs() {
    let jobs = std::mem::take(&mut GIL_JOBS.lock().jobs);
    jobs.into_iter().for_each(|job| job());
}

/// Waits until everything that was dropped before is released. Returns whether that happened within the timeout.
#[pyfunction]
#[pyo3(signature = (timeout = None))]
pub(crate) fn flush(py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
    let timeout = wait::timeout(timeout)?;
    let (done, mut flushed) = mpsc::channel();
    // After the timeout the receiver is gone.
    later(move || _ = done.send(()));
    Ok(wait::receive(py, &mut flushed, timeout)? != Err(RecvTimeoutError::Timeout))
}
