//! Memory of a NUMA node: host memory that the driver makes, pinned from the start, and that travels as a file
//! descriptor.
//!
//! The driver makes it as it makes memory of a device (`cuMemCreate`), and everything here needs no context: a process
//! that uses it from the CPU alone only initialises CUDA. Costs (measured on H200 with driver 580): creating 0.23–0.26
//! s a GiB, access for a device 10 ms a GiB, access for the CPU 15–24 ms a GiB; a further process that maps a memfd and
//! registers it needs 75–88 ms a GiB. Copies to and from the device run at 55 GB/s, as with registered memory.
//!
//! The resident size of a process counts all memory that its CPU has access to, also if nothing touches it.
#![allow(unsafe_code)] // vouches for its addresses

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use partywall_os::lock::IgnorePoison;
use partywall_os::map::SharedMap;
use partywall_os::process::fork_generation;

use crate::abi::{MEM_LOCATION_TYPE_HOST_NUMA, MemAccessDesc, MemLocation};
use crate::allocation::Allocation;
use crate::context::CallContext;
use crate::mapping::rule;
use crate::parts::{AddressRange, Extension, Parts};
use crate::{Access, AccessError, Context, CuResult, CudaError, DeviceSlice, Driver, MemoryPlace};

/// Memory on one NUMA node without an address, created here or imported from another process.
///
/// It becomes usable by a [`NodeMapping`], and is an owner as [`PhysicalMemory`](crate::PhysicalMemory) is: the memory
/// goes back to the node with the last reference. `Send` and `Sync`.
#[derive(Debug)]
pub struct NodeMemory {
    allocation: Arc<Allocation>,
    node: u32,
}

/// Memory that cannot be imported as that of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeImportError {
    /// The descriptor is memory of another node, or of a device: their descriptors look the same.
    #[error("the descriptor is memory of {found}, not of NUMA node {wanted}")]
    OtherPlace {
        /// The node that was asked for.
        wanted: u32,
        /// Where the memory lies.
        found: MemoryPlace,
    },
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

impl NodeMemory {
    /// Returns the number of bytes that the size of every allocation must be a multiple of: 2 MiB (measured).
    /// Initialises CUDA.
    ///
    /// The driver answers for nodes that do not exist, too: only creating memory proves a node.
    ///
    /// # Errors
    /// CUDA cannot be initialised, as in a forked child; `CUDA_ERROR_INVALID_VALUE` or `CUDA_ERROR_NOT_SUPPORTED` from
    /// a driver without such memory.
    pub fn granularity(driver: &'static Driver) -> Result<u64, CudaError> {
        driver.initialize()?;
        Allocation::granularity(&CallContext::Any(driver), location(0))
    }

    /// Allocates `bytes` of memory on a node, exportable as a file descriptor. `bytes` is a multiple of
    /// [`NodeMemory::granularity`]. Initialises CUDA.
    ///
    /// What the memory contains is not promised; see [`PhysicalMemory::create`](crate::PhysicalMemory::create).
    ///
    /// Host-synchronous: 0.23–0.26 s for 1 GiB (measured). It takes free memory of the machine, but counts as resident
    /// memory of no process until the CPU is given access.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, which the driver answers at once if the machine has less memory available
    /// (measured); `CUDA_ERROR_INVALID_VALUE` if there is no such node, and for a size that is zero or not a multiple
    /// of the granularity; CUDA cannot be initialised.
    pub fn create(driver: &'static Driver, node: u32, bytes: u64) -> Result<Self, CudaError> {
        driver.initialize()?;
        let describe = |error: CudaError| {
            let hint = if error.code == CuResult::INVALID_VALUE { " (is there such a node?)" } else { "" };
            error.with_context(format!("{bytes} bytes on NUMA node {node}{hint}"))
        };
        let allocation = Allocation::create(CallContext::Any(driver), location(node), bytes).map_err(describe)?;
        Ok(Self { allocation: Arc::new(allocation), node })
    }

