//! Subscribers of topics.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use partywall::{Error, Place, Policy, WhenSome, info, near::did_you_mean};
use partywall_os::lock::IgnorePoison;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    arguments::{Number, Optional},
    errors::Raise,
    handle::{Closable, Handle},
    owner::Owner,
    reaper,
    sample::Sample,
    stream::{self, Stream},
    topic::{OpenTopic, Topic},
    value::value,
    wait,
};

value! {
    /// Counts of a subscriber.
    SubscriberStats, "partywall._topic", "SubscriberStats", {
        received: u64, dropped: u64, lag: u64, held: u32, ages: Ages,
    }
}

value! {
    /// Ages of samples in seconds.
    Ages, "partywall._topic", "Ages", {
        count: u64, p50: f64, p99: f64, max: f64,
    }
}

/// The compiled part of `partywall.Subscriber`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Subscriber {
    inner: Closable<Receiver>,
    /// Samples that were received by a wait that ended before they were complete, in order. They are received next.
    unfinished: Mutex<VecDeque<Arc<Owner>>>,
    /// The descriptor that `fileno` returns, once it was asked for.
    event: Mutex<Option<partywall::SubscriberEvent>>,
    /// Whether streams wait for samples rather than hosts.
    #[pyo3(get, name = "_by_streams")]
    by_streams: bool,
    /// The topic's name.
    #[pyo3(get)]
    topic: String,
    /// Its number, which no other publisher or subscriber of the topic ever has.
    #[pyo3(get)]
    id: u64,
}

#[derive(Clone)]
struct Receiver {
    subscriber: Arc<partywall::Subscriber>,
    open: OpenTopic,
}

impl Subscriber {
    fn unfinished(&self) -> MutexGuard<'_, VecDeque<Arc<Owner>>> {
        self.unfinished.lock().ignore_poison()
    }

    /// Returns the next of the samples that were received before.
    fn take_unfinished(&self, receiver: &Receiver) -> Option<Arc<Owner>> {
        let mut unfinished = self.unfinished();
        let owner = unfinished.pop_front()?;
        receiver.subscriber.set_pending(!unfinished.is_empty());
        Some(owner)
    }

    /// Returns the next sample, complete or not.
    fn next(&self, py: Python<'_>, receiver: &Receiver, timeout: Duration) -> PyResult<Arc<Owner>> {
        if let Some(owner) = self.take_unfinished(receiver) {
            return Ok(owner);
        }
        let received = self.inner.for_turn(py, timeout, |wait| receiver.subscriber.recv(wait));
        let sample = self.unless_closed(py, received)?;
        Ok(Owner::of_sample(sample, receiver.open.topic.place(), receiver.subscriber.clone()))
    }

    /// Replaces an error by `Closed` if the subscriber was closed meanwhile.
    fn unless_closed<T>(&self, py: Python<'_>, outcome: PyResult<T>) -> PyResult<T> {
        outcome.map_err(|error| self.inner.check(py).err().unwrap_or(error))
    }
}

#[pymethods]
impl Subscriber {
    /// Adds a subscriber to a topic.
    #[new]
    fn new(
        py: Python<'_>,
        topic: &Topic,
        policy: &str,
        history: Option<Number>,
        queue: Option<Number>,
        order: &str,
        until: Option<&str>,
    ) -> PyResult<Self> {
        if let Some(until) = until.filter(|until| *until != "idle") {
            let why = format!("'{until}' is not a value of until: use until='idle', or leave it out");
            return Err(PyValueError::new_err(why));
        }
        let by_streams = order == "stream";
        if !by_streams && order != "host" {
            let why = format!("'{order}' is not a value of order: use 'host' or 'stream'");
            return Err(PyValueError::new_err(why));
        }
        let policy = match policy {
            "block" => Policy::Block,
            "drop-oldest" => Policy::DropOldest,
            "latest" => Policy::Latest,
            other => {
                let meant = did_you_mean(["block", "drop-oldest", "latest"], other);
                let why = format!("{other:?} is no policy: say \"block\", \"drop-oldest\" or \"latest\"{meant}");
                return Err(PyValueError::new_err(why));
            }
        };
        let open = topic.open(py)?;
        match open.topic.place() {
            Place::Host if by_streams => {
                let why = "samples in host memory are always ordered by hosts: leave order out";
                return Err(PyValueError::new_err(why));
            }
            Place::Pinned(_) if !by_streams => {}
            // Reports a GPU that this process cannot use.
            _ => drop(open.gpu(py)?),
        }
        // Reading the clock is a small part of what receiving costs in Python.
        let options = open.topic.subscribe(policy).until_idle(until.is_some()).measure_ages(true);
        let options = options
            .when_some(history, |options, Number(history)| options.history(history))
            .when_some(queue, |options, Number(queue)| options.queue(queue));
        let subscriber = py.detach(|| options.join()).or_raise(py)?;
        Ok(Self {
            topic: subscriber.topic().to_owned(),
            id: subscriber.id(),
            inner: Closable::new("subscriber", Receiver { subscriber: Arc::new(subscriber), open }),
            unfinished: Mutex::default(),
            event: Mutex::default(),
            by_streams,
        })
    }

