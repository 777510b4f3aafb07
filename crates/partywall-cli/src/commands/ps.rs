//! `partywall ps`. With `--json` it prints one object, with `--watch` one object a line for each repetition: `socket`,
//! and `members`, a list of members ([`describe`]) without this process.

use std::time::Duration;

use clap::Args;
use partywall::{
    Domain,
    info::{Doubt, MemberInfo, MemberState},
};
use serde_json::json;

use crate::{
    Context,
    columns::member,
    describe,
    failure::Failure,
    output::Output,
    repeat::{INTERVAL, parse_interval, repeat},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Repeat the output every SECONDS until Ctrl-C: in place on a terminal, else block after block [default: 2]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = INTERVAL, value_parser = parse_interval)]
    watch: Option<Duration>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).operator(true).connect()?;
    let output = context.output();
    repeat(output, arguments.watch, || show(output, &domain))
}

fn show(output: Output, domain: &Domain) -> Result<(), Failure> {
    let members = domain.members()?;
    output.value(&json!({
        "socket": domain.socket(),
        "members": members,
    }));
    if members.is_empty() {
        output.note(format!("no process has joined the domain at {}", domain.socket().display()));
        return Ok(());
    }
    output.rows(member::PS, &members);
    for remark in remarks(&members) {
        output.line(remark);
    }
    Ok(())
}

/// Returns the meanings of the unusual states in the table.
fn remarks(members: &[MemberInfo]) -> Vec<String> {
    let mut states: Vec<_> = members.iter().map(|member| member.state).collect();
    states.sort();
    states.dedup();
    let meanings = states.iter().filter_map(|state| Some((*state, describe::meaning(*state)?)));
    let mut remarks: Vec<_> =
        meanings.map(|(state, meaning)| format!("{}: {meaning}", describe::state(state))).collect();
    remarks.extend(describe::mps_daemons(members).iter().map(describe::mps_line));
    let in_doubt = |doubt| members.iter().any(|m| m.doubt == Some(doubt) && m.state != MemberState::Unproven);
    if in_doubt(Doubt::Mps) {
        remarks.push(describe::MPS_PRICE.into());
    }
    if in_doubt(Doubt::NoPidfd) {
        remarks.push(
            "some members have no pidfd: their memory goes to quarantine at their death unless they disconnected cleanly".into(),
        );
    }
    if let Some(first) = remarks.first_mut() {
        first.insert(0, '\n');
    }
    remarks
}
