//! `cuMemAlloc`, and a device's information about its memory.
//!
//! Small allocations share blocks of 2 MiB, as the driver's do: a handle of one opens the whole block, neighbours
//! included.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::space::GRANULE;
use super::{Backing, Kind, Region, Tables};
use crate::abi::{Code, DevicePtr, Handle};
use crate::entry::{entry_points, store};
use crate::{capture, context, device, ipc, ledger, stream};

/// A range of addresses that allocations of one owner share.
pub(super) struct Block {
    backing: Arc<Backing>,
    /// The context or the pool whose allocations lie here.
    owner: Handle,
    /// Offset and length of each allocation.
    used: BTreeMap<u64, u64>,
}

impl Block {
    /// Returns the lowest offset with that many free bytes.
    fn room(&self, bytes: u64) -> Option<u64> {
        let mut offset = 0;
        for (start, length) in &self.used {
            if offset + bytes <= *start {
                break;
            }
            offset = (start + length).next_multiple_of(ALIGNMENT);
        }
        (offset + bytes <= self.backing.bytes() as u64).then_some(offset)
    }
}

/// The owner of an allocation.
pub(super) struct Owner {
    pub(super) kind: Kind,
    /// The ordinal of the device.
    pub(super) device: usize,
    /// 0 if no context takes it along.
    pub(super) context: Handle,
    /// Allocations of one owner share blocks: a context or a pool.
    pub(super) sharing: Handle,
}

impl Tables {
    /// Allocates memory of a device.
    ///
    /// # Errors
    /// `INVALID_VALUE` for no bytes, `OUT_OF_MEMORY`.
    pub(super) fn allocate(&mut self, bytes: u64, owner: Owner) -> Result<DevicePtr, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let shared = if bytes <= LARGEST_SHARED { self.shared_room(bytes, owner.sharing) } else { None };
        let (block, offset) = match shared {
            Some(found) => found,
            None => (self.new_block(bytes, &owner)?, 0),
        };
        let id = self.number();
        let at = self.blocks.get_mut(&block).expect("found or made above");
        at.used.insert(offset, bytes);
        let region = Region {
            bytes,
            backing: at.backing.clone(),
            offset,
            kind: owner.kind,
            device: Some(owner.device),
            context: owner.context,
            id,
        };
        self.regions.insert(block + offset, region);
        Ok(block + offset)
    }

    /// Frees memory that [`Self::allocate`] returned. The block is freed with its last allocation.
    pub(super) fn free(&mut self, address: DevicePtr) {
        let region = self.regions.remove(&address).expect("the caller has looked it up");
        let block = address - region.offset;
        let at = self.blocks.get_mut(&block).expect("an allocation lies in a block");
        at.used.remove(&region.offset);
        if at.used.is_empty() {
            self.blocks.remove(&block);
            self.space.give_back(block);
        }
        if let Some(handle) = self.exports.remove(&address) {
            ipc::withdraw(&handle);
        }
    }

    fn shared_room(&self, bytes: u64, sharing: Handle) -> Option<(DevicePtr, u64)> {
        // A block of a large allocation is full, whatever its last bytes are.
        let small = |block: &Block| block.used.values().all(|length| *length <= LARGEST_SHARED);
        let mut candidates = self.blocks.iter().filter(|(_, block)| block.owner == sharing && small(block));
        candidates.find_map(|(address, block)| Some((*address, block.room(bytes)?)))
    }

    fn new_block(&mut self, bytes: u64, owner: &Owner) -> Result<DevicePtr, Code> {
        let bytes = bytes.checked_next_multiple_of(GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
        let budget = &device::all()[owner.device].memory;
        let backing = Backing::create(budget, bytes as usize, "simcuda memory")?;
        let address = self.space.take(bytes, 0)?;
        self.blocks.insert(address, Block { backing, owner: owner.sharing, used: BTreeMap::new() });
        Ok(address)
    }
}

entry_points! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let memory = &device::all()[context::current()?.device].memory;
        store(free, memory.free() as usize)?;
        store(total, memory.total as usize)
    }
    fn cuMemAlloc_v2(pointer: *mut DevicePtr, bytes: usize) {
        let context = context::current()?;
        capture::unsafe_call()?;
        if pointer.is_null() { return Err(Code::INVALID_VALUE); }
        let owner =
            Owner { kind: Kind::Plain, device: context.device, context: context.handle, sharing: context.handle };
        let address = super::lock().allocate(bytes as u64, owner)?;
        ledger::record(ALLOCATION, address, bytes as u64);
        store(pointer, address)
    }
    // Waits for the work of the context, as the driver's does.
    fn cuMemFree_v2(pointer: DevicePtr) {
        let context = context::current()?;
        capture::unsafe_call()?;
        let freeable = |memory: &Tables| {
            let region = memory.regions.get(&pointer).ok_or(Code::INVALID_VALUE)?;
            let kind = match region.kind {
                Kind::Plain => ALLOCATION,
                Kind::Pool { .. } => super::pool::POOL_ALLOCATION,
                Kind::Managed => super::host::MANAGED,
                _ => return Err(Code::INVALID_VALUE),
            };
            Ok((kind, context::all().find(region.context).cloned()))
        };
        let (_, owner) = freeable(&super::lock())?;
        stream::synchronize(owner.as_ref().unwrap_or(&context))?;
        let mut memory = super::lock();
        // Another thread may have freed it meanwhile.
        let (kind, _) = freeable(&memory)?;
        if kind == super::host::MANAGED {
            memory.regions.remove(&pointer);
        } else {
            memory.free(pointer);
        }
        ledger::remove(kind, pointer);
        Ok(())
    }
}

pub(super) const ALLOCATION: &str = "allocation";
/// The alignment of an allocation within its block.
const ALIGNMENT: u64 = 512;
/// A larger allocation has a block of its own.
const LARGEST_SHARED: u64 = 1 << 20;
