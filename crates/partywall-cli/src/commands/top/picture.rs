//! A moment of a domain as `top` shows it: what is there, how fast it moves, and who waits for whom.

use partywall::{
    Location,
    info::{Named, ObjectInfo},
};
use serde_json::{Value, json};

use super::rates::{Counter, Rates};
use crate::{commands::status, describe, snapshot::Snapshot};

/// A snapshot with what follows from it and the one before.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) snapshot: Snapshot,
    pub(super) rates: Rates,
    pub(super) waits: Vec<Wait>,
}

/// A publisher that waits for a subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) topic: String,
    /// The pid of the publisher, if its row is a member's.
    pub(super) publisher: Option<u32>,
    /// The pid of the subscriber, if it is there and its row is a member's.
    pub(super) subscriber: Option<u32>,
    /// For how many milliseconds.
    pub(super) ms: u64,
}

impl Picture {
    /// Returns the picture of a snapshot that follows the one of these rates.
    pub(super) fn new(snapshot: Snapshot, before: &Rates) -> Self {
        let rates = before.next(&snapshot);
        let waits = waits(&snapshot);
        Self { snapshot, rates, waits }
    }

    /// Returns the picture as JSON, see [`super`].
    pub(super) fn to_json(&self, location: &Location) -> Value {
        let Self { snapshot, rates, waits } = self;
        let names = snapshot.names.iter().map(|name| {
            let mut value = describe::name(name);
            let version = name.latest.as_ref().map_or(0, |latest| latest.version);
            value["rate"] = json!(rates.of(&Counter::Name(name.name.clone(), version)));
            let used = snapshot.used.get(&name.name).filter(|used| used.version == version);
            value["detail"] = used.map_or(Value::Null, |used| describe::control::detail(&used.info));
            value
        });
        let of_kind = |timelines: bool| {
            let objects = snapshot.objects.iter().filter_map(move |object| match object {
                ObjectInfo::Timeline(timeline) if timelines => {
                    let mut value = json!(timeline);
                    value["rate"] = json!(rates.of(&Counter::Timeline(timeline.name.clone(), timeline.incarnation)));
                    Some(value)
                }
                ObjectInfo::Semaphore(semaphore) if !timelines => Some(json!(semaphore)),
                _ => None,
            });
            objects.collect::<Vec<_>>()
        };
        let waits = waits.iter().map(|wait| {
            let Wait { topic, publisher, subscriber, ms } = wait;
            json!({ "topic": topic, "pid": publisher, "waits_for": subscriber, "ms": ms })
        });
        json!({
            "broker": status::value(&snapshot.status, &snapshot.members, location),
            "names": names.collect::<Vec<_>>(),
            "left_out": snapshot.left_out,
            "timelines": of_kind(true),
            "semaphores": of_kind(false),
            "waits": waits.collect::<Vec<_>>(),
        })
    }
}

impl Wait {
    /// Returns the time in seconds.
    pub(super) fn time(&self) -> String {
        seconds(self.ms)
    }
}

/// Returns milliseconds as seconds: `1.2 s`.
pub(super) fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

/// Returns the publishers that wait for a subscriber.
fn waits(snapshot: &Snapshot) -> Vec<Wait> {
    let mut waits = Vec::new();
    for (name, used) in &snapshot.used {
        let Some(topic) = &used.info.topic else { continue };
        for publisher in &topic.publishers {
            let Some((by, ms)) = publisher.blocked else { continue };
            let subscriber = topic.subscribers.iter().find(|subscriber| subscriber.who.id == by);
            waits.push(Wait {
                topic: name.clone(),
                publisher: publisher.who.pid,
                subscriber: subscriber.and_then(|subscriber| subscriber.who.pid),
                ms,
            });
        }
    }
    waits
}

/// Returns `segment`, `pool`, `topic`, `queue`, or `removed` for a name of which only older versions are left.
pub(super) fn kind(name: &partywall::info::NameInfo) -> &'static str {
    name.latest.as_ref().map_or("removed", |latest| Named::of(latest.control.as_ref()).name())
}
