//! `partywall topic ls`. With `--json`: `socket`, and `topics`, a list of `name`, `version`, `place`, `dtype` and
//! `shape` (null if samples may be of any), `max_bytes`, `bytes` (of its memory), `publishers`, `subscribers`,
//! `published` (samples so far), `rate` (current samples per second).

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use partywall::{
    Domain, Pattern, SampleType, bytes,
    info::{NameInfo, TopicUsage, VersionInfo},
};
use serde_json::{Value, json};

use crate::{Context, describe, failure::Failure};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// List only topics that match; `*` stands for any characters, also `/`, and `?` for one
    #[arg(value_parser = Pattern::new)]
    pattern: Option<Pattern>,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let domain = context.options().start(false).connect()?;
    let output = context.output();
    let before = topics(&domain, arguments.pattern.as_ref())?;
    let start = Instant::now();
    let mut now = before.clone();
    // A topic without publishers has no rate to measure.
    if before.iter().any(|topic| topic.usage.publishers > 0) {
        std::thread::sleep(MEASURED);
        now = topics(&domain, arguments.pattern.as_ref())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let key = |topic: &Found| (topic.name.clone(), topic.version.version);
    let published: BTreeMap<_, _> = before.iter().map(|topic| (key(topic), topic.usage.published)).collect();
    let rate = |topic: &Found| {
        let before = published.get(&key(topic)).copied().unwrap_or(topic.usage.published);
        topic.usage.published.saturating_sub(before) as f64 / seconds.max(1e-9)
    };
    output.value(&json!({
        "socket": domain.socket(),
        "topics": now.iter().map(|topic| value(topic, rate(topic))).collect::<Vec<_>>(),
    }));
    if now.is_empty() {
        let which = if arguments.pattern.is_some() { "no topic matches the pattern" } else { "there are no topics" };
        output.note(format!("{which} in the domain at {}", domain.socket().display()));
        return Ok(());
    }
    let row = |topic: &Found| {
        vec![
            topic.name.clone(),
            topic.samples.to_string(),
            topic.usage.publishers.to_string(),
            topic.usage.subscribers.to_string(),
            format!("{:.1}/s", rate(topic)),
            bytes(topic.version.bytes),
            describe::place(topic.version.place.into()),
        ]
    };
    let headings = ["TOPIC", "SAMPLES", ">PUBLISHERS", ">SUBSCRIBERS", ">RATE", ">MEMORY", "PLACE"];
    output.table(&headings, &now.iter().map(row).collect::<Vec<_>>(), &["PLACE", "MEMORY", "PUBLISHERS"]);
    Ok(())
}

/// A topic in the list of names.
#[derive(Clone)]
struct Found {
    name: String,
    version: VersionInfo,
    samples: SampleType,
    usage: TopicUsage,
}

fn topics(domain: &Domain, pattern: Option<&Pattern>) -> Result<Vec<Found>, Failure> {
    let names = domain.names()?;
    let is_meant = |name: &NameInfo| pattern.is_none_or(|pattern| pattern.matches(&name.name));
    let topic = |name: NameInfo| {
        let version = name.latest?;
        let usage = name.usage?.topic?;
        let samples = SampleType::of(&version.control?.topic?);
        Some(Found { name: name.name, version, samples, usage })
    };
    Ok(names.into_iter().filter(is_meant).filter_map(topic).collect())
}

fn value(topic: &Found, rate: f64) -> Value {
    let Found { name, version, samples, usage } = topic;
    json!({
        "name": name,
        "version": version.version,
        "place": describe::place(version.place.into()),
        "dtype": samples.dtype.map(partywall::DType::name),
        "shape": samples.shape.map(Vec::from),
        "max_bytes": version.control.map(|control| control.block_bytes),
        "bytes": version.bytes,
        "publishers": usage.publishers,
        "subscribers": usage.subscribers,
        "published": usage.published,
        "rate": rate,
    })
}

/// How long samples are counted to measure the rates.
const MEASURED: Duration = Duration::from_millis(250);
