//! Random steps against a simple model, and arbitrary contents of the memory.

use std::collections::BTreeSet;

use partywall_os::map::SharedMap;
use proptest::{collection::vec, prelude::*};

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Publish(usize),
    /// Begin to publish with a stream.
    Enqueue(usize),
    Retire,
    Receive(usize),
    Release(usize),
    Join(usize, Option<u32>, u32),
    Leave(usize),
    Die(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let queue = prop_oneof![Just(None), (1..6_u32).prop_map(Some)];
    prop_oneof![
        5 => (0..2_usize).prop_map(Step::Publish),
        2 => (0..2_usize).prop_map(Step::Enqueue),
        2 => Just(Step::Retire),
        6 => (0..3_usize).prop_map(Step::Receive),
        4 => any::<usize>().prop_map(Step::Release),
        1 => (0..3_usize, queue, 0..6_u32).prop_map(|(who, queue, history)| Step::Join(who, queue, history)),
        1 => (0..3_usize).prop_map(Step::Leave),
        1 => (0..5_u16).prop_map(Step::Die),
    ]
}

/// A simple model of a topic.
#[derive(Default)]
struct Model {
    samples: Vec<u64>,
    readers: [Option<Reader>; 3],
}

struct Reader {
    next: u64,
    queue: Option<u32>,
    held: Vec<u64>,
}

impl Model {
    const DEPTH: u64 = 4;

    fn oldest(&self) -> u64 {
        (self.samples.len() as u64).saturating_sub(Self::DEPTH - 1)
    }

    fn is_full(&self) -> bool {
        let next = self.samples.len() as u64;
        self.readers.iter().flatten().any(|reader| reader.queue.is_none() && next >= reader.next + Self::DEPTH)
    }

    /// Skips samples that a reader no longer receives, and returns the next one that it would receive.
    fn next(&mut self, reader: usize) -> Option<u64> {
        let next = self.samples.len() as u64;
        let Reader { next: cursor, queue, .. } = self.readers[reader].as_mut().unwrap();
        if let Some(queue) = queue.map(u64::from) {
            if queue < Self::DEPTH && next > *cursor + queue {
                *cursor = next - queue;
            }
            if next > *cursor + Self::DEPTH {
                *cursor = next - Self::DEPTH;
            }
        }
        (*cursor < next).then_some(*cursor)
    }
}

