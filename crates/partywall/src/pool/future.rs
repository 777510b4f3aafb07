//! Pools in asynchronous programs.

use std::os::fd::OwnedFd;

use partywall_wire::{Access, Opened};

use super::{Block, Pool, PoolOptions, Wanted};
use crate::{domain::blocking, error::Result, slots};

impl Pool {
    /// Takes a block as [`alloc`](Self::alloc) does, waiting for one without blocking a thread. The task has its place
    /// in the same queue as the threads of all processes. Needs the runtime of tokio.
    ///
    /// The future may be dropped at any time: it then leaves the queue, and a block that was just granted to it goes to
    /// the next waiter. A [zeroed](PoolOptions::zeroed) block is zeroed on a thread for blocking code.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc), except [`Error::Timeout`](crate::Error::Timeout); [`Error::Cancelled`](crate::Error::Cancelled) if the runtime ends.
    pub async fn alloc_async(&self) -> Result<Block> {
        let blocks = &self.blocks;
        blocks.check()?;
        let live = || blocks.require_live();
        let held = loop {
            if let Some(held) = slots::take_async(blocks.control(), blocks.domain(), live, None).await? {
                break held;
            }
        };
        let block = self.block(held);
        if self.is_zeroed() { blocking(move || block.zeroed()).await } else { Ok(block) }
    }
}

impl PoolOptions {
    /// Opens the pool as [`open`](Self::open) does, but waits for one that does not exist yet, for as long as the future
    /// is polled, without blocking a thread; needs the runtime of tokio. The [timeout](Self::timeout) has no effect.
    ///
    /// The future may be dropped at any time.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Cancelled`](crate::Error::Cancelled) if the runtime ends.
    pub async fn open_async(&self) -> Result<Pool> {
        let options = self.clone();
        let open = move |opened, fds| options.wanted.attach(opened, fds, |control| options.check(control));
        self.wanted.open_async(open).await.map(Pool::new)
    }
}

impl Wanted {
    /// Waits for the object, and has `open` map it on a thread that may block.
    pub(crate) async fn open_async<T: Send + 'static>(
        &self,
        open: impl FnOnce(Opened, Vec<OwnedFd>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.domain.open_version(&self.name, None, Access::Read, open).await
    }
}
