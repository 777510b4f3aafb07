//! Making pools, and finding those that others have made.

use std::time::Duration;

use partywall_cuda::{DeviceUuid, ForeignMemory};
use partywall_shm::pool::MAX_BLOCKS;
use partywall_wire::{Control, Named};

use super::{
    Pool,
    wanted::{Wanted, wanted_setters},
};
use crate::{domain::Domain, error::Result, place::Place};

/// Which pool, and how it is to be; see [`Domain::pool`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until create(), open() or open_or_create()"]
pub struct PoolOptions {
    wanted: Wanted,
    blocks: Option<u32>,
    block_bytes: Option<u64>,
    zeroed: Option<bool>,
}

impl PoolOptions {
    pub(super) fn new(domain: Domain, name: &str) -> Self {
        Self { wanted: Wanted::new(domain, Named::Pool, name), blocks: None, block_bytes: None, zeroed: None }
    }

    /// How many blocks: 1 to 65,536. Needed to make a pool; a pool that is there has to have as many.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Bytes of each block, at least 1. Needed to make a pool; one that is there has to have such blocks. Each begins at a
    /// multiple of 256 bytes.
    pub fn block_bytes(mut self, bytes: u64) -> Self {
        self.block_bytes = Some(bytes);
        self
    }

    /// Whether whoever takes a block finds it all zero, and nothing of what others had in it, also of those that died. By
    /// default he finds what its last holder left there. A pool that is there has to be so, if this is given.
    ///
    /// Who takes a block sets it to zero, which takes its time: in host memory as long as writing it, on a GPU as long as
    /// having the GPU do so and waiting for that, unless it is taken by [`Pool::alloc_on`].
    pub fn zeroed(mut self, zeroed: bool) -> Self {
        self.zeroed = Some(zeroed);
        self
    }

    wanted_setters!("pool", "blocks");

    /// Makes it. All its bytes are zero then.
    ///
    /// # Errors
    /// [`Denied::NameExists`](crate::error::Denied::NameExists); [`InvalidArgument::Options`](crate::error::InvalidArgument::Options); as [`Builder::allocate`](crate::Builder::allocate) and [`Build::commit`](crate::Build::commit).
    pub fn create(&self) -> Result<Pool> {
        self.wanted.create(self.control()?).map(Pool::new)
    }

    /// Makes it of memory on a GPU that other code allocated (torch's caching allocator, cupy, `cuMemAlloc`), as kind
    /// `legacy`: its blocks follow each other from `memory`'s address on, which is a multiple of 256, and contain what is there.
    /// The caller sees to it that nobody uses them by another name.
    ///
    /// Such a pool promises less than others, as everything that is [published](Domain::publish): it goes with this
    /// process, or with its last handle of the pool. Who has it open then goes on, but nobody else can open it; and should
    /// the memory be used for something else, blocks are written there. So keep it open as long as others use it.
    ///
    /// # Errors
    /// [`InvalidArgument::Options`](crate::error::InvalidArgument::Options); [`InvalidArgument::Table`](crate::error::InvalidArgument::Table) if the blocks reach beyond `memory`'s allocation; [`Denied::Keeping`](crate::error::Denied::Keeping),
    /// [`DeviceFault::NotShareable`](crate::error::DeviceFault::NotShareable); [`Denied::NameExists`](crate::error::Denied::NameExists); as [`Publication::commit`](crate::Publication::commit).
    pub fn create_in(&self, memory: &ForeignMemory) -> Result<Pool> {
        self.wanted.create_in(memory, self.control()?).map(Pool::new)
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`NotFound::Name`](crate::error::NotFound::Name) without a time-out, [`Error::Timeout`](crate::Error::Timeout) with one; [`Mismatch::Object`](crate::error::Mismatch::Object); [`Mismatch::Options`](crate::error::Mismatch::Options) if it
    /// is not as it was said to be; as [`OpenOptions::open`](crate::OpenOptions::open).
    pub fn open(&self) -> Result<Pool> {
        self.wanted.open(|control| self.check(control)).map(Pool::new)
    }

    /// Opens it, or makes it if it is not there. Of several processes that want that at once one makes it, and if that one
    /// dies, another.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) while another process makes it; as [`create`](Self::create) and [`open`](Self::open), but for
    /// [`Denied::NameExists`](crate::error::Denied::NameExists) and [`NotFound::Name`](crate::error::NotFound::Name).
    pub fn open_or_create(&self) -> Result<Pool> {
        self.wanted.open_or_create(self.control()?, |control| self.check(control)).map(Pool::new)
    }

    /// Returns the shape of the pool to make.
    fn control(&self) -> Result<Control> {
        let (Some(blocks), Some(block_bytes)) = (self.blocks, self.block_bytes) else {
            return Err(self.wanted.invalid("the number of its blocks, and how many bytes each has, are to be given"));
        };
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(self.wanted.invalid(format!("it has 1 to {MAX_BLOCKS} blocks, not {blocks}")));
        }
        let control = Control { blocks, block_bytes, zeroed: self.zeroed.unwrap_or(false), topic: None, queue: None };
        // As many as a file can have.
        match control.data_bytes().filter(|bytes| i64::try_from(*bytes).is_ok()) {
            Some(bytes) if bytes > 0 => Ok(control),
            Some(_) => Err(self.wanted.invalid("a block has at least one byte")),
            None => Err(self.wanted.invalid(format!("{blocks} blocks of {block_bytes} bytes are more than 2^63"))),
        }
    }

    /// Refuses a pool that differs from the options.
    fn check(&self, control: &Control) -> Result<()> {
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
