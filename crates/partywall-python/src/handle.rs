//! Objects that Python closes, or only drops.

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::Wait;
use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{errors::closed, reaper, wait};

/// An object until it is closed.
pub(crate) struct Closable<T> {
    /// The name of the object in the error for its use after that.
    what: &'static str,
    object: Mutex<Option<T>>,
}

impl<T: Send> Closable<T> {
    pub(crate) fn new(what: &'static str, object: T) -> Self {
        Self { what, object: Mutex::new(Some(object)) }
    }

    /// Locks the object; `None` once it is closed.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.object.lock().ignore_poison()
    }

    /// Takes the object.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<T> {
        let object = self.lock().take();
        self.unless_closed(py, object)
    }

    /// Returns a clone of the object.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<T>
    where
        T: Clone,
    {
        let object = self.lock().clone();
        self.unless_closed(py, object)
    }

    /// Returns what was found in the object; the exception for a closed object if nothing was.
    pub(crate) fn unless_closed<R>(&self, py: Python<'_>, found: Option<R>) -> PyResult<R> {
        found.ok_or_else(|| closed(py, self.what))
    }

    /// Waits for an event of the object. Closing it ends the wait.
    pub(crate) fn wait<R: Send>(
        &self,
        py: Python<'_>,
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
        self.unless_closed(py, waited?)
    }

    /// Waits in slices for something that another object does. Closing this object ends the wait.
    pub(crate) fn in_slices<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        attempt: impl Fn(Duration) -> partywall::Result<R> + Sync,
    ) -> PyResult<R> {
        let waited = wait::in_slices(py, timeout, |slice| match self.is_closed() {
            true => Ok(None),
            false => attempt(slice).map(Some),
        });
        self.unless_closed(py, waited?)
    }

    /// Waits as [`wait::for_turn`] does. Closing the object ends the wait.
    pub(crate) fn for_turn<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        take: impl FnOnce(Wait<'_>) -> partywall::Result<R> + Send,
    ) -> PyResult<R> {
        wait::for_turn(py, timeout, |py| self.check(py), take)
    }

    /// Raises if the object is closed.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.unless_closed(py, (!self.is_closed()).then_some(()))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }
}

/// Whether an object is closed, for the waits of objects that were made by it and may outlive it.
#[derive(Clone)]
pub(crate) struct Closing {
    what: &'static str,
    is_closed: Arc<AtomicBool>,
}

/// A wait of such an object. Closing the other object ends it, unless it began after that.
pub(crate) struct Ending<'a> {
    closing: &'a Closing,
    was_open: bool,
}

impl Closing {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, is_closed: Arc::default() }
    }

    /// Ends the waits that have begun.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Begins a wait.
    pub(crate) fn begin(&self) -> Ending<'_> {
        Ending { closing: self, was_open: self.is_open() }
    }

    /// Returns whether the object is open.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    /// Raises if the object is closed.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_open() { Ok(()) } else { Err(closed(py, self.what)) }
    }
}

impl Ending<'_> {
    /// Returns whether the wait is to end.
    pub(crate) fn is_over(&self) -> bool {
        self.was_open && !self.closing.is_open()
    }

    /// Raises if the wait is to end.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_over() { Err(closed(py, self.closing.what)) } else { Ok(()) }
    }
}

/// An object of the library until it is closed. The reaper releases an object that was dropped without a close: the
/// release may have to wait for a broker or for threads, and Python drops objects in the middle of anything.
pub(crate) struct Handle<T: Send + 'static>(Closable<T>);

impl<T: Send + 'static> Handle<T> {
    pub(crate) fn new(what: &'static str, object: T) -> Self {
        Self(Closable::new(what, object))
    }

    /// Releases the object now. Calling it again does nothing.
    pub(crate) fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let object = self.lock().take();
            drop(object);
        });
    }
}

impl<T: Send + 'static> Deref for Handle<T> {
    type Target = Closable<T>;

    fn deref(&self) -> &Closable<T> {
        &self.0
    }
}

impl<T: Send + 'static> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(object) = self.lock().take() {
            reaper::later(move || drop(object));
        }
    }
}
