//! `partywall rm NAME…`. With `--json`: `removed`, a list of `name`, `version`, `bytes_kept`, `holders` ([`describe::holder`]), and
//! `failed`, a list of `name`, `error` (`code`, `kind`, `message`, `advice`).
//!
//! Every name is tried. The exit code is that of the first failure.
//!
//! `partywall rm --unproven [PID]`. With `--json`: `freed`, a list of `member`, `pid`, `command`, `leases`, `bytes`.

use clap::Args;
use partywall::{Domain, ErrorKind, bytes, info::Freed};
use serde_json::json;

use crate::{Context, describe, failure::Failure, text};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The names
    #[arg(required_unless_present = "unproven", value_name = "NAME")]
    names: Vec<String>,
    /// Give back what dead processes held although nobody knows that their work on it is over (`partywall ps`): of all, or
    /// of one. Only when nothing of them runs on a GPU any more
    #[arg(long, value_name = "PID", num_args = 0..=1, conflicts_with = "names")]
    unproven: Option<Option<u32>>,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).connect()?;
    if let Some(pid) = arguments.unproven {
        return free(context, &domain, pid);
    }
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

fn free(context: &Context, domain: &Domain, pid: Option<u32>) -> Result<(), Failure> {
    let freed = domain.free_unproven(pid)?;
    let output = context.output();
    for Freed { pid, command, leases, bytes: held, .. } in &freed {
        let who = describe::process(*pid, command, describe::SHORT);
        output.line(format!("freed what {who} held: {} on {}", text::count((*leases).into(), "lease"), bytes(*held)));
    }
    if freed.is_empty() && !output.is_json() {
        output.remark("nothing is in quarantine");
    }
    let values = freed.iter().map(|Freed { member, pid, command, leases, bytes }| {
        json!({ "member": member, "pid": pid, "command": command, "leases": leases, "bytes": bytes })
    });
    output.value(&json!({ "freed": values.collect::<Vec<_>>() }));
    Ok(())
}
