//! `partywall ls`. With `--json` it prints one object, with `--watch` one object a line for each repetition:
//!
//! - `socket`;
//! - `bytes`: what the broker holds at each place, older versions included, a list of `place`, `bytes`;
//! - `names`: a list of [`describe::name`];
//! - `timelines` and `semaphores` ([`describe`]): their names are independent of
//!   those in `names`.

use std::time::Duration;

use clap::Args;
use partywall::{
    Domain, Pattern, Place, SampleType, bytes,
    info::{Control, NameInfo, SemaphoreInfo, TimelineInfo},
    kind_name,
};
use serde_json::json;

use crate::{
    Context, describe,
    failure::Failure,
    output::Output,
    repeat::{INTERVAL, parse_interval, repeat},
    text,
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// List only names that match; `*` stands for any characters, also `/`, and `?` for one
    #[arg(value_parser = Pattern::new)]
    pattern: Option<Pattern>,
    /// Repeat the output every SECONDS until Ctrl-C: in place on a terminal, else block after block [default: 2]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = INTERVAL)]
    #[arg(value_parser = parse_interval)]
    watch: Option<Duration>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).operator(true).connect()?;
    let output = context.output();
    repeat(output, arguments.watch, || show(output, &domain, arguments.pattern.as_ref()))
}

