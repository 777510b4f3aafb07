// Holds 22, 193.
//! Topics under the model checker.
#![allow(clippy::unwrap_used, reason = "a model fails by panicking, as tests do")]

use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use partywall_wire::BlockCounts;

use super::{
    ages::Histogram,
    descriptor::Descriptor,
    entry::RingEntry,
    members::{Holds, Publishing, Subscribing},
    *,
};
use crate::{
    MAX_SLEEP,
    slots::{Attempt, HeldSlot, Polled, Slots},
};

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A topic with two publishers, two subscribers, and one hold for each of these.
struct World {
    pool: Slots,
    topic: Topic,
    /// The contents of the blocks. The checker fails if a block is written while another thread may read it.
    memory: Vec<UnsafeCell<u64>>,
}

impl World {
    fn new(depth: usize, blocks: usize) -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        let header = TopicHeader {
            tail: zero(),
            samples: EventCount::new(),
            zero_80: std::array::from_fn(|_| zero()),
            space: EventCount::new(),
            zero_136: std::array::from_fn(|_| zero()),
            joins: zero(),
            ids: zero(),
            publishers_joined: zero(),
            ages_until: zero(),
            skipped: zero(),
            zero_232: std::array::from_fn(|_| zero()),
        };
        let limits = TopicLimits {
            blocks: blocks as u32,
            depth: depth as u32,
            publishers: 2,
            loans: 1,
            subscribers: 2,
            held: 1,
        };
        let topic = Topic {
            limits,
            header: vec![header],
            ring: (0..depth).map(|_| RingEntry::new()).collect(),
            publishers: (0..2).map(|_| Publishing::new()).collect(),
            subscribers: (0..2).map(|_| Subscribing::new()).collect(),
            holds: (0..2).map(|_| Holds::new()).collect(),
            ages: (0..2).map(|_| Histogram::new()).collect(),
            descriptors: (0..blocks).map(|_| Descriptor::new()).collect(),
        };
        let memory = (0..blocks).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { pool: Slots::new(blocks, 2), topic, memory })
    }

    fn loan(&self, row: u16) -> Option<HeldSlot> {
        self.pool.try_take(row).or_else(|| {
            self.topic.sweep(&self.pool);
            self.pool.try_take(row)
        })
    }

    fn write(&self, held: &HeldSlot, value: u64) {
        #[allow(unsafe_code)]
        self.memory[held.index() as usize].with_mut(|memory| {
            // SAFETY: loom fails if this is not the only access.
            unsafe { *memory = value }
        });
    }

    /// Writes a block and publishes it.
    fn publish_block(&self, handle: &mut PublisherHandle, held: &HeldSlot, value: u64) -> Result<u64, Unpublished> {
        self.write(held, value);
        self.topic.publish(&self.pool, handle, held, &message(value))
    }

    fn publish(&self, handle: &mut PublisherHandle, value: u64) -> Result<u64, Unpublished> {
        let held = self.loan(1).unwrap();
        self.publish_block(handle, &held, value)
    }

    /// Sleeps until there is room.
    fn publish_waiting(&self, handle: &mut PublisherHandle, value: u64) -> u64 {
        let held = self.loan(1).unwrap();
        loop {
            let seen = self.topic.control().space.prepare();
            match self.publish_block(handle, &held, value) {
                Ok(position) => return position,
                Err(Unpublished::Blocked { .. }) => self.topic.control().space.sleep(seen, MAX_SLEEP),
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    fn read(&self, taken: &HeldSample) -> u64 {
        #[allow(unsafe_code)]
        let read = |memory: *const u64| {
            // SAFETY: loom fails if another thread writes meanwhile.
            unsafe { *memory }
        };
        let value = self.memory[taken.block() as usize].with(read);
        let description = self.topic.descriptors[taken.block() as usize].describe();
        assert_eq!((description.value, description.stamp), (value, value + 1));
        value
    }

    fn receive(&self, handle: &mut SubscriberHandle) -> Option<(u64, u64)> {
        let Received::Sample(taken) = self.topic.receive(&self.pool, handle) else { return None };
        let value = self.read(&taken);
        assert_eq!(self.read(&taken), value);
        self.topic.release(&self.pool, &taken);
        Some((value, taken.missed()))
    }

    /// Sleeps until there is a sample.
    fn receive_waiting(&self, handle: &mut SubscriberHandle) -> (u64, u64) {
        loop {
            let seen = self.topic.control().samples.prepare();
            match self.receive(handle) {
                Some(received) => return received,
                None => self.topic.control().samples.sleep(seen, MAX_SLEEP),
            }
        }
    }

    /// Receives as a subscriber of the library does: it polls before it receives, and again before it announces another
    /// sleep.
    fn poll_and_sleep(&self, handle: &mut SubscriberHandle) -> u64 {
        let mut receive = || match self.topic.peek(handle.port(), handle.next()) {
            Ahead::Nothing => None,
            Ahead::Sample(_) | Ahead::Other => self.receive(handle),
        };
        loop {
            let seen = self.topic.control().samples.prepare();
            if let Some((value, _)) = receive() {
                return value;
            }
            self.topic.control().samples.sleep(seen, MAX_SLEEP);
            if let Some((value, _)) = receive() {
                return value;
            }
        }
    }

    /// Publishes, and is killed before it notifies.
    fn publish_and_die(&self, handle: &mut PublisherHandle, value: u64) {
        let held = self.loan(1).unwrap();
        self.write(&held, value);
        self.topic.write_descriptor(handle, &held, &message(value));
        self.topic.fill(handle, held.index() as u16).unwrap();
    }

    fn publisher(&self, row: u16) -> PublisherHandle {
        self.topic.join_as_publisher(row).unwrap()
    }

    fn subscriber(&self, row: u16, queue: Option<u32>, history: u32) -> SubscriberHandle {
        self.topic.join_as_subscriber(row, queue, history).unwrap()
    }

    /// Checks the state of all blocks, once all threads have stopped.
    fn sound(&self) -> BlockCounts {
        self.topic.sweep(&self.pool);
        let audit = self.topic.audit(&self.pool);
        assert_eq!((audit.invalid, audit.unused, audit.handed), (0, 0, 0));
        assert_eq!(audit.free + audit.held + audit.in_ring + audit.read, self.topic.descriptors.len() as u32);
        audit
    }
}

fn message(value: u64) -> Message<'static> {
    Message { status: Status::Ready, lane: 0, value, stamp: value + 1, dtype: 1, shape: &[], bytes: 8, header: &[] }
}

fn spawn(world: &Arc<World>, other: impl FnOnce(&World) + 'static) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || other(&world))
}

/// The ring has one entry, which is overwritten while it is read. The reader gets the complete old sample or the
/// complete new one.
#[test]
fn block_that_is_read_is_not_written() {
    check(3, || {
        let world = World::new(1, 3);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, Some(1), 0);
        world.publish(&mut publisher, 1).unwrap();
        let other = spawn(&world, move |world| {
            if let Some((value, missed)) = world.receive(&mut reader) {
                assert_eq!(value, 1 + missed);
            }
        });
        // The second sample takes the third block, the third sample the block of the first, unless that is being read.
        for value in 2..4 {
            world.publish(&mut publisher, value).unwrap();
        }
        other.join().unwrap();
        assert_eq!(world.sound(), BlockCounts { free: 2, in_ring: 1, ..BlockCounts::default() });
    });
}

