//! Memory: the memory behind an address, and the devices that may access it.
//!
//! All addresses that a device may use are in one table of regions, as in the driver's unified address space: memory of
//! a device at addresses of [`Space`], memory of the host at its own address.

mod backing;
pub(crate) mod host;
pub(crate) mod legacy;
pub(crate) mod mapping;
pub(crate) mod physical;
pub(crate) mod plain;
pub(crate) mod pointer;
pub(crate) mod pool;
mod space;

use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use backing::Backing;
use physical::Physical;
use space::Space;

use crate::abi::{Code, DevicePtr, Handle, IpcHandle};
use crate::context::Ctx;
use crate::state;

/// The memory of the process, behind the lock of [`state`].
pub(crate) struct Tables {
    space: Space,
    /// By first address; they do not overlap.
    regions: BTreeMap<DevicePtr, Region>,
    /// Ranges that allocations of a device share, by first address.
    blocks: BTreeMap<DevicePtr, plain::Block>,
    /// The handle of an allocation that was exported, by its address.
    exports: BTreeMap<DevicePtr, IpcHandle>,
    openings: legacy::Openings,
    handles: physical::Handles,
    /// `cuMemAddressReserve`: first address and length.
    reserved: BTreeMap<DevicePtr, u64>,
    pools: pool::Pools,
    /// The last number given to an object.
    last: u64,
}

/// Memory that has an address.
#[derive(Clone)]
pub(crate) struct Region {
    pub(crate) bytes: u64,
    pub(crate) backing: Arc<Backing>,
    /// Where the region begins in its backing.
    pub(crate) offset: u64,
    pub(crate) kind: Kind,
    /// The ordinal of the device that it lives on; none for a device that this process does not see.
    pub(crate) device: Option<usize>,
    /// The context that it was made in, and that takes it along; 0 if it belongs to none.
    pub(crate) context: Handle,
    /// Unique in the process, never given twice: `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
}

/// The origin of memory, which decides the devices that may access it.
#[derive(Clone)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemMap`: what each device may do, by ordinal.
    Mapped { access: BTreeMap<usize, u32>, physical: Arc<Physical> },
    /// `cuIpcOpenMemHandle`, in a context of this device; the file behind it.
    Opened { by: usize, inode: u64 },
    /// `cuMemAllocAsync`, from this pool.
    Pool { pool: Handle, handle_types: u32 },
    /// `cuMemHostAlloc`.
    Pinned { flags: u32 },
    /// `cuMemHostRegister`.
    Registered { flags: u32 },
    /// `cuMemAllocManaged`.
    Managed,
}

/// What a stream wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    Read,
    Write,
}

/// Bytes that may be accessed through the simulation's own mapping for as long as this lives, even if the program
/// frees or unmaps them meanwhile.
pub(crate) struct HostRange {
    pointer: *mut u8,
    bytes: usize,
    _keep: Arc<Backing>,
}

// SAFETY: as for `Backing`, which it keeps.
unsafe impl Send for HostRange {}

impl HostRange {
    /// Returns the first byte. Other threads and processes may write there: no reference may be made to it.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Returns how many bytes, of those that were asked for, lie here.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the words of four bytes that lie here. The address that was asked for is a multiple of four.
    pub(crate) fn words32(&self) -> &[AtomicU32] {
        // SAFETY: memory of this size for as long as `self` lives, aligned as the address is since mappings are; others
        // write there, which atomics allow.
        unsafe { slice::from_raw_parts(self.pointer.cast(), self.bytes / 4) }
    }

    /// Returns the words of eight bytes. The address is a multiple of eight.
    pub(crate) fn words64(&self) -> &[AtomicU64] {
        // SAFETY: as for `words32`.
        unsafe { slice::from_raw_parts(self.pointer.cast(), self.bytes / 8) }
    }
}

/// Returns what lies behind the first of `bytes` bytes at an address, as work in the context may access it.
///
/// The range ends where the region ends, though more was asked for (several allocations mapped side by side). A caller
/// that needs all of it asks again behind the end.
///
/// # Errors
/// `ILLEGAL_ADDRESS`: nothing is mapped there, or not for this device, or not for writing. When work that runs meets
/// it, it is a fault of the context ([`Ctx::fault`]).
pub(crate) fn access(context: &Ctx, address: DevicePtr, bytes: usize, want: Want) -> Result<HostRange, Code> {
    let state = state::lock();
    let (start, region) = state.memory.region(address).ok_or(Code::ILLEGAL_ADDRESS)?;
    if !region.allows(context, want) {
        return Err(Code::ILLEGAL_ADDRESS);
    }
    let within = address - start;
    let offset = usize::try_from(region.offset + within).expect("within a mapping");
    Ok(HostRange {
        // SAFETY: a region lies within its backing.
        pointer: unsafe { region.backing.map().add(offset) },
        bytes: bytes.min((region.bytes - within) as usize),
        _keep: region.backing.clone(),
    })
}

impl Region {
    fn allows(&self, context: &Ctx, want: Want) -> bool {
        match &self.kind {
            Kind::Plain => self.device.is_some_and(|device| context.reaches(device)),
            Kind::Mapped { access, .. } => {
                let flags = access.get(&context.device).copied().unwrap_or(0);
                flags & (if want == Want::Write { ACCESS_WRITE } else { ACCESS_READ }) != 0
            }
            Kind::Opened { by, .. } => {
                context.device == *by || self.device.is_some_and(|device| context.reaches(device))
            }
            Kind::Pool { .. } => self.device == Some(context.device),
            Kind::Registered { flags } => want == Want::Read || flags & host::REGISTER_READ_ONLY == 0,
            Kind::Pinned { .. } | Kind::Managed => true,
        }
    }
}

impl Tables {
    pub(crate) fn new(devices: usize) -> Self {
        Self {
            space: Space::reserve(),
            regions: BTreeMap::new(),
            blocks: BTreeMap::new(),
            exports: BTreeMap::new(),
            openings: BTreeMap::new(),
            handles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            pools: pool::defaults(devices),
            last: 0,
        }
    }

    /// Returns the region that an address lies in, with its first address.
    pub(crate) fn region(&self, address: DevicePtr) -> Option<(DevicePtr, &Region)> {
        let (start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.bytes).then_some((*start, region))
    }

    /// Returns a number that no object of this process had before.
    pub(crate) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

/// Frees what a context takes along. The ledger keeps it: the program did not give it back.
pub(crate) fn end_of_context(context: Handle) {
    let memory = &mut state::lock().memory;
    let ends = |(address, region): (&DevicePtr, &Region)| {
        (region.context == context).then_some((*address, matches!(region.kind, Kind::Plain)))
    };
    let ending: Vec<_> = memory.regions.iter().filter_map(ends).collect();
    for (address, plain) in ending {
        if plain {
            memory.free(address);
        } else {
            memory.regions.remove(&address);
        }
    }
}

const ACCESS_READ: u32 = 1;
const ACCESS_WRITE: u32 = 2;
