//! The place of shared memory in tests that are the same for every place.
//!
//! CI runs these tests twice: in host memory, and with [`DEVICE`] set on the simulated GPU. A test that applies only to
//! host memory has `host_memory` in its name, and runs once.

use partywall::{Place, gpu};

/// The environment variable with the place: `cuda` for the first GPU of the driver that `PARTYWALL_LIBCUDA` names; host
/// memory if it is not set.
pub(crate) const DEVICE: &str = "PARTYWALL_TEST_DEVICE";

/// Returns the place as the option `--device` takes it.
///
/// # Panics
/// If the environment names neither.
pub fn device() -> &'static str {
    match std::env::var(DEVICE).as_deref() {
        Err(_) | Ok("host") => "host",
        Ok("cuda") => "cuda",
        Ok(other) => panic!("{DEVICE}={other}: host or cuda"),
    }
}

/// Returns the place.
///
/// # Panics
/// If the place is a GPU and there is none.
pub fn place() -> Place {
    match device() {
        "host" => Place::Host,
        _ => Place::Gpu(gpu::devices().unwrap()[0].uuid().unwrap()),
    }
}

/// Returns the kind of memory there.
pub fn kind() -> &'static str {
    if device() == "host" { "host" } else { "vmm" }
}
