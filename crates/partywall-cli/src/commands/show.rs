//! `partywall show`. With `--json` it prints one object:
//!
//! - `name`, `socket`;
//! - `timeline` and `semaphore` of that name ([`describe`], each with `holders`), or
//!   null;
//! - `mps`: the MPS daemons whose clients hold any of these, each with `pipes` (its directory) and `pids`.
//!
//! For a segment, pool, topic or queue the object also has:
//!
//! - `latest`: whether the shown version is the latest;
//! - the keys of [`describe::version`] for the shown version;
//! - `promises` ([`describe::promises_value`]), `bytes_requested`, `chunks` (bytes each);
//! - `holders`, `queues` ([`describe`]);
//! - `detail`: of a pool, topic or queue [`describe::control::detail`], else null;
//! - `versions` (all of them), `builder` (a pid or null), `metadata` (an object);
//! - `tensors`: all, in the order in which they were given, each with `name`, `dtype`, `shape`, `strides` (in
//!   elements), `bytes`, `chunk`, `offset`.

use std::time::{Duration, Instant};

use clap::Args;
use partywall::{
    Domain, Error, SampleType, bytes,
    error::{Gone, NotFound},
    info::{
        AttachedInfo, Control, ControlInfo, HolderInfo, Kind, Lifetime, Notice, ObjectDetail, ObjectHolder, ObjectInfo,
        ObjectKind, QueueShape, SegmentInfo, TopicInfo, TopicShape, VersionInfo,
    },
    kind_name,
};
use serde_json::{Value, json};

use crate::{
    Context, bridge,
    columns::topic_user::{self, Role, TopicUser},
    describe,
    failure::Failure,
    output::Output,
    table::{Cell, Column, Heading},
    text,
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The name of a segment, pool, topic, queue, timeline or semaphore; `NAME@V` is version V of a segment [default:
    /// the latest]. `//HOST/NAME[@V]` is a segment of another host
    #[arg(value_name = "NAME[@V]")]
    name: String,
    /// List all tensors, not only the first 20
    #[arg(long)]
    all: bool,
}

/// The consequences for a version whose memory is lost.
const LOST: &str =
    "its memory was lost, as by a reset of its GPU: the processes that have it open must drop it and be restarted";

/// How long samples are counted to measure their rate.
const MEASURED: Duration = Duration::from_millis(250);

/// Tensors that are listed without `--all`.
const SOME: usize = 20;

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    if bridge::is_remote(&arguments.name) {
        return bridge::remote(context, "show", |bridge| bridge.show, &arguments.name);
    }
    let domain = context.options().start(false).operator(true).connect()?;
    let mut objects = [None, None];
    let mut missing = Vec::new();
    // Timelines and semaphores have no versions.
    if !arguments.name.contains('@') {
        for (place, kind) in objects.iter_mut().zip([ObjectKind::Timeline, ObjectKind::Semaphore]) {
            match domain.inspect_object(kind, &arguments.name) {
                Ok(detail) => *place = Some(detail),
                Err(error @ Error::NotFound(NotFound::Object { .. })) => missing.push(error),
                Err(error) => return Err(error.into()),
            }
        }
    }
    let info = match domain.inspect(&arguments.name) {
        Ok(info) => Some(info),
        Err(Error::NotFound(NotFound::Name { .. })) if objects.iter().any(Option::is_some) => None,
        // The name may be a mistyped timeline, so its near matches are listed too.
        Err(error) => {
            let suggests =
                |error: &Error| matches!(error, Error::NotFound(NotFound::Object { near, .. }) if !near.is_empty());
            let is_lost = matches!(&error, Error::NotFound(NotFound::Name { near, .. }) if near.is_empty());
            let better = missing.into_iter().find(|error| is_lost && suggests(error));
            return Err(better.unwrap_or(error).into());
        }
    };
    let output = context.output();
    let of_info = info.iter().flat_map(|info| &info.holders);
    let of_objects = objects.iter().flatten().flat_map(|object| object.holders.iter().map(|held| &held.holder));
    let holders: Vec<u32> = of_info.chain(of_objects).map(|holder| holder.pid).collect();
    let members = if holders.is_empty() { Vec::new() } else { domain.members()? };
    let daemons = describe::mps_daemons(members.iter().filter(|member| holders.contains(&member.pid)));
    if output.is_json() {
        let info = info.map(|info| with_ages(&domain, info)).transpose()?;
        let mut value = info.as_ref().map_or_else(|| json!({ "name": arguments.name }), value);
        value["socket"] = json!(domain.socket());
        for (key, object) in ["timeline", "semaphore"].into_iter().zip(&objects) {
            value[key] = object.as_ref().map_or(Value::Null, object_value);
        }
        value["mps"] = daemons.iter().map(|(pipes, pids)| json!({ "pipes": pipes, "pids": pids })).collect();
        output.value(&value);
        return Ok(());
    }
    let mut first = info.is_none();
    if let Some((info, shape)) = info.as_ref().and_then(|info| Some((info, info.version.control?.topic?))) {
        topic_facts(output, &domain, info, &shape)?;
    } else if let Some((info, shape)) = info.as_ref().and_then(|info| Some((info, info.version.control?.queue?))) {
        queue_facts(output, info, &shape);
    } else if let Some(info) = &info {
        facts(output, info);
        people(output, info);
        versions(output, info);
        metadata(output, info);
        if info.control.is_none() {
            tensors(output, info, if arguments.all { usize::MAX } else { SOME });
        }
    }
    for object in objects.iter().flatten() {
        if !std::mem::take(&mut first) {
            output.line("");
        }
        object_facts(output, object);
    }
    if !daemons.is_empty() {
        output.line("");
        daemons.iter().for_each(|daemon| output.line(describe::mps_line(daemon)));
        output.line(describe::MPS_PRICE);
    }
    Ok(())
}

