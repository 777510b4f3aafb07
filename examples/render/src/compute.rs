//! The rasteriser by compute shaders. Their source is `kernels/render.comp`.

use std::{io::Cursor, sync::Arc, thread, time::Duration};

use partywall_vulkan::{
    Buffer, Error, Gpu, Result,
    ash::{util::read_spv, vk},
};

const SHADER: &[u8] = include_bytes!("../kernels/render.spv");

/// The number of steps of the shader: project vertices, cover pixels, shade pixels.
const STEPS: usize = 3;

/// Invocations of a workgroup, and the most workgroups of a step: each invocation goes on with the next element.
const GROUP: u64 = 64;
const MOST_GROUPS: u64 = 4096;

/// Bytes of a projected vertex, and of the nearest fragment of a pixel.
const CORNER_BYTES: u64 = 16;
const FRAGMENT_BYTES: u64 = 8;
/// Bytes of a vertex: position and normal.
const VERTEX_BYTES: u64 = 24;

const COMPUTE: vk::ShaderStageFlags = vk::ShaderStageFlags::COMPUTE;
const STORAGE: vk::DescriptorType = vk::DescriptorType::STORAGE_BUFFER;

/// Draws tiles on a device that [`Gpu::open`] has opened.
#[derive(Debug)]
pub(crate) struct Rasteriser {
    shader: Shader,
    corners: Scratch,
    fragments: Scratch,
    /// The most bytes of a buffer that a shader uses.
    longest: u64,
    gpu: Arc<Gpu>,
}

/// The inputs of [`Rasteriser::draw`]. Each buffer is a storage buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawing<'a> {
    /// Three vertices of each triangle.
    pub(crate) indices: &'a Buffer,
    /// The colour of each triangle.
    pub(crate) colours: &'a Buffer,
    /// Six words of each vertex.
    pub(crate) vertices: &'a Buffer,
    /// Three rows of four columns.
    pub(crate) camera: &'a [i32; 12],
    /// Width and height of the picture.
    pub(crate) size: [u32; 2],
    /// The upper left corner, width and height of the tile.
    pub(crate) tile: [u32; 4],
    /// Replaces the colours of all triangles.
    pub(crate) tint: Option<u32>,
    /// The fourth byte of each pixel.
    pub(crate) tag: u8,
    /// As many words as the tile has pixels.
    pub(crate) pixels: &'a Buffer,
}

impl Rasteriser {
    /// Makes the pipelines and the memory for scenes of up to `vertices` vertices and tiles of up to `pixels` pixels.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no 64-bit integers or no atomic operations on them in shaders, or takes
    /// no buffers that large; [`Error::Vulkan`].
    pub(crate) fn new(gpu: &Arc<Gpu>, vertices: u64, pixels: u64) -> Result<Self> {
        Self::require(gpu)?;
        let instance = gpu.instance().expect("only a device of its own has such shaders");
        // SAFETY: the device belongs to the instance, which is alive.
        let properties = unsafe { instance.get_physical_device_properties(gpu.physical()) };
        let longest = properties.limits.max_storage_buffer_range.into();
        let corners = Scratch::new(gpu, vertices.max(1) * CORNER_BYTES)?;
        let fragments = Scratch::new(gpu, pixels.max(1) * FRAGMENT_BYTES)?;
        Ok(Self { shader: Shader::new(gpu)?, corners, fragments, longest, gpu: gpu.clone() })
    }

