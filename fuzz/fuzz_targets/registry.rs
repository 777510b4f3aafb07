//! The broker's registry against its model: random events, with restarts among them. A restart writes the registry and
//! reads it again, or repeats the events of a journal.
#![no_main]

use libfuzzer_sys::fuzz_target;

// The registry alone: instrumented, the rest of the broker takes long to compile.
#[allow(dead_code, unused_imports, reason = "the broker uses the rest")]
#[path = "../../crates/partywall-broker/src/registry/mod.rs"]
mod registry;

fuzz_target!(|input: &[u8]| registry::fuzz(input));
