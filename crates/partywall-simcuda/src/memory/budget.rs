//! How much memory a device or a NUMA node has for this process.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Code;
use crate::device::bytes_of;

/// Bytes that this process may allocate.
pub(crate) struct Budget {
    pub(crate) total: u64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(total: u64) -> Self {
        Self { total, used: AtomicU64::new(0) }
    }

    /// Takes memory; its holder returns it by [`Self::give_back`].
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(super) fn take(&self, bytes: u64) -> Result<(), Code> {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.total);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(())
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn free(&self) -> u64 {
        self.total - self.used.load(Ordering::Relaxed)
    }
}

/// Returns the memory of a NUMA node, if the simulated machine has the node.
pub(super) fn of_node(node: i32) -> Option<&'static Budget> {
    static BUDGETS: LazyLock<[Budget; NODES as usize]> =
        LazyLock::new(|| std::array::from_fn(|_| Budget::new(bytes_of("SIMCUDA_NODE_MEMORY"))));
    BUDGETS.get(usize::try_from(node).ok()?)
}

/// The number of NUMA nodes of the simulated machine.
pub(crate) const NODES: u8 = 2;