fn show(output: Output, domain: &Domain, pattern: Option<&Pattern>) -> Result<(), Failure> {
    let mut names = domain.names()?;
    let mut objects = domain.objects()?;
    if let Some(pattern) = pattern {
        names.retain(|name| pattern.matches(&name.name));
        objects.retain(|object| pattern.matches(object.name()));
    }
    let (timelines, semaphores) = describe::apart(objects);
    let status = domain.status()?;
    output.value(&json!({
        "socket": domain.socket(),
        "bytes": describe::ledger(&status),
        "names": names.iter().map(describe::name).collect::<Vec<_>>(),
        "timelines": timelines,
        "semaphores": semaphores,
    }));
    if names.is_empty() && timelines.is_empty() && semaphores.is_empty() {
        let which = if pattern.is_some() { "no name matches the pattern" } else { "there are no names" };
        output.note(format!("{which} in the domain at {}", domain.socket().display()));
        return Ok(());
    }
    let headings = ["NAME", ">VERSION", "KIND", "PLACE", ">SIZE", ">TENSORS", "LIFETIME", ">LEASES", ">OLDER", "AGE"];
    let mut segments = Vec::new();
    let mut pools = Vec::new();
    let mut topics = Vec::new();
    let mut queues = Vec::new();
    for name in &names {
        match name.latest.as_ref().and_then(|latest| latest.control) {
            None => segments.push(row(name)),
            Some(Control { topic: Some(_), .. }) => topics.extend(topic(name)),
            Some(Control { queue: Some(_), .. }) => queues.extend(queue(name)),
            Some(_) => pools.extend(pool(name)),
        }
    }
    // Where everything belongs to this user alone, the column would say nothing.
    let owners = names.iter().filter_map(|name| name.latest.as_ref()).map(|latest| (latest.uid, latest.shared));
    let owners = owners.chain(timelines.iter().map(|timeline| (timeline.uid, timeline.shared)));
    let mut owners = owners.chain(semaphores.iter().map(|semaphore| (semaphore.uid, semaphore.shared)));
    let has_users = owners.any(|(uid, shared)| uid != domain.uid() || shared);
    let timelines = timelines.iter().map(timeline).collect();
    let semaphores = semaphores.iter().map(semaphore).collect();
    // Each table with the columns that a narrow terminal leaves out, in this order. Every row ends with its user.
    let tables: [(&[&str], Vec<_>, &[&str]); 6] = [
        (&headings, segments, &["OLDER", "LEASES", "KIND", "TENSORS", "AGE", "LIFETIME", "PLACE"]),
        (&POOL, pools, &["KIND", "LEASES", "AGE", "LIFETIME", "PLACE"]),
        (&TOPIC, topics, &["KIND", "LIFETIME", "DEPTH", "AGE", "DTYPE", "PLACE", "BYTES EACH"]),
        (&QUEUE, queues, &["KIND", "LIFETIME", "AGE", "PLACE", "COMPLETED"]),
        (&["TIMELINE", ">VALUE", ">PROMISED", ">LEASES", "WRITER"], timelines, &["LEASES", "PROMISED"]),
        (&["SEMAPHORE", ">PERMITS", ">HELD", ">WAITING", ">LEASES"], semaphores, &["LEASES", "WAITING"]),
    ];
    for (i, (headings, rows, spare)) in tables.iter().filter(|(_, rows, _)| !rows.is_empty()).enumerate() {
        if i > 0 {
            output.line("");
        }
        let mut headings = headings.to_vec();
        let mut rows = rows.clone();
        match has_users {
            true => headings.push("USER"),
            false => rows.iter_mut().for_each(|row| _ = row.pop()),
        }
        output.table(&headings, &rows, spare);
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

fn timeline(timeline: &TimelineInfo) -> Vec<String> {
    vec![
        timeline.name.clone(),
        timeline.value.to_string(),
        timeline.announced.to_string(),
        timeline.leases.to_string(),
        describe::writer(timeline),
        describe::user(timeline.uid, timeline.shared),
    ]
}

fn semaphore(semaphore: &SemaphoreInfo) -> Vec<String> {
    let SemaphoreInfo { name, maximum, held, waiting, leases, uid, shared } = semaphore;
    let numbers = [maximum, held, waiting, leases].map(u32::to_string);
    [name.clone()].into_iter().chain(numbers).chain([describe::user(*uid, *shared)]).collect()
}

const POOL: [&str; 9] = ["POOL", "KIND", "PLACE", ">BLOCKS", ">BYTES EACH", ">FREE", "LIFETIME", ">LEASES", "AGE"];

fn pool(name: &NameInfo) -> Option<Vec<String>> {
    let latest = name.latest.as_ref()?;
    let usage = name.usage?;
    let control = latest.control?;
    Some(vec![
        name.name.clone(),
        kind_name(latest.kind).into(),
        describe::place(latest.place.into()),
        control.blocks.to_string(),
        control.block_bytes.to_string(),
        usage.free.to_string(),
        latest.lifetime.name().into(),
        latest.leases.to_string(),
        text::duration(text::since(latest.committed_at)),
        describe::user(latest.uid, latest.shared),
    ])
}

const TOPIC: [&str; 11] = [
    "TOPIC",
    "KIND",
    "PLACE",
    "SAMPLES",
    ">DEPTH",
    ">BYTES EACH",
    ">PUBLISHERS",
    ">SUBSCRIBERS",
    ">PUBLISHED",
    "LIFETIME",
    "AGE",
];

fn topic(name: &NameInfo) -> Option<Vec<String>> {
    let latest = name.latest.as_ref()?;
    let usage = name.usage?.topic?;
    let control = latest.control?;
    Some(vec![
        name.name.clone(),
        kind_name(latest.kind).into(),
        describe::place(latest.place.into()),
        SampleType::of(&control.topic?).to_string(),
        control.topic?.depth.to_string(),
        control.block_bytes.to_string(),
        usage.publishers.to_string(),
        usage.subscribers.to_string(),
        usage.published.to_string(),
        latest.lifetime.name().into(),
        text::duration(text::since(latest.committed_at)),
        describe::user(latest.uid, latest.shared),
    ])
}

const QUEUE: [&str; 11] =
    ["QUEUE", "KIND", "PLACE", ">PENDING", ">RUNNING", ">DONE", ">DEAD", ">FREE", ">COMPLETED", "LIFETIME", "AGE"];

fn queue(name: &NameInfo) -> Option<Vec<String>> {
    let latest = name.latest.as_ref()?;
    let usage = name.usage?.queue?;
    Some(vec![
        name.name.clone(),
        kind_name(latest.kind).into(),
        describe::place(latest.place.into()),
        usage.pending.to_string(),
        (usage.claimed + usage.enqueued).to_string(),
        usage.done.to_string(),
        usage.dead.to_string(),
        usage.free.to_string(),
        usage.completed.to_string(),
        latest.lifetime.name().into(),
        text::duration(text::since(latest.committed_at)),
        describe::user(latest.uid, latest.shared),
    ])
}

fn row(name: &NameInfo) -> Vec<String> {
    let older = match name.older {
        0 => String::new(),
        n => format!("{n} ({})", bytes(name.older_bytes)),
    };
    let Some(latest) = &name.latest else {
        let mut row = vec![name.name.clone(), describe::gone(name).into()];
        row.resize(11, String::new());
        row[8] = older;
        if let Some(notice) = &name.notice {
            let left = text::until(notice.until);
            let now = if left.is_zero() { "over".into() } else { format!("in {}", text::duration(left)) };
            row[6] = format!("{} {now}", notice.then.name());
        }
        return row;
    };
    let mutable = match (latest.mutable, latest.reserved) {
        (false, _) => String::new(),
        (true, 0) => ", mutable".into(),
        (true, reserved) => format!(", mutable to {}", bytes(reserved)),
    };
    vec![
        name.name.clone(),
        latest.version.to_string(),
        kind_name(latest.kind).into(),
        describe::place(latest.place.into()),
        bytes(latest.bytes),
        latest.tensors.to_string(),
        format!("{}{mutable}", latest.lifetime.name()),
        latest.leases.to_string(),
        older,
        text::duration(text::since(latest.committed_at)),
        describe::user(latest.uid, latest.shared),
    ]
}