proptest! {
    /// Rows 0 and 1 publish, rows 2 to 4 subscribe.
    // Holds 203.
    #[test]
    fn topic_agrees_with_its_model(steps in vec(step(), 1..100)) {
        let world = World::new(TopicLimits { blocks: 24, depth: 4, publishers: 2, loans: 2, subscribers: 3, held: 4 });
        let mut model = Model::default();
        let mut publishers = [0, 1].map(|row| Some(world.publisher(row)));
        let mut readers: [Option<(SubscriberHandle, Vec<HeldSample>)>; 3] = Default::default();
        let mut written: Vec<(u16, HeldSlot)> = Vec::new();
        for step in steps {
            match step {
                Step::Publish(who) | Step::Enqueue(who) => {
                    let Some(handle) = &mut publishers[who] else { continue };
                    if written.len() >= 4 && matches!(step, Step::Enqueue(_)) {
                        continue;
                    }
                    let value = model.samples.len() as u64 * 7;
                    let result = if matches!(step, Step::Enqueue(_)) {
                        world.publish_as(handle, value, Status::Timeline).map(|(position, held)| {
                            written.push((who as u16, held));
                            position
                        })
                    } else {
                        world.publish(handle, value)
                    };
                    match result {
                        Ok(position) => {
                            prop_assert!(!model.is_full());
                            prop_assert_eq!(position, model.samples.len() as u64);
                            model.samples.push(value);
                        }
                        Err(Unpublished::Blocked { .. }) => prop_assert!(model.is_full()),
                        Err(other) => panic!("{other:?}"),
                    }
                }
                Step::Retire => if let Some((_, held)) = written.pop() {
                    world.topic.retire(&world.pool, &held);
                },
                Step::Receive(who) => {
                    let Some((handle, held)) = &mut readers[who] else { continue };
                    let next = model.next(who);
                    match world.topic.receive(&world.pool, handle) {
                        Received::Sample(taken) => {
                            let value = model.samples[next.unwrap() as usize];
                            prop_assert_eq!(Some(taken.position()), next);
                            prop_assert_eq!(world.read(&taken), value);
                            held.push(taken);
                            let model = model.readers[who].as_mut().unwrap();
                            model.next = next.unwrap() + 1;
                            model.held.push(value);
                        }
                        Received::Empty => prop_assert_eq!(next, None),
                        Received::Full => prop_assert!(next.is_some() && held.len() == 4),
                        other => panic!("{other:?}"),
                    }
                }
                Step::Release(which) => {
                    let who = which % 3;
                    let Some((_, held)) = &mut readers[who] else { continue };
                    if held.is_empty() {
                        continue;
                    }
                    let which = which % held.len();
                    let values = &mut model.readers[who].as_mut().unwrap().held;
                    prop_assert_eq!(world.read(&held[which]), values.remove(which));
                    world.topic.release(&world.pool, &held.remove(which));
                }
                Step::Join(who, queue, history) => {
                    if readers[who].is_none() {
                        let handle = world.topic.join_as_subscriber(who as u16 + 2, queue, history).unwrap();
                        readers[who] = Some((handle, Vec::new()));
                        let first = (model.samples.len() as u64).saturating_sub(history.into()).max(model.oldest());
                        model.readers[who] = Some(Reader { next: first, queue, held: Vec::new() });
                    }
                }
                Step::Leave(who) => if let Some((handle, held)) = readers[who].take() {
                    model.readers[who] = None;
                    world.topic.detach_subscriber(handle.port());
                    held.iter().for_each(|taken| world.topic.release(&world.pool, taken));
                    world.topic.leave_as_subscriber(handle.port());
                },
                Step::Die(row) => {
                    world.topic.recover(&world.pool, |dead| dead == row);
                    written.retain(|(writer, _)| *writer != row);
                    if row < 2 {
                        publishers[usize::from(row)] = Some(world.publisher(row));
                    } else {
                        readers[usize::from(row) - 2] = None;
                        model.readers[usize::from(row) - 2] = None;
                    }
                }
            }
            let held: BTreeSet<_> = readers.iter().flatten().flat_map(|(_, held)| held).map(HeldSample::block).collect();
            let audit = world.audit();
            prop_assert_eq!(u64::from(audit.in_ring), (model.samples.len() as u64).min(Model::DEPTH));
            prop_assert!(audit.read <= held.len() as u32 && audit.held <= written.len() as u32);
        }
        for (row, held) in written {
            prop_assert!(row < 2);
            world.topic.retire(&world.pool, &held);
        }
        world.topic.recover(&world.pool, |_| true);
        let in_ring = (model.samples.len() as u32).min(4);
        prop_assert_eq!(world.audit(), BlockCounts { free: 24 - in_ring, in_ring, ..BlockCounts::default() });
    }

    /// Checks that on arbitrary memory every call returns without a panic, and that no block is lost.
    // Holds 158.
    #[test]
    fn arbitrary_bytes_are_not_trusted(words in vec((any::<prop::sample::Index>(), any::<u64>(), 0..5_u8), 0..200), ring in any::<bool>()) {
        let shape = TopicLimits { blocks: 24, depth: 4, publishers: 2, loans: 2, subscribers: 3, held: 4 };
        let topic = Topic::create(shape).unwrap();
        let pool = Pool::create(shape.blocks).unwrap();
        let maps = [&topic, &pool].map(|fd| SharedMap::writable(fd).unwrap());
        let world = World {
            topic: Topic::map(&topic).unwrap(),
            pool: Pool::map(&pool).unwrap(),
            memory: Vec::new(),
        };
        let mut old_publisher = world.publisher(1);
        let mut old_reader = world.subscriber(2, None);
        // Behind the header, which is read only when the memory is mapped.
        let all = maps.each_ref().map(|map| map.atomics::<AtomicU64>(64, map.len() / 8 - 8).unwrap());
        for (index, word, sort) in words {
            let word = match sort {
                0 => word,
                1 => word & 0xff,
                2 => (word & 0x3ff) << 18 | (word >> 32 & 3) | (word & 7) << 2,
                3 => (word & 7) << 16 | (word >> 32 & 31),
                _ => u64::MAX << (word & 63),
            };
            let all = if ring { &all[0][..40] } else { all[usize::from(word & 1 == 1)] };
            all[index.index(all.len())].store(word, Ordering::Relaxed);
        }
        let message = Message { status: Status::Timeline, lane: 0, value: 1, stamp: 1, dtype: 1, shape: &[1; 8], bytes: 8, header: &[1; 256] };
        let use_all = |publisher: &mut PublisherHandle, reader: &mut SubscriberHandle| {
            if let Some(held) = world.loan(1)
                && world.topic.publish(&world.pool, publisher, &held, &message).is_ok()
            {
                world.topic.settle(held.index(), held.generation(), Status::Done);
                world.topic.retire(&world.pool, &held);
            }
            world.topic.peek(reader.port(), reader.next());
            if let Received::Sample(taken) = world.topic.receive(&world.pool, reader) {
                world.topic.describe(&taken);
                world.topic.status(&taken);
                assert!(world.topic.header(&taken).len() <= MAX_HEADER);
                world.topic.release(&world.pool, &taken);
            }
        };
        use_all(&mut old_publisher, &mut old_reader);
        world.topic.publishers();
        world.topic.subscribers();
        world.topic.audit(&world.pool);
        world.topic.detach(|row| row % 2 == 0, TimelineEnding::OwnerDied, |_| Some(u64::MAX));
        world.topic.recover(&world.pool, |row| row % 2 == 0);
        world.topic.recover(&world.pool, |_| true);
        let audit = world.topic.audit(&world.pool);
        prop_assert_eq!((audit.held, audit.read, audit.handed, audit.unused), (0, 0, 0, 0));
        prop_assert_eq!(audit.free + audit.in_ring, 24);
        prop_assert!(world.topic.publishers().is_empty() && world.topic.subscribers().is_empty());
        let mut publisher = world.publisher(1);
        let mut reader = world.subscriber(2, Some(1));
        use_all(&mut publisher, &mut reader);
        use_all(&mut old_publisher, &mut old_reader);
    }
}
