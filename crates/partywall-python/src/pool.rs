//! Pools and their blocks.

use std::{ops::Deref, sync::Arc};

use partywall::{Domain, Error, Gpu, Place, error::Gone};
use pyo3::prelude::*;

use crate::{
    arguments::{ElementType, Shape},
    build::named_place,
    errors::{Raise, still_used},
    handle::Handle,
    owner::Owner,
    stream::Stream,
    tensor::Tensor,
    wait,
};

/// An open pool.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Pool {
    inner: Handle<Open>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    version: u64,
    #[pyo3(get)]
    blocks: u32,
    #[pyo3(get)]
    block_bytes: u64,
    #[pyo3(get)]
    zeroed: bool,
    #[pyo3(get)]
    place: String,
}

/// What a handle of a pool keeps: the pool, or the queue that it belongs to.
#[derive(Clone)]
pub(crate) enum Open {
    Pool(Arc<partywall::Pool>),
    Inputs(Arc<partywall::Queue>),
}

impl Deref for Open {
    type Target = partywall::Pool;

    fn deref(&self) -> &partywall::Pool {
        match self {
            Self::Pool(pool) => pool,
            Self::Inputs(queue) => queue.inputs(),
        }
    }
}

/// Of a pool: how many blocks there are, are free, held and offered; how many wait for one.
type Stats = (u32, u32, u32, u32, u32);

impl Pool {
    /// Opens it; with numbers, makes it if it is not there.
    pub(crate) fn open(
        py: Python<'_>,
        domain: &Domain,
        name: &str,
        (blocks, block_bytes, zeroed): (Option<u32>, Option<u64>, Option<bool>),
        device: Option<&str>,
        (kept, allow_peer): (bool, bool),
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let makes = blocks.is_some() || block_bytes.is_some();
        let timeout = wait::creation(timeout, makes)?;
        let mut options = domain.pool(name).kept(kept).allow_peer(allow_peer);
        options = blocks.into_iter().fold(options, partywall::PoolOptions::blocks);
        options = block_bytes.into_iter().fold(options, partywall::PoolOptions::block_bytes);
        options = zeroed.into_iter().fold(options, partywall::PoolOptions::zeroed);
        options = match named_place(py, device)? {
            Some(Place::Gpu(uuid)) if !makes => options.device(uuid),
            Some(place) => options.place(place),
            None => options,
        };
        let pool = wait::in_slices(py, timeout, |slice| {
            let options = options.clone().timeout(slice);
            if makes { options.open_or_create() } else { options.open() }
        })?;
        Ok(Self::new(Open::Pool(Arc::new(pool))))
    }

    pub(crate) fn new(pool: Open) -> Self {
        let name = pool.name().to_owned();
        let version = pool.version();
        let place = pool.place().to_string();
        let blocks = pool.blocks();
        let block_bytes = pool.block_bytes();
        let zeroed = pool.is_zeroed();
        Self { inner: Handle::new(pool), name, version, blocks, block_bytes, zeroed, place }
    }

    fn inner(&self, py: Python<'_>) -> PyResult<Open> {
        self.inner.get(py, "pool")
    }
}

#[pymethods]
impl Pool {
    /// Takes a block, and waits for one.
    fn alloc(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Block> {
        let pool = self.inner(py)?;
        let timeout = wait::timeout(timeout)?;
        let closed = || self.closed();
        let block = wait::for_turn(py, "pool", timeout, closed, |wait| pool.alloc(wait))?;
        Ok(Block::new(pool.domain(), pool.gpu(), block))
    }

    /// Takes a block if one is free and nobody waits for it.
    fn try_alloc(&self, py: Python<'_>) -> PyResult<Option<Block>> {
        let pool = self.inner(py)?;
        // Where a block is zeroed first, that takes as long as it takes; else it is over before others could have the GIL.
        let block = if self.zeroed { py.detach(|| pool.try_alloc()) } else { pool.try_alloc() };
        let block = block.or_raise(py)?;
        Ok(block.map(|block| Block::new(pool.domain(), pool.gpu(), block)))
    }

    /// Takes over the block that a reference names.
    fn accept(&self, py: Python<'_>, reference: &str) -> PyResult<Block> {
        let pool = self.inner(py)?;
        let block = reference.parse().and_then(|reference| pool.accept(&reference)).or_raise(py)?;
        Ok(Block::new(pool.domain(), pool.gpu(), block))
    }

    /// What its blocks are at the moment.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        let pool = self.inner(py)?;
        let stats = py.detach(|| pool.stats());
        Ok((stats.blocks, stats.free, stats.held, stats.offered, stats.waiting))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Gives the handle back. Blocks stay. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}

/// A block of a pool.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Block {
    /// `None` once it is given back, or another's, or a stream's.
    held: Handle<Held>,
    #[pyo3(get)]
    pool: String,
    #[pyo3(get)]
    index: u32,
    #[pyo3(get)]
    generation: u64,
    #[pyo3(get)]
    nbytes: u64,
    #[pyo3(get)]
    on_host: bool,
}

#[derive(Clone)]
struct Held {
    owner: Arc<Owner>,
    domain: Domain,
}

impl Block {
    pub(crate) fn new(domain: &Domain, gpu: Option<&Gpu>, block: partywall::Block) -> Self {
        Self::of(domain, block, |block| Owner::of_block(block, gpu.map(|gpu| gpu.context().clone())))
    }

