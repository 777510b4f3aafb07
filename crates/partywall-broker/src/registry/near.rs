//! Suggestions: existing names that look like one that was not found.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
};

use partywall_wire::near::{NEAR, distance, rank};

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

/// Number of names on either side that are compared.
const NEIGHBOURS: usize = 512;

#[cfg(test)]
mod tests {
    use partywall_wire::near::FAR;
    use proptest::prelude::*;

    use super::*;

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
}
