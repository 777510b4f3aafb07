//! Waits that release the GIL and obey Ctrl-C.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use partywall::Error;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::errors::Raise;

/// How long a signal may have to wait.
const SLICE: Duration = Duration::from_millis(100);

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
