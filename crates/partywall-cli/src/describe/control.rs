//! Descriptions of pools, topics and queues.

use partywall::{
    DType, SampleType, bytes,
    info::{
        Ages, BlockCounts, Control, ControlInfo, Named, Participant, PublisherInfo, QueueUsage, SubscriberInfo,
        TopicShape, Usage,
    },
};
use serde_json::{Value, json};

use crate::text::count;

/// Returns the options of a pool, topic or queue:
///
/// - of each: `kind`, `blocks` (how many; of a queue those for inputs), `block_bytes` (usable bytes of one block);
/// - of a pool: `zeroed` (whether a block is all zero when it is taken);
/// - of a topic: `depth`, `history`, `max_publishers`, `max_loans` (of each), `max_subscribers`, `max_held`, `dtype`
///   (null if samples may have any type), `shape` (of all samples, a list in which null is any length; null if samples
///   may have any shape);
/// - of a queue: `tasks` (its capacity), `outputs` (blocks), `output_bytes` (of one), `lease_ms` (0 if attempts have no
///   time limit).
pub(crate) fn shape(control: &Control) -> Value {
    let mut value = match (&control.topic, &control.queue) {
        (Some(topic), _) => json!(topic),
        (None, Some(queue)) => json!(queue),
        (None, None) => json!({ "zeroed": control.zeroed }),
    };
    if let Some(topic) = &control.topic {
        value["dtype"] = json!(SampleType::of(topic).dtype.map(DType::name));
    }
    value["kind"] = json!(Named::of(Some(control)).name());
    value["blocks"] = json!(control.blocks);
    value["block_bytes"] = json!(control.block_bytes);
    value
}

/// Returns the usage of a pool, topic or queue: `free` (blocks), of a topic `publishers`, `subscribers`, `published`
/// (samples so far), and of a queue `tasks`: how many are in each state, `pending`, `claimed`, `enqueued`, `done`
/// (results that were not taken), `dead` (dead letters), `ending` (over, with attempts that may still use their
/// blocks); `free` (how many more fit); `completed` (results so far), `returned` (attempts without a result so far).
pub(crate) fn usage(usage: &Usage) -> Value {
    let mut value = usage.topic.map_or_else(|| json!({}), |topic| json!(topic));
    value["free"] = json!(usage.free);
    if let Some(queue) = &usage.queue {
        value["tasks"] = json!(queue);
    }
    value
}

/// Returns the number of a queue's tasks in each state, as text: `2 pending, 1 claimed; room for 5 more`.
pub(crate) fn task_counts(usage: &QueueUsage) -> String {
    let QueueUsage { pending, claimed, enqueued, done, dead, ending, free, .. } = *usage;
    let all = [
        (pending, "pending"),
        (claimed, "claimed"),
        (enqueued, "on streams"),
        (done, "with a result that was not taken"),
        (dead, "dead letters"),
        (ending, "over, whose attempts may still use their blocks"),
    ];
    let some: Vec<_> = all.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    let some = if some.is_empty() { "none".to_owned() } else { some.join(", ") };
    format!("{some}; room for {free} more")
}

/// Returns the sum that gives a topic's number of blocks:
/// `16 = depth 4 + 2 publishers × 2 loans + 4 subscribers × 2 held`.
pub(crate) fn sum(control: &Control, topic: &TopicShape) -> String {
    let TopicShape { depth, publishers, loans, subscribers, held, .. } = *topic;
    let needed = u64::from(depth) + u64::from(publishers) * u64::from(loans) + u64::from(subscribers) * u64::from(held);
    let spare = match u64::from(control.blocks).saturating_sub(needed) {
        0 => String::new(),
        spare => format!(" + {spare} more"),
    };
    let publishers = format!("{} × {}", count(publishers.into(), "publisher"), count(loans.into(), "loan"));
    let subscribers = format!("{} × {held} held", count(subscribers.into(), "subscriber"));
    format!("{} = depth {depth} + {publishers} + {subscribers}{spare}", control.blocks)
}

