// Holds 23, 195.
//! Tests of topics: rule by rule, by many threads at once, and at random.

#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

mod random;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use partywall_wire::BlockCounts;

use super::*;
use crate::{
    pool::Pool,
    slots::{Attempt, HeldSlot, Polled},
    timeline::TimelineEnding,
};

const SHAPE: TopicLimits = TopicLimits { blocks: 24, depth: 4, publishers: 2, loans: 2, subscribers: 4, held: 4 };

/// A topic, its pool, and the contents of the blocks.
struct World {
    topic: Topic,
    pool: Pool,
    memory: Vec<AtomicU64>,
}

impl World {
    fn new(limits: TopicLimits) -> Self {
        let topic = Topic::map(Topic::create(limits).unwrap()).unwrap();
        let pool = Pool::map(Pool::create(limits.blocks).unwrap()).unwrap();
        Self { topic, pool, memory: (0..limits.blocks).map(|_| AtomicU64::new(0)).collect() }
    }

    fn publisher(&self, row: u16) -> PublisherHandle {
        self.topic.join_as_publisher(row).unwrap()
    }

    fn subscriber(&self, row: u16, queue: Option<u32>) -> SubscriberHandle {
        self.topic.join_as_subscriber(row, queue, 0).unwrap()
    }

    fn loan(&self, row: u16) -> Option<HeldSlot> {
        self.pool.try_take(row).or_else(|| {
            self.topic.sweep(&self.pool);
            self.pool.try_take(row)
        })
    }

    fn publish_as(
        &self,
        handle: &mut PublisherHandle,
        value: u64,
        status: Status,
    ) -> Result<(u64, HeldSlot), Unpublished> {
        self.publish_on(handle, 0, value, status)
    }

    fn publish_on(
        &self,
        handle: &mut PublisherHandle,
        lane: u8,
        value: u64,
        status: Status,
    ) -> Result<(u64, HeldSlot), Unpublished> {
        let held = self.loan(handle.port.row()).expect("enough blocks are free");
        self.memory[held.index() as usize].store(value, Ordering::Relaxed);
        let message = Message {
            status,
            lane,
            value,
            stamp: value,
            dtype: 12,
            shape: &[2, value],
            bytes: 8,
            header: &value.to_le_bytes(),
        };
        match self.topic.publish(&self.pool, handle, &held, &message) {
            Ok(position) => Ok((position, held)),
            Err(error) => {
                self.pool.free(&held).unwrap();
                Err(error)
            }
        }
    }

    /// Publishes an empty sample with a stamp.
    fn publish_at(&self, handle: &mut PublisherHandle, stamp: u64) -> Result<u64, Unpublished> {
        let held = self.loan(handle.port.row()).expect("enough blocks are free");
        let message =
            Message { status: Status::Ready, lane: 0, value: 0, stamp, dtype: 1, shape: &[0], bytes: 0, header: &[] };
        self.topic.publish(&self.pool, handle, &held, &message)
    }

    fn publish(&self, handle: &mut PublisherHandle, value: u64) -> Result<u64, Unpublished> {
        self.publish_as(handle, value, Status::Ready).map(|(position, _)| position)
    }

    fn take(&self, handle: &mut SubscriberHandle) -> Option<HeldSample> {
        match self.topic.receive(&self.pool, handle) {
            Received::Sample(taken) => Some(taken),
            Received::Empty => None,
            other => panic!("{other:?}"),
        }
    }

    fn read(&self, taken: &HeldSample) -> u64 {
        let value = self.memory[taken.block() as usize].load(Ordering::Relaxed);
        let description = self.topic.describe(taken);
        assert_eq!((description.shape(), description.dtype, description.bytes), (&[2, value][..], 12, 8));
        assert_eq!(self.topic.header(taken), value.to_le_bytes());
        value
    }

    /// Receives, reads and releases.
    fn receive(&self, handle: &mut SubscriberHandle) -> Option<u64> {
        let taken = self.take(handle)?;
        let value = self.read(&taken);
        self.topic.release(&self.pool, &taken);
        Some(value)
    }

