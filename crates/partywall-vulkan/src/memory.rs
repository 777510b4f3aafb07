//! Imported memory, and buffers in it.

use std::{
    ffi::c_void,
    fmt,
    marker::PhantomData,
    ops::{Deref, Range},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    sync::Arc,
};

use ash::vk;
use partywall::{Block, ChunkDescriptor, Descriptors, HeldBlock, Loan, Place, Sample};
use partywall_os::{
    map::{SealedMap, SharedMap},
    memfd::{self, Draft},
};

use crate::{
    error::{Error, Result, failed},
    gpu::Gpu,
};

/// Every use of a buffer that an import may serve.
const USAGES: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::UNIFORM_BUFFER.as_raw()
        | vk::BufferUsageFlags::VERTEX_BUFFER.as_raw()
        | vk::BufferUsageFlags::INDEX_BUFFER.as_raw()
        | vk::BufferUsageFlags::INDIRECT_BUFFER.as_raw(),
);

/// The usages for which a buffer is written.
const WRITING: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::TRANSFORM_FEEDBACK_BUFFER_EXT.as_raw()
        | vk::BufferUsageFlags::TRANSFORM_FEEDBACK_COUNTER_BUFFER_EXT.as_raw(),
);

/// The least number of a duplicate that a driver may close: a number that few processes reach.
const FAR: u64 = 1 << 12;

/// The memory of a segment, pool or topic in Vulkan: one `VkDeviceMemory` for each chunk, and the lease.
/// [`Gpu::import`] returns one.
///
/// Buffers of a segment are made by [`buffer`](Self::buffer). In a pool or topic a process uses only the blocks that it
/// holds: [`block`](Self::block), [`loan`](Self::loan) and [`sample`](Self::sample) make buffers of these, and no other
/// call does.
///
/// Dropping it frees the imports, unmaps host memory and gives the lease back. Buffers keep it.
pub struct ImportedMemory {
    /// Freed before the lease is given back.
    chunks: Vec<Chunk>,
    descriptors: Descriptors,
    gpu: Arc<Gpu>,
}

pub(crate) struct Chunk {
    pub(crate) memory: vk::DeviceMemory,
    pub(crate) bytes: u64,
    memory_type: u32,
    /// The mapping that host memory was imported from.
    _map: Option<HostMap>,
}

/// A mapping of host memory, which must stay as long as the import.
pub(crate) enum HostMap {
    Frozen(SealedMap),
    /// A mutable chunk, or a copy of a frozen one for a driver that imports no read-only mapping. NVIDIA's imports
    /// neither that nor a private mapping (580.159.04, a driver fact).
    Writable(SharedMap),
}

impl Gpu {
    /// Imports a segment, pool or topic: each chunk once. See [`ImportedMemory`].
    ///
    /// # Errors
    /// [`Error::WrongGpu`] for memory of another GPU; [`Error::Unsupported`] if the device was created without the
    /// extension for this kind of memory; [`Error::Vulkan`] if the driver refuses the import.
    pub fn import(self: &Arc<Self>, descriptors: Descriptors) -> Result<Arc<ImportedMemory>> {
        if let Place::Gpu(owner) = descriptors.place()
            && owner != self.uuid()
        {
            let name = descriptors.name().to_owned();
            return Err(Error::WrongGpu { name, owner, device: self.name().to_owned(), uuid: self.uuid() });
        }
        if let Place::Pinned(_) = descriptors.place() {
            let missing = "import of the CUDA driver's pinned host memory";
            return Err(self.unsupported(missing, "memory of kind pinned"));
        }
        let is_host = descriptors.place() == Place::Host;
        // Dropped with the chunks that it has, if a later one fails.
        let mut imported = ImportedMemory { chunks: Vec::new(), descriptors, gpu: self.clone() };
        for chunk in imported.descriptors.chunks() {
            let chunk = if is_host {
                let map = HostMap::new(&imported.descriptors, chunk, !self.host_import()?.takes_read_only)?;
                self.import_host(map, chunk.bytes())?
            } else {
                self.import_fd(chunk.as_fd(), chunk.bytes())?
            };
            imported.chunks.push(chunk);
        }
        Ok(Arc::new(imported))
    }

