//! Descriptions of pools and topics.

use partywall::{
    DType, SampleType, bytes,
    info::{
        BlockCounts, Control, ControlInfo, Participant, PublisherInfo, SampleShape, SubscriberInfo, TopicShape, Usage,
    },
};
use serde_json::{Value, json};

use crate::text::count;

/// Returns a pool or topic: `kind` (`pool` or `topic`), `blocks` (how many), `block_bytes` (of one that are for use);
/// of a pool `zeroed` (whether a block is all zero when it is taken); of a topic `depth`, `history`,
/// `max_publishers`, `max_loans` (of each), `max_subscribers`, `max_held`, `dtype` (null if samples may be of any),
/// `shape` (of all samples, a list in which null is any length; null if samples may be of any).
pub(crate) fn shape(control: &Control) -> Value {
    let mut value = json!({
        "kind": if control.topic.is_some() { "topic" } else { "pool" },
        "blocks": control.blocks,
        "block_bytes": control.block_bytes,
    });
    match &control.topic {
        None => value["zeroed"] = json!(control.zeroed),
        Some(topic @ TopicShape { depth, history, publishers, loans, subscribers, held, shape, .. }) => {
            value["depth"] = json!(depth);
            value["history"] = json!(history);
            value["max_publishers"] = json!(publishers);
            value["max_loans"] = json!(loans);
            value["max_subscribers"] = json!(subscribers);
            value["max_held"] = json!(held);
            value["dtype"] = json!(SampleType::of(topic).dtype.map(DType::name));
            value["shape"] = json!(shape.as_ref().map(SampleShape::extents));
        }
    }
    value
}

/// Returns how it is used: `free` (blocks), and of a topic `publishers`, `subscribers`, `published` (samples so far).
pub(crate) fn usage(usage: &Usage) -> Value {
    let mut value = json!({ "free": usage.free });
    if let Some(topic) = &usage.topic {
        value["publishers"] = json!(topic.publishers);
        value["subscribers"] = json!(topic.subscribers);
        value["published"] = json!(topic.published);
    }
    value
}

/// How a topic comes to its blocks: `16 = depth 4 + 2 publishers × 2 loans + 4 subscribers × 2 held`.
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

/// Returns how it is used, in detail: `audit` (`clean`, or what is wrong), `waiting` (how many wait for a block), `counts` (of
/// blocks: `free`, `held`, `offered`, `in_ring`, `read`, `unused`, `handed`), and of a topic `published` (samples so
/// far), `publishers`, `subscribers` ([`publisher`], [`subscriber`]), which may be incomplete if there are very many.
pub(crate) fn detail(info: &ControlInfo) -> Value {
    let BlockCounts { free, held, offered, in_ring, read, unused, handed, waiting, .. } = info.blocks;
    let mut value = json!({
        "audit": audit(&info.blocks),
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
    value
}

/// Returns a publisher: `id`, `pid`, `state` (of its process, as [`member`](super::member) has it), `parted` (whether
/// it is detached), `published`, `blocked_by` (the `id` of the subscriber that it waits for, or null),
/// `blocked_ms`.
fn publisher(publisher: &PublisherInfo) -> Value {
    let mut value = participant(&publisher.who);
    value["published"] = json!(publisher.published);
    value["blocked_by"] = json!(publisher.blocked.map(|(by, _)| by));
    value["blocked_ms"] = json!(publisher.blocked.map(|(_, ms)| ms));
    value
}

/// Returns a subscriber: `id`, `pid`, `state`, `parted` as a publisher; `policy` (`block`, `drop-oldest` or `latest`),
/// `queue` (how many samples it may be behind, or null), `lag` (how many it is), `received`, `dropped`, `held`,
/// `stalled_ms` (for how long a publisher has waited for it, or null).
fn subscriber(subscriber: &SubscriberInfo) -> Value {
    let mut value = participant(&subscriber.who);
    value["policy"] = json!(subscriber.policy());
    value["queue"] = json!(subscriber.queue);
    value["lag"] = json!(subscriber.lag);
    value["received"] = json!(subscriber.received);
    value["dropped"] = json!(subscriber.dropped);
    value["held"] = json!(subscriber.held);
    value["stalled_ms"] = json!(subscriber.stalled);
    value
}

fn participant(who: &Participant) -> Value {
    json!({ "id": who.id, "pid": who.pid, "state": who.state.map(|state| state.name()), "parted": who.detached })
}

/// `clean`, or what is wrong.
pub(crate) fn audit(blocks: &BlockCounts) -> String {
    match blocks.invalid {
        0 => "clean".into(),
        n => format!("{} have values that no correct process writes", count(n.into(), "word")),
    }
}

/// `4 blocks of 100 bytes`.
pub(crate) fn blocks(control: &Control) -> String {
    format!("{} of {}", count(control.blocks.into(), "block"), bytes(control.block_bytes))
}

/// Returns where the blocks are, in a sentence: `2 free, 1 held`.
pub(crate) fn counts(blocks: &BlockCounts) -> String {
    let BlockCounts { free, held, offered, in_ring, read, unused, handed, .. } = *blocks;
    let some = [
        (held, "held"),
        (offered, "offered"),
        (in_ring, "in the ring"),
        (read, "read"),
        (unused, "published and no longer used"),
        (handed, "being handed to waiters"),
    ];
    let some = some.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
    format!("{free} free{}", some.collect::<String>())
}
