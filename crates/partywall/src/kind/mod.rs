//! Kinds of memory. Each kind is one file that implements three traits, and one line in [`KINDS`].
//!
//! A version's memory is a few *chunks*. While it is built they are a [`Draft`], which only this process has; a commit
//! turns them into file descriptors for the broker and a [`Memory`] for the committer; an open turns file descriptors
//! into a [`Memory`].

mod host;
pub(crate) mod legacy;
pub(crate) mod live;
mod pinned;
mod vmm;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use partywall_cuda::{
    AccessError, Context, CudaError, DeviceSlice, DeviceUuid, HostRegistration, IpcMemoryHandle, Mapping, round_up,
};
use partywall_os::{borrow::BlockBorrows, map::SharedMap};
use partywall_wire::{Kind as WireKind, LegacyHandle};

use crate::{
    error::{Error, Mismatch, Result, Unreachable},
    gpu::{DeviceRange, Gpu, Gpus, access_error},
    place::{Access, Place},
};

/// A kind of memory.
pub(crate) trait Kind: Sync {
    /// Returns the kind of the protocol.
    fn wire(&self) -> WireKind;

    /// Returns whether this is the native kind at `place`. Kinds that only publish memory of others live nowhere.
    fn lives_at(&self, _place: Place) -> bool {
        false
    }

    /// Allocates chunks that use `used` bytes each. Memory that may grow begins as one chunk, with `reserve` bytes of
    /// addresses.
    fn allocate(
        &self,
        _name: &str,
        _place: Place,
        _used: &[u64],
        _reserve: Option<u64>,
        _gpus: &Arc<Gpus>,
    ) -> Result<Box<dyn Draft>> {
        Err(wrong_kind(self.wire().name(), "other", "an allocation"))
    }

    /// Returns the length of a chunk that is to hold `bytes` bytes.
    fn allocated(&self, bytes: u64) -> Result<u64> {
        Ok(bytes)
    }

    /// Allocates a chunk of at least `bytes` bytes for memory that grows. Returns its length, and the file descriptor
    /// for the broker.
    fn chunk(&self, _name: &str, _place: Place, _bytes: u64, _gpus: &Arc<Gpus>) -> Result<(u64, OwnedFd)> {
        Err(wrong_kind(self.wire().name(), "other", "an allocation"))
    }

    /// Maps a version that the broker has granted.
    fn attach(&self, version: Attach<'_>) -> Result<Box<dyn Memory>>;
}

/// The facts that a kind needs to map a version.
#[derive(Debug)]
pub(crate) struct Attach<'a> {
    pub(crate) name: &'a str,
    pub(crate) place: Place,
    /// The length of each chunk, and its file descriptor, which is closed once the chunk is mapped.
    pub(crate) chunks: Vec<(u64, OwnedFd)>,
    /// Instead of file descriptors: the length of each chunk, and the handle that opens it.
    pub(crate) handles: Vec<(u64, LegacyHandle)>,
    pub(crate) mutable: bool,
    /// Bytes of addresses for consecutive chunks; 0 if each chunk may lie anywhere.
    pub(crate) reserve: u64,
    pub(crate) write: bool,
    /// The GPU on which to use the memory; `None` for the default.
    pub(crate) device: Option<DeviceUuid>,
    pub(crate) allow_peer: bool,
    /// What is to have access to pinned memory from the start.
    pub(crate) access: Access,
    /// True if a process of this process's user has committed it.
    pub(crate) is_own: bool,
    pub(crate) gpus: &'a Arc<Gpus>,
}

/// Chunks that are being written and that no other process has open.
pub(crate) trait Draft: Send + Sync {
    /// Returns the length of each chunk, as allocated.
    fn chunk_bytes(&self) -> Vec<u64>;

    /// Allocates one more chunk, of at least `bytes` bytes, behind the others. Only called before the memory is frozen,
    /// on memory that may not grow.
    fn push(&mut self, name: &str, place: Place, bytes: u64, gpus: &Arc<Gpus>) -> Result<()>;

    /// Returns how many bytes the memory may grow to; 0 if it may not.
    fn reserved(&self) -> u64;

    /// Returns part of a chunk as plain bytes, if the CPU can reach it.
    fn host_mut(&mut self, chunk: usize, offset: u64, bytes: u64) -> Result<&mut [u8]>;

