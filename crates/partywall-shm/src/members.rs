//! The rows of one user's members: one cache line per possible member of a domain, written by that member alone. The
//! [traces](crate::trace) of these members follow them.
//!
//! The memory is laid out as `control` says: a row for each member, then the traces. A row:
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `heartbeat: u64`, milliseconds, as [`now`] counts | its member; the broker, before it assigns the row |
//! | 8 | `lease: u64`, the member's lease on the timeline that it waits for; 0 without a wait | its member |
//! | 16 | `value: u64`, for which it waits | its member |
//! | 24 | `since: u64`, when the wait began, as `heartbeat` | its member |
//!
//! A row belongs to a member from its welcome until nothing of the member is left. Then another member may get it. The
//! words are hints: they are reported and have no other effect. A member that breaks the rules and writes another's row
//! only makes that member seem hung, alive or waiting. No lease of a former member belongs to the next one, so the
//! words of a wait need no reset. They are not read in one step: a listing may show a wait with the value of the next
//! one.

#[cfg(not(loom))]
mod rows;

use partywall_os::clock;

#[cfg(not(loom))]
pub use rows::Members;

/// The number of a member's row.
pub(crate) type Row = u16;

/// The number of no row. Slots with this row belong to the object itself.
pub const NOBODY: u16 = u16::MAX;

/// The maximum number of rows: each has a 16-bit number other than [`NOBODY`].
pub const MAX_ROWS: usize = NOBODY as usize;

/// A member's wait for a timeline, as its row shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineWait {
    /// The member's lease on the timeline.
    pub lease: u64,
    /// The value.
    pub value: u64,
    /// When it began, as [`now`] counts.
    pub since: u64,
}

/// Returns the [clock of the machine](clock) in milliseconds, which is the same in all processes.
pub fn now() -> u64 {
    now_ns() / 1_000_000
}

/// Returns the [clock of the machine](clock) in nanoseconds, as [`now`].
pub fn now_ns() -> u64 {
    clock::monotonic_ns()
}
