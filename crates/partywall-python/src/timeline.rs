//! Timelines, and descriptors that signal their values.

use std::{
    ops::Deref,
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use partywall::{
    DeviceUuid, Error, TimelineEnding, TimelineWriter,
    cuda::{RawStream, StreamRef},
    error::Gone,
};
use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{
    arguments::Name,
    domain::Domain,
    errors::{Raise, not_writer},
    handle::Handle,
    stream::{Stream, gpu},
    wait,
};

/// A handle on a timeline, which waits, or also signals.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Timeline {
    role: Handle<Role>,
    /// The stream that signalled last; `None` if the host did.
    last: Mutex<Option<(DeviceUuid, RawStream)>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    is_writer: bool,
}

#[derive(Clone)]
pub(crate) enum Role {
    Waiter(Arc<partywall::Timeline>),
    Writer(Arc<TimelineWriter>),
}

impl Deref for Role {
    type Target = partywall::Timeline;

    fn deref(&self) -> &partywall::Timeline {
        match self {
            Self::Waiter(timeline) => timeline,
            Self::Writer(writer) => writer.timeline(),
        }
    }
}

impl Timeline {
    pub(crate) fn role(&self, py: Python<'_>) -> PyResult<Role> {
        self.role.get(py)
    }

    /// Locks the record of the stream that signalled last.
    fn last(&self) -> MutexGuard<'_, Option<(DeviceUuid, RawStream)>> {
        self.last.lock().ignore_poison()
    }

    pub(crate) fn writer(&self, py: Python<'_>) -> PyResult<Arc<TimelineWriter>> {
        match self.role(py)? {
            Role::Writer(writer) => Ok(writer),
            Role::Waiter(_) => Err(not_writer(py, &self.name)),
        }
    }

    /// Enqueues work on a stream, once the former stream's signals have arrived.
    fn enqueue(
        &self,
        py: Python<'_>,
        device: &str,
        stream: Option<u64>,
        enqueue: impl FnOnce(&TimelineWriter, StreamRef<'_>) -> partywall::Result<()> + Send,
    ) -> PyResult<()> {
        let writer = self.writer(py)?;
        let stream = Stream::find(py, writer.timeline().domain(), device, stream)?;
        self.take_turns(py, &writer, Some(stream.id()))?;
        py.detach(|| enqueue(&writer, stream.borrow())).or_raise(py)?;
        self.signalled_on(stream.id());
        Ok(())
    }

    /// Notes the stream that signalled last.
    pub(crate) fn signalled_on(&self, stream: (DeviceUuid, RawStream)) {
        *self.last() = Some(stream);
    }

    /// Waits for the promised values of the stream that signalled last, unless `next` is the same stream. The library
    /// would wait, too, but ignores signals of the process.
    pub(crate) fn take_turns(
        &self,
        py: Python<'_>,
        writer: &TimelineWriter,
        next: Option<(DeviceUuid, RawStream)>,
    ) -> PyResult<()> {
        let last = *self.last();
        let owed = writer.timeline().announced();
        if last.is_none() || last == next || writer.timeline().value() >= owed {
            return Ok(());
        }
        wait::in_slices(py, TURN, |slice| match writer.timeline().wait(owed, slice) {
            // The signal that follows reports this error.
            Err(Error::Gone(Gone::Timeline { .. })) => Ok(()),
            waited => waited,
        })
    }
}

#[pymethods]
impl Timeline {
    /// Opens a timeline, to wait for it, or also to signal it.
    #[staticmethod]
    fn open(py: Python<'_>, domain: &Domain, name: Name, writer: bool, shared: bool) -> PyResult<Self> {
        let options = domain.get(py)?.timeline_options(&name.0).shared(shared);
        let open = || match writer {
            true => options.writer().map(|writer| Role::Writer(Arc::new(writer))),
            false => options.open().map(|timeline| Role::Waiter(Arc::new(timeline))),
        };
        let role = py.detach(open).or_raise(py)?;
        let name = role.name().to_owned();
        Ok(Self { role: Handle::new("timeline", role), last: Mutex::new(None), name, is_writer: writer })
    }

