//! Memory of `cuMemAlloc` in another process, by 64-byte handle: the older of the driver's two ways of sharing.
#![allow(unsafe_code)] // driver calls

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use partywall_os::per_process::PerProcess;

use crate::abi::{DevicePtr, IPC_MEM_LAZY_ENABLE_PEER_ACCESS, IpcHandle};
use crate::allocation::Counted;
use crate::{Access, AccessError, Context, CuResult, CudaError, DeviceSlice, pointer};

/// What another process needs to open an allocation of `cuMemAlloc` (`CUipcMemHandle`): 64 bytes that only the driver
/// reads.
///
/// It names the whole allocation, so the offset of anything inside it must travel beside it. It is no identity: the
/// same bytes may come again for a later allocation (field reports). It keeps nothing alive: with the process that made
/// it, or the allocation, it becomes void.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcMemoryHandle(pub [u8; 64]);

impl IpcMemoryHandle {
    /// Returns the handle of the allocation that begins at `base`. Making it is cheap and may be done many times.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an address that is not in memory of `cuMemAlloc`: pool, VMM, managed and host
    /// memory have no handle (measured). [`PointerInfo`](crate::PointerInfo) names the kind.
    pub fn of(context: &Context, base: u64) -> Result<Self, CudaError> {
        let _guard = context.guard()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: the pointer is to a live handle; the address is looked up, not followed.
        unsafe { context.driver().ipc_get_mem_handle(&mut handle, base) }
            .map_err(|error| error.with_context(format!("address {base:#x}")))?;
        Ok(Self(handle.0))
    }
}

impl fmt::Debug for IpcMemoryHandle {
    /// Formats only the first bytes, which are enough to distinguish two handles in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "IpcMemoryHandle({a:02x}{b:02x}{c:02x}{d:02x}…)")
    }
}

/// An allocation of another process, opened by its handle.
///
/// A second mapping of the same handle in a process shares the first by count, and the last one that is dropped closes
/// it; a failure of that goes to [`Context::take_drop_error`]. The mapping stays readable when its exporter dies
/// (measured). If the exporter *frees* the memory while it is open, the vendor calls the behaviour undefined.
///
/// The hardware would let this process write, whatever `access` says: here read-only is only what this crate's own
/// copies and kernels are held to. Neighbours of a small allocation in the same 2 MiB block become readable with it
/// (vendor's documentation).
///
/// Dropping the last one waits for all that this process runs in the context: work that is still running on what is
/// closed would fault. So do not drop it behind a wait for another process. `Send` and `Sync`.
pub struct IpcMapping {
    open: Arc<OpenHandle>,
    bytes: u64,
    access: Access,
}

impl IpcMapping {
    /// Opens the allocation for the context's device; `bytes` is the size that the owner stated. The driver reports
    /// the real one, so that a wrong statement is detected here and not by a fault.
    ///
    /// Host-synchronous. Opening costs far more than a copy of a small tensor: keep mappings and open them once.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_CONTEXT` in the process that made the handle, `CUDA_ERROR_INVALID_HANDLE` if that process is
    /// gone (both measured); `CUDA_ERROR_MAP_FAILED` or `CUDA_ERROR_INVALID_VALUE` for bytes that are no handle of
    /// this driver, and `CUDA_ERROR_INVALID_VALUE` if `bytes` is 0 or more than there is; a peer code if the context's
    /// device cannot reach the memory.
    pub fn open(context: &Context, handle: IpcMemoryHandle, bytes: u64, access: Access) -> Result<Self, CudaError> {
        let key = Key { context: context.as_raw(), handle };
        // Held while the driver opens, so that two threads make one mapping. Closing happens outside: the driver
        // counts its opens (measured), so a mapping that is just being closed may be opened again meanwhile.
        let mut registry = REGISTRY.lock();
        let open = match registry.get(&key).and_then(Weak::upgrade) {
            Some(open) => open,
            None => {
                let open = Arc::new(OpenHandle::new(context, handle)?);
                registry.retain(|_, open| open.strong_count() > 0);
                registry.insert(key, Arc::downgrade(&open));
                open
            }
        };
        drop(registry);
        if bytes == 0 || bytes > open.bytes {
            let sizes = format!("the owner states {bytes} bytes of memory, but the driver reports {}", open.bytes);
            return Err(CudaError::new(OPEN, CuResult::INVALID_VALUE).with_context(sizes));
        }
        Ok(Self { open, bytes, access })
    }

