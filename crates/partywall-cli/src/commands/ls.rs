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
    info::{Control, NameInfo, Named, QueueUsage, SemaphoreInfo, TimelineInfo, TopicUsage},
    kind_name,
};
use serde_json::json;

use crate::{
    Context, describe,
    failure::Failure,
    output::{Column, Output},
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
        let which = if pattern.is_some() { "no name matches the pattern" } else { "nothing is shared yet" };
        output.note(format!("{which} in the domain at {}", domain.socket().display()));
        return Ok(());
    }
    // Where everything belongs to this user alone, the column would say nothing.
    let owners = names.iter().filter_map(|name| name.latest.as_ref()).map(|latest| (latest.uid, latest.shared));
    let owners = owners.chain(timelines.iter().map(|timeline| (timeline.uid, timeline.shared)));
    let mut owners = owners.chain(semaphores.iter().map(|semaphore| (semaphore.uid, semaphore.shared)));
    let has_users = owners.any(|(uid, shared)| uid != domain.uid() || shared);
    let of = |kind| names.iter().filter(move |name| named(name) == kind);
    let pools = of(Named::Pool).filter(|name| name.usage.is_some());
    let topics = of(Named::Topic).filter(|name| topic(name).is_some());
    let queues = of(Named::Queue).filter(|name| queue(name).is_some());
    // Each table with the columns that a narrow terminal leaves out, in this order.
    let mut tables = Tables { output, has_users, is_first: true };
    tables.add(&SEGMENTS, of(Named::Segment), &["OLDER", "LEASES", "KIND", "TENSORS", "AGE", "LIFETIME", "PLACE"]);
    tables.add(&POOLS, pools, &["KIND", "LEASES", "AGE", "LIFETIME", "PLACE"]);
    tables.add(&TOPICS, topics, &["KIND", "LIFETIME", "DEPTH", "AGE", "PLACE", "BYTES EACH", "PUBLISHERS"]);
    tables.add(&QUEUES, queues, &["KIND", "LIFETIME", "AGE", "PLACE", "COMPLETED"]);
    tables.add(&TIMELINES, &timelines, &["LEASES", "PROMISED"]);
    tables.add(&SEMAPHORES, &semaphores, &["LEASES", "WAITING"]);
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

/// Prints tables with an empty line between them.
struct Tables {
    output: Output,
    /// Whether they have the last of their columns, which says whose a name is.
    has_users: bool,
    is_first: bool,
}

impl Tables {
    /// Prints a table, unless it has no rows.
    fn add<'a, T: 'a>(&mut self, columns: &[Column<T>], items: impl IntoIterator<Item = &'a T>, spare: &[&str]) {
        let mut items = items.into_iter().peekable();
        if items.peek().is_none() {
            return;
        }
        if !std::mem::take(&mut self.is_first) {
            self.output.line("");
        }
        let columns = &columns[..columns.len() - usize::from(!self.has_users)];
        self.output.rows(columns, items, spare);
    }
}

const SEGMENTS: [Column<NameInfo>; 11] = [
    ("NAME", |name| name.name.clone()),
    (">VERSION", |name| name.latest.as_ref().map_or(describe::gone(name).into(), |it| it.version.to_string())),
    KIND,
    PLACE,
    (">SIZE", |name| shown(name.latest.as_ref().map(|latest| bytes(latest.bytes)))),
    (">TENSORS", |name| shown(name.latest.as_ref().map(|latest| latest.tensors))),
    ("LIFETIME", lifetime),
    LEASES,
    (">OLDER", |name| describe::older(name)),
    AGE,
    USER,
];

const POOLS: [Column<NameInfo>; 10] = [
    ("POOL", |name| name.name.clone()),
    KIND,
    PLACE,
    (">BLOCKS", |name| shown(control(name).map(|control| control.blocks))),
    BYTES_EACH,
    (">FREE", |name| shown(name.usage.map(|usage| usage.free))),
    LIFETIME,
    LEASES,
    AGE,
    USER,
];