    /// Imports memory of `node` that another process (or this one) exported. `bytes` is the size it was created with; a
    /// wrong size is found when the memory is mapped. Initialises CUDA.
    ///
    /// The descriptor is not consumed and may be closed at once. Host-synchronous: 0.1 ms (measured).
    ///
    /// # Errors
    /// [`NodeImportError::OtherPlace`] before anything is mapped; `CUDA_ERROR_UNKNOWN` if the descriptor is something
    /// else; CUDA cannot be initialised.
    pub fn import(
        driver: &'static Driver,
        node: u32,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Self, NodeImportError> {
        driver.initialize()?;
        let allocation = Allocation::import(CallContext::Any(driver), descriptor, bytes)?;
        match allocation.place()? {
            MemoryPlace::Node(found) if u32::try_from(found) == Ok(node) => {
                Ok(Self { allocation: Arc::new(allocation), node })
            }
            found => Err(NodeImportError::OtherPlace { wanted: node, found }),
        }
    }

    /// Returns a new file descriptor that stands for this memory, close-on-exec, as
    /// [`PhysicalMemory::export`](crate::PhysicalMemory::export) does. Closing the last one takes long: 137 ms for 8
    /// GiB (measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for imported memory: only the creator can export.
    /// `CUDA_ERROR_OPERATING_SYSTEM` if the process has no descriptor left.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.allocation.export()
    }

    /// Returns the number of its node.
    #[must_use]
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Returns its size in bytes: as created, or as the importer declared.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.allocation.bytes()
    }

    /// Returns false: memory without bytes cannot be created.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The writers of a mapping, which decide how its CPU may read and write the bytes. Each process chooses for itself:
/// this protects against bugs, not against attackers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeUse {
    /// Only the mapping's owner: no other process has the memory yet. [`NodeMapping::bytes_mut`].
    Draft,
    /// Nobody any more. The CPU and the devices may read, and a store of this process ends it. [`NodeMapping::bytes`].
    Frozen,
    /// Other processes, at any time. This one reads. [`NodeMapping::shared`].
    Readable,
    /// Any process, at any time. [`NodeMapping::shared`].
    Writable,
}

impl NodeUse {
    /// Returns the access that the CPU and the devices have.
    #[must_use]
    pub fn access(self) -> Access {
        match self {
            Self::Draft | Self::Writable => Access::ReadWrite,
            Self::Frozen | Self::Readable => Access::ReadOnly,
        }
    }
}

/// A whole [`NodeMemory`] at an address range of its own, the same for the CPU and for each device; behind it, where
/// addresses were reserved for that, as many more as [`NodeMapping::extend`] was given.
///
/// At first nobody has access. [`allow_cpu`](Self::allow_cpu) and [`allow_device`](Self::allow_device) give it, then or
/// later; work that runs on the memory meanwhile continues undisturbed (measured).
///
/// Dropping it unmaps, gives the addresses back and drops its share of the memory, once nothing holds an `Arc` of
/// [`shared`](Self::shared) any more; a failure of that goes to [`Driver::take_drop_error`]. As with
/// [`Mapping`](crate::Mapping), that waits for all that this process runs in the contexts for which a slice was ever
/// taken, because the driver unmaps without waiting: do not drop it behind a wait for another process.
///
/// A draft belongs to the process that made the mapping: a forked child gets neither bytes nor a writer of it.
///
/// `Send` and `Sync`. Other processes are trusted to keep to what their [`NodeUse`] says, as for
/// [blocks](partywall_os::borrow): one that writes frozen memory changes bytes behind a `&[u8]` of this process.
pub struct NodeMapping {
    /// The CPU's view of memory that processes may write. It keeps `mapped`.
    view: OnceLock<Arc<SharedMap>>,
    mapped: Arc<Mapped>,
    memory: Arc<NodeMemory>,
    used_as: NodeUse,
    /// The [`fork_generation`] of the process that made the mapping. A forked child has the pages, too, with the access
    /// of that moment: it could write a draft after the parent has frozen it.
    generation: u64,
}

