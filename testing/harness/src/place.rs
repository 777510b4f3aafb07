//! Where tests share memory that are the same for every place.
//!
//! CI runs them twice: as they are, in host memory, and with [`DEVICE`] set, on the simulated GPU. What is only said
//! of host memory has `host_memory` in its name, and runs once.

use partywall::{Place, gpu};

/// `cuda` for the first GPU of the driver that `PARTYWALL_LIBCUDA` names; host memory without it.
pub(crate) const DEVICE: &str = "PARTYWALL_TEST_DEVICE";

/// Returns the place as the command's `--device` takes it.
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
/// If it is to be a GPU and there is none.
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
