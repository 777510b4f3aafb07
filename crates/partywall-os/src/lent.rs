//! Parts of a [`SharedMap`] that processes have agreed belong to one holder at a time, as plain bytes.
//!
//! The kernel does not enforce such an agreement. Within this process it is: a [`Division`] lends each of its parts to
//! readers alone, or to one writer. Of other processes it is believed. One that writes where it has nothing, by a
//! mistake or on purpose, changes bytes behind a `&` or `&mut` of ours: whatever is computed of them may then be wrong
//! in any way. That is the trust that processes of a domain have in each other, whose memory each can write anyway.
#![allow(unsafe_code)]

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use crate::{cpu, map::SharedMap};

/// Parts of a map, of equal length and at equal distances, of which each is lent by itself. A map has one at a time.
pub struct Division {
    map: Arc<SharedMap>,
    /// No other division of this process ever has it.
    id: u64,
    /// Of the first part.
    offset: usize,
    /// From one to the next.
    stride: usize,
    /// Of each.
    bytes: usize,
    /// Of each part: how many readers it is lent to, or [`WRITER`].
    parts: Box<[AtomicU32]>,
}

/// A part that nobody writes until it is [returned](Division::give_back). It keeps nothing: its division shows the bytes, as
/// long as that lives. So a message need not count who has the division.
#[derive(Debug)]
#[must_use = "it stays lent until it is given back"]
pub struct Lent(Part);

/// A part that is ours alone until it is [returned](Division::give_back_mut); else as [`Lent`].
#[derive(Debug)]
#[must_use = "it stays lent until it is given back"]
pub struct LentMut(Part);

#[derive(Debug)]
struct Part {
    division: u64,
    index: usize,
}

impl Division {
    /// `count` parts of `bytes` bytes, the first from `offset` on, and each `stride` bytes behind the one before.
    ///
    /// `None` if there is a division of the map already; if they do not lie within it, overlap, or have no bytes.
    pub fn new(map: Arc<SharedMap>, offset: usize, stride: usize, bytes: usize, count: usize) -> Option<Self> {
        static DIVISIONS: AtomicU64 = AtomicU64::new(0);
        let last = stride.checked_mul(count.checked_sub(1)?)?.checked_add(offset)?;
        let is_inside = last.checked_add(bytes).is_some_and(|end| end <= map.len());
        if !is_inside || bytes == 0 || bytes > stride || map.divided().swap(true, Ordering::Acquire) {
            return None;
        }
        let id = DIVISIONS.fetch_add(1, Ordering::Relaxed);
        let parts = (0..count).map(|_| AtomicU32::new(0)).collect();
        Some(Self { map, id, offset, stride, bytes, parts })
    }

    /// A part, for reading. By the processes' agreement nobody writes it before it is given back.
    ///
    /// `None` if it is lent for writing, or does not exist.
    pub fn lend(&self, index: usize) -> Option<Lent> {
        let more = |readers: u32| readers.checked_add(1).filter(|more| *more != WRITER);
        // Pairs with the store of who has written it.
        self.parts.get(index)?.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(Lent(Part { division: self.id, index }))
    }

    /// The same, for reading and writing. By the processes' agreement nobody else touches it before it is given back.
    ///
    /// `None` if it is lent, or does not exist, or if the map is for reading.
    pub fn lend_mut(&self, index: usize) -> Option<LentMut> {
        let part = self.parts.get(index).filter(|_| self.map.is_writable())?;
        // Pairs with what who had it did in the end.
        part.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(LentMut(Part { division: self.id, index }))
    }

    /// Ends the use of a part.
    ///
    /// # Panics
    /// If another division has lent it.
    pub fn give_back(&self, lent: Lent) {
        // Pairs with the loads of who has it next: what we have read was read before.
        self.parts[self.index(&lent.0)].fetch_sub(1, Ordering::Release);
    }

    /// As [`give_back`](Self::give_back).
    ///
    /// # Panics
    /// As [`give_back`](Self::give_back).
    pub fn give_back_mut(&self, lent: LentMut) {
        // As above, and what we have written is seen. Nobody else changes the word of a part that is being written.
        self.parts[self.index(&lent.0)].store(0, Ordering::Release);
    }

