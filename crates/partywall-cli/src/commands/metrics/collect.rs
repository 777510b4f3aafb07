//! What a domain's metrics are, and where their values come from.
//!
//! The broker is asked as by `partywall status`, `ls`, `ps` and `show`: it computes nothing for metrics. Counters are
//! the broker's or shared memory's. Each has a label for what it belongs to, such as the version of a topic, so that it
//! never falls while its series exists.

use std::{collections::BTreeMap, time::Instant};

use partywall::{
    Place,
    info::{MemberInfo, MemberState, NameInfo, Named, ObjectInfo, QueueInfo, StatusInfo, VersionInfo},
    kind_name,
};

use super::{
    family::{Family, Label},
    idle::Idle,
};
use crate::{
    describe,
    snapshot::{Snapshot, Used},
};

/// Returns a domain's metrics. At most `most` names, timelines, semaphores and members of each kind have series of
/// their own. `idle` remembers earlier pages.
pub(super) fn families(snapshot: &Snapshot, most: usize, idle: Option<&mut Idle>) -> Vec<Family> {
    let Snapshot { taken, status, members, names, objects, used, left_out, .. } = snapshot;
    let mut families = vec![Family::gauge("up", "Whether the broker answers").of(1)];
    families.extend(broker(status));
    families.extend(self::members(members, most));
    families.extend(memory(names));
    let left_out = left_out + objects.len().saturating_sub(most);
    let help = "Pools, topics, queues, timelines and semaphores without series of their own (--max-names)";
    families.push(Family::gauge("names_left_out", help).of(left_out as u64));
    families.extend(blocks(used));
    families.extend(topics(used));
    families.extend(queues(used));
    let objects = &objects[..objects.len().min(most)];
    families.extend(ordering(objects));
    if let Some(idle) = idle {
        idle.note(objects, *taken);
        families.push(standing(objects, idle, *taken));
    }
    families
}

/// Returns what is there when no broker answers.
pub(super) fn without_broker() -> Vec<Family> {
    vec![Family::gauge("up", "Whether the broker answers").of(0)]
}

fn label(name: &'static str, value: impl ToString) -> Label {
    (name, value.to_string())
}

fn broker(status: &StatusInfo) -> Vec<Family> {
    let mut held = Family::gauge("held_bytes", "Bytes that the broker holds, older versions included");
    for (place, bytes) in &status.bytes {
        held.push([label("place", describe::place(Place::from(*place)))], *bytes);
    }
    let mut limits = Family::gauge("limit", "The broker's limits");
    for (limit, value) in &status.limits {
        limits.push([label("limit", describe::limit(*limit))], *value);
    }
    let mut of_users = Family::gauge("user_pinned_bytes", "Bytes of a user's pinned memory on a NUMA node");
    let mut shares =
        Family::gauge("user_pinned_limit", "A user's share of the bytes of pinned memory on each NUMA node");
    let mut leases = Family::gauge("user_leases", "Leases of a user's members");
    let mut lease_shares = Family::gauge("user_leases_limit", "A user's share of the leases");
    for user in &status.users {
        leases.push([label("uid", user.uid)], user.leases);
        for (node, bytes) in &user.pinned {
            let place = describe::place(Place::Pinned(*node));
            of_users.push([label("uid", user.uid), label("place", place)], *bytes);
        }
        // The broker's own user has none unless one was set.
        for (family, share) in [(&mut shares, user.limits.pinned), (&mut lease_shares, user.limits.leases)] {
            if share != u64::MAX {
                family.push([label("uid", user.uid)], share);
            }
        }
    }
    let mut deaths =
        Family::counter("deaths_total", "Members that died, by what proved that their work on GPUs was over");
    deaths.push([label("proof", "process")], status.deaths - status.unproven_deaths);
    deaths.push([label("proof", "none")], status.unproven_deaths);
    let mut start = Family::gauge("broker_start_time_seconds", "When the broker started, since 1970");
    start.push_seconds([], status.started_at);
    vec![
        start,
        Family::counter("broker_restarts_total", "How often the broker died and was started again").of(status.restarts),
        held,
        limits,
        of_users,
        shares,
        leases,
        lease_shares,
        Family::gauge("fds", "File descriptors that the broker holds for memory").of(status.fds),
        Family::gauge("leases", "Leases on versions, timelines and semaphores").of(status.leases),
        Family::gauge("quarantine_members", "Dead members whose work on GPUs may go on").of(status.unproven),
        Family::gauge("quarantine_bytes", "Bytes that these members hold").of(status.unproven_bytes),
        deaths,
    ]
}

