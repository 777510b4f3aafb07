//! Address ranges of the VMM interface, and the memory that is mapped there.

use std::collections::BTreeMap;
use std::ops::Range;

use super::physical::{ON_DEVICE, ON_HOST, ON_NODE};
use super::space::{self, GRANULE};
use super::{Kind, Region, Tables};
use crate::abi::{AllocationHandle, Code, DevicePtr, MemAccessDesc, MemLocation};
use crate::entry::{entry_points, store};
use crate::{capture, context, device, ledger};

impl Tables {
    /// Returns the range of the reservation that contains the address.
    fn reservation(&self, address: DevicePtr) -> Option<Range<DevicePtr>> {
        let (start, bytes) = self.reserved.range(..=address).next_back()?;
        (address - start < *bytes).then_some(*start..start + bytes)
    }

    /// Returns the mappings that together fill the range exactly.
    ///
    /// # Errors
    /// `INVALID_VALUE`: part of it is not mapped, or a mapping only partly in it.
    fn mappings(&self, address: DevicePtr, bytes: u64) -> Result<Vec<DevicePtr>, Code> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(Code::INVALID_VALUE)?;
        let mut at = address;
        let mut found = Vec::new();
        while at < end {
            let region = self.regions.get(&at).filter(|region| matches!(region.kind, Kind::Mapped { .. }));
            found.push(at);
            at += region.ok_or(Code::INVALID_VALUE)?.bytes;
        }
        if at == end { Ok(found) } else { Err(Code::INVALID_VALUE) }
    }

    fn map(&mut self, address: DevicePtr, bytes: u64, offset: usize, handle: AllocationHandle) -> Result<(), Code> {
        let physical = self.physical(handle)?.clone();
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let reserved = self.reservation(address).is_some_and(|range| end <= range.end);
        let taken = self.regions.range(address..end).next().is_some() || self.region(address).is_some();
        if bytes == 0 || !address.is_multiple_of(GRANULE) || !reserved || taken {
            return Err(Code::INVALID_VALUE);
        }
        if offset != 0 || bytes != physical.backing.bytes() as u64 {
            return Err(Code::NOT_SUPPORTED);
        }
        let id = self.number();
        let backing = physical.backing.clone();
        let device = physical.device;
        let kind = Kind::Mapped { access: BTreeMap::new(), cpu: 0, physical };
        self.regions.insert(address, Region { bytes, backing, offset: 0, kind, device, context: 0, id });
        ledger::record(MAPPING, address, bytes);
        Ok(())
    }

    /// Unmaps a range. Unmapped parts of the range are not an error (measured).
    fn unmap(&mut self, address: DevicePtr, bytes: u64) -> Result<(), Code> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(Code::INVALID_VALUE)?;
        let reserved = self.reservation(address).is_some_and(|range| end <= range.end);
        let begins_inside = self.region(address).is_some_and(|(start, _)| start < address);
        let mappings: Vec<_> = self.regions.range(address..end).map(|(start, region)| (*start, region.bytes)).collect();
        let ends_inside = mappings.last().is_some_and(|(start, bytes)| start + bytes > end);
        if !reserved || begins_inside || ends_inside {
            return Err(Code::INVALID_VALUE);
        }
        for (mapping, _) in mappings {
            let region = self.regions.remove(&mapping).expect("found above");
            if matches!(region.kind, Kind::Mapped { cpu, .. } if cpu != 0) {
                space::hide(mapping, region.bytes);
            }
            ledger::remove(MAPPING, mapping);
        }
        Ok(())
    }

    fn set_access(&mut self, address: DevicePtr, bytes: u64, wanted: &[MemAccessDesc]) -> Result<(), Code> {
        let mappings = self.mappings(address, bytes)?;
        for MemAccessDesc { location, flags } in wanted {
            if !matches!(flags, 0 | 1 | 3) {
                return Err(Code::INVALID_VALUE);
            }
            match location.kind {
                ON_DEVICE => drop(device::numbered(location.id)?),
                // No CPU reaches memory of a device.
                ON_HOST | ON_NODE if mappings.iter().any(|mapping| !self.on_node(*mapping)) => {
                    return Err(Code::NOT_SUPPORTED);
                }
                ON_HOST | ON_NODE => {}
                _ => return Err(Code::INVALID_VALUE),
            }
        }
        for mapping in mappings {
            let region = self.regions.get_mut(&mapping).expect("found above");
            let Kind::Mapped { access, cpu, .. } = &mut region.kind else { unreachable!("found above") };
            for MemAccessDesc { location, flags } in wanted {
                if location.kind == ON_DEVICE {
                    access.insert(location.id as usize, *flags);
                } else {
                    space::show(mapping, &region.backing, *flags)?;
                    *cpu = *flags;
                }
            }
        }
        Ok(())
    }

    /// Returns whether memory of a NUMA node is mapped there.
    fn on_node(&self, mapping: DevicePtr) -> bool {
        let kind = self.regions.get(&mapping).map(|region| &region.kind);
        matches!(kind, Some(Kind::Mapped { physical, .. }) if physical.on_node())
    }
}

