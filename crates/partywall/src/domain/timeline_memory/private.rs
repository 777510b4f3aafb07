//! Private words: shared words that no other process uses.
//!
//! A wait with a timeout, and the detection of a stream's progress, need a word that only this process writes. The
//! value of such a word only grows. A stream that still waits for the value of the last use therefore continues with
//! the next use at the latest, and no thread has to track that.

use std::sync::{Arc, Mutex};

use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::{CELLS, MAX_VALUE, Progress};

use super::{CellRef, MappedSlab};

/// The private words of a connection.
#[derive(Debug, Default)]
pub(super) struct PrivateWords {
    slabs: Mutex<Vec<Arc<MappedSlab>>>,
    free: Arc<Mutex<Vec<Free>>>,
}

#[derive(Debug)]
struct Free {
    slab: usize,
    index: u32,
}

/// A private word for one use: `target` is stored in it once. Any thread may drop it.
#[derive(Debug)]
pub(crate) struct PrivateWord {
    pub(crate) cell: CellRef,
    pub(crate) target: u64,
    slab: usize,
    free: Arc<Mutex<Vec<Free>>>,
}

impl PrivateWords {
    /// Adds the words of a slab that streams can use.
    pub(super) fn add(&self, slab: MappedSlab) {
        let number = {
            let mut slabs = self.slabs.lock().ignore_poison();
            slabs.push(Arc::new(slab));
            slabs.len() - 1
        };
        self.free.lock().ignore_poison().extend((0..CELLS).map(|index| Free { slab: number, index }));
    }

    /// Takes a free word. Returns `None` if none is free.
    pub(super) fn take(&self) -> Option<PrivateWord> {
        loop {
            let Free { slab, index } = self.free.lock().ignore_poison().pop()?;
            // A free word is in one of the slabs, unless they were unregistered.
            if let Some(cell) = self.slabs.lock().ignore_poison().get(slab).and_then(|slab| slab.cell(index)) {
                let target = cell.get().value() + 1;
                return Some(PrivateWord { cell, target, slab, free: self.free.clone() });
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.lock().ignore_poison().is_empty()
    }

    /// Returns the slab of a word.
    pub(super) fn slab(&self, word: &PrivateWord) -> Option<Arc<MappedSlab>> {
        self.slabs.lock().ignore_poison().get(word.slab).cloned()
    }

    /// Unregisters all slabs from the driver.
    pub(super) fn unregister(&self) {
        let slabs = std::mem::take(&mut *self.slabs.lock().ignore_poison());
        self.free.lock().ignore_poison().clear();
        drop(slabs);
    }
}

impl PrivateWord {
    /// Returns whether its value has been stored.
    pub(crate) fn is_reached(&self) -> bool {
        self.cell.get().progress(self.target) == Progress::Reached
    }

    /// Stores its value from the host, and gives the word back.
    pub(crate) fn store(self) {
        // Refused if the value is stored already.
        let _ = self.cell.get().signal(self.target);
        self.give_back();
    }

    /// Gives the word back once its value has been stored. A word that is not given back is never reused.
    pub(crate) fn give_back(self) {
        if self.target < MAX_VALUE {
            self.free.lock().ignore_poison().push(Free { slab: self.slab, index: self.cell.index() });
        }
    }

    /// Returns the same word for the next use, by the same stream.
    pub(crate) fn next(self) -> Self {
        Self { target: self.target + 1, ..self }
    }
}

#[cfg(test)]
impl PrivateWord {
    /// Creates a word that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        Self { cell: CellRef::of_tests(), target: 1, slab: 0, free: Arc::default() }
    }
}
