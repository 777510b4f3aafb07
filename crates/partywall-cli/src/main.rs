//! The program `partywall`.

use std::process::ExitCode;

fn main() -> ExitCode {
    partywall_cli::main(None)
}
