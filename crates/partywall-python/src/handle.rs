//! What Python closes, or only lets go of.

use std::sync::{Mutex, MutexGuard};

use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{errors::closed, reaper};

/// Something of the library's, until it is closed. What nobody has closed the reaper lets go of: that may have to wait for
/// a broker or for threads, and Python lets go in the middle of anything.
pub(crate) struct Handle<T: Send + 'static>(Mutex<Option<T>>);

impl<T: Send + 'static> Handle<T> {
    pub(crate) fn new(thing: T) -> Self {
        Self(Mutex::new(Some(thing)))
    }

    /// It, for as long as the guard.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock().ignore_poison()
    }

    /// A share of it; `what` is for the error that it is closed.
    pub(crate) fn get(&self, py: Python<'_>, what: &str) -> PyResult<T>
    where
        T: Clone,
    {
        self.lock().clone().ok_or_else(|| closed(py, what))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Lets go of it now.
    pub(crate) fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let thing = self.lock().take();
            drop(thing);
        });
    }
}

impl<T: Send + 'static> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(thing) = self.lock().take() {
            reaper::later(move || drop(thing));
        }
    }
}
