//! Free ranges of a chunk.

use std::collections::BTreeMap;

/// Ranges that neither overlap nor touch: the length of each, by its offset.
#[derive(Debug, Default)]
pub(super) struct Holes(BTreeMap<u64, u64>);

impl Holes {
    /// Returns the range from 0 to `bytes`, which is not 0.
    pub(super) fn whole(bytes: u64) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    /// Returns the length of the smallest range of at least `bytes` bytes.
    pub(super) fn fit(&self, bytes: u64) -> Option<u64> {
        self.0.values().copied().filter(|len| *len >= bytes).min()
    }

    /// Takes `bytes` bytes from the beginning of the smallest range that has them. Returns their offset.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let fits = self.0.iter().filter(|(_, len)| **len >= bytes);
        let (offset, len) = fits.map(|(offset, len)| (*offset, *len)).min_by_key(|(_, len)| *len)?;
        self.0.remove(&offset);
        if len > bytes {
            self.0.insert(offset + bytes, len - bytes);
        }
        Some(offset)
    }

    /// Adds a range that is not free yet, and merges it with its neighbours.
    pub(super) fn give(&mut self, offset: u64, bytes: u64) {
        let mut start = offset;
        let mut end = offset + bytes;
        if let Some((before, len)) = self.0.range(..offset).next_back().map(|(before, len)| (*before, *len))
            && before + len == offset
        {
            self.0.remove(&before);
            start = before;
        }
        if let Some(len) = self.0.remove(&end) {
            end += len;
        }
        self.0.insert(start, end - start);
    }

    /// Moves all ranges of `other` here.
    pub(super) fn append(&mut self, other: &mut Self) {
        for (offset, bytes) in std::mem::take(&mut other.0) {
            self.give(offset, bytes);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the bytes of all ranges.
    pub(super) fn bytes(&self) -> u64 {
        self.0.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn smallest_range_that_fits_is_taken() {
        let mut holes = Holes::whole(100);
        let places: Vec<_> = [40, 10, 20, 5, 25].map(|bytes| holes.take(bytes).unwrap()).into();
        assert_eq!(places, [0, 40, 50, 70, 75]);
        assert!(holes.is_empty() && holes.take(1).is_none());
        holes.give(0, 40);
        holes.give(50, 20);
        assert_eq!((holes.fit(15), holes.take(15)), (Some(20), Some(50)));
        assert_eq!(holes.fit(41), None);
    }

    #[test]
    fn neighbours_merge_on_both_sides() {
        let mut holes = Holes::default();
        holes.give(0, 10);
        holes.give(20, 10);
        holes.give(10, 10);
        assert_eq!((holes.fit(30), holes.bytes()), (Some(30), 30));
    }

    proptest! {
        /// Against a byte map: no byte is taken twice, and the free ranges are as long as they can be.
        // Holds 76.
        #[test]
        fn ranges_are_taken_once_and_come_back(
            steps in prop::collection::vec((1_u64..40, any::<prop::sample::Index>()), 1..200)
        ) {
            const LEN: u64 = 128;
            let mut holes = Holes::whole(LEN);
            let mut is_taken = [false; LEN as usize];
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (bytes, which) in steps {
                if let Some(offset) = holes.take(bytes) {
                    for byte in offset..offset + bytes {
                        prop_assert!(!std::mem::replace(&mut is_taken[byte as usize], true));
                    }
                    taken.push((offset, bytes));
                } else {
                    let longest = is_taken.split(|taken| *taken).map(<[_]>::len).max().unwrap_or(0);
                    prop_assert!((longest as u64) < bytes);
                    let (offset, bytes) = taken.swap_remove(which.index(taken.len()));
                    is_taken[offset as usize..(offset + bytes) as usize].fill(false);
                    holes.give(offset, bytes);
                }
                prop_assert_eq!(holes.bytes(), is_taken.iter().filter(|taken| !**taken).count() as u64);
            }
        }
    }
}