entry_points! {
    fn cuMemAddressReserve(pointer: *mut DevicePtr, bytes: usize, alignment: usize, hint: DevicePtr, flags: u64) {
        context::healthy()?;
        capture::unsafe_call()?;
        let bytes = bytes as u64;
        let aligned = bytes.is_multiple_of(GRANULE) && (alignment == 0 || alignment.is_power_of_two());
        if pointer.is_null() || bytes == 0 || !aligned || flags != 0 { return Err(Code::INVALID_VALUE); }
        let memory = &mut *super::lock();
        let address = memory.space.take_at(hint, bytes, alignment as u64);
        let address = address.map_or_else(|| memory.space.take(bytes, alignment as u64), Ok)?;
        memory.reserved.insert(address, bytes);
        ledger::record(RANGE, address, bytes);
        store(pointer, address)
    }
    fn cuMemAddressFree(pointer: DevicePtr, bytes: usize) {
        context::healthy()?;
        let memory = &mut *super::lock();
        let end = pointer.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
        let whole = memory.reserved.get(&pointer).is_some_and(|reserved| *reserved == bytes as u64);
        if !whole || memory.regions.range(pointer..end).next().is_some() { return Err(Code::INVALID_VALUE); }
        memory.reserved.remove(&pointer);
        memory.space.give_back(pointer);
        ledger::remove(RANGE, pointer);
        Ok(())
    }
    fn cuMemMap(pointer: DevicePtr, bytes: usize, offset: usize, handle: AllocationHandle, flags: u64) {
        context::healthy()?;
        capture::unsafe_call()?;
        if flags != 0 { return Err(Code::INVALID_VALUE); }
        super::lock().map(pointer, bytes as u64, offset, handle)
    }
    // Does not wait, so work that still uses the memory causes a fault; with a real driver it may or may not. Also
    // works after a fault (measured).
    fn cuMemUnmap(pointer: DevicePtr, bytes: usize) {
        capture::unsafe_call()?;
        super::lock().unmap(pointer, bytes as u64)
    }
    fn cuMemSetAccess(pointer: DevicePtr, bytes: usize, access: *const MemAccessDesc, count: usize) {
        context::healthy()?;
        capture::unsafe_call()?;
        if access.is_null() || count == 0 { return Err(Code::INVALID_VALUE); }
        // SAFETY: the caller's array by the C contract.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        super::lock().set_access(pointer, bytes as u64, access)
    }
    fn cuMemGetAccess(flags: *mut u64, location: *const MemLocation, pointer: DevicePtr) {
        context::healthy()?;
        if location.is_null() { return Err(Code::INVALID_VALUE); }
        // SAFETY: the caller's struct by the C contract.
        let location = unsafe { location.read_unaligned() };
        let device = if location.kind == ON_DEVICE { Some(device::numbered(location.id)?.0) } else { None };
        let memory = super::lock();
        let Some(Kind::Mapped { access, cpu, .. }) = memory.region(pointer).map(|(_, region)| &region.kind) else {
            return Err(Code::INVALID_VALUE);
        };
        store(flags, device.map_or(*cpu, |device| access.get(&device).copied().unwrap_or(0)).into())
    }
}

const RANGE: &str = "address range";
const MAPPING: &str = "mapping";
