//! What pools need of the segment that has their blocks, which are its first tensor, in its first chunk.

use std::sync::Arc;

use partywall_os::lent::{Lent, LentMut};

use super::Segment;
use crate::{domain::Keep, error::Result, gpu::DeviceRange};

impl Segment {
    /// Where its first tensor begins and how long it is; `None` if it is not in the first chunk.
    pub(crate) fn first_tensor(&self) -> Option<(u64, u64)> {
        let first = *self.stage().table.in_given_order().first()?;
        (first.chunk() == 0).then(|| (first.offset(), first.bytes()))
    }

    /// Whether it is this process's own memory that others open: it must stay until its lease is given back.
    pub(crate) fn is_published(&self) -> bool {
        self.memory().is_published()
    }

    /// Its lease, which is then no longer the segment's to give back.
    pub(crate) fn take_lease(&mut self) -> Option<Arc<Keep>> {
        self.lease.take().map(|lease| Arc::new(self.domain.keep(lease)))
    }

    /// Part of its host memory for reading, while nobody writes it; `None` if somebody in this process does.
    pub(crate) fn lend(&self, offset: u64, bytes: u64) -> Result<Option<Lent>> {
        self.memory().lend(0, offset, bytes).map_err(|e| self.named(e))
    }

    /// Part of its host memory that is the caller's alone; `None` if somebody in this process uses it.
    pub(crate) fn lend_mut(&self, offset: u64, bytes: u64) -> Result<Option<LentMut>> {
        self.memory().lend_mut(0, offset, bytes).map_err(|e| self.named(e))
    }

    /// Part of its memory on its GPU.
    pub(crate) fn device_range(&self, offset: u64, bytes: u64) -> Result<DeviceRange<'_>> {
        self.memory().device(0, offset, bytes).map_err(|e| self.named(e))
    }
}