    /// Returns part of a chunk on its GPU.
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>>;

    /// Returns part of a chunk on this GPU if every GPU reaches the memory, else on its own.
    fn device_on(&self, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceSlice<'_>> {
        on_its_own(self.device(chunk, offset, bytes)?, gpu)
    }

    /// Returns the GPU that has the memory, if any.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Begins to copy host bytes into the chunks, by one or several threads.
    fn uploads(&mut self) -> Box<dyn Uploads + '_>;

    /// Ends the writing, unless the memory is `mutable`. Existing mappings stay in place, read-only if the memory is
    /// frozen. May be called again, also after a failure.
    fn freeze(&mut self, mutable: bool) -> Result<()>;

    /// Returns a file descriptor for each chunk, for the broker, once frozen.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Turns the frozen draft into the committer's memory.
    fn into_memory(self: Box<Self>) -> Box<dyn Memory>;
}

/// Makes uploads for threads.
pub(crate) trait Uploads: Sync {
    /// Begins an upload by the calling thread.
    fn start(&self) -> Result<Box<dyn Upload + '_>>;
}

/// Copies host bytes into chunks, piece by piece.
pub(crate) trait Upload {
    /// Returns a buffer for the next piece: pinned memory where that is faster.
    fn buffer(&mut self) -> Result<&mut [u8]>;

    /// Copies parts of the buffer. May return before the copies are done; call [`buffer`](Self::buffer) for the next
    /// piece.
    fn submit(&mut self, copies: &[Copy]) -> Result<()>;

    /// Waits until all copies are done.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A part of an upload's buffer, and its target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy {
    /// Where the part begins in the buffer.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) chunk: usize,
    /// The offset in the chunk.
    pub(crate) offset: u64,
}

/// The mapped chunks of a committed version. The consecutive chunks of a version that may grow count as one. The
/// default methods are for GPU memory that cannot grow.
pub(crate) trait Memory: Send + Sync {
    /// Returns whether the CPU has access.
    fn has_cpu(&self) -> bool {
        false
    }

    /// Gives the CPU access, unless it has it.
    fn allow_cpu(&self) -> Result<()> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    /// Returns part of a chunk that never changes.
    fn bytes(&self, _chunk: usize, _offset: u64, _bytes: u64) -> Result<&[u8]> {
        Err(wrong_kind("GPU", "host", "a slice"))
    }

    /// Returns a chunk that the CPU can reach, and that may change at any time.
    fn shared(&self, _chunk: usize) -> Result<&SharedMap> {
        Err(wrong_kind("GPU", "mutable host", "a shared slice"))
    }

    /// Divides the first chunk, if the CPU can write it, into `count` blocks of `bytes` bytes that can be borrowed one
    /// by one. The first begins at `offset`, the others follow every `stride` bytes. Returns `None` if the CPU has no
    /// access, if the blocks do not lie within the chunk, or if the chunk is already divided.
    fn block_borrows(&self, _offset: u64, _stride: u64, _bytes: u64, _count: u32) -> Option<BlockBorrows> {
        None
    }

    /// Returns part of a chunk on its GPU.
    fn device(&self, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceRange<'_>>;

    /// Returns part of a chunk on this GPU if every GPU reaches the memory, else as [`device`](Self::device).
    fn device_on(&self, gpu: &Gpu, chunk: usize, offset: u64, bytes: u64) -> Result<DeviceSlice<'_>> {
        on_its_own(self.device(chunk, offset, bytes)?, gpu)
    }

    /// Returns the GPU on which this process uses the memory, if any.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Uses memory that every GPU reaches on the context's GPU from now on, unless a GPU is chosen already.
    fn choose_gpu(&self, _: &Context) -> Result<()> {
        Ok(())
    }

    /// Copies bytes out of a chunk. Host-synchronous.
    fn read(&self, chunk: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let range = self.device(chunk, offset, out.len() as u64)?;
        range.copy_to_host(range.gpu.stream(), out)
    }

    /// Copies bytes into a chunk. Host-synchronous. Only called on mappings for writing.
    fn write(&self, chunk: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let range = self.device(chunk, offset, bytes.len() as u64)?;
        range.copy_from_host(range.gpu.stream(), bytes)
    }