fn members(members: &[MemberInfo], most: usize) -> Vec<Family> {
    let mut by_state: BTreeMap<String, u64> = BTreeMap::new();
    for member in members {
        *by_state.entry(describe::state(member.state)).or_default() += 1;
    }
    let mut count = Family::gauge("members", "Members by state");
    for (state, number) in by_state {
        count.push([label("state", state)], number);
    }
    let mut age = Family::gauge("heartbeat_age_seconds", "Time since a member's last heartbeat");
    let mut held = Family::gauge("member_bytes", "Bytes of the versions that a member has open");
    for member in members.iter().take(most) {
        let labels = || [label("pid", member.pid), label("member", member.member)];
        if let Some(quiet) = member.quiet.filter(|_| member.state != MemberState::Unproven) {
            age.push_seconds(labels(), quiet);
        }
        held.push(labels(), member.bytes);
    }
    vec![count, age, held]
}

/// Sums over all names, whatever their number.
fn memory(names: &[NameInfo]) -> Vec<Family> {
    let mut sums: BTreeMap<Vec<Label>, (u64, u64)> = BTreeMap::new();
    for latest in names.iter().filter_map(|name| name.latest.as_ref()) {
        let (number, bytes) = sums.entry(labels_of(latest)).or_default();
        *number += 1;
        *bytes = bytes.saturating_add(latest.bytes);
    }
    let mut segments = Family::gauge("segments", "Names of memory, pools, topics and queues included");
    let mut bytes = Family::gauge("bytes", "Bytes of their latest versions");
    for (labels, (number, total)) in sums {
        segments.push(labels.clone(), number);
        bytes.push(labels, total);
    }
    let older = names.iter().fold(0, |sum: u64, name| sum.saturating_add(name.older_bytes));
    vec![segments, bytes, Family::gauge("older_bytes", "Bytes of older versions that members still hold").of(older)]
}

fn labels_of(version: &VersionInfo) -> Vec<Label> {
    let VersionInfo { place, kind, lifetime, control, .. } = version;
    vec![
        label("place", describe::place(Place::from(*place))),
        label("kind", kind_name(*kind)),
        label("lifetime", lifetime.name()),
        label("named", Named::of(control.as_ref()).name()),
    ]
}

/// The blocks of pools, topics and queues.
fn blocks(used: &BTreeMap<String, Used>) -> Vec<Family> {
    let mut blocks = Family::gauge("pool_blocks", "Blocks of pools, topics and queues by state");
    let mut waiting = Family::gauge("pool_waiting", "Threads that wait for a block");
    for (name, used) in used {
        let inputs = if used.control.queue.is_some() { "inputs" } else { "blocks" };
        let outputs = used.info.queue.as_ref().map(|queue| ("outputs", &queue.outputs));
        for (of, counts) in [(inputs, &used.info.blocks)].into_iter().chain(outputs) {
            let states = [
                ("free", counts.free + counts.unused),
                ("held", counts.held + counts.handed),
                ("offered", counts.offered),
                ("in_ring", counts.in_ring),
                ("read", counts.read),
            ];
            for (state, number) in states {
                blocks.push(labelled(name, used, [label("of", of), label("state", state)]), number.into());
            }
            waiting.push(labelled(name, used, [label("of", of)]), counts.waiting.into());
        }
    }
    vec![blocks, waiting]
}

