//! The longest possible answers stay below the message limit.

use std::sync::Arc;

use partywall_shm::{
    members::{Members, TimelineWait},
    queue::MAX_ATTACHMENTS,
    topic::{self, Topic},
};
use partywall_wire::{
    Call, Name, Open, Refusal, Reply, RequestId, frame,
    limits::{MAX_CHUNKS, MAX_COMMAND, MAX_INLINE_TABLE, MAX_NAME, MIN_MESSAGE},
};

use super::*;
use crate::{
    registry::{
        Asked, Bounds, Commit, Event, Received, Registry,
        event::Identity,
        types::{BlockControl, Chunk, Kind, Lifetime, Memory, ObjectKind, Place, Quota, Table, VersionFacts},
    },
    server::{fds::FdStore, reclaimer::Reclaimer},
};

fn about() -> About {
    About {
        pid: 1,
        uid: u32::MAX,
        supervisor: Some(u32::MAX),
        restarts: u64::MAX,
        version: "0".into(),
        instance: u64::MAX,
        started_at: 0,
        log: Some("x".repeat(4096)),
        limits: Vec::new(),
        highest_node: 1023,
        seats: [u64::MAX; 2],
    }
}

/// Builds a registry with the longest names and command lines, the most chunks, the largest inline table, and many
/// objects.
#[test]
fn every_answer_fits_the_smallest_message() {
    let many = 1 << 30;
    let quota = Quota {
        members: u64::MAX,
        names: u64::MAX,
        fds: u64::MAX,
        bytes: u64::MAX,
        pinned: u64::MAX,
        leases: u64::MAX,
        timelines: u64::MAX,
        semaphores: u64::MAX,
        waits: u64::MAX,
    };
    let bounds = Bounds {
        user: u32::MAX,
        own: quota,
        guests: quota,
        members: many,
        rows: many,
        bytes: u64::MAX,
        pinned: u64::MAX,
        names: many,
        fds: many,
        waits: many,
        member_waits: many,
        leases: many,
        member_leases: many,
        chunks: many,
        growths: many,
        timelines: many,
        slabs: many,
        cells: many,
        rest: many,
        semaphores: many,
        attachments: MAX_ATTACHMENTS,
        log: u64::MAX,
    };
    let mut registry = Registry::new(bounds, u64::MAX);
    let mut store = FdStore::new(Reclaimer::start().unwrap());
    let mut control = Control::default();
    let mut last = 0;
    let mut ask = |registry: &mut Registry, control: &Control, member: u64, asked: Asked| {
        let Asked { call, received } = asked;
        last += 1;
        let request = RequestId(last);
        let effects = registry.apply(Event::Request { member: MemberId(member), request, call, received }, u64::MAX);
        let reply = effects.into_iter().find_map(|effect| match effect {
            crate::registry::Effect::Reply { outcome, fds, unread, .. } => Some((outcome, fds, unread)),
            _ => None,
        });
        let (mut outcome, fds, unread) = reply.unwrap();
        let members = &Membership::default();
        let sources = Sources { about: &about(), control, members, registry };
        if let Ok(answer) = &mut outcome {
            complete(answer, unread, sources);
        }
        let reply = Reply { id: RequestId(u64::MAX), outcome };
        frame::encode(&reply, fds.len(), MIN_MESSAGE).unwrap();
        reply.outcome
    };
    let name = |i: u64| Name::new(&format!("{}{i:04}", "n".repeat(MAX_NAME - 4))).unwrap();
    let open = |i: u64| Call::Open(Open { name: name(i), version: None, access: wire::Access::Read, wait: false });
    for member in 1..=300 {
        let identity = Identity {
            pid: if member == 1 { 1 } else { u32::MAX },
            uid: u32::MAX,
            command: "c".repeat(MAX_COMMAND).into(),
            simulated: true,
            operator: false,
            has_pidfd: member != 2,
        };
        registry.apply(Event::Joined { member: MemberId(member), identity }, u64::MAX);
    }
    let memory = |i: u64| {
        let mut uuid = [0xff; 16];
        uuid[..8].copy_from_slice(&i.to_le_bytes());
        let facts = VersionFacts {
            kind: Kind::Legacy,
            place: Place::Gpu(uuid),
            mutable: true,
            reserved: u64::MAX,
            lifetime: Lifetime::Owned,
            shared: false,
            control: None,
        };
        Arc::new(Memory {
            facts,
            chunks: vec![Chunk { bytes: 1 << 45, fd: None }; MAX_CHUNKS],
            handles: vec![wire::LegacyHandle { origin: [0xff; 16], driver: [[0xff; 32]; 2] }; MAX_CHUNKS],
            table: Table::Inline(vec![0; MAX_INLINE_TABLE].into()),
            tensors: u64::MAX,
            control: None,
        })
    };
    let commit = |i: u64| {
        let name = name(i);
        let memory = memory(i);
        Commit { name, memory, if_absent: false, owner: None, claim: None, shared: false }
    };
    for i in (0..300).chain([0; 100]) {
        ask(&mut registry, &control, 1, commit(i).into()).unwrap();
    }
    control.provide_rows(u32::MAX, &store).unwrap();
    let rows = Members::map(control.rows_fd(u32::MAX).unwrap().fd().unwrap()).unwrap();
    for member in 2..=300 {
        ask(&mut registry, &control, member, open(0).into()).unwrap();
        for i in 8000..8005 {
            let open = Open { name: name(i), version: Some(u64::MAX), access: wire::Access::Read, wait: true };
            assert_eq!(ask(&mut registry, &control, member, Call::Open(open).into()), Ok(Answer::Pending));
        }
    }
    for (i, name) in (0..300).map(|i| (i, name(i))) {
        let member = if i == 0 { 1..=300 } else { 1..=1 };
        let created = |i| Some(crate::registry::types::ControlMemory { fd: crate::registry::FdId(i), bytes: 0 });
        for member in member {
            let writer = member == 1;
            let slab = created(i).filter(|_| i == 0 && writer);
            let call = Call::OpenTimeline { name: name.clone(), writer, shared: false };
            let received = Received { created: slab, ..Received::default() };
            let opened = ask(&mut registry, &control, member, Asked { call, received }).unwrap();
            if let Answer::Timeline(wire::OpenedTimeline { lease, .. }) = opened {
                rows.set_wait(member as u16 - 1, Some(TimelineWait { lease: lease.0, value: u64::MAX, since: 0 }));
            }
            let memory = created(i + 1).filter(|_| writer);
            let call = Call::OpenSemaphore { name: name.clone(), maximum: u32::MAX, shared: false };
            let received = Received { created: memory, ..Received::default() };
            ask(&mut registry, &control, member, Asked { call, received }).unwrap();
        }
    }
    // As many publish and subscribe as can, and very many have it open.
    let shape = wire::TopicShape {
        depth: 1,
        history: 0,
        publishers: topic::MAX_PUBLISHERS,
        loans: 1,
        subscribers: topic::MAX_SUBSCRIBERS,
        held: 1,
        dtype: Some(1),
        shape: wire::SampleShape::new(&[Some(u64::MAX); wire::MAX_RANK]),
    };
    let shape = wire::Control { blocks: 1000, block_bytes: 1 << 40, zeroed: false, topic: Some(shape), queue: None };
    let blocks = control.provide_blocks(shape, &mut store).unwrap();
    let topic = Topic::map(store.share(&[blocks.slot_table()])[0].fd().unwrap()).unwrap();
    let commit = commit(5000);
    let with_blocks = Arc::new(Memory {
        facts: VersionFacts { control: Some(shape), ..commit.memory.facts },
        control: Some(blocks),
        ..(*commit.memory).clone()
    });
    let commit = Commit { memory: with_blocks, ..commit };
    ask(&mut registry, &control, 1, commit.into()).unwrap();
    for row in 0..topic::MAX_SUBSCRIBERS as u16 {
        ask(&mut registry, &control, u64::from(row) + 1, open(5000).into()).unwrap();
        assert!(topic.join_as_publisher(row).is_some());
        assert!(topic.join_as_subscriber(row, Some(u32::MAX), 0).is_some());
    }
    // Queues that hold as many segments as they can, and segments that very many queues hold.
    let shape = wire::QueueShape { tasks: 1, outputs: 1, output_bytes: 1, lease: 0 };
    let shape = wire::Control { blocks: 1, block_bytes: 1, zeroed: false, topic: None, queue: Some(shape) };
    let held = |i: u64, control: Option<BlockControl>| {
        let like = memory(i);
        let shape = control.map(|_| shape);
        let facts = VersionFacts { kind: Kind::Vmm, lifetime: Lifetime::Kept, control: shape, ..like.facts };
        let chunks = vec![Chunk { bytes: 1 << 45, fd: Some(crate::registry::FdId(0)) }; MAX_CHUNKS];
        let handles = Vec::new();
        let memory = Arc::new(Memory { facts, chunks, handles, control, ..(*like).clone() });
        Commit { name: name(i), memory, if_absent: false, owner: None, claim: None, shared: false }
    };
    let lease = |answer: Result<Answer, Refusal>| match answer {
        Ok(Answer::Committed { lease, .. }) => lease,
        other => panic!("{other:?}"),
    };
    let versions = 0..2 * MAX_ATTACHMENTS;
    let versions =
        versions.map(|_| lease(ask(&mut registry, &control, 1, held(6000, None).into()))).collect::<Vec<_>>();
    for i in 7000..7100 {
        let blocks = control.provide_blocks(shape, &mut store).unwrap();
        let queue = lease(ask(&mut registry, &control, 1, held(i, Some(blocks)).into()));
        for segment in versions.iter().rev().take(MAX_ATTACHMENTS as usize) {
            ask(&mut registry, &control, 1, Call::Attach { queue, segment: *segment }.into()).unwrap();
        }
    }
    for member in 2..=300 {
        ask(&mut registry, &control, member, open(6000).into()).unwrap();
        ask(&mut registry, &control, member, open(7000).into()).unwrap();
    }
    let Ok(Answer::Members { members, .. }) =
        ask(&mut registry, &control, 1, Call::Members { after: Some(MemberId(1)) }.into())
    else {
        panic!("no members")
    };
    let waits: Vec<_> = members[0].waits.iter().map(|wait| (wait.on, wait.target, wait.by)).collect();
    let timeline = (wire::Awaited::Timeline, Some(u64::MAX), Some(1));
    assert_eq!(waits, [vec![(wire::Awaited::Commit, Some(u64::MAX), None); 4], vec![timeline]].concat());
    for call in [
        Call::Inspect { name: name(6000), version: None },
        Call::Inspect { name: name(7000), version: None },
        Call::Remove { name: name(6000), deadline: None },
        Call::Inspect { name: name(5000), version: None },
        Call::List { after: Some(name(4999).into()) },
        Call::Objects { after: None },
        Call::Objects { after: Some((ObjectKind::Timeline, name(299).into())) },
        Call::InspectObject { kind: ObjectKind::Timeline, name: name(0) },
        Call::InspectObject { kind: ObjectKind::Semaphore, name: name(0) },
        Call::Inspect { name: name(0), version: None },
        Call::List { after: None },
        Call::Members { after: None },
        Call::Status,
        Call::Watch { pattern: "*".into(), after: Some(wire::Point { instance: u64::MAX, sequence: 0 }) },
        Call::Remove { name: name(0), deadline: None },
        Call::Evict { whom: wire::Whom::Pid(u32::MAX), kill: false },
    ] {
        ask(&mut registry, &control, 1, call.into()).unwrap();
    }
    assert!(
        matches!(ask(&mut registry, &control, 1, open(9999).into()), Err(Refusal::NotFound { near, .. }) if !near.is_empty())
    );
    for member in 2..=300 {
        ask(&mut registry, &control, member, Call::UsesGpu { mps: Some("/tmp/nvidia-mps".into()) }.into()).unwrap();
        registry.apply(Event::Died { member: MemberId(member) }, u64::MAX);
    }
    for call in [Call::Members { after: None }, Call::FreeUnproven { pid: None }] {
        ask(&mut registry, &control, 1, call.into()).unwrap();
    }
}
