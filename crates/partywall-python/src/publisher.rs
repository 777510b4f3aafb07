//! Publishers of topics, and their loans.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use partywall::{DType, cuda::StreamRef};
use partywall_os::{lock::IgnorePoison, process::fork_generation};
use pyo3::{
    exceptions::PyTypeError,
    intern,
    prelude::*,
    types::{PyBytes, PyTuple},
};

use crate::{
    arguments::{ElementType, Number, Optional, Shape},
    errors::{Never, Raise, bad_source, unclosed},
    exported::{Export, Exported},
    handle::{Closable, Closing, Handle},
    owner::Owner,
    reaper,
    sample::Sample,
    source::{self, Source},
    stream::{self, Stream},
    tensor::Tensor,
    topic::{OpenTopic, Topic},
    value::Tuple,
    wait,
};

/// The compiled part of `partywall.Publisher`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Publisher {
    inner: Handle<Arc<Sender>>,
    /// The topic's name.
    #[pyo3(get)]
    topic: String,
    /// Its number, which no other publisher or subscriber of the topic ever has.
    #[pyo3(get)]
    id: u64,
}

/// What a publisher and its loans share.
struct Sender {
    publisher: partywall::Publisher,
    /// Ends the waits of loans, too.
    closing: Closing,
    open: OpenTopic,
}

impl Sender {
    /// Returns the handle of the stream that Python names; `None` if the CPU publishes, and for the legacy default
    /// stream.
    fn handle(&self, py: Python<'_>, stream: Optional<'_, '_>, on_gpu: bool) -> PyResult<Option<u64>> {
        // In pinned memory the CPU publishes, unless a stream is given or a GPU has used the block.
        let by_cpu = self.open.is_pinned() && stream.is_none() && !on_gpu;
        let gpu = if by_cpu { None } else { self.open.gpu(py)? };
        gpu.map_or(Ok(None), |gpu| stream::handle(py, stream, gpu.context().device().ordinal() as i32))
    }
}

/// Fills a loan with a copy of a tensor. Returns the stream on which the copy is enqueued, if it is.
fn fill<'a>(
    loan: &mut partywall::Loan,
    source: &Source,
    stream: Option<&'a Stream>,
) -> partywall::Result<Option<StreamRef<'a>>> {
    match stream {
        _ if loan.is_empty() => {}
        _ if source.is_on_host() => loan.write(&source.host_bytes())?,
        None => loan.write(&source.device_bytes()?)?,
        Some(stream) => {
            loan.keep(source.held());
            source::enqueue_copy(source, loan.device()?, stream.borrow())?;
            return Ok(Some(stream.borrow()));
        }
    }
    Ok(None)
}

#[pymethods]
impl Publisher {
    /// Adds a publisher to a topic.
    #[new]
    fn new(py: Python<'_>, topic: &Topic) -> PyResult<Self> {
        let open = topic.open(py)?;
        let publisher = py.detach(|| open.topic.publisher()).or_raise(py)?;
        let topic = publisher.topic().to_owned();
        let id = publisher.id();
        let closing = Closing::new("publisher");
        Ok(Self { inner: Handle::new("publisher", Arc::new(Sender { publisher, closing, open })), topic, id })
    }

