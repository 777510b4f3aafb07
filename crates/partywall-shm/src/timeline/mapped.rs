//! Cells in mapped memory.
//!
//! ```text
//!     0  magic
//!     8  layout hash   of the description of this layout: another one is refused, never guessed
//!    64  cells         64 bytes each
//! ```

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall_os::{map::SharedMap, memfd};

use super::{CELL_BYTES, CELLS, Cell};
use crate::invalid;

/// Bytes of a slab.
pub const SLAB_BYTES: usize = cell_offset(CELLS);

/// Returns the byte offset of the cell at `index`.
pub const fn cell_offset(index: u32) -> usize {
    (1 + index as usize) * CELL_BYTES
}

/// A mapped memfd of [`CELLS`] cells.
#[derive(Debug, Clone)]
pub struct Slab {
    memory: Arc<SharedMap>,
}

impl Slab {
    /// Creates a memfd whose cells are all zero, as [`Cell::start`] requires.
    ///
    /// # Errors
    /// As memfd_create(2).
    pub fn create() -> io::Result<OwnedFd> {
        let mut draft = memfd::Draft::create("partywall:timelines", SLAB_BYTES as u64)?;
        let header = draft.writer();
        header.write_all_at(&MAGIC, 0)?;
        header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
        Ok(draft.share()?)
    }

    /// Maps a slab that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a slab, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = SharedMap::writable(fd)?;
        let Some([magic, layout]) = memory.atomics::<AtomicU64>(0, 2) else {
            return Err(invalid(format!("{} bytes are too few for a slab of timelines", memory.len())));
        };
        let found = (magic.load(Ordering::Relaxed), layout.load(Ordering::Relaxed));
        crate::check_layout("slab of timelines", found, (u64::from_le_bytes(MAGIC), LAYOUT_HASH))?;
        if memory.len() != SLAB_BYTES {
            return Err(invalid(format!(
                "a slab of timelines has {SLAB_BYTES} bytes, but this file has {}",
                memory.len()
            )));
        }
        Ok(Self { memory: Arc::new(memory) })
    }

    /// Returns the cell at `index`, or `None` if there is none.
    pub fn cell(&self, index: u32) -> Option<&Cell> {
        (index < CELLS).then(|| self.memory.atomics(cell_offset(index), 1))??.first()
    }

    /// Returns the memory, to be registered with a GPU's driver.
    pub fn memory(&self) -> &Arc<SharedMap> {
        &self.memory
    }
}

const MAGIC: [u8; 8] = *b"PWTIMELN";

/// Change the text whenever the bytes change.
pub(crate) const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 64: magic8 hash8 0:48; cells64 1023: value8 announced8 wakes4 sleepers4 ending4 incarnation4 closing8 \
    tainted8 last8 0:8; poison last+2^62+1",
);
