//! Pools and their blocks.

use std::{ops::Deref, sync::Arc};

use partywall::{
    DType, Error, Gpu, Place, PoolOptions, WhenSome,
    error::{Denied, Gone, Unreachable},
};
use pyo3::prelude::*;

use crate::{
    arguments::{Blocks, Connection, Count, ElementType, Name, Needs, Optional, Shape},
    build::{named_place, pinning},
    errors::{Raise, still_used},
    handle::Handle,
    members::Withdrawal,
    owner::Owner,
    queue::Queue,
    stream::Stream,
    tensor::Tensor,
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

value! {
    /// A reference to an offered block.
    BlockRef, "partywall._pool", "BlockRef", {
        pool: String, version: u64, index: u32, generation: u64,
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

    /// Allocates a block, and waits for a free one.
    #[pyo3(name = "_alloc")]
    fn alloc(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Block> {
        let pool = self.inner.get(py)?;
        let timeout = wait::timeout(timeout)?;
        let block = self.inner.for_turn(py, timeout, |wait| pool.alloc(wait))?;
        Ok(Block::new(&pool, block))
    }

    /// Allocates a block if one is free and no thread waits for one.
    #[pyo3(name = "_try_alloc")]
    fn try_alloc(&self, py: Python<'_>) -> PyResult<Option<Block>> {
        let pool = self.inner.get(py)?;
        // Zeroing a block takes time, so other threads may run. Otherwise the call ends sooner than the GIL could
        // change hands.
        let block = if self.zeroed { py.detach(|| pool.try_alloc()) } else { pool.try_alloc() };
        let block = block.or_raise(py)?;
        Ok(block.map(|block| Block::new(&pool, block)))
    }

    /// Accepts the block that a reference names.
    #[pyo3(name = "_accept")]
    fn accept(&self, py: Python<'_>, reference: &str) -> PyResult<Block> {
        let pool = self.inner.get(py)?;
        let block = reference.parse().and_then(|reference| pool.accept(&reference)).or_raise(py)?;
        Ok(Block::new(&pool, block))
    }

    /// Registers host memory with CUDA in this process, for asynchronous copies of GPUs.
    #[pyo3(name = "_pin")]
    fn pin(&self, py: Python<'_>, device: &str) -> PyResult<()> {
        let uuid = pinning(py, device)?;
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

/// A block of a pool.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Block {
    /// `None` once the block was released, handed over or given to a stream.
    held: Handle<HeldBlock>,
    #[pyo3(get)]
    pool: String,
    #[pyo3(get)]
    index: u32,
    #[pyo3(get)]
    generation: u64,
    #[pyo3(get)]
    nbytes: u64,
    /// The type and shape of a task's result; all bytes of other blocks.
    described: (DType, Vec<u64>),
    #[pyo3(get)]
    on_host: bool,
    /// Whether streams can use it: true of memory of a GPU and of pinned memory.
    #[pyo3(get)]
    has_streams: bool,
}

#[derive(Clone)]
struct HeldBlock {
    owner: Arc<Owner>,
    domain: partywall::Domain,
    place: Place,
}

impl Block {
    pub(crate) fn new(pool: &partywall::Pool, block: partywall::Block) -> Self {
        Self::of(pool, block, |block| owner(pool, block))
    }

    /// Returns the block of a task's result. `owner`, which earlier tensors of the output share, keeps the block from
    /// now on.
    pub(crate) fn of_taken(py: Python<'_>, pool: &partywall::Pool, owner: Arc<Owner>, block: partywall::Block) -> Self {
        Self::of(pool, block, |block| {
            py.detach(|| owner.keep_result(block));
            owner
        })
    }

    fn of(pool: &partywall::Pool, block: partywall::Block, keep: impl FnOnce(partywall::Block) -> Arc<Owner>) -> Self {
        let place = pool.place();
        let domain = pool.domain().clone();
        let pool = block.pool().to_owned();
        let index = block.index();
        let generation = block.generation();
        let nbytes = block.len();
        let described = (block.dtype(), block.shape().to_vec());
        let held = Handle::new("block", HeldBlock { owner: keep(block), domain, place });
        let on_host = place.is_cpu_reachable();
        let has_streams = place != Place::Host;
        Self { held, pool, index, generation, nbytes, described, on_host, has_streams }
    }

    /// Takes the block for another owner. Fails if arrays use it.
    pub(crate) fn take_block(&self, py: Python<'_>) -> PyResult<partywall::Block> {
        let HeldBlock { owner, domain, place } = self.take(py)?;
        owner.into_block().map_err(|owner| {
            self.put_back(HeldBlock { owner, domain, place });
            still_used(py, &self.pool)
        })
    }

    /// Puts back a block that its new owner refused.
    pub(crate) fn put_block_back(&self, pool: &partywall::Pool, mut block: partywall::Block) {
        // It may have been limited to what the task was to get. Every block has this range.
        _ = block.set_range(..);
        self.put_back(HeldBlock { owner: owner(pool, block), domain: pool.domain().clone(), place: pool.place() });
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::HeldBlock { pool: self.pool.clone() })
    }

    fn get(&self, py: Python<'_>) -> PyResult<HeldBlock> {
        let held = self.held.lock().clone();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn take(&self, py: Python<'_>) -> PyResult<HeldBlock> {
        let held = self.held.lock().take();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn put_back(&self, held: HeldBlock) {
        *self.held.lock() = Some(held);
    }

    /// Gives the block back. In a forked child it belongs to the parent: `forked` is what happens there.
    fn give_back(
        py: Python<'_>,
        HeldBlock { owner, domain, .. }: HeldBlock,
        forked: impl FnOnce(Error) -> partywall::Result<()> + Send,
    ) -> PyResult<()> {
        // The library would wait for the GPU, too, but a signal ends this wait and leaves the release to the library.
        let drained = if Arc::strong_count(&owner) == 1 && owner.is_exposed() { owner.drain(py) } else { Ok(true) };
        let released = py.detach(move || {
            let released = match drained {
                Ok(true) => owner.into_block().map_or(Ok(()), partywall::Block::release),
                _ => Ok(()),
            };
            let released = match released {
                Err(error @ Error::Unreachable(Unreachable::Forked { .. })) => forked(error),
                released => released,
            };
            // This may be the connection's last handle, whose end waits for the broker.
            drop(domain);
            (released, drained.map(drop))
        });
        released.1?;
        released.0.or_raise(py)
    }

    /// Calls `action` with the block.
    fn with<T>(
        &self,
        owner: &Owner,
        action: impl FnOnce(&mut partywall::Block) -> partywall::Result<T>,
    ) -> partywall::Result<T> {
        owner.with_block(action).unwrap_or_else(|| Err(self.not_held()))
    }
}

/// Returns the owner of a pool's block.
fn owner(pool: &partywall::Pool, block: partywall::Block) -> Arc<Owner> {
    Owner::of_block(block, pool.place(), pool.gpu().map(|gpu: &Gpu| gpu.context().clone()))
}

#[pymethods]
impl Block {
    /// Returns the beginning of the block as a tensor: with the type and shape of a result, unless others are given.
    /// With another type and no shape, of as many elements as fit.
    #[pyo3(signature = (shape = None, dtype = None))]
    pub(crate) fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<Tensor> {
        let HeldBlock { owner, .. } = self.get(py)?;
        let (dtype, shape) = ElementType::view(dtype, shape, (self.described.0, &self.described.1, self.nbytes));
        py.detach(|| self.with(&owner, |block| Tensor::of_block(&owner, block, dtype.0, &shape))).or_raise(py)
    }

    /// Returns the number of bytes at whose multiples elements of a type begin.
    #[staticmethod]
    fn alignment(dtype: ElementType) -> u64 {
        dtype.0.alignment()
    }

    /// Sets all bytes to zero, in host memory.
    fn zero(&self, py: Python<'_>) -> PyResult<()> {
        let HeldBlock { owner, .. } = self.get(py)?;
        py.detach(|| self.with(&owner, partywall::Block::zero)).or_raise(py)
    }

    /// Enqueues setting all bytes to zero.
    fn zero_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let HeldBlock { owner, domain, .. } = self.get(py)?;
        let stream = Stream::find(py, &domain, device, stream)?;
        // From now on work of this process may use the block.
        owner.expose();
        py.detach(|| self.with(&owner, |block| block.zero_on(stream.borrow()))).or_raise(py)
    }

    /// Offers the block to any process, and returns its reference.
    fn offer(&self, py: Python<'_>) -> PyResult<BlockRef> {
        let HeldBlock { owner, .. } = self.get(py)?;
        let offered = |block: &mut partywall::Block| match block.is_output() {
            true => Err(Denied::Offering { queue: block.pool().to_owned() }.into()),
            false => Ok(()),
        };
        self.with(&owner, offered).or_raise(py)?;
        drop(owner);
        let block = self.take_block(py)?;
        let reference = py.detach(move || block.offer()).or_raise(py)?;
        Ok(BlockRef {
            pool: reference.pool().to_owned(),
            version: reference.version(),
            index: reference.index(),
            generation: reference.generation(),
        })
    }

    /// Releases the block. If arrays of it are in use, the last of them releases it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.take(py)?;
        Self::give_back(py, held, Err)
    }

    /// Releases the block, unless it was released before. Does nothing in a forked child.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.lock().take();
        held.map_or(Ok(()), |held| Self::give_back(py, held, |_| Ok(())))
    }

    /// Releases the block when all work that is on a stream now is done. If arrays of it are in use, the last of them
    /// releases it.
    fn release_on(&self, py: Python<'_>, stream: Optional<'_, '_>, device: Optional<'_, '_>) -> PyResult<()> {
        let domain = self.get(py)?.domain;
        let stream = Stream::or_host(py, &domain, stream, device, || "release()".to_owned())?;
        let HeldBlock { owner, domain, place } = self.take(py)?;
        let context = owner.context().cloned();
        let Ok(block) = owner.into_block() else { return Ok(()) };
        match py.detach(|| block.release_on(stream.borrow())) {
            Ok(()) => Ok(()),
            Err(unreleased) => {
                self.put_back(HeldBlock { owner: Owner::of_block(*unreleased.value, place, context), domain, place });
                Err(unreleased.error).or_raise(py)
            }
        }
    }

    /// Whether the block was released, handed over or given to a stream.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }
}
