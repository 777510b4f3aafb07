//! A device under the validation layer, and the few commands that the tests submit.

use std::{
    ffi::{CStr, c_void},
    mem::ManuallyDrop,
    sync::{Arc, Mutex},
};

use partywall_vulkan::{
    Buffer, Gpu,
    ash::{self, ext, khr, vk},
};

const LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// A semaphore, and the value that work waits for or signals.
pub(crate) type Point = (vk::Semaphore, u64);

/// A device, whose every mistake is collected. Dropping it fails the test if there was one.
pub(crate) struct Fixture {
    pub(crate) gpu: ManuallyDrop<Arc<Gpu>>,
    pub(crate) family: u32,
    pub(crate) device: ash::Device,
    queue: vk::Queue,
    pool: vk::CommandPool,
    instance: ash::Instance,
    /// `None` without the layer.
    messenger: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    messages: Box<Mutex<Vec<String>>>,
    _entry: ash::Entry,
}

/// Keeps what the validation layer says.
///
/// # Safety
/// As Vulkan calls it: `data` is valid for the call, and `messages` is the pointer that the messenger was made with.
unsafe extern "system" fn collect(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    messages: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer passes a message that ends with a zero, and the pointer of `Fixture::new`, which lives longer
    // than the messenger.
    unsafe {
        let messages = &*messages.cast::<Mutex<Vec<String>>>();
        messages.lock().unwrap().push(CStr::from_ptr((*data).p_message).to_string_lossy().into_owned());
    }
    vk::FALSE
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::make(&[ext::external_memory_host::NAME, khr::external_memory_fd::NAME], true)
    }

    /// A device without the validation layer.
    pub(crate) fn unvalidated() -> Self {
        Self::make(&[ext::external_memory_host::NAME], false)
    }

    /// A device with these extensions.
    pub(crate) fn with(extensions: &[&CStr]) -> Self {
        Self::make(extensions, true)
    }

    fn make(extensions: &[&CStr], validated: bool) -> Self {
        let messages = Box::new(Mutex::default());
        // SAFETY: each structure lives until its call returns, each handle until `drop`.
        unsafe {
            let entry = ash::Entry::load().unwrap();
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_2);
            let layers = if validated { vec![LAYER.as_ptr()] } else { Vec::new() };
            let debug_utils = if validated { vec![ext::debug_utils::NAME.as_ptr()] } else { Vec::new() };
            let create = vk::InstanceCreateInfo::default()
                .application_info(&application)
                .enabled_layer_names(&layers)
                .enabled_extension_names(&debug_utils);
            let instance = entry.create_instance(&create, None).expect("apt-get install vulkan-validationlayers");
            let create = vk::DebugUtilsMessengerCreateInfoEXT::default()
                .message_severity(
                    vk::DebugUtilsMessageSeverityFlagsEXT::WARNING | vk::DebugUtilsMessageSeverityFlagsEXT::ERROR,
                )
                .message_type(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION)
                .pfn_user_callback(Some(collect))
                .user_data((&raw const *messages).cast_mut().cast());
            let messenger = validated.then(|| {
                let debug = ext::debug_utils::Instance::new(&entry, &instance);
                let messenger = debug.create_debug_utils_messenger(&create, None).unwrap();
                (debug, messenger)
            });
            let is_cpu = |physical: &vk::PhysicalDevice| {
                instance.get_physical_device_properties(*physical).device_type == vk::PhysicalDeviceType::CPU
            };
            let physical = instance.enumerate_physical_devices().unwrap().into_iter().find(is_cpu);
            let physical = physical.expect("apt-get install mesa-vulkan-drivers");
            let family = 0;
            let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&[1.0])];
            let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
            let mut features = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(true);
            let create = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&names)
                .push_next(&mut features);
            let device = instance.create_device(physical, &create, None).unwrap();
            let queue = device.get_device_queue(family, 0);
            let pool = vk::CommandPoolCreateInfo::default().queue_family_index(family);
            let pool = device.create_command_pool(&pool, None).unwrap();
            let gpu = ManuallyDrop::new(Gpu::adopt(&instance, physical, device.clone()));
            Self { gpu, family, device, queue, pool, instance, messenger, messages, _entry: entry }
        }
    }

    /// Takes what the layer has reported.
    pub(crate) fn messages(&self) -> Vec<String> {
        std::mem::take(&mut self.messages.lock().unwrap())
    }

    /// Submits a copy of a whole buffer, after a point of the source's writer and before a signal.
    pub(crate) fn copy(&self, from: &Buffer, to: &Buffer, wait: Option<Point>, signal: Option<Point>) {
        let stage = vk::PipelineStageFlags::TRANSFER;
        let acquired = [
            from.acquire(vk::AccessFlags::TRANSFER_READ, self.family),
            to.acquire(vk::AccessFlags::TRANSFER_WRITE, self.family),
        ];
        let released = [to.release(vk::AccessFlags::TRANSFER_WRITE, self.family)];
        let none = vk::DependencyFlags::empty();
        let copies = [vk::BufferCopy::default().size(from.bytes())];
        // SAFETY: all handles are alive; callers wait for the work before they drop a buffer.
        unsafe {
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
            let commands = self.device.allocate_command_buffers(&allocate).unwrap()[0];
            self.device.begin_command_buffer(commands, &vk::CommandBufferBeginInfo::default()).unwrap();
            self.device.cmd_pipeline_barrier(commands, from.outside(), stage, none, &[], &acquired, &[]);
            self.device.cmd_copy_buffer(commands, from.handle(), to.handle(), &copies);
            self.device.cmd_pipeline_barrier(commands, stage, to.outside(), none, &[], &released, &[]);
            self.device.end_command_buffer(commands).unwrap();
            self.submit(&[commands], wait, signal);
        }
    }

    /// Submits nothing but a wait and a signal.
    pub(crate) fn pass(&self, wait: Option<Point>, signal: Option<Point>) {
        // SAFETY: as above.
        unsafe { self.submit(&[], wait, signal) }
    }

    unsafe fn submit(&self, commands: &[vk::CommandBuffer], wait: Option<Point>, signal: Option<Point>) {
        let (waits, wait_values): (Vec<_>, Vec<_>) = wait.into_iter().unzip();
        let (signals, signal_values): (Vec<_>, Vec<_>) = signal.into_iter().unzip();
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; waits.len()];
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&wait_values)
            .signal_semaphore_values(&signal_values);
        let submit = vk::SubmitInfo::default()
            .command_buffers(commands)
            .wait_semaphores(&waits)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&signals)
            .push_next(&mut timeline);
        // SAFETY: as above; tests submit from one thread.
        unsafe { self.device.queue_submit(self.queue, &[submit], vk::Fence::null()) }.unwrap();
    }

    /// Waits until all work is done.
    pub(crate) fn finish(&self) {
        // SAFETY: tests use the queue from one thread.
        unsafe { self.device.device_wait_idle() }.unwrap();
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: nothing is enqueued any more, and everything that was made of the device is gone but what `gpu`
        // destroys.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_command_pool(self.pool, None);
            // A test that panics may leave buffers behind, which still refer to the device.
            if !std::thread::panicking() {
                let gpu = ManuallyDrop::take(&mut self.gpu);
                drop(Arc::into_inner(gpu).expect("a test drops what it makes of its device"));
                self.device.destroy_device(None);
                if let Some((debug, messenger)) = self.messenger.take() {
                    debug.destroy_debug_utils_messenger(messenger, None);
                }
                self.instance.destroy_instance(None);
            }
        }
        let messages = self.messages();
        assert!(messages.is_empty() || std::thread::panicking(), "{messages:#?}");
    }
}

/// Tests that mistakes are reported, without which the other tests would prove nothing.
#[test]
fn needs_vulkan_the_layer_reports_a_mistake() {
    let fixture = Fixture::new();
    let create = vk::BufferCreateInfo::default().usage(vk::BufferUsageFlags::TRANSFER_SRC);
    // SAFETY: a buffer of no bytes is the mistake that the layer is to report; the driver allocates nothing for it.
    unsafe {
        if let Ok(buffer) = fixture.device.create_buffer(&create, None) {
            fixture.device.destroy_buffer(buffer, None);
        }
    }
    let messages = fixture.messages();
    assert!(messages.iter().any(|message| message.contains("VUID-VkBufferCreateInfo-size-00912")), "{messages:?}");
}
