//! `partywall topic ls`. With `--json`: `socket`, and `topics`, a list of `name`, `version`, `place`, `dtype` and
//! `shape` (null if samples may be of any), `max_bytes`, `bytes` (of its memory), `publishers`, `subscribers`,
//! `published` (samples so far), `rate` (current samples per second).

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use partywall::{Domain, Pattern, SampleType, info::NameInfo};
use serde_json::{Value, json};

use crate::{Context, columns::name, describe, failure::Failure, table::Entry};

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
    if before.iter().filter_map(name::topic).any(|usage| usage.publishers > 0) {
        std::thread::sleep(MEASURED);
        now = topics(&domain, arguments.pattern.as_ref())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let key = |info: &NameInfo| (info.name.clone(), info.latest.as_ref().map(|latest| latest.version));
    let published = |info| name::topic(info).map_or(0, |usage| usage.published);
    let earlier: BTreeMap<_, _> = before.iter().map(|info| (key(info), published(info))).collect();
    let rate = |info| {
        let earlier = earlier.get(&key(info)).copied().unwrap_or(published(info));
        published(info).saturating_sub(earlier) as f64 / seconds.max(1e-9)
    };
    output.value(&json!({
        "socket": domain.socket(),
        "topics": now.iter().filter_map(|info| value(info, rate(info))).collect::<Vec<_>>(),
    }));
    if now.is_empty() {
        let which = if arguments.pattern.is_some() { "no topic matches the pattern" } else { "there are no topics" };
        output.note(format!("{which} in the domain at {}", domain.socket().display()));
        return Ok(());
    }
    let entry = |info| Entry { rate: Some(rate(info)), ..Entry::new(info) };
    output.entries(name::TOPIC_RATES, now.iter().map(entry));
    Ok(())
}

/// Returns the topics in the list of names.
fn topics(domain: &Domain, pattern: Option<&Pattern>) -> Result<Vec<NameInfo>, Failure> {
    let is_meant = |info: &NameInfo| pattern.is_none_or(|pattern| pattern.matches(&info.name));
    Ok(domain.names()?.into_iter().filter(|info| is_meant(info) && name::topic(info).is_some()).collect())
}

fn value(info: &NameInfo, rate: f64) -> Option<Value> {
    let usage = name::topic(info)?;
    let version = info.latest.as_ref()?;
    let control = version.control?;
    let samples = SampleType::of(&control.topic?);
    Some(json!({
        "name": info.name,
        "version": version.version,
        "place": describe::place(version.place.into()),
        "dtype": samples.dtype.map(partywall::DType::name),
        "shape": samples.shape.map(Vec::from),
        "max_bytes": control.block_bytes,
        "bytes": version.bytes,
        "publishers": usage.publishers,
        "subscribers": usage.subscribers,
        "published": usage.published,
        "rate": rate,
    }))
}

/// How long samples are counted to measure the rates.
const MEASURED: Duration = Duration::from_millis(250);
