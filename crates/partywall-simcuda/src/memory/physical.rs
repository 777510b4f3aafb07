//! Physical memory of the VMM interface: `cuMemCreate` and the ways it crosses processes.
//!
//! An allocation is a memfd whose name contains the device or the NUMA node; an exported descriptor is a duplicate of
//! the memfd's.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::Arc;

use super::space::GRANULE;
use super::{Backing, Kind, Tables};
use crate::abi::{AllocationHandle, Code, DevicePtr, MemAllocationProp, MemLocation};
use crate::budget::{self, Budget};
use crate::device::{self, Device, losses, losses_on_node};
use crate::entry::{entry_points, store};
use crate::{capture, context, ledger};

/// Physical memory that handles and mappings refer to.
pub(crate) struct Physical {
    pub(super) backing: Arc<Backing>,
    /// The ordinal of the device that it lives on; none for a NUMA node, and for a device that this process does not
    /// see.
    pub(super) device: Option<usize>,
    pub(super) properties: MemAllocationProp,
    /// True if it was imported, from another process or this one; imported memory cannot be exported.
    imported: bool,
}

impl Physical {
    /// Returns whether it is memory of a NUMA node.
    pub(super) fn on_node(&self) -> bool {
        self.properties.location.kind == ON_NODE
    }
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

/// Where memory lies.
enum Place {
    /// On a device, with its ordinal.
    Device(usize, &'static Device),
    /// On a NUMA node, which need not exist.
    Node(i32),
}

impl Place {
    /// # Errors
    /// `INVALID_VALUE` for a node that does not exist.
    fn budget(&self) -> Result<&'static Budget, Code> {
        match self {
            Self::Device(_, device) => Ok(&device.memory),
            Self::Node(node) => budget::of_node(*node).ok_or(Code::INVALID_VALUE),
        }
    }

    fn ordinal(&self) -> Option<usize> {
        match self {
            Self::Device(ordinal, _) => Some(*ordinal),
            Self::Node(_) => None,
        }
    }