    /// Checks that the device can run the shaders.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(crate) fn require(gpu: &Gpu) -> Result<()> {
        let missing = "64-bit integers and their atomic operations in shaders";
        if gpu.has_wide_shaders() { Ok(()) } else { Err(unsupported(gpu, missing, "the rasteriser")) }
    }

    /// Draws one tile, and waits until it is drawn.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a buffer that is larger than the device lets shaders use; [`Error::Wrong`] for
    /// buffers that do not fit together; [`Error::Vulkan`], also if the device is lost.
    pub(crate) fn draw(&mut self, drawing: &Drawing<'_>) -> Result<()> {
        let Drawing { indices, colours, vertices, pixels, tile, .. } = *drawing;
        let vertex_count = vertices.bytes() / VERTEX_BYTES;
        let triangles = indices.bytes() / 12;
        let pixel_count = u64::from(tile[2]) * u64::from(tile[3]);
        let fits = vertex_count * CORNER_BYTES <= self.corners.bytes
            && pixel_count * FRAGMENT_BYTES <= self.fragments.bytes
            && pixel_count * 4 <= pixels.bytes()
            && triangles * 4 <= colours.bytes()
            && triangles <= 1 << 24;
        if !fits {
            let what = "a tile cannot be drawn: its buffers have other lengths than its scene".to_owned();
            return Err(Error::Wrong { device: self.gpu.name().to_owned(), what });
        }
        let buffers = [vertices, indices, colours].map(|buffer| (buffer.handle(), buffer.bytes()));
        let scratch = [&self.corners, &self.fragments].map(|scratch| (scratch.buffer, scratch.bytes));
        let buffers = [&buffers[..], &scratch[..], &[(pixels.handle(), pixels.bytes())]].concat();
        if buffers.iter().any(|(_, bytes)| *bytes > self.longest) {
            return Err(unsupported(&self.gpu, "storage buffers as large as this", "the scene"));
        }
        let counts = [vertex_count as u32, triangles as u32];
        let words = drawing.camera.iter().map(|word| word.cast_unsigned()).chain(drawing.size).chain(tile);
        let words = words.chain(counts).chain([u32::from(drawing.tint.is_some()), drawing.tint.unwrap_or_default()]);
        let constants: Vec<u8> = words.chain([drawing.tag.into()]).flat_map(u32::to_ne_bytes).collect();
        let elements = [vertex_count, triangles, pixel_count];
        self.shader.run(drawing, &buffers, self.fragments.buffer, &constants, elements)
    }
}

/// Memory of the device that no other process uses.
#[derive(Debug)]
struct Scratch {
    gpu: Arc<Gpu>,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    bytes: u64,
}

impl Scratch {
    fn new(gpu: &Arc<Gpu>, bytes: u64) -> Result<Self> {
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::TRANSFER_DST;
        // The drop destroys both. Vulkan ignores null handles.
        let mut scratch =
            Self { gpu: gpu.clone(), buffer: vk::Buffer::null(), memory: vk::DeviceMemory::null(), bytes };
        let what = || format!("allocating {bytes} bytes on {}", gpu.name());
        let create = vk::BufferCreateInfo::default().size(bytes).usage(usage);
        // SAFETY: the device is alive, and the structure is valid.
        scratch.buffer = unsafe { gpu.device().create_buffer(&create, None) }.map_err(failed(what()))?;
        // SAFETY: the buffer is alive.
        let needs = unsafe { gpu.device().get_buffer_memory_requirements(scratch.buffer) };
        let memory_type = memory_type(gpu, needs.memory_type_bits).unwrap_or_default();
        let allocate = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(memory_type);
        // SAFETY: the device is alive.
        scratch.memory = unsafe { gpu.device().allocate_memory(&allocate, None) }.map_err(failed(what()))?;
        // SAFETY: both handles are alive, and the buffer is bound once.
        let bound = unsafe { gpu.device().bind_buffer_memory(scratch.buffer, scratch.memory, 0) };
        bound.map_err(failed(what()))?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: `Shader` is dropped first and waits for the work that uses them.
        unsafe {
            self.gpu.device().destroy_buffer(self.buffer, None);
            self.gpu.device().free_memory(self.memory, None);
        }
    }
}

/// The pipelines, and the objects of one submission at a time. A null handle was not created yet.
#[derive(Debug)]
struct Shader {
    gpu: Arc<Gpu>,
    family: u32,
    queue: vk::Queue,
    pool: vk::CommandPool,
    commands: vk::CommandBuffer,
    fence: vk::Fence,
    set_layout: vk::DescriptorSetLayout,
    layout: vk::PipelineLayout,
    module: vk::ShaderModule,
    pipelines: [vk::Pipeline; STEPS],
    sets: vk::DescriptorPool,
    set: vk::DescriptorSet,
}

/// Vertices, indices, colours, corners, fragments, pixels.
const BINDINGS: u32 = 6;
const CONSTANT_BYTES: u32 = 92;

