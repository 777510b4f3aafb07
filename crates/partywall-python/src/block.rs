//! Blocks of pools. Python uses this class itself, as it does [`Sample`](crate::sample::Sample).

use std::sync::Arc;

use partywall::{
    DType, Error, Gpu, Place,
    error::{Denied, Gone, Unreachable},
};
use partywall_os::process::fork_generation;
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyTuple};

use crate::{
    arguments::{Count, ElementType, Optional, Shape},
    errors::{Never, Raise, misaligned, still_used, unclosed},
    exported::{Export, Exported},
    handle::Handle,
    owner::Owner,
    stream::Stream,
    tensor::Tensor,
    value::{Tuple, value},
};

value! {
    /// A reference to an offered block.
    BlockRef, "partywall._pool", "BlockRef", {
        pool: String, version: u64, index: u32, generation: u64,
    }
}

value! {
    /// A tensor in a block.
    BlockPart, "partywall._pool", "BlockPart", {
        block: Py<Block>, shape: Tuple<u64>, dtype: &'static str, offset: u64,
    }
}

/// A block of a pool. Give it back with `release`, `release_on` or the end of its `with`, or `offer` it.
///
/// `from_dlpack`, `np.asarray` and similar functions take its bytes; `tensor` gives them another shape and type. Arrays
/// of a block hold it: the block returns to the pool when the last of them is dropped. On a GPU it returns once all
/// work of this process on that GPU is done.
#[pyclass(frozen, extends = Exported, module = "partywall", weakref)]
pub(crate) struct Block {
    /// `None` once the block was released, handed over or given to a stream.
    held: Handle<HeldBlock>,
    /// The pool's name.
    #[pyo3(get)]
    pool: String,
    /// Which block of the pool it is.
    #[pyo3(get)]
    index: u32,
    /// A number that changes each time a block of the pool is taken.
    #[pyo3(get)]
    generation: u64,
    /// Its size in bytes.
    #[pyo3(get)]
    nbytes: u64,
    /// The type and shape of a task's result; all bytes of other blocks.
    described: (DType, Vec<u64>),
    /// The fork generation in which the block was taken: in a forked child it belongs to the parent.
    taken_in: u64,
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
        Self { held, pool, index, generation, nbytes, described, taken_in: fork_generation() }
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

impl Export for Block {
    fn exported(&self, py: Python<'_>) -> PyResult<Tensor> {
        self.tensor(py, None, None)
    }
}

#[pymethods]
impl Block {
    /// Returns the beginning of the block as a tensor, of bytes unless a dtype is given. Without a shape, the tensor
    /// has as many elements as fit. The block of a task's result has the type and shape of the result by default.
    #[pyo3(signature = (shape = None, dtype = None))]
    pub(crate) fn tensor(&self, py: Python<'_>, shape: Option<Shape>, dtype: Option<ElementType>) -> PyResult<Tensor> {
        let HeldBlock { owner, .. } = self.get(py)?;
        let (dtype, shape) = ElementType::view(dtype, shape, (self.described.0, &self.described.1, self.nbytes));
        py.detach(|| self.with(&owner, |block| Tensor::of_block(&owner, block, dtype.0, &shape))).or_raise(py)
    }

    /// Names a tensor in the block, `offset` bytes from its beginning, as the input of a task: `Queue.submit` takes it.
    /// The worker gets exactly that, with this type and shape. The offset is a multiple of an element's bytes.
    #[pyo3(
        signature = (shape, dtype = ElementType(DType::U8), *, offset = Count(0)),
        text_signature = "($self, shape, dtype='uint8', *, offset=0)",
    )]
    fn part(slf: Bound<'_, Self>, shape: Shape, dtype: ElementType, offset: Count) -> PyResult<BlockPart> {
        let ElementType(dtype) = dtype;
        let Count(offset) = offset;
        if !offset.is_multiple_of(dtype.alignment()) {
            return Err(misaligned(slf.py(), dtype, offset, &slf.get().pool));
        }
        Ok(BlockPart { block: slf.unbind(), shape: Tuple(shape.0), dtype: dtype.name(), offset })
    }

    /// Sets all bytes to zero: immediately in host memory, on a GPU after the work on `stream`.
    ///
    /// In pinned memory the CPU does it if no `stream` is given.
    #[pyo3(signature = (stream = None))]
    fn zero(&self, py: Python<'_>, stream: Optional<'_, '_>) -> PyResult<()> {
        let HeldBlock { owner, domain, place } = self.get(py)?;
        if place == Place::Host || stream.is_none() && place.is_cpu_reachable() {
            return py.detach(|| self.with(&owner, partywall::Block::zero)).or_raise(py);
        }
        let stream = Stream::at(py, &domain, stream, None)?;
        // From now on work of this process may use the block.
        owner.expose();
        py.detach(|| self.with(&owner, |block| block.zero_on(stream.borrow()))).or_raise(py)
    }

    /// Offers the block. It stays with this process until another one accepts it with the returned reference.
    ///
    /// Drop all arrays of the block first; otherwise raises `StillUsed`. The block of a task's result cannot be offered
    /// (`WrongKind`): send the task, or a copy.
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

    /// Whether the block must still be given back.
    #[getter]
    fn held(&self) -> bool {
        !self.closed()
    }

    /// Gives the block back; on a GPU, once all work of this process on it is done. Raises `NotHeld` if it is not held.
    ///
    /// If arrays of the block are still in use, the last of them gives it back.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.take(py)?;
        Self::give_back(py, held, Err)
    }

    /// As `release`, but does nothing if the block was already given back, offered or left to a stream.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.lock().take();
        held.map_or(Ok(()), |held| Self::give_back(py, held, |_| Ok(())))
    }

    /// Gives the block back once all work that is now on the stream is done. Returns immediately.
    ///
    /// `stream` and `device` are as for a `Timeline`. If arrays of the block are still in use, the last of them gives
    /// it back, as with `release`.
    #[pyo3(signature = (stream = None, *, device = None))]
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

    /// Whether the block was given back, accepted by another process, or left to a stream.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised: "object"))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.taken_in == fork_generation() { self.close(py) } else { Ok(()) }
    }

    fn __reduce__(&self) -> PyResult<Never> {
        Err(PyTypeError::new_err("a block is this process's own: offer it, and send the returned reference"))
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "given back" } else { "held" };
        format!("<partywall.Block {} of {}: {} bytes, {state}>", self.index, self.pool, self.nbytes)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.closed() && self.taken_in == fork_generation() {
            unclosed(&self.__repr__());
        }
    }
}