/// As above, with as few blocks as possible: the publisher gets no block instead of one that is being read.
#[test]
fn subscriber_handles_missing_block() {
    check(3, || {
        let world = World::new(1, 2);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, Some(1), 0);
        world.publish(&mut publisher, 1).unwrap();
        let other = spawn(&world, move |world| {
            world.receive(&mut reader);
            world.receive(&mut reader);
        });
        for value in 2..4 {
            if let Some(held) = world.loan(1) {
                world.publish_block(&mut publisher, &held, value).unwrap();
            }
        }
        other.join().unwrap();
        assert_eq!(world.sound(), BlockCounts { free: 1, in_ring: 1, ..BlockCounts::default() });
    });
}

// Holds 23.
#[test]
fn a_joined_subscriber_misses_nothing() {
    check(3, || {
        let world = World::new(2, 4);
        let mut publisher = world.publisher(1);
        world.publish(&mut publisher, 0).unwrap();
        let other = spawn(&world, move |world| {
            let mut reader = world.subscriber(2, None, 1);
            // The first sample that it received, and all later ones.
            let first = reader.cursor;
            for expected in first..first + 2 {
                match world.receive(&mut reader) {
                    Some(received) => assert_eq!(received, (expected, 0)),
                    None => break,
                }
            }
        });
        for value in 1..4 {
            match world.publish(&mut publisher, value) {
                Ok(position) => assert_eq!(position, value),
                Err(Unpublished::Blocked { .. }) => break,
                Err(other) => panic!("{other:?}"),
            }
        }
        other.join().unwrap();
        world.sound();
    });
}

