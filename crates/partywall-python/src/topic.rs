//! Topics.

use std::sync::{Arc, OnceLock};

use partywall::{Gpu, Place, WhenSome};
use pyo3::prelude::*;

use crate::{
    arguments::{Count, ElementType, Name, Needs, Number, named_place},
    domain::Connection,
    errors::Raise,
    handle::Handle,
    members::Withdrawal,
    value::{Tuple, value},
    wait,
};

/// The compiled part of `partywall.Topic`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Topic {
    inner: Handle<OpenTopic>,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// The version. A topic that is removed and created again has another one.
    #[pyo3(get)]
    version: u64,
    /// Bytes of the largest sample.
    #[pyo3(get)]
    max_bytes: u64,
    /// The type of all samples; `None` if samples may have any type.
    #[pyo3(get)]
    dtype: Option<&'static str>,
    shape: Option<Vec<Option<u64>>>,
    /// Type and shape, for display.
    #[pyo3(get, name = "_samples")]
    samples: String,
    /// How many samples the ring keeps.
    #[pyo3(get)]
    depth: u32,
    /// How many loans each publisher may have at a time.
    #[pyo3(get)]
    loans: u32,
    /// How many samples each subscriber may hold at a time.
    #[pyo3(get)]
    held: u32,
    /// `host`, the UUID of the GPU that has the samples, or `pinned:N`.
    #[pyo3(get)]
    place: String,
}

/// A topic, and the GPU on which this process uses it.
#[derive(Clone)]
pub(crate) struct OpenTopic {
    pub(crate) topic: Arc<partywall::Topic>,
    pub(crate) name: Arc<str>,
    /// Set when a stream first uses pinned memory.
    gpu: Arc<OnceLock<Arc<Gpu>>>,
}

impl Topic {
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<OpenTopic> {
        self.inner.get(py)
    }
}

impl OpenTopic {
    /// Returns whether the samples are in pinned memory, which both hosts and streams use.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.topic.place(), Place::Pinned(_))
    }

    /// Returns the GPU on which this process uses the samples; `None` for host memory. Pinned memory is used on a GPU
    /// from then on.
    pub(crate) fn gpu(&self, py: Python<'_>) -> PyResult<Option<&Arc<Gpu>>> {
        if let Some(gpu) = self.gpu.get() {
            return Ok(Some(gpu));
        }
        if self.topic.place() == Place::Host {
            return Ok(None);
        }
        let gpu = || {
            let domain = self.topic.domain();
            self.topic.gpu().map_or_else(|| domain.default_gpu(), |gpu| domain.gpu(gpu.uuid()))
        };
        let gpu = py.detach(gpu).or_raise(py)?;
        Ok(Some(self.gpu.get_or_init(|| gpu)))
    }
}

value! {
    /// Counts of a topic.
    TopicStats, "partywall._topic", "TopicStats", {
        published: u64, free: u32, held: u32, in_ring: u32, read: u32, publishers: usize, subscribers: usize,
    }
}

#[pymethods]
impl Topic {
    /// Opens a topic. If the size or shape of samples is given, creates it if it does not exist.
    #[new]
    #[pyo3(signature = (
        domain, name, device, access, *,
        max_bytes, shape, dtype, depth, history, publishers, loans, subscribers, held, blocks,
        kept, shared, allow_peer, stamps, timeout,
    ))]
    fn new(
        py: Python<'_>,
        domain: Connection<'_>,
        name: Name,
        device: Option<&str>,
        access: Option<Needs>,
        max_bytes: Option<Count>,
        shape: Option<Vec<Option<u64>>>,
        dtype: Option<ElementType>,
        depth: Option<Number>,
        history: Option<Number>,
        publishers: Option<Number>,
        loans: Option<Number>,
        subscribers: Option<Number>,
        held: Option<Number>,
        blocks: Option<Number>,
        kept: bool,
        shared: bool,
        allow_peer: bool,
        stamps: bool,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let connection = domain.get(py)?;
        let makes = max_bytes.is_some() || shape.is_some();
        let timeout = wait::creation(timeout, makes)?;
        let mut options = connection.topic(&name.0).kept(kept).shared(shared).allow_peer(allow_peer).stamps(stamps);
        options = options
            .when_some(depth, |options, Number(depth)| options.depth(depth))
            .when_some(history, |options, Number(history)| options.history(history))
            .when_some(publishers, |options, Number(publishers)| options.publishers(publishers))
            .when_some(loans, |options, Number(loans)| options.loans(loans))
            .when_some(subscribers, |options, Number(subscribers)| options.subscribers(subscribers))
            .when_some(held, |options, Number(held)| options.held(held))
            .when_some(blocks, |options, Number(blocks)| options.blocks(blocks))
            .when_some(max_bytes, |options, Count(bytes)| options.max_bytes(bytes))
            .when_some(dtype, |options, ElementType(dtype)| options.dtype(dtype))
            .when_some(shape, |options, shape| options.varying_shape(&shape))
            .when_some(access, |options, Needs(access)| options.access(access));
        options = match named_place(py, device)? {
            Some(Place::Gpu(uuid)) if !makes => options.device(uuid),
            Some(place) => options.place(place),
            None => options,
        };
        let topic = domain.in_slices(py, timeout, |slice| {
            let options = options.clone().timeout(slice);
            if makes { options.open_or_create() } else { options.open() }
        })?;
        Ok(Self {
            name: topic.name().to_owned(),
            version: topic.version(),
            max_bytes: topic.max_bytes(),
            dtype: topic.dtype().map(partywall::DType::name),
            shape: topic.shape().map(<[_]>::to_vec),
            samples: topic.sample_type().to_string(),
            depth: topic.depth(),
            loans: topic.loans(),
            held: topic.held(),
            place: topic.place().to_string(),
            inner: Handle::new(
                "topic",
                OpenTopic { name: topic.name().into(), topic: topic.into(), gpu: Arc::default() },
            ),
        })
    }

    /// The shape of all samples; `None` if samples may have any shape. A dimension of `None` may have any length.
    #[getter]
    fn shape(&self) -> Option<Tuple<Option<u64>>> {
        self.shape.clone().map(Tuple)
    }

    /// Returns the state of the topic.
    fn stats(&self, py: Python<'_>) -> PyResult<TopicStats> {
        let open = self.inner.get(py)?;
        let stats = py.detach(|| open.topic.stats());
        Ok(TopicStats {
            published: stats.published,
            free: stats.free,
            held: stats.held,
            in_ring: stats.in_ring,
            read: stats.read,
            publishers: stats.publishers.len(),
            subscribers: stats.subscribers.len(),
        })
    }

    /// Waits up to `timeout` seconds, or for ever, until the name is removed or its owner ends.
    ///
    /// A newer version does not end the wait. Returns the withdrawal if this process has a deadline to drop the object.
    #[pyo3(signature = (timeout = None))]
    fn wait_withdrawn(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Withdrawal>> {
        let notice = self.inner.wait(py, timeout, |open, slice| open.topic.wait_withdrawn(slice))?;
        Ok(notice.map(Withdrawal::from))
    }

    /// Raises `Withdrawn` once the deadline of a withdrawal with `then="stale"` has passed.
    ///
    /// Raises `DeviceLost` once the GPU has lost the memory.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.get(py)?.topic.check().or_raise(py)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the handle. Publishers, subscribers and samples stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}
