//! The program `partywall-bridge`: `partywall`, with what crosses from host to host. `partywall` starts it for that, so
//! that no network code is in the broker or in a program that only shares memory.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    partywall_cli::main(None)
}
