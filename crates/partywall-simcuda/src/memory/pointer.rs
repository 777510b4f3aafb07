//! The attributes of a pointer.

use std::ffi::{c_int, c_void};

use super::{Kind, Region};
use crate::abi::{Code, DevicePtr};
use crate::context;
use crate::entry::{entry_points, store};

/// A value with the size that the driver writes.
enum Value {
    Int(c_int),
    Long(u64),
}

impl Value {
    /// # Errors
    /// `INVALID_VALUE` for a null pointer.
    fn store(self, to: *mut c_void) -> Result<(), Code> {
        match self {
            Self::Int(value) => store(to.cast(), value),
            Self::Long(value) => store(to.cast(), value),
        }
    }
}

/// One attribute of a pointer into a region.
///
/// # Errors
/// `INVALID_VALUE`: unknown, or without a meaning for such a pointer.
fn attribute(which: u32, pointer: DevicePtr, base: DevicePtr, region: &Region) -> Result<Value, Code> {
    let on_host = matches!(region.kind, Kind::Pinned { .. } | Kind::Registered { .. });
    let on_node = matches!(&region.kind, Kind::Mapped { physical, .. } if physical.on_node());
    let managed = matches!(region.kind, Kind::Managed);
    let device = region.device.map_or(-1, |device| device as c_int);
    Ok(match which {
        CONTEXT => Value::Long(region.context as u64),
        // Measured: memory of a NUMA node has no type, and another host pointer than the one that the CPU may use.
        MEMORY_TYPE if on_node => Value::Int(0),
        HOST_POINTER if on_node => Value::Long(region.backing.map() as u64 + (pointer - base)),
        MEMORY_TYPE => Value::Int(if on_host { TYPE_HOST } else { TYPE_DEVICE }),
        DEVICE_POINTER => Value::Long(pointer),
        HOST_POINTER if on_host || managed => Value::Long(pointer),
        SYNC_MEMOPS => Value::Int(0),
        BUFFER_ID => Value::Long(region.id),
        IS_MANAGED => Value::Int(managed.into()),
        DEVICE_ORDINAL => Value::Int(device),
        IS_LEGACY_IPC_CAPABLE => Value::Int(matches!(region.kind, Kind::Plain).into()),
        RANGE_START | MAPPING_BASE => Value::Long(base),
        RANGE_SIZE | MAPPING_SIZE => Value::Long(region.bytes),
        MAPPED => Value::Int(1),
        ALLOWED_HANDLE_TYPES => Value::Long(match &region.kind {
            Kind::Mapped { physical, .. } => physical.properties.requested_handle_types.into(),
            Kind::Pool { handle_types, .. } => (*handle_types).into(),
            _ => 0,
        }),
        IS_RDMA_CAPABLE => Value::Int(0),
        ACCESS_FLAGS => Value::Int(match &region.kind {
            Kind::Mapped { access, .. } => {
                let device = context::current()?.device;
                access.get(&device).copied().unwrap_or(0) as c_int
            }
            Kind::Registered { flags } if flags & super::host::REGISTER_READ_ONLY != 0 => 1,
            _ => 3,
        }),
        MEMPOOL_HANDLE => Value::Long(match region.kind {
            Kind::Pool { pool, .. } => pool as u64,
            _ => 0,
        }),
        BLOCK_ID => Value::Long(region.id),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Returns what `cuPointerGetAttributes` stores where an attribute has no value.
fn nothing(which: u32) -> Value {
    match which {
        DEVICE_ORDINAL => Value::Int(NO_DEVICE),
        MEMORY_TYPE | SYNC_MEMOPS | IS_MANAGED | IS_LEGACY_IPC_CAPABLE | MAPPED | IS_RDMA_CAPABLE | ACCESS_FLAGS => {
            Value::Int(0)
        }
        _ => Value::Long(0),
    }
}

fn of_pointer(which: u32, pointer: DevicePtr) -> Result<Value, Code> {
    let memory = super::lock();
    let (base, region) = memory.region(pointer).ok_or(Code::INVALID_VALUE)?;
    attribute(which, pointer, base, region)
}

entry_points! {
    fn cuPointerGetAttribute(data: *mut c_void, which: u32, pointer: DevicePtr) {
        context::healthy()?;
        of_pointer(which, pointer)?.store(data)
    }
    // A pointer that the driver does not know is no error here: its attributes are nothing.
    fn cuPointerGetAttributes(count: u32, which: *const u32, data: *mut *mut c_void, pointer: DevicePtr) {
        context::healthy()?;
        if count == 0 || which.is_null() || data.is_null() { return Err(Code::INVALID_VALUE); }
        for index in 0..count as usize {
            // SAFETY: both are the caller's arrays of `count` elements by the C contract.
            let (which, data) = unsafe { (which.add(index).read_unaligned(), data.add(index).read_unaligned()) };
            if which == 0 || which > LAST { return Err(Code::INVALID_VALUE); }
            of_pointer(which, pointer).unwrap_or_else(|_| nothing(which)).store(data)?;
        }
        Ok(())
    }
    fn cuMemGetAddressRange_v2(base: *mut DevicePtr, bytes: *mut usize, pointer: DevicePtr) {
        context::current()?;
        let memory = super::lock();
        let (start, region) = memory.region(pointer).ok_or(Code::NOT_FOUND)?;
        if !base.is_null() { store(base, start)?; }
        if bytes.is_null() { Ok(()) } else { store(bytes, region.bytes as usize) }
    }
}

const TYPE_HOST: c_int = 1;
const TYPE_DEVICE: c_int = 2;
/// `CU_DEVICE_INVALID`.
const NO_DEVICE: c_int = -2;

const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const SYNC_MEMOPS: u32 = 6;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const IS_LEGACY_IPC_CAPABLE: u32 = 10;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const MAPPED: u32 = 13;
const ALLOWED_HANDLE_TYPES: u32 = 14;
const IS_RDMA_CAPABLE: u32 = 15;
const ACCESS_FLAGS: u32 = 16;
const MEMPOOL_HANDLE: u32 = 17;
const MAPPING_SIZE: u32 = 18;
const MAPPING_BASE: u32 = 19;
const BLOCK_ID: u32 = 20;
const LAST: u32 = BLOCK_ID;
