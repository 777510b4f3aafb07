//! The interface to the program that runs a lab.

use std::{
    fmt,
    path::{Path, PathBuf},
    rc::Rc,
};

use partywall::{DeviceChoice, ErrorKind, Location, Place};
use partywall_os::dir::PrivateDir;
use serde_json::Value;

use crate::failure::Failure;

/// The program's options and its console. The program's own executable must accept the arguments `lab NAME ROLE` and
/// `serve`: labs start roles and brokers with it.
#[derive(Debug, Clone)]
pub struct Context {
    /// The chosen domain, if any.
    pub domain: Option<String>,
    /// The chosen socket of the broker, if any.
    pub socket: Option<PathBuf>,
    /// The option with which another command uses the same driver: ` --simulated`, or nothing.
    pub flag: &'static str,
    /// The console to which the lab prints.
    pub console: Rc<dyn Console>,
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

/// The output of a lab. Lines are for people, values for programs; a console shows one of the two.
pub trait Console: fmt::Debug {
    /// Prints a line for people.
    fn line(&self, text: &str);

    /// Prints a value for programs, on a line of its own.
    fn value(&self, value: &Value);

    /// Prints aligned rows for people. A narrow terminal leaves out the columns of `spare`.
    fn table(&self, headings: &[&str], rows: &[Vec<String>], spare: &[&str]);

    /// Returns a console like this one that prints on standard error, for labs whose result is on standard output.
    fn on_standard_error(&self) -> Rc<dyn Console>;

    /// Returns whether lines may have colours.
    fn has_colours(&self) -> bool;

    /// Returns the place that `--device` means here. Prints a remark if it is host memory only because no GPU exists.
    ///
    /// # Errors
    /// As [`partywall::gpu::resolve`].
    fn place(&self, choice: DeviceChoice) -> Result<Place, Failure>;
}
