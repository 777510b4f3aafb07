//! Subscribers of topics.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use partywall::{Error, info};
use partywall_os::lock::IgnorePoison;
use pyo3::prelude::*;

use crate::{
    errors::Raise,
    handle::{Closable, Handle},
    owner::Owner,
    reaper,
    sample::Sample,
    topic::OpenTopic,
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

/// A subscriber of a topic.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Subscriber {
    inner: Closable<Receiver>,
    /// Samples that were received by a wait that ended before they were complete, in order. They are received next.
    unfinished: Mutex<VecDeque<Arc<Owner>>>,
    #[pyo3(get)]
    topic: String,
    #[pyo3(get)]
    id: u64,
}

#[derive(Clone)]
struct Receiver {
    subscriber: Arc<partywall::Subscriber>,
    open: OpenTopic,
}

impl Subscriber {
    pub(crate) fn new(subscriber: partywall::Subscriber, open: OpenTopic) -> Self {
        let topic = subscriber.topic().to_owned();
        let id = subscriber.id();
        let receiver = Receiver { subscriber: Arc::new(subscriber), open };
        Self { inner: Closable::new("subscriber", receiver), unfinished: Mutex::default(), topic, id }
    }

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
    /// Receives the next sample, and waits for one; with `complete`, also until it is complete. If the wait ends first,
    /// by its timeout or a signal, the next call receives this sample.
    fn recv<'py>(&self, py: Python<'py>, timeout: Option<f64>, complete: bool) -> PyResult<Bound<'py, Sample>> {
        let receiver = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let start = Instant::now();
        let owner = self.next(py, &receiver, timeout)?;
        let received = Sample::of(py, owner, receiver.open)?;
        if !complete {
            return Ok(received);
        }
        let left = timeout.saturating_sub(start.elapsed());
        let waited = received.get().complete(py, left, || self.inner.is_closed());
        let waited = waited.and_then(|complete| self.inner.unless_closed(py, complete));
        if waited.is_err() && received.get().may_come(py) {
            self.give_up(received.get());
        }
        waited.map(|()| received)
    }

    /// Receives the next sample, complete or not, if there is one.
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
    fn give_up(&self, sample: &Sample) {
        // Closing drops the samples that were put back before.
        let receiver = self.inner.lock();
        let Some(Receiver { subscriber, .. }) = &*receiver else { return };
        let mut unfinished = self.unfinished();
        unfinished.extend(sample.take());
        subscriber.set_pending(!unfinished.is_empty());
    }

    /// The number in this process of the GPU whose streams use the samples; `None` for host memory. Pinned memory is
    /// used on a GPU from then on.
    fn ordinal(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.inner.get(py)?.open.gpu(py)?.map(|gpu| gpu.context().device().ordinal()))
    }

    /// Returns the error of a wait that has ended after a number of seconds.
    fn late(&self, py: Python<'_>, after: f64) -> PyResult<()> {
        let what = format!("no sample of topic {:?} was published", self.topic);
        Err(Error::Timeout { what, after: wait::timeout(Some(after))? }).or_raise(py)
    }

    /// A file descriptor that is readable while `try_recv` would return a sample or raise.
    fn event(&self, py: Python<'_>) -> PyResult<SubscriberEvent> {
        let receiver = self.inner.get(py)?;
        let event = py.detach(|| receiver.subscriber.event()).or_raise(py)?;
        Ok(SubscriberEvent { event: Handle::new("event", Arc::new(event)) })
    }

    /// Counts the samples that were received, missed, not yet received, and held; then the ages of those received, in
    /// nanoseconds: their number, median, 99th percentile and maximum.
    fn stats(&self, py: Python<'_>) -> PyResult<SubscriberStats> {
        let stats = self.inner.get(py)?.subscriber.stats();
        let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
        let info::Ages { count, p50, p99, max, .. } = stats.ages;
        let ages = Ages { count, p50: seconds(p50), p99: seconds(p99), max: seconds(max) };
        Ok(SubscriberStats { received: stats.received, dropped: stats.dropped, lag: stats.lag, held: stats.held, ages })
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Removes the subscriber from the topic. Samples stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let receiver = self.inner.lock().take();
        let unfinished = std::mem::take(&mut *self.unfinished());
        py.detach(|| {
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