fn topics(used: &BTreeMap<String, Used>) -> Vec<Family> {
    let mut published = Family::counter("topic_published_total", "Samples published");
    let mut subscribers = Family::gauge("topic_subscribers", "Subscribers");
    let mut lag = Family::gauge("topic_lag", "Samples that a subscriber is behind");
    let mut received = Family::counter("topic_received_total", "Samples that a subscriber received");
    let mut missed = Family::counter("topic_missed_total", "Samples that a subscriber missed");
    let mut latency = Family::histogram("topic_latency_seconds", "Ages of samples when a subscriber received them");
    for (name, used) in used {
        let Some(topic) = &used.info.topic else { continue };
        published.push(labelled(name, used, []), topic.usage.published);
        subscribers.push(labelled(name, used, []), topic.usage.subscribers.into());
        for subscriber in &topic.subscribers {
            let pid = subscriber.who.pid.map(|pid| label("pid", pid));
            let who = labelled(name, used, [label("subscriber", subscriber.who.id)].into_iter().chain(pid));
            lag.push(who.clone(), subscriber.lag);
            received.push(who.clone(), subscriber.received);
            missed.push(who.clone(), subscriber.dropped);
            if subscriber.ages.count > 0 {
                latency.push_ages(who, subscriber.ages);
            }
        }
    }
    vec![published, subscribers, lag, received, missed, latency]
}

fn queues(used: &BTreeMap<String, Used>) -> Vec<Family> {
    let mut tasks = Family::gauge("queue_tasks", "Tasks by state");
    let mut completed = Family::counter("queue_completed_total", "Results");
    let mut returned = Family::counter("queue_returned_total", "Attempts without a result");
    for (name, used) in used {
        let Some(QueueInfo { usage, .. }) = &used.info.queue else { continue };
        let states = [
            ("pending", usage.pending),
            ("claimed", usage.claimed),
            ("enqueued", usage.enqueued),
            ("done", usage.done),
            ("dead", usage.dead),
            ("ending", usage.ending),
            ("free", usage.free),
        ];
        for (state, number) in states {
            tasks.push(labelled(name, used, [label("state", state)]), number.into());
        }
        completed.push(labelled(name, used, []), usage.completed);
        returned.push(labelled(name, used, []), usage.returned);
    }
    vec![tasks, completed, returned]
}

/// Returns the labels of a pool, topic or queue, and more.
fn labelled(name: &str, used: &Used, more: impl IntoIterator<Item = Label>) -> Vec<Label> {
    [label("name", name), label("version", used.version)].into_iter().chain(more).collect()
}

fn ordering(objects: &[ObjectInfo]) -> Vec<Family> {
    let mut value = Family::gauge("timeline_value", "The last value of a timeline that was signalled");
    let mut promised = Family::gauge("timeline_promised", "The highest value of a timeline that was promised");
    let mut permits = Family::gauge("semaphore_permits", "Permits of a semaphore by state");
    let mut waiting = Family::gauge("semaphore_waiting", "Threads that wait for a permit");
    for object in objects {
        match object {
            ObjectInfo::Timeline(timeline) => {
                let labels = || [label("name", &timeline.name), label("incarnation", timeline.incarnation)];
                value.push(labels(), timeline.value);
                promised.push(labels(), timeline.announced);
            }
            ObjectInfo::Semaphore(semaphore) => {
                let free = semaphore.maximum.saturating_sub(semaphore.held);
                for (state, number) in [("held", semaphore.held), ("free", free)] {
                    permits.push([label("name", &semaphore.name), label("state", state)], number.into());
                }
                waiting.push([label("name", &semaphore.name)], semaphore.waiting.into());
            }
            _ => {}
        }
    }
    vec![value, promised, permits, waiting]
}

/// Returns how long timelines have stood still.
fn standing(objects: &[ObjectInfo], idle: &Idle, now: Instant) -> Family {
    let mut family = Family::gauge("timeline_idle_seconds", "Time since a page first had the value of a timeline");
    for object in objects {
        if let ObjectInfo::Timeline(timeline) = object
            && let Some(time) = idle.of(timeline, now)
        {
            let labels = [label("name", &timeline.name), label("incarnation", timeline.incarnation)];
            family.push_seconds(labels, time.as_millis() as u64);
        }
    }
    family
}