    /// Publishes a copy of a tensor and a header of up to 256 bytes. Returns how many samples it had published before.
    ///
    /// It takes the same tensors as `Domain.put`. To pinned memory the CPU copies what is on the host. From GPU to GPU
    /// the copy is made on `stream`, by default torch's or cupy's current one, and no host waits for it. Waits up to
    /// `timeout` seconds, or for ever, for a block and for subscribers that must miss nothing; then raises `TopicFull`.
    #[pyo3(
        signature = (tensor, header = b"".as_slice(), *, timeout = None, stream = None),
        text_signature = "($self, tensor, header=b'', *, timeout=None, stream=None)",
    )]
    fn send(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        header: &[u8],
        timeout: Option<f64>,
        stream: Optional<'_, '_>,
    ) -> PyResult<u64> {
        let sender = self.inner.get(py)?;
        let handle = sender.handle(py, stream, false)?;
        let dense = py.import(intern!(py, "partywall._arrays"))?.getattr(intern!(py, "dense"))?;
        let source = match handle {
            Some(handle) => dense.call1((tensor, handle))?,
            None => dense.call1((tensor, stream))?,
        };
        let source = source.cast::<Source>()?;
        let ending = sender.closing.begin();
        let timeout = wait::timeout(timeout)?;
        let start = Instant::now();
        reaper::run_gil_jobs();
        let source = source.get();
        if !source.is_copyable() {
            return Err(bad_source(py, "it has strides", "make it contiguous first"));
        }
        // The CPU copies from host memory to pinned memory, and the stream of the source from a GPU.
        let by_cpu = sender.open.is_pinned() && source.is_on_host();
        let gpu = if by_cpu { None } else { sender.open.gpu(py)?.cloned() };
        let stream = if sender.open.is_pinned() { Some(source.stream().0) } else { handle };
        let stream = gpu.map(|gpu| Stream::of(gpu, stream));
        if let (Some(from), Some(to)) = (source.ordinal(), stream.as_ref().map(Stream::ordinal))
            && from != to
        {
            let why = format!("it is on cuda:{from}, and topic {:?} on cuda:{to}", self.topic);
            return Err(bad_source(py, &why, "copy it to the topic's GPU first"));
        }
        if stream.is_none() && !source.is_on_host() {
            // A signal ends this wait.
            source.drain(py)?;
        }
        let (dtype, shape) = source.layout();
        let left = timeout.saturating_sub(start.elapsed());
        let check = |py: Python<'_>| self.inner.check(py).and_then(|()| ending.check(py));
        let published = wait::for_turn(py, left, check, |wait| {
            sender.publisher.send_with(dtype, shape, wait, |loan| {
                loan.header(header)?;
                fill(loan, source, stream.as_ref())
            })
        })?;
        Ok(published.sequence)
    }

    /// Waits until the topic has at least `least` subscribers, so that each of them receives what is sent next.
    ///
    /// A subscriber begins with the next sample unless it asks for history, so a publisher that starts first and does
    /// not wait sends for nobody. Waits up to `timeout` seconds, or for ever; then raises `TimeoutError`. More than the
    /// topic has room for raise `LimitReached`.
    #[pyo3(
        signature = (least = Number(1), *, timeout = None),
        text_signature = "($self, least=1, *, timeout=None)",
    )]
    fn wait_for_subscribers(&self, py: Python<'_>, least: Number, timeout: Option<f64>) -> PyResult<()> {
        self.inner.wait(py, timeout, |sender, slice| sender.publisher.wait_for_subscribers(least.0, slice))
    }

    /// Borrows a block to fill in place. Use it in a `with`, whose end publishes the block.
    ///
    ///     with publisher.loan((480, 640, 3), "uint8") as out:
    ///         torch.from_dlpack(out).fill_(7)
    ///
    /// The default `dtype` is the topic's. On a GPU the block is published after the work that is then on `stream`, by
    /// default torch's or cupy's current one. In pinned memory the block is a tensor of the host that the CPU
    /// publishes, or with a `stream` one of the GPU. Waits up to `timeout` seconds, or for ever, for a block, and again
    /// to publish it. A publisher that already has as many loans as it may have gets `TooManyLoans` immediately, and so
    /// does one whose arrays of former loans keep too many blocks.
    #[pyo3(
        signature = (shape, dtype = None, *, header = b"".as_slice(), timeout = None, stream = None),
        text_signature = "($self, shape, dtype=None, *, header=b'', timeout=None, stream=None)",
    )]
    fn loan<'py>(
        &self,
        py: Python<'py>,
        shape: Shape,
        dtype: Option<ElementType>,
        header: &[u8],
        timeout: Option<f64>,
        stream: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Loan>> {
        let sender = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let Shape(shape) = shape;
        let dtype = dtype.map(|ElementType(dtype)| dtype).or(sender.open.topic.dtype()).ok_or_else(|| {
            let why = "the dtype is missing: give dtype=, because samples of this topic may have any type";
            PyTypeError::new_err(why)
        })?;
        let gpu = if stream.is_some() { sender.open.gpu(py)?.cloned() } else { None };
        let loan = self.inner.for_turn(py, timeout, |wait| {
            let mut loan = sender.publisher.loan(dtype, &shape, wait)?;
            loan.header(header)?;
            Ok(loan)
        })?;
        let owner = Owner::of_loan(loan, sender.open.topic.clone(), gpu.as_deref());
        let loan = Loan {
            owner: Closable::new("loan", owner),
            topic: self.topic.clone(),
            sender: Handle::new("loan", sender),
            dtype,
            shape,
            header: Mutex::new(header.to_vec()),
            timeout,
            stream: stream.map(Bound::unbind),
            generation: fork_generation(),
        };
        loan.into_object(py)
    }

    /// How many samples it has published.
    #[getter]
    fn published(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner.get(py)?.publisher.published())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Raises if the topic cannot be found by its name any more, or if this publisher cannot publish.
    ///
    /// `NameNotFound` says who removed the name, if that was within the last minute; `VersionNotFound`, a kind of it,
    /// that the name was used again. A publisher can go on then: subscribers that have the topic open receive its
    /// samples. Asks the broker.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let sender = self.inner.get(py)?;
        py.detach(|| sender.publisher.check()).or_raise(py)
    }

    /// Detaches the publisher, and ends the waits of `send` and of loans. Samples that its streams still write are
    /// delivered. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(sender) = &*self.inner.lock() {
            sender.closing.close();
        }
        self.inner.close(py);
    }
}

