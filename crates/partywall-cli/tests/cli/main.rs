//! The program `partywall`, as users and scripts start it. In one program, because each that contains tests is linked
//! with the whole library.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod cat;
mod common;
mod cp;
mod demo;
mod doctor;
mod explain;
mod kinds;
mod losses;
mod metrics;
mod mps;
mod objects;
mod pools;
mod queues;
mod recordings;
mod restart;
mod serve;
mod service;
mod simulated;
mod soak;
mod surroundings;
mod top;
mod topics;
mod trace;
mod users;

/// Runs the other processes that tests start. It is no test itself.
#[test]
fn role() {
    if let Ok(role) = std::env::var(partywall_harness::ROLE) {
        match role.as_str() {
            "holder" => losses::play(),
            "other program" => simulated::play(),
            role => soak::play(role),
        }
    }
}

/// Runs the stand-in for the MPS daemon. It is no test itself.
#[test]
fn mps_control() {
    partywall_harness::mps::play();
}
