//! Subscribers of topics, and the samples that they receive.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use partywall::Error;
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::{
    errors::{Raise, closed, exception},
    handle::Handle,
    owner::{Owner, let_go},
    reaper,
    stream::Stream,
    tensor::Tensor,
    topic::Open,
    wait,
};

/// Someone who receives samples.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Subscriber {
    inner: Mutex<Option<Receiver>>,
    /// Samples that were received, and given up to be waited for, in their order.
    unfinished: Mutex<VecDeque<Arc<Owner>>>,
    #[pyo3(get)]
    topic: String,
    #[pyo3(get)]
    id: u64,
}

#[derive(Clone)]
struct Receiver {
    subscriber: Arc<partywall::Subscriber>,
    open: Open,
}

impl Subscriber {
    pub(crate) fn new(subscriber: partywall::Subscriber, open: Open) -> Self {
        let (topic, id) = (subscriber.topic().to_owned(), subscriber.id());
        let receiver = Receiver { subscriber: Arc::new(subscriber), open };
        Self { inner: Mutex::new(Some(receiver)), unfinished: Mutex::default(), topic, id }
    }

    fn inner(&self, py: Python<'_>) -> PyResult<Receiver> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        inner.ok_or_else(|| closed(py, "subscriber"))
    }

    fn unfinished(&self) -> MutexGuard<'_, VecDeque<Arc<Owner>>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next sample, complete or not.
    fn next(&self, py: Python<'_>, receiver: &Receiver, timeout: Duration) -> PyResult<Arc<Owner>> {
        if let Some(owner) = self.unfinished().pop_front() {
            return Ok(owner);
        }
        let received = wait::for_turn(
            py,
            "subscriber",
            || self.closed(),
            None,
            |stop| receiver.subscriber.recv_unless(timeout, stop),
        );
        let sample = self.unless_closed(py, received)?;
        let sample = sample.ok_or_else(|| PyValueError::new_err("the interpreter ends"))?;
        Ok(Owner::of_sample(sample, receiver.subscriber.clone()))
    }

    /// Of an error after its `close`: that.
    fn unless_closed<T>(&self, py: Python<'_>, outcome: PyResult<T>) -> PyResult<T> {
        outcome.map_err(|error| if self.closed() { closed(py, "subscriber") } else { error })
    }
}

#[pymethods]
impl Subscriber {
    /// Receives the next sample, and waits for one; if so wanted, until it is complete. One that is not in time, or not before
    /// a signal, is received next.
    fn recv(&self, py: Python<'_>, timeout: Option<f64>, complete: bool) -> PyResult<Sample> {
        let (receiver, timeout, start) = (self.inner(py)?, wait::timeout(timeout)?, Instant::now());
        let owner = self.next(py, &receiver, timeout)?;
        let on_host = receiver.open.gpu.is_none();
        let received = Sample::of(py, owner, receiver.open)?;
        if !complete {
            return Ok(received);
        }
        let (_owner, sample) = received.get(py)?;
        if on_host {
            // There is nothing to wait for. It may be made of what has failed.
            sample.wait(Duration::ZERO).or_raise(py)?;
            return Ok(received);
        }
        let left = timeout.saturating_sub(start.elapsed());
        let waited = wait::in_slices(py, left, |slice| sample.wait(slice));
        if waited.is_err() && py.detach(|| matches!(sample.wait(Duration::ZERO), Ok(()) | Err(Error::Timeout { .. }))) {
            self.give_up(&received);
        }
        waited.map(|()| received)
    }

    /// Receives the next sample, complete or not, if there is one.
    fn try_recv(&self, py: Python<'_>) -> PyResult<Option<Sample>> {
        let receiver = self.inner(py)?;
        if let Some(owner) = self.unfinished().pop_front() {
            return Sample::of(py, owner, receiver.open).map(Some);
        }
        let received = receiver.subscriber.try_recv().or_raise(py);
        let Some(sample) = self.unless_closed(py, received)? else { return Ok(None) };
        Sample::of(py, Owner::of_sample(sample, receiver.subscriber), receiver.open).map(Some)
    }

