//! Timelines: words in host memory that only grow, written by a host or by a stream of a GPU, waited for by both.
//!
//! A [`Cell`] is one *incarnation* of a timeline: the time of one writer. When it has ended, the next writer has a cell
//! of its own, which starts at the last value really signalled. A [`Slab`] is a memfd with [`CELLS`] of them, each in a
//! cache line of its own; slabs are the only memory that is registered with a GPU's driver, and so are small.

mod cell;
#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
mod value;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use partywall_os::{map::SharedMap, memfd};

pub use cell::{Cell, Ended, Ending, Progress, Refused, Wakes};
pub use value::MAX_VALUE;

/// Cells of a slab.
pub const CELLS: u32 = 1024;

/// Bytes of a cell. Its value is the first eight of them.
pub const CELL_BYTES: usize = 64;

/// Bytes of a slab.
pub const SLAB_BYTES: usize = CELLS as usize * CELL_BYTES;

/// A mapped memfd of [`CELLS`] cells.
#[derive(Debug, Clone)]
pub struct Slab {
    memory: Arc<SharedMap>,
}

impl Slab {
    /// A new memfd, whose cells all are as [`Cell::start`] has to find them: zero.
    ///
    /// # Errors
    /// As memfd_create(2).
    pub fn create() -> io::Result<OwnedFd> {
        Ok(memfd::Draft::create("partywall:timelines", SLAB_BYTES as u64)?.share()?)
    }

    /// Maps a slab that somebody has made.
    ///
    /// # Errors
    /// `InvalidData` if it has another length; else as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = SharedMap::writable(fd)?;
        if memory.len() != SLAB_BYTES {
            let text = format!("a slab of timelines has {SLAB_BYTES} bytes, and this file {}", memory.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(Self { memory: Arc::new(memory) })
    }

    /// The cell at `index`, or `None` if there is none.
    #[cfg(not(loom))]
    pub fn cell(&self, index: u32) -> Option<&Cell> {
        let offset = usize::try_from(index).ok()?.checked_mul(CELL_BYTES)?;
        self.memory.atomics(offset, 1)?.first()
    }

    /// Its bytes, for registering them with a GPU's driver, which the owner of this keeps alive.
    pub fn memory(&self) -> &Arc<SharedMap> {
        &self.memory
    }
}
