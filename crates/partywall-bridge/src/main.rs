//! The program `partywall-bridge`.

use std::process::ExitCode;

fn main() -> ExitCode {
    partywall_bridge::main()
}