/// What is mapped, and who has access to it.
struct Mapped {
    // Unmapped before the contexts may be released.
    parts: Parts,
    /// Changed under the lock of `parts` only.
    users: Mutex<Users>,
}

#[derive(Default)]
struct Users {
    cpu: bool,
    devices: Vec<DeviceUser>,
}

struct DeviceUser {
    context: Context,
    /// True if a slice was ever taken. If not, no work of this context can use the mapping.
    named: AtomicBool,
}

impl NodeMapping {
    /// Maps memory into this process, without access for anybody. Host-synchronous: less than 0.1 ms (measured).
    ///
    /// # Errors
    /// As [`Mapping::new`](crate::Mapping::new).
    pub fn new(memory: impl Into<Arc<NodeMemory>>, used_as: NodeUse) -> Result<Self, CudaError> {
        Self::with_reservation(memory, used_as, 0)
    }

    /// Maps memory as [`NodeMapping::new`] does, at the beginning of a range of `reserved` addresses, as
    /// [`Mapping::with_reservation`](crate::Mapping::with_reservation).
    ///
    /// # Errors
    /// As [`NodeMapping::new`].
    pub fn with_reservation(
        memory: impl Into<Arc<NodeMemory>>,
        used_as: NodeUse,
        reserved: u64,
    ) -> Result<Self, CudaError> {
        let memory = memory.into();
        let parts = Parts::new(memory.allocation.clone(), reserved, &[])?;
        let mapped = Arc::new(Mapped { parts, users: Mutex::default() });
        Ok(Self { view: OnceLock::new(), mapped, memory, used_as, generation: fork_generation() })
    }