    /// The last value that was signalled.
    #[getter]
    fn value(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.role(py)?.value())
    }

    /// The highest value that was promised.
    #[getter]
    fn announced(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.role(py)?.announced())
    }

    /// Why no further value will come; `None` while one may.
    #[getter]
    fn ending(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(self.role(py)?.ending().map(TimelineEnding::name))
    }

    /// Signals a value from the host.
    fn signal(&self, py: Python<'_>, value: u64) -> PyResult<()> {
        let writer = self.writer(py)?;
        self.take_turns(py, &writer, None)?;
        py.detach(|| writer.signal(value)).or_raise(py)?;
        *self.last() = None;
        Ok(())
    }

    /// Has a stream signal a value behind its work.
    fn signal_on(&self, py: Python<'_>, value: u64, device: &str, stream: Option<u64>) -> PyResult<()> {
        self.enqueue(py, device, stream, |writer, stream| writer.signal_on(stream, value))
    }

    /// Has a stream signal a value behind its work, and wakes waiting hosts.
    fn signal_on_and_wake(&self, py: Python<'_>, value: u64, device: &str, stream: Option<u64>) -> PyResult<()> {
        self.enqueue(py, device, stream, |writer, stream| writer.signal_on_and_wake(stream, value))
    }

    /// Declares that a kernel, which is already on a stream, will store a value.
    fn promise_on(&self, py: Python<'_>, value: u64, device: &str, stream: Option<u64>) -> PyResult<()> {
        self.enqueue(py, device, stream, |writer, stream| writer.promise_on(stream, value))
    }

    /// Declares that later values rest on the values that another handle waits for.
    fn rests_on(&self, py: Python<'_>, input: &Self) -> PyResult<()> {
        let writer = self.writer(py)?;
        let input = input.role(py)?;
        py.detach(|| writer.rests_on(&input));
        Ok(())
    }

    /// Waits until a value is reached.
    fn wait(&self, py: Python<'_>, value: u64, timeout: Option<f64>) -> PyResult<()> {
        self.role.wait(py, timeout, |timeline, slice| timeline.wait(value, slice))
    }

    /// Waits until a value is promised.
    fn wait_announced(&self, py: Python<'_>, value: u64, timeout: Option<f64>) -> PyResult<()> {
        self.role.wait(py, timeout, |timeline, slice| timeline.wait_announced(value, slice))
    }

    /// Has a stream wait for a value.
    fn wait_on(&self, py: Python<'_>, value: u64, device: &str, stream: Option<u64>) -> PyResult<()> {
        let role = self.role(py)?;
        let stream = Stream::find(py, role.domain(), device, stream)?;
        py.detach(|| role.wait_on(stream.borrow(), value)).or_raise(py)
    }

    /// Has a stream wait for a value, for at most a number of seconds.
    fn wait_on_for(
        &self,
        py: Python<'_>,
        value: u64,
        device: &str,
        stream: Option<u64>,
        limit: f64,
    ) -> PyResult<LimitedWait> {
        let role = self.role(py)?;
        let limit = wait::timeout(Some(limit))?;
        let stream = Stream::find(py, role.domain(), device, stream)?;
        let wait = py.detach(|| role.wait_on_for(stream.borrow(), value, limit)).or_raise(py)?;
        Ok(LimitedWait { wait: Handle::new("wait", wait) })
    }

    /// Returns a file descriptor that is readable once a value is reached or can no longer be.
    fn event(&self, py: Python<'_>, value: u64) -> PyResult<TimelineEvent> {
        let role = self.role(py)?;
        let event = py.detach(|| role.event(value)).or_raise(py)?;
        Ok(TimelineEvent { event: Handle::new("event", event), name: self.name.clone(), value })
    }

    /// Raises if a value that this handle waited for is not valid.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.role(py)?.check().or_raise(py)
    }

    /// Follows the next writer. Returns whether there is one.
    fn follow(&self, py: Python<'_>) -> PyResult<bool> {
        let role = self.role(py)?;
        py.detach(|| role.follow()).or_raise(py)
    }

    /// Ends all waits for values that are not reached.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let role = self.role(py)?;
        py.detach(|| role.abandon()).or_raise(py)
    }

    /// The address at which kernels on a GPU read the value.
    fn device_ptr(&self, py: Python<'_>, device: &str) -> PyResult<u64> {
        let role = self.role(py)?;
        let gpu = gpu(py, role.domain(), device)?;
        py.detach(|| role.device_ptr(&gpu)).or_raise(py)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.role.is_closed()
    }

    /// Raises if `close` was called.
    fn require_open(&self, py: Python<'_>) -> PyResult<()> {
        self.role.check(py)
    }

    /// Closes the handle; a writer's handle closes the timeline. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.role.close(py);
    }
}

/// A wait of a stream with a time limit.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct LimitedWait {
    wait: Handle<partywall::LimitedWait>,
}

#[pymethods]
impl LimitedWait {
    /// Raises if the stream went on without the value: `TimeoutError`, or as `Timeline.check`. `False` as long as it
    /// waits.
    fn check(&self, py: Python<'_>) -> PyResult<bool> {
        let outcome = self.wait.lock().as_ref().and_then(partywall::LimitedWait::outcome);
        match outcome {
            None => Ok(false),
            Some(outcome) => outcome.or_raise(py).map(|()| true),
        }
    }
}

/// A file descriptor that signals a value.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct TimelineEvent {
    event: Handle<partywall::TimelineEvent>,
    name: String,
    #[pyo3(get)]
    value: u64,
}

#[pymethods]
impl TimelineEvent {
    /// The descriptor, to be polled for reading.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let descriptor = self.event.lock().as_ref().map(|event| event.as_fd().as_raw_fd());
        self.event.unless_closed(py, descriptor)
    }

    /// Raises if the value will not be reached. Returns `False` while that is undecided.
    fn check(&self, py: Python<'_>) -> PyResult<bool> {
        let outcome = self.event.lock().as_ref().map(partywall::TimelineEvent::outcome);
        match self.event.unless_closed(py, outcome)? {
            None => Ok(false),
            Some(outcome) => outcome.or_raise(py).map(|()| true),
        }
    }

    /// Checks as `check` does, at the end of a wait of `after` seconds: an undecided value is an error.
    fn give_up(&self, py: Python<'_>, after: f64) -> PyResult<()> {
        if self.check(py)? {
            return Ok(());
        }
        let what = format!("value {} of timeline {:?} was not reached", self.value, self.name);
        Err(Error::Timeout { what, after: wait::timeout(Some(after))? }).or_raise(py)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.event.is_closed()
    }

    /// Closes the descriptor. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.event.close(py);
    }
}

/// How long a change of streams waits for the former stream's signals, as in the library.
const TURN: Duration = Duration::from_secs(10);