    /// Gives a sample back that was received and not waited for: it is received next.
    fn give_up(&self, sample: &Sample) {
        let owner = sample.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.unfinished().extend(owner);
    }

    /// The error of a wait that has taken so many seconds.
    fn late(&self, py: Python<'_>, after: f64) -> PyResult<()> {
        let what = format!("a sample of topic {:?}", self.topic);
        Err(Error::Timeout { what, after: wait::timeout(Some(after))? }).or_raise(py)
    }

    /// A file descriptor that is readable while there is something to receive.
    fn event(&self, py: Python<'_>) -> PyResult<SubscriberEvent> {
        let receiver = self.inner(py)?;
        let event = py.detach(|| receiver.subscriber.event()).or_raise(py)?;
        Ok(SubscriberEvent { event: Handle::new(Arc::new(event)) })
    }

    /// What it has received, missed, is behind, and holds.
    fn stats(&self, py: Python<'_>) -> PyResult<(u64, u64, u64, u32)> {
        let stats = self.inner(py)?.subscriber.stats();
        Ok((stats.received, stats.dropped, stats.lag, stats.held))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Takes it out of the topic. Samples stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let receiver = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let unfinished = std::mem::take(&mut *self.unfinished());
        py.detach(|| {
            if let Some(receiver) = receiver {
                receiver.subscriber.part();
            }
            drop(unfinished);
        });
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let receiver = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let unfinished = std::mem::take(&mut *self.unfinished());
        if let Some(receiver) = receiver {
            // Nobody is to wait for it. Its samples keep the rest, and it the topic.
            receiver.subscriber.part();
            reaper::later(move || drop((receiver, unfinished)));
        }
    }
}

/// A file descriptor that tells of samples.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct SubscriberEvent {
    event: Handle<Arc<partywall::SubscriberEvent>>,
}

#[pymethods]
impl SubscriberEvent {
    /// To be polled for reading.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.event.get(py, "event")?.as_fd().as_raw_fd())
    }

    /// Makes it unreadable until there is something to receive.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.event.get(py, "event")?.clear();
        Ok(())
    }

    /// Closes the descriptor. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.event.close(py);
    }
}

/// A sample that was received.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Sample {
    /// `None` once it is let go of.
    owner: Mutex<Option<Arc<Owner>>>,
    open: Open,
    /// Where it is, once it is complete, or a stream waits until it is.
    address: OnceLock<usize>,
    #[pyo3(get)]
    topic: String,
    #[pyo3(get)]
    dtype: &'static str,
    #[pyo3(get)]
    shape: Vec<u64>,
    #[pyo3(get)]
    position: u64,
    #[pyo3(get)]
    sequence: u64,
    #[pyo3(get)]
    publisher: u64,
    #[pyo3(get)]
    missed: u64,
}

impl Sample {
    fn of(py: Python<'_>, owner: Arc<Owner>, open: Open) -> PyResult<Self> {
        let sample = owner.sample().ok_or_else(|| closed(py, "sample"))?;
        Ok(Self {
            address: OnceLock::new(),
            topic: sample.topic().to_owned(),
            dtype: sample.dtype().name(),
            shape: sample.shape().to_vec(),
            position: sample.position(),
            sequence: sample.sequence(),
            publisher: sample.publisher(),
            missed: sample.missed(),
            owner: Mutex::new(Some(owner)),
            open,
        })
    }

