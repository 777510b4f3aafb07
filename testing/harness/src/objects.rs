//! Small objects in host memory, each filled with one byte, for tests of the broker.

use partywall::{DType, Domain, Place, Publisher, Segment};

use crate::WATCHDOG;

/// Commits a version of a kept name with one tensor, in which every byte is `value`.
///
/// # Panics
/// If it cannot be committed.
pub fn commit(domain: &Domain, name: &str, value: u8) -> Segment {
    let builder = domain.create(name, Place::Host).tensor("x", DType::U8, &[BYTES as u64]).kept(true);
    let mut build = builder.allocate().unwrap();
    build.write("x", &[value; BYTES]).unwrap();
    build.commit().unwrap()
}

/// Checks that a segment is as [`commit`] wrote it.
///
/// # Panics
/// If it is not.
#[track_caller]
pub fn assert_contains(segment: &Segment, value: u8) {
    assert_eq!(segment.tensor("x").unwrap().to_vec().unwrap(), [value; BYTES]);
}

/// Publishes a message of eight bytes, each of them `value`.
///
/// # Panics
/// If it cannot be published.
pub fn send(publisher: &Publisher, value: u8) {
    let mut loan = publisher.loan(DType::U8, &[8], WATCHDOG).unwrap();
    loan.bytes_mut().unwrap().fill(value);
    loan.filled().publish(WATCHDOG).unwrap();
}

/// The size of a committed tensor.
const BYTES: usize = 4096;
