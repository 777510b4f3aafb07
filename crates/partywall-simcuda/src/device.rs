//! The devices: their number, those that the process sees, and their attributes.

use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{LazyLock, OnceLock};

use crate::abi::{Code, RawDevice};
use crate::budget::{Budget, NODES, bytes_of};
use crate::entry::{self, entry_points, store};

/// A device that this process sees.
pub(crate) struct Device {
    /// Its number among all devices of the simulated machine, whether or not a process sees them.
    pub(crate) physical: u8,
    pub(crate) memory: Budget,
}

impl Device {
    /// Returns the devices that `SIMCUDA_DEVICES` and `CUDA_VISIBLE_DEVICES` leave to this process.
    pub(crate) fn visible() -> Vec<Self> {
        let count = variable("SIMCUDA_DEVICES").map_or(DEFAULT_COUNT.load(Ordering::Relaxed), |text| {
            text.parse().ok().filter(|count| *count <= 64).unwrap_or_else(|| panic!("SIMCUDA_DEVICES={text}: 0 to 64"))
        });
        let total = bytes_of("SIMCUDA_MEMORY");
        let seen = variable("CUDA_VISIBLE_DEVICES").map_or_else(|| (0..count).collect(), |list| choose(&list, count));
        seen.into_iter().map(|physical| Self { physical, memory: Budget::new(total) }).collect()
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        uuid(self.physical)
    }

    fn pci_bus_id(&self) -> String {
        format!("0000:{:02X}:00.0", self.physical + 1)
    }
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// Returns the devices that this process sees, by ordinal.
pub(crate) fn all() -> &'static [Device] {
    DEVICES.get().expect("a call runs after cuInit")
}

/// Returns a device by the number that the caller gave.
///
/// # Errors
/// `INVALID_DEVICE`.
pub(crate) fn numbered(ordinal: i32) -> Result<(usize, &'static Device), Code> {
    let ordinal = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    Ok((ordinal, all().get(ordinal).ok_or(Code::INVALID_DEVICE)?))
}

/// Returns how often a device of the simulated machine has lost its memory.
pub(crate) fn losses(physical: u8) -> usize {
    losses_of(&physical.to_string())
}

/// Returns how often the memory of a NUMA node was lost.
pub(crate) fn losses_on_node(node: i32) -> usize {
    losses_of(&format!("node {node}"))
}

fn losses_of(place: &str) -> usize {
    static FILE: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("SIMCUDA_LOSSES").map(PathBuf::from));
    let Some(lines) = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok()) else { return 0 };
    lines.lines().filter(|line| *line == place).count()
}

/// Returns the identity of a device of the simulated machine.
pub(crate) fn uuid(physical: u8) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid[..4].copy_from_slice(&[0x51, 0x30, 0x1c, 0xa7]);
    uuid[15] = physical;
    uuid
}

/// Returns a device's UUID as `nvidia-smi -L` prints it.
fn uuid_text(physical: u8) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Sets the number of devices for the case that `SIMCUDA_DEVICES` is not set. Call it before `cuInit`.
pub(crate) fn set_default_count(count: u8) {
    DEFAULT_COUNT.store(count, Ordering::Relaxed);
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns the devices of a `CUDA_VISIBLE_DEVICES`: indices, or UUIDs that may be cut short where they stay unique. The
/// list ends at the first entry that names no device, or one that was named before.
fn choose(list: &str, count: u8) -> Vec<u8> {
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found = if entry.starts_with("GPU-") {
            let mut matching = (0..count).filter(|physical| uuid_text(*physical).starts_with(entry));
            matching.next().filter(|_| matching.next().is_none())
        } else {
            entry.parse().ok().filter(|index| *index < count)
        };
        match found {
            Some(physical) if !chosen.contains(&physical) => chosen.push(physical),
            _ => break,
        }
    }
    chosen
}