/// As above, where one publisher follows the other.
#[test]
fn subscriber_joining_between_publishers_misses_nothing() {
    check(2, || {
        let world = World::new(2, 5);
        let mut first = world.publisher(1);
        let mut second = world.publisher(2);
        world.publish(&mut first, 0).unwrap();
        let publish = |world: &World, handle: &mut PublisherHandle, value| match world.publish(handle, value) {
            Ok(_) | Err(Unpublished::Blocked { .. }) => {}
            Err(other) => panic!("{other:?}"),
        };
        let other = spawn(&world, move |world| publish(world, &mut first, 1));
        let another = spawn(&world, move |world| publish(world, &mut second, 2));
        let mut reader = world.subscriber(3, None, 1);
        while let Some((_, missed)) = world.receive(&mut reader) {
            assert_eq!(missed, 0);
        }
        other.join().unwrap();
        another.join().unwrap();
    });
}

/// The member that takes a block is neither its reader nor the publisher that has overwritten it.
#[test]
fn sweep_frees_no_block_in_use() {
    check(3, || {
        let world = World::new(1, 2);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, Some(1), 0);
        world.publish(&mut publisher, 1).unwrap();
        let held = world.loan(1).unwrap();
        let readers = spawn(&world, move |world| {
            world.receive(&mut reader);
        });
        let publishers = spawn(&world, move |world| {
            world.publish_block(&mut publisher, &held, 2).unwrap();
        });
        if let Some(held) = world.loan(3) {
            world.write(&held, 3);
            world.pool.free(&held).unwrap();
        }
        readers.join().unwrap();
        publishers.join().unwrap();
        assert_eq!(world.sound(), BlockCounts { free: 1, in_ring: 1, ..BlockCounts::default() });
    });
}

#[test]
fn sleeping_reader_is_woken_for_each_sample() {
    check(3, || {
        let world = World::new(2, 4);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, None, 0);
        let other = spawn(&world, move |world| {
            for value in 0..2 {
                world.publish(&mut publisher, value).unwrap();
            }
        });
        for expected in 0..2 {
            assert_eq!(world.poll_and_sleep(&mut reader), expected);
        }
        other.join().unwrap();
    });
}

