//! `partywall rm`. With `--json`: `removed`, a list of `name`, `version`, `bytes_kept`, `holders` ([`describe::holder`]), and
//! `failed`, a list of `name`, `error` (`code`, `kind`, `message`, `advice`).
//!
//! Every name is tried. The exit code is that of the first failure.

use clap::Args;
use partywall::ErrorKind;
use serde_json::json;

use crate::{Context, describe, failure::Failure};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The names
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).connect()?;
    let output = context.output();
    let (mut removed, mut failed, mut first) = (Vec::new(), Vec::new(), None::<ErrorKind>);
    for name in &arguments.names {
        match domain.remove(name) {
            Ok(done) => {
                let rest = match describe::what_stays(done.bytes_kept, &done.holders) {
                    Some(stays) => stays,
                    None => "its memory is free".into(),
                };
                output.line(format!("removed {name:?} (version {}); {rest}", done.version));
                removed.push(json!({
                    "name": name,
                    "version": done.version,
                    "bytes_kept": done.bytes_kept,
                    "holders": done.holders.iter().map(describe::holder).collect::<Vec<_>>(),
                }));
            }
            Err(error) => {
                let failure = Failure::from(error);
                first.get_or_insert(failure.kind());
                failed.push(json!({ "name": name, "error": failure.to_json() }));
                if !output.is_json() {
                    failure.report(context);
                }
            }
        }
    }
    output.value(&json!({ "removed": removed, "failed": failed }));
    first.map_or(Ok(()), |kind| Err(Failure::silent(kind)))
}
