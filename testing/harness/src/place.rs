//! The place of shared memory in tests that are the same for every place.
//!
//! CI runs these tests in host memory and, with [`DEVICE`] set, in memory of the simulated driver: of a GPU, and in
//! `cargo xtask test --long` of a NUMA node, too. A test that applies only to host memory has `host_memory` in its
//! name, and runs once.

use partywall::{Place, gpu};

/// The environment variable with the place: `cuda` for the first GPU of the driver that `PARTYWALL_LIBCUDA` names,
/// `pinned` for its pinned memory; host memory if it is not set.
pub(crate) const DEVICE: &str = "PARTYWALL_TEST_DEVICE";

/// Returns the place as the option `--device` takes it.
///
/// # Panics
/// If the environment names something else.
pub fn device() -> &'static str {
    match std::env::var(DEVICE).as_deref() {
        Err(_) | Ok("host") => "host",
        Ok("cuda") => "cuda",
        Ok("pinned") => "pinned",
        Ok(other) => panic!("{DEVICE}={other}: host, cuda or pinned"),
    }
}

/// Returns the place.
///
/// # Panics
/// If the place is a GPU and there is none.
pub fn place() -> Place {
    match device() {
        "host" => Place::Host,
        "pinned" => Place::Pinned(0),
        _ => Place::Gpu(gpu::devices().unwrap()[0].uuid().unwrap()),
    }
}

/// Returns the kind of memory there.
pub fn kind() -> &'static str {
    if device() == "cuda" { "vmm" } else { device() }
}