/// A block to be written and published as a sample; `Publisher.loan` returns one.
///
/// The end of its `with` publishes the block, or gives it back if the body raises. Arrays that outlive that keep the
/// block from later loans. Do not write through them: they show what subscribers read.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct Loan {
    /// `None` once the loan is published or given back.
    owner: Closable<Arc<Owner>>,
    sender: Handle<Arc<Sender>>,
    topic: String,
    dtype: DType,
    shape: Vec<u64>,
    header: Mutex<Vec<u8>>,
    /// How long `publish` may wait.
    timeout: Duration,
    /// The stream that publishes it, as Python named it.
    stream: Option<Py<PyAny>>,
    /// The fork generation in which it was made: in a forked child it belongs to the parent.
    generation: u64,
}

impl Loan {
    fn take(&self, py: Python<'_>) -> PyResult<partywall::Loan> {
        let owner = self.owner.take(py)?;
        // Drops the owner, so that the loan finds only arrays as its views.
        let loan = py.detach(move || owner.take_loan());
        self.owner.unless_closed(py, loan)
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Arc<Owner>, &mut partywall::Loan) -> partywall::Result<T> + Send,
    ) -> PyResult<T> {
        let owner = self.owner.get(py)?;
        let result = py.detach(|| owner.with_loan(|loan| action(&owner, loan)));
        self.owner.unless_closed(py, result)?.or_raise(py)
    }
}

impl Export for Loan {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py)
    }
}

#[pymethods]
impl Loan {
    /// The block as a tensor, to be written.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.with(py, |owner, loan| Tensor::of_loan(owner, loan, format!("{} (loan)", self.topic)))
    }

    /// Its shape.
    #[getter]
    fn shape(&self) -> Tuple<u64> {
        Tuple(self.shape.clone())
    }

    /// The type of the elements.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// The header of the sample, up to 256 bytes.
    #[getter]
    fn header<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.header.lock().ignore_poison())
    }

    #[setter]
    fn set_header(&self, py: Python<'_>, header: &[u8]) -> PyResult<()> {
        self.with(py, |_, loan| loan.header(header))?;
        *self.header.lock().ignore_poison() = header.to_vec();
        Ok(())
    }

    /// Calls `Tensor.write` of its tensor.
    #[pyo3(signature = (tensor, stream = None))]
    fn write<'py>(
        &self,
        py: Python<'py>,
        tensor: Bound<'py, PyAny>,
        stream: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        self.tensor(py)?.write(py, tensor, stream)
    }

    /// Declares that this sample depends on the given samples. Their blocks are held until their validity is known.
    ///
    /// If one of them is invalid, so is this sample: `Sample.check` of its subscribers raises `Tainted`.
    #[pyo3(signature = (*samples: "Sample"))]
    fn rests_on(&self, py: Python<'_>, samples: Vec<Bound<'_, Sample>>) -> PyResult<()> {
        for sample in samples {
            let (_input, input) = sample.get().get(py)?;
            self.with(py, |_, loan| loan.rests_on(&input))?;
        }
        Ok(())
    }

    /// Publishes the block. Returns how many samples its publisher had published before.
    ///
    /// If that fails, for example because a subscriber that must miss nothing does not read, the block is given back.
    fn publish(&self, py: Python<'_>) -> PyResult<u64> {
        let sender = self.sender.get(py)?;
        let on_gpu = self.owner.get(py)?.is_on_gpu();
        let stream = sender.handle(py, self.stream.as_ref().map(|stream| stream.bind(py)), on_gpu)?;
        // Pinned memory that only the CPU has used is complete.
        let by_cpu = sender.open.is_pinned() && !on_gpu;
        let gpu = if by_cpu { None } else { sender.open.gpu(py)?.cloned() };
        let filled = self.take(py)?.filled();
        let stream = gpu.map(|gpu| Stream::of(gpu, stream));
        let ending = sender.closing.begin();
        let check = |py: Python<'_>| ending.check(py).and_then(|()| self.sender.check(py));
        // A sample that cannot be published is given back.
        let published = wait::for_turn(py, self.timeout, check, |wait| {
            let published = match &stream {
                Some(stream) => filled.publish_on(stream.borrow(), wait),
                None => filled.publish(wait),
            };
            published.map_err(|unpublished| unpublished.error)
        });
        self.sender.close(py);
        Ok(published?.sequence)
    }

    /// Whether the block is published or given back.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.is_closed()
    }

    /// Gives the block back unless it is published. Calling it again does nothing.
    ///
    /// If arrays of the loan are in use, the last of them gives the block back.
    fn close(&self, py: Python<'_>) {
        let owner = self.owner.lock().take();
        py.detach(move || drop(owner.and_then(|owner| owner.take_loan())));
        self.sender.close(py);
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, *_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, kind: Optional<'_, '_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.generation != fork_generation() {
            return Ok(());
        }
        let published = if kind.is_none() && !self.closed() { self.publish(py).map(drop) } else { Ok(()) };
        self.close(py);
        published
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a loan is this process's own: publish it"))
    }

    fn __repr__(&self) -> String {
        let Self { topic, dtype, shape, .. } = self;
        let state = if self.closed() { "published or given back".to_owned() } else { format!("{dtype}{shape:?}") };
        format!("<partywall.Loan of {topic}: {state}>")
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.closed() && self.generation == fork_generation() {
            unclosed(&self.__repr__());
        }
    }
}