/// Returns a `CUdevice_attribute` of a device like the H200 on which the facts were measured. Other attributes are 0,
/// including the first version of the stream memory operations (92, 93), although the second version works.
fn attribute(device: &Device, attribute: u32) -> Result<c_int, Code> {
    Ok(match attribute {
        1..=3 => 1024,                           // threads a block, its x and y
        4 => 64,                                 // its z
        5 => i32::MAX,                           // grid x
        6 | 7 => 65535,                          // grid y, z
        8 => 48 << 10,                           // shared memory a block
        10 => 32,                                // warp
        16 => 132,                               // multiprocessors
        19 => 1,                                 // maps host memory
        31 => 1,                                 // concurrent kernels
        33 => c_int::from(device.physical) + 1,  // PCI bus
        39 => 2048,                              // threads a multiprocessor
        40 => 3,                                 // copy engines
        41 => 1,                                 // unified addressing
        75 => 9,                                 // compute capability, major
        78 => 1,                                 // stream priorities
        83 | 88 | 89 => 1,                       // managed and pageable memory, from both sides at a time
        91 => 1,                                 // host pointers of registered memory
        95 | 96 => 1,                            // cooperative launch
        99 | 113 => 1,                           // host register, read-only as well
        102 | 103 => 1,                          // virtual memory management, POSIX file descriptors
        115 | 119 => 1,                          // memory pools, their handle types: POSIX file descriptors
        122 | 123 => 1,                          // stream memory operations: 64 bits, NOR
        125 => 1,                                // events between processes
        134 => (device.physical % NODES).into(), // NUMA node
        141 => 1,                                // virtual memory management of a NUMA node's memory
        133 => c_int::from(variable("SIMCUDA_MPS").is_some_and(|set| set == "1")),
        _ if attribute > 0 && attribute <= LAST_ATTRIBUTE => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// The highest attribute of CUDA 13.0.
const LAST_ATTRIBUTE: u32 = 147;

entry_points! {
    fn cuInit(flags: u32) {
        if flags != 0 { return Err(Code::INVALID_VALUE); }
        if DEVICES.get_or_init(Device::visible).is_empty() { return Err(Code::NO_DEVICE); }
        entry::set_initialized();
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut c_int) { store(version, 13000) }
    fn cuDeviceGetCount(count: *mut c_int) { store(count, all().len() as c_int) }
    fn cuDeviceGet(device: *mut RawDevice, ordinal: c_int) {
        numbered(ordinal)?;
        store(device, ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: RawDevice) {
        numbered(device)?;
        // SAFETY: the caller's buffer.
        unsafe { store_text(name, length, "Simulated GPU") }
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: RawDevice) { store(uuid, numbered(device)?.1.uuid()) }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: RawDevice) {
        store(bytes, numbered(device)?.1.memory.total as usize)
    }
    fn cuDeviceGetAttribute(value: *mut c_int, which: u32, device: RawDevice) {
        store(value, attribute(numbered(device)?.1, which)?)
    }
    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: RawDevice) {
        let id = numbered(device)?.1.pci_bus_id();
        // SAFETY: the caller's buffer.
        unsafe { store_text(text, length, &id) }
    }
    fn cuDeviceGetByPCIBusId(device: *mut RawDevice, text: *const c_char) {
        if text.is_null() { return Err(Code::INVALID_VALUE); }
        // SAFETY: a NUL-terminated string of the caller's.
        let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().to_ascii_uppercase();
        let ordinal = all().iter().position(|device| device.pci_bus_id() == text);
        store(device, ordinal.ok_or(Code::INVALID_DEVICE)? as RawDevice)
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: RawDevice, peer: RawDevice) {
        numbered(device)?;
        numbered(peer)?;
        store(can, c_int::from(device != peer))
    }
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: u32, from: RawDevice, to: RawDevice) {
        numbered(from)?;
        numbered(to)?;
        if from == to { return Err(Code::INVALID_DEVICE); }
        // Performance rank, access, native atomics, arrays.
        store(value, match attribute { 1 => 0, 2..=4 => 1, _ => return Err(Code::INVALID_VALUE) })
    }
}

/// # Safety
/// `to` is null or has room for `length` bytes.
unsafe fn store_text(to: *mut c_char, length: c_int, text: &str) -> Result<(), Code> {
    let length = usize::try_from(length).ok().filter(|length| *length > 0 && !to.is_null());
    let length = length.ok_or(Code::INVALID_VALUE)?;
    let text = CString::new(&text[..text.len().min(length - 1)]).expect("no NUL in it");
    let bytes = text.as_bytes_with_nul();
    // SAFETY: at most `length` bytes, which the caller promises room for.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// `cuGetErrorName`: neither counted nor logged, because it only looks up a text.
pub unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    error_text(code.texts().map(|(name, _)| name), text)
}

/// `cuGetErrorString`: neither counted nor logged, because it only looks up a text.
pub unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    error_text(code.texts().map(|(_, sentence)| sentence), text)
}

fn error_text(found: Option<&'static str>, to: *mut *const c_char) -> Code {
    let stored = store(to, found.map_or(std::ptr::null(), |text| text.as_ptr().cast()));
    if found.is_none() { Code::INVALID_VALUE } else { stored.err().unwrap_or(Code::SUCCESS) }
}

/// The number of devices if `SIMCUDA_DEVICES` is not set.
static DEFAULT_COUNT: AtomicU8 = AtomicU8::new(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_chosen_as_the_driver_chooses() {
        assert_eq!(choose("1,0", 2), [1, 0]);
        assert_eq!(choose(&uuid_text(1), 2), [1]);
        assert_eq!(choose("0,7,1", 2), [0], "an unknown entry ends the list");
        assert_eq!(choose("-1", 2), [0_u8; 0]);
        assert_eq!(choose("", 2), [0_u8; 0]);
        assert_eq!(choose("GPU-5130", 2), [0_u8; 0], "cut short, two devices begin so");
        assert_eq!(choose("GPU-5130", 1), [0]);
        assert_eq!(uuid_text(3), "GPU-51301ca7-0000-0000-0000-000000000003");
    }
}