    /// Returns the name of the memfd, which says to an importer what it holds.
    fn file_name(&self) -> String {
        match self {
            Self::Device(_, device) => format!("{OF_DEVICE}{} {}", device.physical, losses(device.physical)),
            Self::Node(node) => format!("{OF_NODE}{node} {}", losses_on_node(*node)),
        }
    }
}

/// Returns the place and the properties that the caller requests.
fn asked(properties: *const MemAllocationProp) -> Result<(Place, MemAllocationProp), Code> {
    if properties.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null; the caller's struct by the C contract.
    let properties = unsafe { properties.read_unaligned() };
    let MemLocation { kind, id } = properties.location;
    let place = match kind {
        ON_DEVICE => device::numbered(id).map(|(ordinal, device)| Place::Device(ordinal, device))?,
        ON_NODE => Place::Node(id),
        _ => return Err(Code::INVALID_VALUE),
    };
    match properties.requested_handle_types {
        _ if properties.kind != PINNED => Err(Code::INVALID_VALUE),
        0 | POSIX_FD => Ok((place, properties)),
        // There is no fabric here.
        FABRIC => Err(Code::NOT_PERMITTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Returns where the memory of a descriptor lies, unless it is lost. A device that this process does not see
/// has the number -1.
fn location_of(descriptor: BorrowedFd<'_>) -> Option<MemLocation> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    if let Some(node) = name.strip_prefix(OF_NODE) {
        let (node, before) = node.split_once(' ')?;
        let id = node.parse().ok()?;
        return (before.parse() == Ok(losses_on_node(id))).then_some(MemLocation { kind: ON_NODE, id });
    }
    let (physical, before) = name.strip_prefix(OF_DEVICE)?.split_once(' ')?;
    let physical = physical.parse().ok()?;
    let visible = device::all().iter().position(|device| device.physical == physical);
    let id = visible.map_or(-1, |ordinal| ordinal as i32);
    (before.parse() == Ok(losses(physical))).then_some(MemLocation { kind: ON_DEVICE, id })
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
        let (place, properties) = asked(properties)?;
        if handle.is_null() || flags != 0 || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULE) {
            return Err(Code::INVALID_VALUE);
        }
        let backing = Backing::create(place.budget()?, bytes, &place.file_name())?;
        let physical = Physical { backing, device: place.ordinal(), properties, imported: false };
        store(handle, super::lock().add_handle(Arc::new(physical)))
    }
    fn cuMemRelease(handle: AllocationHandle) {
        context::healthy()?;
        super::lock().handles.remove(&handle).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(HANDLE, handle);
        Ok(())
    }
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: AllocationHandle, kind: u32, flags: u64) {
        context::healthy()?;
        let physical = super::lock().physical(handle)?.clone();
        let exportable = !physical.imported && physical.properties.requested_handle_types & kind != 0;
        if shareable.is_null() || kind != POSIX_FD || flags != 0 || !exportable { return Err(Code::INVALID_VALUE); }
        let file = physical.backing.file().expect("memory that was created is a file");
        // Without close-on-exec, so that a program that forgets to set the flag is detected.
        let descriptor = rustix::io::dup(file).map_err(|_| Code::OPERATING_SYSTEM)?.into_raw_fd();
        ledger::record_fd(descriptor, physical.backing.bytes() as u64);
        store(shareable.cast(), descriptor)
    }
    // The descriptor is passed as a pointer, and the caller keeps it. A descriptor of anything else is `UNKNOWN`.
    fn cuMemImportFromShareableHandle(handle: *mut AllocationHandle, shareable: usize, kind: u32) {
        context::healthy()?;
        capture::unsafe_call()?;
        if handle.is_null() || kind != POSIX_FD { return Err(Code::INVALID_VALUE); }
        let number = i32::try_from(shareable).map_err(|_| Code::UNKNOWN)?;
        if number < 0 { return Err(Code::UNKNOWN); }
        // SAFETY: borrowed for this call; a number that is not open gives an error below.
        let given = unsafe { BorrowedFd::borrow_raw(number) };
        let location = location_of(given).ok_or(Code::UNKNOWN)?;
        let file = rustix::io::fcntl_dupfd_cloexec(given, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
        let backing = Backing::import(file)?;
        let device = usize::try_from(location.id).ok().filter(|_| location.kind == ON_DEVICE);
        let properties =
            MemAllocationProp { kind: PINNED, requested_handle_types: POSIX_FD, location, ..Default::default() };
        let physical = Physical { backing, device, properties, imported: true };
        store(handle, super::lock().add_handle(Arc::new(physical)))
    }
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut MemAllocationProp, handle: AllocationHandle) {
        context::healthy()?;
        store(properties, super::lock().physical(handle)?.properties)
    }
    fn cuMemRetainAllocationHandle(handle: *mut AllocationHandle, address: *mut c_void) {
        context::healthy()?;
        let memory = &mut *super::lock();
        let physical = match memory.region(address as DevicePtr).map(|(_, region)| &region.kind) {
            Some(Kind::Mapped { physical, .. }) if !handle.is_null() => physical.clone(),
            _ => return Err(Code::INVALID_VALUE),
        };
        store(handle, memory.add_handle(physical))
    }
}

const HANDLE: &str = "handle";
const OF_DEVICE: &str = "simcuda vmm of device ";
const OF_NODE: &str = "simcuda vmm of node ";
/// Handles look like no address and no small number.
const FIRST_HANDLE: AllocationHandle = 0xA110_C000_0000;
const PINNED: u32 = 1;
pub(super) const ON_DEVICE: u32 = 1;
/// The CPU, in a rule of access.
pub(super) const ON_HOST: u32 = 2;
/// A NUMA node; in a rule of access the CPU, whatever the node.
pub(super) const ON_NODE: u32 = 3;
const POSIX_FD: u32 = 1;
const FABRIC: u32 = 8;
