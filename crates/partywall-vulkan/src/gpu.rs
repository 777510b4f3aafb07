//! Vulkan devices.

use std::{
    ffi::CStr,
    fmt,
    sync::{Arc, Mutex, OnceLock},
};

use ash::{ext, khr, vk};
use partywall::DeviceUuid;
use partywall_os::{lock::IgnorePoison, process::fork_generation};

use crate::error::{Error, Result, failed, unsupported};

/// A Vulkan device, and the functions that import memory. Every object made from it keeps it alive.
pub struct Gpu {
    physical: vk::PhysicalDevice,
    device: ash::Device,
    name: String,
    uuid: DeviceUuid,
    memory_types: vk::PhysicalDeviceMemoryProperties,
    /// `None` if the device was created without `VK_EXT_external_memory_host`.
    host_import: Option<HostImport>,
    /// True if the device was created with `VK_KHR_external_memory_fd`.
    has_memory_fd: bool,
    /// The most by which a timeline semaphore may be behind a value that is waited for or signalled.
    pub(crate) max_difference: u64,
    /// Semaphores of timelines that were dropped. Work may still refer to them, and only the end of the device proves
    /// that none does.
    retired: Mutex<Vec<vk::Semaphore>>,
    /// `None` for a caller's device.
    own: Option<Own>,
    /// The fork generation of the process that made it.
    generation: u64,
}

/// The functions of `VK_EXT_external_memory_host`.
pub(crate) struct HostImport {
    pub(crate) functions: ext::external_memory_host::Device,
    /// The alignment of imported pointers and lengths.
    pub(crate) alignment: u64,
    /// Whether read-only mappings are imported. Trying it would not do: after NVIDIA's driver (580.159.04) has refused
    /// one, it refuses writable ones, too.
    pub(crate) takes_read_only: bool,
}

/// A device that this crate has created.
struct Own {
    instance: ash::Instance,
    queue_family: u32,
    has_wide_shaders: bool,
}

/// The system's Vulkan loader. It stays loaded, and the drivers with it: a process that unloaded NVIDIA's driver
/// (580.159.04) and opened its GPU again ended with SIGSEGV.
static LOADER: OnceLock<ash::Entry> = OnceLock::new();

/// The file name of the loader, which the dynamic linker finds.
const LIBRARY: &str = "libvulkan.so.1";

fn loader() -> Result<&'static ash::Entry> {
    if let Some(loaded) = LOADER.get() {
        return Ok(loaded);
    }
    let entry = load(LIBRARY)?;
    Ok(LOADER.get_or_init(|| entry))
}

fn load(library: &str) -> Result<ash::Entry> {
    // SAFETY: the library is the system's Vulkan loader, whose initialisation has no preconditions.
    unsafe { ash::Entry::load_from(library) }.map_err(|error| Error::NoLoader(error.to_string()))
}

/// Returns whether a device takes memory by its descriptor, as a result.
fn require_memory_fd(has_memory_fd: bool, device: &str) -> Result<()> {
    let what = "an import of GPU memory";
    if has_memory_fd { Ok(()) } else { Err(unsupported(device, "VK_KHR_external_memory_fd", what)) }
}

impl Gpu {
    /// Creates a device of its own on the GPU with this UUID, or on the first one that imports host memory. It has one
    /// queue, number 0 of [`queue_family`](Self::queue_family), for compute and transfers, and graphics if the family
    /// has it. 64-bit integers and their atomic operations are enabled in shaders if the device has both.
    ///
    /// # Errors
    /// [`Error::NoLoader`], [`Error::NoDevice`], [`Error::Unsupported`], [`Error::Vulkan`].
    pub fn open(uuid: Option<DeviceUuid>) -> Result<Arc<Self>> {
        let entry = loader()?;
        let application =
            vk::ApplicationInfo::default().application_name(c"partywall").api_version(vk::API_VERSION_1_2);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: the structures are valid and refer to nothing that ends before the call.
        let instance = match unsafe { entry.create_instance(&create, None) } {
            Ok(instance) => instance,
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => {
                return Err(Error::NoLoader("the loader found no driver (no ICD manifest)".to_owned()));
            }
            Err(code) => return Err(failed("creating a Vulkan instance")(code)),
        };
        Self::create(instance.clone(), uuid).inspect_err(|_| {
            // SAFETY: `create` has destroyed what it made of the instance.
            unsafe { instance.destroy_instance(None) };
        })
    }

