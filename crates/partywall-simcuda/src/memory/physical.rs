//! Physical memory of the VMM interface: `cuMemCreate` and the ways it crosses processes.
//!
//! An allocation is a memfd whose name contains the device; an exported descriptor is a duplicate of the memfd's.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::Arc;

use super::space::GRANULE;
use super::{Backing, Kind, Tables};
use crate::abi::{AllocationHandle, Code, DevicePtr, MemAllocationProp, MemLocation};
use crate::device::{Device, losses};
use crate::entry::{entry_points, store};
use crate::{capture, context, ledger, state};

/// Physical memory that handles and mappings refer to.
pub(crate) struct Physical {
    pub(super) backing: Arc<Backing>,
    /// The ordinal of the device that it lives on; none for a device that this process does not see.
    pub(super) device: Option<usize>,
    pub(super) properties: MemAllocationProp,
    /// True if it was imported, from another process or this one; imported memory cannot be exported.
    imported: bool,
}

pub(super) type Handles = BTreeMap<AllocationHandle, Arc<Physical>>;

impl Tables {
    /// Returns a handle of its own for the memory.
    fn add_handle(&mut self, physical: Arc<Physical>) -> AllocationHandle {
        let handle = FIRST_HANDLE + self.number();
        ledger::record(HANDLE, handle, physical.backing.bytes() as u64);
        self.handles.insert(handle, physical);
        handle
    }

    /// # Errors
    /// `INVALID_VALUE`.
    pub(super) fn physical(&self, handle: AllocationHandle) -> Result<&Arc<Physical>, Code> {
        self.handles.get(&handle).ok_or(Code::INVALID_VALUE)
    }
}

/// Returns the device and the properties that the caller requests.
fn asked(properties: *const MemAllocationProp) -> Result<(&'static Device, usize, MemAllocationProp), Code> {
    if properties.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null; the caller's struct by the C contract.
    let properties = unsafe { properties.read_unaligned() };
    if properties.kind != PINNED || properties.location.kind != ON_DEVICE {
        return Err(Code::INVALID_VALUE);
    }
    let (ordinal, device) = state::device(properties.location.id)?;
    match properties.requested_handle_types {
        0 | POSIX_FD => Ok((device, ordinal, properties)),
        // There is no fabric here.
        FABRIC => Err(Code::NOT_PERMITTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Returns the name of the memfd, which says what it holds to an importer.
fn file_name(device: &Device) -> String {
    format!("{FILE_NAME}{} {}", device.physical, losses(device.physical))
}

/// Returns the device whose memory the descriptor holds, by its number on the machine, unless the device has lost it.
fn device_of(descriptor: BorrowedFd<'_>) -> Option<u8> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    let (physical, before) = name.strip_prefix(FILE_NAME)?.split_once(' ')?;
    let physical = physical.parse().ok()?;
    (before.parse() == Ok(losses(physical))).then_some(physical)
}

entry_points! {
    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const MemAllocationProp, option: u32) {
        context::healthy()?;
        asked(properties)?;
        if option > 1 { return Err(Code::INVALID_VALUE); }
        store(bytes, GRANULE as usize)
    }
    fn cuMemCreate(handle: *mut AllocationHandle, bytes: usize, properties: *const MemAllocationProp, flags: u64) {
        context::healthy()?;
        capture::unsafe_call()?;
        let (device, ordinal, properties) = asked(properties)?;
        if handle.is_null() || flags != 0 || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULE) {
            return Err(Code::INVALID_VALUE);
        }
        let backing = Backing::create(device, bytes, &file_name(device))?;
        let physical = Physical { backing, device: Some(ordinal), properties, imported: false };
        store(handle, state::lock().memory.add_handle(Arc::new(physical)))
    }
    fn cuMemRelease(handle: AllocationHandle) {
        context::healthy()?;
        state::lock().memory.handles.remove(&handle).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(HANDLE, handle);
        Ok(())
    }
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: AllocationHandle, kind: u32, flags: u64) {
        context::healthy()?;
        let physical = state::lock().memory.physical(handle)?.clone();
        let exportable = !physical.imported && physical.properties.requested_handle_types & kind != 0;
        if shareable.is_null() || kind != POSIX_FD || flags != 0 || !exportable { return Err(Code::INVALID_VALUE); }
        let file = physical.backing.file().expect("memory of a device is a file");
        // Without close-on-exec, so that a program that forgets to set the flag is detected.
        let descriptor = rustix::io::dup(file).map_err(|_| Code::OPERATING_SYSTEM)?.into_raw_fd();
        ledger::record_fd(descriptor, physical.backing.bytes() as u64);
        store(shareable.cast(), descriptor)
    }
    // The descriptor is passed as a pointer, and the caller keeps it. A descriptor that is not device memory is `UNKNOWN`.
    fn cuMemImportFromShareableHandle(handle: *mut AllocationHandle, shareable: usize, kind: u32) {
        context::healthy()?;
        capture::unsafe_call()?;
        if handle.is_null() || kind != POSIX_FD { return Err(Code::INVALID_VALUE); }
        let number = i32::try_from(shareable).map_err(|_| Code::UNKNOWN)?;
        if number < 0 { return Err(Code::UNKNOWN); }
        // SAFETY: borrowed for this call; a number that is not open gives an error below.
        let given = unsafe { BorrowedFd::borrow_raw(number) };
        let owner = device_of(given).ok_or(Code::UNKNOWN)?;
        let file = rustix::io::fcntl_dupfd_cloexec(given, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
        let backing = Backing::import(file)?;
        let device = state::devices().iter().position(|device| device.physical == owner);
        let location = MemLocation { kind: ON_DEVICE, id: device.map_or(-1, |device| device as i32) };
        let properties =
            MemAllocationProp { kind: PINNED, requested_handle_types: POSIX_FD, location, ..Default::default() };
        let physical = Physical { backing, device, properties, imported: true };
        store(handle, state::lock().memory.add_handle(Arc::new(physical)))
    }
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut MemAllocationProp, handle: AllocationHandle) {
        context::healthy()?;
        store(properties, state::lock().memory.physical(handle)?.properties)
    }
    fn cuMemRetainAllocationHandle(handle: *mut AllocationHandle, address: *mut c_void) {
        context::healthy()?;
        let memory = &mut state::lock().memory;
        let physical = match memory.region(address as DevicePtr).map(|(_, region)| &region.kind) {
            Some(Kind::Mapped { physical, .. }) if !handle.is_null() => physical.clone(),
            _ => return Err(Code::INVALID_VALUE),
        };
        store(handle, memory.add_handle(physical))
    }
}

const HANDLE: &str = "handle";
const FILE_NAME: &str = "simcuda vmm of device ";
/// Handles look like no address and no small number.
const FIRST_HANDLE: AllocationHandle = 0xA110_C000_0000;
const PINNED: u32 = 1;
pub(super) const ON_DEVICE: u32 = 1;
const POSIX_FD: u32 = 1;
const FABRIC: u32 = 8;
