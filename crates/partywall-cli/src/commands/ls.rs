//! `partywall ls`. With `--json` it prints one object, with `--watch` one object a line for each repetition:
//!
//! - `socket`;
//! - `bytes`: what the broker holds at each place, older versions included, a list of `place`, `bytes`;
//! - `names`: a list of [`describe::name`]; what was pulled has `origin`, the version of the other host, as well;
//! - `timelines` and `semaphores` ([`describe`]): their names are independent of
//!   those in `names`.

use std::{collections::BTreeMap, time::Duration};

use clap::Args;
use partywall::{
    Domain, Pattern, Place,
    info::{NameInfo, Named, ObjectKind},
};
use serde_json::{Value, json};

use crate::{
    Context, bridge,
    columns::{name, object},
    describe,
    failure::Failure,
    output::Output,
    repeat::{INTERVAL, parse_interval, repeat},
    table::{Cell, Column, Entry, Heading, headings},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// List only names that match; `*` stands for any characters, also `/`, and `?` for one. `//HOST` lists the names
    /// that another host exports
    #[arg(value_parser = Pattern::new)]
    pattern: Option<Pattern>,
    /// Repeat the output every SECONDS until Ctrl-C: in place on a terminal, else block after block [default: 2]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = INTERVAL)]
    #[arg(value_parser = parse_interval)]
    watch: Option<Duration>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let pattern = arguments.pattern.as_ref();
    if let Some(host) = pattern.map(Pattern::as_str).filter(|text| bridge::is_remote(text)) {
        return bridge::remote(context, "ls", |bridge| bridge.ls, host);
    }
    let domain = context.options().start(false).operator(true).connect()?;
    let output = context.output();
    repeat(output, arguments.watch, || show(output, &domain, pattern))
}

fn show(output: Output, domain: &Domain, pattern: Option<&Pattern>) -> Result<(), Failure> {
    let mut names = domain.names()?;
    let mut objects = domain.objects()?;
    if let Some(pattern) = pattern {
        names.retain(|name| pattern.matches(&name.name));
        objects.retain(|object| pattern.matches(object.name()));
    }
    let origins: BTreeMap<_, _> =
        names.iter().filter_map(|name| Some((name.name.as_str(), origin(domain, name)?))).collect();
    let (timelines, semaphores) = describe::apart(&objects);
    let status = domain.status()?;
    output.value(&json!({
        "socket": domain.socket(),
        "bytes": describe::ledger(&status),
        "names": names.iter().map(|name| described(name, origins.get(name.name.as_str()))).collect::<Vec<_>>(),
        "timelines": timelines,
        "semaphores": semaphores,
    }));
    if names.is_empty() && objects.is_empty() {
        let which = if pattern.is_some() { "no name matches the pattern" } else { "nothing is shared yet" };
        output.note(format!("{which} in the domain at {}", domain.socket().display()));
        return Ok(());
    }
    // Where everything belongs to this user alone, the column would say nothing.
    let owners = names.iter().filter_map(|name| name.latest.as_ref()).map(|latest| (latest.uid, latest.shared));
    let owners = owners.chain(timelines.iter().map(|timeline| (timeline.uid, timeline.shared)));
    let mut owners = owners.chain(semaphores.iter().map(|semaphore| (semaphore.uid, semaphore.shared)));
    let has_users = owners.any(|(uid, shared)| uid != domain.uid() || shared);
    let of = |kind| names.iter().filter(move |info| name::kind(info) == kind);
    let objects_of = |kind| objects.iter().filter(move |object| object.kind() == kind);
    let segments = if origins.is_empty() { name::SEGMENTS } else { name::SEGMENTS_AND_COPIES };
    let columns = &segments[..segments.len() - usize::from(!has_users)];
    let segment = |info: &NameInfo| {
        let note = origins.get(info.name.as_str()).cloned().unwrap_or_default();
        Entry { note, ..Entry::new(info) }.cells(columns)
    };
    let tables = [
        (headings(columns), of(Named::Segment).map(segment).collect()),
        table(name::POOLS, has_users, of(Named::Pool).filter(|info| info.usage.is_some())),
        table(name::TOPICS, has_users, of(Named::Topic).filter(|info| name::topic(info).is_some())),
        table(name::QUEUES, has_users, of(Named::Queue).filter(|info| name::queue(info).is_some())),
        table(object::TIMELINES, has_users, objects_of(ObjectKind::Timeline)),
        table(object::SEMAPHORES, has_users, objects_of(ObjectKind::Semaphore)),
    ];
    for (i, (headings, rows)) in tables.iter().filter(|(_, rows)| !rows.is_empty()).enumerate() {
        if i > 0 {
            output.line("");
        }
        output.cells("", headings, rows);
    }
    // The table says where each name is, and not what older versions take there.
    let held = status.bytes.iter().map(|(at, held)| (Place::from(*at), *held));
    let on_nodes = held.filter(|(place, _)| matches!(place, Place::Pinned(_)));
    let on_nodes = on_nodes.map(|(place, held)| format!("{place} {}", describe::held(&status, place, held)));
    let on_nodes = on_nodes.collect::<Vec<_>>().join(", ");
    if pattern.is_none() && !on_nodes.is_empty() {
        output.line(format!("\nholds {on_nodes}"));
    }
    Ok(())
}

/// Returns the version of another host that a segment was pulled from.
fn origin(domain: &Domain, name: &NameInfo) -> Option<String> {
    name.latest.as_ref().filter(|latest| latest.control.is_none())?;
    describe::origin(&domain.inspect(&name.name).ok()?).map(|(origin, _)| origin)
}

fn described(name: &NameInfo, origin: Option<&String>) -> Value {
    let mut value = describe::name(name);
    if let (Some(origin), Some(members)) = (origin, value.as_object_mut()) {
        members.insert("origin".into(), origin.as_str().into());
    }
    value
}

/// Returns a table with a row for each item. The last of the columns says to which user an item belongs.
fn table<'a, T: 'a>(
    columns: &[Column<T>],
    has_users: bool,
    items: impl Iterator<Item = &'a T>,
) -> (Vec<Heading<'static>>, Vec<Vec<Cell>>) {
    let columns = &columns[..columns.len() - usize::from(!has_users)];
    (headings(columns), items.map(|item| Entry::new(item).cells(columns)).collect())
}
