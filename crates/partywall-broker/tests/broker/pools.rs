//! Pools and topics: which blocks are returned and when, and which commits are refused.

use std::os::fd::OwnedFd;

use partywall_os::{map::SharedMap, memfd::Draft};
use partywall_shm::{
    pool::Pool,
    slots::{Attempt, HeldSlot},
    timeline::TimelineEnding,
    topic::{Message, PublisherHandle, Received, Status, TimelineCell, Topic, Unpublished},
};
use partywall_wire::{
    Access, Answer, BlockCounts, Call, ClaimId, Commit, Control, ControlInfo, LeaseId, Lifetime, Limit, MemberId,
    MemberState, Named, NoGrowth, Open, Opened, OpenedTimeline, Place, Refusal, RequestId, SegmentInfo, TopicShape,
    TopicUsage, Usage, Whom, limits::MAX_BLOCKS,
};

use crate::{
    common::{Client, TestBroker, called, eventually, full, host_commit, shake_hands, with_facts},
    roles::{self, Orphan, SAYS},
    timelines::User,
};

const POOL: Control = Control { blocks: 4, block_bytes: 100, zeroed: false, topic: None, queue: None };

const SHAPE: TopicShape =
    TopicShape { depth: 2, history: 1, publishers: 1, loans: 2, subscribers: 2, held: 1, dtype: Some(2), shape: None };

const TOPIC: Control = Control { blocks: 6, block_bytes: 100, zeroed: false, topic: Some(SHAPE), queue: None };

/// A commit of host memory exactly as long as the blocks.
fn commit(name: &str, control: Control) -> Commit {
    let chunks = [control.data_bytes().unwrap()];
    with_facts(host_commit(name, &chunks), |facts| {
        facts.mutable = true;
        facts.lifetime = Lifetime::Shared;
        facts.control = Some(control);
    })
}

/// Returns the lease and the control memory.
pub(crate) fn create(client: &mut Client, name: &str, control: Control) -> Result<(u64, Vec<OwnedFd>), Refusal> {
    send(client, commit(name, control))
}

fn send(client: &mut Client, commit: Commit) -> Result<(u64, Vec<OwnedFd>), Refusal> {
    let chunk = Draft::create("partywall:test", commit.chunks[0]).unwrap().share().unwrap();
    match client.ask_with(Call::Commit(commit), &[&chunk]) {
        (Ok(Answer::Committed { lease, .. }), fds) => Ok((lease.0, fds)),
        (Ok(other), _) => panic!("{other:?}"),
        (Err(refusal), _) => Err(refusal),
    }
}

/// Returns the lease and the control memory.
pub(crate) fn open(client: &mut Client, name: &str) -> Result<(Opened, Vec<OwnedFd>), Refusal> {
    let open = Open { name: called(name), version: None, access: Access::Write, wait: false };
    match client.ask_with(Call::Open(open), &[]) {
        (Ok(Answer::Opened(opened)), mut fds) => Ok((opened, fds.split_off(1))),
        (Ok(other), _) => panic!("{other:?}"),
        (Err(refusal), _) => Err(refusal),
    }
}

