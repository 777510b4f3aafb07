//! Pools: equal blocks of shared memory that processes take, give back and hand on.

mod block;
mod blocks;
mod options;
mod pools;
mod reference;
mod wanted;

use std::sync::Arc;

use partywall_cuda::StreamRef;
use partywall_shm::pool::{Held, MAX_BLOCKS as MOST};
use partywall_wire::Named;

pub use self::{
    block::{Block, UnreleasedBlock},
    options::PoolOptions,
    reference::BlockRef,
};
pub(crate) use self::{
    blocks::Blocks,
    pools::Pools,
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

/// A named number of equal blocks of memory, in host memory or on a GPU, that any process takes and gives back: for buffers
/// that are made all the time and used by several processes.
///
/// A block is taken and given back in shared memory, without the broker and without the driver: about a tenth of a
/// microsecond while one is free. All blocks are one mapping, made when the pool is opened, however many handles of it a
/// connection has.
///
/// # Ownership
///
/// The holder of a block is the only one that uses it, until it gives the block back, or has [offered](Block::offer) it and
/// another process [accepts](Pool::accept) it. Processes keep to that; the kernel does not enforce it. Each time that a
/// block is taken or accepted it gets another *generation*: a reference to an earlier one is [stale](Gone::Block), and
/// never leads to other data. A block contains what its last user left in it, unless the pool's blocks are
/// [zeroed](PoolOptions::zeroed); [`Block::zero`] and [`Block::zero_on`] clear it.
///
/// # Order
///
/// Callers that find no block wait, and are served in order, exactly as with a [`Semaphore`](crate::Semaphore).
///
/// # Deaths
///
/// Blocks of a process that is killed, and those that it had offered, are free for others within a second of its death's
/// proof; where that proves nothing, as under MPS, they are in quarantine with the process. One that is stopped keeps its
/// blocks; what it waits for goes to the next. When the broker is gone, blocks go round as before, but waits end with
/// [`Unreachable::Gone`](crate::error::Unreachable::Gone).
///
/// The pool goes with the last process that has it open, unless it is [kept](PoolOptions::kept). May be used from any
/// thread.
#[derive(Debug)]
pub struct Pool {
    blocks: Arc<Blocks>,
    spin: AdaptiveSpin,
}

/// What a pool's blocks are at the moment. While others use it the numbers are of no single moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// How many there are.
    pub blocks: u32,
    /// How many anybody may take.
    pub free: u32,
    /// How many are held, or handed to a waiting thread.
    pub held: u32,
    /// How many their holders have offered to others.
    pub offered: u32,
    /// How many threads, of whatever processes, wait for one.
    pub waiting: u32,
}

impl Domain {
    /// Pool `name`: to make it, or to open what another process has made.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Place};
    /// # let domain = Domain::connect()?;
    /// let frames = domain.pool("frames").blocks(64).block_bytes(4 << 20).open_or_create()?;
    /// let mut frame = frames.alloc(Duration::from_secs(1))?;
    /// frame.bytes_mut()?.fill(7);
    /// let sent = frame.offer()?.to_string(); // to another process, in whatever way
    /// // There:
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

    /// Takes a block, and waits for one. A waiter keeps its place in the queue until the wait is over. The block of a
    /// [zeroed](PoolOptions::zeroed) pool is zeroed when this returns.
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
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to wait; [`Unreachable::Forked`](crate::error::Unreachable::Forked). Of zeroing
    /// it: as [`Block::zero`] in host memory; [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) on a GPU.
    pub fn alloc<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Block> {
        self.fresh(self.take(wait.into())?)
    }

    /// As [`alloc`](Self::alloc), for work on `stream`: if the block is to be [zeroed](PoolOptions::zeroed) on a GPU, that is
    /// enqueued there, and not waited for.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); [`InvalidArgument::Range`](crate::error::InvalidArgument::Range) for a stream of another GPU.
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
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked); of zeroing it, as [`alloc`](Self::alloc).
    pub fn try_alloc(&self) -> Result<Option<Block>> {
        let held = slots::try_take(&**self.blocks.control(), self.blocks.domain())?;
        held.map(|held| self.fresh(self.block(held))).transpose()
    }

    /// Takes over a block that its holder has [offered](Block::offer): from then on it is the caller's, as if he had
    /// allocated it, with another generation and the bytes that are in it. Its giver can take it back so, too. Nothing orders the
    /// caller after work of the giver's that a GPU still does in it: a [`Timeline`](crate::Timeline) does.
    ///
    /// # Errors
    /// [`Mismatch::Options`] for a block of another pool, or version of it; [`Gone::Block`] if it is not offered any
    /// more, or never was; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn accept(&self, block: &BlockRef) -> Result<Block> {
        let Self { blocks, .. } = self;
        let link = blocks.domain().link();
        link.require_ours()?;
        if (block.pool(), block.version()) != (blocks.name(), blocks.version()) {
            let why = format!("it is version {} of its name, and {block} is a block of another pool", blocks.version());
            return Err(Mismatch::Options { of: Named::Pool, name: blocks.name().to_owned(), why }.into());
        }
        match blocks.control().accept(link.row(), block.index, block.generation) {
            Some(held) => Ok(self.block(held)),
            None => Err(Error::Gone(Gone::Block { block: block.to_string() })),
        }
    }

    /// What its blocks are at the moment. Takes as long as looking at all of them.
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

    /// How many blocks there are.
    pub fn blocks(&self) -> u32 {
        self.blocks.shape().blocks
    }

    /// Bytes of each block.
    pub fn block_bytes(&self) -> u64 {
        self.blocks.shape().block_bytes
    }

    /// Whether a block is all zero when it is taken.
    pub fn is_zeroed(&self) -> bool {
        self.blocks.shape().zeroed
    }

    /// Where they are.
    pub fn place(&self) -> Place {
        self.blocks.segment().place()
    }

    /// The GPU that this process uses them on; `None` for host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.blocks.gpu()
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.blocks.name()
    }

    /// Which pool of that name it is: of one that was removed and made again there is another.
    pub fn version(&self) -> u64 {
        self.blocks.version()
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        self.blocks.domain()
    }

    fn take(&self, wait: Wait<'_>) -> Result<Block> {
        let Self { blocks, spin } = self;
        let what = || format!("cannot take a block of pool {:?}: none became free", self.name());
        slots::take(&**blocks.control(), blocks.domain(), spin, wait, what).map(|held| self.block(held))
    }

    /// Zeroes a block that was just taken, if the pool promises that. The holder before cannot be relied upon to clear it: it
    /// may have died.
    fn fresh(&self, block: Block) -> Result<Block> {
        if self.is_zeroed() { block.zeroed() } else { Ok(block) }
    }

    fn block(&self, held: Held) -> Block {
        Block::new(self.blocks.clone(), held)
    }
}
