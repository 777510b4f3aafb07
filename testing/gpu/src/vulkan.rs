//! Vulkan, called directly: imports, buffers, and the few commands that tests submit.
//!
//! Facts import memory by this instead of by Partywall, so that a fault in Partywall can neither hide nor imitate the
//! driver's behaviour. Only the device itself is Partywall's ([`Gpu`]), which is about no memory.
#![allow(unsafe_code)]

use std::io::Cursor;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use partywall::DeviceUuid;
use partywall_vulkan::Gpu;
use partywall_vulkan::ash::{self, ext, khr, util::read_spv, vk};

use crate::tests::world::error_text;

/// Where the vendor's containers have the manifest of Vulkan's driver. The loader does not look there.
const MANIFEST: &str = "/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json";
/// The variables that name manifests to the loader; the second one is older.
const DRIVERS: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

/// The shader that writes the test pattern.
const PATTERN: &[u8] = include_bytes!("../kernels/pattern.spv");

const OPAQUE: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
const HOST: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// A semaphore, and the value that work waits for or signals.
pub(crate) type Point = (vk::Semaphore, u64);

/// Lets a child process find the vendor's Vulkan driver, unless the environment names one.
pub(crate) fn show_driver(command: &mut Command) {
    if DRIVERS.iter().all(|name| std::env::var_os(name).is_none()) && Path::new(MANIFEST).exists() {
        command.env(DRIVERS[0], MANIFEST);
    }
}

/// A device with a queue. Dropping it waits for the queue.
pub(crate) struct Vulkan {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) family: u32,
    queue: vk::Queue,
    pool: vk::CommandPool,
}

/// Imported memory.
pub(crate) struct Memory {
    gpu: Arc<Gpu>,
    handle: vk::DeviceMemory,
    kind: vk::ExternalMemoryHandleTypeFlags,
}

/// A buffer in imported memory. It must be dropped before the memory.
pub(crate) struct Buffer {
    gpu: Arc<Gpu>,
    handle: vk::Buffer,
    bytes: u64,
    kind: vk::ExternalMemoryHandleTypeFlags,
}

impl Vulkan {
    /// Opens the GPU with this UUID, or the first device that imports host memory.
    pub(crate) fn open(uuid: Option<DeviceUuid>) -> Result<Self, String> {
        let gpu = Gpu::open(uuid).map_err(error_text)?;
        let family = gpu.queue_family().ok_or("the device has no queue")?;
        let create = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the device is alive and was created with one queue of this family.
        let queue = unsafe { gpu.device().get_device_queue(family, 0) };
        // SAFETY: as above.
        let pool = unsafe { gpu.device().create_command_pool(&create, None) }.map_err(error_text)?;
        Ok(Self { gpu, family, queue, pool })
    }

    /// Imports memory of a GPU by its descriptor, of which it takes a duplicate.
    pub(crate) fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory, Refused> {
        let local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let memory_type = self.memory_type(OPAQUE, u32::MAX, local).ok_or(Refused::NO_TYPE)?;
        self.import_as(fd, bytes, memory_type)
    }

    /// Imports memory of a GPU as a type of memory; see [`import`](Self::import).
    pub(crate) fn import_as(&self, fd: BorrowedFd<'_>, bytes: u64, memory_type: u32) -> Result<Memory, Refused> {
        let number = fd.try_clone_to_owned().expect("a descriptor can be duplicated").into_raw_fd();
        let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(OPAQUE).fd(number);
        let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(memory_type);
        // SAFETY: the device is alive; a descriptor that cannot be imported is refused.
        match unsafe { self.gpu.device().allocate_memory(&allocate.push_next(&mut import), None) } {
            Ok(handle) => Ok(Memory { gpu: self.gpu.clone(), handle, kind: OPAQUE }),
            Err(code) => Err(Refused { code, ours: close(number) }),
        }
    }

