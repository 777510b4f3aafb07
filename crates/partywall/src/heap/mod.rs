//! GPU memory for the allocators of other libraries, shareable from its birth.
//!
//! An allocator such as torch's or cupy's takes large blocks of memory from the driver, and divides them among tensors.
//! A [`Heap`] gives it such blocks from memory that can be exported. [`Domain::publish`] shares tensors in them without
//! a copy, as kind `live`.
//!
//! A version has at most 128 chunks, each with a file descriptor, and a model has more weights than that. A heap
//! therefore allocates large *chunks* and divides them into blocks, instead of one chunk for each block.
//!
//! Allocators free blocks on any thread, also after the connection has ended, and torch passes nothing but the address.
//! No operation of a heap asks the broker, and the blocks of all heaps are in one list, so an address is enough to free
//! one. No lock of a heap is held while Python or the broker is called, because torch calls under locks of its own.
//!
//! A kernel may still use a range that was freed. The range is therefore used again only after a wait for the context,
//! which happens when the limit leaves no room for another chunk. A chunk goes back with its last block, and its
//! unmapping waits likewise.
//!
//! `publish` finds the block of a tensor by its address, and commits the block's chunk by file descriptor; readers map
//! it as kind `vmm`. The publication keeps the owners of its tensors, and so torch from using their memory, until the
//! last lease has ended (`segment/left`). If the publisher is killed, no process writes the memory any more, and the
//! broker's descriptors keep it.

mod holes;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use partywall_cuda::{Access as CudaAccess, CuResult, CudaError, DeviceUuid, Mapping, PhysicalMemory, round_up};
use partywall_os::{lock::IgnorePoison, per_process::PerProcess, process::fork_generation};

use self::holes::Holes;
use crate::{
    domain::Domain,
    error::{Error, LimitReached, Result, Unreachable},
    gpu::{Gpu, cuda_error},
    place::Place,
};

/// GPU memory that an allocator of another library takes in blocks, and that can be shared from its birth.
///
/// [`allocate`](Self::allocate) returns the address of a block, and [`free`](Self::free) takes it. Tensors in a block
/// are shared by [`Domain::publish`], as kind `live`: without a copy, by file descriptor, so that what is published
/// outlives this process. The version is not frozen, because its chunks contain other memory of this process. Its
/// readers map whole chunks, read-only.
///
/// A heap takes chunks from the GPU as it needs them, each of a 64th of the limit, 32 MiB or the requested block,
/// whichever is largest. A chunk goes back to the GPU when its last block is free.
///
/// Cheap to clone. Dropping a heap frees nothing: its blocks stay until they are freed, and so does what was published
/// until its last reader has dropped it. `Send` and `Sync`.
///
/// ```no_run
/// use partywall::{DType, Domain, Heap, cuda::ForeignMemory};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Domain::connect()?;
/// let heap = domain.heap("weights", partywall::gpu::devices()?[0].uuid()?, 4 << 30)?;
/// let address = heap.allocate(64 << 20)?; // what an allocator's callback returns
/// # let tensor = std::sync::Arc::new(());
/// // SAFETY: the allocator frees the block once `tensor` is dropped.
/// let memory = unsafe { ForeignMemory::new(heap.gpu().context(), address, tensor)? };
/// let published = domain.publish("llm").tensor("w", DType::F32, &[4096, 4096], &memory).kept(true).commit()?;
/// assert_eq!(published.kind(), "live");
/// drop((published, memory));
/// Heap::free(address);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Heap {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    gpu: Arc<Gpu>,
    granularity: u64,
    /// The most bytes of all chunks, a multiple of the granularity.
    limit: u64,
    /// The least bytes of a chunk, unless the limit or the GPU has less.
    chunk_bytes: u64,
    chunks: Mutex<Vec<HeapChunk>>,
    /// The pid and the [`fork_generation`] of the owning process.
    owner: u32,
    generation: u64,
}

struct HeapChunk {
    memory: Arc<Mapping>,
    free: Holes,
    /// Freed ranges that work of the GPU may still use: an allocator may free a block before a kernel that uses it has
    /// run.
    unsettled: Holes,
}

/// A block, which goes back to its heap with the last reference.
pub(crate) struct HeapBlock {
    heap: Arc<Inner>,
    chunk: Arc<Mapping>,
    offset: u64,
    bytes: u64,
}

/// The allocated blocks of all heaps, by address. A forked child has none of them: CUDA does not work there.
static BLOCKS: PerProcess<BTreeMap<u64, Arc<HeapBlock>>> = PerProcess::new();

