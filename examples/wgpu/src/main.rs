//! A compute shader of wgpu that works on a segment of Partywall in place: in host memory, and in the GPU memory of a
//! CUDA process.
//!
//! wgpu knows nothing of shared memory. The example creates wgpu's device with the extensions that an import needs,
//! lends that device to `partywall-vulkan`, which imports the segment, and gives the `VkBuffer` of a tensor back to
//! wgpu.

use std::{error::Error, ffi::CStr, sync::Arc, time::Duration};

use partywall::{DType, Descriptors, DeviceUuid, Domain, Place};
use partywall_vulkan::{
    Gpu,
    ash::{self, ext, khr, vk},
};
use wgpu::hal::{self, api::Vulkan};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Each number becomes `2 · number + 1`.
const SHADER: &str = "
    @group(0) @binding(0) var<storage, read_write> numbers: array<u32>;

    @compute @workgroup_size(64)
    fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
        for (var i = id.x; i < arrayLength(&numbers); i += groups.x * 64u) {
            numbers[i] = 2u * numbers[i] + 1u;
        }
    }";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let domain = Domain::connect()?;
    match arguments.as_slice() {
        [] => own(&domain),
        [name, tensor] => {
            let (before, after) = work(domain.descriptors(name, Duration::from_secs(10))?, tensor)?;
            println!("{name}: the first numbers were {before:?} and are {after:?}");
            Ok(())
        }
        _ => Err("usage: partywall-wgpu-example [NAME TENSOR]".into()),
    }
}

/// Makes a segment in host memory, works on it by its name, and compares what Partywall reads.
fn own(domain: &Domain) -> Result<()> {
    let mut build =
        domain.create("wgpu-example", Place::Host).mutable(true).tensor("numbers", DType::U32, &[COUNT]).allocate()?;
    let numbers: Vec<u8> = (0..COUNT as u32).flat_map(u32::to_le_bytes).collect();
    build.write("numbers", &numbers)?;
    let segment = build.commit()?;
    work(domain.descriptors("wgpu-example", Duration::ZERO)?, "numbers")?;
    let bytes = segment.tensor("numbers")?.to_vec()?;
    let (words, _) = bytes.as_chunks();
    let wrong = (0..).zip(words).filter(|(number, word)| u32::from_le_bytes(**word) != 2 * number + 1).count();
    if wrong > 0 {
        return Err(format!("{wrong} of {COUNT} numbers are wrong").into());
    }
    println!("{COUNT} numbers in host memory were computed in place by wgpu");
    Ok(())
}

/// Runs the shader on a tensor in place. Returns its first numbers before and afterwards.
fn work(descriptors: Descriptors, tensor: &str) -> Result<([u32; 4], [u32; 4])> {
    if !descriptors.is_mutable() {
        return Err(format!("{} is frozen: commit it with mutable=True", descriptors.name()).into());
    }
    let found = descriptors.table().find(tensor).ok_or_else(|| format!("there is no tensor {tensor:?}"))?;
    if found.dtype() != DType::U32 || found.bytes() < 16 {
        return Err(format!("{tensor:?} is not of 4 or more elements of u32").into());
    }
    let place = descriptors.place();
    let (device, queue) = open(place)?;
    println!("by {}", device.adapter_info().name);
    let buffer = buffer(&device, descriptors, tensor)?;
    let before = first(&device, &queue, &buffer)?;
    run(&device, &queue, &buffer)?;
    Ok((before, first(&device, &queue, &buffer)?))
}

/// Creates a device of wgpu that imports memory of this place, on the GPU that has the memory.
fn open(place: Place) -> Result<(wgpu::Device, wgpu::Queue)> {
    let mut describe = wgpu::InstanceDescriptor::new_without_display_handle();
    describe.backends = wgpu::Backends::VULKAN;
    let instance = wgpu::Instance::new(describe);
    for adapter in pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN)) {
        // SAFETY: the guard is dropped at the end of the turn, and nothing is destroyed through it.
        let Some(opened) = (unsafe { adapter.as_hal::<Vulkan>() }) else { continue };
        let wanted = match place {
            Place::Host => ext::external_memory_host::NAME,
            Place::Gpu(_) => khr::external_memory_fd::NAME,
        };
        let vulkan = opened.shared_instance().raw_instance();
        let (uuid, has_it) = describe_device(vulkan, opened.raw_physical_device(), wanted);
        if !has_it || matches!(place, Place::Gpu(owner) if owner != uuid) {
            continue;
        }
        let limits = adapter.limits();
        let add: Box<hal::vulkan::CreateDeviceCallback<'_>> = Box::new(|create| create.extensions.push(wanted));
        // SAFETY: the callback adds an extension that the device has, and removes nothing.
        let device = unsafe {
            opened.open_with_callback(wgpu::Features::empty(), &limits, &wgpu::MemoryHints::default(), Some(add))
        }?;
        drop(opened);
        let describe = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
        // SAFETY: the device was created from this adapter, with these limits and without features.
        return Ok(unsafe { adapter.create_device_from_hal(device, &describe) }?);
    }
    Err(format!("no Vulkan device imports memory of {place}").into())
}