/// Shows a topic. `partywall topic info` calls it too.
pub(crate) fn topic(context: &Context, domain: &Domain, info: SegmentInfo) -> Result<(), Failure> {
    let output = context.output();
    if output.is_json() {
        let mut value = value(&with_ages(domain, info)?);
        value["socket"] = json!(domain.socket());
        output.value(&value);
        return Ok(());
    }
    info.version
        .control
        .and_then(|control| control.topic)
        .map_or(Ok(()), |shape| topic_facts(output, domain, &info, &shape))
}

/// Prints a topic: its samples, its memory, its publishers and subscribers.
fn topic_facts(output: Output, domain: &Domain, info: &SegmentInfo, shape: &TopicShape) -> Result<(), Failure> {
    let VersionInfo { place, bytes: allocated, control, .. } = &info.version;
    fact(output, "topic", &info.name);
    fact(output, "samples", SampleType::of(shape).to_string());
    let late = match shape.history {
        0 => "none of them".to_owned(),
        history => format!("the last {history}"),
    };
    let depth = text::count(shape.depth.into(), "sample");
    fact(output, "ring", format!("{depth}; a subscriber that joins later gets {late}"));
    if let Some(control) = control {
        let blocks = describe::control::blocks(control);
        let place = describe::place((*place).into());
        fact(output, "memory", format!("{} on {place}: {blocks}", bytes(*allocated)));
        fact(output, "blocks", describe::control::sum(control, shape));
    }
    // Later, because subscribers measure ages from the first question on.
    let mut used = info.control.clone();
    if let Some(ControlInfo { blocks, topic: Some(topic), .. }) = &info.control {
        fact(output, "in use", describe::control::counts(blocks, "in the ring"));
        fact(output, "audit", describe::control::audit(blocks.invalid));
        let start = Instant::now();
        let later = if topic.publishers.is_empty() { None } else { used_later(domain, info)? };
        let published = later.as_ref().and_then(|later| later.topic.as_ref()).map(|topic| topic.usage.published);
        let more = published.unwrap_or(topic.usage.published).saturating_sub(topic.usage.published);
        let rate = more as f64 / start.elapsed().as_secs_f64().max(1e-9);
        used = later.or(used);
        fact(output, "published", format!("{}, {rate:.1}/s", text::count(topic.usage.published, "sample")));
    }
    history(output, info);
    if let Some(topic) = used.and_then(|used| used.topic) {
        participants(output, &topic);
    }
    // The holders include the publishers and subscribers.
    people(output, info);
    Ok(())
}

