//! Suspending: a segment gives up its memory for a while, and gets it back at the same addresses.
//!
//! A process that has memory of others mapped cannot be checkpointed (`cuCheckpointProcess*`): the driver refuses to
//! restore it (measured, driver 580). One that keeps only the addresses reserved can. So a suspended segment has its
//! lease, its table and its addresses, and neither a mapping nor an allocation nor a descriptor. Resuming asks the broker
//! for the descriptors again. What the process created itself comes back as an import: otherwise a
//! restored process would have a copy of its own, which nobody else sees (measured).
//!
//! A kill at any point leaves a lease that ends with the process.

use partywall_cuda::{CudaError, shared_allocations};
use partywall_wire::{Answer, Call, Grown, Kind as WireKind};

use super::{NotMapped, Segment, blocks::is_capturing, named};
use crate::{
    domain::answered,
    error::{Busy, DeviceFault, Error, LimitReached, Result, Unreachable},
    gpu::failed_call,
    kind::wrong_kind,
};

impl Segment {
    /// Unmaps the memory, and gives up what this process has of it, until [`resume`](Self::resume). The lease stays, so
    /// the version lives on, and so do the addresses: nothing else is mapped there. Waits for all work of this process
    /// on the GPU first.
    ///
    /// Meanwhile work that uses the addresses faults, on the GPU and in pinned memory on the CPU, too; views of tensors
    /// fail with [`DeviceFault::Suspended`]. Host memory stays mapped, because no driver has a part in it. Suspending a
    /// suspended segment changes nothing.
    ///
    /// With all segments of a process suspended, and neither pools nor topics of GPU or pinned memory open, the process
    /// can be checkpointed and restored. [`check_suspended`] checks that. No thread may ask for a stream or an event
    /// during a checkpoint, or wait for one: the driver does not hold such calls up, and the process ends (measured,
    /// driver 580).
    ///
    /// ```no_run
    /// # use partywall::{Result, Segment, check_suspended};
    /// # fn checkpoint() {}
    /// # fn around(weights: &mut Segment) -> Result<()> {
    /// let address = weights.tensor("w")?.device()?.device_ptr();
    /// weights.suspend()?;
    /// check_suspended()?;
    /// checkpoint(); // such as cuCheckpointProcessCheckpoint and -Restore, by another process
    /// weights.resume()?;
    /// assert_eq!(weights.tensor("w")?.device()?.device_ptr(), address);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Each but the last leaves the segment as it was: [`Mismatch::Kind`](crate::error::Mismatch::Kind) for `legacy` and
    /// `live` memory, whose addresses the driver or an allocator chooses; [`DeviceFault::Captured`] if the driver does
    /// not wait for all work because a stream is being captured into a graph; [`DeviceFault::Cuda`],
    /// [`DeviceFault::ContextLost`]; [`DeviceFault::NotMapped`] if the driver does not unmap the memory.
    pub fn suspend(&mut self) -> Result<()> {
        if self.kind.wire() == WireKind::Host {
            return Ok(());
        }
        // A stale segment may be suspended, as its tensors stay usable.
        if let Some(why) = self.not_mapped.as_deref().filter(|why| matches!(why, NotMapped::Lost(_))) {
            return Err(self.unmapped(why));
        }
        let what = format!("suspending {:?}", self.facts.name);
        let memory = self.memory.as_deref_mut().expect(HAS_MEMORY);
        memory.settle().map_err(|error| match is_capturing(&error) {
            true => DeviceFault::Captured { what: what.clone() }.into(),
            false => failed_call(&what, error),
        })?;
        let Some(vacated) = memory.vacate() else {
            return Err(named(wrong_kind(self.kind(), "vmm, pinned or host", "suspending"), self.name()));
        };
        vacated.map_err(|error| self.lose(error))?;
        self.not_mapped = Some(NotMapped::Suspended.into());
        Ok(())
    }

    /// Maps the memory of the same version again, at the addresses that it had, after [`suspend`](Self::suspend). Does
    /// nothing if the segment is not suspended.
    ///
    /// # Errors
    /// Each leaves the segment suspended: [`DeviceFault::Cuda`]; [`LimitReached::FileDescriptors`]; those of every call,
    /// such as that the broker has lost this process meanwhile.
    pub fn resume(&mut self) -> Result<()> {
        if !self.is_suspended() {
            return Ok(());
        }
        let Some(lease) = self.lease else { return Ok(()) };
        let growths = self.stage().growths;
        let known = &self.stage().chunks;
        // Tensors without bytes need no chunk.
        if !known.is_empty() {
            let (answer, fds) = self.domain.link().call_with(Call::Refresh { lease, growths, chunks: 0 }, &[])?;
            let Grown { chunks, .. } = answered!(answer, Answer::Grown(grown) => grown)?;
            if fds.len() < known.len() {
                return Err(LimitReached::FileDescriptors(format!("the chunks of {:?}", self.name())).into());
            }
            // It may have grown meanwhile, which a refresh finds.
            if !chunks.starts_with(known) {
                return Err(Unreachable::protocol("the chunks of a version have other lengths"));
            }
            let chunks: Vec<_> = chunks.into_iter().zip(fds).take(known.len()).collect();
            let memory = self.memory.as_deref_mut().expect(HAS_MEMORY);
            memory.refill(&chunks).map_err(|error| named(error, &self.facts.name))?;
        }
        self.not_mapped = None;
        Ok(())
    }

    /// Returns whether the segment is [suspended](Self::suspend).
    pub fn is_suspended(&self) -> bool {
        self.not_mapped.as_deref().is_some_and(|why| matches!(why, NotMapped::Suspended))
    }

    /// Records that the memory is not mapped any more, and returns that as an error.
    pub(super) fn lose(&mut self, source: CudaError) -> Error {
        let why = Box::new(NotMapped::Lost(source));
        let error = self.unmapped(&why);
        self.not_mapped = Some(why);
        error
    }

    /// Returns the error that the memory is not mapped.
    pub(super) fn unmapped(&self, why: &NotMapped) -> Error {
        let (name, version) = (self.name().to_owned(), self.version());
        match why {
            NotMapped::Suspended => DeviceFault::Suspended { name, version }.into(),
            NotMapped::Lost(source) => DeviceFault::NotMapped { name, version, source: source.clone() }.into(),
        }
    }
}

/// Checks that this process holds no memory of a GPU and no pinned memory that it can share with others: the condition
/// for a checkpoint of the process. Memory that it did not get, make or publish through this library is not known.
///
/// # Errors
/// [`Busy::StillShared`].
pub fn check_suspended() -> Result<()> {
    match shared_allocations() {
        0 => Ok(()),
        allocations => Err(Busy::StillShared { allocations }.into()),
    }
}

const HAS_MEMORY: &str = "a segment has its memory until it is closed";