    /// Returns a checked range of the memory.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<DeviceSlice<'_>, AccessError> {
        self.as_slice().slice(offset, len)
    }

    /// Returns the whole memory as a range.
    #[must_use]
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        // SAFETY: the allocation is mapped, with no fewer bytes, while `self` is borrowed.
        unsafe { DeviceSlice::from_raw(self.open.pointer, self.bytes, self.access) }
    }

    /// Returns the first address, valid on the device while the mapping lives.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.open.pointer
    }

    /// Returns the size in bytes that the owner stated.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns false: memory always has bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the access that this crate's copies and kernels have.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the context in which the memory is open.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.open.context
    }
}

impl fmt::Debug for IpcMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpcMapping")
            .field("device_ptr", &format_args!("{:#x}", self.open.pointer))
            .field("bytes", &self.bytes)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

/// One successful `cuIpcOpenMemHandle`.
struct OpenHandle {
    context: Context,
    pointer: DevicePtr,
    bytes: u64,
    _counted: Counted,
}

impl OpenHandle {
    fn new(context: &Context, handle: IpcMemoryHandle) -> Result<Self, CudaError> {
        let _guard = context.guard_relaxed()?;
        let mut pointer = 0;
        // SAFETY: the pointer is to a live address; any 64 bytes may be offered, the driver refuses what it did not
        // make. The flag is the only one there is, and must be given.
        unsafe {
            context.driver().ipc_open_mem_handle(&mut pointer, IpcHandle(handle.0), IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        }
        .map_err(explain)?;
        // From here on dropping it closes.
        let mut open = Self { context: context.clone(), pointer, bytes: 0, _counted: Counted::new() };
        let (base, bytes) = pointer::address_range(context, pointer)?;
        open.bytes = bytes.saturating_sub(pointer - base);
        Ok(open)
    }
}

impl Drop for OpenHandle {
    fn drop(&mut self) {
        self.context.record_drop(self.context.settle());
        self.context.release(|driver| {
            // SAFETY: opened once, closed once.
            unsafe { driver.ipc_close_mem_handle(self.pointer) }
        });
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    context: usize,
    handle: IpcMemoryHandle,
}

/// Returns whether an address lies in something that [`IpcMapping::open`] opened in this process.
pub(crate) fn is_imported(address: u64) -> bool {
    let open: Vec<_> = REGISTRY.lock().values().filter_map(Weak::upgrade).collect();
    open.iter().any(|open| address.checked_sub(open.pointer).is_some_and(|offset| offset < open.bytes))
}

/// The open mappings of this process. Weak references, so that only the mappings own. A forked child has none open:
/// CUDA does not work there.
static REGISTRY: PerProcess<HashMap<Key, Weak<OpenHandle>>> = PerProcess::new();

/// Adds the usual meaning of a refusal to open.
fn explain(error: CudaError) -> CudaError {
    let meaning = match error.code {
        CuResult::INVALID_CONTEXT => {
            "this process made the handle itself, or has the same process id as its maker in another PID namespace: \
             use the pointer that is here already, or memory that travels by file descriptor"
        }
        CuResult::INVALID_HANDLE => "the process that created the handle has ended, or it has freed the memory",
        CuResult::MAP_FAILED => "these bytes name no memory that can be mapped here: the handle is stale or damaged",
        CuResult::INVALID_VALUE => "these bytes are not a handle of this driver, or its GPU is not visible here",
        CuResult::PEER_ACCESS_UNSUPPORTED => "the memory lies on a GPU that this one cannot reach",
        _ => return error,
    };
    error.with_context(meaning)
}

const OPEN: &str = "cuIpcOpenMemHandle";