    /// Registers each chunk with CUDA, or shares its existing registration.
    fn pin(&self, _: &Gpu) -> Result<Vec<Arc<HostRegistration>>> {
        Err(wrong_kind("GPU", "host", "pinning"))
    }

    /// Returns the registration of a chunk while it is pinned. Give it back by [`unpin`](Self::unpin).
    fn registration(&self, _chunk: usize) -> Option<Arc<HostRegistration>> {
        None
    }

    /// Drops registrations of [`Memory::pin`] and [`Memory::registration`].
    fn unpin(&self, _: Vec<Arc<HostRegistration>>) {}

    /// Returns how many bytes the memory can have in this process without moving; 0 if it cannot grow.
    fn reserved(&self) -> u64 {
        0
    }

    /// Maps chunks, given by their lengths and file descriptors, after the existing ones. Only called on memory that
    /// may grow, with chunks that fit into [`Memory::reserved`].
    fn extend(&self, chunks: &[(u64, OwnedFd)]) -> Result<Box<dyn Extension + '_>>;

    /// Returns the mapping of each chunk, whose memory can be replaced at its addresses; `None` for other than GPU
    /// memory of a version that cannot grow.
    fn mappings(&mut self) -> Option<&mut [Mapping]> {
        None
    }

    /// Waits for the work of this process that may use the memory, before [`vacate`](Self::vacate).
    fn settle(&mut self) -> Result<(), CudaError> {
        Ok(())
    }

    /// Unmaps everything and drops what this process has of the memory, but keeps the addresses for
    /// [`refill`](Self::refill). Returns `None`, and does nothing, for memory whose addresses the driver chooses. Until
    /// the memory is back, no part of it may be asked for; after an error it never comes back.
    fn vacate(&mut self) -> Option<Result<(), CudaError>> {
        None
    }

    /// Maps the chunks again, given by their lengths and file descriptors, at the addresses that they had. After an
    /// error some of them may be mapped. A repeated call maps the others, and [`vacate`](Self::vacate) unmaps those.
    fn refill(&mut self, _chunks: &[(u64, OwnedFd)]) -> Result<()> {
        Err(wrong_kind("legacy", "other", "resuming"))
    }

    /// Returns the driver's handle of a chunk, if it is an allocation that this memory keeps alive.
    fn ipc_handle(&self, _chunk: usize) -> Option<IpcMemoryHandle> {
        None
    }

    /// Returns whether this process has published the memory, which must then stay until the lease is given back.
    fn is_published(&self) -> bool {
        false
    }
}

/// Chunks that are mapped, but not part of the memory yet. Dropping this unmaps them.
pub(crate) trait Extension {
    /// Makes the chunks part of the memory.
    fn publish(self: Box<Self>);
}

/// All kinds.
static KINDS: [&dyn Kind; 5] =
    [&host::HostKind, &pinned::PinnedKind, &vmm::VmmKind, &legacy::LegacyKind, &live::LiveKind];

/// Returns the kind that is native at `place`.
pub(crate) fn native(place: Place) -> Result<&'static dyn Kind> {
    let found = KINDS.into_iter().find(|kind| kind.lives_at(place));
    found.ok_or_else(|| Error::Unreachable(Unreachable::Refused(format!("no kind of memory lives at {place}"))))
}

/// Returns the bytes of host memory that the kernel can still give away, swap among them, and those of all of it.
pub(crate) fn host_memory() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix(" kB"))?;
        Some(line.trim().parse::<u64>().ok()? << 10)
    };
    let swap = |key| bytes(key).unwrap_or(0);
    Some((bytes("MemAvailable:")? + swap("SwapFree:"), bytes("MemTotal:")? + swap("SwapTotal:")))
}

/// Returns the kind that the protocol calls `wire`.
pub(crate) fn by_wire(wire: WireKind) -> Result<&'static dyn Kind> {
    let found = KINDS.into_iter().find(|kind| kind.wire() == wire);
    found.ok_or_else(|| Unreachable::protocol(format!("the kind {wire:?} is unknown")))
}

/// Returns the name of a kind for users.
pub fn kind_name(kind: WireKind) -> &'static str {
    kind.name()
}