impl Shader {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let family = gpu.queue_family().ok_or_else(|| unsupported(gpu, "queue of its own", "the rasteriser"))?;
        let mut shader = Self {
            gpu: gpu.clone(),
            family,
            // SAFETY: the device was created with one queue of this family.
            queue: unsafe { gpu.device().get_device_queue(family, 0) },
            pool: vk::CommandPool::null(),
            commands: vk::CommandBuffer::null(),
            fence: vk::Fence::null(),
            set_layout: vk::DescriptorSetLayout::null(),
            layout: vk::PipelineLayout::null(),
            module: vk::ShaderModule::null(),
            pipelines: [vk::Pipeline::null(); STEPS],
            sets: vk::DescriptorPool::null(),
            set: vk::DescriptorSet::null(),
        };
        // If a call fails, the drop frees what the earlier ones made.
        shader.make().map_err(failed(format!("making shaders on {}", gpu.name())))?;
        Ok(shader)
    }

    fn make(&mut self) -> std::result::Result<(), vk::Result> {
        let device = self.gpu.device();
        let words = read_spv(&mut Cursor::new(SHADER)).expect("the shader is SPIR-V");
        let binding = |number| {
            let binding = vk::DescriptorSetLayoutBinding::default().binding(number).descriptor_type(STORAGE);
            binding.descriptor_count(1).stage_flags(COMPUTE)
        };
        let bindings: Vec<_> = (0..BINDINGS).map(binding).collect();
        let range = [vk::PushConstantRange::default().stage_flags(COMPUTE).size(CONSTANT_BYTES)];
        let sizes = [vk::DescriptorPoolSize::default().ty(STORAGE).descriptor_count(BINDINGS)];
        // SAFETY: the device is alive, and the structures describe the shader's interface.
        unsafe {
            let pool = vk::CommandPoolCreateInfo::default().queue_family_index(self.family);
            let pool = pool.flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            self.pool = device.create_command_pool(&pool, None)?;
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
            self.commands = device.allocate_command_buffers(&allocate)?[0];
            self.fence = device.create_fence(&vk::FenceCreateInfo::default(), None)?;
            let set_layout = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            self.set_layout = device.create_descriptor_set_layout(&set_layout, None)?;
            let set_layouts = [self.set_layout];
            let layout = vk::PipelineLayoutCreateInfo::default().set_layouts(&set_layouts);
            self.layout = device.create_pipeline_layout(&layout.push_constant_ranges(&range), None)?;
            self.module = device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&words), None)?;
            let entry = [vk::SpecializationMapEntry::default().size(4)];
            for step in 0..STEPS {
                let number = (step as u32).to_ne_bytes();
                let constants = vk::SpecializationInfo::default().map_entries(&entry).data(&number);
                let stage = vk::PipelineShaderStageCreateInfo::default().stage(COMPUTE).module(self.module);
                let stage = stage.name(c"main").specialization_info(&constants);
                let create = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout)];
                let made = device.create_compute_pipelines(vk::PipelineCache::null(), &create, None);
                self.pipelines[step] = made.map_err(|(_, code)| code)?[0];
            }
            let sets = vk::DescriptorPoolCreateInfo::default().max_sets(1).pool_sizes(&sizes);
            self.sets = device.create_descriptor_pool(&sets, None)?;
            let allocate = vk::DescriptorSetAllocateInfo::default().descriptor_pool(self.sets);
            self.set = device.allocate_descriptor_sets(&allocate.set_layouts(&set_layouts))?[0];
        }
        Ok(())
    }

    /// Runs each of the three steps for its number of elements, and waits for them.
    fn run(
        &self,
        drawing: &Drawing<'_>,
        buffers: &[(vk::Buffer, u64)],
        fragments: vk::Buffer,
        constants: &[u8],
        elements: [u64; STEPS],
    ) -> Result<()> {
        let device = self.gpu.device();
        let bound: Vec<_> = buffers
            .iter()
            .map(|(buffer, bytes)| [vk::DescriptorBufferInfo::default().buffer(*buffer).range(*bytes)])
            .collect();
        let writes: Vec<_> = (0_u32..)
            .zip(&bound)
            .map(|(binding, bound)| {
                let write = vk::WriteDescriptorSet::default().dst_set(self.set).dst_binding(binding);
                write.descriptor_type(STORAGE).buffer_info(bound)
            })
            .collect();
        let read = vk::AccessFlags::SHADER_READ;
        let written = vk::AccessFlags::SHADER_WRITE;
        let inputs = [drawing.vertices, drawing.indices, drawing.colours];
        let mut acquired: Vec<_> = inputs.iter().map(|buffer| buffer.acquire(read, self.family)).collect();
        acquired.push(drawing.pixels.acquire(written, self.family));
        let mut released: Vec<_> = inputs.iter().map(|buffer| buffer.release(read, self.family)).collect();
        released.push(drawing.pixels.release(written, self.family));
        let outside = inputs.iter().fold(drawing.pixels.outside(), |stages, buffer| stages | buffer.outside());
        let compute = vk::PipelineStageFlags::COMPUTE_SHADER;
        let transfer = vk::PipelineStageFlags::TRANSFER;
        let none = vk::DependencyFlags::empty();
        let filled = vk::AccessFlags::TRANSFER_WRITE;
        let between = read | written;
        let after = |access| [vk::MemoryBarrier::default().src_access_mask(access).dst_access_mask(between)];
        // SAFETY: all handles are alive; one thread uses queue, pool and set, as `draw` takes `&mut`; and no work of an
        // earlier call is left: each call waits for its own, and for the whole queue if that wait fails.
        let ran = unsafe {
            let run = || {
                // Before its use, because after it a failure would leave it signalled.
                device.reset_fences(&[self.fence])?;
                device.update_descriptor_sets(&writes, &[]);
                let begin = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
                device.begin_command_buffer(self.commands, &begin)?;
                device.cmd_pipeline_barrier(self.commands, outside, compute, none, &[], &acquired, &[]);
                device.cmd_fill_buffer(self.commands, fragments, 0, vk::WHOLE_SIZE, 0);
                device.cmd_pipeline_barrier(self.commands, transfer, compute, none, &after(filled), &[], &[]);
                let point = vk::PipelineBindPoint::COMPUTE;
                device.cmd_bind_descriptor_sets(self.commands, point, self.layout, 0, &[self.set], &[]);
                device.cmd_push_constants(self.commands, self.layout, COMPUTE, 0, constants);
                for (step, count) in elements.into_iter().enumerate() {
                    if step > 0 {
                        device.cmd_pipeline_barrier(self.commands, compute, compute, none, &after(written), &[], &[]);
                    }
                    device.cmd_bind_pipeline(self.commands, point, self.pipelines[step]);
                    let groups = count.div_ceil(GROUP).clamp(1, MOST_GROUPS);
                    device.cmd_dispatch(self.commands, groups as u32, 1, 1);
                }
                device.cmd_pipeline_barrier(self.commands, compute, outside, none, &[], &released, &[]);
                device.end_command_buffer(self.commands)?;
                let commands = [self.commands];
                let submit = vk::SubmitInfo::default().command_buffers(&commands);
                device.queue_submit(self.queue, &[submit], self.fence)?;
                device.wait_for_fences(&[self.fence], true, u64::MAX)
            };
            run()
        };
        if ran.is_err() {
            self.wait_until_idle();
        }
        ran.map_err(failed(format!("drawing a tile on {}", self.gpu.name())))
    }

    /// Waits until the work of the queue is over, or the device is lost and runs nothing. Without memory the driver
    /// cannot wait, while the work may go on: then this tries again.
    fn wait_until_idle(&self) {
        let lacks_memory =
            |code| [vk::Result::ERROR_OUT_OF_HOST_MEMORY, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY].contains(&code);
        // SAFETY: the queue is this value's alone.
        while unsafe { self.gpu.device().queue_wait_idle(self.queue) }.is_err_and(lacks_memory) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Shader {
    fn drop(&mut self) {
        let device = self.gpu.device();
        self.wait_until_idle();
        // SAFETY: no work uses them any more. Vulkan ignores null handles.
        unsafe {
            device.destroy_descriptor_pool(self.sets, None);
            for pipeline in self.pipelines {
                device.destroy_pipeline(pipeline, None);
            }
            device.destroy_shader_module(self.module, None);
            device.destroy_pipeline_layout(self.layout, None);
            device.destroy_descriptor_set_layout(self.set_layout, None);
            device.destroy_fence(self.fence, None);
            device.destroy_command_pool(self.pool, None);
        }
    }
}

/// Returns a function that adds the operation to a result of Vulkan.
fn failed(what: impl Into<String>) -> impl FnOnce(vk::Result) -> Error {
    move |code| Error::Vulkan { what: what.into(), code }
}

/// Returns the error for a device that lacks what an operation needs.
fn unsupported(gpu: &Gpu, missing: &'static str, what: &'static str) -> Error {
    Error::Unsupported { device: gpu.name().to_owned(), missing, what }
}

/// Returns the index of the best memory type among those of `bits`: memory of the GPU, if there is such a type, rather
/// than memory that the CPU sees.
fn memory_type(gpu: &Gpu, bits: u32) -> Option<u32> {
    // SAFETY: the device belongs to the instance, which is alive.
    let types = unsafe { gpu.instance()?.get_physical_device_memory_properties(gpu.physical()) };
    let allowed = (0..types.memory_type_count).filter(|index| bits & (1 << index) != 0);
    allowed.max_by_key(|index| {
        let flags = types.memory_types[*index as usize].property_flags;
        let is_local = flags.contains(vk::MemoryPropertyFlags::DEVICE_LOCAL);
        (is_local, !flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE), u32::MAX - index)
    })
}