    /// Receives the next sample. Waits for it up to `timeout` seconds, or for ever.
    ///
    /// By default the returned sample is complete. If it is not complete in time, the next call receives it. With a
    /// `stream`, or `order="stream"`, the call returns earlier, and the stream, by default the current one, waits until
    /// it is complete. A sample in pinned memory is then a tensor of the stream's GPU.
    #[pyo3(signature = (timeout = None, *, stream = None))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
        stream: Optional<'_, 'py>,
    ) -> PyResult<Bound<'py, Sample>> {
        let receiver = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let start = Instant::now();
        if self.by_streams || stream.is_some() {
            let Some(gpu) = receiver.open.gpu(py)?.cloned() else {
                let why = "samples in host memory are always ordered by hosts: leave stream out";
                return Err(PyValueError::new_err(why));
            };
            // Resolved first, so that an invalid stream loses no sample.
            let raw = stream::named(py, stream, gpu.context().device().ordinal() as i32)?;
            let received = Sample::of(py, self.next(py, &receiver, timeout)?, receiver.open)?;
            received.get().order(py, &Stream::of(gpu, Some(raw.0)))?;
            return Ok(received);
        }
        let owner = self.next(py, &receiver, timeout)?;
        let received = Sample::of(py, owner, receiver.open)?;
        let left = timeout.saturating_sub(start.elapsed());
        let waited = received.get().complete(py, left, || self.inner.is_closed());
        let waited = waited.and_then(|complete| self.inner.unless_closed(py, complete));
        if waited.is_err() && received.get().may_come(py) {
            self.give_up(received.get());
        }
        waited.map(|()| received)
    }

    /// Receives the next sample, complete or not, and waits for one.
    fn _recv<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Bound<'py, Sample>> {
        let receiver = self.inner.get(py)?;
        let owner = self.next(py, &receiver, wait::timeout(Some(timeout))?)?;
        Sample::of(py, owner, receiver.open)
    }

    /// Returns the next sample, or `None` if there is none.
    ///
    /// On a GPU the publisher's stream may still write the sample: call `Sample.wait` or `Sample.wait_on` before you
    /// take its arrays.
    fn try_recv<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, Sample>>> {
        let receiver = self.inner.get(py)?;
        if let Some(owner) = self.take_unfinished(&receiver) {
            return Sample::of(py, owner, receiver.open).map(Some);
        }
        let received = receiver.subscriber.try_recv().or_raise(py);
        let Some(sample) = self.unless_closed(py, received)? else { return Ok(None) };
        let owner = Owner::of_sample(sample, receiver.open.topic.place(), receiver.subscriber);
        Sample::of(py, owner, receiver.open).map(Some)
    }

    /// Puts back a received sample whose wait has ended: it is received next.
    #[pyo3(name = "_give_up")]
    fn give_up(&self, sample: &Sample) {
        // Closing drops the samples that were put back before.
        let receiver = self.inner.lock();
        let Some(Receiver { subscriber, .. }) = &*receiver else { return };
        let mut unfinished = self.unfinished();
        unfinished.extend(sample.take());
        subscriber.set_pending(!unfinished.is_empty());
    }

    /// Raises the error of a wait that has ended after a number of seconds.
    fn _late(&self, py: Python<'_>, after: f64) -> PyResult<()> {
        let what = format!("no sample of topic {:?} was published", self.topic);
        Err(Error::Timeout { what, after: wait::timeout(Some(after))? }).or_raise(py)
    }

    /// Returns a file descriptor for event loops, readable while `try_recv` would return a sample or raise.
    ///
    /// The subscriber owns it. A sample makes it readable within a millisecond or so; the call that takes the last one,
    /// whichever it is, makes it unreadable. Threads that wake up for the same sample compete for it, and those that
    /// find none wait again.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let receiver = self.inner.get(py)?;
        let mut event = self.event.lock().ignore_poison();
        let event = match &*event {
            Some(event) => event,
            None => event.insert(receiver.subscriber.event().or_raise(py)?),
        };
        Ok(event.as_fd().as_raw_fd())
    }

    /// Returns a further descriptor of that kind.
    fn _event(&self, py: Python<'_>) -> PyResult<SubscriberEvent> {
        let receiver = self.inner.get(py)?;
        let event = py.detach(|| receiver.subscriber.event()).or_raise(py)?;
        Ok(SubscriberEvent { event: Handle::new("event", Arc::new(event)) })
    }

    /// Returns the state of the subscriber.
    fn stats(&self, py: Python<'_>) -> PyResult<SubscriberStats> {
        let stats = self.inner.get(py)?.subscriber.stats();
        let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
        let info::Ages { count, p50, p99, max, .. } = stats.ages;
        let ages = Ages { count, p50: seconds(p50), p99: seconds(p99), max: seconds(max) };
        Ok(SubscriberStats { received: stats.received, dropped: stats.dropped, lag: stats.lag, held: stats.held, ages })
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Detaches the subscriber, so publishers stop waiting for it. Samples stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let receiver = self.inner.lock().take();
        let unfinished = std::mem::take(&mut *self.unfinished());
        let event = self.event.lock().ignore_poison().take();
        py.detach(|| {
            drop(event);
            if let Some(receiver) = receiver {
                receiver.subscriber.detach();
            }
            drop(unfinished);
        });
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let receiver = self.inner.lock().take();
        let unfinished = std::mem::take(&mut *self.unfinished());
        if let Some(receiver) = receiver {
            // Detached now, so that publishers do not wait for it. Its samples keep the subscriber, and that keeps the
            // topic.
            receiver.subscriber.detach();
            reaper::later(move || drop((receiver, unfinished)));
        }
    }
}

/// A file descriptor that signals samples.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct SubscriberEvent {
    event: Handle<Arc<partywall::SubscriberEvent>>,
}

#[pymethods]
impl SubscriberEvent {
    /// The descriptor, to be polled for reading.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.event.get(py)?.as_fd().as_raw_fd())
    }

    /// Closes the descriptor. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.event.close(py);
    }
}