    fn audit(&self) -> BlockCounts {
        let audit = self.topic.audit(&self.pool);
        assert_eq!(audit.invalid, 0, "{audit:?}");
        let blocks = audit.free + audit.held + audit.in_ring + audit.read + audit.unused + audit.handed;
        assert_eq!(blocks, self.pool.count(), "{audit:?}");
        audit
    }
}

#[test]
fn samples_come_in_their_order_to_all() {
    let world = World::new(SHAPE);
    let mut publishers = [1, 2].map(|row| world.publisher(row));
    let mut subscribers = [3, 4].map(|row| world.subscriber(row, None));
    assert_eq!(world.receive(&mut subscribers[0]), None);
    for value in 1..=1000 {
        let publisher = &mut publishers[value as usize % 2];
        assert_eq!(world.publish(publisher, value), Ok(value - 1));
        for subscriber in &mut subscribers {
            assert_ne!(world.topic.peek(subscriber.port(), subscriber.next()), Ahead::Nothing);
            assert_eq!((world.receive(subscriber), world.receive(subscriber)), (Some(value), None));
            assert_eq!(world.topic.peek(subscriber.port(), subscriber.next()), Ahead::Nothing);
        }
    }
    assert_eq!(world.topic.published(), 1000);
    let audit = world.audit();
    assert_eq!((audit.in_ring, audit.held, audit.read), (4, 0, 0));
    world.topic.sweep(&world.pool);
    assert_eq!(world.audit(), BlockCounts { free: 20, in_ring: 4, ..BlockCounts::default() });
}

#[test]
fn sample_identifies_its_publisher_and_position() {
    let world = World::new(SHAPE);
    let mut publishers = [1, 2].map(|row| world.publisher(row));
    let mut subscriber = world.subscriber(3, None);
    assert_ne!(publishers[0].id(), publishers[1].id());
    for (publisher, sequence) in [(0, 0), (1, 0), (1, 1), (0, 1)] {
        let handle = &mut publishers[publisher];
        world.publish(handle, 5).unwrap();
        let taken = world.take(&mut subscriber).unwrap();
        let description = world.topic.describe(&taken);
        assert_eq!((description.publisher, description.sequence), (handle.id(), sequence));
        assert_eq!((world.topic.status(&taken), taken.missed()), (Status::Ready, 0));
        world.topic.release(&world.pool, &taken);
    }
    assert_eq!(world.topic.publishers().iter().map(|state| state.published).collect::<Vec<_>>(), [2, 2]);
}

/// Receives a sample at a time, and releases it.
fn receive_at(world: &World, handle: &mut SubscriberHandle, now: u64) {
    let taken = world.take(handle).unwrap();
    world.topic.add_age(handle, &taken, now);
    world.topic.release(&world.pool, &taken);
}

fn ages_of(world: &World, handle: &SubscriberHandle) -> Ages {
    world.topic.subscribers().into_iter().find(|state| state.id == handle.id()).unwrap().ages
}

#[test]
fn each_subscriber_has_the_ages_of_its_samples_until_it_leaves() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscribers = [3, 4].map(|row| world.subscriber(row, None));
    // `publish` stamps a sample with its value.
    for stamp in 1..=100 {
        world.publish(&mut publisher, stamp).unwrap();
        receive_at(&world, &mut subscribers[0], stamp + 1_500);
        receive_at(&world, &mut subscribers[1], stamp + if stamp == 7 { 3_000_000_000 } else { 7 });
    }
    let [slow, fast] = [0, 1].map(|index| ages_of(&world, &subscribers[index]));
    assert_eq!((slow.count, slow.sum, slow.p50, slow.p99, slow.max), (100, 150_000, 1_500, 1_500, 1_500));
    assert_eq!((slow.younger[0], slow.younger[1], slow.younger[20]), (0, 100, 100));
    assert_eq!((fast.count, fast.sum, fast.p50, fast.p99, fast.max), (100, 3_000_000_693, 7, 7, 3_000_000_000));
    assert_eq!((fast.younger[0], fast.younger[20]), (99, 99));
    // Its successor begins with none.
    world.topic.leave_as_subscriber(subscribers[0].port());
    let next = world.subscriber(5, None);
    assert_eq!((next.index, ages_of(&world, &next)), (subscribers[0].index, Ages::default()));
    assert_eq!(ages_of(&world, &subscribers[1]), fast);
}

