//! Tables keyed by the broker's own numbers.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// A table keyed by numbers that this broker assigns itself. No peer chooses them, so they need no protection against
/// chosen collisions. That protection would cost more than the rest of a lookup.
pub(super) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// Spreads consecutive numbers over a word.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u64(&mut self, id: u64) {
        // The odd number nearest to 2^64 divided by the golden ratio. It spreads consecutive numbers over all bits that
        // a table uses.
        self.0 = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
