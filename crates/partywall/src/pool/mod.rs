//! Pools: equal blocks of shared memory that processes take, give back and pass on.

mod block;
mod blocks;
#[cfg(feature = "tokio")]
mod future;
mod options;
mod pools;
mod reference;
mod wanted;

use std::sync::Arc;

use partywall_cuda::StreamRef;
use partywall_shm::{pool::MAX_BLOCKS as MOST, slots::HeldSlot};
use partywall_wire::{Named, Notice};

pub(crate) use self::block::tensor;
pub use self::{block::Block, options::PoolOptions, reference::BlockRef};
pub(crate) use self::{
    blocks::{Blocks, Object, Parts},
    wanted::{Wanted, wanted_setters},
};
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::Domain,
    error::{Error, Gone, Mismatch, Result},
    gpu::Gpu,
    place::Place,
    slots,
    wait::Wait,
};

/// The most blocks that a pool can have.
pub const MAX_BLOCKS: u32 = MOST;

/// A fixed number of equal blocks of memory under one name, in host memory or on a GPU. Any process can take a block
/// and give it back. Use a pool for buffers that are needed again and again by several processes.
///
/// Taking a block and giving it back happen in shared memory, without the broker and the driver: about a tenth of a
/// microsecond while a block is free. All blocks are in one mapping, which is made when the pool is opened and shared
/// by all handles of a connection.
///
/// # Ownership
///
/// Only the holder of a block uses it, until the holder gives it back, or has [offered](Block::offer) it and another
/// process [accepts](Pool::accept) it. That is an agreement; the kernel does not enforce it. Each time that a block is
/// taken or accepted it gets another *generation*: a reference to an earlier generation is [stale](Gone::Block), and
/// never leads to other data. A block contains what its last user left in it, unless the pool's blocks are
/// [zeroed](PoolOptions::zeroed); [`Block::zero`] and [`Block::zero_on`] clear it.
///
/// # Order
///
/// Callers that find no free block wait, and are served in order, as with a [`Semaphore`](crate::Semaphore).
///
/// # Deaths
///
/// If a process is killed, its blocks, including those that it has offered, are free within a second after its death is
/// proved. If that does not prove that its GPU work is over, as under MPS, the blocks are in quarantine with the
/// process. A stopped process keeps its blocks; a block that it waits for goes to the next waiter. If the broker is
/// gone, processes can still take and give back blocks, but waits end with
/// [`Unreachable::Gone`](crate::error::Unreachable::Gone).
///
/// The pool ends with the last process that has it open, unless it is [kept](PoolOptions::kept). May be used from any
/// thread.
#[derive(Debug)]
pub struct Pool {
    blocks: Arc<Blocks>,
    spin: AdaptiveSpin,
}

/// How many blocks of a pool are in which state. While other threads use the pool, the counts are not a consistent
/// snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Number of blocks.
    pub blocks: u32,
    /// Blocks that any process may take.
    pub free: u32,
    /// Blocks that are held, or handed to a waiting thread.
    pub held: u32,
    /// Blocks that their holders have offered to others.
    pub offered: u32,
    /// Threads of all processes that wait for a block.
    pub waiting: u32,
}

impl Domain {
    /// Returns options to create or open the pool `name`.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Place};
    /// # let domain = Domain::connect()?;
    /// let frames = domain.pool("frames").blocks(64).block_bytes(4 << 20).open_or_create()?;
    /// let mut frame = frames.alloc(Duration::from_secs(1))?;
    /// frame.bytes_mut()?.fill(7);
    /// let sent = frame.offer()?.to_string(); // send it to another process, by any channel
    /// // In the other process:
    /// let frame = frames.accept(&sent.parse()?)?;
    /// assert_eq!(frame.as_slice::<u32>()?[0], 0x0707_0707);
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn pool(&self, name: &str) -> PoolOptions {
        PoolOptions::new(self.clone(), name)
    }
}

impl Pool {
    pub(crate) fn new(blocks: Arc<Blocks>) -> Self {
        Self { blocks, spin: AdaptiveSpin::on_memory() }
    }

    /// Takes a block, and waits if none is free. A waiter keeps its place in the queue until the wait is over. In a
    /// [zeroed](PoolOptions::zeroed) pool the block is zeroed when this returns.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Pool, Result};
    /// # fn alloc(frames: &Pool) -> Result<()> {
    /// let mut frame = frames.alloc(Duration::from_secs(1))?;
    /// frame.bytes_mut()?.fill(7);
    /// drop(frame); // it is free again; `offer` hands it to another process instead
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `alloc_async` blocks none.
    ///
    /// # Errors
    /// - [`Error::Timeout`], [`Error::Cancelled`];
    /// - [`Unreachable::Gone`](crate::error::Unreachable::Gone) if it has to wait;
    ///   [`Unreachable::Forked`](crate::error::Unreachable::Forked);
    /// - if zeroing fails: as [`Block::zero`] in host memory;
    ///   [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    ///   [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) on a GPU.
    pub fn alloc<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Block> {
        let wait = wait.into();
        // Unless there is something to do with it, the block is made in the caller's place for it.
        if self.is_zeroed() { self.take(wait)?.zeroed() } else { self.take(wait) }
    }

