//! Objects that Python closes, or only drops.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{errors::closed, reaper, wait};

/// An object of the library until it is closed. The reaper releases an object that was dropped without a close: the
/// release may have to wait for a broker or for threads, and Python drops objects in the middle of anything.
pub(crate) struct Handle<T: Send + 'static>(Mutex<Option<T>>);

impl<T: Send + 'static> Handle<T> {
    pub(crate) fn new(thing: T) -> Self {
        Self(Mutex::new(Some(thing)))
    }

    /// Locks the object; `None` once it is closed.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock().ignore_poison()
    }

    /// Takes the object; `what` names it in the error if it is closed.
    pub(crate) fn take(&self, py: Python<'_>, what: &str) -> PyResult<T> {
        let object = self.lock().take();
        object.ok_or_else(|| closed(py, what))
    }

    /// Returns a clone of the object; `what` names it in the error if it is closed.
    pub(crate) fn get(&self, py: Python<'_>, what: &str) -> PyResult<T>
    where
        T: Clone,
    {
        self.lock().clone().ok_or_else(|| closed(py, what))
    }

    /// Waits for an event of the object. Closing the handle ends the wait.
    pub(crate) fn wait<R: Send>(
        &self,
        py: Python<'_>,
        what: &str,
        timeout: Option<f64>,
        attempt: impl Fn(&T, Duration) -> partywall::Result<R> + Sync,
    ) -> PyResult<R>
    where
        T: Clone,
    {
        let waited = wait::in_slices(py, wait::timeout(timeout)?, |slice| {
            // Cloned again for each slice, so that a wait keeps the object for one slice at most.
            let object = self.lock().clone();
            object.map(|object| attempt(&object, slice)).transpose()
        });
        waited?.ok_or_else(|| closed(py, what))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Releases the object now. Calling it again does nothing.
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