    /// Imports `bytes` bytes of host memory at an address. They must stay mapped for as long as the import lives.
    pub(crate) fn import_host(&self, address: u64, bytes: u64) -> Result<Memory, Refused> {
        let instance = self.gpu.instance().expect("the device was opened here");
        let functions = ext::external_memory_host::Device::new(instance, self.gpu.device());
        let pointer = address as *mut _;
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST).host_pointer(pointer);
        // SAFETY: the device is alive and has the extension, and the caller has mapped the bytes.
        unsafe {
            let ask = functions.fp().get_memory_host_pointer_properties_ext;
            let asked = ask(self.gpu.device().handle(), HOST, pointer, &raw mut properties);
            asked.result().map_err(Refused::because)?;
            let memory_type = self.memory_type(HOST, properties.memory_type_bits, vk::MemoryPropertyFlags::empty());
            let memory_type = memory_type.ok_or(Refused::NO_TYPE)?;
            let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(memory_type);
            let handle = self.gpu.device().allocate_memory(&allocate.push_next(&mut import), None);
            handle.map(|handle| Memory { gpu: self.gpu.clone(), handle, kind: HOST }).map_err(Refused::because)
        }
    }

    /// Allocates memory of the GPU and exports it.
    pub(crate) fn export(&self, bytes: u64) -> Result<(Memory, OwnedFd), String> {
        let local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let memory_type = self.memory_type(OPAQUE, u32::MAX, local).ok_or("no memory can be exported")?;
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(OPAQUE);
        let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(memory_type);
        let instance = self.gpu.instance().expect("the device was opened here");
        let functions = khr::external_memory_fd::Device::new(instance, self.gpu.device());
        // SAFETY: the device is alive and has the extension; the descriptor is new and its caller's.
        unsafe {
            let handle =
                self.gpu.device().allocate_memory(&allocate.push_next(&mut export), None).map_err(error_text)?;
            let memory = Memory { gpu: self.gpu.clone(), handle, kind: OPAQUE };
            let get = vk::MemoryGetFdInfoKHR::default().memory(handle).handle_type(OPAQUE);
            let number = functions.get_memory_fd(&get).map_err(error_text)?;
            Ok((memory, OwnedFd::from_raw_fd(number)))
        }
    }

    /// Returns the memory types that a buffer in memory of a GPU may have, and their properties.
    pub(crate) fn memory_types(&self) -> Vec<(u32, vk::MemoryPropertyFlags)> {
        self.types_of(OPAQUE).unwrap_or_default()
    }

    /// Makes a buffer at an offset of imported memory.
    pub(crate) fn buffer(&self, memory: &Memory, offset: u64, bytes: u64) -> Result<Buffer, String> {
        let handle = self.create_buffer(memory.kind, bytes).map_err(error_text)?;
        let buffer = Buffer { gpu: self.gpu.clone(), handle, bytes, kind: memory.kind };
        // SAFETY: both handles are alive, and the buffer is bound once.
        unsafe { self.gpu.device().bind_buffer_memory(handle, memory.handle, offset) }.map_err(error_text)?;
        Ok(buffer)
    }

    /// Copies a whole buffer and waits for that.
    pub(crate) fn copy(&self, from: &Buffer, to: &Buffer) -> Result<(), String> {
        let regions = [vk::BufferCopy::default().size(from.bytes)];
        self.run(&[from, to], |device, commands| {
            // SAFETY: as in `submit`.
            unsafe { device.cmd_copy_buffer(commands, from.handle, to.handle, &regions) }
        })
    }

    /// Fills a whole buffer with a word and waits for that.
    pub(crate) fn fill(&self, to: &Buffer, word: u32) -> Result<(), String> {
        self.run(&[to], |device, commands| {
            // SAFETY: as in `submit`.
            unsafe { device.cmd_fill_buffer(commands, to.handle, 0, vk::WHOLE_SIZE, word) }
        })
    }

    /// Writes the first eight bytes of a buffer and waits for that.
    pub(crate) fn update(&self, to: &Buffer, value: u64) -> Result<(), String> {
        self.run(&[to], |device, commands| {
            // SAFETY: as in `submit`.
            unsafe { device.cmd_update_buffer(commands, to.handle, 0, &value.to_ne_bytes()) }
        })
    }

    /// Submits commands on buffers and waits for them.
    fn run(&self, buffers: &[&Buffer], record: impl FnOnce(&ash::Device, vk::CommandBuffer)) -> Result<(), String> {
        let host = vk::PipelineStageFlags::HOST;
        let all = vk::PipelineStageFlags::ALL_COMMANDS;
        let none = vk::DependencyFlags::empty();
        let external = vk::QUEUE_FAMILY_EXTERNAL;
        let acquired: Vec<_> = buffers.iter().map(|buffer| buffer.barrier(external, self.family)).collect();
        let released: Vec<_> = buffers.iter().map(|buffer| buffer.barrier(self.family, external)).collect();
        self.submit(None, None, |device, commands| {
            // SAFETY: as in `submit`.
            unsafe { device.cmd_pipeline_barrier(commands, host | all, all, none, &[], &acquired, &[]) };
            record(device, commands);
            // SAFETY: as in `submit`.
            unsafe { device.cmd_pipeline_barrier(commands, all, host | all, none, &[], &released, &[]) };
        })?;
        self.finish()
    }

    /// Submits commands after a point and before another one. The buffers that `record` uses must live until the queue
    /// is idle.
    pub(crate) fn submit(
        &self,
        wait: Option<Point>,
        signal: Option<Point>,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
    ) -> Result<(), String> {
        let (waits, wait_values): (Vec<_>, Vec<_>) = wait.into_iter().unzip();
        let (signals, signal_values): (Vec<_>, Vec<_>) = signal.into_iter().unzip();
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; waits.len()];
        let device = self.gpu.device();
        let submitted = || {
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
            // SAFETY: all handles are alive, and one thread uses the queue and its pool. `drop` waits for the work.
            unsafe {
                let commands = device.allocate_command_buffers(&allocate)?;
                device.begin_command_buffer(commands[0], &vk::CommandBufferBeginInfo::default())?;
                record(device, commands[0]);
                device.end_command_buffer(commands[0])?;
                let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
                    .wait_semaphore_values(&wait_values)
                    .signal_semaphore_values(&signal_values);
                let submit = vk::SubmitInfo::default()
                    .command_buffers(&commands)
                    .wait_semaphores(&waits)
                    .wait_dst_stage_mask(&stages)
                    .signal_semaphores(&signals)
                    .push_next(&mut timeline);
                device.queue_submit(self.queue, &[submit], vk::Fence::null())
            }
        };
        submitted().map_err(|code: vk::Result| format!("submitting commands: {code}"))
    }

    /// Waits until the queue is idle.
    pub(crate) fn finish(&self) -> Result<(), String> {
        // SAFETY: one thread uses the queue.
        unsafe { self.gpu.device().device_wait_idle() }.map_err(|code| format!("waiting for the queue: {code}"))
    }

    fn memory_type(
        &self,
        kind: vk::ExternalMemoryHandleTypeFlags,
        bits: u32,
        wanted: vk::MemoryPropertyFlags,
    ) -> Option<u32> {
        let visible = vk::MemoryPropertyFlags::HOST_VISIBLE;
        let fits =
            |flags: vk::MemoryPropertyFlags| flags.contains(wanted) && (wanted.is_empty() || !flags.contains(visible));
        let types = self.types_of(kind)?;
        types.into_iter().find(|(index, flags)| bits & (1 << index) != 0 && fits(*flags)).map(|(index, _)| index)
    }

    /// Returns the memory types that a buffer in such memory may have, and their properties.
    fn types_of(&self, kind: vk::ExternalMemoryHandleTypeFlags) -> Option<Vec<(u32, vk::MemoryPropertyFlags)>> {
        let instance = self.gpu.instance()?;
        let device = self.gpu.device();
        let probe = self.create_buffer(kind, 4096).ok()?;
        // SAFETY: the handles are alive, and the buffer is destroyed after its last use.
        let (needs, types) = unsafe {
            let needs = device.get_buffer_memory_requirements(probe);
            device.destroy_buffer(probe, None);
            (needs, instance.get_physical_device_memory_properties(self.gpu.physical()))
        };
        let allowed = (0..types.memory_type_count).filter(|index| needs.memory_type_bits & (1 << index) != 0);
        Some(allowed.map(|index| (index, types.memory_types[index as usize].property_flags)).collect())
    }

    fn create_buffer(&self, kind: vk::ExternalMemoryHandleTypeFlags, bytes: u64) -> Result<vk::Buffer, vk::Result> {
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(kind);
        let usage = vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST;
        let create = vk::BufferCreateInfo::default().size(bytes).usage(usage).push_next(&mut external);
        // SAFETY: the device is alive.
        unsafe { self.gpu.device().create_buffer(&create, None) }
    }
}