// Holds 200.
#[test]
fn clock_of_another_process_makes_no_age_negative() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscriber = world.subscriber(3, None);
    for (stamp, now, max) in [(1_000, 999, 0), (u64::MAX, 0, 0), (5, 12, 7), (1, u64::MAX, u64::MAX - 1)] {
        world.publish_at(&mut publisher, stamp).unwrap();
        receive_at(&world, &mut subscriber, now);
        assert_eq!(ages_of(&world, &subscriber).max, max);
    }
    let ages = ages_of(&world, &subscriber);
    assert_eq!((ages.count, ages.p50, ages.younger[20]), (4, 0, 3));
}

// Holds 200.
#[test]
fn question_about_ages_ends_with_its_lease() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscriber = world.subscriber(3, None);
    let mut receive = |now| {
        world.publish(&mut publisher, 1).unwrap();
        receive_at(&world, &mut subscriber, now);
        world.topic.ages_are_wanted()
    };
    assert!(!world.topic.ages_are_wanted());
    assert!(!receive(10), "a subscriber that measures on its own account asks no other");
    world.topic.ask_for_ages(100);
    assert!(receive(100) && receive(100 + AGES_LEASE));
    // The observer may have been killed.
    assert!(!receive(101 + AGES_LEASE));
    world.topic.ask_for_ages(1_000);
    world.topic.ask_for_ages(2_000);
    assert!(receive(1_500 + AGES_LEASE), "the second question counts");
    assert!(!receive(2_001 + AGES_LEASE));
    // No observer asks for longer.
    world.topic.ask_for_ages(u64::MAX);
    assert!(!receive(5_000));
}

#[test]
fn topic_is_idle_once_publishers_left_and_all_is_received() {
    let world = World::new(SHAPE);
    let mut subscriber = world.subscriber(3, None);
    let is_idle = |subscriber: &SubscriberHandle| world.topic.is_idle(subscriber.next());
    assert!(!is_idle(&subscriber), "no publisher has come yet");
    let mut first = world.publisher(1);
    assert!(!is_idle(&subscriber), "there is one");
    world.publish(&mut first, 5).unwrap();
    let second = world.publisher(2);
    world.topic.detach_publisher(first.port());
    world.topic.leave_as_publisher(first.port());
    assert_eq!(world.receive(&mut subscriber), Some(5));
    assert!(!is_idle(&subscriber), "the second one is there");
    world.publish(&mut world.publisher(1), 6).unwrap();
    // Of dead ones.
    world.topic.detach(|row| row < 3, TimelineEnding::OwnerDied, |_| None);
    assert!(!is_idle(&subscriber), "a sample is left");
    assert_eq!(world.receive(&mut subscriber), Some(6));
    assert!(is_idle(&subscriber));
    world.topic.recover(&world.pool, |row| row < 3);
    assert!(is_idle(&subscriber));
    let third = world.publisher(1);
    assert!(!is_idle(&subscriber), "another one has come");
    world.topic.leave_as_publisher(third.port());
    world.topic.leave_as_publisher(second.port());
    assert!(is_idle(&subscriber), "a publisher without samples leaves, too");
}

#[test]
fn publishers_wait_for_lossless_subscribers() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut slow = world.subscriber(2, None);
    for value in 0..4 {
        world.publish(&mut publisher, value).unwrap();
    }
    let blocked = Unpublished::Blocked { id: slow.id(), row: 2 };
    assert_eq!(world.publish(&mut publisher, 4), Err(blocked));
    world.topic.set_blocked(publisher.port(), Some((slow.id(), 77)));
    let [state] = world.topic.subscribers()[..] else { panic!("there is one") };
    assert_eq!((state.lag, state.queue, state.stalled), (4, None, Some(77)));
    assert_eq!(world.topic.publishers()[0].blocked, Some((slow.id(), 77)));
    world.topic.set_blocked(publisher.port(), None);
    assert_eq!(world.receive(&mut slow), Some(0));
    assert_eq!(world.publish(&mut publisher, 4), Ok(4));
    assert_eq!(world.publish(&mut publisher, 5), Err(blocked));
    // It holds the sample that it reads, but no publisher waits for it.
    let held = world.take(&mut slow).unwrap();
    assert_eq!(world.publish(&mut publisher, 5), Ok(5));
    assert_eq!(world.read(&held), 1);
    assert_eq!(world.audit().read, 1);
    world.topic.release(&world.pool, &held);
    assert_eq!((2..=5).map(|_| world.receive(&mut slow).unwrap()).collect::<Vec<_>>(), [2, 3, 4, 5]);
    assert_eq!(world.topic.subscribers()[0].received, 6);
}

