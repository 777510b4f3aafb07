//! Events of names.

use std::time::Duration;

use partywall::{
    Error, WatchEvent,
    info::{NameEvent, Point},
};
use pyo3::prelude::*;

use crate::{
    arguments::Pattern,
    domain::Connection,
    errors::{Raise, parse},
    handle::Handle,
    value::value,
    wait,
};

/// Pause between two slices of a wait, in which other threads can lock the watch.
const TURN: Duration = Duration::from_millis(1);

/// The compiled part of `partywall.Watch`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Watch {
    watch: Handle<partywall::Watch>,
    /// The pattern.
    #[pyo3(get)]
    pattern: String,
}

value! {
    /// An event.
    #[derive(Default)]
    Happening, "partywall._watch", "Event", {
        event: &'static str, named: Option<&'static str>, name: Option<String>, version: Option<u64>,
        nbytes: Option<u64>, pid: Option<u32>, at: Option<f64>, missed: Option<u64>, point: String,
    }
}

#[pymethods]
impl Watch {
    #[new]
    fn new(py: Python<'_>, domain: Connection<'_>, pattern: Pattern, after: Option<&str>) -> PyResult<Self> {
        let domain = domain.get(py)?;
        let after: Option<Point> = after.map(parse).transpose()?;
        let begin = || match after {
            None => domain.watch(&pattern.0),
            Some(point) => domain.watch_after(&pattern.0, point),
        };
        let watch = py.detach(begin).or_raise(py)?;
        Ok(Self { watch: Handle::new("watch", watch), pattern: pattern.0.to_string() })
    }

    /// Returns the next event. Waits for it up to `timeout` seconds, or for ever.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Happening> {
        let next = wait::in_slices(py, wait::timeout(timeout)?, |slice| {
            let mut guard = self.watch.lock();
            let Some(watch) = guard.as_mut() else { return Ok(None) };
            if let Some(event) = watch.next(slice)? {
                return Ok(Some((event, watch.point())));
            }
            // A mutex is not fair: without a pause, a thread that wants to close the watch might never get the lock.
            drop(guard);
            std::thread::sleep(TURN);
            Err(Error::Timeout { what: format!("an event of a name like {:?}", self.pattern), after: slice })
        })?;
        let (event, point) = self.watch.unless_closed(py, next)?;
        Ok(Happening::new(event, point))
    }

    /// The point after the last returned event. A watch in any process can continue from that point.
    #[getter]
    fn point(&self, py: Python<'_>) -> PyResult<String> {
        // Another thread has the lock while it waits.
        let point = py.detach(|| self.watch.lock().as_ref().map(partywall::Watch::point));
        Ok(self.watch.unless_closed(py, point)?.to_string())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.watch.is_closed())
    }

    /// Ends the watch. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.watch.close(py);
    }
}

impl Happening {
    fn new(event: WatchEvent, point: Point) -> Self {
        let unknown = Self { event: "unknown", point: point.to_string(), ..Self::default() };
        match event {
            WatchEvent::Name(NameEvent { at, named, name, change, .. }) => Self {
                event: change.name(),
                named: Some(named.name()),
                name: Some(name),
                version: change.version().map(|(version, _)| version),
                nbytes: change.version().map(|(_, bytes)| bytes),
                pid: change.pid(),
                at: Some(at as f64 / 1e3),
                ..unknown
            },
            WatchEvent::Missed { events } => Self { event: "missed", missed: events, ..unknown },
            _ => unknown,
        }
    }
}