/// Returns the allocated block that contains an address.
pub(crate) fn block_at(address: u64) -> Option<Arc<HeapBlock>> {
    let blocks = BLOCKS.lock();
    let (start, block) = blocks.range(..=address).next_back()?;
    (address - start < block.bytes).then(|| block.clone())
}

impl Domain {
    /// Creates a heap on a GPU, which takes at most `limit` bytes of it, rounded up to whole allocation units (2 MiB).
    /// It allocates nothing yet. `name` appears in errors.
    ///
    /// # Errors
    /// As [`Domain::gpu`]; [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda) for a GPU without exportable memory.
    pub fn heap(&self, name: &str, gpu: DeviceUuid, limit: u64) -> Result<Heap> {
        let gpu = self.gpu(gpu)?;
        let asking = cuda_error(format!("asking GPU {} for its allocation granularity", gpu.uuid()));
        let granularity = PhysicalMemory::granularity(gpu.context()).map_err(asking)?;
        // Without the last unit the largest limit would overflow.
        let limit = round_up(limit, granularity).unwrap_or(u64::MAX - u64::MAX % granularity);
        let chunk_bytes = round_up((limit / 64).max(CHUNK), granularity).unwrap_or(limit);
        let inner = Inner {
            name: name.to_owned(),
            gpu,
            granularity,
            limit,
            chunk_bytes,
            chunks: Mutex::default(),
            owner: std::process::id(),
            generation: fork_generation(),
        };
        Ok(Heap { inner: Arc::new(inner) })
    }
}

impl Heap {
    /// Allocates a block of at least `bytes` bytes. Returns its address, a multiple of 512.
    ///
    /// Uses memory that the heap has, and otherwise allocates a chunk, which takes as long as
    /// [`PhysicalMemory::create`] and [`Mapping::new`]. If there is no room for a chunk, waits for the work of this
    /// process on the GPU, which may still use freed blocks, and uses those.
    ///
    /// # Errors
    /// [`LimitReached::Heap`] if the limit leaves no room, [`LimitReached::Memory`] if the GPU has none,
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda), [`Unreachable::Forked`].
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        let inner = &self.inner;
        if inner.generation != fork_generation() {
            return Err(Unreachable::Forked { parent: inner.owner }.into());
        }
        // A number that cannot be rounded up exceeds every limit.
        let block = inner.block(round_up(bytes.max(1), ALIGNMENT).unwrap_or(u64::MAX))?;
        let address = block.address();
        BLOCKS.lock().insert(address, Arc::new(block));
        Ok(address)
    }

    /// Frees a block of any heap, given by its address. Returns false if there is none, as in a forked child.
    ///
    /// Memory that is [published](Domain::publish) stays until its last reader has dropped it. Otherwise the range is
    /// used again once the GPU has finished the work of this process. If the chunk has no other block, the chunk goes
    /// back to the GPU before this returns, which waits for that work, as `cudaFree` does. Asks no broker.
    #[must_use = "false means that nothing was freed"]
    pub fn free(address: u64) -> bool {
        // The list is unlocked before the block is dropped.
        let block = BLOCKS.lock().remove(&address);
        block.is_some()
    }

    /// Returns whether an address lies in an allocated block of any heap of this process.
    #[must_use]
    pub fn contains(address: u64) -> bool {
        block_at(address).is_some()
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// Returns the most bytes that the heap takes from the GPU.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.inner.limit
    }

    /// Returns the bytes that the heap has taken from the GPU: of all chunks, whether their blocks are free or not; 0
    /// in a forked child.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // There a thread of the parent may hold the lock for ever.
        if self.inner.generation != fork_generation() {
            return 0;
        }
        total(&self.inner.chunks.lock().ignore_poison())
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { name, gpu, limit, .. } = &*self.inner;
        write!(f, "Heap({name:?}: {} of {limit} bytes on {})", self.bytes(), gpu.uuid())
    }
}

impl Inner {
    /// Allocates a block.
    fn block(self: &Arc<Self>, bytes: u64) -> Result<HeapBlock> {
        let mut chunks = self.chunks.lock().ignore_poison();
        let found = take(&mut chunks, bytes).map_or_else(|| self.grow(&mut chunks, bytes), Ok);
        let (chunk, offset) = match found {
            Err(error @ Error::LimitReached(_)) => {
                self.settle(&mut chunks)?;
                take(&mut chunks, bytes).ok_or(error)?
            }
            found => found?,
        };
        Ok(HeapBlock { heap: self.clone(), chunk, offset, bytes })
    }

