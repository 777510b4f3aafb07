//! Permits of a semaphore.

use std::sync::Arc;

use partywall_cuda::StreamRef;
use partywall_shm::slots::HeldSlot;

use super::OpenSemaphore;
use crate::{
    completion::Completion,
    error::{Error, Failed, Gone, Result},
};

/// A permit of a [`Semaphore`](super::Semaphore). Dropping it releases it. In a forked child it belongs to the parent,
/// and dropping it does nothing.
#[derive(Debug)]
#[must_use = "a permit is given back when it is dropped"]
pub struct Permit {
    open: Arc<OpenSemaphore>,
    /// `None` once the permit is released, or belongs to a stream.
    held: Option<HeldSlot>,
}

impl Permit {
    pub(super) fn new(open: Arc<OpenSemaphore>, held: HeldSlot) -> Self {
        Self { open, held: Some(held) }
    }

    /// Releases the permit.
    ///
    /// # Errors
    /// [`Gone::Permit`] if the permit was no longer held: the broker took this process for dead and freed the permit.
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release(mut self) -> Result<()> {
        self.give_back()
    }

    /// Releases the permit once all work that is on `stream` now is done. Returns immediately.
    ///
    /// The stream writes a word behind its work, which the connection's service thread polls with pauses of up to 1 ms.
    /// If the process is killed before, the permit is free when its death is proved. If its CUDA context is lost, it is
    /// unknown whether the work is over, and the permit is free when the process ends.
    ///
    /// # Errors
    /// The error contains the permit, still held: [`DeviceFault::Captured`](crate::error::DeviceFault::Captured),
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda);
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn release_on(mut self, stream: StreamRef<'_>) -> Result<(), Failed<Self>> {
        let OpenSemaphore { name, memory, keep, domain } = &*self.open;
        let fence = match domain.fence_on(stream, || format!("giving a permit of semaphore {name:?} to a stream")) {
            Ok(fence) => fence,
            Err(error) => return Err(Failed::new(error, self)),
        };
        let Some(held) = self.held.take() else { return Ok(()) };
        let memory = memory.clone();
        // Without the lease the broker would give the permit to others immediately.
        let keep = keep.clone();
        domain.completions().on(fence, move |completion| {
            if completion == Completion::Done {
                _ = memory.free(&held);
            }
            drop(keep);
        });
        Ok(())
    }

    /// Returns the semaphore's name.
    pub fn semaphore(&self) -> &str {
        &self.open.name
    }

    fn give_back(&mut self) -> Result<()> {
        let Some(held) = self.held.take() else { return Ok(()) };
        self.open.domain.link().require_ours()?;
        self.open.memory.free(&held).map_err(|_| Gone::Permit { name: self.open.name.clone() }.into())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Err(error @ Error::Gone(Gone::Permit { .. })) = self.give_back() {
            tracing::warn!(%error, "a dropped permit was no longer held");
        }
    }
}