impl Drop for Vulkan {
    fn drop(&mut self) {
        // SAFETY: one thread uses the queue, and its work is over. A lost device is idle.
        unsafe {
            let _ = self.gpu.device().device_wait_idle();
            self.gpu.device().destroy_command_pool(self.pool, None);
        }
    }
}

/// An import that Vulkan refused.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: vk::Result,
    /// True if the descriptor was still this process's.
    pub(crate) ours: bool,
}

impl Refused {
    const NO_TYPE: Self = Self { code: vk::Result::ERROR_FEATURE_NOT_PRESENT, ours: true };

    fn because(code: vk::Result) -> Self {
        Self { code, ours: true }
    }

    pub(crate) fn text(self) -> String {
        format!("Vulkan refused the import: {:?}", self.code)
    }
}

/// The shader that writes the test pattern into a buffer. It must outlive the work that it is part of.
pub(crate) struct Pattern {
    gpu: Arc<Gpu>,
    set_layout: vk::DescriptorSetLayout,
    layout: vk::PipelineLayout,
    module: vk::ShaderModule,
    pipeline: vk::Pipeline,
    sets: vk::DescriptorPool,
    set: vk::DescriptorSet,
}

impl Pattern {
    /// Takes a buffer for storage. What a failing call leaves behind ends with the test's process.
    pub(crate) fn new(gpu: &Arc<Gpu>, buffer: vk::Buffer) -> Result<Self, String> {
        let device = gpu.device();
        let words = read_spv(&mut Cursor::new(PATTERN)).map_err(error_text)?;
        let made = || {
            let kind = vk::DescriptorType::STORAGE_BUFFER;
            let stage = vk::ShaderStageFlags::COMPUTE;
            let binding = vk::DescriptorSetLayoutBinding::default().descriptor_type(kind).descriptor_count(1);
            let bindings = [binding.stage_flags(stage)];
            let range = [vk::PushConstantRange::default().stage_flags(stage).size(4)];
            let sizes = [vk::DescriptorPoolSize::default().ty(kind).descriptor_count(1)];
            let buffers = [vk::DescriptorBufferInfo::default().buffer(buffer).range(vk::WHOLE_SIZE)];
            // SAFETY: the device and the buffer are alive, and the structures describe the shader's interface.
            unsafe {
                let set_layout = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
                let set_layouts = [device.create_descriptor_set_layout(&set_layout, None)?];
                let layout = vk::PipelineLayoutCreateInfo::default().set_layouts(&set_layouts);
                let layout = device.create_pipeline_layout(&layout.push_constant_ranges(&range), None)?;
                let module = device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&words), None)?;
                let stage = vk::PipelineShaderStageCreateInfo::default().stage(stage).module(module).name(c"main");
                let create = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(layout)];
                let pipelines = device.create_compute_pipelines(vk::PipelineCache::null(), &create, None);
                let pipeline = pipelines.map_err(|(_, code)| code)?[0];
                let sets = vk::DescriptorPoolCreateInfo::default().max_sets(1).pool_sizes(&sizes);
                let sets = device.create_descriptor_pool(&sets, None)?;
                let allocate = vk::DescriptorSetAllocateInfo::default().descriptor_pool(sets);
                let set = device.allocate_descriptor_sets(&allocate.set_layouts(&set_layouts))?[0];
                let write = vk::WriteDescriptorSet::default().dst_set(set).descriptor_type(kind);
                device.update_descriptor_sets(&[write.buffer_info(&buffers)], &[]);
                Ok(Self { gpu: gpu.clone(), set_layout: set_layouts[0], layout, module, pipeline, sets, set })
            }
        };
        made().map_err(|code: vk::Result| format!("making a shader: {code}"))
    }

    /// Records writing the pattern into the first words of the buffer.
    pub(crate) fn record(&self, commands: vk::CommandBuffer, words: u32) {
        let device = self.gpu.device();
        let point = vk::PipelineBindPoint::COMPUTE;
        // SAFETY: the handles are alive, and the commands are being recorded.
        unsafe {
            device.cmd_bind_pipeline(commands, point, self.pipeline);
            device.cmd_bind_descriptor_sets(commands, point, self.layout, 0, &[self.set], &[]);
            let stage = vk::ShaderStageFlags::COMPUTE;
            device.cmd_push_constants(commands, self.layout, stage, 0, &words.to_ne_bytes());
            device.cmd_dispatch(commands, 64, 1, 1);
        }
    }
}