// Holds 203.
#[test]
fn publishers_do_not_wait_for_lossy_subscribers() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscribers = [1, 2, 4].map(|queue| world.subscriber(2, Some(queue)));
    for value in 0..11 {
        world.publish(&mut publisher, value).unwrap();
    }
    for (subscriber, (first, missed)) in subscribers.iter_mut().zip([(10, 10), (9, 9), (7, 7)]) {
        let taken = world.take(subscriber).unwrap();
        assert_eq!((world.read(&taken), taken.missed(), taken.position()), (first, missed, first));
        world.topic.release(&world.pool, &taken);
        for value in first + 1..11 {
            let taken = world.take(subscriber).unwrap();
            assert_eq!((world.read(&taken), taken.missed()), (value, 0));
            world.topic.release(&world.pool, &taken);
        }
        assert_eq!(world.take(subscriber), None);
    }
    let states = world.topic.subscribers();
    assert_eq!(states.iter().map(|state| state.dropped).collect::<Vec<_>>(), [10, 9, 7], "at most the depth is left");
    assert_eq!(states.iter().map(|state| state.queue).collect::<Vec<_>>(), [Some(1), Some(2), Some(4)]);
}

#[test]
fn ring_of_one_entry_holds_the_last_sample() {
    let world = World::new(TopicLimits { depth: 1, ..SHAPE });
    let mut publisher = world.publisher(1);
    let mut latest = world.subscriber(2, Some(1));
    let mut strict = world.subscriber(3, None);
    for value in 0..5 {
        world.publish(&mut publisher, value).unwrap();
        assert_eq!(world.publish(&mut publisher, 9), Err(Unpublished::Blocked { id: strict.id(), row: 3 }));
        assert_eq!(world.receive(&mut strict), Some(value));
    }
    let taken = world.take(&mut latest).unwrap();
    assert_eq!((world.read(&taken), taken.missed()), (4, 4));
    // It starts with the samples in the ring.
    let mut late = world.topic.join_as_subscriber(4, Some(1), 1).unwrap();
    assert_eq!(world.receive(&mut late), Some(4));
    // A `Block` subscriber that would need the sample that is overwritten next.
    let mut strict = world.topic.join_as_subscriber(4, None, 1).unwrap();
    assert_eq!(world.receive(&mut strict), None);
}

#[test]
fn late_subscriber_begins_with_the_requested_history() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut early = world.topic.join_as_subscriber(2, None, 3).unwrap();
    for value in 0..3 {
        world.publish(&mut publisher, value).unwrap();
    }
    for (history, first) in [(0, None), (1, Some(2)), (2, Some(1)), (3, Some(0)), (4, Some(0))] {
        let mut late = world.topic.join_as_subscriber(3, None, history).unwrap();
        assert_eq!(world.receive(&mut late), first, "{history}");
        world.topic.detach_subscriber(late.port());
        world.topic.leave_as_subscriber(late.port());
    }
    world.receive(&mut early);
    world.receive(&mut early);
    for value in 3..6 {
        world.publish(&mut publisher, value).unwrap();
    }
    // The sample that the next one overwrites is not guaranteed to any subscriber.
    let mut late = world.topic.join_as_subscriber(3, None, 4).unwrap();
    assert_eq!(world.receive(&mut late), Some(3));
}