/// Prints how long a topic or queue stays, and which process created it.
fn history(output: Output, info: &SegmentInfo) {
    let VersionInfo { version, committer, .. } = &info.version;
    fact(output, "lifetime", lifetime(&info.version));
    fact(output, "made", format!("{} by pid {committer}, version {version}", when(&info.version)));
    user(output, info.version.uid, info.version.shared);
    if info.version.lost {
        fact(output, "lost", LOST);
    } else if !info.is_latest {
        fact(output, "removed", "it can no longer be opened, and goes with the last process that has it open");
    }
    withdrawal(output, &info.version);
}

/// Prints the deadline of a withdrawal, if it has one.
fn withdrawal(output: Output, version: &VersionInfo) {
    if let Some(notice) = &version.notice {
        let Notice { pid, at, until, .. } = notice;
        let when = format!("by pid {pid} {} ago, until {}", text::duration(text::since(*at)), text::moment(*until));
        fact(output, "withdrawn", format!("{when}: {}", describe::notice(notice)));
    }
}

/// Prints a queue: its tasks, and its blocks.
fn queue_facts(output: Output, info: &SegmentInfo, shape: &QueueShape) {
    let VersionInfo { place, bytes: allocated, control, .. } = &info.version;
    fact(output, "queue", &info.name);
    let used = info.control.as_ref().and_then(|used| Some((used, used.queue.as_ref()?)));
    if let Some((_, queue)) = used {
        fact(output, "tasks", describe::control::task_counts(&queue.usage));
        let results = text::count(queue.usage.completed, "result");
        let without = text::count(queue.usage.returned, "attempt");
        fact(output, "so far", format!("{results}; {without} without one"));
    }
    let lease = match shape.lease {
        0 => "none: an attempt ends with its worker".to_owned(),
        ms => format!("{ms} ms for an attempt, unless its worker extends it"),
    };
    fact(output, "lease", lease);
    fact(output, "memory", format!("{} on {}", bytes(*allocated), describe::place((*place).into())));
    let outputs = control.and_then(|control| control.outputs());
    for (what, blocks, counts) in [
        ("inputs", control.as_ref(), used.map(|(used, _)| &used.blocks)),
        ("outputs", outputs.as_ref(), used.map(|(_, queue)| &queue.outputs)),
    ] {
        let Some(blocks) = blocks else { continue };
        let counts = counts.map(|counts| format!(": {}", describe::control::counts(counts, "with tasks")));
        fact(output, what, format!("{}{}", describe::control::blocks(blocks), counts.unwrap_or_default()));
    }
    if let Some((_, queue)) = used
        && queue.usage.done > 0
        && queue.outputs.free == 0
        && queue.outputs.in_ring > 0
    {
        let advice = format!("take them, or drop them with `partywall queue purge {} --results`", info.name);
        fact(output, "blocked", format!("results that were not taken occupy the output blocks: {advice}"));
    }
    if let Some((used, queue)) = used {
        fact(output, "audit", describe::control::audit(used.blocks.invalid + queue.outputs.invalid));
    }
    history(output, info);
    people(output, info);
    if let Some((_, queue)) = used {
        attached(output, &queue.attached);
    }
}

/// Prints the segments that a queue holds.
fn attached(output: Output, attached: &[AttachedInfo]) {
    type Col = Column<AttachedInfo>;
    let columns: [Col; 4] = [
        Col::left("SEGMENT", |held| describe::with_version(&held.name, held.version).into()),
        Col::right("SIZE", |held| Cell::bytes(held.bytes)),
        Col::right("TASKS", |held| held.tasks.into()),
        Col::right("NUMBER", |held| held.attachment.into()).spare(1),
    ];
    output.section("attached segments", &columns, attached);
}