const TOPICS: [Column<NameInfo>; 12] = [
    ("TOPIC", |name| name.name.clone()),
    KIND,
    PLACE,
    ("SAMPLES", |name| shown(control(name).and_then(|control| control.topic).map(|shape| SampleType::of(&shape)))),
    (">DEPTH", |name| shown(control(name).and_then(|control| control.topic).map(|shape| shape.depth))),
    BYTES_EACH,
    (">PUBLISHERS", |name| shown(topic(name).map(|topic| topic.publishers))),
    (">SUBSCRIBERS", |name| shown(topic(name).map(|topic| topic.subscribers))),
    (">PUBLISHED", |name| shown(topic(name).map(|topic| topic.published))),
    LIFETIME,
    AGE,
    USER,
];

const QUEUES: [Column<NameInfo>; 12] = [
    ("QUEUE", |name| name.name.clone()),
    KIND,
    PLACE,
    (">PENDING", |name| shown(queue(name).map(|queue| queue.pending))),
    (">RUNNING", |name| shown(queue(name).map(|queue| queue.claimed + queue.enqueued))),
    (">DONE", |name| shown(queue(name).map(|queue| queue.done))),
    (">DEAD", |name| shown(queue(name).map(|queue| queue.dead))),
    (">FREE", |name| shown(queue(name).map(|queue| queue.free))),
    (">COMPLETED", |name| shown(queue(name).map(|queue| queue.completed))),
    LIFETIME,
    AGE,
    USER,
];

const TIMELINES: [Column<TimelineInfo>; 6] = [
    ("TIMELINE", |timeline| timeline.name.clone()),
    (">VALUE", |timeline| timeline.value.to_string()),
    (">PROMISED", |timeline| timeline.announced.to_string()),
    (">LEASES", |timeline| timeline.leases.to_string()),
    ("WRITER", describe::writer),
    ("USER", |timeline| describe::user(timeline.uid, timeline.shared)),
];

const SEMAPHORES: [Column<SemaphoreInfo>; 6] = [
    ("SEMAPHORE", |semaphore| semaphore.name.clone()),
    (">PERMITS", |semaphore| semaphore.maximum.to_string()),
    (">HELD", |semaphore| semaphore.held.to_string()),
    (">WAITING", |semaphore| semaphore.waiting.to_string()),
    (">LEASES", |semaphore| semaphore.leases.to_string()),
    ("USER", |semaphore| describe::user(semaphore.uid, semaphore.shared)),
];

// The columns that several tables of names have. Those of a latest version are empty where there is none.
const KIND: Column<NameInfo> = ("KIND", |name| shown(name.latest.as_ref().map(|latest| kind_name(latest.kind))));
const PLACE: Column<NameInfo> =
    ("PLACE", |name| shown(name.latest.as_ref().map(|it| describe::place(it.place.into()))));
const BYTES_EACH: Column<NameInfo> = (">BYTES EACH", |name| shown(control(name).map(|control| control.block_bytes)));
const LIFETIME: Column<NameInfo> = ("LIFETIME", |name| shown(name.latest.as_ref().map(|it| it.lifetime.name())));
const LEASES: Column<NameInfo> = (">LEASES", |name| shown(name.latest.as_ref().map(|latest| latest.leases)));
const AGE: Column<NameInfo> =
    ("AGE", |name| shown(name.latest.as_ref().map(|it| text::duration(text::since(it.committed_at)))));
const USER: Column<NameInfo> = ("USER", |name| shown(name.latest.as_ref().map(|it| describe::user(it.uid, it.shared))));

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn named(name: &NameInfo) -> Named {
    Named::of(control(name).as_ref())
}

fn control(name: &NameInfo) -> Option<Control> {
    name.latest.as_ref()?.control
}

fn topic(name: &NameInfo) -> Option<TopicUsage> {
    name.usage?.topic
}

fn queue(name: &NameInfo) -> Option<QueueUsage> {
    name.usage?.queue
}

/// Returns how long a segment lives, and what may be written; of a removed one its deadline.
fn lifetime(name: &NameInfo) -> String {
    let Some(latest) = &name.latest else {
        return name.notice.as_ref().map_or_else(String::new, |notice| {
            let left = text::until(notice.until);
            let now = if left.is_zero() { "over".into() } else { format!("in {}", text::duration(left)) };
            format!("{} {now}", notice.then.name())
        });
    };
    let mutable = match (latest.mutable, latest.reserved) {
        (false, _) => String::new(),
        (true, 0) => ", mutable".into(),
        (true, reserved) => format!(", mutable to {}", bytes(reserved)),
    };
    format!("{}{mutable}", latest.lifetime.name())
}
