//! The addresses of device memory: a separate area, reserved without access, so that a CPU that dereferences an address
//! crashes, even after the memory is freed. Memory of a NUMA node is mapped there while the CPU has access.

use std::collections::BTreeMap;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use super::Backing;
use crate::abi::{Code, DevicePtr};

/// The addresses that are taken.
pub(crate) struct Space {
    start: DevicePtr,
    /// Ranges that are taken: first address and length. All lengths are multiples of [`GRANULE`].
    taken: BTreeMap<DevicePtr, u64>,
}

impl Space {
    /// Reserves the area; it stays until the process ends.
    pub(crate) fn reserve() -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let bytes = (AREA + GRANULE) as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
        let start = map.expect("the address space holds the area of device addresses") as u64;
        Self { start: start.next_multiple_of(GRANULE), taken: BTreeMap::new() }
    }

    /// Takes the lowest range that is free.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn take(&mut self, bytes: u64, alignment: u64) -> Result<DevicePtr, Code> {
        if bytes > AREA || alignment > AREA {
            return Err(Code::OUT_OF_MEMORY);
        }
        let bytes = bytes.next_multiple_of(GRANULE);
        let alignment = alignment.max(GRANULE);
        let mut address = self.start.next_multiple_of(alignment);
        for (start, length) in &self.taken {
            if address + bytes <= *start {
                break;
            }
            address = address.max((start + length).next_multiple_of(alignment));
        }
        if address + bytes > self.start + AREA {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.taken.insert(address, bytes);
        Ok(address)
    }

    /// Takes the range at that address, if it is aligned, in the area and free.
    pub(crate) fn take_at(&mut self, address: DevicePtr, bytes: u64, alignment: u64) -> Option<DevicePtr> {
        let end = address.checked_add(bytes).filter(|end| address >= self.start && *end <= self.start + AREA)?;
        let before = self.taken.range(..end).next_back();
        let free = before.is_none_or(|(start, length)| start + length <= address);
        (free && address.is_multiple_of(alignment.max(GRANULE))).then(|| {
            self.taken.insert(address, bytes);
            address
        })
    }

    /// Gives a range back.
    pub(crate) fn give_back(&mut self, address: DevicePtr) {
        self.taken.remove(&address).expect("the range was taken");
    }
}

/// Gives the CPU access to memory at addresses that were taken, or takes it away. The pages are resident at once, as
/// those of the driver are.
///
/// # Errors
/// `OPERATING_SYSTEM`.
pub(super) fn show(address: DevicePtr, backing: &Backing, flags: u32) -> Result<(), Code> {
    let protection = match flags {
        0 => {
            hide(address, backing.bytes() as u64);
            return Ok(());
        }
        1 => ProtFlags::READ,
        _ => ProtFlags::READ | ProtFlags::WRITE,
    };
    let file = backing.file().expect("memory that was created is a file");
    let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
    // SAFETY: the addresses belong to the area, and the caller has mapped this memory there, as far as the program
    // knows.
    let mapped = unsafe { rustix::mm::mmap(address as *mut _, backing.bytes(), protection, flags, file, 0) };
    mapped.map(drop).map_err(|_| Code::OPERATING_SYSTEM)
}

/// Makes addresses of the area inaccessible again.
pub(super) fn hide(address: DevicePtr, bytes: u64) {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the addresses belong to the area; that nothing uses them any more is the program's part.
    let hidden = unsafe { rustix::mm::mmap_anonymous(address as *mut _, bytes as usize, ProtFlags::empty(), flags) };
    hidden.expect("a mapping of the area can be replaced");
}

/// The granularity of everything: that of the H200.
pub(crate) const GRANULE: u64 = 2 << 20;
/// Room for far more than any budget, as the driver has.
const AREA: u64 = 4 << 40;
