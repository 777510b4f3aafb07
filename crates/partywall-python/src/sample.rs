//! Samples that subscribers receive.
//!
//! Python uses this class itself: a wrapper in Python, and calls through it, would take as long as everything else that
//! is done for a sample. With a wrapper, 4 MiB to a sleeping process and back took 125 µs, and 66 µs without, beside
//! 80 µs by hand (H200 under MPS, 2026-11-22). For the same reason tensors and streams of torch are taken through
//! DLPack's C interface.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use partywall::{Error, Place, error::Busy};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyTuple},
};

use crate::{
    arguments::Optional,
    errors::{Never, Raise, closed, exception},
    exported::{Export, Exported},
    handle::Closable,
    owner::Owner,
    reaper::Late,
    stream::{self, Stream},
    tensor::Tensor,
    topic::OpenTopic,
    value::Tuple,
    wait,
};

/// A sample that a subscriber received: a tensor that is read in place and stays unchanged while it is held.
///
/// The block is used again when this object and all arrays of it are gone, and on a GPU when all work that this process
/// has enqueued there by then is done. Closing is optional, and gives the block back at once. A sample must not be
/// written, even if the library that takes it allows that.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct Sample {
    /// `None` once the sample was released.
    held: Closable<HeldSample>,
    /// The topic's name.
    topic: Arc<str>,
    /// The address, once the sample is complete or a stream waits until it is.
    address: OnceLock<usize>,
    shape: Vec<u64>,
    /// The type of the elements.
    #[pyo3(get)]
    dtype: &'static str,
    /// How many samples the topic had before.
    #[pyo3(get)]
    position: u64,
    /// How many samples the publisher had published before.
    #[pyo3(get)]
    sequence: u64,
    /// The publisher's number.
    #[pyo3(get)]
    publisher: u64,
    /// How many samples the subscriber missed immediately before this one.
    #[pyo3(get)]
    missed: u64,
}

/// What the sample holds of the library.
#[derive(Clone)]
struct HeldSample {
    owner: Arc<Owner>,
    open: OpenTopic,
}

impl Drop for Sample {
    fn drop(&mut self) {
        self.take();
    }
}

impl Sample {
    pub(crate) fn of(py: Python<'_>, owner: Arc<Owner>, open: OpenTopic) -> PyResult<Bound<'_, Self>> {
        let sample = owner.sample().ok_or_else(|| closed(py, "sample"))?;
        let this = Self {
            address: OnceLock::new(),
            shape: sample.shape().to_vec(),
            dtype: sample.dtype().name(),
            position: sample.position(),
            sequence: sample.sequence(),
            publisher: sample.publisher(),
            missed: sample.missed(),
            topic: open.name.clone(),
            held: Closable::new("sample", HeldSample { owner, open }),
        };
        this.into_object(py)
    }

    /// Returns the owner and the sample.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<(Arc<Owner>, Arc<partywall::Sample>)> {
        let HeldSample { owner, .. } = self.held.get(py)?;
        let sample = self.held.unless_closed(py, owner.sample())?;
        Ok((owner, sample))
    }

    /// Takes the owner: from now on this object does not hold the sample.
    pub(crate) fn take(&self) -> Option<Arc<Owner>> {
        let HeldSample { owner, open } = self.held.lock().take()?;
        drop(Late::new(open.topic));
        Some(owner)
    }

    /// Returns the address of a complete sample.
    fn find(&self, owner: &Owner, sample: &partywall::Sample) -> partywall::Result<usize> {
        let address = match sample.gpu().filter(|_| !owner.is_on_host()) {
            _ if sample.is_empty() => 0,
            None => sample.bytes()?.as_ptr() as usize,
            Some(gpu) => match sample.wait(Duration::ZERO) {
                // The sample is complete, so the stream has nothing to wait for.
                Ok(()) => sample.device_on(gpu.stream())?.device_ptr() as usize,
                Err(Error::Timeout { .. }) => {
                    let topic = sample.topic().to_owned();
                    return Err(Error::Busy(Busy::NotReady { topic, position: sample.position() }));
                }
                Err(error) => return Err(error),
            },
        };
        Ok(*self.address.get_or_init(|| address))
    }

    /// Returns whether the sample is complete or may become so.
    pub(crate) fn may_come(&self, py: Python<'_>) -> bool {
        let Ok((_owner, sample)) = self.get(py) else { return false };
        py.detach(|| matches!(sample.wait(Duration::ZERO), Ok(()) | Err(Error::Timeout { .. })))
    }

    /// Returns a stream of the sample's GPU that Python names; `None` for host memory.
    fn named(&self, py: Python<'_>, stream: Optional<'_, '_>) -> PyResult<Option<Stream>> {
        let open = self.held.get(py)?.open;
        let Some(gpu) = open.gpu(py)? else { return Ok(None) };
        let raw = stream::named(py, stream, gpu.context().device().ordinal() as i32)?;
        Ok(Some(Stream::of(gpu.clone(), Some(raw.0))))
    }

    /// Has later work on a stream of the sample's GPU wait until the sample is complete.
    pub(crate) fn order(&self, py: Python<'_>, stream: &Stream) -> PyResult<()> {
        let (owner, sample) = self.get(py)?;
        let ordered = py.detach(|| sample.device_on(stream.borrow()).map(|range| range.device_ptr() as usize));
        let address = ordered.or_raise(py)?;
        owner.note_stream(stream.gpu(), stream.id().1);
        self.address.get_or_init(|| address);
        Ok(())
    }

