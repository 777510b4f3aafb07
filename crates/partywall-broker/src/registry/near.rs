//! Suggestions: existing names that look like one that was not found.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
};

use super::types::Name;

/// Returns at most [`NEAR`] names that a person may have meant by `wanted`, likeliest first. Considers only entries for
/// which `exists` is true.
///
/// Only neighbours in alphabetical order are compared, so a miss costs about the same among a thousand names and a
/// million. With many names, a typing error in the first letters is therefore not found.
pub(super) fn near<T>(entries: &BTreeMap<Name, T>, wanted: &Name, exists: impl Fn(&T) -> bool) -> Vec<Name> {
    let after = entries.range::<Name, _>((Excluded(wanted), Unbounded)).take(NEIGHBOURS);
    let before = entries.range::<Name, _>(..wanted).rev().take(NEIGHBOURS);
    let candidates = after.chain(before).filter(|(_, entry)| exists(entry)).map(|(name, _)| name);
    let mut ranked: Vec<_> =
        candidates.filter_map(|name| rank(name.as_str(), wanted.as_str()).map(|rank| (rank, name))).collect();
    ranked.sort();
    ranked.into_iter().take(NEAR).map(|(_, name)| name.clone()).collect()
}

/// Returns at most [`NEAR`] of `numbers` that a person may have meant by `wanted`, likeliest first.
pub(super) fn near_numbers(numbers: impl Iterator<Item = u32>, wanted: u32) -> Vec<u32> {
    let wanted = wanted.to_string();
    let alike = |n: u32| distance(n.to_string().as_bytes(), wanted.as_bytes()).map(|distance| (distance, n));
    let ranked: BTreeSet<_> = numbers.filter_map(alike).collect();
    ranked.into_iter().take(NEAR).map(|(_, n)| n).collect()
}

/// Returns how much the names differ, or `None` if they are too different to be confused.
fn rank(name: &str, wanted: &str) -> Option<usize> {
    if name.eq_ignore_ascii_case(wanted) {
        return Some(0);
    }
    if let Some(distance) = distance(name.as_bytes(), wanted.as_bytes()) {
        return Some(distance);
    }
    let last = |path: &str| path.rsplit('/').next().map(str::to_owned);
    let continues = wanted.len() >= 3 && name.starts_with(wanted) || name.len() >= 3 && wanted.starts_with(name);
    (continues || last(name) == last(wanted)).then_some(FAR + 1)
}

/// Returns the edit distance of the two names, up to [`FAR`]. Two names must have most of their letters in common: `a`
/// and `b` are one replacement apart, but not alike.
fn distance(a: &[u8], b: &[u8]) -> Option<usize> {
    let limit = FAR.min(a.len().max(b.len()) / 3);
    if limit == 0 || a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        // Cells farther than `limit` from the diagonal cannot be part of a short enough path.
        let low = i.saturating_sub(limit);
        let high = (i + limit + 1).min(b.len());
        let mut diagonal = row[low];
        row[low] = if low == 0 { i + 1 } else { FAR + 1 };
        for j in low..high {
            let replaced = diagonal + usize::from(*x != b[j]);
            diagonal = row[j + 1];
            let above = if j + 1 > i + limit { FAR + 1 } else { diagonal + 1 };
            row[j + 1] = replaced.min(above).min(row[j] + 1);
        }
    }
    Some(row[b.len()]).filter(|d| *d <= limit)
}

/// Maximum number of suggestions.
const NEAR: usize = 3;

/// Number of names on either side that are compared.
const NEIGHBOURS: usize = 512;

/// The greatest distance that still counts as a typing error.
const FAR: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(a: &[u8], b: &[u8]) -> usize {
        match (a, b) {
            ([], rest) | (rest, []) => rest.len(),
            ([x, a @ ..], [y, b @ ..]) if x == y => plain(a, b),
            ([_, a1 @ ..], [_, b1 @ ..]) => 1 + plain(a1, b1).min(plain(a1, b)).min(plain(a, b1)),
        }
    }

    proptest! {
        #[test]
        fn banded_distance_equals_the_plain_one(a in "[ab]{0,10}", b in "[ab]{0,10}") {
            let limit = FAR.min(a.len().max(b.len()) / 3);
            let plain = plain(a.as_bytes(), b.as_bytes());
            let expected = (limit > 0 && plain <= limit).then_some(plain);
            prop_assert_eq!(distance(a.as_bytes(), b.as_bytes()), expected);
        }
    }

    #[test]
    fn near_names_are_suggested() {
        assert_eq!(rank("LLM", "llm"), Some(0));
        assert_eq!(rank("weights", "wieghts"), Some(2));
        assert_eq!(rank("weights/version2", "weights"), Some(FAR + 1));
        assert_eq!(rank("models/llama", "llama"), Some(FAR + 1));
        assert_eq!(rank("a", "b"), None);
        assert_eq!(rank("weights", "tokens"), None);
    }
}
