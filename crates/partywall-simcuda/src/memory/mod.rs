//! Memory: the memory behind an address, and the devices that may access it.
//!
//! All addresses that a device may use are in one table of regions, as in the driver's unified address space: memory of
//! devices and of NUMA nodes at addresses of [`Space`], other host memory at its own address.

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
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

pub(crate) use backing::Backing;
use partywall_os::lock::IgnorePoison;
use physical::Physical;
use space::Space;

use crate::abi::{Code, DevicePtr, Handle, IpcHandle};
use crate::context::Ctx;
use crate::device;

static TABLES: LazyLock<Mutex<Tables>> = LazyLock::new(|| Mutex::new(Tables::new(device::all().len())));

/// Locks the memory of the process. Do not hold the lock while waiting for a stream.
fn lock() -> MutexGuard<'static, Tables> {
    TABLES.lock().ignore_poison()
}

/// The memory of the process.
struct Tables {
    space: Space,
    /// The regions, by first address; they do not overlap.
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
    /// `cuMemFreeAsync`: what no stream has come to.
    freed: Vec<pool::Freed>,
    /// The number of the newest object.
    last: u64,
}

/// Memory that has an address.
#[derive(Clone)]
pub(crate) struct Region {
    pub(crate) bytes: u64,
    pub(crate) backing: Arc<Backing>,
    /// The offset of the region in its backing.
    pub(crate) offset: u64,
    pub(crate) kind: Kind,
    /// The ordinal of the device that has the memory; `None` if a NUMA node has it, or a device that this process does
    /// not see.
    pub(crate) device: Option<usize>,
    /// The context in which it was created, and with which it ends; 0 if it belongs to no context.
    pub(crate) context: Handle,
    /// A number that is unique in the process and never reused: `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
}

/// The origin of memory, which decides the devices that may access it.
#[derive(Clone)]
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemMap`: what each device may do, by ordinal, and what the CPU may do.
    Mapped { access: BTreeMap<usize, u32>, cpu: u32, physical: Arc<Physical> },
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

/// The access that a stream needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Reading alone.
    Read,
    /// Writing, and reading.
    Write,
}

/// Bytes that may be accessed through the simulation's own mapping for as long as this lives, even if the program
/// frees or unmaps them meanwhile.
pub struct HostRange {
    pointer: *mut u8,
    bytes: usize,
    _keep: Arc<Backing>,
}

// SAFETY: as for `Backing`, which it keeps.
unsafe impl Send for HostRange {}

impl HostRange {
    /// Returns a pointer to the first byte. Other threads and processes may write the bytes, so create no reference to
    /// them.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Returns how many of the requested bytes are in this range.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the words of four bytes that lie here.
    ///
    /// # Panics
    /// If the address that was asked for is no multiple of four.
    pub fn words32(&self) -> &[AtomicU32] {
        let words = self.pointer.cast::<AtomicU32>();
        assert!(words.is_aligned(), "the address of words is a multiple of their size");
        // SAFETY: memory of this size for as long as `self` lives, aligned; others write there, which atomics allow.
        unsafe { slice::from_raw_parts(words, self.bytes / 4) }
    }

    /// Returns the words of eight bytes, as [`words32`](Self::words32).
    ///
    /// # Panics
    /// If the address is no multiple of eight.
    pub fn words64(&self) -> &[AtomicU64] {
        let words = self.pointer.cast::<AtomicU64>();
        assert!(words.is_aligned(), "the address of words is a multiple of their size");
        // SAFETY: as for `words32`.
        unsafe { slice::from_raw_parts(words, self.bytes / 8) }
    }
}

/// Returns the memory at an address, up to `bytes` bytes, if work in the context may access it.
///
/// The range ends at the end of the region, even if more bytes were requested (several allocations may be mapped side
/// by side). A caller that needs all bytes calls this again for the rest.
///
/// # Errors
/// `ILLEGAL_ADDRESS`: nothing is mapped at the address, or not for this device, or not for writing. If running work
/// gets this error, it becomes a fault of the context ([`Ctx::fault`]).
pub(crate) fn access(context: &Ctx, address: DevicePtr, bytes: usize, want: Want) -> Result<HostRange, Code> {
    let memory = lock();
    let (start, region) = memory.region(address).ok_or(Code::ILLEGAL_ADDRESS)?;
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

/// Returns whether an address is one of a region.
pub(crate) fn is_known(address: DevicePtr) -> bool {
    lock().region(address).is_some()
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
    fn new(devices: usize) -> Self {
        Self {
            space: Space::reserve(),
            regions: BTreeMap::new(),
            blocks: BTreeMap::new(),
            exports: BTreeMap::new(),
            openings: BTreeMap::new(),
            handles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            pools: pool::defaults(devices),
            freed: Vec::new(),
            last: 0,
        }
    }

    /// Returns the region that contains an address, with its first address.
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

/// Frees the memory that ends with a context. It stays in the ledger, because the program did not release it.
pub(crate) fn end_of_context(context: Handle) {
    let memory = &mut *lock();
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