fn hold(pool: &Pool, row: u16) -> HeldSlot {
    match pool.take(row) {
        Attempt::Held(held) => held,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pool_comes_with_its_control_memory() {
    let broker = TestBroker::start();
    let mut one = broker.client();
    let mut two = broker.client();
    let (_, words) = create(&mut one, "p", POOL).unwrap();
    let (opened, again) = open(&mut two, "p").unwrap();
    assert_eq!(
        (opened.facts.control, opened.facts.lifetime, words.len(), again.len()),
        (Some(POOL), Lifetime::Shared, 1, 1)
    );
    let mine = Pool::map(&words[0]).unwrap();
    let theirs = Pool::map(&again[0]).unwrap();
    let _held = hold(&mine, one.welcome.row);
    assert_eq!(theirs.holders(), [(one.welcome.row, 1)], "they share control memory");

    let (_, words) = create(&mut one, "t", TOPIC).unwrap();
    let (opened, again) = open(&mut two, "t").unwrap();
    assert_eq!((opened.facts.control, words.len(), again.len()), (Some(TOPIC), 2, 2));
    assert_eq!((Pool::map(&again[0]).unwrap().count(), Topic::map(&again[1]).unwrap().limits().depth), (6, 2));
    assert_eq!(one.status().fds, 5, "two chunks, the control memory of two pools and of a topic");
}

// Holds 187.
#[test]
fn name_of_a_pool_ends_with_its_last_user() {
    let broker = TestBroker::start();
    let mut one = broker.client();
    let mut two = broker.client();
    let (first, _) = create(&mut one, "p", POOL).unwrap();
    let (opened, _) = open(&mut two, "p").unwrap();
    let taken = Refusal::NameExists { name: called("p"), version: 1, is: Named::Pool };
    assert_eq!(create(&mut two, "p", POOL).err(), Some(taken.clone()));
    assert_eq!(send(&mut one, host_commit_of_256("p")).err(), Some(taken), "nor does a segment follow it");
    two.commit("s", b"x", false);
    assert_eq!(
        create(&mut two, "s", POOL).err(),
        Some(Refusal::NameExists { name: called("s"), version: 1, is: Named::Segment })
    );

    assert_eq!(one.ask(Call::Release { lease: LeaseId(first) }), Ok(Answer::Done));
    open(&mut one, "p").unwrap();
    one.ask(Call::Bye).unwrap();
    let grow = partywall_wire::Grow {
        lease: opened.lease,
        growths: 0,
        kind: opened.facts.kind,
        chunks: Vec::new(),
        table: opened.table,
        tensors: 1,
    };
    let fixed = Refusal::CannotGrow { name: called("p"), version: 1, why: NoGrowth::Fixed };
    assert_eq!(two.ask(Call::Grow(grow)), Err(fixed));
    assert_eq!(two.ask(Call::Release { lease: opened.lease }), Ok(Answer::Done));
    assert!(matches!(open(&mut two, "p"), Err(Refusal::NotFound { .. })), "it ended with its last user");
    assert!(create(&mut two, "p", TOPIC).is_ok());
}

fn host_commit_of_256(name: &str) -> Commit {
    with_facts(host_commit(name, &[256]), |facts| facts.mutable = true)
}

#[test]
fn repeated_commit_returns_its_control_memory_again() {
    let broker = TestBroker::start();
    let mut member = broker.client();
    let chunk = Draft::create("partywall:test", POOL.data_bytes().unwrap()).unwrap().share().unwrap();
    let call = Call::Commit(commit("p", POOL));
    let (first, words) = member.ask_with(call.clone(), &[&chunk]);
    let held = hold(&Pool::map(&words[0]).unwrap(), member.welcome.row);
    let mut again = shake_hands(&broker.socket, Some(member.identity())).unwrap();
    again.last = RequestId(member.last.0 - 1);
    let (second, words) = again.ask_with(call, &[&chunk]);
    assert_eq!(second, first);
    assert!(Pool::map(&words[0]).unwrap().is_current(held.index(), held.generation()));
    assert_eq!(again.status().fds, 2);
}

// Holds 185.
#[test]
fn blocks_return_with_last_lease_goodbye_and_death() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    for control in [POOL, TOPIC] {
        let (mine, words) = create(&mut watcher, "p", control).unwrap();
        let pool = Pool::map(&words[0]).unwrap();
        let mut user = broker.client();
        let row = user.welcome.row;
        let (first, _) = open(&mut user, "p").unwrap();
        let (second, _) = open(&mut user, "p").unwrap();
        let held = hold(&pool, row);
        pool.offer(&hold(&pool, row)).unwrap();
        assert_eq!(user.ask(Call::Release { lease: first.lease }), Ok(Answer::Done));
        user.ask(Call::Ping).unwrap();
        assert_eq!(pool.holders(), [(row, 2)]);
        assert_eq!(user.ask(Call::Release { lease: second.lease }), Ok(Answer::Done));
        user.ask(Call::Ping).unwrap();
        assert!(pool.audit().is_idle() && pool.free(&held).is_err(), "{:?}", pool.audit());

        open(&mut user, "p").unwrap();
        let _held = hold(&pool, row);
        assert_eq!(user.ask(Call::Bye), Ok(Answer::Done));
        eventually("it has left", || pool.audit().is_idle());

        let mut holder = roles::start("block holder", &broker.socket);
        holder.expect(SAYS);
        assert_eq!(pool.audit().held, 3);
        holder.kill();
        eventually("they are back", || pool.audit().is_idle());
        watcher.ask(Call::Release { lease: LeaseId(mine) }).unwrap();
    }
}

// Holds 185.
#[test]
fn blocks_of_evicted_and_child_held_members_stay_until_death() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let (_, words) = create(&mut watcher, "p", POOL).unwrap();
    let pool = Pool::map(&words[0]).unwrap();
    let mut parent = roles::start("forked block holder", &broker.socket);
    let member: u64 = parent.expect(SAYS).parse().unwrap();
    let child = Orphan::of(&parent.expect(SAYS));
    watcher.ask(Call::Evict { whom: Whom::Member(member), kill: false }).unwrap();
    parent.kill();
    eventually("the child is noticed", || watcher.state_of(MemberId(member)) == Some(MemberState::HeldByChild));
    assert_eq!(pool.audit().held, 3, "its kernels may run on");
    child.kill();
    eventually("they are given back", || pool.audit().is_idle());
}