/// Returns the state of a pool, topic or queue [`MEASURED`] later; `None` if it has ended.
fn used_later(domain: &Domain, info: &SegmentInfo) -> Result<Option<ControlInfo>, Failure> {
    std::thread::sleep(MEASURED);
    match domain.inspect(&format!("{}@{}", info.name, info.version.version)) {
        Ok(later) => Ok(later.control),
        Err(
            Error::NotFound(NotFound::Name { .. } | NotFound::Version { .. }) | Error::Gone(Gone::Withdrawn { .. }),
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the state of a topic later if it lacks ages of samples, because subscribers measure ages from the first
/// question on.
fn with_ages(domain: &Domain, mut info: SegmentInfo) -> Result<SegmentInfo, Failure> {
    let topic = info.control.as_ref().and_then(|control| control.topic.as_ref());
    let lacks = |topic: &TopicInfo| {
        !topic.publishers.is_empty() && topic.subscribers.iter().any(|subscriber| subscriber.ages.count == 0)
    };
    if topic.is_some_and(lacks)
        && let Some(later) = used_later(domain, &info)?
    {
        info.control = Some(later);
    }
    Ok(info)
}

/// Prints the user to which a name belongs, and who else may open it.
fn user(output: Output, uid: u32, shared: bool) {
    let others = if shared { "shared: other users may open it" } else { "no other user may open it" };
    fact(output, "user", format!("{uid}; {others}"));
}

fn lifetime(version: &VersionInfo) -> String {
    match version.lifetime {
        Lifetime::Owned if version.owner == version.committer => {
            format!("owned: goes with its committer, pid {}", version.owner)
        }
        Lifetime::Owned => format!("owned: goes with its owner, pid {}", version.owner),
        Lifetime::Kept => "kept: until it is removed, the broker ends, or the machine restarts".to_owned(),
        Lifetime::Shared if version.kind == Kind::Legacy => {
            format!("shared: goes with the last process that has it open, or with its publisher, pid {}", version.owner)
        }
        Lifetime::Shared => "shared: goes with the last process that has it open".to_owned(),
    }
}

fn object_value(object: &ObjectDetail) -> Value {
    let mut value = match &object.info {
        ObjectInfo::Timeline(timeline) => json!(timeline),
        ObjectInfo::Semaphore(semaphore) => json!(semaphore),
        _ => json!({}),
    };
    value["holders"] = object.holders.iter().map(describe::object_holder).collect();
    value
}

fn object_facts(output: Output, object: &ObjectDetail) {
    match &object.info {
        ObjectInfo::Timeline(timeline) => {
            fact(output, "timeline", &timeline.name);
            fact(output, "value", format!("{}; {} is promised", timeline.value, timeline.announced));
            fact(output, "writer", describe::writer(timeline));
            fact(output, "turn", format!("writer {} of this name", timeline.incarnation));
            fact(output, "leases", timeline.leases.to_string());
        }
        ObjectInfo::Semaphore(semaphore) => {
            fact(output, "semaphore", &semaphore.name);
            fact(output, "permits", format!("{} of {} are held", semaphore.held, semaphore.maximum));
            fact(output, "waiting", text::count(semaphore.waiting.into(), "acquirer"));
            fact(output, "leases", semaphore.leases.to_string());
        }
        _ => {}
    }
    let columns: &[_] = match object.info {
        ObjectInfo::Semaphore(_) => &[PID, LEASES, PERMITS, WAITING, COMMAND],
        _ => &[PID, LEASES, COMMAND],
    };
    output.section("holders", columns, &object.holders);
}

// The columns of holders.
const PID: Column<ObjectHolder> = Column::left("PID", |held| match held.holder.unproven {
    true => format!("{} (unproven)", held.holder.pid).into(),
    false => held.holder.pid.into(),
});
const LEASES: Column<ObjectHolder> = Column::right("LEASES", |held| held.holder.leases.into());
const BLOCKS: Column<ObjectHolder> = Column::right("BLOCKS", |held| held.holder.blocks.into());
const PERMITS: Column<ObjectHolder> = Column::right("PERMITS", |held| held.permits.into());
const WAITING: Column<ObjectHolder> = Column::right("WAITING", |held| held.holder.waiting.into());
const TASKS: Column<ObjectHolder> = Column::right("TASKS", |held| held.holder.tasks.into());
const COMMAND: Column<ObjectHolder> =
    Column::left("COMMAND", |held| describe::shorten(&held.holder.command, describe::LONG).into());

fn value(info: &SegmentInfo) -> Value {
    let mut value = json!({ "name": info.name, "latest": info.is_latest });
    if let (Value::Object(all), Value::Object(version)) = (&mut value, describe::version(&info.version)) {
        all.extend(version.into_iter().filter(|(key, _)| key != "tensors"));
    }
    value["promises"] = describe::promises_value(info.version.kind, info.version.mutable);
    value["bytes_requested"] = json!(info.table.tensor_bytes());
    value["chunks"] = json!(info.chunks);
    value["holders"] = json!(info.holders);
    value["queues"] = json!(info.queues);
    value["detail"] = info.control.as_ref().map_or(Value::Null, describe::control::detail);
    value["versions"] = info.versions.iter().map(describe::version).collect();
    value["builder"] = json!(info.builder);
    value["metadata"] = info.table.metadata().collect();
    let tensors = info.table.in_given_order().into_iter().map(|tensor| {
        json!({
            "name": tensor.name(),
            "dtype": tensor.dtype().name(),
            "shape": tensor.shape().collect::<Vec<_>>(),
            "strides": tensor.strides().collect::<Vec<_>>(),
            "bytes": tensor.bytes(),
            "chunk": tensor.chunk(),
            "offset": tensor.offset(),
        })
    });
    value["tensors"] = tensors.collect();
    value
}

fn facts(output: Output, info: &SegmentInfo) {
    let version = &info.version;
    let newest = info.versions.last().is_none_or(|last| last.version == version.version);
    let latest = match (info.is_latest, newest) {
        _ if version.lost => "lost",
        (true, _) => "the latest",
        (false, false) => "not the latest",
        (false, true) => "removed: it can no longer be opened, and goes with its last lease",
    };
    let allocated = bytes(version.bytes);
    fact(output, if version.control.is_some() { "pool" } else { "name" }, &info.name);
    // A pool has only one version, and its memory is divided into blocks, not tensors.
    if version.control.is_none() || !info.is_latest {
        fact(output, "version", format!("{} ({latest})", version.version));
    }
    withdrawal(output, version);
    if version.lost {
        fact(output, "lost", LOST);
    }
    fact(output, "kind", kind_name(version.kind));
    fact(output, "place", describe::place(version.place.into()));
    if version.control.is_some() {
        fact(output, "size", allocated);
        fact(output, "lifetime", lifetime(version));
    } else {
        let access = if version.mutable { "mutable: its users must synchronize their access" } else { "frozen" };
        fact(output, "size", format!("{} requested, {allocated} allocated", bytes(info.table.tensor_bytes())));
        fact(output, "chunks", chunks(&info.chunks));
        fact(output, "lifetime", lifetime(version));
        fact(output, "access", access);
        fact(output, "promises", describe::promises(version.kind, version.mutable));
    }
    if version.reserved > 0 {
        let so_far = text::count(version.growths, "growth");
        let most = bytes(version.reserved);
        fact(output, "growing", format!("up to {most}, in one range of addresses; {so_far} so far"));
    }
    if let Some(control) = &version.control {
        control_facts(output, control, info.control.as_ref());
    }
    fact(output, "committed", format!("{} by pid {}", when(version), version.committer));
    if let Some((origin, root)) = describe::origin(info) {
        fact(output, "copied", format!("from {origin}, root {root}"));
    }
    user(output, version.uid, version.shared);
    fact(output, "leases", version.leases.to_string());
    if let Some(builder) = info.builder {
        fact(output, "builder", format!("pid {builder} builds the next version"));
    }
}

/// Returns when a version was committed: `2026-11-20 11:32:05 UTC (3 s ago)`.
fn when(version: &VersionInfo) -> String {
    let ago = text::duration(text::since(version.committed_at));
    format!("{} ({ago} ago)", text::moment(version.committed_at))
}

/// Prints the options of a pool and how it is used.
fn control_facts(output: Output, control: &Control, used: Option<&ControlInfo>) {
    let zeroed = if control.zeroed { ", zeroed for each taker" } else { "" };
    fact(output, "memory", format!("{}{zeroed}", describe::control::blocks(control)));
    let Some(ControlInfo { blocks, .. }) = used else { return };
    fact(output, "blocks", describe::control::counts(blocks, "in the ring"));
    fact(output, "waiting", text::count(blocks.waiting.into(), "waiter"));
    fact(output, "audit", describe::control::audit(blocks.invalid));
}

/// Prints the publishers and subscribers.
fn participants(output: Output, topic: &TopicInfo) {
    let user = |role| TopicUser { topic: String::new(), role };
    let publishers: Vec<_> = topic.publishers.iter().cloned().map(Role::Publisher).map(user).collect();
    let subscribers: Vec<_> = topic.subscribers.iter().cloned().map(Role::Subscriber).map(user).collect();
    output.section("publishers", topic_user::PUBLISHERS, &publishers);
    output.section("subscribers", topic_user::SUBSCRIBERS, &subscribers);
}

fn fact(output: Output, what: &str, value: impl AsRef<str>) {
    output.line(format!("{what:<10} {}", value.as_ref()));
}

/// `3 × 16 GiB, 1 GiB`.
fn chunks(chunks: &[u64]) -> String {
    let runs = chunks.chunk_by(|a, b| a == b).map(|run| match run {
        [one] => bytes(*one),
        run => format!("{} × {}", run.len(), bytes(run[0])),
    });
    let runs: Vec<_> = runs.collect();
    if runs.is_empty() { "none".into() } else { runs.join(", ") }
}

fn people(output: Output, info: &SegmentInfo) {
    if !info.queues.is_empty() {
        let names: Vec<_> =
            info.queues.iter().map(|queue| describe::with_version(&queue.name, queue.version)).collect();
        fact(output, "held by", format!("{} {}", if names.len() == 1 { "queue" } else { "queues" }, names.join(", ")));
    } else if info.holders.is_empty() {
        return fact(output, "holders", "nobody");
    }
    if info.holders.is_empty() {
        return;
    }
    let columns: &[_] = match &info.control {
        Some(ControlInfo { queue: Some(_), .. }) => &[PID, LEASES, BLOCKS, WAITING, TASKS, COMMAND],
        Some(_) => &[PID, LEASES, BLOCKS, WAITING, COMMAND],
        None => &[PID, LEASES, COMMAND],
    };
    let held = |holder: &HolderInfo| ObjectHolder { holder: holder.clone(), permits: 0 };
    output.section("holders", columns, &info.holders.iter().map(held).collect::<Vec<_>>());
}

fn versions(output: Output, info: &SegmentInfo) {
    if info.versions.len() < 2 {
        return;
    }
    type Col = Column<VersionInfo>;
    let columns: [Col; 7] = [
        Col::right("VERSION", |version| version.version.into()),
        Col::left("PLACE", |version| version.place(version.place.into())),
        Col::right("SIZE", |version| Cell::bytes(version.bytes)),
        Col::right("TENSORS", |version| version.tensors.into()).spare(1),
        Col::right("LEASES", |version| version.leases.into()).spare(3),
        Col::right("COMMITTER", |version| version.committer.into()).spare(2),
        Col::right("AGE", |version| version.since(version.committed_at)),
    ];
    output.section("versions", &columns, &info.versions);
}

fn metadata(output: Output, info: &SegmentInfo) {
    if info.table.metadata().len() == 0 {
        return;
    }
    output.line("\nmetadata");
    for (key, value) in info.table.metadata() {
        output.line(format!("  {}: {}", describe::shorten(key, 80), describe::shorten(value, 200)));
    }
}

fn tensors(output: Output, info: &SegmentInfo, limit: usize) {
    let all = info.table.in_given_order();
    if all.is_empty() {
        return fact(output, "tensors", "none");
    }
    output.line(format!("\n{}", text::count(all.len() as u64, "tensor")));
    let rows = all.iter().take(limit).map(|tensor| {
        let shape: Vec<_> = tensor.shape().map(|n| n.to_string()).collect();
        let strided = if tensor.is_contiguous() { "" } else { " (strided)" };
        let name = describe::shorten(tensor.name(), 100).into();
        let shape = format!("[{}]{strided}", shape.join(", ")).into();
        vec![name, tensor.dtype().name().into(), shape, Cell::bytes(tensor.bytes())]
    });
    let headings = Heading::parse(&["NAME", "DTYPE", "SHAPE", ">SIZE"], &["SIZE"]);
    output.cells("  ", &headings, &rows.collect::<Vec<_>>());
    if all.len() > limit {
        output.line(format!("  … and {} more: --all lists them", all.len() - limit));
    }
}