    /// The bytes of a part that was lent.
    ///
    /// # Panics
    /// If another division has lent it.
    pub fn bytes<'a>(&'a self, lent: &'a Lent) -> &'a [u8] {
        self.slice(&lent.0)
    }

    /// As [`bytes`](Self::bytes).
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn bytes_of_mut<'a>(&'a self, lent: &'a LentMut) -> &'a [u8] {
        self.slice(&lent.0)
    }

    /// As [`bytes`](Self::bytes), for writing.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn bytes_mut<'a>(&'a self, lent: &'a mut LentMut) -> &'a mut [u8] {
        // SAFETY: as in `slice`; the map is for writing, or `lend_mut` had refused; the part is lent to nobody else, and
        // `&mut` makes this the only access through what was lent.
        unsafe { std::slice::from_raw_parts_mut(self.start(self.index(&lent.0)), self.bytes) }
    }

    /// The first address of a part, for code in other languages, which uses it as long as it is lent and this lives.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn as_ptr(&self, lent: &LentMut) -> *mut u8 {
        self.start(self.index(&lent.0))
    }
}

impl Division {
    /// Has the processor fetch the first bytes of a part, which will be read soon.
    pub fn prefetch(&self, index: usize) {
        if index < self.parts.len() {
            cpu::fetch(self.start(index));
        }
    }

    /// The same, for one that will be written soon.
    pub fn prefetch_to_write(&self, index: usize) {
        if index < self.parts.len() {
            cpu::fetch_to_write(self.start(index));
        }
    }

    /// Of a part that we have lent.
    fn index(&self, part: &Part) -> usize {
        assert_eq!(part.division, self.id, "a part is shown and taken back by who has lent it");
        part.index
    }

    /// A part that is lent to whoever has what is borrowed here.
    fn slice<'a>(&'a self, part: &'a Part) -> &'a [u8] {
        // SAFETY: mapped and in range, see `start`, as long as `self` is borrowed. Nothing in this process writes it through
        // this map while it is lent, which it is as long as `part` is borrowed, because giving back takes what it is in by
        // value: `lend_mut` refuses, there is no other division, and whoever has made this one uses no `SharedSlice` there.
        // If it is lent for writing, that is done by `&mut` of the same. Other processes, and other maps of the file, do not
        // by the agreement; the proof is as weak as that, see the head of this file.
        unsafe { std::slice::from_raw_parts(self.start(self.index(part)), self.bytes) }
    }

    /// Where a part begins, of those that there are.
    fn start(&self, index: usize) -> *mut u8 {
        assert!(index < self.parts.len());
        // SAFETY: `new` has found all parts to lie within what is mapped, which is never less while `map` lives.
        unsafe { self.map.as_ptr().add(self.offset + self.stride * index) }
    }
}

impl Drop for Division {
    fn drop(&mut self) {
        // What is still lent shows nothing any more: no other division takes it for its own.
        self.map.divided().store(false, Ordering::Release);
    }
}

impl fmt::Debug for Division {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, stride, bytes, parts, .. } = self;
        write!(f, "Division({} parts of {bytes} bytes from {offset} on, each {stride} behind the last)", parts.len())
    }
}

