//! What is acquired and given back.

use std::sync::Arc;

use partywall_shm::semaphore::Held;

use super::Open;
use crate::error::{Error, Result};

/// A permit of a [`Semaphore`](super::Semaphore). Dropping it gives it back. In a forked child it is the parent's, and
/// dropping it there does nothing.
#[derive(Debug)]
#[must_use = "a permit is given back when it is dropped"]
pub struct Permit {
    open: Arc<Open>,
    /// `None` once it is given back.
    held: Option<Held>,
}

impl Permit {
    pub(super) fn new(open: Arc<Open>, held: Held) -> Self {
        Self { open, held: Some(held) }
    }

    /// Gives it back.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if it was not held any more: the broker gave it to others, because it took this process for dead.
    /// [`Error::Forked`].
    pub fn release(mut self) -> Result<()> {
        self.give_back()
    }

    /// The semaphore's name.
    pub fn semaphore(&self) -> &str {
        &self.open.name
    }

    fn give_back(&mut self) -> Result<()> {
        let Some(held) = self.held.take() else { return Ok(()) };
        self.open.domain.link().require_ours()?;
        if self.open.memory.release(&held) {
            return Ok(());
        }
        Err(Error::NotHeld { name: self.open.name.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Err(error @ Error::NotHeld { .. }) = self.give_back() {
            tracing::warn!(%error, "a permit was given back too late");
        }
    }
}