// Holds 190.
#[test]
fn process_that_blocks_others_is_listed_and_stops_when_evicted() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut reader = broker.client();
    let (_, words) = create(&mut watcher, "t", TOPIC).unwrap();
    open(&mut reader, "t").unwrap();
    let pool = Pool::map(&words[0]).unwrap();
    let topic = Topic::map(&words[1]).unwrap();
    let subscriber = topic.join_as_subscriber(reader.welcome.row, None, 0).unwrap();
    let mut publisher = topic.join_as_publisher(watcher.welcome.row).unwrap();
    let row = watcher.welcome.row;
    let publish = |publisher: &mut PublisherHandle| {
        let held = pool.try_take(row).unwrap();
        let message = Message {
            status: Status::Ready,
            lane: 0,
            value: 0,
            stamp: 1,
            dtype: 2,
            shape: &[1],
            bytes: 1,
            header: b"",
        };
        let published = topic.publish(&pool, publisher, &held, &message);
        published.inspect_err(|_| assert!(pool.free(&held).is_ok()))
    };
    assert_eq!((publish(&mut publisher), publish(&mut publisher)), (Ok(0), Ok(1)));
    let Err(Unpublished::Blocked { id, row }) = publish(&mut publisher) else {
        panic!("the subscriber has read nothing")
    };
    assert_eq!((id, row), (subscriber.id(), reader.welcome.row));
    topic.set_blocked(publisher.port(), Some((id, 1)));

    let mut asker = broker.client();
    let ControlInfo { blocks, topic, .. } = inspect(&mut asker, "t").control.unwrap();
    assert_eq!((blocks.free, blocks.in_ring, blocks.held, blocks.invalid), (4, 2, 0, 0));
    let topic = topic.unwrap();
    assert_eq!(topic.usage, TopicUsage { publishers: 1, subscribers: 1, published: 2 });
    let [seen] = topic.subscribers[..] else { panic!("{topic:?}") };
    assert_eq!((seen.who.pid, seen.who.state), (Some(std::process::id()), Some(MemberState::Alive)));
    assert_eq!((seen.policy(), seen.lag, seen.received, seen.dropped, seen.held), ("block", 2, 0, 0, 0));
    let [blocked] = topic.publishers[..] else { panic!("{topic:?}") };
    assert_eq!((blocked.published, blocked.blocked.map(|(by, _)| by)), (2, Some(id)));
    assert!(
        seen.stalled.is_some_and(|ms| ms > 0),
        "the publisher set the start of its wait to 0, the start of the machine"
    );

    asker.ask(Call::Evict { whom: Whom::Member(reader.welcome.member.0), kill: false }).unwrap();
    // Effects of a request may come after its answer.
    asker.ask(Call::Ping).unwrap();
    assert_eq!(publish(&mut publisher), Ok(2), "no publisher waits for it any more");
    let topic = inspect(&mut asker, "t").control.unwrap().topic.unwrap();
    assert!(topic.subscribers[0].who.detached && topic.subscribers[0].stalled.is_some());
}

