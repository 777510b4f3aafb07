//! Blocks: allocated, given back, and handed on.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use bytemuck::PodCastError;
use partywall_cuda::{AccessError, StreamRef};
use partywall_os::borrow::BorrowedBlockMut;
use partywall_shm::pool::Held;

use super::{BlockRef, Blocks};
use crate::{
    completion::{Completion, Fence},
    error::{Error, Gone, InvalidArgument, Mismatch, Result},
    gpu::{DeviceRange, failed_call},
    segment::Element,
};
use partywall_wire::Named;

/// A block of a [`Pool`](super::Pool) that its holder alone uses. Dropping it gives it back.
///
/// If its GPU address was asked for, work that this process has enqueued may still use it. A dropped block then comes back
/// when everything is over that the process runs on that GPU at that moment: a thread waits for the GPU. That is always
/// right, and often later than necessary: [`release_on`](Self::release_on) waits for one stream.
///
/// In a forked child it is the parent's, and dropping it there does nothing.
#[must_use = "a block is given back when it is dropped"]
pub struct Block {
    blocks: Arc<Blocks>,
    /// `None` once it is given back, or belongs to another.
    held: Option<Held>,
    /// Its bytes, once they were asked for.
    bytes: OnceLock<Option<BorrowedBlockMut>>,
    /// Whether its GPU address was handed out: then work of this process may use it.
    exposed: AtomicBool,
}

/// A block that could not be given to a stream.
#[derive(Debug)]
pub struct UnreleasedBlock {
    /// Why.
    pub error: Error,
    /// The block, still held.
    pub block: Box<Block>,
}

impl Block {
    pub(crate) fn new(blocks: Arc<Blocks>, held: Held) -> Self {
        Self::exposed(blocks, held, false)
    }

    /// A block whose GPU address may have been handed out.
    pub(crate) fn exposed(blocks: Arc<Blocks>, held: Held, exposed: bool) -> Self {
        Self { blocks, held: Some(held), bytes: OnceLock::new(), exposed: AtomicBool::new(exposed) }
    }

