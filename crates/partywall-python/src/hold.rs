//! Segments that stay open for a time, and for as long as they have users.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{owner::Owner, reaper, segment::Segment};

/// A segment that is left to other processes once it has no users and its time has passed.
///
/// The reaper keeps the time. It needs no GIL, so a thread that keeps the GIL delays nothing.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Hold(Arc<Mutex<HoldState>>);

struct HoldState {
    /// `None` once the segment is left.
    owner: Option<Arc<Owner>>,
    users: usize,
    until: Instant,
    /// True if the reaper will check the hold again.
    scheduled: bool,
}

#[pymethods]
impl Hold {
    /// Takes a segment, which is closed for Python from now on. Keeps it for `seconds`, and for one use, which `leave`
    /// ends.
    #[new]
    fn new(py: Python<'_>, segment: &Segment, seconds: f64) -> PyResult<Self> {
        let until = until(seconds)?;
        let owner = segment.take(py)?;
        let hold = Self(Arc::new(Mutex::new(HoldState { owner: Some(owner), users: 1, until, scheduled: true })));
        await_end(hold.0.clone(), until);
        Ok(hold)
    }

    /// Keeps the segment for at least `seconds` from now, and with one more use if `enters` is set. Returns false if it
    /// is left already.
    fn extend(&self, seconds: f64, enters: bool) -> PyResult<bool> {
        let until = until(seconds)?;
        let mut state = self.0.lock().ignore_poison();
        if state.owner.is_none() {
            return Ok(false);
        }
        state.users += usize::from(enters);
        state.until = state.until.max(until);
        if !std::mem::replace(&mut state.scheduled, true) {
            let until = state.until;
            drop(state);
            await_end(self.0.clone(), until);
        }
        Ok(true)
    }

    /// Ends one use.
    fn leave(&self) {
        let mut state = self.0.lock().ignore_poison();
        state.users = state.users.saturating_sub(1);
        let is_over = state.users == 0 && state.until <= Instant::now();
        let owner = state.owner.take_if(|_| is_over);
        drop(state);
        drop(owner);
    }
}

/// Leaves the segment when its time has passed, which may be extended until then. If it has users, the last of them
/// leaves it.
fn await_end(state: Arc<Mutex<HoldState>>, until: Instant) {
    reaper::at(until, move || {
        let mut locked = state.lock().ignore_poison();
        let until = locked.until;
        if until > Instant::now() {
            drop(locked);
            return await_end(state, until);
        }
        locked.scheduled = false;
        let is_unused = locked.users == 0;
        let owner = locked.owner.take_if(|_| is_unused);
        drop(locked);
        drop(owner);
    });
}

fn until(seconds: f64) -> PyResult<Instant> {
    let after = Duration::try_from_secs_f64(seconds).ok().and_then(|after| Instant::now().checked_add(after));
    after.ok_or_else(|| PyValueError::new_err(format!("{seconds} is not a number of seconds, 0 or more")))
}
