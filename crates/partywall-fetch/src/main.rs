//! The program `partywall-fetch`.

use std::process::ExitCode;

fn main() -> ExitCode {
    partywall_fetch::main()
}