#[test]
fn reader_keeps_its_holds_up_to_its_limit() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut reader = world.subscriber(2, Some(4));
    let mut held = Vec::new();
    for value in 0..4 {
        world.publish(&mut publisher, value).unwrap();
        held.push(world.take(&mut reader).unwrap());
    }
    assert_eq!(world.topic.receive(&world.pool, &mut reader), Received::Empty);
    for value in 4..200 {
        world.publish(&mut publisher, value).unwrap();
    }
    assert_eq!(world.topic.receive(&world.pool, &mut reader), Received::Full);
    assert_eq!(held.iter().map(|taken| world.read(taken)).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((world.audit().read, world.topic.subscribers()[0].held), (4, 4));
    world.topic.release(&world.pool, &held[1]);
    assert_eq!(world.receive(&mut reader), Some(196));
    world.topic.sweep(&world.pool);
    assert_eq!(world.audit(), BlockCounts { free: 17, in_ring: 4, read: 3, ..BlockCounts::default() });
}

#[test]
fn ports_are_limited_and_reused() {
    let world = World::new(SHAPE);
    let publishers = [1, 2].map(|row| world.publisher(row));
    let subscribers = [1, 2, 3, 4].map(|row| world.subscriber(row, None));
    assert!(world.topic.join_as_publisher(5).is_none() && world.topic.join_as_subscriber(5, None, 0).is_none());
    for publisher in &publishers {
        world.topic.detach_publisher(publisher.port());
        assert!(world.topic.join_as_publisher(5).is_none(), "it has not left");
        world.topic.leave_as_publisher(publisher.port());
        world.topic.leave_as_publisher(publisher.port());
        let next = world.publisher(5);
        assert_ne!(next.id(), publisher.id());
        world.topic.leave_as_publisher(publisher.port());
        assert!(world.topic.publishers().iter().any(|state| state.id == next.id()), "it is another's");
    }
    world.topic.recover(&world.pool, |row| row == 5);
    for subscriber in &subscribers {
        world.topic.detach_subscriber(subscriber.port());
        world.topic.leave_as_subscriber(subscriber.port());
        let next = world.subscriber(5, Some(1));
        assert_ne!(next.id(), subscriber.id());
        world.topic.leave_as_subscriber(next.port());
    }
    assert!(world.topic.publishers().is_empty() && world.topic.subscribers().is_empty());
}

#[test]
fn detached_member_blocks_no_other_and_keeps_its_holds() {
    let world = World::new(SHAPE);
    let mut publishers = [1, 2].map(|row| world.publisher(row));
    let mut subscribers = [2, 3].map(|row| world.subscriber(row, None));
    for value in 0..4 {
        world.publish(&mut publishers[0], value).unwrap();
        assert_eq!(world.receive(&mut subscribers[1]), Some(value));
    }
    let held = world.take(&mut subscribers[0]).unwrap();
    world.publish(&mut publishers[0], 4).unwrap();
    assert!(world.publish(&mut publishers[0], 5).is_err());
    assert_eq!(world.topic.detach(|row| row == 2, TimelineEnding::Evicted, |_| None), 2);
    assert_eq!(world.topic.detach(|row| row == 2, TimelineEnding::Evicted, |_| None), 0);
    assert_eq!(world.publish(&mut publishers[0], 5), Ok(5));
    assert_eq!(world.publish(&mut publishers[1], 6), Err(Unpublished::Detached));
    assert_eq!(world.topic.receive(&world.pool, &mut subscribers[0]), Received::Detached);
    let ahead = world.topic.peek(subscribers[0].port(), subscribers[0].next());
    assert_ne!(ahead, Ahead::Nothing, "there is something to hear");
    assert!(world.topic.subscribers()[0].detached && world.topic.publishers()[1].detached);
    assert_eq!((world.receive(&mut subscribers[1]), world.receive(&mut subscribers[1])), (Some(4), Some(5)));
    assert_eq!((world.read(&held), world.audit().read), (0, 1));
    world.topic.release(&world.pool, &held);
    world.topic.leave_as_subscriber(subscribers[0].port());
    assert_eq!(world.topic.subscribers().len(), 1);
}