    /// Waits for the work that may still use freed ranges, and makes them free.
    fn settle(&self, chunks: &mut [HeapChunk]) -> Result<()> {
        if chunks.iter().all(|chunk| chunk.unsettled.is_empty()) {
            return Ok(());
        }
        let waiting = cuda_error(format!("waiting for the work that may use freed memory of {:?}", self.name));
        self.gpu.context().settle().map_err(waiting)?;
        chunks.iter_mut().for_each(|HeapChunk { free, unsettled, .. }| free.append(unsettled));
        Ok(())
    }

    /// Allocates a chunk, and a block at its beginning.
    fn grow(&self, chunks: &mut Vec<HeapChunk>, bytes: u64) -> Result<(Arc<Mapping>, u64)> {
        let room = self.limit - total(chunks);
        let least = round_up(bytes, self.granularity).filter(|least| *least <= room);
        let least = least.ok_or_else(|| self.out_of_room(bytes, room))?;
        let wanted = least.max(self.chunk_bytes).min(room);
        let created = match self.create(wanted) {
            Err(error) if error.code == CuResult::OUT_OF_MEMORY && wanted > least => self.create(least),
            created => created,
        };
        let memory = Arc::new(created.map_err(|error| match error.code {
            CuResult::OUT_OF_MEMORY => {
                let memory = self.gpu.context().memory_info().ok().map(|memory| (memory.free, memory.total));
                LimitReached::memory(&self.name, Place::Gpu(self.gpu.uuid()), least, memory)
            }
            _ => cuda_error(format!("allocating {least} bytes for {:?} on GPU {}", self.name, self.gpu.uuid()))(error),
        })?);
        let mut free = Holes::whole(memory.len());
        // The chunk is at least as long as the block.
        let offset = free.take(bytes).unwrap_or(0);
        chunks.push(HeapChunk { memory: memory.clone(), free, unsettled: Holes::default() });
        Ok((memory, offset))
    }

    fn create(&self, bytes: u64) -> std::result::Result<Mapping, CudaError> {
        Mapping::new(PhysicalMemory::create(self.gpu.context(), bytes)?, CudaAccess::ReadWrite)
    }

    fn out_of_room(&self, asked: u64, room: u64) -> Error {
        let Self { name, limit, .. } = self;
        LimitReached::Heap { name: name.clone(), asked, taken: limit - room, limit: *limit }.into()
    }
}

/// Takes a range out of the chunk in which the least is left over.
fn take(chunks: &mut [HeapChunk], bytes: u64) -> Option<(Arc<Mapping>, u64)> {
    let fits = chunks.iter_mut().filter_map(|chunk| Some((chunk.free.fit(bytes)?, chunk)));
    let (_, chunk) = fits.min_by_key(|(len, _)| *len)?;
    Some((chunk.memory.clone(), chunk.free.take(bytes)?))
}

fn total(chunks: &[HeapChunk]) -> u64 {
    chunks.iter().map(|chunk| chunk.memory.len()).sum()
}

impl HeapBlock {
    /// Returns the chunk that contains the block.
    pub(crate) fn chunk(&self) -> &Arc<Mapping> {
        &self.chunk
    }

    /// Returns the first address and the length of the chunk.
    pub(crate) fn chunk_range(&self) -> (u64, u64) {
        (self.chunk.device_ptr(), self.chunk.len())
    }

    fn address(&self) -> u64 {
        self.chunk.device_ptr() + self.offset
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        let heap = &self.heap;
        // In a forked child a thread of the parent may hold the lock for ever.
        if heap.generation != fork_generation() {
            return;
        }
        let mut chunks = heap.chunks.lock().ignore_poison();
        let Some(index) = chunks.iter().position(|chunk| Arc::ptr_eq(&chunk.memory, &self.chunk)) else { return };
        let chunk = &mut chunks[index];
        chunk.unsettled.give(self.offset, self.bytes);
        if chunk.free.bytes() + chunk.unsettled.bytes() == chunk.memory.len() {
            // This block has a reference to the memory, too: it is unmapped without the lock.
            chunks.swap_remove(index);
        }
    }
}

/// Bytes of a chunk if a 64th of the limit is less: torch asks for 2 and 20 MiB at a time, and cupy for much less.
const CHUNK: u64 = 32 << 20;

/// What the address of every block is a multiple of. cupy divides blocks into units of this size.
const ALIGNMENT: u64 = 512;
