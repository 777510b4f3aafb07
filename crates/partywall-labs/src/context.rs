//! What a lab needs of the program that runs it.

use std::{fmt, path::PathBuf, rc::Rc};

use partywall::{DeviceChoice, Place};
use serde_json::Value;

/// The program's options and its console. The program's own executable must accept the arguments `lab NAME ROLE` and
/// `serve`: labs start roles and brokers with it.
#[derive(Debug, Clone)]
pub struct Context {
    /// The domain that was chosen, if one was.
    pub domain: Option<String>,
    /// The broker's socket that was chosen, if one was.
    pub socket: Option<PathBuf>,
    /// What makes another command run on the same driver: ` --simulated`, or nothing.
    pub flag: &'static str,
    /// Where the lab prints.
    pub console: Rc<dyn Console>,
}

/// Where a lab prints. Lines are for people, values for programs; a console shows one of the two.
pub trait Console: fmt::Debug {
    /// Prints a line for people.
    fn line(&self, text: &str);

    /// Prints a value for programs, on a line of its own.
    fn value(&self, value: &Value);

    /// Prints aligned rows for people. On a narrow terminal the columns of `spare` are left out.
    fn table(&self, headings: &[&str], rows: &[Vec<String>], spare: &[&str]);

    /// Returns the place that `--device` means here, with a remark if it is host memory only for want of a GPU.
    ///
    /// # Errors
    /// See [`partywall::gpu::resolve`].
    fn place(&self, choice: DeviceChoice) -> partywall::Result<Place>;
}
