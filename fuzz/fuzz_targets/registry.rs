//! The broker's registry against its model: random events, with restarts among them. A restart writes the registry and
//! reads it again, or repeats the events of a journal.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| partywall_broker::fuzz_registry(input));
