//! The content of a version and the proof of its pieces.
//!
//! The *content* is the bytes of the tensors one after another, in the order of the table; a tensor that shows memory of
//! another one has none of its own. So it depends neither on chunks nor on where the memory is, and a file that was put
//! as raw bytes is the content of its version.
//!
//! Its *root* is the BLAKE3 hash of these bytes, as `b3sum` computes it. BLAKE3 hashes a tree; here its leaves are
//! pieces of 1 MiB, except the last one. The path of a piece is the hashes beside its way to the root. With them the
//! piece alone shows that it belongs to the root, so it does not matter who sends it.

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use blake3::{
    Hash, Hasher,
    hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root},
};
use partywall::info::Table;
use partywall_os::{lock::IgnorePoison, thread::spawn_scoped};

use crate::message::PIECE_BYTES;

/// The hashes of a content, from those of its pieces up to its root.
#[derive(Debug)]
pub(crate) struct ContentTree {
    /// The first level has the hashes of the pieces, each further one those of pairs of the level below. Without a pair
    /// a hash moves up as it is. The root is not among them.
    levels: Vec<Vec<ChainingValue>>,
    root: Hash,
}

/// Where a tensor's bytes are in a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) tensor: String,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

/// Returns where the bytes of a table's tensors are in its content, in order, and the length of the content.
pub(crate) fn spans<B: AsRef<[u8]>>(table: &Table<B>) -> (Vec<Span>, u64) {
    let mut length = 0_u64;
    let mut spans = Vec::new();
    let views = partywall::TableBuilder::from_table(table);
    for (entry, view) in table.in_given_order().into_iter().zip(views.views()) {
        if view.is_none() && entry.bytes() > 0 {
            spans.push(Span { tensor: entry.name().to_owned(), start: length, bytes: entry.bytes() });
            // The table of a version that exists describes memory that exists.
            length = length.saturating_add(entry.bytes());
        }
    }
    (spans, length)
}

/// Returns how many pieces a content has.
pub(crate) fn pieces(length: u64) -> u64 {
    length.div_ceil(PIECE_BYTES as u64)
}

/// Returns the bytes of a piece in its content; none if there is no such piece.
pub(crate) fn piece_range(length: u64, piece: u64) -> Option<Range<u64>> {
    let start = piece.checked_mul(PIECE_BYTES as u64).filter(|start| *start < length)?;
    Some(start..length.min(start.saturating_add(PIECE_BYTES as u64)))
}