    fn create(instance: ash::Instance, uuid: Option<DeviceUuid>) -> Result<Arc<Self>> {
        let failed_list = failed("listing Vulkan devices");
        // SAFETY: the instance is alive.
        let devices = unsafe { instance.enumerate_physical_devices() }.map_err(failed_list)?;
        let described: Vec<_> = devices.iter().map(|device| (*device, Described::of(&instance, *device))).collect();
        let host = ext::external_memory_host::NAME;
        let fits = |described: &Described| uuid.map_or(described.has(host), |uuid| described.uuid == uuid);
        let Some((physical, described)) = described.iter().find(|(_, described)| fits(described)) else {
            let wanted = uuid.map_or("able to import host memory".to_owned(), |uuid| uuid.to_string());
            let there = described.iter().map(|(_, described)| format!("{} ({})", described.name, described.uuid));
            return Err(Error::NoDevice { wanted, there: there.collect() });
        };
        if !described.has_timelines {
            return Err(unsupported(&described.name, "timeline semaphores (Vulkan 1.2)", "this crate"));
        }
        // SAFETY: the device belongs to the instance, which is alive.
        let families = unsafe { instance.get_physical_device_queue_family_properties(*physical) };
        let rank = |family: &vk::QueueFamilyProperties| {
            let computes = family.queue_flags.contains(vk::QueueFlags::COMPUTE);
            computes.then(|| family.queue_flags.contains(vk::QueueFlags::GRAPHICS))
        };
        let best = (0_u32..).zip(&families).filter_map(|(index, family)| Some((rank(family)?, index))).max();
        let needs = || unsupported(&described.name, "queue for compute", "this crate");
        let (_, queue_family) = best.ok_or_else(needs)?;
        let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(queue_family).queue_priorities(&[1.0])];
        let extensions: Vec<_> =
            [host, khr::external_memory_fd::NAME].into_iter().filter(|name| described.has(name)).collect();
        let extensions: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
        let wide = described.has_wide_shaders;
        let mut features = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(true);
        features = features.shader_buffer_int64_atomics(wide);
        let core = vk::PhysicalDeviceFeatures::default().shader_int64(wide);
        let create = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .enabled_features(&core)
            .push_next(&mut features);
        let failed = failed(format!("creating a device on {}", described.name));
        // SAFETY: the structures are valid and refer to nothing that ends before the call; the extensions and the
        // feature exist, see above.
        let device = unsafe { instance.create_device(*physical, &create, None) }.map_err(failed)?;
        // SAFETY: as `adopt` asks; `own` destroys the device and then the instance, after everything that was made of
        // them.
        let mut gpu = unsafe { Self::of(&instance, *physical, device) };
        gpu.own = Some(Own { instance, queue_family, has_wide_shaders: wide });
        Ok(Arc::new(gpu))
    }

    /// Takes a device of the caller's, which was created with `VK_EXT_external_memory_host` for host memory, with
    /// `VK_KHR_external_memory_fd` for GPU memory, and with the feature `timelineSemaphore`.
    ///
    /// # Safety
    /// - `physical` and `device` belong to `instance`, and the feature `timelineSemaphore` is enabled.
    /// - `instance` and `device` outlive the returned value and everything that is made of it.
    /// - When the returned value is dropped, no enqueued work waits for a semaphore of its timelines.
    pub unsafe fn adopt(instance: &ash::Instance, physical: vk::PhysicalDevice, device: ash::Device) -> Arc<Self> {
        // SAFETY: the caller's promise.
        Arc::new(unsafe { Self::of(instance, physical, device) })
    }

    /// Takes a device; see [`adopt`](Self::adopt), whose safety requirements it has.
    unsafe fn of(instance: &ash::Instance, physical: vk::PhysicalDevice, device: ash::Device) -> Self {
        let described = Described::of(instance, physical);
        // Vulkan returns no function of an extension that the device was created without.
        // SAFETY: both handles are alive, by the caller's promise, and the names end with a zero.
        let has =
            |function: &CStr| unsafe { instance.get_device_proc_addr(device.handle(), function.as_ptr()) }.is_some();
        let host_import = has(c"vkGetMemoryHostPointerPropertiesEXT").then(|| HostImport {
            functions: ext::external_memory_host::Device::new(instance, &device),
            alignment: described.host_alignment,
            takes_read_only: described.is_cpu,
        });
        let has_memory_fd = has(c"vkGetMemoryFdKHR");
        // SAFETY: the device belongs to the instance, which is alive.
        let memory_types = unsafe { instance.get_physical_device_memory_properties(physical) };
        Self {
            physical,
            device,
            name: described.name,
            uuid: described.uuid,
            memory_types,
            host_import,
            has_memory_fd,
            max_difference: described.max_difference,
            retired: Mutex::default(),
            own: None,
            generation: fork_generation(),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &ash::Device {
        &self.device
    }

    /// Returns the UUID, by which CUDA and Partywall name the GPU, too.
    pub fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the family of the only queue of a device that [`open`](Self::open) created; `None` for a caller's
    /// device.
    pub fn queue_family(&self) -> Option<u32> {
        self.own.as_ref().map(|own| own.queue_family)
    }

    /// Returns the instance that [`open`](Self::open) created, for functions of extensions; `None` for a caller's
    /// device.
    pub fn instance(&self) -> Option<&ash::Instance> {
        self.own.as_ref().map(|own| &own.instance)
    }

    /// Returns the physical device.
    pub fn physical(&self) -> vk::PhysicalDevice {
        self.physical
    }

    /// Returns whether shaders may use 64-bit integers and their atomic operations: on a device that
    /// [`open`](Self::open) created, if it has both. False for a caller's device.
    pub fn has_wide_shaders(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.has_wide_shaders)
    }

    pub(crate) fn host_import(&self) -> Result<&HostImport> {
        let needs = || self.unsupported("VK_EXT_external_memory_host", "an import of host memory");
        self.host_import.as_ref().ok_or_else(needs)
    }

    /// Returns the error for an operation that needs what this device lacks.
    pub(crate) fn unsupported(&self, missing: &'static str, what: &'static str) -> Error {
        unsupported(&self.name, missing, what)
    }

    pub(crate) fn require_memory_fd(&self) -> Result<()> {
        require_memory_fd(self.has_memory_fd, &self.name)
    }

    /// Returns the index of the best memory type for an import among those of `bits`: memory of the GPU that the CPU
    /// does not see, if there is such a type.
    pub(crate) fn memory_type(&self, bits: u32) -> Option<u32> {
        let allowed = (0..self.memory_types.memory_type_count).filter(|index| bits & (1 << index) != 0);
        allowed.max_by_key(|index| {
            let flags = self.memory_types.memory_types[*index as usize].property_flags;
            let is_local = flags.contains(vk::MemoryPropertyFlags::DEVICE_LOCAL);
            (is_local, !flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE), u32::MAX - index)
        })
    }

    /// Returns whether this is still the process that made the device, and not a forked child.
    pub(crate) fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }

    /// Destroys a semaphore with the device.
    pub(crate) fn retire(&self, semaphore: vk::Semaphore) {
        self.retired.lock().ignore_poison().push(semaphore);
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let retired = std::mem::take(self.retired.get_mut().ignore_poison());
        // SAFETY: this is the last use of the semaphores and of an own device. Work on an own device is over after
        // `device_wait_idle`, which no other thread can disturb, as nothing else refers to this value; for a caller's
        // device the caller of `adopt` promises that no work refers to the semaphores.
        unsafe {
            if self.own.is_some() {
                // A lost device is idle.
                let _ = self.device.device_wait_idle();
            }
            for semaphore in retired {
                self.device.destroy_semaphore(semaphore, None);
            }
            if let Some(own) = self.own.take() {
                self.device.destroy_device(None);
                own.instance.destroy_instance(None);
            }
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.name, self.uuid)
    }
}