    /// The block of a task's result, which `owner` keeps from now on: the owner of tensors that were made before the take.
    pub(crate) fn of_taken(py: Python<'_>, domain: &Domain, owner: Arc<Owner>, block: partywall::Block) -> Self {
        Self::of(domain, block, |block| {
            py.detach(|| owner.keep_result(block));
            owner
        })
    }

    fn of(domain: &Domain, block: partywall::Block, keep: impl FnOnce(partywall::Block) -> Arc<Owner>) -> Self {
        let pool = block.pool().to_owned();
        let index = block.index();
        let generation = block.generation();
        let nbytes = block.len();
        let owner = keep(block);
        let on_host = owner.context().is_none();
        Self { held: Handle::new(Held { owner, domain: domain.clone() }), pool, index, generation, nbytes, on_host }
    }

    /// Takes the block for another owner, unless arrays look at it.
    pub(crate) fn take_block(&self, py: Python<'_>) -> PyResult<partywall::Block> {
        let Held { owner, domain } = self.take(py)?;
        owner.into_block().map_err(|owner| {
            self.put_back(Held { owner, domain });
            still_used(py, &self.pool)
        })
    }

    /// Takes back a block that its new owner refused.
    pub(crate) fn put_block_back(&self, domain: &Domain, gpu: Option<&Gpu>, block: partywall::Block) {
        let owner = Owner::of_block(block, gpu.map(|gpu| gpu.context().clone()));
        self.put_back(Held { owner, domain: domain.clone() });
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::HeldBlock { pool: self.pool.clone() })
    }

    fn get(&self, py: Python<'_>) -> PyResult<Held> {
        let held = self.held.lock().clone();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn take(&self, py: Python<'_>) -> PyResult<Held> {
        let held = self.held.lock().take();
        held.ok_or_else(|| self.not_held()).or_raise(py)
    }

    fn put_back(&self, held: Held) {
        *self.held.lock() = Some(held);
    }

    fn give_back(py: Python<'_>, Held { owner, domain }: Held) -> PyResult<()> {
        // The library waits for the GPU, too; here a signal ends the wait, and leaves the rest to it.
        let drained = if Arc::strong_count(&owner) == 1 && owner.is_named() { owner.drain(py) } else { Ok(true) };
        let released = py.detach(move || {
            let released = match drained {
                Ok(true) => owner.into_block().map_or(Ok(()), partywall::Block::release),
                _ => Ok(()),
            };
            // The last handle, perhaps, which goes by way of the broker.
            drop(domain);
            (released, drained.map(drop))
        });
        released.1?;
        released.0.or_raise(py)
    }

    /// Looks at the block.
    fn look<T>(
        &self,
        owner: &Owner,
        look: impl FnOnce(&mut partywall::Block) -> partywall::Result<T>,
    ) -> partywall::Result<T> {
        owner.with_block(look).unwrap_or_else(|| Err(self.not_held()))
    }
}

#[pymethods]
impl Block {
    /// The beginning of the block as a tensor, or as many elements as there is room for.
    #[pyo3(signature = (shape, dtype))]
    pub(crate) fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: ElementType) -> PyResult<Tensor> {
        let Held { owner, .. } = self.get(py)?;
        let shape = shape.map_or_else(|| vec![dtype.elements_in(self.nbytes)], |Shape(lengths)| lengths);
        py.detach(|| self.look(&owner, |block| Tensor::of_block(&owner, block, dtype.0, &shape))).or_raise(py)
    }

    /// Sets all its bytes to zero, in host memory.
    fn zero(&self, py: Python<'_>) -> PyResult<()> {
        let Held { owner, .. } = self.get(py)?;
        py.detach(|| self.look(&owner, partywall::Block::zero)).or_raise(py)
    }

    /// Enqueues setting all its bytes to zero.
    fn zero_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let Held { owner, domain } = self.get(py)?;
        let stream = Stream::find(py, &domain, device, stream)?;
        // Now somebody uses it there.
        owner.note_named();
        py.detach(|| self.look(&owner, |block| block.zero_on(stream.borrow()))).or_raise(py)
    }

    /// Offers it to whoever gets what this returns.
    fn offer(&self, py: Python<'_>) -> PyResult<(String, u64, u32, u64)> {
        let block = self.take_block(py)?;
        let reference = py.detach(move || block.offer()).or_raise(py)?;
        Ok((reference.pool().to_owned(), reference.version(), reference.index(), reference.generation()))
    }

    /// Gives it back; if arrays of it are used, the last of them does.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.take(py)?;
        Self::give_back(py, held)
    }

    /// The same, unless that was done before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.lock().take();
        held.map_or(Ok(()), |held| Self::give_back(py, held))
    }

    /// Gives it back when everything that is on a stream now is done; if arrays of it are used, the last of them does.
    fn release_on(&self, py: Python<'_>, device: &str, stream: Option<u64>) -> PyResult<()> {
        let domain = self.get(py)?.domain;
        let stream = Stream::find(py, &domain, device, stream)?;
        let Held { owner, domain } = self.take(py)?;
        let context = owner.context().cloned();
        let Ok(block) = owner.into_block() else { return Ok(()) };
        match py.detach(|| block.release_on(stream.borrow())) {
            Ok(()) => Ok(()),
            Err(unreleased) => {
                self.put_back(Held { owner: Owner::of_block(*unreleased.block, context), domain });
                Err(unreleased.error).or_raise(py)
            }
        }
    }

    /// Whether it was given back, or to another, or to a stream.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }
}
