//! `partywall abandon`. With `--json`: `name`, `abandoned` (true), `socket`.
//!
//! All waits for values that the timeline has not reached end immediately, waits of streams too. The work behind such a
//! wait then reads incomplete data, so abandon a timeline only if its writer hangs and will never signal.

use clap::Args;
use partywall::{Domain, Error, ErrorKind, error::NotFound};
use serde_json::json;

use crate::{Context, describe, failure::Failure};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The timeline
    name: String,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).operator(true).connect()?;
    domain.abandon_timeline(&arguments.name).map_err(|error| explained(&domain, &arguments.name, error))?;
    let output = context.output();
    let name = &arguments.name;
    output.line(format!("all waits for timeline {name:?} have ended; a new writer goes on from its last value"));
    output.value(&json!({ "name": name, "abandoned": true, "socket": domain.socket() }));
    Ok(())
}

/// Returns the error for a name that is not a timeline; it may be of another kind.
fn explained(domain: &Domain, name: &str, error: Error) -> Failure {
    if !matches!(error, Error::NotFound(NotFound::Object { .. })) {
        return error.into();
    }
    let Some(kind) = describe::kind_of(domain, name) else { return error.into() };
    let message = format!("{name:?} is a {kind}, not a timeline: there are no waits to end");
    let advice = format!("`partywall show {name}` shows it; `partywall ls` lists all timelines");
    Failure::new(ErrorKind::Usage, message, advice)
}