    /// Takes a block as [`alloc`](Self::alloc) does, for work on `stream`. If the block must be
    /// [zeroed](PoolOptions::zeroed) on a GPU, this enqueues the zeroing on `stream` and does not wait for it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); [`InvalidArgument::Range`](crate::error::InvalidArgument::Range) for a stream of
    /// another GPU.
    pub fn alloc_on<'w>(&self, stream: StreamRef<'_>, wait: impl Into<Wait<'w>>) -> Result<Block> {
        let mut block = self.take(wait.into())?;
        match self.gpu() {
            Some(_) if self.is_zeroed() => block.zero_on(stream).map(|()| block),
            _ => self.fresh(block),
        }
    }

    /// Takes a block if one is free and no other thread waits for one.
    ///
    /// # Errors
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked); if zeroing fails, as [`alloc`](Self::alloc).
    pub fn try_alloc(&self) -> Result<Option<Block>> {
        self.blocks.check()?;
        let held = slots::try_take(&**self.blocks.control(), self.blocks.domain())?;
        held.map(|held| self.fresh(self.block(held))).transpose()
    }

    /// Takes over a block that its holder has [offered](Block::offer). The caller then holds it as if it had allocated
    /// it, with another generation and with the bytes that are in it. The process that offered the block can take it
    /// back in this way, too. This does not wait for GPU work of the offering process that still uses the block; use a
    /// [`Timeline`](crate::Timeline) for that.
    ///
    /// ```no_run
    /// # use partywall::{Pool, Result};
    /// # fn receive(frames: &Pool, message: &str) -> Result<()> {
    /// let frame = frames.accept(&message.parse()?)?; // the reference that the other process has sent as text
    /// println!("{} bytes", frame.len());
    /// frame.release() // the block is free again
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Mismatch::Options`] for a block of another pool, or of another version of this one;
    /// - [`Gone::Block`] if the block is not offered, or no longer;
    /// - [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn accept(&self, block: &BlockRef) -> Result<Block> {
        let Self { blocks, .. } = self;
        let link = blocks.domain().link();
        link.require_ours()?;
        blocks.check()?;
        if (block.pool(), block.version()) != (blocks.name(), blocks.version()) {
            let why = format!("it is version {} of its name, and {block} is a block of another pool", blocks.version());
            return Err(Mismatch::Options { of: Named::Pool, name: blocks.name().to_owned(), why }.into());
        }
        match blocks.control().accept(link.row(), block.index, block.generation) {
            Some(held) => Ok(self.block(held)),
            None => Err(Error::Gone(Gone::Block { block: block.to_string() })),
        }
    }

    /// Page-locks the blocks of a pool in host memory and registers them with CUDA, as [`Segment::pin`] does, for as
    /// long as this process has the pool open: copies from and to the [address](Block::as_ptr) of a block are then
    /// asynchronous, on any GPU. A block whose address was handed out is given back once all work of this process on
    /// its GPUs is done. Other processes need no driver to use the pool. Host-synchronous; a second call does nothing.
    ///
    /// [`Segment::pin`]: crate::Segment::pin
    ///
    /// # Errors
    /// - [`Mismatch::Kind`] unless the pool is in host memory;
    /// - [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) if the pages cannot be locked;
    /// - as [`Domain::gpu`](crate::Domain::gpu).
    pub fn pin(&self, gpu: &Gpu) -> Result<()> {
        self.blocks.pin(gpu)
    }

    /// Waits until the pool is removed. Returns the notice if that has a [deadline](Domain::withdraw): until when this
    /// process is to drop the pool, and what happens then.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; those of every call.
    pub fn wait_withdrawn<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Option<Notice>> {
        self.blocks.wait_withdrawn(wait.into())
    }

    /// Returns whether the pool may still be used. Takes nanoseconds.
    ///
    /// # Errors
    /// [`Gone::Withdrawn`] once the deadline of a withdrawal with [`Then::Stale`](crate::Then::Stale) has passed.
    /// Blocks that this process holds stay valid; no other can be taken or accepted.
    /// [`DeviceFault::DeviceLost`](crate::error::DeviceFault::DeviceLost) once the memory is lost.
    pub fn check(&self) -> Result<()> {
        self.blocks.check()
    }

    /// Returns how many blocks are in which state. The time grows with the number of blocks.
    pub fn stats(&self) -> PoolStats {
        let audit = self.blocks.control().audit();
        PoolStats {
            blocks: self.blocks(),
            free: audit.free + audit.stale,
            held: audit.held + audit.handed,
            offered: audit.offered,
            waiting: audit.waiting,
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks.shape().blocks
    }

    /// Returns the bytes of each block.
    pub fn block_bytes(&self) -> u64 {
        self.blocks.shape().block_bytes
    }

    /// Returns whether a block is all zero when it is taken.
    pub fn is_zeroed(&self) -> bool {
        self.blocks.shape().zeroed
    }

    /// Returns where the blocks are.
    pub fn place(&self) -> Place {
        self.blocks.segment().place()
    }

    /// Returns the GPU on which this process uses the blocks; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.blocks.gpu()
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.blocks.name()
    }

    /// Returns the version. A pool that is removed and created again has another version.
    pub fn version(&self) -> u64 {
        self.blocks.version()
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        self.blocks.domain()
    }

    pub(crate) fn memory(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    fn take(&self, wait: Wait<'_>) -> Result<Block> {
        let Self { blocks, spin } = self;
        let what = || format!("cannot take a block of pool {:?}: none became free", self.name());
        blocks.check()?;
        slots::take(&**blocks.control(), blocks.domain(), spin, wait, || blocks.require_live(), what)
            .map(|held| self.block(held))
    }

    /// Zeroes a block that was just taken, if the pool promises that. The previous holder cannot do it when giving the
    /// block back: it may have died.
    fn fresh(&self, block: Block) -> Result<Block> {
        if self.is_zeroed() { block.zeroed() } else { Ok(block) }
    }

    fn block(&self, held: HeldSlot) -> Block {
        Block::new(self.blocks.clone(), held)
    }
}