    /// Imports a chunk that a driver exported.
    pub(crate) fn import_fd(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Chunk> {
        self.require_memory_fd()?;
        let kind = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
        let memory_type = self.type_of_import(kind, u32::MAX)?;
        let failed = |source| Error::System { what: "duplicating a descriptor for Vulkan".to_owned(), source };
        let duplicate = far_duplicate(fd).map_err(|errno| failed(errno.into()))?;
        // Vulkan owns a descriptor that it has imported, and only that.
        let number = duplicate.into_raw_fd();
        let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(kind).fd(number);
        let memory = self.allocate(bytes, memory_type, &mut import).inspect_err(|_| {
            // lavapipe (Mesa 22.3) and NVIDIA's driver (580.159.04) close a descriptor that they refuse. Khronos
            // documents the contrary.
            if is_same_file(number, fd) {
                // SAFETY: the number still refers to the duplicate, which has no other owner.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
        })?;
        Ok(Chunk { memory, bytes, memory_type, _map: None })
    }

    /// Imports a mapping of host memory, the last page included.
    pub(crate) fn import_host(&self, map: HostMap, bytes: u64) -> Result<Chunk> {
        let host = self.host_import()?;
        let address = map.address();
        let size = bytes.next_multiple_of(host.alignment);
        // Mappings are whole pages: what is beyond the file's end in the last page reads as zero.
        if host.alignment > rustix::param::page_size() as u64 || !(address as u64).is_multiple_of(host.alignment) {
            return Err(self.unsupported("import of host memory by single pages", "a segment"));
        }
        let kind = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        // SAFETY: the device is alive; the mapping has `size` bytes at this address for the whole call.
        let asked = unsafe {
            let ask = host.functions.fp().get_memory_host_pointer_properties_ext;
            ask(self.device().handle(), kind, address, &raw mut properties)
        };
        asked.result().map_err(failed("asking how host memory can be imported"))?;
        let memory_type = self.type_of_import(kind, properties.memory_type_bits)?;
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(kind).host_pointer(address);
        let memory = self.allocate(size, memory_type, &mut import)?;
        Ok(Chunk { memory, bytes: size, memory_type, _map: Some(map) })
    }

    /// Returns a memory type that buffers of this kind of import and the import itself accept.
    fn type_of_import(&self, kind: vk::ExternalMemoryHandleTypeFlags, bits: u32) -> Result<u32> {
        let probe = self.create_buffer(kind, 4096, USAGES)?;
        // SAFETY: the buffer is alive, and destroyed after its last use.
        let requirements = unsafe {
            let requirements = self.device().get_buffer_memory_requirements(probe);
            self.device().destroy_buffer(probe, None);
            requirements
        };
        let needs = || self.unsupported("memory type for buffers in imported memory", "an import");
        self.memory_type(requirements.memory_type_bits & bits).ok_or_else(needs)
    }

    fn allocate(
        &self,
        bytes: u64,
        memory_type: u32,
        import: &mut impl vk::ExtendsMemoryAllocateInfo,
    ) -> Result<vk::DeviceMemory> {
        let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(memory_type);
        let allocate = allocate.push_next(import);
        // SAFETY: the device is alive, and the callers' import describes memory of at least `bytes` bytes that they
        // own.
        let memory = unsafe { self.device().allocate_memory(&allocate, None) };
        memory.map_err(failed(format!("importing {bytes} bytes on {}", self.name())))
    }

    pub(crate) fn create_buffer(
        &self,
        kind: vk::ExternalMemoryHandleTypeFlags,
        bytes: u64,
        usage: vk::BufferUsageFlags,
    ) -> Result<vk::Buffer> {
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(kind);
        let create = vk::BufferCreateInfo::default().size(bytes).usage(usage).push_next(&mut external);
        // SAFETY: the device is alive, and the structures are valid.
        unsafe { self.device().create_buffer(&create, None) }.map_err(failed("creating a buffer"))
    }
}

impl ImportedMemory {
    /// Makes a buffer of a tensor.
    ///
    /// # Errors
    /// [`Error::Partywall`] with [`NotFound::Tensor`](partywall::error::NotFound::Tensor); [`Error::ReadOnly`];
    /// [`Error::Buffer`] for a tensor without bytes, one that spans chunks (see [`Descriptors::may_grow`]), or one that
    /// is not aligned as Vulkan asks; [`Error::Vulkan`].
    pub fn buffer(self: &Arc<Self>, tensor: &str, usage: vk::BufferUsageFlags) -> Result<Buffer> {
        let table = self.descriptors.table();
        let Some(found) = table.find(tensor) else {
            return Err(self.not_possible(format!("it has no tensor {tensor:?}")));
        };
        if !self.descriptors.may_grow() {
            return self.buffer_at(found.chunk(), found.offset()..found.offset() + found.bytes(), usage);
        }
        let mut start = 0;
        for (index, chunk) in self.descriptors.chunks().iter().enumerate() {
            let end = start + chunk.bytes();
            if found.offset() < end {
                let offset = found.offset() - start;
                return self.buffer_at(index, offset..offset + found.bytes(), usage);
            }
            start = end;
        }
        Err(self.not_possible(format!("tensor {tensor:?} lies outside of it")))
    }

    /// Makes a buffer of a range of bytes of a chunk.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer); [`Error::Buffer`] for a range outside of the chunk.
    pub fn buffer_at(self: &Arc<Self>, chunk: usize, range: Range<u64>, usage: vk::BufferUsageFlags) -> Result<Buffer> {
        if self.descriptors.has_blocks() {
            let why = "it has blocks, and only those that this process holds may be used: call block, loan or sample";
            return Err(self.not_possible(why.to_owned()));
        }
        self.make(chunk, range, usage)
    }

    /// Makes a buffer of a block of the imported pool. The block cannot be given back, offered or read by the CPU
    /// before the buffer is dropped; drop it when the work that uses it is done.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use partywall::Domain;
    /// use partywall_vulkan::{Gpu, ash::vk};
    ///
    /// let domain = Domain::connect()?;
    /// let pool = domain.pool("frames").open()?;
    /// let memory = Gpu::open(None)?.import(pool.descriptors()?)?; // once: about 25 ms for each GiB on an H200
    /// let mut block = pool.alloc(Duration::from_secs(1))?;
    /// let buffer = memory.block(&mut block, vk::BufferUsageFlags::STORAGE_BUFFER)?;
    /// // … submit work on `buffer.handle()`, and wait for it …
    /// drop(buffer); // before that the block can be neither offered nor freed
    /// let reference = block.offer()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Partywall`] with [`Mismatch::Options`](partywall::error::Mismatch::Options) for a block of another
    /// pool; [`Error::Buffer`], [`Error::Vulkan`].
    pub fn block<'b>(self: &Arc<Self>, block: &'b mut Block, usage: vk::BufferUsageFlags) -> Result<BlockBuffer<'b>> {
        self.held(block, usage)
    }

