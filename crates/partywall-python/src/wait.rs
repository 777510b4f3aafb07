//! Waits that release the GIL and obey Ctrl-C.

use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use partywall::{Error, cuda::StreamRef};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use crate::errors::Raise;

/// How long a signal may have to wait.
const SLICE: Duration = Duration::from_millis(100);
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

/// Waits in slices: `attempt` is asked until it does something else than to time out, or until `timeout` is over.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    attempt: impl Fn(Duration) -> partywall::Result<T> + Sync,
) -> PyResult<T> {
    // A time-out too large for the clock is none.
    let deadline = Instant::now().checked_add(timeout);
    let mut slice = timeout.min(SLICE);
    loop {
        match py.detach(|| attempt(slice)) {
            Err(Error::Timeout { what, .. }) => {
                py.check_signals()?;
                slice =
                    deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()).min(SLICE));
                if slice.is_zero() {
                    return Err(Error::Timeout { what, after: timeout }).or_raise(py);
                }
            }
            outcome => return outcome.or_raise(py),
        }
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
        let left = deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.min(SLICE);
        let channel = &mut *channel;
        match py.detach(move || channel.recv_timeout(slice)) {
            Err(RecvTimeoutError::Timeout) if left > slice => {}
            Err(RecvTimeoutError::Timeout) if deadline.is_none() => {}
            received => return Ok(received),
        }
        py.check_signals()?;
    }
}

/// Has a thread do what no signal can end. A signal ends the wait for it, and the thread goes on.
pub(crate) fn aside<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (done, mut outcome) = mpsc::channel();
    // Nobody listens any more once a signal has come.
    let thread = std::thread::Builder::new().name("partywall-wait".into()).spawn(move || _ = done.send(work()));
    thread?;
    let received = receive(py, &mut outcome, Duration::MAX)?;
    received.map_err(|_| PyRuntimeError::new_err("the thread that waited for the GPU has panicked"))
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
                if slice.elapsed() >= SLICE {
                    return false;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(longest);
            }
        });
        if is_over {
            return Ok(());
        }
        py.check_signals()?;
    }
}
