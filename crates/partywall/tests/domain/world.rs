//! The tensors of these tests, and processes of their own.

use std::process::Command;

use partywall::{DType, Domain, Segment};
use partywall_harness::{Running, place};

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

/// Runs the body of a test in a process of its own. Under `cargo test`, all tests of a program are threads of one
/// process.
pub(crate) fn alone<F: FnOnce()>(body: F) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    // crate::module::test::{{closure}}
    let (_, test) = std::any::type_name::<F>().split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test.trim_end_matches("::{{closure}}"), "--nocapture"]).env(ALONE, "1");
    let output = Running::spawn(&mut command).wait().expect(0);
    assert!(output.text().contains("1 passed"), "{}", output.text());
}

/// Set in a process that runs a single test.
const ALONE: &str = "PARTYWALL_TEST_ALONE";
