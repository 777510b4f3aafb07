//! `partywall abandon`. With `--json`: `name`, `abandoned` (true), `socket`.
//!
//! Whoever waits for what the timeline has not reached is told so at once, streams too. That what runs behind such a wait
//! works on garbage is the price; it is for a writer that hangs, and will never get there.

use clap::Args;
use partywall::{Domain, Error, ErrorKind, error::NotFound};
use serde_json::json;

use crate::{Context, describe, failure::Failure};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The timeline
    name: String,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).operator(true).connect()?;
    domain.abandon_timeline(&arguments.name).map_err(|error| explained(&domain, &arguments.name, error))?;
    let output = context.output();
    output.line(format!(
        "all waits for timeline {:?} have ended; a new writer goes on from its last value",
        arguments.name
    ));
    output.value(&json!({ "name": arguments.name, "abandoned": true, "socket": domain.socket() }));
    Ok(())
}

/// Why there is nothing to abandon: the name may be of another kind.
fn explained(domain: &Domain, name: &str, error: Error) -> Failure {
    if !matches!(error, Error::NotFound(NotFound::Object { .. })) {
        return error.into();
    }
    let Some(kind) = describe::kind_of(domain, name) else { return error.into() };
    let message = format!("{name:?} is a {kind}, not a timeline: there are no waits to end");
    let advice = format!("`partywall show {name}` shows it; `partywall ls` lists all timelines");
    Failure::new(ErrorKind::Usage, message, advice)
}