    /// Makes a buffer of a loan of the imported topic, as [`block`](Self::block) does.
    ///
    /// # Errors
    /// As [`block`](Self::block).
    pub fn loan<'b>(self: &Arc<Self>, loan: &'b mut Loan, usage: vk::BufferUsageFlags) -> Result<BlockBuffer<'b>> {
        self.held(loan, usage)
    }

    /// Makes a buffer of a sample of the imported topic, for reading. The sample cannot be given back before the buffer
    /// is dropped. The buffer does not wait for the stream of a publisher: call [`Sample::wait`] first.
    ///
    /// # Errors
    /// As [`block`](Self::block); [`Error::ReadOnly`].
    pub fn sample<'b>(self: &Arc<Self>, sample: &'b Sample, usage: vk::BufferUsageFlags) -> Result<BlockBuffer<'b>> {
        if usage.intersects(WRITING) {
            return Err(Error::ReadOnly { name: self.descriptors.name().to_owned() });
        }
        self.held(sample, usage)
    }

    fn held<'b>(self: &Arc<Self>, block: &impl HeldBlock, usage: vk::BufferUsageFlags) -> Result<BlockBuffer<'b>> {
        let buffer = self.make(0, block.range_in(&self.descriptors)?, usage)?;
        Ok(BlockBuffer { buffer, block: PhantomData })
    }

    fn make(self: &Arc<Self>, chunk: usize, range: Range<u64>, usage: vk::BufferUsageFlags) -> Result<Buffer> {
        if !self.descriptors.is_mutable() && usage.intersects(WRITING) {
            return Err(Error::ReadOnly { name: self.descriptors.name().to_owned() });
        }
        let chunks = self.chunks.len();
        let at = self.chunks.get(chunk);
        let at = at.ok_or_else(|| self.not_possible(format!("it has {chunks} chunks, and no chunk {chunk}")))?;
        let has = self.descriptors.chunks()[chunk].bytes();
        if range.is_empty() || range.end > has {
            let why = format!("bytes {range:?} are none, or not all within chunk {chunk} of {has}");
            return Err(self.not_possible(why));
        }
        let bytes = range.end - range.start;
        let handle = self.gpu.create_buffer(self.handle_type(), bytes, usage)?;
        // Destroyed by its drop if it cannot be bound.
        let buffer = Buffer { handle, bytes, memory: self.clone() };
        // SAFETY: the buffer is alive.
        let needs = unsafe { self.gpu.device().get_buffer_memory_requirements(handle) };
        if !range.start.is_multiple_of(needs.alignment) {
            return Err(self.not_possible(format!("byte {} is not a multiple of {}", range.start, needs.alignment)));
        }
        if needs.size > at.bytes - range.start {
            let why = format!("Vulkan needs {} bytes for {bytes} at the end of the chunk", needs.size);
            return Err(self.not_possible(why));
        }
        if needs.memory_type_bits & (1 << at.memory_type) == 0 {
            let why = format!("imported memory does not serve for this usage on {}", self.gpu.name());
            return Err(self.not_possible(why));
        }
        let failed = failed("binding a buffer to imported memory");
        // SAFETY: both handles are alive, the buffer is bound once, and offset, size and memory type are as it needs.
        unsafe { self.gpu.device().bind_buffer_memory(handle, at.memory, range.start) }.map_err(failed)?;
        Ok(buffer)
    }

    /// Returns the table of the tensors.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn handle_type(&self) -> vk::ExternalMemoryHandleTypeFlags {
        match self.descriptors.place().gpu() {
            None => vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
            Some(_) => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
        }
    }

    fn not_possible(&self, why: String) -> Error {
        Error::Buffer { name: self.descriptors.name().to_owned(), why }
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            if self.gpu.is_ours() {
                // SAFETY: no buffer is left, as each keeps this value, and the rules of the crate forbid work on it.
                // The mapping of host memory is dropped with the chunk, afterwards.
                unsafe { self.gpu.device().free_memory(chunk.memory, None) };
            }
        }
    }
}

