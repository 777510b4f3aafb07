//! Timelines: words in host memory that only grow, written by a host or by a stream of a GPU, waited for by both.
//!
//! A [`Cell`] is one *incarnation* of a timeline: the time of one writer. When it has ended, the next writer has a cell
//! of its own, which starts at the last value really signalled. A [`Slab`] is a memfd with [`CELLS`] of them, each in a
//! cache line of its own; slabs are the only memory that is registered with a GPU's driver, and so are small.

mod cell;
#[cfg(not(loom))]
mod mapped;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
mod value;

pub use cell::{Cell, Ended, Ending, Progress, Refused};
#[cfg(not(loom))]
pub use mapped::{SLAB_BYTES, Slab, cell_offset};
pub use value::MAX_VALUE;

/// Cells of a slab: with what says that it is one, 64 KiB.
pub const CELLS: u32 = 1023;

/// Bytes of a cell. Its value is the first eight of them.
pub const CELL_BYTES: usize = 64;
