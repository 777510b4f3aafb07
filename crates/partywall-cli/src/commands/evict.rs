//! `partywall evict`. With `--json`: `evicted`, a list of `member`, `pid`, `command`, `leases`, `bytes` (in quarantine
//! until it is dead), `kill` (`not_asked`, `sent`, `exited`, `no_pidfd` or `refused`), `errno` (a number or null).
//!
//! The exit code is 5 if `--kill` could not kill the process; the process is evicted nevertheless.

use clap::Args;
use partywall::{
    ErrorKind, bytes,
    info::{Evicted, Kill, Whom},
};
use serde_json::{Value, json};

use crate::{Context, describe, failure::Failure, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The process: all members with this pid, as `partywall ps` shows it
    #[arg(required_unless_present = "member", value_parser = text::parse_pid)]
    pid: Option<u32>,
    /// Only the member with this number (`partywall ps`), for a process with several connections
    #[arg(long, value_name = "N", conflicts_with = "pid", value_parser = text::parse_number::<u64>)]
    member: Option<u64>,
    /// Send the process SIGKILL as well
    #[arg(long)]
    kill: bool,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let whom = match (arguments.pid, arguments.member) {
        (_, Some(member)) => Whom::Member(member),
        (pid, None) => Whom::Pid(pid.unwrap_or_default()),
    };
    let domain = context.options().start(false).operator(true).connect()?;
    let evicted = domain.evict(whom, arguments.kill)?;
    let output = context.output();
    for member in &evicted {
        output.line(sentence(member));
    }
    let values = json!({ "evicted": evicted.iter().map(value).collect::<Vec<_>>() });
    match evicted.iter().find_map(obstacle) {
        None => {
            output.value(&values);
            Ok(())
        }
        Some((pid, why)) => {
            let advice = format!("the broker refuses its requests; end it to reclaim its memory: kill -9 {pid}");
            let message = format!("pid {pid} is evicted and could not be killed: {why}");
            Err(Failure::new(ErrorKind::Refused, message, advice).with_details(values))
        }
    }
}

/// Returns what happened to a member, for people.
pub(crate) fn sentence(evicted: &Evicted) -> String {
    let Evicted { pid, command, leases, .. } = evicted;
    let who = describe::process(*pid, command, describe::SHORT);
    let ends = match evicted.kill {
        Kill::Sent => "; SIGKILL is sent",
        _ => "",
    };
    match leases {
        0 => format!("evicted {who}; it held nothing{ends}"),
        _ => {
            let held = format!("{} ({})", bytes(evicted.bytes), text::count((*leases).into(), "lease"));
            format!("evicted {who}; {held} in quarantine until it is dead{ends}")
        }
    }
}

fn value(evicted: &Evicted) -> Value {
    let Evicted { member, pid, command, leases, bytes, kill } = evicted;
    json!({
        "member": member,
        "pid": pid,
        "command": command,
        "leases": leases,
        "bytes": bytes,
        "kill": kill.name(),
        "errno": kill.errno(),
    })
}

/// Returns the pid of a process that could not be killed, and why.
pub(crate) fn obstacle(evicted: &Evicted) -> Option<(u32, String)> {
    let why = match evicted.kill {
        Kill::Exited => "it has exited already, and a forked child holds its connection".to_owned(),
        Kill::NoPidfd => "it has no pidfd, and its pid may belong to another process by now".to_owned(),
        Kill::Refused(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        _ => return None,
    };
    Some((evicted.pid, why))
}
