//! What only the program `partywall-fetch` contains: `put` of what a URL names, so that no TLS is in `partywall`, which is
//! also the broker. `partywall` becomes that program as it becomes `partywall-lab`, see [`lab`](crate::lab).

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use partywall::{doctor::Finding, files::Storage};

use crate::{failure::Failure, lab::Program, output::Output};

/// What `partywall-fetch` contains beside `partywall`.
#[derive(Debug)]
pub struct Fetch {
    /// Returns the storage that a URL names, and the path of its file or folder there, without sending anything.
    pub open: fn(&Request) -> Result<Opened, Failure>,
}

/// A storage, and the path of what a URL names there.
pub type Opened = (Box<dyn Storage>, PathBuf);

/// What to put, and how to get it.
#[derive(Debug, Clone)]
pub struct Request {
    /// The URL.
    pub url: String,
    /// How often a request is made again without progress between.
    pub retries: u32,
    /// How long a connection may make no progress.
    pub timeout: Duration,
    /// Whether HTTP without TLS may go to other machines.
    pub allow_http: bool,
    /// For remarks about what is tried again.
    pub output: Output,
}

/// The program that puts URLs.
pub(crate) const FETCH_PROGRAM: Program = Program {
    name: "partywall-fetch",
    install: "install it in a clone of the repository: `cargo install --locked --path crates/partywall-fetch`, or \
              `pip install ./python/fetch`",
};

static FETCH: OnceLock<&'static Fetch> = OnceLock::new();

/// Sets what this program contains.
pub fn set(fetch: &'static Fetch) {
    FETCH.get_or_init(|| fetch);
}

/// Returns what this program contains.
pub(crate) fn contained() -> Option<&'static Fetch> {
    FETCH.get().copied()
}

/// Reports whether URLs can be put.
pub(crate) fn examine() -> Finding {
    if contained().is_some() || FETCH_PROGRAM.is_installed() {
        return Finding::ok("partywall-fetch is there");
    }
    Finding::skipped("partywall-fetch is not installed: `partywall put` takes files only").fix(FETCH_PROGRAM.install)
}

/// Returns the URL, if the argument is one and not the path of a file.
pub(crate) fn url(argument: &Path) -> Option<&str> {
    let text = argument.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c));
    is_scheme.then_some(text)
}
