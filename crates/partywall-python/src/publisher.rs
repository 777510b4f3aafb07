//! Publishers of topics, and their loans.

use std::{sync::Arc, time::Instant};

use partywall::cuda::StreamRef;
use pyo3::prelude::*;

use crate::{
    errors::{Raise, bad_source, parse_dtype},
    handle::{Closable, Closing, Handle},
    owner::Owner,
    reaper,
    sample::Sample,
    source::{self, Source},
    stream::Stream,
    tensor::Tensor,
    topic::OpenTopic,
    wait,
};

/// A publisher of a topic.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Publisher {
    inner: Handle<Arc<Sender>>,
    #[pyo3(get)]
    topic: String,
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

impl Publisher {
    pub(crate) fn new(publisher: partywall::Publisher, open: OpenTopic) -> Self {
        let topic = publisher.topic().to_owned();
        let id = publisher.id();
        let closing = Closing::new("publisher");
        Self { inner: Handle::new("publisher", Arc::new(Sender { publisher, closing, open })), topic, id }
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
    /// Publishes a copy of a tensor. On a GPU a stream makes the copy, and the host does not wait.
    fn send(
        &self,
        py: Python<'_>,
        source: &Bound<'_, Source>,
        header: &[u8],
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<u64> {
        let sender = self.inner.get(py)?;
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
        let stream = if sender.open.is_pinned() { Some(source.stream().0) } else { stream };
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

    /// Waits until the topic has at least so many subscribers.
    fn wait_for_subscribers(&self, py: Python<'_>, least: u32, timeout: Option<f64>) -> PyResult<()> {
        self.inner.wait(py, timeout, |sender, slice| sender.publisher.wait_for_subscribers(least, slice))
    }

    /// Borrows a block, and waits for a free one.
    fn loan(
        &self,
        py: Python<'_>,
        dtype: &str,
        shape: Vec<u64>,
        header: &[u8],
        timeout: Option<f64>,
        on_stream: bool,
    ) -> PyResult<Loan> {
        let sender = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let dtype = parse_dtype(dtype)?;
        let gpu = if on_stream { sender.open.gpu(py)?.cloned() } else { None };
        let loan = self.inner.for_turn(py, timeout, |wait| {
            let mut loan = sender.publisher.loan(dtype, &shape, wait)?;
            loan.header(header)?;
            Ok(loan)
        })?;
        let owner = Owner::of_loan(loan, sender.open.topic.clone(), gpu.as_deref());
        Ok(Loan { owner: Closable::new("loan", owner), topic: self.topic.clone(), sender: Handle::new("loan", sender) })
    }

    /// The number in this process of the GPU whose streams publish; `None` for host memory.
    fn ordinal(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let sender = self.inner.get(py)?;
        Ok(sender.open.gpu(py)?.map(|gpu| gpu.context().device().ordinal()))
    }

    /// How many samples were published.
    fn published(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner.get(py)?.publisher.published())
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Raises if the topic cannot be found by its name any more, or if this publisher cannot publish.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let sender = self.inner.get(py)?;
        py.detach(|| sender.publisher.check()).or_raise(py)
    }

    /// Removes the publisher from the topic once its loans are published or given back, and ends its waits. Calling it
    /// again does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(sender) = &*self.inner.lock() {
            sender.closing.close();
        }
        self.inner.close(py);
    }
}

/// A block that is being filled.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Loan {
    /// `None` once the loan is published or given back.
    owner: Closable<Arc<Owner>>,
    sender: Handle<Arc<Sender>>,
    topic: String,
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

#[pymethods]
impl Loan {
    /// The block as a tensor, to be written.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.with(py, |owner, loan| Tensor::of_loan(owner, loan, format!("{} (loan)", self.topic)))
    }

    /// Sets the header of the sample.
    fn header(&self, py: Python<'_>, header: &[u8]) -> PyResult<()> {
        self.with(py, |_, loan| loan.header(header))
    }

    /// Whether a stream publishes it: it is memory of a GPU, or pinned memory that a GPU uses.
    #[getter]
    fn on_gpu(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.owner.get(py)?.is_on_gpu())
    }

    /// Declares that the sample is made of another sample.
    fn rests_on(&self, py: Python<'_>, sample: &Sample) -> PyResult<()> {
        let (_input, input) = sample.get(py)?;
        self.with(py, |_, loan| loan.rests_on(&input))
    }

    /// Publishes the sample, on a GPU behind the work on a stream.
    fn publish(&self, py: Python<'_>, timeout: Option<f64>, stream: Option<u64>) -> PyResult<u64> {
        let sender = self.sender.get(py)?;
        let timeout = wait::timeout(timeout)?;
        // Pinned memory that only the CPU has used is complete.
        let by_cpu = sender.open.is_pinned() && !self.owner.get(py)?.is_on_gpu();
        let gpu = if by_cpu { None } else { sender.open.gpu(py)?.cloned() };
        let filled = self.take(py)?.filled();
        let stream = gpu.map(|gpu| Stream::of(gpu, stream));
        let ending = sender.closing.begin();
        let check = |py: Python<'_>| ending.check(py).and_then(|()| self.sender.check(py));
        // A sample that cannot be published is given back.
        let published = wait::for_turn(py, timeout, check, |wait| {
            let published = match &stream {
                Some(stream) => filled.publish_on(stream.borrow(), wait),
                None => filled.publish(wait),
            };
            published.map_err(|unpublished| unpublished.error)
        });
        self.sender.close(py);
        Ok(published?.sequence)
    }

    /// Whether the loan was published or given back.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.is_closed()
    }

    /// Gives the block back, unless it was published. If arrays of it are in use, the last of them gives it back.
    /// Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let owner = self.owner.lock().take();
        py.detach(move || drop(owner.and_then(|owner| owner.take_loan())));
        self.sender.close(py);
    }
}
