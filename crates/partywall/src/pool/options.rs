//! Options to create and open pools.

use std::{sync::Arc, time::Duration};

use partywall_cuda::{DeviceUuid, ForeignMemory};
use partywall_shm::pool::MAX_BLOCKS;
use partywall_wire::{Control, Named};

use super::{
    Pool,
    wanted::{Wanted, wanted_setters},
};
use crate::{domain::Domain, error::Result, place::Place};

/// Options to create or open a pool; see [`Domain::pool`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until create(), open() or open_or_create()"]
pub struct PoolOptions {
    pub(super) wanted: Wanted,
    blocks: Option<u32>,
    block_bytes: Option<u64>,
    zeroed: Option<bool>,
}

impl PoolOptions {
    pub(super) fn new(domain: Domain, name: &str) -> Self {
        let wanted = Wanted::new(domain, Named::Pool, name, |_| Ok(Arc::new(())));
        Self { wanted, blocks: None, block_bytes: None, zeroed: None }
    }

    /// Sets the number of blocks: 1 to 65,536. Required to create a pool. An existing pool must have the same number.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Sets the bytes of each block, at least 1. Required to create a pool. The blocks of an existing pool must have
    /// the same size. Each block begins at a multiple of 256 bytes.
    pub fn block_bytes(mut self, bytes: u64) -> Self {
        self.block_bytes = Some(bytes);
        self
    }

    /// Sets whether a block is all zero when it is taken, so that it contains nothing of earlier holders, including
    /// those that died. By default it contains what its last holder left. An existing pool must have the same setting,
    /// if this is given.
    ///
    /// The process that takes a block zeroes it. In host memory that costs as much as writing the block. On a GPU it
    /// costs a memset and a wait for it, unless the block is taken by [`Pool::alloc_on`], which does not wait.
    pub fn zeroed(mut self, zeroed: bool) -> Self {
        self.zeroed = Some(zeroed);
        self
    }

    wanted_setters!("pool", "blocks");

    /// Creates the pool, with all bytes zero.
    ///
    /// # Errors
    /// [`Denied::NameExists`](crate::error::Denied::NameExists);
    /// [`InvalidArgument::Options`](crate::error::InvalidArgument::Options); as
    /// [`Builder::allocate`](crate::Builder::allocate) and [`Build::commit`](crate::Build::commit).
    pub fn create(&self) -> Result<Pool> {
        self.wanted.create(self.control()?).map(Pool::new)
    }

    /// Creates the pool in GPU memory that other code allocated (torch's caching allocator, cupy, `cuMemAlloc`), as
    /// kind `legacy`. The blocks follow each other from `memory`'s address on, which must be a multiple of 256, and
    /// keep their contents. The caller makes sure that no other code uses this memory.
    ///
    /// Like everything that is [published](Domain::publish), such a pool promises less than others. It ends with this
    /// process, or with this process's last handle of the pool. Processes that have the pool open can go on, but no
    /// other process can open it; and if the memory is then used for something else, those processes overwrite it. Keep
    /// the pool open for as long as others use it.
    ///
    /// # Errors
    /// - [`InvalidArgument::Options`](crate::error::InvalidArgument::Options);
    ///   [`InvalidArgument::Table`](crate::error::InvalidArgument::Table) if the blocks reach beyond `memory`'s
    ///   allocation;
    /// - [`Denied::Keeping`](crate::error::Denied::Keeping), [`Denied::NameExists`](crate::error::Denied::NameExists);
    /// - [`DeviceFault::NotShareable`](crate::error::DeviceFault::NotShareable);
    /// - as [`Publication::commit`](crate::Publication::commit).
    pub fn create_in(&self, memory: &ForeignMemory) -> Result<Pool> {
        self.wanted.create_in(memory, self.control()?).map(Pool::new)
    }

    /// Opens the pool.
    ///
    /// # Errors
    /// - [`NotFound::Name`](crate::error::NotFound::Name) without a timeout, [`Error::Timeout`](crate::Error::Timeout)
    ///   with one;
    /// - [`Mismatch::Object`](crate::error::Mismatch::Object) if the name is not a pool,
    ///   [`Mismatch::Options`](crate::error::Mismatch::Options) if the pool differs from these options;
    /// - as [`OpenOptions::open`](crate::OpenOptions::open).
    pub fn open(&self) -> Result<Pool> {
        self.wanted.open(|control| self.check(control)).map(Pool::new)
    }

    /// Opens the pool, or creates it if it does not exist. If several processes call this at once, one of them creates
    /// the pool; if it dies, another does.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) while another process creates it; as [`create`](Self::create) and
    /// [`open`](Self::open), except [`Denied::NameExists`](crate::error::Denied::NameExists) and
    /// [`NotFound::Name`](crate::error::NotFound::Name).
    pub fn open_or_create(&self) -> Result<Pool> {
        self.wanted.open_or_create(self.control()?, |control| self.check(control)).map(Pool::new)
    }

    /// Returns the shape of the pool to create.
    fn control(&self) -> Result<Control> {
        let (Some(blocks), Some(block_bytes)) = (self.blocks, self.block_bytes) else {
            return Err(self.wanted.invalid("the number of blocks and the bytes of each block are required"));
        };
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(self.wanted.invalid(format!("it has 1 to {MAX_BLOCKS} blocks, not {blocks}")));
        }
        let control = Control { blocks, block_bytes, zeroed: self.zeroed.unwrap_or(false), topic: None, queue: None };
        // The limit is the length of a file.
        match control.data_bytes().filter(|bytes| i64::try_from(*bytes).is_ok()) {
            Some(bytes) if bytes > 0 => Ok(control),
            Some(_) => Err(self.wanted.invalid("a block has at least one byte")),
            None => Err(self.wanted.invalid(format!("{blocks} blocks of {block_bytes} bytes are more than 2^63"))),
        }
    }

    /// Refuses a pool that differs from the options.
    pub(super) fn check(&self, control: &Control) -> Result<()> {
        let differs = |why: String| Err(self.wanted.differs(why));
        match (self.blocks, self.block_bytes, self.zeroed) {
            (Some(asked), ..) if asked != control.blocks => {
                differs(format!("it has {} blocks, not {asked}", control.blocks))
            }
            (_, Some(asked), _) if asked != control.block_bytes => {
                differs(format!("its blocks have {} bytes each, not {asked}", control.block_bytes))
            }
            (.., Some(asked)) if asked != control.zeroed => {
                differs(format!("its blocks are {}zeroed when they are taken", if asked { "not " } else { "" }))
            }
            _ => Ok(()),
        }
    }
}
