//! Kinds of memory. Each kind is one file that implements three traits, and one line in [`KINDS`].
//!
//! A version's memory is a few *chunks*. While it is built they are a [`Draft`], which only this process has; a commit
//! turns them into file descriptors for the broker and a [`Memory`] for the committer; an open turns file descriptors
//! into a [`Memory`].

mod host;
pub(crate) mod legacy;
mod vmm;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use partywall_cuda::{DeviceUuid, HostRegistration};
use partywall_os::{borrow::BlockBorrows, map::SharedMap};
use partywall_wire::{Kind as WireKind, LegacyHandle};

use crate::{
    error::{Error, Mismatch, Result, Unreachable},
    gpu::{DeviceRange, Gpu, Gpus},
    place::Place,
};

/// A kind of memory.
pub(crate) trait Kind: Sync {
    /// What the protocol calls it.
    fn wire(&self) -> WireKind;

    /// What people call it.
    fn name(&self) -> &'static str;

    /// Whether it lives at such a place.
    fn lives_at(&self, place: Place) -> bool;

    /// Memory for chunks that use `used` bytes each. Memory that is to grow is one chunk at first, with `reserve` bytes
    /// of addresses.
    fn allocate(
        &self,
        name: &str,
        place: Place,
        used: &[u64],
        reserve: Option<u64>,
        gpus: &Gpus,
    ) -> Result<Box<dyn Draft>>;

    /// A chunk of at least `bytes` bytes for memory that grows: its length, and what the broker gets.
    fn chunk(&self, name: &str, place: Place, bytes: u64, gpus: &Gpus) -> Result<(u64, OwnedFd)>;

    /// Maps what a broker handed out.
    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>>;
}

/// What a kind needs to know to map a version.
#[derive(Debug)]
pub(crate) struct Attach<'a> {
    pub(crate) name: &'a str,
    pub(crate) place: Place,
    /// Bytes of each chunk, and its file descriptor, which is closed once it is mapped.
    pub(crate) chunks: Vec<(u64, OwnedFd)>,
    /// In place of file descriptors, bytes of each chunk and what opens it.
    pub(crate) handles: Vec<(u64, LegacyHandle)>,
    pub(crate) mutable: bool,
    /// Bytes of addresses for chunks that lie one behind the other; 0 if each may lie anywhere.
    pub(crate) reserve: u64,
    pub(crate) write: bool,
    /// The GPU that is to read, if it is not the owner's.
    pub(crate) device: Option<DeviceUuid>,
    pub(crate) allow_peer: bool,
    pub(crate) gpus: &'a Gpus,
}

/// Chunks that are being written and that no other process has.
pub(crate) trait Draft: Send + Sync {
    /// Bytes of each chunk, as allocated.
    fn chunk_bytes(&self) -> Vec<u64>;

    /// Bytes that it may grow to; 0 if it may not.
    fn reserved(&self) -> u64;

    /// Part of a chunk as plain bytes, if the CPU can have it so.
    fn host_mut(&mut self, chunk: usize, offset: u64, bytes: u64) -> Result<&mut [u8]>;

    /// Part of a chunk on its GPU, if it is there.
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>>;

    /// The GPU that has it, if one has.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Something that copies host bytes into the chunks, also from several threads at once.
    fn uploads(&mut self) -> Box<dyn Uploads + '_>;

    /// Ends the writing, unless the memory is `mutable`. What has been given out stays where it is; where it is frozen it
    /// can be read only. If it fails, or once more, it may be asked again.
    fn freeze(&mut self, mutable: bool) -> Result<()>;

    /// For the broker, once frozen: a file descriptor a chunk.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// What the committer has, once frozen.
    fn into_memory(self: Box<Self>) -> Box<dyn Memory>;
}

/// Makes uploads for threads.
pub(crate) trait Uploads: Sync {
    /// An upload for one thread.
    fn start(&self) -> Result<Box<dyn Upload + '_>>;
}

/// Copies host bytes into chunks, piece by piece.
pub(crate) trait Upload {
    /// A buffer for the next piece; pinned memory where that is faster.
    fn buffer(&mut self) -> Result<&mut [u8]>;

