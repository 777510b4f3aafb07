//! Properties of an address: the kind of its memory, and where that memory begins and ends.
#![allow(unsafe_code)] // driver calls

use std::ffi::c_void;

use crate::abi::{
    MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, MEM_LOCATION_TYPE_DEVICE, MEMORYTYPE_DEVICE, MEMORYTYPE_HOST,
    MemAllocationProp, POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, POINTER_ATTRIBUTE_BUFFER_ID,
    POINTER_ATTRIBUTE_DEVICE_ORDINAL, POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, POINTER_ATTRIBUTE_IS_MANAGED,
    POINTER_ATTRIBUTE_MEMORY_TYPE, POINTER_ATTRIBUTE_MEMPOOL_HANDLE, POINTER_ATTRIBUTE_RANGE_SIZE,
    POINTER_ATTRIBUTE_RANGE_START_ADDR,
};
use crate::result::none_if;
use crate::{Context, CuResult, CudaError, Device, ipc};

/// The kinds of memory that an address can belong to. They share in different ways, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PointerKind {
    /// Device memory of `cuMemAlloc` (`cudaMalloc`): shared by a 64-byte handle, if
    /// [`PointerInfo::legacy_ipc`] says so.
    Device,
    /// Memory of another process that an [`IpcMapping`](crate::IpcMapping) of this process opened. Only its owner can
    /// share it.
    Imported,
    /// Stream-ordered memory of a pool (`cuMemAllocAsync`): has no 64-byte handle.
    Pool,
    /// A mapping of `cuMemCreate` memory (`cuMemMap`), of a device or a NUMA node: shared by file descriptor, if
    /// [`PointerInfo::posix_fd`] says so.
    Vmm,
    /// Managed memory (`cuMemAllocManaged`): belongs to this process alone.
    Managed,
    /// Page-locked host memory of the driver (`cuMemHostAlloc`, `cudaMallocHost`): belongs to this process alone.
    Pinned,
    /// Host memory that the program made and registered (`cuMemHostRegister`). Distinguished from
    /// [`PointerKind::Pinned`] by `cuMemHostGetFlags`, which refuses it by the vendor's documentation.
    Registered,
    /// Unknown to the driver: ordinary host memory, freed memory, or an arbitrary number.
    Unknown,
}

/// What the driver says about one address of this process.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PointerInfo {
    /// The address that was asked for.
    pub address: u64,
    /// The kind of its memory.
    pub kind: PointerKind,
    /// The first address of the allocation or mapping. For [`PointerKind::Unknown`] the address itself.
    pub base: u64,
    /// The size of the allocation or mapping in bytes. For [`PointerKind::Unknown`] 0.
    pub bytes: u64,
    /// The device that the memory lies on; nothing for host memory, and where `CUDA_VISIBLE_DEVICES` hides it.
    pub device: Option<Device>,
    /// A number that no other allocation of this process ever has: distinguishes an allocation from a later one at the
    /// same address. 0 where the driver has none.
    pub buffer_id: u64,
    /// True if the driver would make a 64-byte handle of it ([`IpcMemoryHandle`](crate::IpcMemoryHandle)).
    pub legacy_ipc: bool,
    /// True if it was made to be exported as a file descriptor.
    pub posix_fd: bool,
}

impl PointerInfo {
    /// Asks the driver about an address; any number may be asked for, nothing is read there.
    ///
    /// # Errors
    /// A lost context; a driver without the call (`CUDA_ERROR_NOT_FOUND`). An address that the driver does not know is
    /// no error but [`PointerKind::Unknown`].
    pub fn of(context: &Context, address: u64) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let [memory_type, buffer_id, managed, ordinal, legacy, start, size, handle_types, pool] =
            attributes(context, address)?;
        let mapped = mapped_properties(context, address)?;
        let kind = if managed != 0 {
            PointerKind::Managed
        } else if pool != 0 {
            PointerKind::Pool
        } else if mapped.is_some() {
            // Its attributes are those of cuMemAlloc memory (measured); it differs only in that a handle can be
            // retained.
            PointerKind::Vmm
        } else {
            match memory_type as u32 {
                MEMORYTYPE_DEVICE if ipc::is_imported(address) => PointerKind::Imported,
                MEMORYTYPE_DEVICE => PointerKind::Device,
                MEMORYTYPE_HOST if is_driver_host_memory(context, address)? => PointerKind::Pinned,
                MEMORYTYPE_HOST => PointerKind::Registered,
                _ => PointerKind::Unknown,
            }
        };
        let (base, bytes) = match kind {
            PointerKind::Unknown => (address, 0),
            _ if address.checked_sub(start).is_some_and(|offset| offset < size) => (start, size),
            _ => address_range(context, address)?,
        };
        let ordinal = match kind {
            PointerKind::Unknown | PointerKind::Pinned | PointerKind::Registered => None,
            _ => match mapped.map(|mapped| mapped.location) {
                None => Some(ordinal as i32),
                // The number of another kind of place is no ordinal.
                Some(location) => (location.kind == MEM_LOCATION_TYPE_DEVICE).then_some(location.id),
            },
        };
        Ok(Self {
            address,
            kind,
            base,
            bytes,
            device: ordinal.map(|ordinal| visible(context, ordinal)).transpose()?.flatten(),
            buffer_id,
            legacy_ipc: kind == PointerKind::Device && legacy != 0,
            posix_fd: mapped.map_or(handle_types as u32, |mapped| mapped.requested_handle_types)
                & MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                != 0,
        })
    }

    /// Returns how far the address is from the beginning of its allocation: what must travel with a handle, which names
    /// the whole allocation.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.address - self.base
    }
}

