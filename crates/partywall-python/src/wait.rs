//! Waits that release the GIL, and end by Ctrl-C and by exceptions that other threads set.
//!
//! The driver's own waits cannot be interrupted. Where Python waits for a GPU, it therefore waits twice: first for a
//! helper thread that waits for the GPU, or by polling a stream, which a signal ends while nothing has happened yet;
//! then the library waits, and returns at once. A call to the broker is not interrupted: it ends within the ten seconds
//! that a broker has for its answer.

use std::{
    sync::{
        Mutex,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use partywall::{Error, Wait, cuda::StreamRef};
use partywall_os::{lock::IgnorePoison, per_process::PerProcess, thread::spawn};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
    sync::PyOnceLock,
};

use crate::errors::Raise;

/// The longest delay of a signal.
const MAX_SLEEP: Duration = Duration::from_millis(100);
/// How long to poll for the result of a helper thread before sleeping.
const MAX_SPIN: Duration = Duration::from_micros(20);
/// Pauses between queries of a GPU: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_millis(1));

/// Returns the duration of a timeout in seconds; `None` is for ever.
pub(crate) fn timeout(seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(Duration::MAX),
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
            Err(PyValueError::new_err(format!("a timeout is a number of seconds, 0 or more, or None; not {seconds}")))
        }
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
    }
}

/// Checks a timeout as the calls of this module do, and returns it. asyncio would wait for ever for a NaN.
#[pyfunction]
pub(crate) fn checked_timeout(seconds: Option<f64>) -> PyResult<Option<f64>> {
    timeout(seconds).map(|_| seconds)
}

/// Returns the timeout for opening a pool or topic: 10 s by default if the call may create it, else none.
pub(crate) fn creation(seconds: Option<f64>, creates: bool) -> PyResult<Duration> {
    let default = if creates { 10.0 } else { 0.0 };
    timeout(Some(seconds.unwrap_or(default)))
}

/// Raises what a signal handler raises, or what another thread has set for this one (`PyThreadState_SetAsyncExc`).
fn interrupted(py: Python<'_>) -> PyResult<()> {
    static NOTHING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    py.check_signals()?;
    // The interpreter raises the latter only while the thread itself runs Python code.
    let nothing = NOTHING.get_or_try_init(py, || py.eval(c"lambda: None", None, None).map(Bound::unbind))?;
    nothing.call0(py).map(drop)
}

/// Waits in slices: calls `attempt` until it returns anything but a timeout, or until `timeout` has passed.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    attempt: impl Fn(Duration) -> partywall::Result<T> + Sync,
) -> PyResult<T> {
    // A timeout beyond the range of the clock is none.
    let deadline = Instant::now().checked_add(timeout);
    let mut slice = timeout.min(MAX_SLEEP);
    loop {
        match py.detach(|| attempt(slice)) {
            Err(Error::Timeout { what, .. }) => {
                interrupted(py)?;
                slice = deadline
                    .map_or(MAX_SLEEP, |deadline| deadline.saturating_duration_since(Instant::now()).min(MAX_SLEEP));
                if slice.is_zero() {
                    return Err(Error::Timeout { what, after: timeout }).or_raise(py);
                }
            }
            outcome => return outcome.or_raise(py),
        }
    }
}