impl fmt::Debug for ImportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImportedMemory({:?} on {})", self.descriptors, self.gpu.name())
    }
}

/// A `VkBuffer` in imported memory. Destroyed when dropped.
pub struct Buffer {
    handle: vk::Buffer,
    bytes: u64,
    memory: Arc<ImportedMemory>,
}

impl Buffer {
    /// Returns the buffer.
    pub fn handle(&self) -> vk::Buffer {
        self.handle
    }

    /// Returns its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the memory that it is in.
    pub fn memory(&self) -> &Arc<ImportedMemory> {
        &self.memory
    }

    /// Returns the barrier that makes what other processes have written visible to accesses on a queue of
    /// `queue_family`, after a wait for their timeline. Its source stage is [`outside`](Self::outside).
    pub fn acquire(&self, access: vk::AccessFlags, queue_family: u32) -> vk::BufferMemoryBarrier<'static> {
        let barrier = self.barrier().dst_access_mask(access);
        match self.memory.descriptors.place().gpu() {
            None => barrier.src_access_mask(vk::AccessFlags::HOST_WRITE),
            Some(_) => barrier.src_queue_family_index(vk::QUEUE_FAMILY_EXTERNAL).dst_queue_family_index(queue_family),
        }
    }

    /// Returns the barrier that makes what a queue of `queue_family` has written visible to other processes, before a
    /// signal of a timeline. Its destination stage is [`outside`](Self::outside).
    pub fn release(&self, access: vk::AccessFlags, queue_family: u32) -> vk::BufferMemoryBarrier<'static> {
        let barrier = self.barrier().src_access_mask(access);
        match self.memory.descriptors.place().gpu() {
            None => barrier.dst_access_mask(vk::AccessFlags::HOST_READ),
            Some(_) => barrier.src_queue_family_index(queue_family).dst_queue_family_index(vk::QUEUE_FAMILY_EXTERNAL),
        }
    }

    /// Returns the stage at which other processes use the memory, for barriers.
    pub fn outside(&self) -> vk::PipelineStageFlags {
        match self.memory.descriptors.place().gpu() {
            None => vk::PipelineStageFlags::HOST,
            Some(_) => vk::PipelineStageFlags::ALL_COMMANDS,
        }
    }

    fn barrier(&self) -> vk::BufferMemoryBarrier<'static> {
        vk::BufferMemoryBarrier::default()
            .buffer(self.handle)
            .size(vk::WHOLE_SIZE)
            .src_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
            .dst_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.memory.gpu.is_ours() {
            // SAFETY: this is its last use; the rules of the crate forbid work on it.
            unsafe { self.memory.gpu.device().destroy_buffer(self.handle, None) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes of {:?})", self.bytes, self.memory)
    }
}