/// Returns the attributes of an address: type of memory, buffer id, whether it is managed, ordinal of the device,
/// whether it has a 64-byte handle, start and size of the range, types of handles, pool.
fn attributes(context: &Context, address: u64) -> Result<[u64; 9], CudaError> {
    let mut names = [
        POINTER_ATTRIBUTE_MEMORY_TYPE,
        POINTER_ATTRIBUTE_BUFFER_ID,
        POINTER_ATTRIBUTE_IS_MANAGED,
        POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        POINTER_ATTRIBUTE_RANGE_START_ADDR,
        POINTER_ATTRIBUTE_RANGE_SIZE,
        POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
    ];
    // Eight zeroed bytes each: the values are 1, 4 or 8 bytes long, the vendor's page does not say which is what.
    let mut values = [0_u64; 9];
    let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    let count = names.len() as u32;
    let driver = context.driver();
    // SAFETY: as many attributes as places, each with room for the largest value there is; for an address that it
    // does not know the driver stores defaults.
    unsafe { driver.pointer_get_attributes(count, names.as_mut_ptr(), places.as_mut_ptr(), address) }?;
    Ok(values)
}

/// Returns the properties of the memory that `cuMemMap` mapped at an address, or `None` if no such memory is mapped.
fn mapped_properties(context: &Context, address: u64) -> Result<Option<MemAllocationProp>, CudaError> {
    let driver = context.driver();
    let mut handle = 0;
    // SAFETY: the handle's pointer is live; the address is looked up, not followed.
    match unsafe { driver.mem_retain_allocation_handle(&mut handle, address as *mut c_void) } {
        Ok(()) => {}
        Err(error) if matches!(error.code, CuResult::INVALID_VALUE | CuResult::NOT_SUPPORTED) => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut properties = MemAllocationProp::default();
    // SAFETY: the pointer is to a live struct of the driver's layout, the handle was just retained.
    let asked = unsafe { driver.mem_get_allocation_properties(&mut properties, handle) };
    // SAFETY: retained once above, released once here.
    unsafe { driver.mem_release(handle) }?;
    asked?;
    Ok(Some(properties))
}

/// Returns whether host memory that the driver knows came from the driver itself.
fn is_driver_host_memory(context: &Context, address: u64) -> Result<bool, CudaError> {
    let mut flags = 0;
    // SAFETY: the pointer is to a live number; the address is looked up, not followed.
    let found = unsafe { context.driver().mem_host_get_flags(&mut flags, address as *mut c_void) };
    Ok(none_if(found, CuResult::INVALID_VALUE)?.is_some())
}

/// Returns first address and size of the allocation that holds an address.
pub(crate) fn address_range(context: &Context, address: u64) -> Result<(u64, u64), CudaError> {
    let mut base = 0;
    let mut bytes = 0;
    // SAFETY: both pointers are to live numbers; the address is looked up, not followed.
    unsafe { context.driver().mem_get_address_range(&mut base, &mut bytes, address) }
        .map_err(|error| error.with_context(format!("address {address:#x}")))?;
    Ok((base, bytes as u64))
}

/// Returns the device with this ordinal, if this process sees it.
fn visible(context: &Context, ordinal: i32) -> Result<Option<Device>, CudaError> {
    let Ok(ordinal) = u32::try_from(ordinal) else { return Ok(None) };
    none_if(Device::by_ordinal(context.driver(), ordinal), CuResult::INVALID_DEVICE)
}
