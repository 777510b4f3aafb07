//! Kinds and places of memory.

use serde::{Deserialize, Serialize};

/// The kind of memory of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Sealed memfds.
    Host,
    /// GPU memory of the driver's virtual memory management, exported as file descriptors.
    Vmm,
    /// GPU memory that its publisher allocated by other means, opened by the driver's 64-byte handles. It ends with its
    /// publisher.
    Legacy,
    /// Host memory that the driver has allocated on a NUMA node and pinned, exported as file descriptors.
    Pinned,
    /// GPU memory of an allocator that is still at work in its publisher, exported as file descriptors. It is not
    /// frozen, and contains memory of the publisher besides the tensors.
    Live,
}

names!(Kind {
    Host => "host",
    Vmm => "vmm",
    Legacy => "legacy",
    Pinned => "pinned",
    Live => "live",
});

/// Where a version's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// Main memory.
    Host,
    /// The GPU with this UUID.
    Gpu([u8; 16]),
    /// Main memory of this NUMA node, which the driver has pinned.
    Pinned(u32),
}

impl Place {
    /// Returns whether only a process with the driver that allocated the memory can map it.
    pub fn needs_driver(self) -> bool {
        !matches!(self, Self::Host)
    }
}
