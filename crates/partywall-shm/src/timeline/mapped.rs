//! Cells in mapped memory: all that there is behind the first 64 bytes, which `control` describes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use partywall_os::map::{SharedArray, SharedMap};

use super::{CELL_BYTES, CELLS, Cell};
use crate::control::{self, ControlMemory, Numbers, parts};

/// Returns the byte offset of the cell at `index`.
pub const fn cell_offset(index: u32) -> usize {
    control::first_part::<Cell>() + index as usize * CELL_BYTES
}

/// A mapped memfd of [`CELLS`] cells.
#[derive(Debug, Clone)]
pub struct Slab {
    cells: SharedArray<Cell>,
}

impl Slab {
    /// Creates a memfd whose cells are all zero, as [`Cell::start`] requires.
    ///
    /// # Errors
    /// As memfd_create(2) and mmap(2).
    pub fn create() -> io::Result<OwnedFd> {
        control::create::<Self>(())
    }

    /// Maps a slab that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a slab, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        control::map(fd)
    }

    /// Returns the cell at `index`, or `None` if there is none.
    pub fn cell(&self, index: u32) -> Option<&Cell> {
        self.cells.get(index as usize)
    }

    /// Returns the memory, to be registered with a GPU's driver.
    pub fn memory(&self) -> &Arc<SharedMap> {
        self.cells.memory()
    }
}

impl ControlMemory for Slab {
    const MAGIC: [u8; 8] = *b"PWTIMELN";
    const NAME: &'static str = "slab of timelines";
    type Shape = ();

    fn check((): ()) -> Result<(), String> {
        Ok(())
    }

    fn numbers((): ()) -> Numbers {
        Numbers::default()
    }

    fn shape_of(_: Numbers) {}

    parts!(|()| { cells: Cell = CELLS } => Self { cells });
}
