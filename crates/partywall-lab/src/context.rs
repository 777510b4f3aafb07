//! The interface to the program that runs a lab.

use std::path::{Path, PathBuf};

use partywall::{ErrorKind, Location};
use partywall_cli::Output;
use partywall_os::dir::PrivateDir;

use crate::failure::Failure;

/// The program's options and its console. The program's own executable must accept the arguments `lab NAME ROLE` and
/// `serve`: labs start roles and brokers with it.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// The chosen domain, if any.
    pub(crate) domain: Option<String>,
    /// The chosen socket of the broker, if any.
    pub(crate) socket: Option<PathBuf>,
    /// The console to which the lab prints.
    pub(crate) console: Output,
}

impl From<&partywall_cli::Context> for Context {
    fn from(program: &partywall_cli::Context) -> Self {
        Self { domain: program.domain.clone(), socket: program.socket.clone(), console: program.output() }
    }
}

impl Context {
    /// Returns the same with a console on standard error.
    pub(crate) fn on_standard_error(&self) -> Self {
        Self { console: self.console.on_standard_error(), ..self.clone() }
    }

    /// Returns the path of a lab's directory, next to the socket of the user's broker.
    pub(crate) fn lab_directory(&self, lab: &str) -> Result<PathBuf, Failure> {
        let location = Location::find(self.domain.as_deref(), self.socket.as_deref())?;
        Ok(location.socket.with_extension(format!("lab-{lab}")))
    }
}

/// Opens a directory that only this user can enter, and creates it if it is missing.
pub(crate) fn open_directory(path: &Path) -> Result<PrivateDir, Failure> {
    // The broker's directory may be missing. If it cannot be created, the next call fails with the reason.
    let _ = path.parent().map(|parent| PrivateDir::open(parent, true));
    PrivateDir::open(path, true).map_err(|why| {
        Failure::new(
            ErrorKind::Refused,
            format!("{} cannot be used: {why}", path.display()),
            "name a socket in a directory of your own by --socket or PARTYWALL_SOCKET, or set XDG_RUNTIME_DIR",
        )
    })
}
