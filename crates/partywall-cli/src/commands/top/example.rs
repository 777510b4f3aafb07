//! A domain for the tests of `top`, in which a publisher waits for a subscriber and a member is unproven.

use std::time::{Duration, Instant};

use partywall::info::{
    Ages, Awaited, BlockCounts, Control, ControlInfo, Doubt, HolderInfo, Kind, Lifetime, MemberInfo, MemberState,
    NameInfo, ObjectHolder, ObjectInfo, Participant, PublisherInfo, QueueInfo, QueueShape, QueueUsage, SemaphoreInfo,
    StatusInfo, SubscriberInfo, TimelineInfo, TopicInfo, TopicShape, TopicUsage, Usage, VersionInfo, WaitInfo,
};

use super::{picture::Picture, rates::Rates};
use crate::snapshot::{Snapshot, Used};

/// When the snapshot was taken, in milliseconds since 1970.
const NOW: u64 = 1_800_000_000_000;

/// Returns the picture a second after [`snapshot`], in which a topic has 600 more samples and a queue 5 more results.
pub(super) fn picture() -> Picture {
    let first = snapshot();
    let mut second = snapshot();
    second.taken = first.taken + Duration::from_secs(1);
    for name in &mut second.names {
        let Some(usage) = &mut name.usage else { continue };
        usage.topic.iter_mut().for_each(|topic| topic.published += 600);
        usage.queue.iter_mut().for_each(|queue| queue.completed += 5);
    }
    for used in second.used.values_mut() {
        let Some(topic) = &mut used.info.topic else { continue };
        topic.publishers.iter_mut().for_each(|publisher| publisher.published += 600);
        topic.subscribers.iter_mut().for_each(|subscriber| subscriber.received += 598);
    }
    Picture::new(second, &Rates::default().next(&first))
}

