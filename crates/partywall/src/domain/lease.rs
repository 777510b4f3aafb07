//! Leases: objects that the broker keeps for this process until the lease is given back.

use std::sync::Arc;

use partywall_wire::{Answer, Call, LeaseId};

use super::link::Link;
use crate::{completion::Worker, error::Result};

/// A lease, which is given back to the broker when the last owner of this guard is dropped.
#[derive(Debug)]
pub(crate) struct LeaseGuard {
    /// `None` once the lease is given back.
    lease: Option<LeaseId>,
    link: Arc<Link>,
    /// The [broker worker](crate::completion::Workers::broker).
    worker: Arc<Worker>,
}

impl LeaseGuard {
    pub(crate) fn new(lease: LeaseId, link: Arc<Link>, worker: Arc<Worker>) -> Self {
        Self { lease: Some(lease), link, worker }
    }

    /// Returns the number of the lease; 0 once it is given back, which only the last owner sees.
    pub(crate) fn lease(&self) -> LeaseId {
        self.lease.unwrap_or(LeaseId(0))
    }

    /// Gives the lease back immediately if this is the last owner. Unlike dropping, this waits for the broker.
    pub(crate) fn release(self: Arc<Self>) {
        if let Some(mut guard) = Arc::into_inner(self) {
            guard.give_back(|link, call| log(link.call(call)));
        }
    }

    fn give_back(&mut self, how: impl FnOnce(&Arc<Link>, Call)) {
        let Some(lease) = self.lease.take() else { return };
        // In a forked child the lease belongs to the parent. Leaving the domain gives back all leases.
        if self.link.require_ours().is_ok() && !self.link.is_leaving() {
            how(&self.link, Call::Release { lease });
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        // Done by the worker, because the dropping thread may be one that must not block.
        let worker = self.worker.clone();
        self.give_back(|link, call| {
            let link = link.clone();
            // As many as there are leases, which the broker limits.
            worker.run(move || link.call_later(call, usize::MAX));
        });
    }
}

fn log(released: Result<Answer>) {
    if let Err(error) = released {
        tracing::debug!(%error, "a lease goes back with the connection");
    }
}