    /// Waits until the sample is complete. Returns `None` if `is_over` says so before.
    pub(crate) fn complete(
        &self,
        py: Python<'_>,
        timeout: Duration,
        is_over: impl Fn() -> bool + Sync,
    ) -> PyResult<Option<()>> {
        let (owner, sample) = self.get(py)?;
        // Samples in host memory are complete. `wait` reports a failed sample that this one is made of.
        if self.held.get(py)?.open.topic.place() == Place::Host {
            return sample.wait(Duration::ZERO).or_raise(py).map(Some);
        }
        wait::in_slices(py, timeout, |slice| {
            if is_over() {
                return Ok(None);
            }
            sample.wait(slice)?;
            self.find(&owner, &sample).map(|_| Some(()))
        })
    }
}

impl Export for Sample {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py)
    }
}

#[pymethods]
impl Sample {
    /// The sample as a tensor. `NotReady` while its publisher's stream writes it, unless a stream waits for that.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Tensor> {
        let (owner, sample) = self.get(py)?;
        let address = match self.address.get() {
            Some(known) => *known,
            None => py.detach(|| self.find(&owner, &sample)).or_raise(py)?,
        };
        Ok(Tensor::of_sample(&owner, &sample, address))
    }

    /// Known also while the sample is incomplete.
    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        let (owner, _sample) = self.get(py)?;
        let device = owner.device();
        Ok((device.device_type, device.device_id))
    }

    /// Its shape.
    #[getter]
    fn shape(&self) -> Tuple<u64> {
        Tuple(self.shape.clone())
    }

    /// The topic's name.
    #[getter]
    fn topic(&self) -> &str {
        &self.topic
    }

    /// The header that the publisher sent with the sample.
    #[getter]
    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let (_owner, sample) = self.get(py)?;
        Ok(PyBytes::new(py, &sample.header()))
    }

    /// The seconds since the sample was published, or for a sample that a stream fills since `publish_on`. Never
    /// negative. `None` if its publisher does not stamp samples.
    #[getter]
    fn age(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        let (_owner, sample) = self.get(py)?;
        Ok(sample.age().map(|age| age.as_secs_f64()))
    }

    /// Whether the sample is complete. Raises as `wait` does if it never will be.
    #[getter]
    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        let (_owner, sample) = self.get(py)?;
        match py.detach(|| sample.wait(Duration::ZERO)) {
            Ok(()) => Ok(true),
            Err(Error::Timeout { .. }) => Ok(false),
            Err(error) => Err(exception(py, &error)),
        }
    }

    /// Waits up to `timeout` seconds, or for ever, until the sample is complete. Raises `SampleFailed` or `Tainted`.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (_owner, sample) = self.get(py)?;
        self.held.in_slices(py, wait::timeout(timeout)?, |slice| sample.wait(slice))
    }

    /// Has later work on a stream wait until the sample is complete. Returns at once.
    ///
    /// If the publisher dies before that, the stream goes on: call `check` before you use results. Load kernels, launch
    /// them once and allocate memory before this call: behind a wait, CUDA may block until the wait ends.
    #[pyo3(signature = (stream = None))]
    fn wait_on(&self, py: Python<'_>, stream: Optional<'_, '_>) -> PyResult<()> {
        match self.named(py, stream)? {
            Some(stream) => self.order(py, &stream),
            None => Err(PyValueError::new_err("samples in host memory are waited for by hosts: wait()")),
        }
    }

    /// Raises if the sample is not valid: `SampleFailed`, `Tainted` or `NotReady`.
    ///
    /// Call it when the work that read the sample is done, before you use its results. Waits up to 1 s for the validity
    /// of the samples that this one was made of.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let (_owner, sample) = self.get(py)?;
        py.detach(|| sample.check()).or_raise(py)
    }

    /// Releases the sample when all work that is on a stream now is done. Returns at once.
    ///
    /// `stream` and `device` as for a `Timeline`, but without a `device` it is the sample's own GPU. If arrays of the
    /// sample are in use, the last of them releases it.
    #[pyo3(signature = (stream = None, *, device = None))]
    fn release_on(&self, py: Python<'_>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<()> {
        let open = self.held.get(py)?.open;
        let own = if device.is_none() { self.named(py, stream)? } else { None };
        let stream = match own {
            Some(own) => own,
            None => Stream::at(py, open.topic.domain(), stream, device)?,
        };
        let Some(owner) = self.take() else { return Ok(()) };
        let on_stream = owner.stream();
        let Some((sample, subscriber)) = Owner::into_sample(owner) else { return Ok(()) };
        match py.detach(|| sample.release_on(stream.borrow())) {
            Ok(()) => {
                drop(Late::new(open.topic));
                Ok(())
            }
            Err(unreleased) => {
                let owner = Owner::of_sample(*unreleased.value, open.topic.place(), subscriber.clone());
                if let (Some(stream), Some(gpu)) = (on_stream, open.gpu(py)?) {
                    owner.note_stream(gpu, stream);
                }
                *self.held.lock() = Some(HeldSample { owner, open });
                Err(unreleased.error).or_raise(py)
            }
        }
    }

    /// Whether the sample was released.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    /// Releases the sample. If arrays of it are in use, the last of them releases it. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let held = self.held.lock().take();
        py.detach(|| {
            let Some(HeldSample { owner, open }) = held else { return };
            // Drops the topic before this returns, too: the subscriber may be closed already.
            let last = owner.into_sample().map(|(sample, subscriber)| (sample, subscriber.into_inner()));
            drop((last, open));
        });
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a sample is this process's own: others subscribe, or are sent a copy"))
    }

    fn __repr__(&self) -> String {
        let Self { position, dtype, shape, .. } = self;
        let state = if self.closed() { ", released" } else { "" };
        format!("<partywall.Sample {position} of {}: {dtype}{shape:?}{state}>", self.topic())
    }
}
