//! Pools, topics and queues in answers. The numbers are read from control memory.

use std::collections::BTreeMap;

use partywall_shm::{
    members,
    pool::Pool,
    queue::{Queue, QueueAudit},
    slots::SlotAudit,
    topic::Topic,
};
use partywall_wire as wire;

use crate::{
    registry::effect::RowOwner,
    server::{
        answers::member,
        control::{Control, SlotTable},
    },
};

/// Maximum number of publishers, and of subscribers, in one answer.
const PARTICIPANTS: usize = 100;

pub(super) fn usage(table: &SlotTable) -> Option<wire::Usage> {
    match table {
        SlotTable::Semaphore(_) => None,
        SlotTable::Pool(pool) => Some(wire::Usage { free: free(&pool.audit()), topic: None, queue: None }),
        SlotTable::Topic(topic, pool) => {
            let topic = topic_usage(topic, topic.publishers().len(), topic.subscribers().len());
            Some(wire::Usage { free: free(&pool.audit()), topic: Some(topic), queue: None })
        }
        SlotTable::Queue(mapped) => {
            let queue = Some(queue_usage(&mapped.queue, &mapped.queue.audit()));
            Some(wire::Usage { free: free(&mapped.inputs.audit()), topic: None, queue })
        }
    }
}

pub(super) fn info(
    table: &SlotTable,
    attached: Vec<wire::AttachedInfo>,
    rows: &BTreeMap<u16, RowOwner>,
    control: &Control,
) -> Option<wire::ControlInfo> {
    match table {
        SlotTable::Semaphore(_) => None,
        SlotTable::Pool(pool) => Some(wire::ControlInfo { blocks: blocks(&pool.audit()), topic: None, queue: None }),
        SlotTable::Topic(topic, pool) => {
            let topic_info = topic_info(topic, rows, control);
            Some(wire::ControlInfo { blocks: topic.audit(pool), topic: Some(topic_info), queue: None })
        }
        SlotTable::Queue(mapped) => {
            let uses = mapped.queue.all_uses();
            let audit = mapped.queue.audit();
            let attached = attached.into_iter().map(|held| {
                let tasks = uses.get(&held.attachment).copied().unwrap_or(0);
                wire::AttachedInfo { tasks, ..held }
            });
            let queue = wire::QueueInfo {
                usage: queue_usage(&mapped.queue, &audit),
                outputs: queue_blocks(&mapped.outputs),
                attached: attached.collect(),
            };
            let mut inputs = queue_blocks(&mapped.inputs);
            inputs.invalid += audit.invalid + mapped.queue.lost_inputs(&mapped.inputs);
            Some(wire::ControlInfo { blocks: inputs, topic: None, queue: Some(queue) })
        }
    }
}

fn topic_info(topic: &Topic, rows: &BTreeMap<u16, RowOwner>, control: &Control) -> wire::TopicInfo {
    let now = members::now();
    topic.ask_for_ages(members::now_ns());
    let publishers = topic.publishers();
    let subscribers = topic.subscribers();
    let usage = topic_usage(topic, publishers.len(), subscribers.len());
    let who = |id, row, detached| {
        let owner = rows.get(&row);
        wire::Participant {
            id,
            pid: owner.map(|owner| owner.pid),
            state: owner.map(|owner| member::state_in(row, *owner, control)),
            detached,
        }
    };
    let publishers = publishers.iter().take(PARTICIPANTS).map(|publisher| wire::PublisherInfo {
        who: who(publisher.id, publisher.row, publisher.detached),
        published: publisher.published,
        blocked: publisher.blocked.map(|(by, since)| (by, now.saturating_sub(since))),
    });
    let subscribers = subscribers.iter().take(PARTICIPANTS).map(|subscriber| wire::SubscriberInfo {
        who: who(subscriber.id, subscriber.row, subscriber.detached),
        queue: subscriber.queue,
        lag: subscriber.lag,
        received: subscriber.received,
        dropped: subscriber.dropped,
        held: subscriber.held,
        ages: subscriber.ages,
        stalled: subscriber.stalled.map(|since| now.saturating_sub(since)),
    });
    wire::TopicInfo { usage, publishers: publishers.collect(), subscribers: subscribers.collect() }
}

fn topic_usage(topic: &Topic, publishers: usize, subscribers: usize) -> wire::TopicUsage {
    // A topic has at most 256 of each.
    wire::TopicUsage { publishers: publishers as u32, subscribers: subscribers as u32, published: topic.published() }
}

fn queue_usage(queue: &Queue, audit: &QueueAudit) -> wire::QueueUsage {
    let (completed, returned) = queue.totals();
    wire::QueueUsage {
        pending: audit.pending,
        claimed: audit.claimed,
        enqueued: audit.enqueued,
        done: audit.done,
        dead: audit.dead,
        ending: audit.ending,
        free: audit.free + audit.writing,
        completed,
        returned,
    }
}

/// Counts the blocks of a queue: those that belong to the queue itself are its tasks'.
fn queue_blocks(pool: &Pool) -> wire::BlockCounts {
    let audit = pool.audit();
    wire::BlockCounts { in_ring: audit.published, invalid: audit.invalid, ..blocks(&audit) }
}

fn blocks(audit: &SlotAudit) -> wire::BlockCounts {
    wire::BlockCounts {
        free: free(audit),
        held: audit.held,
        offered: audit.offered,
        handed: audit.handed,
        waiting: audit.waiting,
        // Only a topic has published blocks.
        invalid: audit.invalid + audit.published,
        ..wire::BlockCounts::default()
    }
}

/// Counts the blocks of a pool. A block that was handed to a waiter that is gone counts as free.
fn free(audit: &SlotAudit) -> u32 {
    audit.free + audit.stale
}
