//! Leases on versions that allow no new views: their withdrawal forbids it, or their memory is lost.
//!
//! The broker reports a stale version to its holders on the events socket, and again when they resume. A view costs one
//! load as long as there are no stale leases. Subscribers and publishers are detached instead, because their hot paths
//! read that word already.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall_os::lock::IgnorePoison;
use partywall_wire::{LeaseId, Notice, Staleness};

use crate::error::{DeviceFault, Error, Gone, Result, ago};

/// The stale leases of a connection. The broker reports them on the events socket, perhaps before the caller that
/// opened the version has read its answer; so they are kept by number.
#[derive(Debug, Default)]
pub(super) struct StaleLeases {
    /// Whether there may be any. Views read nothing but this as long as there are none.
    any: AtomicBool,
    leases: Mutex<HashMap<LeaseId, Staleness>>,
}

impl StaleLeases {
    pub(super) fn add(&self, leases: Vec<(LeaseId, Staleness)>) {
        let mut known = self.leases.lock().ignore_poison();
        known.extend(leases);
        self.any.store(!known.is_empty(), Ordering::Release);
    }

    /// Forgets a lease that is given back.
    pub(super) fn forget(&self, lease: LeaseId) {
        if self.any.load(Ordering::Relaxed) {
            let mut known = self.leases.lock().ignore_poison();
            known.remove(&lease);
            self.any.store(!known.is_empty(), Ordering::Release);
        }
    }

    /// Refuses another view of the version `name` that a lease is on, if it is stale.
    #[inline]
    pub(super) fn check(&self, lease: LeaseId, name: &str) -> Result<()> {
        if self.any.load(Ordering::Acquire) { self.check_slow(lease, name) } else { Ok(()) }
    }

    #[cold]
    fn check_slow(&self, lease: LeaseId, name: &str) -> Result<()> {
        match self.leases.lock().ignore_poison().get(&lease) {
            Some(Staleness::Withdrawn(notice)) => Err(withdrawn(name, notice)),
            Some(Staleness::DeviceLost(place)) => Err(device_lost(name, *place)),
            Some(_) | None => Ok(()),
        }
    }
}

/// Returns the error that the memory of a version or name is lost.
pub(crate) fn device_lost(name: &str, place: partywall_wire::Place) -> Error {
    DeviceFault::DeviceLost { name: name.to_owned(), place: place.into() }.into()
}

/// Returns the error that a version is stale.
pub(crate) fn withdrawn(name: &str, notice: &Notice) -> Error {
    Gone::Withdrawn { name: name.to_owned(), pid: notice.pid, ago: ago(notice.at) }.into()
}
