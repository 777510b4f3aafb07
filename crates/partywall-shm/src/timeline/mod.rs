//! Timelines: growing words in host memory that hosts and GPU streams write and wait for.
//!
//! A [`Cell`] is one *incarnation* of a timeline: the time of one writer. When it has ended, the next writer gets its
//! own cell, which starts at the last value that was really signalled. A [`Slab`] is a memfd with [`CELLS`] cells, each
//! in its own cache line. Slabs are small because they are registered with the GPU's driver.

mod cell;
#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
mod value;

pub(crate) use cell::ending_of;
pub use cell::{Cell, Ended, LateStore, Progress, Refused};
#[cfg(not(loom))]
pub use mapped::{Slab, cell_offset};
pub use partywall_wire::TimelineEnding;
pub use value::MAX_VALUE;

/// Cells of a slab. Together with the slab's header they fill 64 KiB.
pub const CELLS: u32 = 1023;

/// Bytes of a cell. Its value is the first eight of them.
pub const CELL_BYTES: usize = size_of::<Cell>();