    /// Maps further memory behind the current end, for everybody who has access. It becomes visible by
    /// [`Extension::publish`]. The mapped memory stays in place, and work that uses it continues.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`] if it does not fit into what is reserved; else as [`NodeMapping::new`]. The mapping
    /// is then as it was.
    pub fn extend<M: Into<Arc<NodeMemory>>>(
        &self,
        memories: impl IntoIterator<Item = M>,
    ) -> Result<Extension<'_>, AccessError> {
        // The view is looked for under the lock: `shared` makes it under the same one, with the length of that moment.
        let lock = self.mapped.parts.lock();
        let mut extension = self.mapped.parts.extension(lock, self.view.get().map(|view| &**view));
        for memory in memories {
            extension.map(memory.into().allocation.clone(), &self.rules(self.access()))?;
        }
        Ok(extension)
    }

    /// Gives the CPU access, unless it has it. 15–24 ms a GiB (measured).
    ///
    /// # Errors
    /// The driver's error. The CPU then has no access.
    pub fn allow_cpu(&self) -> Result<(), CudaError> {
        let _turn = self.mapped.parts.lock();
        if self.mapped.users().cpu {
            return Ok(());
        }
        self.mapped.parts.set_access(&[self.cpu_rule(self.access())])?;
        self.mapped.users().cpu = true;
        Ok(())
    }

    /// Gives the context's device access, unless it has it. Any device may have it. 10 ms a GiB (measured).
    ///
    /// # Errors
    /// The driver's error. The device then has no access.
    pub fn allow_device(&self, context: &Context) -> Result<(), CudaError> {
        let _turn = self.mapped.parts.lock();
        if self.mapped.users().devices.iter().any(|user| user.context == *context) {
            return Ok(());
        }
        self.mapped.parts.set_access(&[rule(context, self.access())])?;
        self.mapped.users().devices.push(DeviceUser { context: context.clone(), named: false.into() });
        Ok(())
    }

    /// Unmaps the memory and drops this mapping's share of it, but keeps the addresses, at which
    /// [`NodeReservation::map`] maps memory again. Does not wait: [`synchronize`](Self::synchronize) does, and may fail
    /// without consequences.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_STATE` while something holds an `Arc` of [`shared`](Self::shared), which then keeps what is
    /// mapped; the driver's error, after which the addresses are given back.
    pub fn vacate(self) -> Result<NodeReservation, CudaError> {
        let Self { view, mapped, memory, used_as, generation } = self;
        // The view keeps what is mapped.
        drop(view);
        let borrowed = |_| CudaError::new("cuMemUnmap", CuResult::ILLEGAL_STATE).with_context("blocks are borrowed");
        let mut mapped = Arc::try_unwrap(mapped).map_err(borrowed)?;
        let range = mapped.parts.vacate()?;
        let users = std::mem::take(mapped.users.get_mut().ignore_poison());
        Ok(NodeReservation { range, users, node: memory.node, used_as, generation })
    }

    /// Waits for all work of this process in the contexts for which a slice was ever taken.
    ///
    /// # Errors
    /// The error of that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let users = self.mapped.users();
        let used = users.devices.iter().filter(|user| user.named.load(Ordering::Relaxed));
        let contexts: Vec<_> = used.map(|user| user.context.clone()).collect();
        drop(users);
        contexts.iter().try_for_each(Context::synchronize)
    }

    /// Ends the writing of a draft, at the same addresses: the CPU and every device may only read it from now on. The
    /// driver does not wait: running work that writes it faults. Does nothing if it is frozen already.
    ///
    /// # Errors
    /// As the driver says; the former access then still stands. `CUDA_ERROR_INVALID_VALUE` for memory that processes
    /// share.
    pub fn freeze(&mut self) -> Result<(), CudaError> {
        match self.used_as {
            NodeUse::Frozen => return Ok(()),
            NodeUse::Draft => {}
            NodeUse::Readable | NodeUse::Writable => {
                let error = CudaError::new("cuMemSetAccess", CuResult::INVALID_VALUE);
                return Err(error.with_context("memory that processes share cannot be frozen"));
            }
        }
        let rules = self.rules(Access::ReadOnly);
        if !rules.is_empty() {
            self.mapped.parts.set_access(&rules)?;
        }
        self.used_as = NodeUse::Frozen;
        Ok(())
    }

    /// Turns a draft into memory that any process may write, with unchanged access. Does nothing for other memory, and
    /// in a forked child, whose parent may have frozen the draft.
    pub fn share(&mut self) {
        if self.used_as == NodeUse::Draft && self.is_ours() {
            self.used_as = NodeUse::Writable;
        }
    }

    /// Returns the bytes of frozen memory; `None` if it is not frozen, or if the CPU has no access.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        let readable = self.used_as == NodeUse::Frozen && self.has_cpu();
        // SAFETY: mapped and accessible while `self` is borrowed. No mapping of this value can write it, because all
        // have read-only access; no other process writes it by agreement, see the documentation of the type.
        readable.then(|| unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.mapped.parts.len() as usize) })
    }

    /// Returns the bytes of a draft, for writing; `None` if it is no draft, if the CPU has no access, and in a forked
    /// child.
    ///
    /// First waits for all work of this process in the contexts for which a slice was ever taken, because that work may
    /// write the bytes.
    ///
    /// # Errors
    /// The error of that work.
    pub fn bytes_mut(&mut self) -> Result<Option<&mut [u8]>, CudaError> {
        if !self.is_draft() {
            return Ok(None);
        }
        self.synchronize()?;
        let len = self.mapped.parts.len() as usize;
        // SAFETY:
        // - The range is mapped for writing while `self` is borrowed.
        // - No other process has a draft, a forked child gets no bytes of it, and no view of it exists.
        // - No device writes it: the work enqueued before is done, and the slices for further work borrow `self`.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), len) }))
    }

    /// Returns a writer of a draft, which several threads may use at a time; `None` as [`NodeMapping::bytes_mut`].
    #[must_use]
    pub fn writer(&mut self) -> Option<NodeWriter<'_>> {
        self.is_draft().then(|| NodeWriter { map: self.shared_map(), _mapping: self })
    }

    /// Returns the CPU's view of memory that processes may write at any time; `None` if the mapping is a draft or
    /// frozen, or if the CPU has no access. It grows with the mapping.
    #[must_use]
    pub fn shared(&self) -> Option<&Arc<SharedMap>> {
        if let view @ Some(_) = self.view.get() {
            return view;
        }
        let _turn = self.mapped.parts.lock();
        let is_shared = matches!(self.used_as, NodeUse::Readable | NodeUse::Writable) && self.has_cpu();
        is_shared.then(|| self.view.get_or_init(|| Arc::new(self.shared_map())))
    }

    /// Returns a checked range of the memory on the context's device.
    ///
    /// # Errors
    /// [`AccessError::NoAccess`] unless the device was [given access](Self::allow_device); [`AccessError::OutOfRange`].
    pub fn slice(&self, context: &Context, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        let users = self.mapped.users();
        let user = users.devices.iter().find(|user| user.context == *context);
        let user = user.ok_or_else(|| AccessError::NoAccess { device: context.device().ordinal() })?;
        // Relaxed: the drop reads it after all borrows of `self` have ended.
        user.named.store(true, Ordering::Relaxed);
        // SAFETY: the range stays mapped with this access on this device while `self` is borrowed: only `freeze`
        // changes the access of who has it, by `&mut self`; an extension adds to the range and changes nothing.
        let all = unsafe { DeviceSlice::from_raw(self.mapped.parts.pointer(), self.len(), self.access()) };
        all.slice(offset, len)
    }

    /// Returns whether the CPU has access.
    #[must_use]
    pub fn has_cpu(&self) -> bool {
        self.mapped.users().cpu
    }

    /// Returns the current size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapped.parts.len()
    }

    /// Returns the size in bytes up to which the mapping can grow in place.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.mapped.parts.reserved()
    }

    /// Returns false: memory always has bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the access that the CPU and the devices have or get.
    #[must_use]
    pub fn access(&self) -> Access {
        self.used_as.access()
    }

    /// Returns the first memory of the mapping, for exporting it or mapping it again.
    #[must_use]
    pub fn memory(&self) -> &Arc<NodeMemory> {
        &self.memory
    }

    /// Returns whether the CPU of this process may write a draft.
    fn is_draft(&self) -> bool {
        self.used_as == NodeUse::Draft && self.has_cpu() && self.is_ours()
    }

    /// Returns whether this process made the mapping, and not the parent that forked it.
    fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }

    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.mapped.parts.pointer() as *mut u8).expect("the driver reserves no range at 0")
    }

    /// Returns a view of the current length. The CPU has access, and the caller keeps the mapping from being extended
    /// meanwhile.
    fn shared_map(&self) -> SharedMap {
        let writable = self.access() == Access::ReadWrite;
        let len = self.len() as usize;
        // SAFETY: `mapped` keeps the range mapped for the CPU with this access, which only `freeze` changes, and only
        // of a draft, whose views end with the borrow of their writer. No references to the bytes exist: `bytes` and
        // `bytes_mut` give them for other uses of the mapping, or end before a writer begins. The driver maps whole
        // pages.
        unsafe { SharedMap::of_owner(self.mapped.clone(), self.start(), len, self.reserved() as usize, writable) }
    }

    /// Returns a rule for everybody who has access.
    fn rules(&self, access: Access) -> Vec<MemAccessDesc> {
        self.mapped.users().rules(self.memory.node, access)
    }

    fn cpu_rule(&self, access: Access) -> MemAccessDesc {
        cpu_rule(self.memory.node, access)
    }
}

