//! All functions of the simulated driver, under their names in `cuda.h` and with its signatures.

use std::ffi::{CStr, c_void};
use std::ptr;

/// Generates the exports, [`find`] and [`for_each_function`](crate::for_each_function) from one list.
macro_rules! list {
    ($($($module:ident)::+ { $($function:ident)* })*) => {
        $(pub use crate::$($module)::+::{$($function),*};)*
        /// Returns the address of the function with this name, or null. Its signature is that of `cuda.h`.
        pub fn find(name: &CStr) -> *const c_void {
            match name.to_str() {
                $($(Ok(stringify!($function)) => $function as *const c_void,)*)*
                _ => ptr::null(),
            }
        }
        /// Calls a macro with the names of all functions, separated by blanks.
        #[macro_export]
        macro_rules! for_each_function {
            ($then:ident) => { $then! { $($($function)*)* } };
        }
    };
}

list! {
    capture {
        cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamGetCaptureInfo_v3 cuStreamIsCapturing
        cuStreamUpdateCaptureDependencies_v2 cuThreadExchangeStreamCaptureMode
    }
    context {
        cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetCurrent cuCtxGetDevice cuCtxPopCurrent_v2
        cuCtxPushCurrent_v2 cuCtxSetCurrent
    }
    copy {
        cuMemcpy cuMemcpyAsync cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2
        cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeerAsync cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async
        cuMemsetD8_v2
    }
    device {
        cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId cuDeviceGetCount
        cuDeviceGetName cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetUuid_v2 cuDeviceTotalMem_v2
        cuDriverGetVersion cuGetErrorName cuGetErrorString cuInit
    }
    entry {
        simcuda_version
    }
    event {
        cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize
        cuIpcGetEventHandle cuIpcOpenEventHandle cuStreamWaitEvent
    }
    graph {
        cuGraphAddBatchMemOpNode cuGraphDestroy cuGraphExecBatchMemOpNodeSetParams cuGraphExecDestroy
        cuGraphInstantiateWithFlags cuGraphLaunch cuGraphNodeGetDependencies_v2
    }
    memop {
        cuStreamBatchMemOp cuStreamBatchMemOp_v2 cuStreamWaitValue32 cuStreamWaitValue32_v2
        cuStreamWaitValue64 cuStreamWaitValue64_v2 cuStreamWriteValue32 cuStreamWriteValue32_v2
        cuStreamWriteValue64 cuStreamWriteValue64_v2
    }
    memory::host {
        cuMemAllocHost_v2 cuMemAllocManaged cuMemFreeHost cuMemHostAlloc cuMemHostGetDevicePointer_v2
        cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister
    }
    memory::legacy {
        cuIpcCloseMemHandle cuIpcGetMemHandle cuIpcOpenMemHandle_v2
    }
    memory::mapping {
        cuMemAddressFree cuMemAddressReserve cuMemGetAccess cuMemMap cuMemSetAccess cuMemUnmap
    }
    memory::physical {
        cuMemCreate cuMemExportToShareableHandle cuMemGetAllocationGranularity
        cuMemGetAllocationPropertiesFromHandle cuMemImportFromShareableHandle cuMemRelease
        cuMemRetainAllocationHandle
    }
    memory::plain {
        cuMemAlloc_v2 cuMemFree_v2 cuMemGetInfo_v2
    }
    memory::pointer {
        cuMemGetAddressRange_v2 cuPointerGetAttribute cuPointerGetAttributes
    }
    memory::pool {
        cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync
        cuMemPoolCreate cuMemPoolDestroy
    }
    module {
        cuLaunchHostFunc cuLaunchKernel cuModuleGetFunction cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
    }
    primary {
        cuCtxGetLimit cuCtxSynchronize cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain
    }
    stream {
        cuCtxGetStreamPriorityRange cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetCtx
        cuStreamGetFlags cuStreamGetId cuStreamGetPriority cuStreamQuery cuStreamSynchronize
    }
}
