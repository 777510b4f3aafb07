//! Parts of a [`SharedMap`] that processes have agreed belong to one holder at a time, as plain bytes.
//!
//! The kernel does not enforce such an agreement. Within this process it is: [`SharedMap::lend`] gives overlapping parts
//! to readers alone, or to one writer. Of other processes it is believed. One that writes where it has nothing, by a
//! mistake or on purpose, changes bytes behind a `&` or `&mut` of ours: whatever is computed of them may then be wrong
//! in any way. That is the trust that processes of a domain have in each other, whose memory each can write anyway.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::map::SharedMap;

/// What is lent of a map: where each part begins, where it ends, and to how many readers; to none means to a writer.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<BTreeMap<usize, (usize, u32)>>);

/// Bytes that nobody writes while this lives.
pub struct Lent {
    map: Arc<SharedMap>,
    range: Range<usize>,
}

/// Bytes that are ours alone while this lives.
pub struct LentMut(Lent);

impl SharedMap {
    /// `bytes` bytes from `offset` on, for reading. By the processes' agreement nobody writes them before this is dropped.
    ///
    /// `None` if part of it is lent for writing, or otherwise divided; if it does not lie within the map.
    pub fn lend(self: &Arc<Self>, offset: usize, bytes: usize) -> Option<Lent> {
        let range = self.range(offset, bytes)?;
        let mut lent = self.ledger().lock();
        match overlapping(&lent, &range) {
            None => drop(lent.insert(range.start, (range.end, 1))),
            Some((start, (end, readers))) if (start..end) == range && readers > 0 => {
                lent.insert(start, (end, readers.checked_add(1)?));
            }
            Some(_) => return None,
        }
        drop(lent);
        Some(Lent { map: self.clone(), range })
    }

    /// The same, for reading and writing. By the processes' agreement nobody else touches them before this is dropped.
    ///
    /// `None` if part of it is lent; if it does not lie within the map; if the map is for reading.
    pub fn lend_mut(self: &Arc<Self>, offset: usize, bytes: usize) -> Option<LentMut> {
        let range = self.range(offset, bytes).filter(|_| self.is_writable())?;
        let mut lent = self.ledger().lock();
        if overlapping(&lent, &range).is_some() {
            return None;
        }
        lent.insert(range.start, (range.end, 0));
        drop(lent);
        Some(LentMut(Lent { map: self.clone(), range }))
    }

    fn range(&self, offset: usize, bytes: usize) -> Option<Range<usize>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.len())?;
        (bytes > 0).then_some(offset..end)
    }
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, (usize, u32)>> {
        // Each change is one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last of the lent parts that overlap a range. Those that are lent do not overlap each other.
fn overlapping(lent: &BTreeMap<usize, (usize, u32)>, range: &Range<usize>) -> Option<(usize, (usize, u32))> {
    let (start, part) = lent.range(..range.end).next_back()?;
    (part.0 > range.start).then_some((*start, *part))
}

impl Lent {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: `range` has found it to lie within what is mapped, which is never less while `map` lives.
        unsafe { NonNull::new_unchecked(self.map.as_ptr().add(self.range.start)) }
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped and in range, see `start`. Nothing in this process writes it through this map while it is lent
        // to us: `lend_mut` refuses, and whoever has lent it uses no `SharedSlice` there. Other processes, and other maps of
        // the file, do not by the agreement; the proof is as weak as that, see the head of this file.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.range.len()) }
    }
}

impl LentMut {
    /// Their first address, for code in other languages, which uses them as long as this lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }
}

impl Deref for LentMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for LentMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the map is for writing, it is lent to nobody else, and `&mut self` makes this the only access
        // through us.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), self.0.range.len()) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut lent = self.map.ledger().lock();
        match lent.get_mut(&self.range.start) {
            Some((_, readers)) if *readers > 1 => *readers -= 1,
            _ => drop(lent.remove(&self.range.start)),
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({:?})", self.range)
    }
}

impl fmt::Debug for LentMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentMut({:?})", self.0.range)
    }
}

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
        let map = map(4096);
        let mut ours = map.lend_mut(256, 256).unwrap();
        ours.fill(7);
        assert!(map.lend(256, 256).is_none() && map.lend_mut(511, 1).is_none() && map.lend_mut(0, 257).is_none());
        let next = map.lend_mut(512, 256).unwrap();
        assert_eq!((next[0], ours[255]), (0, 7));
        drop(ours);
        let readers = [(); 3].map(|()| map.lend(256, 256).unwrap());
        assert!(readers.iter().all(|bytes| bytes.iter().all(|byte| *byte == 7)));
        assert!(map.lend(256, 255).is_none(), "it is divided otherwise");
        assert!(map.lend_mut(256, 256).is_none());
        drop(readers);
        assert!(map.lend_mut(0, 512).is_some());
    }

    #[test]
    fn nothing_is_lent_that_is_not_there() {
        let fd = Draft::create("partywall:test", 4096).unwrap().share().unwrap();
        let map = Arc::new(SharedMap::readable(&fd).unwrap());
        assert!(map.lend_mut(0, 1).is_none(), "it is mapped for reading");
        assert!(map.lend(4095, 1).is_some());
        for (offset, bytes) in [(4095, 2), (4096, 1), (0, 0), (usize::MAX, 2), (1, usize::MAX)] {
            assert!(map.lend(offset, bytes).is_none(), "{offset} {bytes}");
        }
    }

    proptest! {
        /// Whatever is asked for in whatever order: parts that are lent at once overlap only if all of them are read.
        #[test]
        fn what_is_lent_at_once_does_not_conflict(
            asked in proptest::collection::vec((0..64_usize, 1..16_usize, any::<bool>(), any::<prop::sample::Index>()), 1..100),
        ) {
            let map = map(4096);
            let (mut read, mut written) = (Vec::<Lent>::new(), Vec::<LentMut>::new());
            for (offset, bytes, write, back) in asked {
                if write {
                    written.extend(map.lend_mut(offset, bytes));
                } else {
                    read.extend(map.lend(offset, bytes));
                }
                let meets = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
                for (index, part) in written.iter().enumerate() {
                    prop_assert!(!read.iter().any(|other| meets(&part.0.range, &other.range)));
                    prop_assert!(!written[..index].iter().any(|other| meets(&part.0.range, &other.0.range)));
                }
                if !read.is_empty() && write {
                    read.swap_remove(back.index(read.len()));
                }
                if !written.is_empty() && !write {
                    written.swap_remove(back.index(written.len()));
                }
            }
            drop((read, written));
            prop_assert!(map.lend_mut(0, 4096).is_some());
        }
    }
}
