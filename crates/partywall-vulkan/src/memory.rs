//! Imported memory, and buffers in it.

use std::{
    ffi::c_void,
    fmt,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    sync::Arc,
};

use ash::vk;
use partywall::{ChunkDescriptor, Descriptors, Place};
use partywall_os::{
    map::{SealedMap, SharedMap},
    memfd,
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

/// A segment's memory in Vulkan: one `VkDeviceMemory` for each chunk, and the lease. [`Gpu::import`] returns one.
///
/// Dropping it frees the imports, unmaps host memory and gives the lease back. Buffers keep it.
pub struct ImportedMemory {
    /// Freed before the lease is given back.
    chunks: Vec<Chunk>,
    descriptors: Descriptors,
    gpu: Arc<Gpu>,
}

struct Chunk {
    memory: vk::DeviceMemory,
    bytes: u64,
    memory_type: u32,
    /// The mapping that host memory was imported from.
    _map: Option<HostMap>,
}

/// A mapping of host memory, which must stay as long as the import.
enum HostMap {
    Frozen(SealedMap),
    Mutable(SharedMap),
}

impl Gpu {
    /// Imports a segment: each chunk once. See [`ImportedMemory`].
    ///
    /// # Errors
    /// [`Error::WrongGpu`] for memory of another GPU; [`Error::Unsupported`] if the device was created without the extension
    /// for this kind of memory; [`Error::Vulkan`] if the driver refuses the import.
    pub fn import(self: &Arc<Self>, descriptors: Descriptors) -> Result<Arc<ImportedMemory>> {
        if let Place::Gpu(owner) = descriptors.place()
            && owner != self.uuid()
        {
            let name = descriptors.name().to_owned();
            return Err(Error::WrongGpu { name, owner, device: self.name().to_owned(), uuid: self.uuid() });
        }
        let is_host = descriptors.place() == Place::Host;
        // Dropped with the chunks that it has, if a later one fails.
        let mut imported = ImportedMemory { chunks: Vec::new(), descriptors, gpu: self.clone() };
        for chunk in imported.descriptors.chunks() {
            let chunk = if is_host {
                self.import_host(HostMap::new(&imported.descriptors, chunk)?, chunk.bytes())?
            } else {
                self.import_fd(chunk.as_fd(), chunk.bytes())?
            };
            imported.chunks.push(chunk);
        }
        Ok(Arc::new(imported))
    }

    /// Imports a chunk that a driver exported.
    fn import_fd(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Chunk> {
        self.require_memory_fd()?;
        let kind = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
        let memory_type = self.type_of_import(kind, u32::MAX)?;
        let failed = |source| Error::System { what: "duplicating a descriptor for Vulkan".to_owned(), source };
        let duplicate = fd.try_clone_to_owned().map_err(failed)?;
        // Vulkan owns a descriptor that it has imported, and only that.
        let number = duplicate.into_raw_fd();
        let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(kind).fd(number);
        let memory = self.allocate(bytes, memory_type, &mut import).inspect_err(|_| {
            // lavapipe (Mesa 22.3) closes a descriptor that it refuses, and its number may already be another file's.
            if is_same_file(number, fd) {
                // SAFETY: the number still stands for the duplicate, which nothing else owns.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
        })?;
        Ok(Chunk { memory, bytes, memory_type, _map: None })
    }

    /// Imports a mapping of host memory, the last page included.
    fn import_host(&self, map: HostMap, bytes: u64) -> Result<Chunk> {
        let host = self.host_import()?;
        let address = map.address();
        let size = bytes.next_multiple_of(host.alignment);
        // Mappings are whole pages: what is beyond the file's end in the last page reads as zero.
        if host.alignment > rustix::param::page_size() as u64 || !(address as u64).is_multiple_of(host.alignment) {
            let why = "import of host memory by single pages";
            return Err(Error::Unsupported { device: self.name().to_owned(), missing: why, what: "a segment" });
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
        self.memory_type(requirements.memory_type_bits & bits).ok_or_else(|| Error::Unsupported {
            device: self.name().to_owned(),
            missing: "memory type for buffers in imported memory",
            what: "an import",
        })
    }

    fn allocate(
        &self,
        bytes: u64,
        memory_type: u32,
        import: &mut impl vk::ExtendsMemoryAllocateInfo,
    ) -> Result<vk::DeviceMemory> {
        let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(memory_type);
        let allocate = allocate.push_next(import);
        // SAFETY: the device is alive, and the callers' import describes memory of at least `bytes` bytes that they own.
        let memory = unsafe { self.device().allocate_memory(&allocate, None) };
        memory.map_err(failed(format!("importing {bytes} bytes on {}", self.name())))
    }

    fn create_buffer(
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
    /// [`Error::Buffer`] for a tensor without bytes, one that spans chunks (see [`Descriptors::may_grow`]), or one that is not
    /// aligned as Vulkan asks; [`Error::Vulkan`].
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
        if !self.descriptors.is_mutable() && usage.intersects(WRITING) {
            return Err(Error::ReadOnly { name: self.descriptors.name().to_owned() });
        }
        let chunks = self.chunks.len();
        let at = self.chunks.get(chunk);
        let at = at.ok_or_else(|| self.not_possible(format!("it has {chunks} chunks, and no chunk {chunk}")))?;
        let has = self.descriptors.chunks()[chunk].bytes();
        if range.is_empty() || range.end > has {
            return Err(
                self.not_possible(format!("bytes {range:?} are none, or not all within chunk {chunk} of {has}"))
            );
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
            return Err(
                self.not_possible(format!("Vulkan needs {} bytes for {bytes} at the end of the chunk", needs.size))
            );
        }
        if needs.memory_type_bits & (1 << at.memory_type) == 0 {
            return Err(
                self.not_possible(format!("imported memory does not serve for this usage on {}", self.gpu.name()))
            );
        }
        let failed = failed("binding a buffer to imported memory");
        // SAFETY: both handles are alive, the buffer is bound once, and offset, size and memory type are as it needs.
        unsafe { self.gpu.device().bind_buffer_memory(handle, at.memory, range.start) }.map_err(failed)?;
        Ok(buffer)
    }

    /// Returns where the tensors are.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn handle_type(&self) -> vk::ExternalMemoryHandleTypeFlags {
        match self.descriptors.place() {
            Place::Host => vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
            Place::Gpu(_) => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
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
                // SAFETY: no buffer is left, as each keeps this value, and the rules of the crate forbid work on it. The
                // mapping of host memory is dropped with the chunk, afterwards.
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

    /// Returns the barrier that makes what other processes have written visible to accesses on a queue of `queue_family`,
    /// after a wait for their timeline. Its source stage is [`outside`](Self::outside).
    pub fn acquire(&self, access: vk::AccessFlags, queue_family: u32) -> vk::BufferMemoryBarrier<'static> {
        let barrier = self.barrier().dst_access_mask(access);
        match self.memory.descriptors.place() {
            Place::Host => barrier.src_access_mask(vk::AccessFlags::HOST_WRITE),
            Place::Gpu(_) => {
                barrier.src_queue_family_index(vk::QUEUE_FAMILY_EXTERNAL).dst_queue_family_index(queue_family)
            }
        }
    }

    /// Returns the barrier that makes what a queue of `queue_family` has written visible to other processes, before a signal
    /// of a timeline. Its destination stage is [`outside`](Self::outside).
    pub fn release(&self, access: vk::AccessFlags, queue_family: u32) -> vk::BufferMemoryBarrier<'static> {
        let barrier = self.barrier().src_access_mask(access);
        match self.memory.descriptors.place() {
            Place::Host => barrier.dst_access_mask(vk::AccessFlags::HOST_READ),
            Place::Gpu(_) => {
                barrier.src_queue_family_index(queue_family).dst_queue_family_index(vk::QUEUE_FAMILY_EXTERNAL)
            }
        }
    }

    /// Returns the stage at which other processes use the memory, for barriers.
    pub fn outside(&self) -> vk::PipelineStageFlags {
        match self.memory.descriptors.place() {
            Place::Host => vk::PipelineStageFlags::HOST,
            Place::Gpu(_) => vk::PipelineStageFlags::ALL_COMMANDS,
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

/// Returns whether a number of this process stands for the same file as a descriptor.
fn is_same_file(number: RawFd, fd: BorrowedFd<'_>) -> bool {
    let file =
        |number: RawFd| std::fs::metadata(format!("/proc/self/fd/{number}")).map(|file| (file.dev(), file.ino()));
    matches!((file(number), file(fd.as_raw_fd())), (Ok(a), Ok(b)) if a == b)
}

impl HostMap {
    fn new(descriptors: &Descriptors, chunk: &ChunkDescriptor) -> Result<Self> {
        // Vulkan would read beyond the end of a shorter file.
        if memfd::len(chunk).ok() != Some(chunk.bytes()) {
            let why = "the length of a chunk differs from the announced length".to_owned();
            return Err(Error::Buffer { name: descriptors.name().to_owned(), why });
        }
        let map = if descriptors.is_mutable() {
            SharedMap::new([chunk], 0, true).map(Self::Mutable)
        } else {
            SealedMap::new(chunk).map(Self::Frozen)
        };
        let what = || format!("mapping a chunk of {:?}", descriptors.name());
        map.map_err(|errno| Error::System { what: what(), source: errno.into() })
    }

    /// Returns the address. Vulkan takes it as writable; the kernel decides.
    fn address(&self) -> *mut c_void {
        match self {
            Self::Frozen(map) => map.bytes().as_ptr().cast_mut().cast(),
            Self::Mutable(map) => map.as_ptr().cast(),
        }
    }
}

#[cfg(test)]
mod tests {
    use ash::khr;

    use super::*;

    const OPAQUE: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
    const BYTES: u64 = 2 << 20;

    /// lavapipe takes no descriptor but its own, so this is how the path of GPU memory runs without a GPU.
    #[test]
    fn needs_vulkan_exported_memory_is_imported_by_its_descriptor() {
        let gpu = Gpu::open(None).unwrap();
        let device = gpu.device();
        let instance = &gpu.instance().unwrap();
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
