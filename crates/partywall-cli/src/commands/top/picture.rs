//! A moment of a domain as `top` shows it: what is there, how fast it moves, and who waits for whom.

use partywall::{
    Location,
    info::{Awaited, ControlInfo, HolderInfo, WaitInfo},
};
use serde_json::{Value, json};

use super::rates::Rates;
use crate::{commands::status, describe, snapshot::Snapshot, text};

/// A snapshot, with the rates and waits that follow from it and from the one before.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) snapshot: Snapshot,
    pub(super) rates: Rates,
    pub(super) waits: Vec<Wait>,
}

/// A member that waits for others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) on: On,
    /// The name of the topic, pool, queue, semaphore, segment or timeline.
    pub(super) name: String,
    /// The version of the segment, or the value of the timeline.
    pub(super) target: Option<u64>,
    /// The pid of the member, if its row is a member's.
    pub(super) pid: Option<u32>,
    /// The pids of the members that can end the wait, as far as they are known.
    pub(super) by: Vec<u32>,
    /// The milliseconds for which it waits, if that is known.
    pub(super) ms: Option<u64>,
}

/// What a member waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum On {
    /// A publisher: that a subscriber takes the oldest sample.
    Subscriber,
    /// A block of a pool, topic or queue.
    Block,
    /// Room for the input of a task: that a task of a queue ends.
    Room,
    /// Room for the result of a task: that a result of a queue is taken.
    Result,
    /// A permit of a semaphore.
    Permit,
    /// A name or a timeline, as the broker reports it.
    Reported(Awaited),
}

impl On {
    /// Returns its name in JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Subscriber => "subscriber",
            Self::Block => "block",
            Self::Room => "room",
            Self::Result => "result",
            Self::Permit => "permit",
            Self::Reported(awaited) => awaited.name(),
        }
    }

    /// Returns whether the wait keeps a member from its work. Threads that only follow a name wait nearly all the time.
    pub(super) fn is_urgent(self) -> bool {
        !matches!(self, Self::Reported(Awaited::Withdrawal | Awaited::Growth))
    }
}

impl Picture {
    /// Returns the picture of a snapshot that follows the one of these rates.
    pub(super) fn new(snapshot: Snapshot, before: &Rates) -> Self {
        let rates = before.next(&snapshot);
        let waits = waits(&snapshot);
        Self { snapshot, rates, waits }
    }

    /// Returns the picture as JSON, see [`super`]. The one before it was taken `seconds` earlier.
    pub(super) fn to_json(&self, location: &Location, seconds: f64) -> Value {
        let Self { snapshot, rates, waits } = self;
        let names = snapshot.names.iter().map(|name| {
            let mut value = describe::name(name);
            let version = name.latest.as_ref().map_or(0, |latest| latest.version);
            value["rate"] = json!(rates.of_name(name));
            let used = snapshot.used.get(&name.name).filter(|used| used.version == version);
            value["detail"] = used.map_or(Value::Null, |used| describe::control::detail(&used.info));
            value
        });
        let (timelines, semaphores) = describe::apart(&snapshot.objects);
        let timelines = timelines.into_iter().map(|timeline| {
            let mut value = json!(timeline);
            value["rate"] = json!(rates.of_timeline(timeline));
            value
        });
        let waits = waits.iter().map(|wait| {
            let Wait { on, name, target, pid, by, ms } = wait;
            json!({ "on": on.name(), "name": name, "target": target, "pid": pid, "waits_for": by, "ms": ms })
        });
        json!({
            "seconds": seconds,
            "broker": status::value(&snapshot.status, &snapshot.members, location),
            "names": names.collect::<Vec<_>>(),
            "left_out": snapshot.left_out,
            "timelines": timelines.collect::<Vec<_>>(),
            "semaphores": semaphores,
            "waits": waits.collect::<Vec<_>>(),
        })
    }
}

impl Wait {
    /// Returns the members that can end the wait: `4822`, `4822, 4900 and 7 others`, or what is missing.
    pub(super) fn whom(&self) -> String {
        match (&self.by[..], self.on) {
            ([], On::Subscriber) => "a subscriber that is gone".into(),
            ([], On::Block) => "a block".into(),
            ([], On::Room) => "room for a task".into(),
            ([], On::Result) => "room for a result".into(),
            ([], On::Permit) => "a permit".into(),
            ([], On::Reported(awaited)) => describe::awaited(awaited),
            ([one], _) => one.to_string(),
            ([one, two], _) => format!("{one}, {two}"),
            ([one, two, others @ ..], _) => format!("{one}, {two} and {}", text::count(others.len() as u64, "other")),
        }
    }