/// Returns the UUID of a device, by which Partywall names its GPU, and whether it has an extension.
fn describe_device(instance: &ash::Instance, device: vk::PhysicalDevice, extension: &CStr) -> (DeviceUuid, bool) {
    let mut ids = vk::PhysicalDeviceIDProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut ids);
    // SAFETY: the device is one of this instance, which is alive; the structures are valid for the call.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };
    // SAFETY: as above.
    let extensions = unsafe { instance.enumerate_device_extension_properties(device) }.unwrap_or_default();
    let has_it = extensions.iter().any(|other| other.extension_name_as_c_str() == Ok(extension));
    (DeviceUuid(ids.device_uuid), has_it)
}

/// Imports a segment, and returns a tensor as a buffer of wgpu. The buffer keeps the import and its lease.
fn buffer(device: &wgpu::Device, descriptors: Descriptors, tensor: &str) -> Result<wgpu::Buffer> {
    let keep_device = device.clone();
    // SAFETY: the guard is dropped at the end of the function, and nothing is destroyed through it.
    let opened = unsafe { device.as_hal::<Vulkan>() }.ok_or("wgpu has another backend than Vulkan")?;
    let instance = opened.shared_instance().raw_instance();
    // SAFETY:
    // - The physical device and the device are of this instance. wgpu enables timeline semaphores where it has them,
    //   and nothing here uses them by Partywall.
    // - Instance and device outlive the import: the closure below keeps wgpu's device until it has dropped the import.
    // - Nothing waits for a semaphore of `gpu`, because it makes none.
    let gpu: Arc<Gpu> = unsafe { Gpu::adopt(instance, opened.raw_physical_device(), opened.raw_device().clone()) };
    let memory = gpu.import(descriptors)?;
    let usage = vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::TRANSFER_SRC;
    let imported = memory.buffer(tensor, usage)?;
    let (handle, size) = (imported.handle(), imported.bytes());
    let drop_import = Box::new(move || {
        drop(imported);
        drop((memory, gpu));
        drop(keep_device);
    });
    // SAFETY: the handle is destroyed by the closure, which wgpu calls when the buffer is dropped and its work is done.
    // It is never mapped, because its usage has neither MAP_READ nor MAP_WRITE.
    let buffer = unsafe { hal::vulkan::Buffer::from_raw_externally_owned(handle, drop_import) };
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let describe = wgpu::BufferDescriptor { label: Some("tensor"), size, usage, mapped_at_creation: false };
    // SAFETY: the buffer is of this device and as described; its bytes were written by the process that committed them.
    Ok(unsafe { device.create_buffer_from_hal::<Vulkan>(buffer, &describe) })
}

/// Runs the shader on all of a buffer, and waits for it.
fn run(device: &wgpu::Device, queue: &wgpu::Queue, buffer: &wgpu::Buffer) -> Result<()> {
    let source = wgpu::ShaderSource::Wgsl(SHADER.into());
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
    });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    pass.set_pipeline(&pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.dispatch_workgroups((buffer.size() / 4).div_ceil(64).min(4096) as u32, 1, 1);
    drop(pass);
    queue.submit([encoder.finish()]);
    device.poll(wgpu::PollType::wait_indefinitely())?;
    Ok(())
}

/// Returns the first numbers of a buffer.
fn first(device: &wgpu::Device, queue: &wgpu::Queue, buffer: &wgpu::Buffer) -> Result<[u32; 4]> {
    let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
    let describe = wgpu::BufferDescriptor { label: Some("copy"), size: 16, usage, mapped_at_creation: false };
    let copy = device.create_buffer(&describe);
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(buffer, 0, &copy, 0, 16);
    queue.submit([encoder.finish()]);
    copy.slice(..).map_async(wgpu::MapMode::Read, |mapped| mapped.expect("a new buffer can be mapped"));
    device.poll(wgpu::PollType::wait_indefinitely())?;
    let bytes = copy.slice(..).get_mapped_range()?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(std::array::from_fn(|number| u32::from_le_bytes(words[number])))
}

/// How many numbers the example makes.
const COUNT: u64 = 1 << 20;
