//! Memory pools: memory that is allocated and freed in the order of a stream.
//!
//! An address is valid immediately; the memory is freed when the stream reaches the operation. Until then the same
//! stream may have it again: its later work is behind the work that used the memory before.

use std::collections::BTreeMap;

use super::plain::Owner;
use super::{Kind, Tables};
use crate::abi::{Code, DevicePtr, Handle, MemLocation, RawDevice};
use crate::entry::{entry_points, store};
use crate::{context, device, ledger, stream};

/// `CUmemPoolProps`, as far as it is read.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemPoolProps {
    kind: u32,
    handle_types: u32,
    location: MemLocation,
    win32_security_attributes: usize,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}

#[derive(Clone, Copy)]
pub(super) struct Pool {
    pub(super) device: usize,
    pub(super) handle_types: u32,
}

/// Memory that a stream will free, and may have again before.
pub(super) struct Freed {
    stream: Handle,
    address: DevicePtr,
    /// The number of the region, which is another one once the memory is allocated again.
    id: u64,
}

pub(super) type Pools = BTreeMap<Handle, Pool>;

/// Returns the pools that devices have by themselves.
pub(super) fn defaults(devices: usize) -> Pools {
    (0..devices).map(|device| (default_of(device), Pool { device, handle_types: 0 })).collect()
}

fn default_of(device: usize) -> Handle {
    FIRST_HANDLE + device
}

impl Tables {
    fn allocate_from(&mut self, pool: Handle, bytes: u64, stream: Handle) -> Result<DevicePtr, Code> {
        let Pool { device, handle_types } = *self.pools.get(&pool).ok_or(Code::INVALID_VALUE)?;
        if let Some(address) = self.again(pool, bytes, stream) {
            return Ok(address);
        }
        self.allocate(bytes, Owner { kind: Kind::Pool { pool, handle_types }, device, context: 0, sharing: pool })
    }

    /// Returns memory of this length that this stream will free, if there is some.
    fn again(&mut self, pool: Handle, bytes: u64, stream: Handle) -> Option<DevicePtr> {
        let regions = &self.regions;
        let fits = |freed: &Freed| {
            freed.stream == stream
                && regions.get(&freed.address).is_some_and(|region| {
                    region.bytes == bytes && matches!(region.kind, Kind::Pool { pool: of, .. } if of == pool)
                })
        };
        let index = self.freed.iter().position(fits)?;
        let Freed { address, .. } = self.freed.swap_remove(index);
        let id = self.number();
        self.regions.get_mut(&address)?.id = id;
        Some(address)
    }
}

/// Allocates from a pool for work on a stream; without one from that of the stream's device.
fn allocate(pointer: *mut DevicePtr, bytes: usize, pool: Option<Handle>, handle: Handle) -> Result<(), Code> {
    let stream = stream::find(handle)?;
    if pointer.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let pool = pool.unwrap_or_else(|| default_of(stream.context().device));
    let address = super::lock().allocate_from(pool, bytes as u64, handle)?;
    ledger::record(POOL_ALLOCATION, address, bytes as u64);
    store(pointer, address)
}

/// Returns the number of an allocation of a pool.
fn number(memory: &Tables, address: DevicePtr) -> Option<u64> {
    memory.regions.get(&address).filter(|region| matches!(region.kind, Kind::Pool { .. })).map(|region| region.id)
}

entry_points! {
    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: RawDevice) {
        store(pool, default_of(device::numbered(device)?.0))
    }
    fn cuMemAllocAsync(pointer: *mut DevicePtr, bytes: usize, stream: Handle) { allocate(pointer, bytes, None, stream) }
    fn cuMemAllocFromPoolAsync(pointer: *mut DevicePtr, bytes: usize, pool: Handle, stream: Handle) {
        allocate(pointer, bytes, Some(pool), stream)
    }
    fn cuMemFreeAsync(pointer: DevicePtr, stream: Handle) {
        let handle = stream;
        let stream = stream::find(handle)?;
        let id = number(&super::lock(), pointer).ok_or(Code::INVALID_VALUE)?;
        stream.submit(move |_| {
            let memory = &mut *super::lock();
            memory.freed.retain(|freed| freed.id != id);
            // Another stream may have freed it as well, or this one has allocated it again.
            if number(memory, pointer) == Some(id) {
                memory.free(pointer);
            }
            Ok(())
        })?;
        let memory = &mut *super::lock();
        // The stream may have come so far.
        if number(memory, pointer) == Some(id) {
            memory.freed.push(Freed { stream: handle, address: pointer, id });
        }
        ledger::remove(POOL_ALLOCATION, pointer);
        Ok(())
    }
    fn cuDeviceGetMemPool(pool: *mut Handle, device: RawDevice) {
        store(pool, default_of(device::numbered(device)?.0))
    }
    fn cuMemPoolCreate(pool: *mut Handle, properties: *const MemPoolProps) {
        context::healthy()?;
        if pool.is_null() || properties.is_null() { return Err(Code::INVALID_VALUE); }
        // SAFETY: the caller's struct by the C contract.
        let properties = unsafe { properties.read_unaligned() };
        let on_device = properties.kind == 1 && properties.location.kind == super::physical::ON_DEVICE;
        if !on_device || properties.handle_types & !1 != 0 { return Err(Code::INVALID_VALUE); }
        let (device, _) = device::numbered(properties.location.id)?;
        let memory = &mut *super::lock();
        let handle = FIRST_MADE + memory.number() as Handle;
        memory.pools.insert(handle, Pool { device, handle_types: properties.handle_types });
        ledger::record(POOL, handle as u64, 0);
        store(pool, handle)
    }
    // What is still allocated from it stays until it is freed.
    fn cuMemPoolDestroy(pool: Handle) {
        context::healthy()?;
        if pool < FIRST_MADE { return Err(Code::INVALID_VALUE); }
        super::lock().pools.remove(&pool).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(POOL, pool as u64);
        Ok(())
    }
}

pub(super) const POOL_ALLOCATION: &str = "pool allocation";
const POOL: &str = "memory pool";
const FIRST_HANDLE: Handle = 0x9001_0000_0000;
/// Behind those that devices have by themselves.
const FIRST_MADE: Handle = FIRST_HANDLE + 0x1000;