    /// Returns the name of the object, with the version or value for which it waits.
    pub(super) fn object(&self, name: &str) -> String {
        match self.on {
            On::Reported(awaited) => describe::awaited_object(awaited, name, self.target),
            _ => name.to_owned(),
        }
    }

    /// Returns the time in seconds, in parentheses and with a blank in front, if it is known.
    pub(super) fn time(&self) -> String {
        self.ms.map_or_else(String::new, |ms| format!(" ({})", text::seconds(ms)))
    }
}

/// Returns what waiting members wait for. A member does not say for which blocks of a queue it waits, but their numbers
/// tell if all wait for the same.
fn on_block(info: &ControlInfo) -> On {
    let results = info.queue.as_ref().map(|queue| queue.outputs.waiting);
    match (results, info.blocks.waiting) {
        (Some(0), 1..) => On::Room,
        (Some(1..), 0) => On::Result,
        _ => On::Block,
    }
}

/// Returns the members that wait for a subscriber, a block, a permit, a name or a timeline.
fn waits(snapshot: &Snapshot) -> Vec<Wait> {
    let mut waits = Vec::new();
    for (name, used) in &snapshot.used {
        for publisher in used.info.topic.iter().flat_map(|topic| &topic.publishers) {
            let Some((by, ms)) = publisher.blocked else { continue };
            let subscribers = used.info.topic.iter().flat_map(|topic| &topic.subscribers);
            let by =
                subscribers.filter(|subscriber| subscriber.who.id == by).filter_map(|subscriber| subscriber.who.pid);
            waits.push(Wait {
                on: On::Subscriber,
                name: name.clone(),
                target: None,
                pid: publisher.who.pid,
                by: by.collect(),
                ms: Some(ms),
            });
        }
        waits.extend(waits_for_slots(
            on_block(&used.info),
            name,
            used.holders.iter().map(|holder| (holder, holder.blocks)),
        ));
    }
    for (name, holders) in &snapshot.contended {
        let held = holders.iter().map(|held| (&held.holder, held.permits));
        waits.extend(waits_for_slots(On::Permit, name, held));
    }
    for member in &snapshot.members {
        waits.extend(member.waits.iter().map(|WaitInfo { on, name, target, by, ms }| Wait {
            on: On::Reported(*on),
            name: name.clone(),
            target: *target,
            pid: Some(member.pid),
            by: by.iter().copied().collect(),
            ms: *ms,
        }));
    }
    waits
}

/// Returns the members that wait for a block or permit, and those that hold some.
fn waits_for_slots<'a>(
    on: On,
    name: &str,
    holders: impl Iterator<Item = (&'a HolderInfo, u32)> + Clone,
) -> impl Iterator<Item = Wait> {
    let by: Vec<_> = holders.clone().filter(|(_, held)| *held > 0).map(|(holder, _)| holder.pid).collect();
    let waiting = holders.filter(|(holder, _)| holder.waiting > 0).map(|(holder, _)| holder.pid);
    waiting.map(move |pid| Wait { on, name: name.to_owned(), target: None, pid: Some(pid), by: by.clone(), ms: None })
}

#[cfg(test)]
mod tests {
    use super::{super::example, *};

    #[test]
    fn waits_for_a_queue_say_whether_tasks_or_results_have_no_room() {
        for ([inputs, outputs], expected) in [
            ([1, 0], Some((On::Room, "room", "room for a task"))),
            ([0, 1], Some((On::Result, "result", "room for a result"))),
            ([1, 1], Some((On::Block, "block", "a block"))),
            ([0, 0], None),
        ] {
            let mut snapshot = example::snapshot();
            let used = snapshot.used.get_mut("work").unwrap();
            used.info.blocks.waiting = inputs;
            used.info.queue.as_mut().unwrap().outputs.waiting = outputs;
            used.holders[0].waiting = inputs + outputs;
            let wait = waits(&snapshot).into_iter().find(|wait| wait.name == "work");
            let found = wait.as_ref().map(|wait| (wait.on, wait.on.name(), wait.whom()));
            assert_eq!(found, expected.map(|(on, name, whom)| (on, name, whom.to_owned())));
        }
    }
}
