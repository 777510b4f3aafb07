//! Waits that release the GIL, and obey Ctrl-C and exceptions that other threads set.

use std::{
    sync::{
        Mutex,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use partywall::{Error, Wait, cuda::StreamRef};
use partywall_os::{lock::IgnorePoison, per_process::PerProcess};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
    sync::PyOnceLock,
};

use crate::errors::{Raise, closed};

/// How long a signal may have to wait.
const MAX_SLEEP: Duration = Duration::from_millis(100);
/// How long to poll for the result of a helper thread before sleeping.
const MAX_SPIN: Duration = Duration::from_micros(20);
/// Pauses between questions to a GPU: the first one, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_millis(1));

/// A time-out as Python gives it: seconds, or `None` for ever.
pub(crate) fn timeout(seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(Duration::MAX),
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
            Err(PyValueError::new_err(format!("a timeout is a number of seconds, 0 or more, or None; not {seconds}")))
        }
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
    }
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

/// Waits in slices: `attempt` is asked until it does something else than to time out, or until `timeout` is over.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    attempt: impl Fn(Duration) -> partywall::Result<T> + Sync,
) -> PyResult<T> {
    // A time-out too large for the clock is none.
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

/// Has `take` wait in one piece: a thread that waits for a turn and tries again loses its place. A signal, or that the handle
/// is closed, cancels the wait and is raised.
pub(crate) fn for_turn<T: Send>(
    py: Python<'_>,
    what: &str,
    timeout: Duration,
    is_closed: impl Fn() -> bool + Sync,
    take: impl FnOnce(Wait<'_>) -> partywall::Result<T> + Send,
) -> PyResult<T> {
    let taken = until(py, what, timeout, is_closed, None, take)?;
    taken.ok_or_else(|| PyRuntimeError::new_err("the interpreter ends"))
}

/// As [`for_turn`], but `stop` can cancel the wait, too: then it is `None`.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    what: &str,
    timeout: Duration,
    is_closed: impl Fn() -> bool + Sync,
    stop: Option<&Py<PyAny>>,
    take: impl FnOnce(Wait<'_>) -> partywall::Result<T> + Send,
) -> PyResult<Option<T>> {
    let raised = Mutex::new(None);
    let taken = py.detach(|| {
        let is_cancelled = || {
            // At the end of the interpreter there is nobody left to ask.
            Python::try_attach(|py| {
                let asked = interrupted(py).and_then(|()| match stop {
                    _ if is_closed() => Err(closed(py, what)),
                    Some(stop) => stop.bind(py).call0()?.is_truthy(),
                    None => Ok(false),
                });
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
        // What was taken all the same goes back.
        (_, Some(error)) => Err(error),
        (Err(Error::Cancelled { .. }), None) => Ok(None),
        (taken, None) => taken.map(Some).or_raise(py),
    }
}

/// The next value of a channel, if it comes within `timeout`; the outer error is the signal's.
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

/// Does on a helper thread what no signal can end. A signal ends the wait for it, and the thread goes on.
pub(crate) fn on_helper_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (done, mut outcome) = mpsc::channel();
    let job = move |is_free: &dyn Fn()| {
        let result = work();
        // Before the result is known, so that the next caller finds this thread free.
        is_free();
        // After a signal nobody listens any more.
        _ = done.send(result);
    };
    py.detach(|| hand_over(Box::new(job)))?;
    // Mostly the result is there at once: sleeping and being woken would take several times as long.
    let results = &mut outcome;
    let soon = py.detach(move || {
        let end = Instant::now() + MAX_SPIN;
        loop {
            match results.try_recv() {
                Err(TryRecvError::Empty) if Instant::now() < end => std::thread::yield_now(),
                looked => return looked.ok(),
            }
        }
    });
    if let Some(result) = soon {
        return Ok(result);
    }
    let received = receive(py, &mut outcome, Duration::MAX)?;
    received.map_err(|_| PyRuntimeError::new_err("the thread that did the waiting has panicked"))
}

/// The work of a helper thread, which calls its argument when the thread could take the next job.
type Job = Box<dyn FnOnce(&dyn Fn()) + Send>;

/// Free helper threads. Starting a thread takes longer than most waits.
static FREE: PerProcess<Vec<Sender<Job>>> = PerProcess::new();

/// Gives a job to a free helper thread, or a new one.
fn hand_over(job: Job) -> std::io::Result<()> {
    let free = FREE.lock().pop();
    // A thread that has panicked takes no job.
    let job = match free {
        Some(thread) => match thread.send(job) {
            Ok(()) => return Ok(()),
            Err(unsent) => unsent.0,
        },
        None => job,
    };
    let (thread, jobs) = mpsc::channel::<Job>();
    let itself = thread.clone();
    let work = move || jobs.into_iter().for_each(|job| job(&|| FREE.lock().push(itself.clone())));
    std::thread::Builder::new().name("partywall-wait".into()).spawn(work)?;
    // The thread listens for as long as it holds its own sender.
    _ = thread.send(job);
    Ok(())
}

/// Waits until everything on a stream is done, or a signal comes. What is wrong with the stream, or that it is being
/// captured, is for whoever uses it next to say.
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