    /// Copies parts of the buffer. May return before they are there; the buffer is to be asked for again.
    fn submit(&mut self, copies: &[Copy]) -> Result<()>;

    /// Waits until everything is there.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A part of an upload's buffer and where it belongs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy {
    /// Where it begins in the buffer.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) chunk: usize,
    /// Where it belongs in the chunk.
    pub(crate) offset: u64,
}

/// The mapped chunks of a committed version. Of one that may grow they are one chunk: they lie one behind the other.
pub(crate) trait Memory: Send + Sync {
    /// Part of a chunk that never changes.
    fn bytes(&self, _chunk: usize, _offset: u64, _bytes: u64) -> Result<&[u8]> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    /// A chunk that the CPU can reach, and that may change at any time.
    fn shared(&self, _chunk: usize) -> Result<&SharedMap> {
        Err(wrong_kind("GPU", "mutable host", "a shared slice"))
    }

    /// Divides the first chunk, if the CPU can write it, into `count` blocks of `bytes` bytes, which start at `offset` and then every
    /// `stride` bytes, to be borrowed one by one. Returns `None` on a GPU, if the blocks do not lie within the chunk, or if
    /// the chunk is divided already.
    fn block_borrows(&self, _offset: u64, _stride: u64, _bytes: u64, _count: u32) -> Option<BlockBorrows> {
        None
    }

    /// Part of a chunk on its GPU.
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>>;

    /// The GPU that this process uses it on, if it is for one.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Copies out; returns when the bytes are there.
    fn read(&self, chunk: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let range = self.device(chunk, offset, out.len() as u64)?;
        range.copy_to_host(range.gpu.stream(), out)
    }

    /// Copies in; returns when the bytes are there. Only called on mappings for writing.
    fn write(&self, chunk: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let range = self.device(chunk, offset, bytes.len() as u64)?;
        range.copy_from_host(range.gpu.stream(), bytes)
    }

    /// Registers each chunk with CUDA, or shares what is registered already.
    fn pin(&self, _: &Gpu) -> Result<Vec<Arc<HostRegistration>>> {
        Err(wrong_kind("GPU", "host", "pinning"))
    }

    /// Gives back what [`Memory::pin`] gave.
    fn unpin(&self, _: Vec<Arc<HostRegistration>>) {}

    /// Bytes that it can have here without moving; 0 if it cannot grow.
    fn reserved(&self) -> u64 {
        0
    }

    /// Maps chunks, given by their lengths and file descriptors, behind those that are there. Only called on memory that
    /// may grow, with what fits into [`Memory::reserved`].
    fn extend(&self, chunks: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>>;

    /// Whether it is this process's own memory that others open, and so must stay until nobody is told of it any more.
    fn is_published(&self) -> bool {
        false
    }
}

/// Chunks that are mapped and do not show yet. Dropping it unmaps them.
pub(crate) trait Extension {
    /// Makes them part of the memory.
    fn publish(self: Box<Self>);
}

/// Every kind there is.
static KINDS: [&dyn Kind; 3] = [&host::Host, &vmm::Vmm, &legacy::Legacy];

/// The kind that is native at `place`.
pub(crate) fn native(place: Place) -> Result<&'static dyn Kind> {
    let found = KINDS.into_iter().find(|kind| kind.lives_at(place));
    found.ok_or_else(|| Error::Unreachable(Unreachable::Refused(format!("no kind of memory lives at {place}"))))
}

/// The kind that the protocol calls `wire`.
pub(crate) fn by_wire(wire: WireKind) -> Result<&'static dyn Kind> {
    let found = KINDS.into_iter().find(|kind| kind.wire() == wire);
    found.ok_or_else(|| Unreachable::protocol(format!("the kind {wire:?} is unknown")))
}

/// What people call a kind.
pub fn kind_name(kind: WireKind) -> &'static str {
    by_wire(kind).map_or("unknown", |kind| kind.name())
}

/// The error of asking `has` memory for what only `wanted` memory can do. The caller fills in whose it is.
pub(crate) fn wrong_kind(has: &'static str, wanted: &'static str, operation: &'static str) -> Error {
    Error::Mismatch(Mismatch::Kind { name: String::new(), has, wanted, operation })
}
