//! Semaphores in asynchronous programs.

use super::{Permit, Semaphore};
use crate::{error::Result, slots};

impl Semaphore {
    /// Takes a permit, waiting for one without blocking a thread if none is free. The task has its place in the same
    /// queue as the threads of all processes, and keeps it until the future is complete or dropped. Needs the runtime of
    /// tokio.
    ///
    /// The future may be dropped at any time: it then leaves the queue, and a permit that was just granted to it goes to
    /// the next waiter. A permit is noticed within a millisecond or so. A task that its executor does not poll for a
    /// second loses its turn, as a stopped process does, and queues again.
    ///
    /// ```no_run
    /// # async fn acquire(domain: &partywall::Domain) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let seats = domain.semaphore("encoder", 2)?;
    /// let permit = tokio::time::timeout(Duration::from_secs(60), seats.acquire_async()).await??;
    /// // … encode …
    /// drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), except [`Error::Timeout`](crate::Error::Timeout); [`Error::Cancelled`](crate::Error::Cancelled) if the runtime ends.
    pub async fn acquire_async(&self) -> Result<Permit> {
        let domain = self.domain();
        let live = || domain.link().require_broker();
        loop {
            if let Some(held) = slots::take_async(&self.open.memory, domain, live, None).await? {
                return Ok(self.permit(held));
            }
        }
    }
}
