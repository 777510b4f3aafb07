//! `partywall abandon`. With `--json`: `name`, `abandoned` (true), `socket`.
//!
//! Whoever waits for what the timeline has not reached is told so at once, streams too. That what runs behind such a wait
//! works on garbage is the price; it is for a writer that hangs, and will never get there.

use clap::Args;
use serde_json::json;

use crate::{Context, failure::Failure};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The timeline
    name: String,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).connect()?;
    domain.abandon_timeline(&arguments.name)?;
    let output = context.output();
    output.line(format!(
        "all waits for timeline {:?} have ended; a new writer goes on from its last value",
        arguments.name
    ));
    output.value(&json!({ "name": arguments.name, "abandoned": true, "socket": domain.socket() }));
    Ok(())
}
