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
    arguments::{DeviceName, Name, Optional, Value},
    domain::Connection,
    errors::{Raise, not_writer},
    graph::GraphNode,
    handle::Handle,
    stream::{Stream, gpu},
    wait,
};

/// The compiled part of `partywall.Timeline`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Timeline {
    role: Handle<Role>,
    /// The stream that signalled last; `None` if the host did.
    last: Mutex<Option<(DeviceUuid, RawStream)>>,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// Whether this handle may signal.
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

    pub(crate) fn name(&self) -> &str {
        &self.name
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
        find: impl FnOnce(&partywall::Domain) -> PyResult<Stream>,
        enqueue: impl FnOnce(&TimelineWriter, StreamRef<'_>) -> partywall::Result<()> + Send,
    ) -> PyResult<()> {
        let writer = self.writer(py)?;
        let stream = find(writer.timeline().domain())?;
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
    #[new]
    fn new(py: Python<'_>, domain: Connection<'_>, name: Name, writer: bool, shared: bool) -> PyResult<Self> {
        let options = domain.get(py)?.timeline_options(&name.0).shared(shared);
        let open = || match writer {
            true => options.writer().map(|writer| Role::Writer(Arc::new(writer))),
            false => options.open().map(|timeline| Role::Waiter(Arc::new(timeline))),
        };
        let role = py.detach(open).or_raise(py)?;
        let name = role.name().to_owned();
        Ok(Self { role: Handle::new("timeline", role), last: Mutex::new(None), name, is_writer: writer })
    }

    /// The last signalled value.
    #[getter]
    fn value(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.role(py)?.value())
    }

    /// The highest promised value; at least `value`.
    #[getter]
    fn announced(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.role(py)?.announced())
    }

    /// Why no further value will be signalled; `None` as long as a value may be signalled.
    ///
    /// `owner_died`, `owner_faulted`, `closed`, `abandoned`, `broker_gone` or `evicted`.
    #[getter]
    fn ending(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        Ok(self.role(py)?.ending().map(TimelineEnding::name))
    }

    /// Signals a value, which must be greater than all before. Waiters see all earlier writes of this thread.
    ///
    /// If a stream has not yet stored a promised value, first waits for that stream, for at most 10 seconds.
    fn signal(&self, py: Python<'_>, value: Value) -> PyResult<()> {
        let writer = self.writer(py)?;
        self.take_turns(py, &writer, None)?;
        py.detach(|| writer.signal(value.0)).or_raise(py)?;
        *self.last() = None;
        Ok(())
    }

    /// Enqueues a signal on a stream, after all work that is on the stream now. Returns immediately.
    ///
    /// If another stream has not yet stored a promised value, first waits for that stream, for at most 10 seconds.
    #[pyo3(signature = (value, stream = None, *, device = None))]
    fn signal_on(
        &self,
        py: Python<'_>,
        value: Value,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
    ) -> PyResult<()> {
        let call = || format!("signal({})", value.0);
        let find = |domain: &_| Stream::or_host(py, domain, stream, device, call);
        self.enqueue(py, find, |writer, stream| writer.signal_on(stream, value.0))
    }

    /// As `signal_on`, but wakes sleeping hosts as soon as the value is reached, not up to a millisecond later.
    ///
    /// A host function that is enqueued after the signal wakes them; it occupies the stream for tens of microseconds.
    #[pyo3(signature = (value, stream = None, *, device = None))]
    fn signal_on_and_wake(
        &self,
        py: Python<'_>,
        value: Value,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
    ) -> PyResult<()> {
        let call = || format!("signal({})", value.0);
        let find = |domain: &_| Stream::or_host(py, domain, stream, device, call);
        self.enqueue(py, find, |writer, stream| writer.signal_on_and_wake(stream, value.0))
    }

    /// Declares that your kernel, which is already on a stream, will store `value` at `device_ptr`, and no value
    /// before.
    ///
    /// Without this call, sleeping hosts see the value up to 100 ms late.
    #[pyo3(signature = (value, stream = None, *, device = None))]
    fn promise_on(
        &self,
        py: Python<'_>,
        value: Value,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
    ) -> PyResult<()> {
        let find = |domain: &_| Stream::at(py, domain, stream, device);
        self.enqueue(py, find, |writer, stream| writer.promise_on(stream, value.0))
    }

    /// Declares that all values from now on depend on the given timelines, as waited for through these handles.
    ///
    /// If one of those timelines fails, waiters of this timeline get `Tainted`.
    #[pyo3(signature = (*timelines: "Timeline"))]
    fn rests_on(&self, py: Python<'_>, timelines: Vec<Bound<'_, Self>>) -> PyResult<()> {
        let writer = self.writer(py)?;
        for timeline in timelines {
            let input = timeline.get().role(py)?;
            py.detach(|| writer.rests_on(&input));
        }
        Ok(())
    }

    /// Waits up to `timeout` seconds, or for ever, until the timeline has reached `value`.
    #[pyo3(signature = (value, timeout = None))]
    fn wait(&self, py: Python<'_>, value: Value, timeout: Option<f64>) -> PyResult<()> {
        self.role.wait(py, timeout, |timeline, slice| timeline.wait(value.0, slice))
    }

    /// Waits until `value` is promised, which means that its work is enqueued. A `wait_on` or `wait` after that is
    /// short.
    #[pyo3(signature = (value, timeout = None))]
    fn wait_announced(&self, py: Python<'_>, value: Value, timeout: Option<f64>) -> PyResult<()> {
        self.role.wait(py, timeout, |timeline, slice| timeline.wait_announced(value.0, slice))
    }

    /// Makes work that is enqueued on a stream from now on wait until the timeline has reached `value`. Returns
    /// immediately.
    ///
    /// Load kernels, launch them once and allocate memory before a stream waits: while a stream waits, CUDA may block
    /// these calls until the wait ends. With a `limit` the stream continues after at most that many seconds, and the
    /// returned `LimitedWait` tells how the wait ended. A thread of this process polls such a wait, so it ends up to a
    /// millisecond later than a wait without a limit.
    #[pyo3(signature = (value, stream = None, *, limit = None, device = None))]
    fn wait_on(
        &self,
        py: Python<'_>,
        value: Value,
        stream: Optional<'_, '_>,
        limit: Option<f64>,
        device: Optional<'_, '_>,
    ) -> PyResult<Option<LimitedWait>> {
        let role = self.role(py)?;
        let limit = limit.map(|limit| wait::timeout(Some(limit))).transpose()?;
        let stream = Stream::or_host(py, role.domain(), stream, device, || format!("wait({})", value.0))?;
        let Some(limit) = limit else {
            return py.detach(|| role.wait_on(stream.borrow(), value.0)).or_raise(py).map(|()| None);
        };
        let wait = py.detach(|| role.wait_on_for(stream.borrow(), value.0, limit)).or_raise(py)?;
        Ok(Some(LimitedWait { wait: Handle::new("wait", wait) }))
    }

    /// Adds a wait to the CUDA graph that a stream is being captured into, behind the work captured so far.
    ///
    /// `partywall.launch` says at each launch which value it waits for. Raises `BadGraph` unless the stream is being
    /// captured.
    #[pyo3(signature = (stream = None, *, device = None))]
    fn capture_wait(slf: Bound<'_, Self>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<GraphNode> {
        GraphNode::capture(slf, false, stream, device)
    }

    /// Adds a signal to the CUDA graph that a stream is being captured into, behind the work captured so far.
    ///
    /// `partywall.launch` says at each launch which value it signals. Raises `BadGraph` unless the stream is being
    /// captured, and `NotWriter` unless this is the timeline's writer.
    #[pyo3(signature = (stream = None, *, device = None))]
    fn capture_signal(slf: Bound<'_, Self>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<GraphNode> {
        GraphNode::capture(slf, true, stream, device)
    }

    /// Raises `TimelineEnded` or `Tainted` if a value that was waited for through this handle is known to be invalid.
    ///
    /// Call it when the work that a stream did after a wait is done, before you use the results.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.role(py)?.check().or_raise(py)
    }

    /// Follows the next writer after the last one has died or closed. Returns `False` if there is none yet.
    fn follow(&self, py: Python<'_>) -> PyResult<bool> {
        let role = self.role(py)?;
        py.detach(|| role.follow()).or_raise(py)
    }

    /// Ends the waits of all processes for values that were not reached. The writer must open the timeline again.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let role = self.role(py)?;
        py.detach(|| role.abandon()).or_raise(py)
    }

    /// Returns the address of the value, 8 bytes, for kernels on a GPU that read or store it. See docs/ordering.md.
    #[pyo3(signature = (device = DeviceName("cuda".to_owned())), text_signature = "($self, device='cuda')")]
    fn device_ptr(&self, py: Python<'_>, device: DeviceName) -> PyResult<u64> {
        let role = self.role(py)?;
        let gpu = gpu(py, role.domain(), &device.0)?;
        py.detach(|| role.device_ptr(&gpu)).or_raise(py)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.role.is_closed()
    }

    /// Raises if it is closed.
    #[pyo3(name = "_require_open")]
    fn require_open(&self, py: Python<'_>) -> PyResult<()> {
        self.role.check(py)
    }

    /// Closes the handle. Calling it again does nothing.
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