#[test]
fn samples_of_a_gone_publisher_become_final() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut other = world.publisher(2);
    let mut subscriber = world.subscriber(3, None);
    let cell = TimelineCell { slab: 1, cell: 9, incarnation: 3 };
    world.topic.set_timeline(publisher.port(), 0, cell);
    let statuses = [Status::Timeline, Status::Timeline, Status::Unverified];
    for (value, status) in (1..).zip(statuses) {
        let _kept = world.publish_as(&mut publisher, value, status).unwrap();
    }
    let _kept = world.publish_as(&mut other, 1, Status::Timeline).unwrap();
    let taken: Vec<_> = (0..4).map(|_| world.take(&mut subscriber).unwrap()).collect();
    let now = |world: &World| taken.iter().map(|taken| world.topic.status(taken)).collect::<Vec<_>>();
    assert_eq!(now(&world), [&statuses[..], &[Status::Timeline]].concat());
    assert_eq!(
        world.topic.detach(|row| row == 1, TimelineEnding::OwnerFaulted, |asked| (asked == cell).then_some(1)),
        1
    );
    let failed = Status::Failed(TimelineEnding::OwnerFaulted);
    assert_eq!(now(&world), [Status::Done, failed, failed, Status::Timeline]);
    // A final status does not change.
    let first = world.topic.describe(&taken[0]);
    world.topic.settle(taken[0].block(), first.generation, Status::Tainted);
    world.topic.detach(|row| row == 1, TimelineEnding::OwnerDied, |_| None);
    assert_eq!(world.topic.status(&taken[0]), Status::Done);
    let last = world.topic.describe(&taken[3]);
    world.topic.settle(taken[3].block(), last.generation + 1, Status::Tainted);
    world.topic.settle(u32::MAX, last.generation, Status::Tainted);
    assert_eq!(world.topic.status(&taken[3]), Status::Timeline, "it is another sample, or none");
    world.topic.settle(taken[3].block(), last.generation, Status::Tainted);
    assert_eq!(world.topic.status(&taken[3]), Status::Tainted);
}

// Holds 363.
#[test]
fn samples_of_each_lane_are_complete_up_to_its_timeline() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscriber = world.subscriber(3, None);
    let cell = |lane: u8| TimelineCell { slab: 1, cell: lane.into(), incarnation: 3 };
    let last = LANES as u8 - 1;
    for lane in [0, last] {
        world.topic.set_timeline(publisher.port(), lane, cell(lane));
    }
    // The last one has no timeline: a process that breaks the rules has written its lane.
    let samples = [(0, 1), (last, 2), (0, 2), (u8::MAX, 1)];
    let _kept = samples.map(|(lane, value)| world.publish_on(&mut publisher, lane, value, Status::Timeline).unwrap());
    let taken = samples.map(|_| world.take(&mut subscriber).unwrap());
    for (taken, (lane, value)) in taken.iter().zip(samples) {
        let description = world.topic.describe(taken);
        assert_eq!((description.lane, description.value, description.shape()), (lane, value, &[2, value][..]));
        assert_eq!(world.topic.timeline_of(taken), [0, last].contains(&lane).then(|| cell(lane)));
    }
    let reached = |asked| if asked == cell(last) { Some(2) } else { Some(1) };
    world.topic.detach(|row| row == 1, TimelineEnding::Closed, reached);
    let failed = Status::Failed(TimelineEnding::Closed);
    let now = taken.each_ref().map(|taken| world.topic.status(taken));
    assert_eq!(now, [Status::Done, Status::Done, failed, failed]);
    taken.iter().for_each(|taken| world.topic.release(&world.pool, taken));
    // The next publisher with that port has none of its timelines.
    world.topic.leave_as_publisher(publisher.port());
    let mut next = world.publisher(1);
    assert_eq!(next.port().index, publisher.port().index);
    let _kept = world.publish_on(&mut next, last, 1, Status::Timeline).unwrap();
    let taken = world.take(&mut subscriber).unwrap();
    assert_eq!(world.topic.timeline_of(&taken), None);
}

#[test]
fn block_written_by_a_stream_is_not_reused() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscriber = world.subscriber(2, Some(1));
    let (_, written) = world.publish_as(&mut publisher, 1, Status::Timeline).unwrap();
    let taken = world.take(&mut subscriber).unwrap();
    for value in 2..100 {
        world.publish(&mut publisher, value).unwrap();
        assert_eq!(world.read(&taken), 1);
    }
    world.topic.release(&world.pool, &taken);
    world.topic.sweep(&world.pool);
    assert_eq!((world.pool.holders(), world.audit().held), (vec![(1, 1)], 1));
    world.topic.retire(&world.pool, &written);
    assert_eq!(world.topic.sweep(&world.pool), 1);
    assert_eq!(world.audit(), BlockCounts { free: 20, in_ring: 4, ..BlockCounts::default() });
}