/// Duplicates a descriptor to a high number. If the driver closes it, no other thread gets the number: the kernel opens
/// files under the lowest free one.
///
/// The number is bounded, because the kernel's table of a process is as long as its highest number: with the limit of
/// 1,073,741,816 files that some containers have, half of the limit would take gigabytes.
fn far_duplicate(fd: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    rustix::io::fcntl_dupfd_cloexec(fd, (most / 2).min(FAR) as i32)
}

/// A `VkBuffer` of a block, which its holder can neither give back nor use otherwise until this is dropped.
#[derive(Debug)]
pub struct BlockBuffer<'b> {
    buffer: Buffer,
    block: PhantomData<&'b ()>,
}

impl Deref for BlockBuffer<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

/// Returns whether a number of this process stands for the same file as a descriptor.
fn is_same_file(number: RawFd, fd: BorrowedFd<'_>) -> bool {
    let file =
        |number: RawFd| std::fs::metadata(format!("/proc/self/fd/{number}")).map(|file| (file.dev(), file.ino()));
    matches!((file(number), file(fd.as_raw_fd())), (Ok(a), Ok(b)) if a == b)
}

impl HostMap {
    /// Maps a chunk, or with `copy` a copy of it if it is frozen.
    fn new(descriptors: &Descriptors, chunk: &ChunkDescriptor, copy: bool) -> Result<Self> {
        // Vulkan would read beyond the end of a shorter file.
        if memfd::len(chunk).ok() != Some(chunk.bytes()) {
            let why = "the length of a chunk differs from the announced length".to_owned();
            return Err(Error::Buffer { name: descriptors.name().to_owned(), why });
        }
        let map = if descriptors.is_mutable() {
            SharedMap::writable(chunk).map(Self::Writable)
        } else if copy {
            SealedMap::new(chunk).and_then(|frozen| Self::copy_of(&frozen))
        } else {
            SealedMap::new(chunk).map(Self::Frozen)
        };
        let what = || format!("mapping a chunk of {:?}", descriptors.name());
        map.map_err(|errno| Error::System { what: what(), source: errno.into() })
    }

    /// Returns other memory with the same bytes, which the driver may write.
    fn copy_of(frozen: &SealedMap) -> rustix::io::Result<Self> {
        let mut copy = Draft::create("partywall:vulkan", frozen.bytes().len() as u64)?;
        copy.bytes_mut()?.copy_from_slice(frozen.bytes());
        SharedMap::writable(copy.share()?).map(Self::Writable)
    }

    /// Returns the address, as writable as Vulkan wants it. The kernel refuses writes to a read-only mapping.
    fn address(&self) -> *mut c_void {
        match self {
            Self::Frozen(map) => map.bytes().as_ptr().cast_mut().cast(),
            Self::Writable(map) => map.as_ptr().cast(),
        }
    }
}