impl ContentTree {
    /// Hashes a content by several threads. `read` fills a buffer with the bytes of a range.
    ///
    /// # Errors
    /// The first error of `read`.
    pub(crate) fn new<E: Send>(
        length: u64,
        threads: usize,
        read: impl Fn(Range<u64>, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let count = pieces(length);
        if count <= 1 {
            let mut bytes = vec![0; length as usize];
            read(0..length, &mut bytes)?;
            return Ok(Self { levels: Vec::new(), root: blake3::hash(&bytes) });
        }
        let leaves = Mutex::new(vec![ChainingValue::default(); count as usize]);
        let next = AtomicU64::new(0);
        let failed = Mutex::new(None);
        let work = || {
            let mut buffer = vec![0; PIECE_BYTES];
            while failed.lock().ignore_poison().is_none() {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                let Some(range) = piece_range(length, piece) else { return };
                let bytes = &mut buffer[..(range.end - range.start) as usize];
                match read(range, bytes) {
                    Ok(()) => {
                        let hash = leaf(piece, [&*bytes]);
                        leaves.lock().ignore_poison()[piece as usize] = hash;
                    }
                    Err(error) => drop(failed.lock().ignore_poison().get_or_insert(error)),
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(count as usize) {
                // If no thread can be started, the existing ones do its work.
                let _ = spawn_scoped(scope, "partywall-hash", work);
            }
            work();
        });
        match failed.into_inner().ignore_poison() {
            Some(error) => Err(error),
            None => Ok(Self::of_leaves(leaves.into_inner().ignore_poison())),
        }
    }

    /// Builds the tree over the hashes of at least two pieces.
    fn of_leaves(leaves: Vec<ChainingValue>) -> Self {
        let mut levels = vec![leaves];
        loop {
            let below = &levels[levels.len() - 1];
            if let [left, right] = below[..] {
                let root = merge_subtrees_root(&left, &right, Mode::Hash);
                return Self { levels, root };
            }
            let level = below.chunks(2).map(|pair| match pair {
                [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
                _ => pair[0],
            });
            let level = level.collect();
            levels.push(level);
        }
    }

    /// Returns the hash of the whole content.
    pub(crate) fn root(&self) -> Hash {
        self.root
    }

    /// Returns the hashes beside the way of a piece to the root, from below.
    pub(crate) fn path(&self, piece: u64) -> Vec<ChainingValue> {
        let mut index = piece as usize;
        let mut path = Vec::new();
        for level in &self.levels {
            path.extend(level.get(index ^ 1));
            index /= 2;
        }
        path
    }
}

/// Returns whether these bytes, in parts, are a piece of the content with this root and this length.
pub(crate) fn is_piece<'a>(
    root: Hash,
    length: u64,
    piece: u64,
    parts: impl IntoIterator<Item = &'a [u8]> + Clone,
    path: &[ChainingValue],
) -> bool {
    let Some(range) = piece_range(length, piece) else { return false };
    let found: u64 = parts.clone().into_iter().map(|part| part.len() as u64).sum();
    if found != range.end - range.start {
        return false;
    }
    let mut count = pieces(length);
    if count == 1 {
        let mut hasher = Hasher::new();
        for part in parts {
            hasher.update(part);
        }
        return path.is_empty() && hasher.finalize() == root;
    }
    let mut hash = leaf(piece, parts);
    let mut index = piece;
    let mut path = path.iter();
    while count > 2 {
        // The last of an odd number of hashes moves up as it is.
        if index ^ 1 < count {
            let Some(beside) = path.next() else { return false };
            let (left, right) = if index & 1 == 0 { (&hash, beside) } else { (beside, &hash) };
            hash = merge_subtrees_non_root(left, right, Mode::Hash);
        }
        index /= 2;
        count = count.div_ceil(2);
    }
    match (path.next(), path.next()) {
        (Some(beside), None) if index == 0 => merge_subtrees_root(&hash, beside, Mode::Hash) == root,
        (Some(beside), None) => merge_subtrees_root(beside, &hash, Mode::Hash) == root,
        _ => false,
    }
}

/// Hashes a piece of a content of several.
fn leaf<'a>(piece: u64, parts: impl IntoIterator<Item = &'a [u8]>) -> ChainingValue {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(piece * PIECE_BYTES as u64);
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize_non_root()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: usize = PIECE_BYTES;

    /// Bytes that differ from piece to piece, cheaply.
    fn content(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for (number, piece) in (1_u32..).zip(bytes.chunks_mut(997)) {
            let mark = number.to_le_bytes();
            let marked = mark.len().min(piece.len());
            piece[..marked].copy_from_slice(&mark[..marked]);
        }
        bytes
    }

    fn tree(bytes: &[u8], threads: usize) -> ContentTree {
        let read = |range: Range<u64>, out: &mut [u8]| {
            out.copy_from_slice(&bytes[range.start as usize..range.end as usize]);
            Ok::<(), ()>(())
        };
        ContentTree::new(bytes.len() as u64, threads, read).unwrap()
    }

    fn holds(tree: &ContentTree, bytes: &[u8], piece: u64, path: &[ChainingValue]) -> bool {
        let Some(range) = piece_range(bytes.len() as u64, piece) else { return false };
        let part = &bytes[range.start as usize..range.end as usize];
        let middle = part.len() / 2;
        is_piece(tree.root(), bytes.len() as u64, piece, [&part[..middle], &part[middle..]], path)
    }

    /// Checks that the root is that of BLAKE3, and that each piece is proved by its path and by no other.
    fn check(length: usize) {
        let bytes = content(length);
        let tree = tree(&bytes, 2);
        assert_eq!(tree.root(), blake3::hash(&bytes), "{length}");
        let count = pieces(length as u64);
        for piece in 0..count {
            let path = tree.path(piece);
            assert!(holds(&tree, &bytes, piece, &path), "piece {piece} of {length}");
            let other = (piece + 1) % count;
            assert!(count == 1 || !holds(&tree, &bytes, other, &path), "piece {other} of {length}");
            assert!(!holds(&tree, &bytes, piece, &[&path[..], &[[0; 32]]].concat()), "a longer path");
            assert!(path.is_empty() || !holds(&tree, &bytes, piece, &path[1..]), "a shorter path");
        }
        assert!(!holds(&tree, &bytes, count, &tree.path(0)), "piece {count} of {length}");
    }

    // Holds 443.
    #[test]
    fn root_is_the_plain_hash_around_each_border() {
        for pieces in [0, 1, 2, 3, 4, 5, 7, 8, 9] {
            for length in [pieces * MIB, pieces * MIB + 1, (pieces * MIB).saturating_sub(1)] {
                check(length);
            }
        }
    }

    #[test]
    fn failed_read_is_returned() {
        let read = |range: Range<u64>, _: &mut [u8]| if range.start == 3 << 20 { Err(range.start) } else { Ok(()) };
        assert_eq!(ContentTree::new(9 << 20, 3, read).map(drop), Err(3 << 20));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn each_piece_is_proved(length in 0..6 * MIB) {
            check(length);
        }

        // Holds 443.
        #[test]
        fn wrong_bytes_and_paths_are_refused(length in 1..5 * MIB, at in 0.0..1.0_f64, bit in 0..8_u32, step in 0..3_usize) {
            let mut bytes = content(length);
            let tree = tree(&bytes, 1);
            let at = (at * length as f64) as usize;
            let piece = (at / MIB) as u64;
            let mut path = tree.path(piece);
            bytes[at] ^= 1 << bit;
            prop_assert!(!holds(&tree, &bytes, piece, &path));
            bytes[at] ^= 1 << bit;
            prop_assert!(holds(&tree, &bytes, piece, &path));
            if let Some(hash) = path.get_mut(step) {
                hash[at % 32] ^= 1 << bit;
                prop_assert!(!holds(&tree, &bytes, piece, &path));
            }
        }
    }
}
