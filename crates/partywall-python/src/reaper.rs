//! A thread for releases that may block.
//!
//! A deleter of DLPack may run on any thread, with or without the GIL, in the middle of a garbage collection, and has
//! no stream: kernels that use the memory may still run. It must not keep the garbage collector waiting for a GPU or a
//! broker. The last reference therefore hands its build or segment to this thread, which waits for everything that the
//! process runs on that GPU, and then unmaps and releases. While a graph is being captured that wait is impossible, and
//! the thread tries again later. `close()` waits by itself.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ops::Deref,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

use partywall_os::{per_process::PerProcess, thread::spawn};
use pyo3::prelude::*;

use crate::wait;

type ReaperJob = Box<dyn FnOnce() + Send>;

/// A job, and when to run it; `None` for immediately.
type Timed = (Option<Instant>, ReaperJob);

/// The sender to the thread. A forked child starts without one: the thread does not exist there, and the child must
/// release nothing of the parent's.
static REAPER: PerProcess<Option<Sender<Timed>>> = PerProcess::new();

/// Jobs that any thread with the GIL may run, too.
static GIL_JOBS: PerProcess<GilJobs> = PerProcess::new();

#[derive(Default)]
struct GilJobs {
    jobs: Vec<ReaperJob>,
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
    // If the thread cannot be started, the caller runs the job.
    if let Some(job) = send(None, Box::new(job)) {
        job();
    }
}

/// A shared object whose last reference the thread drops. Other references do not wake the thread.
pub(crate) struct Late<T: Send + Sync + 'static>(Option<Arc<T>>);

impl<T: Send + Sync + 'static> Late<T> {
    pub(crate) fn new(shared: Arc<T>) -> Self {
        Self(Some(shared))
    }

    /// Returns the reference, which the caller drops.
    pub(crate) fn into_inner(mut self) -> Option<Arc<T>> {
        self.0.take()
    }
}

impl<T: Send + Sync + 'static> Deref for Late<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send + Sync + 'static> Drop for Late<T> {
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            later(move || drop(last));
        }
    }
}

/// Has the thread run `job` at a time. Without the thread the job is not run.
pub(crate) fn at(time: Instant, job: impl FnOnce() + Send + 'static) {
    drop(send(Some(time), Box::new(job)));
}

/// Gives a job to the thread, and returns it if there is no thread.
fn send(time: Option<Instant>, job: ReaperJob) -> Option<ReaperJob> {
    let mut reaper = REAPER.lock();
    if reaper.is_none() {
        let (sender, jobs) = mpsc::channel();
        *reaper = spawn("partywall-reaper", move || run(&jobs)).ok().map(|_| sender);
    }
    // A job may call `later` and take this lock again: it must be run and dropped without it.
    match &*reaper {
        Some(sender) => sender.send((time, job)).err().map(|unsent| unsent.0.1),
        None => Some(job),
    }
}

/// Runs jobs as they come, and those for later at their time.
fn run(jobs: &Receiver<Timed>) {
    IS_REAPER.set(true);
    let mut waiting: BTreeMap<(Instant, u64), ReaperJob> = BTreeMap::new();
    for number in 0.. {
        let next = loop {
            let Some(first) = waiting.first_entry() else { break jobs.recv().ok() };
            let left = first.key().0.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Before any other job, of which there may be one after the other.
                first.remove()();
                continue;
            }
            match jobs.recv_timeout(left) {
                Ok(job) => break Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break None,
            }
        };
        match next {
            Some((Some(time), job)) => _ = waiting.insert((time, number), job),
            Some((None, job)) => job(),
            None => return,
        }
    }
}

/// Has `job`, which needs the GIL, run by the next call of [`run_gil_jobs`], or by the thread if there is none within
/// [`GIL_JOB_DELAY`]. For frequent jobs: a thread that takes the GIL for each of them would delay the threads that use
/// it.
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
