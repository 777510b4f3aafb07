//! Pools.

use std::{ops::Deref, sync::Arc};

use partywall::{Place, PoolOptions, WhenSome};
use pyo3::prelude::*;

use crate::{
    arguments::{Blocks, Count, DeviceName, Name, Needs, named_place, pinning},
    block::Block,
    domain::Connection,
    errors::Raise,
    exported::Export,
    handle::Handle,
    members::Withdrawal,
    queue::Queue,
    value::value,
    wait,
};

/// The compiled part of `partywall.Pool`.
#[pyclass(frozen, subclass, module = "partywall._native")]
pub(crate) struct Pool {
    inner: Handle<OpenPool>,
    /// The name.
    #[pyo3(get)]
    name: String,
    /// The version. A pool that is removed and created again has another one.
    #[pyo3(get)]
    version: u64,
    /// How many blocks there are.
    #[pyo3(get)]
    blocks: u32,
    /// Bytes of each block.
    #[pyo3(get)]
    block_bytes: u64,
    /// Whether a block is all zero when it is taken.
    #[pyo3(get)]
    zeroed: bool,
    /// `host`, the UUID of the GPU that has the blocks, or `pinned:N`.
    #[pyo3(get)]
    place: String,
}

/// The library's object behind a pool's handle: a pool, or the queue whose input blocks it has.
#[derive(Clone)]
pub(crate) enum OpenPool {
    Pool(Arc<partywall::Pool>),
    Inputs(Arc<partywall::Queue>),
}

impl Deref for OpenPool {
    type Target = partywall::Pool;

    fn deref(&self) -> &partywall::Pool {
        match self {
            Self::Pool(pool) => pool,
            Self::Inputs(queue) => queue.inputs(),
        }
    }
}

value! {
    /// Counts of a pool.
    PoolStats, "partywall._pool", "PoolStats", {
        blocks: u32, free: u32, held: u32, offered: u32, waiting: u32,
    }
}

impl From<OpenPool> for Pool {
    fn from(pool: OpenPool) -> Self {
        let name = pool.name().to_owned();
        let version = pool.version();
        let place = pool.place().to_string();
        let blocks = pool.blocks();
        let block_bytes = pool.block_bytes();
        let zeroed = pool.is_zeroed();
        Self { inner: Handle::new("pool", pool), name, version, blocks, block_bytes, zeroed, place }
    }
}

#[pymethods]
impl Pool {
    /// Opens a pool, or the input blocks of a queue. If numbers are given, creates a pool that does not exist.
    #[new]
    #[pyo3(signature = (
        domain, name, blocks = None, block_bytes = None, device = None, access = None, *,
        zeroed = None, kept = false, shared = false, allow_peer = false, timeout = None, queue = None,
    ))]
    fn new(
        py: Python<'_>,
        domain: Connection<'_>,
        name: Name,
        blocks: Option<Blocks>,
        block_bytes: Option<Count>,
        device: Option<&str>,
        access: Option<Needs>,
        zeroed: Option<bool>,
        kept: bool,
        shared: bool,
        allow_peer: bool,
        timeout: Option<f64>,
        queue: Option<&Queue>,
    ) -> PyResult<Self> {
        if let Some(queue) = queue {
            return Ok(OpenPool::Inputs(queue.get(py)?).into());
        }
        let connection = domain.get(py)?;
        let makes = blocks.is_some() || block_bytes.is_some();
        let timeout = wait::creation(timeout, makes)?;
        let mut options = connection.pool(&name.0).kept(kept).shared(shared).allow_peer(allow_peer);
        options = options
            .when_some(blocks, |options, Blocks(blocks)| options.blocks(blocks))
            .when_some(block_bytes, |options, Count(bytes)| options.block_bytes(bytes))
            .when_some(zeroed, PoolOptions::zeroed)
            .when_some(access, |options, Needs(access)| options.access(access));
        options = match named_place(py, device)? {
            Some(Place::Gpu(uuid)) if !makes => options.device(uuid),
            Some(place) => options.place(place),
            None => options,
        };
        let pool = domain.in_slices(py, timeout, |slice| {
            let options = options.clone().timeout(slice);
            if makes { options.open_or_create() } else { options.open() }
        })?;
        Ok(OpenPool::Pool(Arc::new(pool)).into())
    }

    /// Takes a block. Waits for one up to `timeout` seconds, or for ever. A block of a zeroed pool is all zero.
    #[pyo3(signature = (timeout = None))]
    fn alloc<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, Block>> {
        let pool = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let block = self.inner.for_turn(py, timeout, |wait| pool.alloc(wait))?;
        Block::new(&pool, block).into_object(py)
    }

    /// Takes a block if one is free and no thread waits for it; else returns `None`.
    fn try_alloc<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, Block>>> {
        let pool = self.inner.get(py)?;
        // Zeroing a block takes time, so other threads may run. Otherwise the call ends sooner than the GIL could
        // change hands.
        let block = if self.zeroed { py.detach(|| pool.try_alloc()) } else { pool.try_alloc() };
        block.or_raise(py)?.map(|block| Block::new(&pool, block).into_object(py)).transpose()
    }

    /// Accepts a block that its holder has offered, with its content. Raises `StaleBlock` if it is no longer offered.
    ///
    /// The caller is not ordered after work that the former holder's GPU still does on the block: use a `Timeline` for
    /// that.
    #[pyo3(signature = (block: "BlockRef | str"))]
    fn accept<'py>(&self, py: Python<'py>, block: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Block>> {
        let pool = self.inner.get(py)?;
        let block = block.str()?.to_str()?.parse().and_then(|reference| pool.accept(&reference)).or_raise(py)?;
        Block::new(&pool, block).into_object(py)
    }

    /// Page-locks the blocks of a pool in host memory and registers them with CUDA, for as long as this process has the
    /// pool open.
    ///
    /// GPUs of this process then copy from and to arrays of blocks asynchronously. Such a block returns to the pool
    /// once all work of this process on its GPUs is done. Other processes need no driver to use the pool. It takes 0.4
    /// ms per MiB; calling it again does nothing.
    #[pyo3(signature = (device = DeviceName("cuda".to_owned())), text_signature = "($self, device='cuda')")]
    fn pin(&self, py: Python<'_>, device: DeviceName) -> PyResult<()> {
        let uuid = pinning(py, &device.0)?;
        let pool = self.inner.get(py)?;
        py.detach(|| pool.pin(&*pool.domain().gpu(uuid)?)).or_raise(py)
    }

    /// Returns the current states of the blocks.
    fn stats(&self, py: Python<'_>) -> PyResult<PoolStats> {
        let pool = self.inner.get(py)?;
        let partywall::PoolStats { blocks, free, held, offered, waiting, .. } = py.detach(|| pool.stats());
        Ok(PoolStats { blocks, free, held, offered, waiting })
    }

    /// Waits up to `timeout` seconds, or for ever, until the name is removed or its owner ends.
    ///
    /// A newer version does not end the wait. Returns the withdrawal if this process has a deadline to drop the object.
    #[pyo3(signature = (timeout = None))]
    fn wait_withdrawn(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Withdrawal>> {
        let notice = self.inner.wait(py, timeout, |pool, slice| pool.wait_withdrawn(slice))?;
        Ok(notice.map(Withdrawal::from))
    }

    /// Raises `Withdrawn` once the deadline of a withdrawal with `then="stale"` has passed.
    ///
    /// Raises `DeviceLost` once the GPU has lost the memory.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.get(py)?.check().or_raise(py)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Closes the handle. Blocks stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}
