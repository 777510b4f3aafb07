//! The program `partywall-lab`.

use std::process::ExitCode;

fn main() -> ExitCode {
    partywall_lab::main(&[])
}
