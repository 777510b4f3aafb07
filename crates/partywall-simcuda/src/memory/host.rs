//! Host memory that a device may use: pinned, registered, managed. Its device address equals its host address.

use std::ffi::c_void;

use super::{Backing, Kind, Region, Tables};
use crate::abi::{Code, DevicePtr};
use crate::entry::{entry_points, store};
use crate::{capture, context, ledger, stream};

pub(super) const PINNED: &str = "pinned memory";
pub(super) const MANAGED: &str = "managed memory";
const REGISTRATION: &str = "registration";

/// Allocates host memory that the program may use. Its initial contents are undefined, so its bytes are not zero.
fn allocate(bytes: usize, kind: Kind, name: &'static str) -> Result<DevicePtr, Code> {
    let context = context::current()?;
    capture::unsafe_call()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let backing = Backing::host(bytes)?;
    // SAFETY: as many bytes, which no other code has yet.
    unsafe { backing.map().write_bytes(FRESH, bytes) };
    let address = backing.map() as u64;
    let memory = &mut *super::lock();
    let id = memory.number();
    let device = Some(context.device);
    let region = Region { bytes: bytes as u64, backing, offset: 0, kind, device, context: context.handle, id };
    memory.regions.insert(address, region);
    ledger::record(name, address, bytes as u64);
    Ok(address)
}

/// Registers the caller's memory.
fn register(pointer: *mut c_void, bytes: usize, flags: u32) -> Result<(), Code> {
    let context = context::current()?;
    capture::unsafe_call()?;
    let start = pointer as u64;
    let end = start.checked_add(bytes as u64).filter(|_| bytes > 0 && start > 0 && flags & !REGISTER_FLAGS == 0);
    let end = end.ok_or(Code::INVALID_VALUE)?;
    if flags & REGISTER_IO_MEMORY != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let writable = flags & REGISTER_READ_ONLY == 0;
    let pages = Pages::of(start, end).ok_or(Code::INVALID_VALUE)?;
    if !pages.readable || writable && !pages.writable {
        return Err(Code::INVALID_VALUE);
    }
    let memory = &mut *super::lock();
    if memory.overlaps(start, end) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    // SAFETY: mapped a moment ago; that it stays so until it is unregistered is what the caller promises the driver.
    let backing = unsafe { Backing::of_caller(pointer, bytes, pages.shared) };
    let id = memory.number();
    let kind = Kind::Registered { flags };
    let device = Some(context.device);
    let region = Region { bytes: bytes as u64, backing, offset: 0, kind, device, context: context.handle, id };
    memory.regions.insert(start, region);
    ledger::record(REGISTRATION, start, bytes as u64);
    Ok(())
}

impl Tables {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.region(start).is_some() || self.regions.range(start..end).next().is_some()
    }
}

/// The kernel's information about a range of pages.
struct Pages {
    readable: bool,
    writable: bool,
    /// True if all pages belong to one shared mapping, so that they can be mapped again.
    shared: bool,
}

impl Pages {
    /// Returns `None` if part of the range is not mapped.
    fn of(start: u64, end: u64) -> Option<Self> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let mut found = Self { readable: true, writable: true, shared: true };
        let mut at = start;
        for line in maps.lines() {
            let (range, rest) = line.split_once(' ')?;
            let (first, last) = range.split_once('-')?;
            let first = u64::from_str_radix(first, 16).ok()?;
            let last = u64::from_str_radix(last, 16).ok()?;
            if last <= at {
                continue;
            }
            if first > at {
                return None;
            }
            let rights = rest.as_bytes();
            found.readable &= rights[0] == b'r';
            found.writable &= rights[1] == b'w';
            found.shared &= rights[3] == b's' && (at > start || last >= end);
            at = last;
            if at >= end {
                return Some(found);
            }
        }
        None
    }
}

entry_points! {
    fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: u32) {
        if pointer.is_null() || flags & !HOST_ALLOC_FLAGS != 0 { return Err(Code::INVALID_VALUE); }
        store(pointer, allocate(bytes, Kind::Pinned { flags }, PINNED)? as *mut c_void)
    }
    fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) {
        if pointer.is_null() { return Err(Code::INVALID_VALUE); }
        store(pointer, allocate(bytes, Kind::Pinned { flags: 0 }, PINNED)? as *mut c_void)
    }
    fn cuMemAllocManaged(pointer: *mut DevicePtr, bytes: usize, flags: u32) {
        if pointer.is_null() || !matches!(flags, 1 | 2) { return Err(Code::INVALID_VALUE); }
        store(pointer, allocate(bytes, Kind::Managed, MANAGED)?)
    }
    // Waits for the work of the context, as the driver's does.
    fn cuMemFreeHost(pointer: *mut c_void) {
        let context = context::current()?;
        capture::unsafe_call()?;
        stream::synchronize(&context)?;
        let memory = &mut *super::lock();
        let address = pointer as u64;
        let pinned = memory.regions.get(&address).is_some_and(|region| matches!(region.kind, Kind::Pinned { .. }));
        if !pinned { return Err(Code::INVALID_VALUE); }
        memory.regions.remove(&address);
        ledger::remove(PINNED, address);
        Ok(())
    }
    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) { register(pointer, bytes, flags) }
    fn cuMemHostUnregister(pointer: *mut c_void) {
        let context = context::current()?;
        capture::unsafe_call()?;
        stream::synchronize(&context)?;
        let memory = &mut *super::lock();
        let address = pointer as u64;
        match memory.region(address) {
            Some((start, Region { kind: Kind::Registered { .. }, .. })) if start == address => {}
            Some((_, Region { kind: Kind::Registered { .. }, .. })) => return Err(Code::INVALID_VALUE),
            _ => return Err(Code::HOST_MEMORY_NOT_REGISTERED),
        }
        memory.regions.remove(&address);
        ledger::remove(REGISTRATION, address);
        Ok(())
    }
    fn cuMemHostGetDevicePointer_v2(device: *mut DevicePtr, pointer: *mut c_void, flags: u32) {
        context::current()?;
        let memory = super::lock();
        let region = memory.region(pointer as u64).map(|(_, region)| &region.kind);
        let of_host = matches!(region, Some(Kind::Pinned { .. } | Kind::Registered { .. }));
        if flags != 0 || !of_host { return Err(Code::INVALID_VALUE); }
        store(device, pointer as DevicePtr)
    }
    fn cuMemHostGetFlags(flags: *mut u32, pointer: *mut c_void) {
        context::current()?;
        let memory = super::lock();
        match memory.region(pointer as u64).map(|(_, region)| &region.kind) {
            Some(Kind::Pinned { flags: given }) => store(flags, *given),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

const FRESH: u8 = 0xAA;
/// Portable, mapped, write-combined.
const HOST_ALLOC_FLAGS: u32 = 1 | 2 | 4;
/// Portable, mapped, memory of a device on the bus, read-only.
const REGISTER_FLAGS: u32 = 1 | 2 | REGISTER_IO_MEMORY | REGISTER_READ_ONLY;
const REGISTER_IO_MEMORY: u32 = 4;
pub(super) const REGISTER_READ_ONLY: u32 = 8;