/// Returns a snapshot with three members and each kind of name.
pub(super) fn snapshot() -> Snapshot {
    let host = partywall_wire::Place::Host;
    let version = |bytes, control: Option<Control>| VersionInfo {
        version: 1,
        kind: Kind::Host,
        place: host,
        bytes,
        tensors: 1,
        mutable: false,
        reserved: 0,
        growths: 0,
        lifetime: Lifetime::Kept,
        control,
        committer: 4711,
        owner: 4711,
        uid: 1000,
        shared: false,
        leases: 3,
        notice: None,
        lost: false,
        committed_at: NOW - 3_700_000,
    };
    let name = |name: &str, latest: Option<VersionInfo>, usage: Option<Usage>| NameInfo {
        name: name.to_owned(),
        latest,
        usage,
        older: 0,
        older_bytes: 0,
        notice: None,
        lost: false,
    };
    let blocks = Control { blocks: 16, block_bytes: 4 << 20, zeroed: false, topic: None, queue: None };
    let shape =
        TopicShape { depth: 8, history: 0, publishers: 2, loans: 2, subscribers: 2, held: 2, dtype: None, shape: None };
    let topic = Control { topic: Some(shape), ..blocks };
    let queue = Control { queue: Some(QueueShape { tasks: 64, outputs: 4, output_bytes: 1024, lease: 0 }), ..blocks };
    let topic_usage = TopicUsage { publishers: 1, subscribers: 1, published: 1000 };
    let queue_usage = QueueUsage { pending: 5, claimed: 2, dead: 1, free: 56, completed: 40, ..QueueUsage::default() };
    let usage = |free| Usage { free, topic: None, queue: None };
    let counts = BlockCounts { free: 3, held: 2, in_ring: 8, read: 1, unused: 2, ..BlockCounts::default() };
    let who = |id, pid| Participant { id, pid: Some(pid), state: Some(MemberState::Alive), detached: false };
    let publisher = PublisherInfo { who: who(1, 4711), published: 1000, blocked: Some((2, 1234)) };
    let subscriber = SubscriberInfo {
        who: who(2, 4822),
        queue: None,
        lag: 3,
        received: 990,
        dropped: 7,
        held: 2,
        stalled: Some(1234),
        ages: Ages { count: 990, p50: 31_000, p99: 410_000, ..Ages::default() },
    };
    let topic_info = TopicInfo { usage: topic_usage, publishers: vec![publisher], subscribers: vec![subscriber] };
    let holder = |pid, blocks, tasks| HolderInfo {
        pid,
        command: "python train.py".into(),
        leases: 1,
        blocks,
        tasks,
        waiting: 0,
        unproven: false,
    };
    let waiter = |pid, tasks, waiting| HolderInfo { waiting, ..holder(pid, 0, tasks) };
    let permits = |permits, holder| ObjectHolder { holder, permits };
    let used = |control, topic, queue, holders| Used {
        version: 1,
        control,
        info: ControlInfo { blocks: counts, topic, queue },
        holders,
    };
    let waiting = Used {
        info: ControlInfo {
            blocks: BlockCounts { held: 16, waiting: 2, ..BlockCounts::default() },
            topic: None,
            queue: None,
        },
        ..used(blocks, None, None, vec![holder(4711, 16, 0), waiter(4822, 0, 2)])
    };
    let queue_info = QueueInfo { usage: queue_usage, outputs: counts, attached: Vec::new() };
    let member = |member, pid, state, command: &str| MemberInfo {
        member,
        pid,
        uid: 1000,
        command: command.to_owned(),
        state,
        doubt: None,
        quiet: Some(120),
        leases: 2,
        timelines: 1,
        permits: Some(0),
        blocks: Some(member as u32),
        tasks: Some(0),
        bytes: member << 30,
        since: NOW - 65_000,
        waits: Vec::new(),
        simulated: false,
        mps: None,
    };
    let wait = |on, name: &str, target, by, ms| WaitInfo { on, name: name.into(), target, by, ms };
    let trainer = MemberInfo {
        mps: Some("/run/user/1000/partywall/default.mps".into()),
        waits: vec![
            wait(Awaited::Commit, "llm/weights", Some(7), None, None),
            wait(Awaited::Timeline, "steps", Some(73), Some(4711), Some(1500)),
        ],
        ..member(2, 4822, MemberState::Alive, "python train.py --batch 32")
    };
    let unproven = MemberInfo {
        doubt: Some(Doubt::Mps),
        quiet: None,
        ..member(9, 4900, MemberState::Unproven, "/usr/bin/render")
    };
    Snapshot {
        taken: Instant::now(),
        now: Duration::from_millis(NOW),
        status: StatusInfo {
            pid: 4700,
            uid: 1000,
            version: "0.1.0".into(),
            instance: 1,
            supervisor: Some(4100),
            restarts: 0,
            started_at: NOW - 7_380_000,
            log: None,
            simulated: false,
            members: 3,
            names: 5,
            versions: 6,
            timelines: 1,
            semaphores: 1,
            leases: 12,
            unproven: 1,
            unproven_bytes: 3 << 30,
            deaths: 4,
            unproven_deaths: 1,
            fds: 212,
            bytes: vec![(host, 4 << 30)],
            largest: Vec::new(),
            limits: Vec::new(),
            users: Vec::new(),
            seats: [16, 4],
        },
        members: vec![member(1, 4711, MemberState::Alive, "/usr/bin/python camera.py --fps 600"), trainer, unproven],
        names: vec![
            NameInfo { older: 2, older_bytes: 1 << 30, ..name("llm/weights", Some(version(14 << 30, None)), None) },
            name("blocks", Some(version(64 << 20, Some(blocks))), Some(usage(0))),
            name("frames", Some(version(64 << 20, Some(topic))), Some(Usage { topic: Some(topic_usage), ..usage(5) })),
            NameInfo { older: 1, older_bytes: 2 << 30, ..name("old", None, None) },
            name("work", Some(version(64 << 20, Some(queue))), Some(Usage { queue: Some(queue_usage), ..usage(5) })),
        ],
        objects: vec![
            ObjectInfo::Timeline(TimelineInfo {
                name: "steps".into(),
                incarnation: 1,
                writer: Some(4711),
                value: 70,
                announced: 72,
                ending: None,
                leases: 2,
                uid: 1000,
                shared: false,
            }),
            ObjectInfo::Semaphore(SemaphoreInfo {
                name: "gate".into(),
                maximum: 3,
                held: 3,
                waiting: 1,
                leases: 4,
                uid: 1000,
                shared: false,
            }),
        ],
        contended: [("gate".to_owned(), vec![permits(3, holder(4711, 0, 0)), permits(0, waiter(4822, 0, 1))])].into(),
        used: [
            ("blocks".to_owned(), waiting),
            ("frames".to_owned(), used(topic, Some(topic_info), None, vec![holder(4822, 2, 0)])),
            ("work".to_owned(), used(queue, None, Some(queue_info), vec![holder(4822, 0, 2)])),
        ]
        .into(),
        left_out: 0,
    }
}