impl Mapped {
    fn users(&self) -> std::sync::MutexGuard<'_, Users> {
        self.users.lock().ignore_poison()
    }
}

impl Mapped {
    /// Waits for the work that may use the mapping, in every context, and returns the first error.
    fn settle(&mut self) -> Result<(), CudaError> {
        let users = self.users.get_mut().ignore_poison().devices.iter_mut();
        let used = users.filter_map(|user| user.named.get_mut().then_some(&user.context));
        used.map(Context::settle).fold(Ok(()), Result::and)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let unmapped = self.settle().and(self.parts.unmap());
        self.parts.calls().record_drop(unmapped);
    }
}

/// Addresses that a [`NodeMapping`] has left reserved. Nothing is mapped there: GPU work that uses them faults, and so
/// does the CPU. Dropping it gives the addresses back. `Send` and `Sync`.
pub struct NodeReservation {
    range: AddressRange,
    users: Users,
    node: u32,
    used_as: NodeUse,
    generation: u64,
}

impl NodeReservation {
    /// Maps memory at the addresses that the former mapping had, for everybody who had access. Several memories lie one
    /// behind the other.
    ///
    /// # Errors
    /// The reservation, with the error of [`NodeMapping::new`]; `CUDA_ERROR_INVALID_VALUE` for no memory, and for more
    /// than the former mapping was reserved for. Nothing is mapped then.
    pub fn map(self, memories: Vec<Arc<NodeMemory>>) -> Result<NodeMapping, Box<(Self, CudaError)>> {
        let Self { range, users, node, used_as, generation } = self;
        let refused = |range, users, error| Err(Box::new((Self { range, users, node, used_as, generation }, error)));
        let Some(memory) = memories.first().cloned() else {
            let error = CudaError::new("cuMemMap", CuResult::INVALID_VALUE);
            return refused(range, users, error.with_context("there is no memory"));
        };
        let rules = users.rules(node, used_as.access());
        match Parts::at(range, memories.iter().map(|memory| memory.allocation.clone()), &rules) {
            Ok(parts) => {
                let mapped = Arc::new(Mapped { parts, users: Mutex::new(users) });
                Ok(NodeMapping { view: OnceLock::new(), mapped, memory, used_as, generation })
            }
            Err((range, error)) => refused(range, users, error),
        }
    }
}

