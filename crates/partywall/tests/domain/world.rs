//! The tensors of these tests.

use partywall::{DType, Domain, Segment};
use partywall_harness::place;

pub(crate) use partywall_harness::{Actor, ROLE, World, eventually};

/// Commits one small tensor `x` that holds `value`.
pub(crate) fn commit(domain: &Domain, name: &str, value: u32, kept: bool) -> Segment {
    let builder = domain.create(name, place()).tensor("x", DType::U32, &[4]).kept(kept);
    let mut build = builder.allocate().unwrap();
    build.write("x", &value.to_ne_bytes().repeat(4)).unwrap();
    build.commit().unwrap()
}

/// The value that [`commit`] wrote.
pub(crate) fn value(segment: &Segment) -> u32 {
    let bytes = segment.tensor("x").unwrap().to_vec().unwrap();
    let value = bytes[..4].try_into().map(u32::from_ne_bytes).unwrap();
    assert_eq!(bytes, value.to_ne_bytes().repeat(4));
    value
}