#[test]
fn all_sleeping_readers_are_woken() {
    check(2, || {
        let world = World::new(1, 4);
        let mut publisher = world.publisher(1);
        let readers = [2, 3].map(|row| world.subscriber(row, None, 0));
        let readers = readers.map(|mut reader| spawn(&world, move |world| _ = world.poll_and_sleep(&mut reader)));
        world.publish(&mut publisher, 0).unwrap();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

/// A publisher is killed when its sample is in the ring and no waiter is notified. For processes, [`MAX_SLEEP`] ends
/// every sleep, and bounds this. A model has no clock, and shows that the next publisher wakes the reader, too.
#[test]
fn an_unannounced_sample_is_received_with_the_next_one() {
    check(3, || {
        let world = World::new(2, 4);
        let [mut dead, mut publisher] = [1, 2].map(|row| world.publisher(row));
        let mut reader = world.subscriber(3, None, 0);
        let other = spawn(&world, move |world| {
            world.publish_and_die(&mut dead, 0);
            world.publish(&mut publisher, 1).unwrap();
        });
        for expected in 0..2 {
            assert_eq!(world.poll_and_sleep(&mut reader), expected);
        }
        other.join().unwrap();
    });
}

/// As above, but no publisher is left: the broker wakes the reader when it detaches the dead publisher.
#[test]
fn unannounced_sample_is_received_when_its_publisher_is_detached() {
    check(3, || {
        let world = World::new(2, 4);
        let mut dead = world.publisher(1);
        let mut reader = world.subscriber(3, None, 0);
        let other = spawn(&world, move |world| {
            world.publish_and_die(&mut dead, 0);
            world.topic.detach(|row| row == 1, crate::timeline::TimelineEnding::OwnerDied, |_| None);
        });
        assert_eq!(world.poll_and_sleep(&mut reader), 0);
        other.join().unwrap();
    });
}

/// A reader is killed when it has moved its cursor and before it notifies: the broker wakes the publisher that waits
/// for it.
#[test]
fn publisher_is_woken_when_its_slowest_reader_dies() {
    check(3, || {
        let world = World::new(1, 4);
        let mut publisher = world.publisher(1);
        let reader = world.subscriber(2, None, 0);
        world.publish(&mut publisher, 0).unwrap();
        let other = spawn(&world, move |world| {
            world.topic.subscribers[reader.index].cursor.store(reader.next() + 1, Ordering::Release);
            world.topic.detach(|row| row == 2, crate::timeline::TimelineEnding::OwnerDied, |_| None);
        });
        assert_eq!(world.publish_waiting(&mut publisher, 1), 1);
        other.join().unwrap();
    });
}

#[test]
fn publisher_is_woken_when_its_slowest_reader_reads() {
    check(3, || {
        let world = World::new(1, 4);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, None, 0);
        let other = spawn(&world, move |world| {
            for expected in 0..2 {
                assert_eq!(world.receive_waiting(&mut reader), (expected, 0));
            }
        });
        for value in 0..2 {
            assert_eq!(world.publish_waiting(&mut publisher, value), value);
        }
        other.join().unwrap();
        world.sound();
    });
}

#[test]
fn publisher_is_woken_when_its_slowest_reader_leaves() {
    check(3, || {
        let world = World::new(1, 4);
        let mut publisher = world.publisher(1);
        let reader = world.subscriber(2, None, 0);
        world.publish(&mut publisher, 0).unwrap();
        let other = spawn(&world, move |world| {
            world.topic.detach_subscriber(reader.port());
            world.topic.leave_as_subscriber(reader.port());
        });
        assert_eq!(world.publish_waiting(&mut publisher, 1), 1);
        other.join().unwrap();
        world.sound();
    });
}

/// The broker detaches a reader while it receives.
#[test]
fn detached_reader_sees_no_partial_write() {
    check(2, || {
        let world = World::new(1, 2);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, None, 0);
        world.publish(&mut publisher, 0).unwrap();
        let broker = spawn(&world, |world| {
            world.topic.detach(|row| row == 2, crate::timeline::TimelineEnding::Evicted, |_| None);
        });
        let other = spawn(&world, move |world| {
            world.receive(&mut reader);
        });
        for value in 1..3 {
            if let Some(held) = world.loan(1)
                && world.publish_block(&mut publisher, &held, value).is_err()
            {
                world.pool.free(&held).unwrap();
            }
        }
        broker.join().unwrap();
        other.join().unwrap();
        world.sound();
    });
}

#[test]
fn concurrent_publications_have_one_order() {
    check(3, || {
        let world = World::new(2, 4);
        let publishers = [1, 2].map(|row| world.publisher(row));
        let mut reader = world.subscriber(3, None, 0);
        let [mut first, mut second] = publishers;
        let other = spawn(&world, move |world| {
            world.publish(&mut second, 2).unwrap();
        });
        let position = world.publish(&mut first, 1).unwrap();
        let mut seen = Vec::new();
        while let Some((value, missed)) = world.receive(&mut reader) {
            assert_eq!(missed, 0);
            seen.push(value);
        }
        other.join().unwrap();
        while let Some((value, _)) = world.receive(&mut reader) {
            seen.push(value);
        }
        assert_eq!(seen, if position == 0 { [1, 2] } else { [2, 1] });
        assert_eq!(world.sound(), BlockCounts { free: 2, in_ring: 2, ..BlockCounts::default() });
    });
}

/// A member waits for a block, which becomes free when its reader has released it and it has been overwritten,
/// whichever is last.
#[test]
fn waiter_for_a_block_is_served() {
    check(2, || {
        let world = World::new(1, 2);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, Some(1), 0);
        world.publish(&mut publisher, 0).unwrap();
        let held = world.loan(1).unwrap();
        let readers = spawn(&world, move |world| {
            world.receive(&mut reader);
        });
        let publishers = spawn(&world, move |world| {
            world.publish_block(&mut publisher, &held, 1).unwrap();
        });
        let waited = match world.pool.take(3) {
            Attempt::Held(held) => held,
            Attempt::Waiting(mut waiter) => {
                world.topic.sweep(&world.pool);
                loop {
                    match waiter.poll() {
                        Polled::Held(held) => break held,
                        Polled::Waiting => waiter.sleep(MAX_SLEEP),
                        Polled::Lost => panic!("it waits"),
                    }
                }
            }
            Attempt::Crowded => panic!("there is room"),
        };
        readers.join().unwrap();
        publishers.join().unwrap();
        world.pool.free(&waited).unwrap();
        assert_eq!(world.sound(), BlockCounts { free: 1, in_ring: 1, ..BlockCounts::default() });
    });
}