impl fmt::Debug for NodeReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeReservation")
            .field("range", &self.range)
            .field("used_as", &self.used_as)
            .finish_non_exhaustive()
    }
}

impl Users {
    /// Returns a rule for everybody who has access.
    fn rules(&self, node: u32, access: Access) -> Vec<MemAccessDesc> {
        let cpu = self.cpu.then(|| cpu_rule(node, access));
        cpu.into_iter().chain(self.devices.iter().map(|user| rule(&user.context, access))).collect()
    }
}

impl fmt::Debug for NodeMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeMapping")
            .field("address", &self.start())
            .field("bytes", &self.len())
            .field("used_as", &self.used_as)
            .field("memory", self.memory())
            .finish_non_exhaustive()
    }
}

/// Writes a draft from any number of threads.
#[derive(Debug)]
pub struct NodeWriter<'a> {
    map: SharedMap,
    _mapping: &'a NodeMapping,
}

impl NodeWriter<'_> {
    /// Copies bytes into the draft. If two threads write a byte at a time, it gets one of the two values.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let (len, available) = (bytes.len() as u64, self.map.len() as u64);
        self.map.write_bytes(offset as usize, bytes).ok_or(AccessError::OutOfRange { offset, len, available })
    }
}

/// Returns the rule that gives the CPU this access to memory of a node.
pub(crate) fn cpu_rule(node: u32, access: Access) -> MemAccessDesc {
    MemAccessDesc { location: location(node), flags: access.flags() }
}

fn location(node: u32) -> MemLocation {
    MemLocation { kind: MEM_LOCATION_TYPE_HOST_NUMA, id: i32::try_from(node).unwrap_or(i32::MAX) }
}
