//! `partywall rm NAME…`. With `--json`: `removed`, a list of `name`, `version`, `bytes_kept`, `holders`
//! ([`describe`]), `queues` ([`describe`]), `notice` (with `--deadline` as of [`describe::version`], else null), and
//! `failed`, a list of `name`, `error` (`code`, `kind`, `message`, `advice`).
//!
//! Every name is tried. The exit code is that of the first failure. Before it removes the matches of a pattern, the
//! command asks for confirmation unless `--yes` is given. Without a terminal to ask at, it refuses.
//!
//! `partywall rm --unproven [PID]`. With `--json`: `freed`, a list of `member`, `pid`, `command`, `leases`, `bytes`.

use std::{io::IsTerminal, time::Duration};

use clap::Args;
use partywall::{
    Domain, Error, ErrorKind, Pattern, Then, bytes,
    error::{InvalidArgument, NotFound},
    info::Freed,
    near::did_you_mean,
};
use serde_json::json;

use crate::{Context, describe, failure::Failure, output::Output, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The names, or patterns in quotes: `*` matches any characters, also `/`, and `?` matches one
    #[arg(required_unless_present = "unproven", value_name = "NAME|PATTERN")]
    names: Vec<String>,
    /// Do not ask before removing the matches of a pattern
    #[arg(short, long)]
    yes: bool,
    /// Give the readers SECONDS to drop the names. The names cannot be opened any more
    #[arg(long, value_name = "SECONDS", value_parser = text::parse_seconds, allow_negative_numbers = true)]
    deadline: Option<Duration>,
    /// What happens to readers that are left at the deadline. wait: nothing; stale: they get no new view of the memory;
    /// evict: they are evicted, as by `partywall evict` [default: wait]
    #[arg(long, value_name = "POLICY", value_parser = parse_then, requires = "deadline")]
    then: Option<Then>,
    /// Free the memory of unproven dead processes (`partywall ps`), of all or of one, although their GPU work may still
    /// run. Use it only when none of their GPU work runs any more
    #[arg(long, value_name = "PID", num_args = 0..=1, value_parser = text::parse_pid, conflicts_with_all = ["names", "yes", "deadline"])]
    unproven: Option<Option<u32>>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).operator(true).connect()?;
    if let Some(pid) = arguments.unproven {
        return free(context, &domain, pid);
    }
    let output = context.output();
    let mut removed = Vec::new();
    let mut failed = Vec::new();
    let mut first = None::<ErrorKind>;
    let names = wanted(&domain, &arguments.names)?;
    if arguments.names.iter().any(|name| is_pattern(name)) && !arguments.yes && !confirm(output, &domain, &names)? {
        return Err(Failure::silent(ErrorKind::CheckFailed));
    }
    for name in &names {
        let done = match arguments.deadline {
            None => domain.remove(name),
            Some(deadline) => domain.withdraw(name, deadline, arguments.then.unwrap_or(Then::Wait)),
        };
        match done {
            Ok(done) => {
                let rest = match describe::what_stays(done.bytes_kept, &done.holders, &done.queues) {
                    Some(stays) => stays,
                    None => "its memory is free".into(),
                };
                let notice = done.notice.filter(|_| !done.holders.is_empty() || !done.queues.is_empty());
                let notice = notice.map_or_else(String::new, |notice| format!("; {}", describe::notice(&notice)));
                output.line(format!("removed {name:?} (version {}); {rest}{notice}", done.version));
                removed.push(json!({
                    "name": name,
                    "version": done.version,
                    "bytes_kept": done.bytes_kept,
                    "holders": done.holders,
                    "queues": done.queues,
                    "notice": done.notice,
                }));
            }
            Err(error) => {
                let failure = explained(&domain, name, error);
                first.get_or_insert(failure.kind);
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

fn parse_then(text: &str) -> Result<Then, String> {
    let all = [Then::Wait, Then::Stale, Then::Evict];
    let then = all.into_iter().find(|then| then.name() == text);
    then.ok_or_else(|| format!("{text:?} is not wait, stale or evict{}", did_you_mean(all.map(Then::name), text)))
}

/// Returns the given names and the matches of the patterns, each once.
fn wanted(domain: &Domain, arguments: &[String]) -> Result<Vec<String>, Failure> {
    let mut wanted: Vec<String> = Vec::new();
    for argument in arguments {
        let names = if is_pattern(argument) { matching(domain, argument)? } else { vec![argument.clone()] };
        for name in names {
            if !wanted.contains(&name) {
                wanted.push(name);
            }
        }
    }
    Ok(wanted)
}

fn is_pattern(argument: &str) -> bool {
    argument.contains(['*', '?'])
}

/// Returns the names that a pattern matches. A name whose last version was removed counts as removed, even while a
/// process holds that version.
fn matching(domain: &Domain, pattern: &str) -> Result<Vec<String>, Failure> {
    let usage = |why| Error::InvalidArgument(InvalidArgument::Pattern { pattern: pattern.to_owned(), why });
    let pattern = Pattern::new(pattern).map_err(usage)?;
    let there = domain.names()?.into_iter().filter(|name| name.latest.is_some() && pattern.matches(&name.name));
    let names: Vec<_> = there.map(|name| name.name).collect();
    if names.is_empty() {
        let what = format!("no segment, pool, topic or queue has a name that matches {:?}", pattern.as_str());
        return Err(Failure::new(ErrorKind::NotFound, what, "`partywall ls` lists all names"));
    }
    Ok(names)
}

/// Lists the names to remove and asks for confirmation.
fn confirm(output: Output, domain: &Domain, names: &[String]) -> Result<bool, Failure> {
    let count = text::count(names.len() as u64, "name");
    if !std::io::stdin().is_terminal() {
        let listed = names.iter().take(LISTED).map(|name| format!("\n  {name}")).collect::<String>();
        let more = names.len().saturating_sub(LISTED);
        let rest = if more > 0 { format!("\n  … and {more} more") } else { String::new() };
        let what = format!("a pattern matches {count}, and no terminal is available for confirmation:{listed}{rest}");
        let advice = "add --yes to remove them; `partywall ls PATTERN` shows what matches";
        return Err(Failure::new(ErrorKind::Usage, what, advice).with_details(json!({ "names": names })));
    }
    for name in domain.names()?.iter().filter(|name| names.contains(&name.name)) {
        output.relay(format!("  {}", describe::name_line(name)));
    }
    output.ask(format!("Remove {count}? [y/N] "));
    let mut answer = String::new();
    let read = std::io::stdin().read_line(&mut answer).is_ok();
    let agreed = read && matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    if !agreed {
        output.remark("nothing was removed");
    }
    Ok(agreed)
}

/// Returns why a name cannot be removed; it may name a timeline or a semaphore.
fn explained(domain: &Domain, name: &str, error: Error) -> Failure {
    if let (Error::InvalidArgument(InvalidArgument::Name { .. }), Some((whole, _))) =
        (&error, name.split_once(['@', ':']))
    {
        let message = format!("{name:?} is not a name: `rm` removes a name with all its versions and tensors");
        return Failure::new(ErrorKind::Usage, message, format!("`partywall rm {whole}` removes all of it"));
    }
    if !matches!(error, Error::NotFound(NotFound::Name { .. })) {
        return error.into();
    }
    let (kind, also) = match describe::kind_of(domain, name) {
        Some(kind @ "timeline") => (kind, format!("; `partywall abandon {name}` ends all waits for it")),
        Some(kind @ "semaphore") => (kind, String::new()),
        _ => return error.into(),
    };
    let message = format!("{kind} {name:?} cannot be removed: it ends with the last process that has it open");
    Failure::new(ErrorKind::Refused, message, format!("`partywall show {name}` lists those processes{also}"))
}

/// How many names a refusal lists.
const LISTED: usize = 20;

fn free(context: &Context, domain: &Domain, pid: Option<u32>) -> Result<(), Failure> {
    let freed = domain.free_unproven(pid)?;
    let output = context.output();
    for Freed { pid, command, leases, bytes: held, .. } in &freed {
        let who = describe::process(*pid, command, describe::SHORT);
        output.line(format!("freed what {who} held: {} on {}", text::count((*leases).into(), "lease"), bytes(*held)));
    }
    if freed.is_empty() {
        output.note("nothing is in quarantine");
    }
    output.value(&json!({ "freed": freed }));
    Ok(())
}
