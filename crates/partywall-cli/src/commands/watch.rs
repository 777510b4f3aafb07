//! `partywall watch`: prints one line for each event, until Ctrl-C, until its reader closes the pipe, or until the
//! broker ends.
//!
//! With `--json` each line is an object.
//!
//! - The first one has `event` (`watching`), `pattern`, `socket`, `point`.
//! - An event has `event` (`created`, `committed`, `withdrawn`, `deadline_set`, `deadline_passed`, `owner_died`,
//!   `owner_faulted`, `device_lost`, `reclaimed`), `named` (`segment`, `timeline`, `semaphore`, `pool`, `topic`,
//!   `queue`), `name`, `at_ms` (since 1970), `point`; `version` and `bytes` if it concerns a version; `pid` if a
//!   process caused it, or `gpu` or `node`; `then` (`wait`, `stale`, `evict`) with `until_ms` or `readers` (their
//!   number) if it concerns the deadline of a withdrawal.
//! - After missed events, an object has `event` (`missed`), `events` (their number, or null if it is unknown), `point`.
//! - When the broker ends, the last one has `error` and `point`.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use clap::Args;
use partywall::{
    Pattern, Place, Watch, WatchEvent, bytes,
    info::{Change, NameEvent, Named, Point},
};
use serde_json::{Value, json};

use crate::{Context, bridge, describe, failure::Failure, output::Output, signals, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Watch only names that match; `*` stands for any characters, also `/`, and `?` for one
    #[arg(value_parser = Pattern::new, default_value = "*", hide_default_value = true)]
    pattern: Pattern,
    /// Continue from a `point` that an earlier watch printed
    #[arg(long, value_name = "POINT")]
    after: Option<Point>,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let stop = signals::cancel_flag()?;
    let domain = context.options().start(false).connect()?;
    let pattern = arguments.pattern.as_str();
    let mut watch = match arguments.after {
        None => domain.watch(pattern)?,
        Some(point) => domain.watch_after(pattern, point)?,
    };
    let output = context.output();
    output.value(&json!({
        "event": "watching",
        "pattern": pattern,
        "socket": domain.socket(),
        "point": watch.point().to_string(),
    }));
    let which = if pattern == "*" { "all names".to_owned() } else { format!("names like {pattern}") };
    output.note(format!("watching {which} in the domain at {}; Ctrl-C ends it", domain.socket().display()));
    print_events(output, &mut watch, &stop)?;
    output.note(format!("`--after {}` continues from here", watch.point()));
    Ok(())
}

fn print_events(output: Output, watch: &mut Watch, stop: &AtomicBool) -> Result<(), Failure> {
    while !stop.load(Ordering::Relaxed) && output.is_read() {
        // Neither a signal nor a closed pipe ends the wait, so both are polled.
        match watch.next(Duration::from_millis(250)) {
            Ok(None) => {}
            Ok(Some(event)) => {
                output.line(line(&event));
                output.value(&value(&event, watch.point()));
            }
            Err(error) => {
                let point = watch.point().to_string();
                let failure = Failure::from(error);
                let advice = format!("{}; the last point was {point}", failure.advice);
                return Err(failure.with_advice(advice).with_details(json!({ "point": point })));
            }
        }
    }
    Ok(())
}

fn line(event: &WatchEvent) -> String {
    let WatchEvent::Name(NameEvent { at, named, name, change, .. }) = event else {
        return match event {
            WatchEvent::Missed { events: Some(events) } => {
                format!("missed {}: list all names again", text::count(*events, "event"))
            }
            _ => "missed the events before this broker: list all names again".into(),
        };
    };
    let what = match named {
        Named::Segment => name.clone(),
        other => format!("{} {name}", other.name()),
    };
    let host = bridge::host_of(name);
    let change = match change {
        Change::Created { .. } if host.is_some() => format!("host found     //{}", host.unwrap_or_default()),
        Change::Withdrawn { .. } if host.is_some() => format!("host lost      //{}", host.unwrap_or_default()),
        Change::Created { pid } => format!("created        {what} by pid {pid}"),
        Change::Committed { version, bytes: size, pid } => {
            format!("committed      {what}@{version}, {}, by pid {pid}", bytes(*size))
        }
        Change::Withdrawn { pid } => format!("withdrawn      {what} by pid {pid}"),
        Change::DeadlineSet { notice } => format!("deadline set   {what}: {}", describe::notice(notice)),
        Change::DeadlinePassed { then, readers: 0 } => {
            format!("deadline over  {what}: no reader is left ({})", then.name())
        }
        Change::DeadlinePassed { then, readers } => {
            let readers = text::count((*readers).into(), "reader");
            format!("deadline over  {what}: {readers} left ({})", then.name())
        }
        Change::OwnerDied { pid } => format!("owner died     {what}: pid {pid}"),
        Change::DeviceLost { place } => format!("device lost    {what}: {}", lost_at((*place).into())),
        Change::OwnerFaulted { pid } => format!("owner faulted  {what}: pid {pid} has lost its CUDA context"),
        Change::Reclaimed { version, bytes: size } => format!("reclaimed      {what}@{version}, {}", bytes(*size)),
        _ => format!("changed        {what}"),
    };
    format!("{}  {change}", text::moment(*at))
}

fn lost_at(place: Place) -> String {
    match place {
        Place::Gpu(gpu) => format!("GPU {gpu}"),
        place => describe::place(place),
    }
}

fn value(event: &WatchEvent, point: Point) -> Value {
    let mut value = match event {
        WatchEvent::Name(NameEvent { at, named, name, change, .. }) => {
            let mut value = json!({ "event": change.name(), "named": named.name(), "name": name, "at_ms": at });
            if let Some((version, bytes)) = change.version() {
                value["version"] = json!(version);
                value["bytes"] = json!(bytes);
            }
            if let Some(pid) = change.pid() {
                value["pid"] = json!(pid);
            }
            match change {
                Change::DeadlineSet { notice } => {
                    value["until_ms"] = json!(notice.until);
                    value["then"] = json!(notice.then);
                }
                Change::DeadlinePassed { then, readers } => {
                    value["then"] = json!(then);
                    value["readers"] = json!(readers);
                }
                Change::DeviceLost { place } => match (*place).into() {
                    Place::Gpu(gpu) => value["gpu"] = json!(gpu.to_string()),
                    Place::Pinned(node) => value["node"] = json!(node),
                    Place::Host => {}
                },
                _ => {}
            }
            value
        }
        WatchEvent::Missed { events } => json!({ "event": "missed", "events": events }),
        _ => json!({ "event": "unknown" }),
    };
    value["point"] = json!(point.to_string());
    value
}