/// The compiled part of `partywall.TimelineEvent`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct TimelineEvent {
    event: Handle<partywall::TimelineEvent>,
    name: String,
    #[pyo3(get, name = "_value")]
    value: u64,
}

#[pymethods]
impl TimelineEvent {
    #[new]
    fn new(py: Python<'_>, timeline: &Timeline, value: Value) -> PyResult<Self> {
        let role = timeline.role(py)?;
        let event = py.detach(|| role.event(value.0)).or_raise(py)?;
        Ok(Self { event: Handle::new("event", event), name: timeline.name.clone(), value: value.0 })
    }

    /// Returns the descriptor, which this object owns.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let descriptor = self.event.lock().as_ref().map(|event| event.as_fd().as_raw_fd());
        self.event.unless_closed(py, descriptor)
    }

    /// Returns whether the value is reached. Raises as `Timeline.wait` does if the value can no longer be reached.
    fn check(&self, py: Python<'_>) -> PyResult<bool> {
        let outcome = self.event.lock().as_ref().map(partywall::TimelineEvent::outcome);
        match self.event.unless_closed(py, outcome)? {
            None => Ok(false),
            Some(outcome) => outcome.or_raise(py).map(|()| true),
        }
    }

    /// Checks as `check` does, at the end of a wait of `after` seconds: an undecided value is an error.
    #[pyo3(name = "_give_up")]
    fn give_up(&self, py: Python<'_>, after: f64) -> PyResult<()> {
        if self.check(py)? {
            return Ok(());
        }
        let what = format!("value {} of timeline {:?} was not reached", self.value, self.name);
        Err(Error::Timeout { what, after: wait::timeout(Some(after))? }).or_raise(py)
    }

    /// Whether it is closed.
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