#[cfg(test)]
mod tests {
    use ash::khr;

    use super::*;

    const OPAQUE: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
    const BYTES: u64 = 2 << 20;

    /// Tests the import of GPU memory without a GPU: lavapipe imports its own descriptors, and no others.
    // Holds 229.
    #[test]
    fn needs_vulkan_exported_memory_is_imported_by_its_descriptor() {
        let gpu = Gpu::open(None).unwrap();
        let device = gpu.device();
        let instance = gpu.instance().unwrap();
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(OPAQUE);
        // SAFETY: all handles are alive, and freed at the end.
        unsafe {
            let memory = gpu.allocate(BYTES, gpu.type_of_import(OPAQUE, u32::MAX).unwrap(), &mut export).unwrap();
            let ask = vk::MemoryGetFdInfoKHR::default().memory(memory).handle_type(OPAQUE);
            let fd = khr::external_memory_fd::Device::new(instance, device).get_memory_fd(&ask).unwrap();
            let fd = OwnedFd::from_raw_fd(fd);
            let there: *mut u8 = device.map_memory(memory, 0, BYTES, vk::MemoryMapFlags::empty()).unwrap().cast();
            there.add(4096).write_volatile(7);

            let imported = gpu.import_fd(fd.as_fd(), BYTES).unwrap();
            assert!(rustix::io::fcntl_getfd(&fd).is_ok(), "the caller keeps its descriptor");
            let again: *mut u8 =
                device.map_memory(imported.memory, 0, BYTES, vk::MemoryMapFlags::empty()).unwrap().cast();
            assert_eq!(again.add(4096).read_volatile(), 7);
            again.add(4096).write_volatile(8);
            assert_eq!(there.add(4096).read_volatile(), 8);
            device.free_memory(imported.memory, None);
            device.free_memory(memory, None);
        }
    }

    /// Tests the way in which frozen memory is imported by a driver that takes no read-only mapping.
    #[test]
    fn needs_vulkan_copy_of_frozen_memory_is_imported_with_its_bytes() {
        let gpu = Gpu::open(None).unwrap();
        let file = memfd::frozen("partywall:test", &[7; 8192]).unwrap();
        let map = HostMap::copy_of(&SealedMap::new(&file).unwrap()).unwrap();
        let chunk = gpu.import_host(map, 8192).unwrap();
        // SAFETY: the memory is alive, host-visible on this driver, and freed at the end.
        unsafe {
            let there = gpu.device().map_memory(chunk.memory, 0, 8192, vk::MemoryMapFlags::empty()).unwrap();
            let there: *mut u8 = there.cast();
            assert_eq!(there.add(5000).read_volatile(), 7);
            there.add(5000).write_volatile(8);
            gpu.device().free_memory(chunk.memory, None);
        }
        assert_eq!(SealedMap::new(&file).unwrap().bytes(), [7; 8192]);
    }

    #[test]
    fn far_duplicate_leaves_the_table_of_descriptors_small_under_any_limit() {
        partywall_os::process::raise_fd_limit();
        let file = memfd::frozen("partywall:test", &[7; 8]).unwrap();
        let duplicate = far_duplicate(file.as_fd()).unwrap();
        assert!((100..2 << 12).contains(&duplicate.as_raw_fd()), "{duplicate:?}");
    }

    // Holds 229.
    #[test]
    fn needs_vulkan_descriptor_that_the_driver_refuses_is_closed() {
        let gpu = Gpu::open(None).unwrap();
        let foreign = memfd::frozen("partywall:test", &[1; 4096]).unwrap();
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = files();
        match gpu.import_fd(foreign.as_fd(), 4096) {
            Err(Error::Vulkan { code: vk::Result::ERROR_INVALID_EXTERNAL_HANDLE, what }) => {
                assert_eq!(what, format!("importing 4096 bytes on {}", gpu.name()));
            }
            other => panic!("{:?}", other.map(|chunk| chunk.bytes)),
        }
        assert_eq!(files(), before);
    }
}