/// Returns the detailed usage of a pool, topic or queue:
///
/// - of each: `audit` (`clean`, or what is wrong), `waiting` (how many wait for a block), `counts` (of blocks: `free`,
///   `held`, `offered`, `in_ring`, `read`, `unused`, `handed`);
/// - of a topic: `published` (samples so far), `publishers` ([`publisher`]) and `subscribers` ([`subscriber`]), which
///   may be incomplete if there are very many;
/// - of a queue: `tasks` (as in [`usage`]), `outputs` (of the output blocks: `free`, `held`, `in_results`) and
///   `attached`, the segments that it holds: `name`, `version`, `bytes`, `attachment` (the number by which tasks name
///   it), `tasks` (how many name it and may still read it).
pub(crate) fn detail(info: &ControlInfo) -> Value {
    let BlockCounts { free, held, offered, in_ring, read, unused, handed, waiting, .. } = info.blocks;
    let mut value = json!({
        "audit": audit(info.blocks.invalid),
        "waiting": waiting,
        "counts": {
            "free": free,
            "held": held,
            "offered": offered,
            "in_ring": in_ring,
            "read": read,
            "unused": unused,
            "handed": handed,
        },
    });
    if let Some(topic) = &info.topic {
        value["published"] = json!(topic.usage.published);
        value["publishers"] = topic.publishers.iter().map(publisher).collect();
        value["subscribers"] = topic.subscribers.iter().map(subscriber).collect();
    }
    if let Some(queue) = &info.queue {
        let BlockCounts { free, held, in_ring, .. } = queue.outputs;
        value["tasks"] = json!(queue.usage);
        value["outputs"] = json!({ "free": free, "held": held, "in_results": in_ring });
        value["attached"] = json!(queue.attached);
    }
    value
}

/// Returns a publisher: `id`, `pid`, `state` (of its process, as in [`super`]), `detached` (whether it is
/// detached), `published`, `blocked_by` (the `id` of the subscriber that it waits for, or null), `blocked_ms`.
fn publisher(publisher: &PublisherInfo) -> Value {
    let mut value = participant(&publisher.who);
    value["published"] = json!(publisher.published);
    value["blocked_by"] = json!(publisher.blocked.map(|(by, _)| by));
    value["blocked_ms"] = json!(publisher.blocked.map(|(_, ms)| ms));
    value
}

/// Returns a subscriber: `id`, `pid`, `state`, `detached` as in [`publisher`]; `policy` (`block`, `drop-oldest` or
/// `latest`), `queue` (how many samples it may be behind, or null), `lag` (how many samples it is behind), `received`,
/// `dropped`, `held`, `ages` (of the samples that it received, [`ages`]), `stalled_ms` (for how long a publisher has
/// waited for it, or null).
fn subscriber(subscriber: &SubscriberInfo) -> Value {
    let mut value = participant(&subscriber.who);
    value["policy"] = json!(subscriber.policy());
    value["queue"] = json!(subscriber.queue);
    value["lag"] = json!(subscriber.lag);
    value["received"] = json!(subscriber.received);
    value["dropped"] = json!(subscriber.dropped);
    value["held"] = json!(subscriber.held);
    value["ages"] = ages(&subscriber.ages);
    value["stalled_ms"] = json!(subscriber.stalled);
    value
}

/// Returns the ages of samples, each the time from its publication until it was received: `count` (how many were
/// measured), `p50_ns`, `p99_ns`, `max_ns`; or null if none was measured. Subscribers measure for a minute after each
/// question.
pub(crate) fn ages(ages: &Ages) -> Value {
    match ages.count {
        0 => Value::Null,
        count => json!({ "count": count, "p50_ns": ages.p50, "p99_ns": ages.p99, "max_ns": ages.max }),
    }
}

/// Returns the state of a publisher or subscriber in a word or two.
pub(crate) fn state(who: &Participant) -> String {
    match (who.state, who.detached) {
        (Some(state), false) => super::state(state),
        (Some(state), true) => format!("{}, detached", super::state(state)),
        (None, _) => "gone".to_owned(),
    }
}

/// Returns what a subscriber does about samples that it does not read in time, with the length of its queue.
pub(crate) fn policy(subscriber: &SubscriberInfo) -> String {
    match subscriber.queue {
        Some(queue) if queue > 1 => format!("{}, {queue}", subscriber.policy()),
        _ => subscriber.policy().to_owned(),
    }
}

fn participant(who: &Participant) -> Value {
    json!({ "id": who.id, "pid": who.pid, "state": who.state.map(|state| state.name()), "detached": who.detached })
}

/// Returns `clean`, or what is wrong.
pub(crate) fn audit(invalid: u32) -> String {
    match invalid {
        0 => "clean".into(),
        n => format!("{} have values that no correct process writes", count(n.into(), "word")),
    }
}

/// Returns the number and size of the blocks: `4 blocks of 100 bytes`.
pub(crate) fn blocks(control: &Control) -> String {
    format!("{} of {}", count(control.blocks.into(), "block"), bytes(control.block_bytes))
}

/// Returns the number of blocks in each state, as text: `2 free, 1 held`. `used` describes the blocks in the ring of a
/// topic or with the tasks of a queue.
pub(crate) fn counts(blocks: &BlockCounts, used: &str) -> String {
    let BlockCounts { free, held, offered, in_ring, read, unused, handed, .. } = *blocks;
    let some = [
        (held, "held"),
        (offered, "offered"),
        (in_ring, used),
        (read, "read"),
        (unused, "published and no longer used"),
        (handed, "being handed to waiters"),
    ];
    let some = some.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
    format!("{free} free{}", some.collect::<String>())
}
