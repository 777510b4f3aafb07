//! `--simulated`: runs the same command on the simulated CUDA driver, which `partywall-lab` contains.

use std::env;

use partywall::{ErrorKind, cuda::Driver};
use partywall_os::environment;

use crate::{Context, failure::Failure, lab};

/// The default domain of simulated commands. Simulated and real memory never share a domain.
pub(crate) const DOMAIN: &str = "simulated";

/// Replaces this process by the same command on the simulated driver. Returns if the process already uses that driver.
///
/// The environment chooses the driver, so that child processes use the same one.
///
/// # Errors
/// If `partywall-lab` is missing or cannot be started, and in a program with privileges.
pub fn enter(context: &Context) -> Result<(), Failure> {
    let names_broker = context.domain.is_some() || context.socket.is_some();
    let own_domain =
        env::var_os("PARTYWALL_DOMAIN").is_some_and(|name| name == DOMAIN) && env::var_os("PARTYWALL_SOCKET").is_none();
    if is_chosen() && (names_broker || own_domain) {
        return Ok(());
    }
    if environment::is_privileged() {
        // The next process would ignore the variable, too, and start itself again for ever.
        let message = "--simulated chooses a driver by the environment, which a program with privileges ignores";
        return Err(Failure::new(ErrorKind::Refused, message, "run it as a user, without set-user-ID or capabilities"));
    }
    let mut command = lab::command("--simulated")?;
    command.env(Driver::LIBRARY_VARIABLE, Driver::SIMULATED);
    if !names_broker {
        command.env("PARTYWALL_DOMAIN", DOMAIN).env_remove("PARTYWALL_SOCKET");
    }
    Err(lab::LAB_PROGRAM.execute(command))
}

/// Returns whether this process runs on the simulated driver that `partywall-lab` contains.
pub(crate) fn is_chosen() -> bool {
    environment::place(Driver::LIBRARY_VARIABLE).is_some_and(|library| library == Driver::SIMULATED)
}

/// Returns the option with which another command uses the same driver: ` --simulated`, or nothing.
#[must_use]
pub fn flag() -> &'static str {
    if is_chosen() { " --simulated" } else { "" }
}