    /// Its bytes, to be written by the CPU. Host memory only.
    ///
    /// # Errors
    /// [`Mismatch::Kind`]; [`Gone::HeldBlock`] if the broker gave it to others, because it took this process for dead,
    /// and another thread of this process has it now.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.borrow()?;
        match self.bytes.get_mut() {
            Some(Some(borrowed)) => Ok(self.blocks.bytes()?.bytes_mut(borrowed)),
            _ => Err(Gone::HeldBlock { pool: self.blocks.name().to_owned() }.into()),
        }
    }

    /// Its bytes, to be read by the CPU. Host memory only.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn bytes(&self) -> Result<&[u8]> {
        Ok(self.blocks.bytes()?.bytes_of_mut(self.borrow()?))
    }

    /// Its first elements of a type, as many as fit, to be written by the CPU. Host memory only.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut); [`Mismatch::BlockSize`] if not one fits.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let len = self.elements::<T>()?;
        let pool = self.blocks.clone();
        bytemuck::try_cast_slice_mut(&mut self.bytes_mut()?[..len]).map_err(|e| not_elements(&pool, e))
    }

    /// Its first elements of a type, as many as fit, to be read by the CPU. Host memory only.
    ///
    /// # Errors
    /// As [`as_mut_slice`](Self::as_mut_slice).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let len = self.elements::<T>()?;
        bytemuck::try_cast_slice(&self.bytes()?[..len]).map_err(|e| not_elements(&self.blocks, e))
    }

    /// Its first address in host memory, for code in other languages, to be used as long as the block is held.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn as_ptr(&self) -> Result<*mut u8> {
        Ok(self.blocks.bytes()?.as_ptr(self.borrow()?))
    }

    /// Where it is on its GPU, for kernels and copies of the caller's.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory.
    pub fn device(&self) -> Result<DeviceRange<'_>> {
        let range = self.blocks.device(self.index())?;
        self.exposed.store(true, Ordering::Relaxed);
        Ok(range)
    }

    /// Sets all its bytes to zero. Host memory only.
    ///
    /// # Errors
    /// As [`bytes_mut`](Self::bytes_mut).
    pub fn zero(&mut self) -> Result<()> {
        self.bytes_mut().map(|bytes| bytes.fill(0))
    }

    /// Enqueues setting all its bytes to zero. Returns at once.
    ///
    /// # Errors
    /// [`Mismatch::Kind`] for host memory; [`InvalidArgument::Range`] for a stream of another GPU; [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda).
    pub fn zero_on(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let range = self.device()?;
        stream.enqueue_set(range.as_slice(), 0).map_err(|error| self.not_zeroed(error))
    }

    /// With all its bytes set to zero, wherever it is.
    pub(super) fn zeroed(mut self) -> Result<Self> {
        let blocks = self.blocks.clone();
        let Some(gpu) = blocks.gpu() else {
            self.zero()?;
            return Ok(self);
        };
        let stream = gpu.stream();
        let set = stream.enqueue_set(blocks.device(self.index())?.as_slice(), 0);
        set.map_err(|error| self.not_zeroed(error))?;
        // A failure drops the block, which then comes back when the GPU is done with it. After a success no work uses it.
        self.exposed = true.into();
        stream.synchronize().map_err(|error| self.not_zeroed(AccessError::Driver(error)))?;
        self.exposed = false.into();
        Ok(self)
    }

    /// Gives it back. If its address on the GPU was asked for, waits first until everything is over that this process runs
    /// there.
    ///
    /// # Errors
    /// [`Gone::HeldBlock`] if it was not held any more: the broker gave it to others, because it took this process for
    /// dead. [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda): it is given back when this process ends. [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release(mut self) -> Result<()> {
        self.blocks.domain().link().require_ours()?;
        let Some(held) = self.let_go() else { return Ok(()) };
        if self.is_exposed() {
            self.blocks.wait_idle()?;
        }
        self.free(&held)
    }

    /// Gives it back when everything that is on `stream` now is done. Returns at once.
    ///
    /// The stream writes a word behind its work, which the connection's service thread polls with pauses of up to 1 ms.
    /// If the process is killed before, the block comes back when its death is proved. If its CUDA context is lost,
    /// nobody knows whether the work is over, and the block comes back with the process's end.
    ///
    /// # Errors
    /// The block comes back with the error, still held: [`DeviceFault::Captured`](crate::error::DeviceFault::Captured), [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release_on(mut self, stream: StreamRef<'_>) -> Result<(), UnreleasedBlock> {
        let domain = self.blocks.domain();
        let fence = match domain.fence_on(stream, || format!("giving a block of pool {:?} to a stream", self.pool())) {
            Ok(fence) => fence,
            Err(error) => return Err(UnreleasedBlock { error, block: Box::new(self) }),
        };
        let Some(held) = self.let_go() else { return Ok(()) };
        let control = self.blocks.control().clone();
        // Without the lease the broker would give the block to others at once.
        let keep = self.blocks.keep();
        self.blocks.domain().completions().on(fence, move |completion| {
            if completion == Completion::Done {
                control.free(&held);
            }
            drop(keep);
        });
        Ok(())
    }

    /// Offers it to the process that gets the reference and [accepts](super::Pool::accept) it. Until then it stays this
    /// process's: it comes back if this process dies, or closes the last handle of the pool. Its bytes must be complete.
    ///
    /// Does not wait for the GPU. If the GPU still works in the block, the process that accepts it must wait for that work,
    /// by a [`Timeline`](crate::Timeline).
    ///
    /// # Errors
    /// [`Gone::HeldBlock`], [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn offer(mut self) -> Result<BlockRef> {
        self.blocks.domain().link().require_ours()?;
        let reference = self.reference();
        match self.let_go() {
            Some(held) if self.blocks.control().offer(&held) => Ok(reference),
            _ => Err(self.not_held()),
        }
    }

    /// Which block of the pool it is, from 0 on.
    pub fn index(&self) -> u32 {
        self.held.as_ref().map_or(0, Held::index)
    }

    /// Another number each time that a block of the pool is taken.
    pub fn generation(&self) -> u64 {
        self.held.as_ref().map_or(0, Held::generation)
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.blocks.shape().block_bytes
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The pool's name.
    pub fn pool(&self) -> &str {
        self.blocks.name()
    }

    fn reference(&self) -> BlockRef {
        let pool = self.blocks.name().to_owned();
        let version = self.blocks.version();
        BlockRef { pool, version, index: self.index(), generation: self.generation() }
    }

    /// Its bytes, taken from the mapping when they are first asked for.
    fn borrow(&self) -> Result<&BorrowedBlockMut> {
        // Once, whatever threads ask at the same time: they would not lend to each other.
        let borrowed = self.bytes.get_or_init(|| self.blocks.borrow_mut(self.index())).as_ref();
        borrowed.ok_or_else(|| self.blocks.bytes().err().unwrap_or_else(|| self.not_held()))
    }

    /// Bytes of the elements of a type that fit.
    fn elements<T: Element>(&self) -> Result<usize> {
        let has = self.len();
        let needed = size_of::<T>() as u64;
        if has < needed {
            return Err(Mismatch::BlockSize { name: self.pool().to_owned(), of: Named::Pool, has, needed }.into());
        }
        Ok((has - has % needed) as usize)
    }

    /// Returns whether it is one of these blocks.
    pub(crate) fn is_of(&self, blocks: &Arc<Blocks>) -> bool {
        Arc::ptr_eq(&self.blocks, blocks)
    }

    /// Returns what is held, to be given to a queue.
    pub(crate) fn held(&self) -> Result<&Held> {
        let is_current = |held: &&Held| self.blocks.control().is_current(held.index(), held.generation());
        self.held.as_ref().filter(is_current).ok_or_else(|| self.not_held())
    }

    /// Ends the use of its bytes by this process, which still holds it.
    pub(crate) fn into_held(mut self) -> Option<Held> {
        self.let_go()
    }

    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed)
    }

    /// Ends the use of its bytes until somebody asks for them again, so that the next holder can use them.
    pub(crate) fn end_use(&mut self) {
        self.blocks.give_back_mut(self.bytes.take().flatten());
    }

    fn let_go(&mut self) -> Option<Held> {
        self.end_use();
        self.held.take()
    }

    fn free(&self, held: &Held) -> Result<()> {
        if self.blocks.control().free(held) { Ok(()) } else { Err(self.not_held()) }
    }

    fn not_zeroed(&self, error: AccessError) -> Error {
        match error {
            AccessError::Driver(source) => failed_call(&format!("zeroing a block of {:?}", self.pool()), source),
            other => InvalidArgument::range(self.pool(), other.to_string()),
        }
    }

    fn not_held(&self) -> Error {
        Error::Gone(Gone::HeldBlock { pool: self.pool().to_owned() })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(held) = self.let_go() else { return };
        if self.blocks.domain().link().require_ours().is_err() {
            return;
        }
        if self.is_exposed() {
            let control = self.blocks.control().clone();
            let fence = Fence::DeviceIdle(self.blocks.clone());
            return self.blocks.domain().completions().on(fence, move |completion| {
                if completion == Completion::Done {
                    control.free(&held);
                }
            });
        }
        if let Err(error) = self.free(&held) {
            tracing::warn!(%error, "a block was given back too late");
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({}: {} bytes)", self.reference(), self.len())
    }
}

fn not_elements(blocks: &Blocks, error: PodCastError) -> Error {
    InvalidArgument::range(blocks.name(), format!("a block's bytes are no elements: {error}"))
}