/// A subscriber that ends once the topic is idle receives what the last publisher has published, and sleeps no longer.
#[test]
fn last_publisher_wakes_waiters_when_it_leaves() {
    check(3, || {
        let world = World::new(2, 4);
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, None, 0);
        let other = spawn(&world, move |world| {
            world.publish(&mut publisher, 1).unwrap();
            world.topic.detach_publisher(publisher.port());
            world.topic.leave_as_publisher(publisher.port());
        });
        let mut received = 0;
        loop {
            let seen = world.topic.control().samples.prepare();
            if world.receive(&mut reader).is_some() {
                received += 1;
            } else if world.topic.is_idle(reader.next()) {
                break;
            } else {
                world.topic.control().samples.sleep(seen, MAX_SLEEP);
            }
        }
        assert_eq!(received, 1);
        other.join().unwrap();
    });
}

/// A publisher leaves once another one has joined, so there is always at least one.
#[test]
fn topic_is_not_idle_while_one_publisher_takes_over_from_another() {
    check(3, || {
        let world = World::new(1, 2);
        // The later publisher has the port that is read first.
        let left = world.publisher(1);
        let first = world.publisher(1);
        world.topic.leave_as_publisher(left.port());
        let other = spawn(&world, move |world| {
            world.publisher(2);
            world.topic.detach_publisher(first.port());
        });
        assert!(!world.topic.is_idle(0));
        other.join().unwrap();
    });
}