/// The number of readers that stands for a writer.
const WRITER: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memfd::Draft;

    fn map(bytes: u64) -> Arc<SharedMap> {
        Arc::new(SharedMap::writable(Draft::create("partywall:test", bytes).unwrap().share().unwrap()).unwrap())
    }

    #[test]
    fn one_writes_or_many_read() {
        let parts = Division::new(map(4096), 256, 256, 200, 15).unwrap();
        let mut ours = parts.lend_mut(1).unwrap();
        parts.bytes_mut(&mut ours).fill(7);
        assert!(parts.lend(1).is_none() && parts.lend_mut(1).is_none());
        let next = parts.lend_mut(2).unwrap();
        let read = parts.bytes_of_mut(&ours);
        assert_eq!((parts.bytes_of_mut(&next)[0], read[199], read.len()), (0, 7, 200));
        parts.give_back_mut(ours);
        let readers = [(); 3].map(|()| parts.lend(1).unwrap());
        assert!(readers.iter().all(|lent| parts.bytes(lent).iter().all(|byte| *byte == 7)));
        for reader in readers {
            assert!(parts.lend_mut(1).is_none());
            parts.give_back(reader);
        }
        assert!(parts.lend_mut(1).is_some());
    }

    #[test]
    fn parts_lie_where_they_should() {
        let map = map(4096);
        let parts = Division::new(map.clone(), 64, 128, 100, 3).unwrap();
        for index in 0..3 {
            let mut lent = parts.lend_mut(index).unwrap();
            parts.bytes_mut(&mut lent).fill(index as u8 + 1);
            assert_eq!(parts.as_ptr(&lent).cast_const(), parts.bytes_of_mut(&lent).as_ptr());
        }
        let bytes = map.slice::<u8>(0, 4096).unwrap();
        let has = |part: usize, at: usize| (64 + 128 * part..64 + 128 * part + 100).contains(&at);
        for at in 0..4096 {
            let expected = (0..3).find(|part| has(*part, at)).map_or(0, |part| part as u8 + 1);
            assert_eq!(bytes.get(at), expected, "byte {at}");
        }
    }

    #[test]
    fn what_another_has_lent_is_refused() {
        let [one, other] = [(); 2].map(|()| Division::new(map(4096), 0, 64, 64, 2).unwrap());
        let lent = one.lend(0).unwrap();
        std::panic::catch_unwind(|| other.bytes(&lent).len()).unwrap_err();
        std::panic::catch_unwind(|| other.give_back(lent)).unwrap_err();
        assert!(other.lend_mut(0).is_some() && one.lend_mut(0).is_none());
    }

    #[test]
    fn nothing_is_lent_that_is_not_there() {
        let fd = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        let map = Arc::new(SharedMap::readable(&fd).unwrap());
        let divide = |offset, stride, bytes, count| Division::new(map.clone(), offset, stride, bytes, count);
        for (offset, stride, bytes, count) in [
            (4095, 2, 2, 1),
            (4096, 1, 1, 1),
            (0, 1, 0, 1),
            (0, 1, 1, 0),
            (0, 100, 101, 2),
            (0, 4096, 1, 2),
            (usize::MAX, 2, 2, 1),
            (1, usize::MAX, 1, 2),
            (0, 1 << 63, 1, 3),
        ] {
            assert!(divide(offset, stride, bytes, count).is_none(), "{offset} {stride} {bytes} {count}");
        }
        let parts = divide(1, 4094, 1, 2).unwrap();
        assert!(parts.lend_mut(0).is_none(), "it is mapped for reading");
        assert!(parts.lend(1).is_some() && parts.lend(2).is_none());
        assert!(divide(1, 4094, 1, 2).is_none(), "it is divided");
        drop(parts);
        assert!(divide(1, 4094, 1, 2).is_some());
    }

    proptest! {
        /// Whatever is asked for in whatever order: a part that is lent at once to several is read by all of them.
        #[test]
        fn what_is_lent_at_once_does_not_conflict(
            asked in proptest::collection::vec((0..8_usize, any::<bool>(), any::<prop::sample::Index>()), 1..100),
        ) {
            let parts = Division::new(map(4096), 0, 512, 512, 8).unwrap();
            let mut read = Vec::<Lent>::new();
            let mut written = Vec::<LentMut>::new();
            for (index, write, back) in asked {
                let used = |lent: &[Lent]| lent.iter().any(|part| part.0.index == index);
                let taken = written.iter().any(|part| part.0.index == index);
                if write {
                    let lent = parts.lend_mut(index);
                    prop_assert_eq!(lent.is_some(), !taken && !used(&read));
                    written.extend(lent);
                } else {
                    let lent = parts.lend(index);
                    prop_assert_eq!(lent.is_some(), !taken);
                    read.extend(lent);
                }
                if !read.is_empty() && write {
                    parts.give_back(read.swap_remove(back.index(read.len())));
                }
                if !written.is_empty() && !write {
                    parts.give_back_mut(written.swap_remove(back.index(written.len())));
                }
            }
            read.into_iter().for_each(|lent| parts.give_back(lent));
            written.into_iter().for_each(|lent| parts.give_back_mut(lent));
            prop_assert!((0..8).all(|index| parts.lend_mut(index).is_some()));
        }
    }
}