/// Has `take` wait in one piece: a thread that waits for its turn and tries again would lose its place. A signal, or
/// what `check` raises meanwhile, cancels the wait and is raised.
pub(crate) fn for_turn<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    check: impl Fn(Python<'_>) -> PyResult<()> + Sync,
    take: impl FnOnce(Wait<'_>) -> partywall::Result<T> + Send,
) -> PyResult<T> {
    let taken = until(py, timeout, |py| check(py).map(|()| false), take)?;
    taken.ok_or_else(|| PyRuntimeError::new_err("the interpreter ends"))
}

/// Waits as [`for_turn`] does. Returns `None` once `is_over` says so.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    is_over: impl Fn(Python<'_>) -> PyResult<bool> + Sync,
    take: impl FnOnce(Wait<'_>) -> partywall::Result<T> + Send,
) -> PyResult<Option<T>> {
    let raised = Mutex::new(None);
    let taken = py.detach(|| {
        let is_cancelled = || {
            // At the end of the interpreter there is nothing to ask any more.
            Python::try_attach(|py| {
                let asked = interrupted(py).and_then(|()| is_over(py));
                asked.unwrap_or_else(|error| {
                    *raised.lock().ignore_poison() = Some(error);
                    true
                })
            })
            .unwrap_or(true)
        };
        take(Wait::from(timeout).cancelled_by(&is_cancelled))
    });
    match (taken, raised.into_inner().ignore_poison()) {
        // A result that arrived all the same is dropped, which gives it back.
        (_, Some(error)) => Err(error),
        (Err(Error::Cancelled { .. }), None) => Ok(None),
        (taken, None) => taken.map(Some).or_raise(py),
    }
}

/// Returns the next value of a channel, if it comes within `timeout`. The outer error is a signal's.
pub(crate) fn receive<T: Send>(
    py: Python<'_>,
    channel: &mut Receiver<T>,
    timeout: Duration,
) -> PyResult<Result<T, RecvTimeoutError>> {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let left = deadline.map_or(MAX_SLEEP, |deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.min(MAX_SLEEP);
        let channel = &mut *channel;
        match py.detach(move || channel.recv_timeout(slice)) {
            Err(RecvTimeoutError::Timeout) if left > slice => {}
            Err(RecvTimeoutError::Timeout) if deadline.is_none() => {}
            received => return Ok(received),
        }
        interrupted(py)?;
    }
}

/// Runs work that no signal can end on a helper thread. A signal ends the wait for it, and the thread continues.
pub(crate) fn on_helper_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (done, mut outcome) = mpsc::channel();
    let job = move |is_free: &dyn Fn()| {
        let result = work();
        // Before the result is sent, so that the next caller finds this thread free.
        is_free();
        // After a signal the receiver is gone.
        _ = done.send(result);
    };
    py.detach(|| hand_over(Box::new(job))).or_raise(py)?;
    // The result usually comes at once. Sleeping and being woken would take several times as long.
    let results = &mut outcome;
    let soon = py.detach(move || {
        let end = Instant::now() + MAX_SPIN;
        loop {
            match results.try_recv() {
                Err(TryRecvError::Empty) if Instant::now() < end => std::thread::yield_now(),
                result => return result.ok(),
            }
        }
    });
    if let Some(result) = soon {
        return Ok(result);
    }
    let received = receive(py, &mut outcome, Duration::MAX)?;
    received.map_err(|_| PyRuntimeError::new_err("the thread that did the waiting has panicked"))
}

/// The work of a helper thread. It calls its argument once the thread can take the next job.
type WaitJob = Box<dyn FnOnce(&dyn Fn()) + Send>;

/// Free helper threads. Starting a thread takes longer than most waits.
static FREE: PerProcess<Vec<Sender<WaitJob>>> = PerProcess::new();

/// Gives a job to a free helper thread, or to a new one.
fn hand_over(job: WaitJob) -> partywall::Result<()> {
    let free = FREE.lock().pop();
    // A thread that has panicked takes no jobs.
    let job = match free {
        Some(thread) => match thread.send(job) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
        None => job,
    };
    let (thread, jobs) = mpsc::channel::<WaitJob>();
    let itself = thread.clone();
    let work = move || jobs.into_iter().for_each(|job| job(&|| FREE.lock().push(itself.clone())));
    spawn("partywall-wait", work).map_err(|source| Error::starting("a thread that waits", source))?;
    // The thread keeps receiving, because it holds a sender of its own.
    _ = thread.send(job);
    Ok(())
}

/// Waits until all work on a stream is done, or a signal comes. An error of the stream, or that it is being captured,
/// is left for its next user to report.
pub(crate) fn for_stream(py: Python<'_>, stream: StreamRef<'_>) -> PyResult<()> {
    let (mut pause, longest) = PAUSES;
    loop {
        let is_over = py.detach(|| {
            let slice = Instant::now();
            loop {
                if !matches!(stream.is_done(), Ok(false)) {
                    return true;
                }
                if slice.elapsed() >= MAX_SLEEP {
                    return false;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(longest);
            }
        });
        if is_over {
            return Ok(());
        }
        interrupted(py)?;
    }
}