#[test]
fn samples_of_a_departed_publisher_are_complete_up_to_its_timeline() {
    let broker = TestBroker::start();
    let mut reader = broker.client();
    // An evicted subscriber keeps its place until it is dead.
    let shape = Control { blocks: 8, topic: Some(TopicShape { publishers: 2, ..SHAPE }), ..TOPIC };
    let (_, words) = create(&mut reader, "t", shape).unwrap();
    let pool = Pool::map(&words[0]).unwrap();
    let topic = Topic::map(&words[1]).unwrap();
    let mut subscriber = topic.join_as_subscriber(reader.welcome.row, None, 0).unwrap();
    for ending in [TimelineEnding::Evicted, TimelineEnding::Closed] {
        let mut writer = User::join(&broker.socket);
        open(&mut writer.client, "t").unwrap();
        let row = writer.client.welcome.row;
        let opened = writer.open(&format!("{ending:?}"), true).unwrap();
        let OpenedTimeline { slab, cell, incarnation, .. } = opened.answer;
        let mut publisher = topic.join_as_publisher(row).unwrap();
        topic.set_timeline(publisher.port(), 0, TimelineCell { slab, cell, incarnation });
        opened.cell().signal(1).unwrap();
        opened.cell().announce(2);
        for value in [1, 2] {
            let held = pool.try_take(row).unwrap();
            let message = Message {
                status: Status::Timeline,
                lane: 0,
                value,
                stamp: 1,
                dtype: 2,
                shape: &[1],
                bytes: 1,
                header: b"",
            };
            topic.publish(&pool, &mut publisher, &held, &message).unwrap();
        }
        let taken = [(); 2].map(|()| match topic.receive(&pool, &mut subscriber) {
            Received::Sample(taken) => {
                topic.release(&pool, &taken);
                taken
            }
            other => panic!("{other:?}"),
        });
        if ending == TimelineEnding::Evicted {
            let whom = Whom::Member(writer.client.welcome.member.0);
            reader.ask(Call::Evict { whom, kill: false }).unwrap();
        }
        let _ = writer.client.ask(Call::Bye);
        let status = || [topic.status(&taken[0]), topic.status(&taken[1])];
        eventually("its status is settled", || status() == [Status::Done, Status::Failed(ending)]);
    }
}

pub(crate) fn inspect(client: &mut Client, name: &str) -> SegmentInfo {
    match client.ask(Call::Inspect { name: called(name), version: None }) {
        Ok(Answer::Info(info)) => *info,
        other => panic!("{other:?}"),
    }
}

#[test]
fn listings_count_the_blocks_of_each_process() {
    let broker = TestBroker::start();
    let mut one = broker.client();
    let mut two = broker.client();
    let (_, words) = create(&mut one, "p", POOL).unwrap();
    open(&mut two, "p").unwrap();
    let pool = Pool::map(&words[0]).unwrap();
    let _held = hold(&pool, one.welcome.row);
    assert!((0..2).all(|_| pool.offer(&hold(&pool, two.welcome.row)).is_ok()));
    let info = inspect(&mut one, "p");
    let counts = BlockCounts { free: 1, held: 1, offered: 2, ..BlockCounts::default() };
    assert_eq!(info.control, Some(ControlInfo { blocks: counts, topic: None, queue: None }));
    assert_eq!(info.holders.iter().map(|holder| holder.blocks).collect::<Vec<_>>(), [1, 2]);
    let members: Vec<_> = one.members().iter().map(|member| (MemberId(member.member), member.blocks)).collect();
    assert_eq!(members, [(one.welcome.member, Some(1)), (two.welcome.member, Some(2))]);
    let Ok(Answer::Names { names, .. }) = one.ask(Call::List { after: None }) else { panic!("names") };
    assert_eq!(names[0].usage, Some(Usage { free: 1, topic: None, queue: None }));
    assert_eq!(names[0].latest.as_ref().unwrap().control, Some(POOL));
}

