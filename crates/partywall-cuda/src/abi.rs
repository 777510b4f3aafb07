//! Numbers and structs of the driver's binary interface, as `cuda.h` has them on 64-bit Linux.
//!
//! Handles are opaque and stored as numbers, so that the owners above are `Send` and `Sync` because the
//! driver's functions may be called from any thread, not because of an assertion about pointers. The tests
//! hold sizes, offsets and numbers against bindings that were generated from the vendor's header.

use std::ffi::{c_int, c_void};

/// `CUdevice`: the ordinal of a device in this process.
pub(crate) type RawDevice = c_int;
/// `CUdeviceptr`: an address in the unified address space.
pub(crate) type DevicePtr = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type AllocationHandle = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`: pointers that only the driver follows.
pub(crate) type Handle = usize;
/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// `CUuuid`.
pub(crate) type RawUuid = [u8; 16];

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemLocation {
    pub(crate) kind: u32,
    pub(crate) id: c_int,
}

/// The anonymous `allocFlags` of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllocFlags {
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemAllocationProp {
    pub(crate) kind: u32,
    pub(crate) requested_handle_types: u32,
    pub(crate) location: MemLocation,
    /// A pointer; always null on Linux.
    pub(crate) win32_handle_meta_data: usize,
    pub(crate) alloc_flags: AllocFlags,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: u32,
}

/// `CUipcMemHandle` and `CUipcEventHandle`: passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `CUstreamBatchMemOpParams`: a union, each member of which begins with these fields where it has them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchMemOp {
    pub(crate) operation: u32,
    pub(crate) address: DevicePtr,
    pub(crate) value: u64,
    pub(crate) flags: u32,
    /// A field that the driver fills, and padding to the size of the union.
    pub(crate) rest: [u64; 2],
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BatchMemOpNodeParams {
    pub(crate) context: Handle,
    pub(crate) count: u32,
    pub(crate) operations: *mut BatchMemOp,
    pub(crate) flags: u32,
}

impl BatchMemOpNodeParams {
    /// Returns the parameters of a node with one operation, which must outlive them.
    pub(crate) fn of(context: Handle, operation: &mut BatchMemOp) -> Self {
        Self { context, count: 1, operations: operation, flags: 0 }
    }
}

pub(crate) const MEM_ALLOCATION_TYPE_PINNED: u32 = 1;
pub(crate) const MEM_LOCATION_TYPE_DEVICE: u32 = 1;
/// A NUMA node; in a rule of access the CPU, whatever the node (measured).
pub(crate) const MEM_LOCATION_TYPE_HOST_NUMA: u32 = 3;
pub(crate) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u32 = 1;
pub(crate) const MEM_ALLOC_GRANULARITY_MINIMUM: u32 = 0;
pub(crate) const MEM_ACCESS_FLAGS_PROT_READ: u32 = 1;
pub(crate) const MEM_ACCESS_FLAGS_PROT_READWRITE: u32 = 3;

pub(crate) const MEMHOSTALLOC_PORTABLE: u32 = 1;
pub(crate) const MEMHOSTREGISTER_PORTABLE: u32 = 1;
pub(crate) const MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
pub(crate) const MEMHOSTREGISTER_READ_ONLY: u32 = 8;
pub(crate) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;

#[cfg(feature = "experiment")]
pub(crate) const MEM_ATTACH_GLOBAL: u32 = 1;
pub(crate) const LIMIT_STACK_SIZE: u32 = 0;
pub(crate) const MEMORYTYPE_HOST: u32 = 1;
pub(crate) const MEMORYTYPE_DEVICE: u32 = 2;
pub(crate) const POINTER_ATTRIBUTE_MEMORY_TYPE: u32 = 2;
pub(crate) const POINTER_ATTRIBUTE_BUFFER_ID: u32 = 7;
pub(crate) const POINTER_ATTRIBUTE_IS_MANAGED: u32 = 8;
pub(crate) const POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;
pub(crate) const POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
pub(crate) const POINTER_ATTRIBUTE_RANGE_START_ADDR: u32 = 11;
pub(crate) const POINTER_ATTRIBUTE_RANGE_SIZE: u32 = 12;
pub(crate) const POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: u32 = 14;
pub(crate) const POINTER_ATTRIBUTE_MEMPOOL_HANDLE: u32 = 17;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
pub(crate) const STREAM_CAPTURE_MODE_RELAXED: u32 = 2;
pub(crate) const STREAM_CAPTURE_STATUS_NONE: u32 = 0;
pub(crate) const STREAM_CAPTURE_STATUS_ACTIVE: u32 = 1;
pub(crate) const STREAM_SET_CAPTURE_DEPENDENCIES: u32 = 1;
pub(crate) const STREAM_WAIT_VALUE_GEQ: u32 = 0;
pub(crate) const STREAM_WRITE_VALUE_DEFAULT: u32 = 0;
pub(crate) const BATCH_MEM_OP_WAIT_64: u32 = 4;
pub(crate) const BATCH_MEM_OP_WRITE_64: u32 = 5;
pub(crate) const EVENT_DEFAULT: u32 = 0;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
pub(crate) const EVENT_WAIT_DEFAULT: u32 = 0;
pub(crate) const P2P_ATTRIBUTE_PERFORMANCE_RANK: u32 = 1;

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use cudarc::driver::sys;

    use super::*;
    use crate::{CuResult, DeviceAttribute};

    #[test]
    fn structs_have_the_sizes_of_cuda_h() {
        assert_eq!(size_of::<MemLocation>(), 8);
        assert_eq!(size_of::<MemAllocationProp>(), 32);
        assert_eq!(offset_of!(MemAllocationProp, requested_handle_types), 4);
        assert_eq!(offset_of!(MemAllocationProp, location), 8);
        assert_eq!(offset_of!(MemAllocationProp, win32_handle_meta_data), 16);
        assert_eq!(offset_of!(MemAllocationProp, alloc_flags), 24);
        assert_eq!(offset_of!(AllocFlags, usage), 2);
        assert_eq!(offset_of!(AllocFlags, reserved), 4);
        assert_eq!(size_of::<MemAccessDesc>(), 12);
        assert_eq!(offset_of!(MemAccessDesc, flags), 8);
    }

    #[test]
    fn structs_agree_with_generated_bindings() {
        macro_rules! same_layout {
            ($ours:ty, $theirs:ty, $($our_field:ident = $their_field:ident),*) => {
                assert_eq!(size_of::<$ours>(), size_of::<$theirs>());
                assert_eq!(align_of::<$ours>(), align_of::<$theirs>());
                $(assert_eq!(offset_of!($ours, $our_field), offset_of!($theirs, $their_field));)*
            };
        }
        same_layout!(MemLocation, sys::CUmemLocation, kind = type_, id = id);
        same_layout!(
            AllocFlags,
            sys::CUmemAllocationProp_st__bindgen_ty_1,
            compression_type = compressionType,
            gpu_direct_rdma_capable = gpuDirectRDMACapable,
            usage = usage,
            reserved = reserved
        );
        same_layout!(
            MemAllocationProp,
            sys::CUmemAllocationProp,
            kind = type_,
            requested_handle_types = requestedHandleTypes,
            location = location,
            win32_handle_meta_data = win32HandleMetaData,
            alloc_flags = allocFlags
        );
        same_layout!(MemAccessDesc, sys::CUmemAccessDesc, location = location, flags = flags);
        same_layout!(
            BatchMemOpNodeParams,
            sys::CUDA_BATCH_MEM_OP_NODE_PARAMS,
            context = ctx,
            count = count,
            operations = paramArray,
            flags = flags
        );
        assert_eq!(size_of::<BatchMemOp>(), size_of::<sys::CUstreamBatchMemOpParams>());
        type Wait = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
        type Write = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        for theirs in [
            [offset_of!(Wait, address), offset_of!(Wait, __bindgen_anon_1), offset_of!(Wait, flags)],
            [offset_of!(Write, address), offset_of!(Write, __bindgen_anon_1), offset_of!(Write, flags)],
        ] {
            let ours = [offset_of!(BatchMemOp, address), offset_of!(BatchMemOp, value), offset_of!(BatchMemOp, flags)];
            assert_eq!(ours, theirs);
        }
        assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcEventHandle>());
        assert_eq!(align_of::<IpcHandle>(), align_of::<sys::CUipcEventHandle>());
        assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcMemHandle>());
        assert_eq!(align_of::<IpcHandle>(), align_of::<sys::CUipcMemHandle>());
        assert_eq!(size_of::<RawUuid>(), size_of::<sys::CUuuid>());
        assert_eq!(size_of::<DevicePtr>(), size_of::<sys::CUdeviceptr>());
        assert_eq!(size_of::<AllocationHandle>(), size_of::<sys::CUmemGenericAllocationHandle>());
        assert_eq!(size_of::<Handle>(), size_of::<sys::CUstream>());
    }

    #[test]
    fn constants_agree_with_generated_bindings() {
        use sys::{
            CUdevice_attribute as Attribute, CUipcMem_flags as IpcMem, CUmemAccess_flags as MemAccess,
            CUmemorytype as MemoryType, CUpointer_attribute as PointerAttribute, CUstreamCaptureMode as Mode,
            CUstreamCaptureStatus as Status,
        };
        let pairs: &[(u32, u32)] = &[
            (MEM_ALLOCATION_TYPE_PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
            (MEM_LOCATION_TYPE_DEVICE, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32),
            (MEM_LOCATION_TYPE_HOST_NUMA, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA as u32),
            (
                MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
            ),
            (
                MEM_ALLOC_GRANULARITY_MINIMUM,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32,
            ),
            (MEM_ACCESS_FLAGS_PROT_READ, MemAccess::CU_MEM_ACCESS_FLAGS_PROT_READ as u32),
            (MEM_ACCESS_FLAGS_PROT_READWRITE, MemAccess::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32),
            (MEMHOSTALLOC_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE),
            (MEMHOSTREGISTER_PORTABLE, sys::CU_MEMHOSTREGISTER_PORTABLE),
            (MEMHOSTREGISTER_DEVICEMAP, sys::CU_MEMHOSTREGISTER_DEVICEMAP),
            (MEMHOSTREGISTER_READ_ONLY, sys::CU_MEMHOSTREGISTER_READ_ONLY),
            (IPC_MEM_LAZY_ENABLE_PEER_ACCESS, IpcMem::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32),
            (MEM_ATTACH_GLOBAL, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32),
            (LIMIT_STACK_SIZE, sys::CUlimit::CU_LIMIT_STACK_SIZE as u32),
            (MEMORYTYPE_HOST, MemoryType::CU_MEMORYTYPE_HOST as u32),
            (MEMORYTYPE_DEVICE, MemoryType::CU_MEMORYTYPE_DEVICE as u32),
            (POINTER_ATTRIBUTE_MEMORY_TYPE, PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32),
            (POINTER_ATTRIBUTE_BUFFER_ID, PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32),
            (POINTER_ATTRIBUTE_IS_MANAGED, PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32),
            (POINTER_ATTRIBUTE_DEVICE_ORDINAL, PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32),
            (
                POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                PointerAttribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32,
            ),
            (POINTER_ATTRIBUTE_RANGE_START_ADDR, PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as u32),
            (POINTER_ATTRIBUTE_RANGE_SIZE, PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32),
            (
                POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                PointerAttribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as u32,
            ),
            (POINTER_ATTRIBUTE_MEMPOOL_HANDLE, PointerAttribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32),
            (STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
            (STREAM_CAPTURE_MODE_RELAXED, Mode::CU_STREAM_CAPTURE_MODE_RELAXED as u32),
            (STREAM_CAPTURE_MODE_THREAD_LOCAL, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32),
            (STREAM_CAPTURE_STATUS_ACTIVE, Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32),
            (
                STREAM_SET_CAPTURE_DEPENDENCIES,
                sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32,
            ),
            (BATCH_MEM_OP_WAIT_64, sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32),
            (BATCH_MEM_OP_WRITE_64, sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32),
            (STREAM_CAPTURE_STATUS_NONE, Status::CU_STREAM_CAPTURE_STATUS_NONE as u32),
            (STREAM_WAIT_VALUE_GEQ, sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32),
            (STREAM_WRITE_VALUE_DEFAULT, sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32),
            (EVENT_DEFAULT, sys::CUevent_flags::CU_EVENT_DEFAULT as u32),
            (EVENT_DISABLE_TIMING, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
            (EVENT_INTERPROCESS, sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32),
            (EVENT_WAIT_DEFAULT, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32),
            (
                P2P_ATTRIBUTE_PERFORMANCE_RANK,
                sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK as u32,
            ),
            (DeviceAttribute::INTEGRATED.0, Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED as u32),
            (
                DeviceAttribute::CAN_USE_64_BIT_STREAM_MEM_OPS.0,
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as u32,
            ),
            (DeviceAttribute::IPC_EVENT_SUPPORTED.0, Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED as u32),
            (DeviceAttribute::MPS_ENABLED.0, Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED as u32),
            (DeviceAttribute::HOST_NUMA_ID.0, Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as u32),
            (DeviceAttribute::MULTIPROCESSOR_COUNT.0, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32),
            (DeviceAttribute::COMPUTE_MODE.0, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE as u32),
            (
                DeviceAttribute::COMPUTE_CAPABILITY_MAJOR.0,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as u32,
            ),
            (
                DeviceAttribute::COMPUTE_CAPABILITY_MINOR.0,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as u32,
            ),
            (
                DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED.0,
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as u32,
            ),
            (
                DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED.0,
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as u32,
            ),
            (crate::ComputeMode::DEFAULT.0, sys::CUcomputemode::CU_COMPUTEMODE_DEFAULT as u32),
            (crate::ComputeMode::PROHIBITED.0, sys::CUcomputemode::CU_COMPUTEMODE_PROHIBITED as u32),
            (crate::ComputeMode::EXCLUSIVE_PROCESS.0, sys::CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as u32),
            (crate::RawStream::LEGACY_DEFAULT.0 as u32, 1),
            (crate::RawStream::PER_THREAD_DEFAULT.0 as u32, 2),
        ];
        for (index, (ours, theirs)) in pairs.iter().enumerate() {
            assert_eq!(ours, theirs, "pair {index}");
        }
    }

    #[test]
    fn result_names_agree_with_generated_bindings() {
        use sys::CUresult::*;
        let theirs = [
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_DEINITIALIZED,
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_MAP_FAILED,
            CUDA_ERROR_ALREADY_MAPPED,
            CUDA_ERROR_ECC_UNCORRECTABLE,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
            CUDA_ERROR_OPERATING_SYSTEM,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_TIMEOUT,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUDA_ERROR_MISALIGNED_ADDRESS,
            CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUDA_ERROR_INVALID_PC,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_NOT_PERMITTED,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_UNKNOWN,
        ];
        for their in theirs {
            assert_eq!(CuResult(their as u32).name(), Some(format!("{their:?}").as_str()));
        }
    }
}
