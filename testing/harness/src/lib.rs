//! Helpers for tests with the real binary: private directories, and child processes that never outlive the test.
//!
//! A [`Sandbox`] is a temporary directory with its own socket, log and home, so that tests do not interfere with each
//! other or with the user's files. Dropping it ends its broker and fails the test if a socket or a process is left.
//!
//! There are no time limits here, only watchdogs: [`WATCHDOG`] is far longer than any wait of a test, and only ends a
//! test that hangs.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a harness fails by panicking, as tests do")]

mod actor;
#[cfg(feature = "crash-points")]
pub mod crash;
pub mod hostile;
pub mod hosts;
pub mod mps;
mod objects;
mod place;
mod process;
mod sandbox;
mod signals;
mod terminal;
pub mod wire;
mod world;

use std::time::{Duration, Instant};

pub use actor::Actor;
pub use objects::{assert_contains, commit, send};
pub use place::{device, kind, place};
pub use process::{Output, Running, kill, pidfd_of};
pub use rustix::process::Signal;
pub use sandbox::{Sandbox, binary, copy_program, relay, simulated_driver, write_script};
pub use terminal::Terminal;
pub use world::{ROLE, World, cut_connections, linger, next_order, say, simulated};

/// The time after which a test counts as hanging.
pub const WATCHDOG: Duration = Duration::from_secs(300);

/// Waits until `condition` holds.
///
/// # Panics
/// If the watchdog ends it.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < deadline, "watchdog: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns bytes that differ everywhere, and with every `seed`.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut noise = vec![0; len];
    // An index into a slice is no call, unlike one into a vector: unoptimised it takes a third of the time.
    let bytes = noise.as_mut_slice();
    let mut i = 0;
    // Iterators would be those that other crates have compiled without optimisation, and take ten times as long.
    while i < len {
        bytes[i] = ((i as u64 ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
        i += 1;
    }
    noise
}
