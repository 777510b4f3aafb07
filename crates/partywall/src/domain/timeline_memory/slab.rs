//! Mapped slabs of timelines, and references to their cells for hosts and streams.

use std::sync::{Arc, OnceLock};

use partywall_cuda::{Context, DeviceSlice, HostRegistration};
use partywall_shm::timeline::{Cell, Progress, Slab, cell_offset};

use crate::{
    error::{Error, Result, Unreachable},
    gpu::cuda_error,
};

/// A slab that is mapped in this process.
#[derive(Debug)]
pub(crate) struct MappedSlab {
    slab: Slab,
    registration: OnceLock<HostRegistration>,
}

/// A reference to a cell. It keeps only the mapping alive, so any thread may drop it.
#[derive(Debug, Clone)]
pub(crate) struct CellRef {
    slab: Slab,
    index: u32,
}

impl MappedSlab {
    pub(super) fn new(slab: Slab) -> Self {
        Self { slab, registration: OnceLock::new() }
    }

    /// Registers the slab with CUDA, if needed. Called by one thread at a time.
    pub(super) fn register(&self, context: &Context) -> Result<()> {
        self.register_checked(context, Ok)
    }

    /// Registers the slab as [`register`](Self::register) does, if `check` accepts the registration.
    pub(super) fn register_checked(
        &self,
        context: &Context,
        check: impl FnOnce(HostRegistration) -> Result<HostRegistration>,
    ) -> Result<()> {
        if self.registration.get().is_none() {
            let registered = HostRegistration::shared(context, self.slab.memory().clone());
            let registered = registered.map_err(cuda_error("registering the words of timelines with the GPU"))?;
            let _ = self.registration.set(check(registered)?);
        }
        Ok(())
    }

    /// Returns whether streams can use its words.
    pub(super) fn is_registered(&self) -> bool {
        self.registration.get().is_some()
    }

    /// Returns whether nothing but the list of slabs has it, and no stream can use its words. The list is locked for
    /// writing.
    pub(super) fn is_unused(self: &Arc<Self>) -> bool {
        !self.is_registered() && Arc::strong_count(self) == 1 && Arc::strong_count(self.slab.memory()) == 1
    }

    pub(super) fn cell(&self, index: u32) -> Option<CellRef> {
        self.slab.cell(index).is_some().then(|| CellRef { slab: self.slab.clone(), index })
    }

    /// Returns the word of a cell, for use by streams.
    ///
    /// # Errors
    /// Before [`TimelineMemory::prepare`](super::TimelineMemory::prepare) no stream can have it.
    pub(crate) fn word(&self, cell: &CellRef) -> Result<DeviceSlice<'_>> {
        let offset = cell_offset(cell.index) as u64;
        let word = self.registration.get().and_then(|all| all.slice(offset, size_of::<u64>() as u64).ok());
        word.ok_or_else(|| Error::Unreachable(Unreachable::Refused("this word is not registered with a GPU".into())))
    }
}

impl CellRef {
    pub(crate) fn get(&self) -> &Cell {
        // Only `MappedSlab::cell` makes these, and the number of cells of a slab does not change.
        self.slab.cell(self.index).expect("the cell is in its slab")
    }

    /// Returns whether both are the same cell.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.index == other.index && Arc::ptr_eq(self.slab.memory(), other.slab.memory())
    }

    /// Returns the cell's index in its slab.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Returns whether it is still open if `v` will be reached.
    pub(crate) fn is_undecided(&self, v: u64) -> bool {
        matches!(self.get().progress(v), Progress::Pending | Progress::Announced)
    }
}

#[cfg(test)]
impl CellRef {
    /// Creates a cell that only this process uses.
    pub(super) fn of_tests() -> Self {
        Self { slab: Slab::create().and_then(Slab::map).expect("a memfd can be had"), index: 0 }
    }
}