/// The properties of a physical device.
struct Described {
    name: String,
    uuid: DeviceUuid,
    has_timelines: bool,
    has_wide_shaders: bool,
    /// True for a driver that draws by the CPU, as lavapipe.
    is_cpu: bool,
    host_alignment: u64,
    max_difference: u64,
    extensions: Vec<vk::ExtensionProperties>,
}

impl Described {
    fn of(instance: &ash::Instance, physical: vk::PhysicalDevice) -> Self {
        let mut ids = vk::PhysicalDeviceIDProperties::default();
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut timelines = vk::PhysicalDeviceTimelineSemaphoreProperties::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut ids).push_next(&mut timelines);
        // SAFETY: callers pass a device of this living instance, for all three calls.
        let extensions = unsafe { instance.enumerate_device_extension_properties(physical) }.unwrap_or_default();
        let names = |name: &CStr| extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name));
        if names(ext::external_memory_host::NAME) {
            all = all.push_next(&mut host);
        }
        // SAFETY: as above; the structures are chained only where the device knows them.
        unsafe { instance.get_physical_device_properties2(physical, &mut all) };
        let properties = all.properties;
        let name =
            properties.device_name_as_c_str().map_or_else(|_| "?".into(), |name| name.to_string_lossy().into_owned());
        let mut newer = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut newer);
        let is_new = properties.api_version >= vk::API_VERSION_1_2;
        if is_new {
            // SAFETY: as above.
            unsafe { instance.get_physical_device_features2(physical, &mut features) };
        }
        let has_int64 = features.features.shader_int64 == vk::TRUE;
        Self {
            name,
            uuid: DeviceUuid(ids.device_uuid),
            has_timelines: is_new && newer.timeline_semaphore == vk::TRUE,
            has_wide_shaders: has_int64 && newer.shader_buffer_int64_atomics == vk::TRUE,
            is_cpu: properties.device_type == vk::PhysicalDeviceType::CPU,
            host_alignment: host.min_imported_host_pointer_alignment,
            max_difference: timelines.max_timeline_semaphore_value_difference,
            extensions,
        }
    }

    fn has(&self, name: &CStr) -> bool {
        self.extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_loader_is_a_sentence_that_says_what_to_install() {
        let error = load("libvulkan-that-is-nowhere.so.1").map(drop).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::NoLoader(_)), "{said}");
        assert!(said.starts_with("cannot load Vulkan: ") && said.contains("libvulkan-that-is-nowhere.so.1"), "{said}");
        assert!(said.contains("apt-get install libvulkan1"), "{said}");
    }

    #[test]
    fn device_that_takes_no_descriptors_is_a_sentence() {
        assert!(require_memory_fd(true, "a device").is_ok());
        let said = require_memory_fd(false, "a device").unwrap_err().to_string();
        assert!(
            said.starts_with("a device has no VK_KHR_external_memory_fd, which an import of GPU memory needs; "),
            "{said}"
        );
    }
}