/// Makes a chunk of whole allocation units for each of `used`: all or none. `chunk` gets its bytes, those of all chunks,
/// and those of the addresses to reserve, which are returned, too. Returns `None` if the bytes overflow.
fn chunks<C>(
    used: &[u64],
    reserve: Option<u64>,
    granularity: u64,
    chunk: impl Fn(u64, u64, u64) -> Result<C>,
) -> Option<Result<(Vec<C>, u64)>> {
    let sizes = used.iter().map(|bytes| round_up(*bytes, granularity)).collect::<Option<Vec<_>>>()?;
    let total = sizes.iter().try_fold(0_u64, |sum, bytes| sum.checked_add(*bytes))?;
    let reserved = reserve.map_or(0, |reserve| reservation(reserve, total, granularity));
    let made = sizes.into_iter().map(|bytes| chunk(bytes, total, reserved)).collect::<Result<_>>();
    Some(made.map(|chunks| (chunks, reserved)))
}

/// Rounds a reservation up to whole allocation units, and to at least `used`.
fn reservation(bytes: u64, used: u64, granularity: u64) -> u64 {
    round_up(bytes, granularity).unwrap_or(0).max(used)
}

/// An upload by the CPU: its buffer is filled, then written into the chunks at once.
struct HostUpload<'a, C> {
    chunks: &'a [C],
    buffer: Vec<u8>,
    write: fn(&C, u64, &[u8]) -> Result<()>,
}

impl<'a, C> HostUpload<'a, C> {
    fn new(chunks: &'a [C], write: fn(&C, u64, &[u8]) -> Result<()>) -> Self {
        Self { chunks, buffer: vec![0; BUFFER], write }
    }
}

impl<C> Upload for HostUpload<'_, C> {
    fn buffer(&mut self) -> Result<&mut [u8]> {
        Ok(&mut self.buffer)
    }

    fn submit(&mut self, copies: &[Copy]) -> Result<()> {
        copies.iter().try_for_each(|Copy { start, len, chunk, offset }| {
            (self.write)(&self.chunks[*chunk], *offset, &self.buffer[*start..start + len])
        })
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// Leaves a reservation in the place of each mapping, before those that there are already.
fn vacate<M, R>(
    mapped: &mut Vec<M>,
    vacant: &mut Vec<R>,
    vacate: impl Fn(M) -> Result<R, CudaError>,
) -> Result<(), CudaError> {
    let vacated = mapped.drain(..).map(vacate).collect::<Result<Vec<_>, _>>()?;
    vacant.splice(..0, vacated);
    Ok(())
}

/// Maps memories at the reservations that [`vacate`] has left: one at each, or all at the only one. If that fails, those
/// that are mapped stay so, and a repeated call maps the others.
fn refill<R, M, P>(
    vacant: &mut Vec<R>,
    mapped: &mut Vec<M>,
    mut memories: Vec<P>,
    map: impl Fn(R, Vec<P>) -> Result<M, Box<(R, CudaError)>>,
) -> Result<(), CudaError> {
    memories.drain(..mapped.len().min(memories.len()));
    while !vacant.is_empty() {
        let of_this = if vacant.len() == 1 { memories.len() } else { memories.len().min(1) };
        match map(vacant.remove(0), memories.drain(..of_this).collect()) {
            Ok(mapping) => mapped.push(mapping),
            Err(failed) => {
                let (reservation, error) = *failed;
                vacant.insert(0, reservation);
                return Err(error);
            }
        }
    }
    Ok(())
}

fn outside() -> Error {
    Unreachable::protocol("a tensor lies outside its chunk")
}

/// Returns the range, unless it is used on another GPU than this one.
fn on_its_own<'a>(range: DeviceRange<'a>, gpu: &Gpu) -> Result<DeviceSlice<'a>> {
    if range.gpu.uuid() == gpu.uuid() {
        Ok(range.slice)
    } else {
        Err(access_error("a copy on the stream of another GPU")(AccessError::OtherContext))
    }
}

/// Returns the error that `operation` needs `wanted` memory, not `has` memory. The caller fills in the name.
pub(crate) fn wrong_kind(has: &'static str, wanted: &'static str, operation: &'static str) -> Error {
    Error::Mismatch(Mismatch::Kind { name: String::new(), has, wanted, operation })
}

/// Bytes of the buffer of a [`HostUpload`]: it stays in a core's second-level cache between reading and writing.
const BUFFER: usize = 512 * 1024;
