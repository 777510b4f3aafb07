//! Private words: shared words that no other process has.
//!
//! A wait with a time limit, and the end of a stream's work, need a word that this process alone writes. The value of such
//! a word only grows. A stream that still waits for the value of the last use therefore goes on with the next use at the
//! latest, and no thread has to know when it did.

use std::sync::{Arc, Mutex};

use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::{CELLS, MAX_VALUE, Progress};

use super::{CellPlace, MappedSlab};

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

/// A private word, for one use: `target` is stored in it, once. Any thread may drop it.
#[derive(Debug)]
pub(crate) struct PrivateWord {
    pub(crate) place: CellPlace,
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

    /// Takes a free word; `None` if there is none.
    pub(super) fn take(&self) -> Option<PrivateWord> {
        loop {
            let Free { slab, index } = self.free.lock().ignore_poison().pop()?;
            // What is free is in one of the slabs, unless these were given back.
            if let Some(place) = self.slabs.lock().ignore_poison().get(slab).and_then(|slab| slab.place(index)) {
                let target = place.cell().value() + 1;
                return Some(PrivateWord { place, target, slab, free: self.free.clone() });
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.lock().ignore_poison().is_empty()
    }

    /// The slab in which streams find a word.
    pub(super) fn slab(&self, word: &PrivateWord) -> Option<Arc<MappedSlab>> {
        self.slabs.lock().ignore_poison().get(word.slab).cloned()
    }

    /// Gives back what the driver has been given.
    pub(super) fn unregister(&self) {
        let slabs = std::mem::take(&mut *self.slabs.lock().ignore_poison());
        self.free.lock().ignore_poison().clear();
        drop(slabs);
    }
}

impl PrivateWord {
    /// Whether its value has been stored.
    pub(crate) fn is_reached(&self) -> bool {
        self.place.cell().progress(self.target) == Progress::Reached
    }

    /// Stores its value, by the host, and gives it back.
    pub(crate) fn store(self) {
        // It is refused where the value is there already.
        let _ = self.place.cell().signal(self.target);
        self.give_back();
    }

    /// Gives it back when its value has been stored. A word that is not given back is never used again.
    pub(crate) fn give_back(self) {
        if self.target < MAX_VALUE {
            self.free.lock().ignore_poison().push(Free { slab: self.slab, index: self.place.index() });
        }
    }

    /// The same word for the next use, by the same stream.
    pub(crate) fn next(self) -> Self {
        Self { target: self.target + 1, ..self }
    }
}

#[cfg(test)]
impl PrivateWord {
    /// One that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        Self { place: CellPlace::of_tests(), target: 1, slab: 0, free: Arc::default() }
    }
}
