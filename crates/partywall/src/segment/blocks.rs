//! Access to the blocks of a pool or topic, which are the first tensor of a segment, in its first chunk.

use std::sync::Arc;

use partywall_os::borrow::BlockBorrows;

use super::Segment;
use crate::{
    domain::LeaseGuard,
    error::{Error, Result},
    gpu::DeviceRange,
    kind::wrong_kind,
};

impl Segment {
    /// Returns offset and length of the first tensor; `None` if it is not in the first chunk.
    pub(crate) fn first_tensor(&self) -> Option<(u64, u64)> {
        let first = *self.stage().table.in_given_order().first()?;
        (first.chunk() == 0).then(|| (first.offset(), first.bytes()))
    }

    /// Returns whether this is this process's own memory that others open, which must stay until its lease is given back.
    pub(crate) fn is_published(&self) -> bool {
        self.memory().is_published()
    }

    /// Takes the lease, which the segment then does not give back any more.
    pub(crate) fn take_lease(&mut self) -> Option<Arc<LeaseGuard>> {
        self.lease.take().map(|lease| Arc::new(self.domain.keep(lease)))
    }

    /// Divides its host memory into `count` blocks of `bytes` bytes, to be borrowed one by one. Returns `None` on a GPU.
    pub(crate) fn block_borrows(&self, offset: u64, stride: u64, bytes: u64, count: u32) -> Option<BlockBorrows> {
        self.memory().block_borrows(offset, stride, bytes, count)
    }

    /// Returns the error that host memory was asked of a segment on a GPU.
    pub(crate) fn is_on_gpu(&self) -> Error {
        self.named(wrong_kind("GPU", "host", "a slice"))
    }

    /// Returns part of the memory on its GPU.
    pub(crate) fn device_range(&self, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.memory().device(0, offset, bytes).map_err(|e| self.named(e))
    }
}