#[test]
fn invalid_pools_are_refused() {
    let broker = TestBroker::start();
    let mut client = broker.client();
    let shape = |topic| Control { topic: Some(topic), ..TOPIC };
    let shaped = |name, proper, shape| with_facts(commit(name, proper), |facts| facts.control = Some(shape));
    let bad = [
        with_facts(commit("p", POOL), |facts| facts.mutable = false),
        with_facts(commit("p", POOL), |facts| facts.reserved = 1 << 20),
        Commit { chunks: vec![1023], ..commit("p", POOL) },
        shaped("p", POOL, Control { blocks: 0, ..POOL }),
        shaped("p", POOL, Control { blocks: MAX_BLOCKS + 1, ..POOL }),
        shaped("p", POOL, Control { block_bytes: 0, ..POOL }),
        shaped("p", POOL, Control { block_bytes: u64::MAX, ..POOL }),
        shaped("t", TOPIC, Control { blocks: 5, ..TOPIC }),
        shaped("t", TOPIC, Control { zeroed: true, ..TOPIC }),
        shaped("t", TOPIC, shape(TopicShape { depth: 3, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { publishers: 0, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { loans: 0, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { loans: 3, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { held: u32::MAX, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { history: 3, ..SHAPE })),
        shaped("t", TOPIC, shape(TopicShape { dtype: Some(0), ..SHAPE })),
    ];
    for bad in bad {
        let outcome = send(&mut client, bad.clone());
        assert!(matches!(outcome, Err(Refusal::Invalid { .. })), "{bad:?}: {outcome:?}");
    }
    let elsewhere = with_facts(commit("p", POOL), |facts| facts.place = Place::Gpu([1; 16]));
    assert!(matches!(send(&mut client, elsewhere), Err(Refusal::Invalid { .. })));
    let claimed = Commit { claim: Some(ClaimId(7)), ..commit("p", POOL) };
    assert!(matches!(send(&mut client, claimed), Err(Refusal::Stale { .. })));
    assert_eq!(client.status().fds, 0, "no control memory is left");
    assert!(create(&mut client, "p", Control { blocks: MAX_BLOCKS, block_bytes: 1, ..POOL }).is_ok());
}

#[test]
fn control_memory_is_bounded() {
    let broker = TestBroker::with(|config| config.limits.bytes = POOL.data_bytes().unwrap() + 100);
    let mut client = broker.client();
    assert!(matches!(create(&mut client, "p", POOL), Err(Refusal::Limit { limit: Limit::Bytes, .. })));
    let broker = TestBroker::with(|config| config.limits.fds = Some(2));
    let mut client = broker.client();
    assert_eq!(create(&mut client, "t", TOPIC).err(), Some(full(Limit::Fds, 2, 0)));
    assert_eq!(client.status().fds, 0);
    assert!(create(&mut client, "p", POOL).is_ok());
}

// Holds 158.
#[test]
fn broker_survives_any_control_memory_of_pools() {
    survive_any_control_memory(TOPIC, |_, _| {});
}

/// Creates an object, and overwrites its control memory again and again. Others open it, are asked about, evicted, and
/// leave meanwhile. `open_more` is called with each of them and with the lease of the object.
pub(crate) fn survive_any_control_memory(control: Control, open_more: impl Fn(&mut Client, u64)) {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let (lease, words) = create(&mut watcher, "t", control).unwrap();
    open_more(&mut watcher, lease);
    let maps: Vec<_> = words.iter().map(|fd| SharedMap::writable(fd).unwrap()).collect();
    let mut others = Vec::new();
    let mut seed = 7_u64;
    for round in 0..30 {
        let mut other = broker.client();
        let (opened, _) = open(&mut other, "t").unwrap();
        open_more(&mut other, opened.lease.0);
        for words in maps.iter().map(|map| map.slice::<u64>(0, map.len() / 8).unwrap()) {
            for at in 0..words.len() {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // All words at random, or with one bit flipped.
                words.set(at, if round % 2 == 0 { seed } else { words.get(at) ^ 1 << (seed >> 58) });
            }
        }
        watcher.ask(Call::Inspect { name: called("t"), version: None }).unwrap();
        watcher.ask(Call::List { after: None }).unwrap();
        watcher.ask(Call::Members { after: None }).unwrap();
        watcher.ask(Call::Evict { whom: Whom::Member(other.welcome.member.0), kill: false }).unwrap();
        let mut leaver = broker.client();
        let (again, _) = open(&mut leaver, "t").unwrap();
        assert_ne!(again.lease, opened.lease);
        leaver.ask(Call::Release { lease: again.lease }).unwrap();
        leaver.ask(Call::Bye).unwrap();
        others.push(other);
    }
    assert_eq!(watcher.ask(Call::Ping), Ok(Answer::Done));
}