// Holds 250.
#[test]
fn block_that_its_publisher_views_is_not_reused() {
    let world = World::new(SHAPE);
    let mut publisher = world.publisher(1);
    let mut subscriber = world.subscriber(2, Some(1));
    let message =
        Message { status: Status::Ready, lane: 0, value: 0, stamp: 1, dtype: 1, shape: &[], bytes: 1, header: &[] };
    let viewed = [(); 2].map(|()| {
        let held = world.loan(1).unwrap();
        world.topic.publish_viewed(&world.pool, &mut publisher, &held, &message).unwrap();
        let taken = world.take(&mut subscriber).unwrap();
        assert_eq!((taken.block(), world.topic.status(&taken)), (held.index(), Status::Ready));
        world.topic.release(&world.pool, &taken);
        held
    });
    for value in 0..100 {
        let (_, held) = world.publish_as(&mut publisher, value, Status::Ready).unwrap();
        assert!(viewed.iter().all(|viewed| viewed.index() != held.index()));
    }
    assert_eq!((world.pool.holders(), world.audit().held), (vec![(1, 2)], 2));
    world.topic.retire(&world.pool, &viewed[0]);
    world.topic.sweep(&world.pool);
    assert_eq!(world.audit().held, 1);
    assert_eq!(world.topic.recover(&world.pool, |row| row == 1), 1, "it was killed before its views were gone");
    assert_eq!(world.audit(), BlockCounts { free: 20, in_ring: 4, ..BlockCounts::default() });
}

#[test]
fn blocks_of_the_dead_come_back_and_their_samples_stay() {
    let world = World::new(SHAPE);
    let mut publishers = [1, 2].map(|row| world.publisher(row));
    let mut dead = world.subscriber(1, None);
    let mut alive = world.subscriber(3, None);
    // One block loaned, one published and still written, one published.
    let _kept = world.loan(1).unwrap();
    let _kept = world.publish_as(&mut publishers[0], 1, Status::Timeline).unwrap();
    world.publish(&mut publishers[0], 2).unwrap();
    let held = world.take(&mut dead).unwrap();
    assert_eq!(world.audit().held, 1);
    assert_eq!(world.topic.recover(&world.pool, |row| row == 1), 2);
    assert_eq!(world.topic.recover(&world.pool, |row| row == 1), 0);
    assert_eq!(world.audit(), BlockCounts { free: 22, in_ring: 2, ..BlockCounts::default() });
    assert_eq!((world.topic.publishers().len(), world.topic.subscribers().len()), (1, 1));
    let first = world.take(&mut alive).unwrap();
    assert_eq!((first.block(), world.topic.status(&first)), (held.block(), Status::Failed(TimelineEnding::OwnerDied)));
    assert_eq!(world.receive(&mut alive), Some(2));
    for value in 3..20 {
        world.publish(&mut publishers[1], value).unwrap();
        assert_eq!(world.receive(&mut alive), Some(value), "no member waits for the dead");
    }
    // A port of the dead publisher is reused.
    assert_ne!(world.publisher(4).id(), publishers[0].id());
}

#[test]
fn waiter_gets_a_released_or_overwritten_block() {
    let limits = TopicLimits { blocks: 4, depth: 1, publishers: 1, loans: 2, subscribers: 1, held: 1 };
    let world = World::new(limits);
    let mut publisher = world.publisher(1);
    let mut reader = world.subscriber(2, Some(1));
    world.publish(&mut publisher, 0).unwrap();
    let taken = world.take(&mut reader).unwrap();
    let mut loans: Vec<_> = (0..3).map(|_| world.loan(1).unwrap()).collect();
    let wait = || match world.pool.take(3) {
        Attempt::Waiting(waiter) => waiter,
        other => panic!("{other:?}"),
    };
    let publish = |publisher: &mut PublisherHandle, held| {
        let message =
            Message { status: Status::Ready, lane: 0, value: 0, stamp: 1, dtype: 1, shape: &[], bytes: 1, header: &[] };
        world.topic.publish(&world.pool, publisher, &held, &message).unwrap();
    };
    let mut waiter = wait();
    assert_eq!((world.topic.sweep(&world.pool), waiter.poll()), (0, Polled::Waiting));
    publish(&mut publisher, loans.pop().unwrap());
    assert_eq!(waiter.poll(), Polled::Waiting, "it is read");
    world.topic.release(&world.pool, &taken);
    let Polled::Held(held) = waiter.poll() else { panic!("it is in no use") };
    assert_eq!(held.index(), taken.block());
    // No subscriber reads what is overwritten next.
    let mut waiter = wait();
    assert_eq!(world.topic.sweep(&world.pool), 0);
    publish(&mut publisher, loans.pop().unwrap());
    assert!(matches!(waiter.poll(), Polled::Held(_)));
}

