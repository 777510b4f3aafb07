//! Tensors for programs that know nothing of Partywall, by the driver's handles.

use partywall_cuda::IpcMemoryHandle;

use crate::gpu::Gpu;

/// A tensor in memory that this process has [published](crate::Domain::publish), for programs that open memory by a
/// 64-byte handle (`cudaIpcMemHandle_t`), such as inference servers. [`Tensor::ipc_handle`](crate::Tensor::ipc_handle)
/// returns it.
///
/// The handle names a whole allocation, which the other program maps, with rights to write. The tensor is
/// [`bytes`](Self::bytes) bytes from [`offset`](Self::offset) on. The process that publishes cannot open the handle.
///
/// **Lifetime.** The broker does not know who has opened the handle. The memory stays as long as the segment, which this
/// borrows. Have the other program close the handle before the segment is dropped: the allocator may then use the
/// memory for other tensors, which the other program would see. If the memory is freed, a handle that is kept can open
/// memory that is allocated later, without an error (measured on an H200, driver 580). If this process dies, what the
/// other program has open stays readable.
///
/// **Order.** `commit` has waited for this process's work. For what it writes later, synchronize its streams before the
/// other program is told.
///
/// ```no_run
/// # fn register(published: &partywall::Segment) -> partywall::Result<()> {
/// // `published` is what `Domain::publish` has committed.
/// let tensor = published.tensor("x")?.ipc_handle()?;
/// let handle: [u8; 64] = tensor.handle().0;
/// println!("bytes {} to {} of the allocation", tensor.offset(), tensor.end());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct IpcHandle<'a> {
    pub(super) handle: IpcMemoryHandle,
    pub(super) gpu: &'a Gpu,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl<'a> IpcHandle<'a> {
    /// Returns the handle of the allocation.
    pub fn handle(&self) -> IpcMemoryHandle {
        self.handle
    }

    /// Returns the GPU that has the memory. The other program may number it differently: compare UUIDs.
    pub fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// Returns where the tensor begins in the allocation, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of bytes from the first element to the end of the last.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns where the tensor ends in the allocation, in bytes: the size of the smallest region that contains it.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}