    /// It, with what keeps it.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<(Arc<Owner>, Arc<partywall::Sample>)> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let owner = owner.ok_or_else(|| closed(py, "sample"))?;
        let sample = owner.sample().ok_or_else(|| closed(py, "sample"))?;
        Ok((owner, sample))
    }

    /// Where it is, now that it is complete.
    fn find(&self, sample: &partywall::Sample) -> partywall::Result<usize> {
        if let Some(known) = self.address.get() {
            return Ok(*known);
        }
        let address = match sample.gpu() {
            _ if sample.is_empty() => 0,
            None => sample.bytes()?.as_ptr() as usize,
            Some(gpu) => match sample.wait(Duration::ZERO) {
                // It has nothing to wait for.
                Ok(()) => sample.device_on(gpu.stream())?.device_ptr() as usize,
                Err(Error::Timeout { .. }) => {
                    let topic = sample.topic().to_owned();
                    return Err(Error::NotReady { topic, position: sample.position() });
                }
                Err(error) => return Err(error),
            },
        };
        Ok(*self.address.get_or_init(|| address))
    }
}

#[pymethods]
impl Sample {
    /// The sample as a tensor, to be read.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Tensor> {
        let (owner, sample) = self.get(py)?;
        let address = py.detach(|| self.find(&sample)).or_raise(py)?;
        Ok(Tensor::of_sample(&owner, &sample, address))
    }

    /// Where it is, as DLPack names it.
    fn dlpack_device(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        let (owner, _sample) = self.get(py)?;
        let device = owner.device();
        Ok((device.device_type, device.device_id))
    }

    /// What its publisher has put beside it.
    #[getter]
    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let (_owner, sample) = self.get(py)?;
        Ok(PyBytes::new(py, &sample.header()))
    }

    /// Whether it is complete. Raises if it will not be.
    #[getter]
    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        let (_owner, sample) = self.get(py)?;
        match py.detach(|| sample.wait(Duration::ZERO)) {
            Ok(()) => Ok(true),
            Err(Error::Timeout { .. }) => Ok(false),
            Err(error) => Err(exception(py, &error)),
        }
    }

    /// Waits until it is complete.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (_owner, sample) = self.get(py)?;
        wait::in_slices(py, wait::timeout(timeout)?, |slice| sample.wait(slice))
    }

    /// Has a stream wait until it is complete.
    fn wait_on(&self, py: Python<'_>, stream: Option<u64>) -> PyResult<()> {
        let (owner, sample) = self.get(py)?;
        let Some(gpu) = self.open.gpu.clone() else {
            return Err(PyValueError::new_err("samples in host memory are waited for by hosts: wait()"));
        };
        let stream = Stream::of(gpu, stream);
        let ordered = py.detach(|| sample.device_on(stream.borrow()).map(|range| range.device_ptr() as usize));
        let address = ordered.or_raise(py)?;
        owner.note_stream(stream.id().1);
        self.address.get_or_init(|| address);
        Ok(())
    }

    /// Raises if it is not valid.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let (_owner, sample) = self.get(py)?;
        py.detach(|| sample.check()).or_raise(py)
    }

    /// The number of its GPU in this process; `None` for host memory.
    #[getter]
    fn ordinal(&self) -> Option<u32> {
        self.open.ordinal()
    }

    /// Lets go of it when everything that is on a stream now is done, of its own GPU if none is named; if arrays of it are used,
    /// the last of them does.
    fn release_on(&self, py: Python<'_>, device: Option<&str>, stream: Option<u64>) -> PyResult<()> {
        self.get(py)?;
        let stream = match (device, self.open.gpu.clone()) {
            (None, Some(gpu)) => Stream::of(gpu, stream),
            (device, _) => Stream::find(py, self.open.topic.domain(), device.unwrap_or("cuda"), stream)?,
        };
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((sample, subscriber)) = owner.and_then(Owner::into_sample) else { return Ok(()) };
        match py.detach(|| sample.release_on(stream.borrow())) {
            Ok(()) => {
                let_go(subscriber);
                Ok(())
            }
            Err(unreleased) => {
                let owner = Owner::of_sample(*unreleased.sample, subscriber);
                *self.owner.lock().unwrap_or_else(PoisonError::into_inner) = Some(owner);
                Err(unreleased.error).or_raise(py)
            }
        }
    }

    /// Whether it was let go of.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Lets go of it; if arrays of it are used, the last of them does. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(owner));
    }
}