/// Two publishers and subscribers of all kinds, each in a thread: nothing is lost, torn, duplicated or out of order.
// Holds 22.
#[test]
fn many_publish_and_receive_at_once() {
    const EACH: u64 = 5_000;
    let world = World::new(TopicLimits { blocks: 24, depth: 4, publishers: 2, loans: 2, subscribers: 4, held: 4 });
    let over = AtomicBool::new(false);
    let subscribers = [None, None, Some(4), Some(1)].map(|queue| (queue, world.subscriber(10, queue)));
    std::thread::scope(|scope| {
        let publishers = [1, 2].map(|row| {
            let mut handle = world.publisher(row);
            let world = &world;
            scope.spawn(move || {
                for count in 0..EACH {
                    let held = loop {
                        if let Some(held) = world.loan(row) {
                            break held;
                        }
                        std::thread::yield_now();
                    };
                    let value = handle.id() << 32 | count;
                    world.memory[held.index() as usize].store(value, Ordering::Relaxed);
                    let header = value.to_le_bytes();
                    let message = Message {
                        status: Status::Ready,
                        lane: 0,
                        value,
                        stamp: value,
                        dtype: 12,
                        shape: &[2, value],
                        bytes: 8,
                        header: &header,
                    };
                    loop {
                        let seen = world.topic.prepare_for_space();
                        match world.topic.publish(&world.pool, &mut handle, &held, &message) {
                            Ok(_) => break,
                            Err(Unpublished::Busy) => {}
                            Err(Unpublished::Blocked { .. }) => {
                                world.topic.sleep_for_space(seen, Duration::from_millis(50));
                            }
                            Err(Unpublished::Detached) => panic!("no member has detached us"),
                        }
                    }
                }
            })
        });
        for (queue, mut handle) in subscribers {
            let world = &world;
            let over = &over;
            scope.spawn(move || {
                let mut next = BTreeMap::new();
                let mut received = 0;
                let mut missed = 0;
                loop {
                    let was_over = over.load(Ordering::Acquire);
                    let seen = world.topic.prepare_for_sample();
                    let taken = match world.topic.receive(&world.pool, &mut handle) {
                        Received::Sample(taken) => taken,
                        Received::Empty if was_over => break,
                        Received::Empty => {
                            world.topic.sleep_for_sample(seen, Duration::from_millis(50));
                            continue;
                        }
                        Received::Busy => continue,
                        other => panic!("{other:?}"),
                    };
                    let value = world.read(&taken);
                    let description = world.topic.describe(&taken);
                    assert_eq!(value, description.publisher << 32 | description.sequence);
                    received += 1;
                    missed += taken.missed();
                    assert_eq!(taken.position() + 1, received + missed);
                    let expected = next.insert(description.publisher, description.sequence + 1).unwrap_or(0);
                    assert!(description.sequence >= expected, "of each publisher, in its order");
                    if queue.is_none() {
                        assert_eq!((description.sequence, taken.missed()), (expected, 0), "nothing is lost");
                    }
                    assert_eq!(world.read(&taken), value, "it stays while it is held");
                    world.topic.release(&world.pool, &taken);
                }
                if queue.is_none() {
                    assert_eq!(received, 2 * EACH);
                }
            });
        }
        for publisher in publishers {
            publisher.join().unwrap();
        }
        over.store(true, Ordering::Release);
    });
    world.topic.sweep(&world.pool);
    assert_eq!(world.audit(), BlockCounts { free: 20, in_ring: 4, ..BlockCounts::default() });
}