impl Drop for Pattern {
    fn drop(&mut self) {
        let device = self.gpu.device();
        // SAFETY: tests wait for the work before they drop this.
        unsafe {
            device.destroy_descriptor_pool(self.sets, None);
            device.destroy_pipeline(self.pipeline, None);
            device.destroy_shader_module(self.module, None);
            device.destroy_pipeline_layout(self.layout, None);
            device.destroy_descriptor_set_layout(self.set_layout, None);
        }
    }
}

/// Closes a descriptor by its number. Returns whether it was open.
fn close(number: RawFd) -> bool {
    let open = std::fs::exists(format!("/proc/self/fd/{number}")).unwrap_or(false);
    if open {
        // SAFETY: Vulkan owns a descriptor only after it has imported it, so that this one is the caller's.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
    open
}

impl Buffer {
    /// Returns the barrier between two owners of a buffer; host memory has none.
    fn barrier(&self, from: u32, to: u32) -> vk::BufferMemoryBarrier<'static> {
        let ignored = vk::QUEUE_FAMILY_IGNORED;
        let (from, to) = if self.kind == HOST { (ignored, ignored) } else { (from, to) };
        let access = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let barrier = vk::BufferMemoryBarrier::default().buffer(self.handle).size(vk::WHOLE_SIZE);
        let barrier = barrier.src_queue_family_index(from).dst_queue_family_index(to);
        barrier.src_access_mask(access).dst_access_mask(access)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the work of each call on it has been waited for.
        unsafe { self.gpu.device().destroy_buffer(self.handle, None) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its buffers are gone, see `Buffer`.
        unsafe { self.gpu.device().free_memory(self.handle, None) };
    }
}
