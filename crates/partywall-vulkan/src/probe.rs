//! Probes for `partywall doctor`: each function imports memory and lets Vulkan copy it.

use std::{os::fd::BorrowedFd, sync::Arc};

use ash::vk;
use partywall::DeviceUuid;
use partywall_os::{map::SharedMap, memfd};

use crate::{
    error::{Error, Result, failed},
    gpu::Gpu,
    memory::{Chunk, HostMap},
};

const BYTES: u64 = 64 << 10;

/// Imports host memory on the first device that can, copies it there and back, and compares. Returns the device's name.
///
/// # Errors
/// [`Error::NoLoader`], [`Error::NoDevice`] and [`Error::Unsupported`] if there is nothing to try; [`Error::Vulkan`];
/// [`Error::Wrong`] if bytes are wrong.
pub fn host_memory() -> Result<String> {
    let gpu = Gpu::open(None)?;
    let (from, source) = host(&gpu, BYTES)?;
    let (to, target) = host(&gpu, BYTES)?;
    let expected: Vec<u8> = (0..BYTES).map(|byte| ((byte * 7) >> 3) as u8).collect();
    write(&source, &expected);
    copy(&gpu, &from, &to)?;
    let found = read(&target, BYTES);
    if found != expected {
        let device = gpu.name().to_owned();
        return Err(Error::Wrong { device, what: "host memory that Vulkan copied has other bytes".to_owned() });
    }
    Ok(gpu.name().to_owned())
}

/// Imports memory that CUDA exported, on the GPU with this UUID, and returns its bytes as Vulkan sees them.
///
/// # Errors
/// As [`host_memory`].
pub fn gpu_memory(uuid: DeviceUuid, fd: BorrowedFd<'_>, bytes: u64) -> Result<Vec<u8>> {
    let gpu = Gpu::open(Some(uuid))?;
    let (to, target) = host(&gpu, bytes)?;
    let chunk = gpu.import_fd(fd, bytes)?;
    let from = Imported::new(&gpu, chunk, bytes, vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD)?;
    copy(&gpu, &from, &to)?;
    Ok(read(&target, bytes))
}

/// An imported chunk as a buffer. It must be dropped when no work uses it.
struct Imported {
    gpu: Arc<Gpu>,
    chunk: Chunk,
    buffer: vk::Buffer,
    kind: vk::ExternalMemoryHandleTypeFlags,
}

impl Imported {
    fn new(gpu: &Arc<Gpu>, chunk: Chunk, bytes: u64, kind: vk::ExternalMemoryHandleTypeFlags) -> Result<Self> {
        let usage = vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST;
        // The drop destroys both. Vulkan ignores a null handle.
        let mut imported = Self { gpu: gpu.clone(), chunk, buffer: vk::Buffer::null(), kind };
        imported.buffer = gpu.create_buffer(kind, bytes, usage)?;
        // SAFETY: both handles are alive, the buffer is bound once, and the memory is of a type for such buffers.
        let bound = unsafe { gpu.device().bind_buffer_memory(imported.buffer, imported.chunk.memory, 0) };
        bound.map_err(failed("binding a buffer to imported memory"))?;
        Ok(imported)
    }

    /// Returns the barrier between two owners of the memory.
    fn barrier(&self, from: u32, to: u32) -> vk::BufferMemoryBarrier<'static> {
        let is_host = self.kind == vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let (from, to) = if is_host { (vk::QUEUE_FAMILY_IGNORED, vk::QUEUE_FAMILY_IGNORED) } else { (from, to) };
        let access = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let barrier = vk::BufferMemoryBarrier::default().buffer(self.buffer).size(vk::WHOLE_SIZE);
        let barrier = barrier.src_access_mask(access).dst_access_mask(access);
        barrier.src_queue_family_index(from).dst_queue_family_index(to)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: `copy` waits for its work, so that this is the last use of both.
        unsafe {
            self.gpu.device().destroy_buffer(self.buffer, None);
            self.gpu.device().free_memory(self.chunk.memory, None);
        }
    }
}

/// Makes host memory that Vulkan sees, and a second mapping of it.
fn host(gpu: &Arc<Gpu>, bytes: u64) -> Result<(Imported, SharedMap)> {
    let mapped = || {
        let file = memfd::Draft::create("partywall:doctor", bytes)?.share()?;
        Ok((SharedMap::new([&file], 0, true)?, SharedMap::new([&file], 0, true)?))
    };
    let failed = |errno: partywall_os::Errno| Error::System {
        what: "mapping memory for a probe".to_owned(),
        source: errno.into(),
    };
    let (here, there) = mapped().map_err(failed)?;
    let chunk = gpu.import_host(HostMap::Writable(there), bytes)?;
    Ok((Imported::new(gpu, chunk, bytes, vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT)?, here))
}

fn write(map: &SharedMap, bytes: &[u8]) {
    map.slice::<u8>(0, bytes.len()).expect("the map has as many bytes").copy_from_slice(bytes);
}

fn read(map: &SharedMap, bytes: u64) -> Vec<u8> {
    let mut found = vec![0; bytes as usize];
    map.slice::<u8>(0, found.len()).expect("the map has as many bytes").copy_to_slice(&mut found);
    found
}

/// Copies a whole chunk, and waits for the copy.
fn copy(gpu: &Gpu, from: &Imported, to: &Imported) -> Result<()> {
    let family = gpu.queue_family().expect("the callers have opened the device");
    let device = gpu.device();
    let outside = vk::PipelineStageFlags::HOST;
    let inside = vk::PipelineStageFlags::ALL_COMMANDS;
    let external = vk::QUEUE_FAMILY_EXTERNAL;
    let acquired = [from.barrier(external, family), to.barrier(external, family)];
    let released = [from.barrier(family, external), to.barrier(family, external)];
    let regions = [vk::BufferCopy::default().size(from.chunk.bytes)];
    let create = vk::CommandPoolCreateInfo::default().queue_family_index(family);
    // SAFETY: all handles are alive, this thread alone uses the device, and the work is over when the pool is
    // destroyed.
    let copied = unsafe {
        device.create_command_pool(&create, None).and_then(|pool| {
            let run = || {
                let allocate = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
                let commands = device.allocate_command_buffers(&allocate)?;
                let none = vk::DependencyFlags::empty();
                device.begin_command_buffer(commands[0], &vk::CommandBufferBeginInfo::default())?;
                device.cmd_pipeline_barrier(commands[0], outside | inside, inside, none, &[], &acquired, &[]);
                device.cmd_copy_buffer(commands[0], from.buffer, to.buffer, &regions);
                device.cmd_pipeline_barrier(commands[0], inside, outside | inside, none, &[], &released, &[]);
                device.end_command_buffer(commands[0])?;
                let submit = vk::SubmitInfo::default().command_buffers(&commands);
                device.queue_submit(device.get_device_queue(family, 0), &[submit], vk::Fence::null())?;
                device.device_wait_idle()
            };
            let outcome = run();
            device.destroy_command_pool(pool, None);
            outcome
        })
    };
    copied.map_err(failed(format!("copying imported memory on {}", gpu.name())))
}

#[cfg(test)]
mod tests {
    #[test]
    fn needs_vulkan_doctor_copies_host_memory() {
        assert!(!super::host_memory().unwrap().is_empty());
    }
}
