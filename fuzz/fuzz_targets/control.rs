// Holds 158.
//! Control memory that a peer fills with garbage while a member and the broker use it.
//!
//! No call may panic, hang, or access memory outside of the object, and the broker must recover every slot once all
//! members are dead. One thread does everything, so that each input runs in one way: garbage comes between calls, not
//! within them.
#![no_main]

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};
use partywall_os::map::SharedMap;
use partywall_shm::{
    members::Members,
    pool::Pool,
    queue::{
        self, AttachedPart, Claimed, Contents, NewInput, NewOutput, NewTask, Pools, Queue, Reason, StreamPoint, TaskId,
        Views,
    },
    slots::{Attempt, HeldSlot, Slots},
    timeline::{MAX_VALUE, Slab, TimelineEnding},
    topic::{
        self, HeldSample, LANES, MAX_HEADER, Message, PublisherHandle, Received, Status, SubscriberHandle,
        TimelineCell, Topic,
    },
    trace,
};

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let _ = match input.arbitrary::<u8>().unwrap_or(0) % 5 {
        0 => pool(&mut input),
        1 => topic(&mut input),
        2 => queue(&mut input),
        3 => timeline(&mut input),
        _ => traces(&mut input),
    };
});

/// The rows of members: one that lives, one that dies midway.
const OURS: u16 = 1;
const THEIRS: u16 = 2;

/// The words that a peer can write: all words of the memory of an object.
struct Peer(Vec<SharedMap>);

impl Peer {
    fn of(memory: &[&OwnedFd]) -> Self {
        Self(memory.iter().map(|fd| SharedMap::writable(fd).expect("our own memory can be mapped")).collect())
    }

    /// Writes up to three words. Those of the header that describe the shape are read only when memory is mapped.
    fn write(&self, input: &mut Unstructured<'_>) -> Result<()> {
        for _ in 0..input.arbitrary::<u8>()? % 4 {
            let words = self.words(input)?;
            let word = &words[usize::from(input.arbitrary::<u16>()?) % words.len()];
            let seen = word.load(Ordering::Relaxed);
            // Words that are nearly right get further than noise.
            let new = match input.arbitrary::<u8>()? {
                sort @ 0..128 => seen ^ 1 << (sort % 64),
                128..160 => u64::from(input.arbitrary::<u16>()?),
                160..192 => seen.wrapping_add(input.arbitrary::<i8>()? as u64),
                192..224 => {
                    let from = self.words(input)?;
                    from[usize::from(input.arbitrary::<u16>()?) % from.len()].load(Ordering::Relaxed)
                }
                _ => input.arbitrary()?,
            };
            word.store(new, Ordering::Relaxed);
        }
        Ok(())
    }

    fn words(&self, input: &mut Unstructured<'_>) -> Result<&[AtomicU64]> {
        let map = &self.0[usize::from(input.arbitrary::<u8>()?) % self.0.len()];
        Ok(map.atomics(0, map.len() / 8).expect("the words are within the memory"))
    }
}

fn pool(input: &mut Unstructured<'_>) -> Result<()> {
    let blocks = u32::from(input.arbitrary::<u8>()? % 20) + 1;
    let memory = Pool::create(blocks).expect("a pool can be created");
    let pool = Pool::map(&memory).expect("a pool can be mapped");
    let peer = Peer::of(&[&memory]);
    let mut held: Vec<HeldSlot> = Vec::new();
    while !input.is_empty() {
        peer.write(input)?;
        match input.arbitrary::<u8>()? % 9 {
            0 => held.extend(pool.try_take(OURS)),
            1 => drop(held.pop().map(|block| pool.free(&block))),
            2 => drop(held.pop().map(|block| pool.offer(&block))),
            3 => {
                let block = held.last().map_or((0, 0), |block| (block.index(), block.generation()));
                held.extend(pool.accept(THEIRS, block.0, block.1));
                pool.is_current(input.arbitrary()?, input.arbitrary()?);
                held.extend(pool.accept(THEIRS, input.arbitrary()?, input.arbitrary()?));
            }
            4 => {
                if let Attempt::Waiting(mut waiter) = pool.take(OURS) {
                    peer.write(input)?;
                    waiter.is_waiting();
                    waiter.sleep(Duration::ZERO);
                    peer.write(input)?;
                    waiter.poll();
                }
            }
            5 => pool.revoke_overdue(),
            6 => drop(pool.recover(|row| row == THEIRS)),
            7 => drop(Pool::map(&memory)),
            _ => drop((pool.audit(), pool.holders(), pool.count(), pool.next_free())),
        }
    }
    pool.recover(|_| true);
    assert_eq!(pool.audit().free, blocks, "the broker returns all blocks of the dead");
    Ok(())
}

fn topic(input: &mut Unstructured<'_>) -> Result<()> {
    let shape = topic::TopicLimits { blocks: 24, depth: 4, publishers: 2, loans: 2, subscribers: 3, held: 4 };
    let memory = Topic::create(shape).expect("a topic can be created");
    let blocks = Pool::create(shape.blocks).expect("a pool can be created");
    let topic = Topic::map(&memory).expect("a topic can be mapped");
    let pool = Pool::map(&blocks).expect("a pool can be mapped");
    let peer = Peer::of(&[&memory, &blocks]);
    let mut publishers: Vec<PublisherHandle> = Vec::new();
    let mut subscribers: Vec<SubscriberHandle> = Vec::new();
    let mut loans: Vec<HeldSlot> = Vec::new();
    let mut samples: Vec<HeldSample> = Vec::new();
    while !input.is_empty() {
        peer.write(input)?;
        match input.arbitrary::<u8>()? % 12 {
            0 => publishers.extend(topic.join_as_publisher(OURS)),
            1 => {
                let queue = input.arbitrary::<u8>()?;
                let queue = (queue % 4 != 0).then_some(u32::from(queue / 4));
                subscribers.extend(topic.join_as_subscriber(THEIRS, queue, input.arbitrary()?));
            }
            2..=4 => {
                if let Some(publisher) = publishers.last_mut()
                    && let Some(block) = loan(&topic, &pool)
                {
                    let message = Message {
                        status: if input.arbitrary()? { Status::Timeline } else { Status::Ready },
                        lane: input.arbitrary()?,
                        value: input.arbitrary()?,
                        stamp: 1,
                        dtype: input.arbitrary()?,
                        shape: &[1; 8],
                        bytes: 8,
                        header: &[1; MAX_HEADER],
                    };
                    match topic.publish(&pool, publisher, &block, &message) {
                        Ok(_) => loans.push(block),
                        Err(_) => drop(pool.free(&block)),
                    }
                }
            }
            5 => {
                if let Some(block) = loans.pop() {
                    topic.settle(block.index(), block.generation(), Status::Done);
                    peer.write(input)?;
                    topic.retire(&pool, &block);
                }
            }
            6..=7 => {
                if let Some(subscriber) = subscribers.last_mut() {
                    topic.peek(subscriber.port(), subscriber.next());
                    topic.is_idle(subscriber.next());
                    if let Received::Sample(sample) = topic.receive(&pool, subscriber) {
                        peer.write(input)?;
                        assert!(topic.header(&sample).len() <= MAX_HEADER);
                        let mut found = topic.describe(&sample);
                        found.check(8);
                        assert!(found.bytes <= 8 && found.shape().len() <= 8);
                        let _ = (topic.status(&sample), topic.timeline_of(&sample));
                        topic.add_age(subscriber, &sample, input.arbitrary()?);
                        samples.push(sample);
                    }
                }
            }
            8 => drop(samples.pop().map(|sample| topic.release(&pool, &sample))),
            9 => {
                if let Some(publisher) = publishers.last() {
                    let at = TimelineCell { slab: input.arbitrary()?, cell: 1022, incarnation: input.arbitrary()? };
                    let lane = input.int_in_range(0..=LANES as u8 - 1)?;
                    topic.set_timeline(publisher.port(), lane, at);
                    topic.set_blocked(publisher.port(), Some(input.arbitrary()?));
                    topic.published_by(publisher.port());
                }
                if input.arbitrary()? {
                    publishers.pop().into_iter().for_each(|publisher| topic.leave_as_publisher(publisher.port()));
                    subscribers.pop().into_iter().for_each(|reader| topic.leave_as_subscriber(reader.port()));
                }
            }
            10 => {
                let reached = input.arbitrary()?;
                topic.detach(|row| row == THEIRS, TimelineEnding::OwnerDied, |_| reached);
                topic.recover(&pool, |row| row == THEIRS);
            }
            _ => {
                drop((topic.publishers(), topic.subscribers(), topic.audit(&pool), topic.published()));
                topic.ask_for_ages(input.arbitrary()?);
                drop(Topic::map(&memory));
            }
        }
    }
    topic.recover(&pool, |_| true);
    let audit = topic.audit(&pool);
    assert_eq!((audit.held, audit.read, audit.handed, audit.unused), (0, 0, 0, 0));
    assert_eq!(audit.free + audit.in_ring, shape.blocks, "the broker returns all blocks of the dead");
    assert!(topic.publishers().is_empty() && topic.subscribers().is_empty());
    Ok(())
}

fn loan(topic: &Topic, pool: &Slots) -> Option<HeldSlot> {
    pool.try_take(OURS).or_else(|| {
        topic.sweep(pool);
        pool.try_take(OURS)
    })
}

fn queue(input: &mut Unstructured<'_>) -> Result<()> {
    let shape = queue::QueueLimits { tasks: 4, inputs: 8, outputs: 8, lease: input.arbitrary::<u8>()?.into() };
    let memory = Queue::create(shape).expect("a queue can be created");
    let blocks = [shape.inputs, shape.outputs].map(|blocks| Pool::create(blocks).expect("a pool can be created"));
    let queue = Queue::map(&memory).expect("a queue can be mapped");
    let [inputs, outputs] = blocks.each_ref().map(|blocks| Pool::map(blocks).expect("a pool can be mapped"));
    let pools = Pools { inputs: &inputs, outputs: &outputs };
    let peer = Peer::of(&[&memory, &blocks[0], &blocks[1]]);
    let mut tasks: Vec<TaskId> = vec![TaskId { index: 9, generation: 1 }];
    let mut claims: Vec<(Claimed, Option<HeldSlot>)> = Vec::new();
    while !input.is_empty() {
        peer.write(input)?;
        let task = tasks[usize::from(input.arbitrary::<u8>()?) % tasks.len()];
        match input.arbitrary::<u8>()? % 12 {
            0..=2 => {
                if let Some(reserved) = queue.reserve(OURS) {
                    if input.arbitrary::<u8>()? == 0 {
                        queue.give_back(reserved);
                        continue;
                    }
                    let ready = input.arbitrary::<Option<u64>>()?.map(point);
                    let new = NewTask {
                        kind: b"kind",
                        arguments: b"arguments",
                        ready,
                        output: Some(Contents::of_bytes(8)),
                        max_attempts: input.arbitrary::<u8>()? % 4 + 1,
                        cancel: input.arbitrary()?,
                        now: 7,
                    };
                    let part = AttachedPart { attachment: 3, offset: 1, contents: Contents::of_bytes(2) };
                    let block = inputs.try_take(OURS);
                    let named = block
                        .iter()
                        .map(|block| NewInput::Block(block, 0, Contents::of_bytes(1)))
                        .chain([NewInput::Part(part)]);
                    let named: Vec<_> = named.take(input.arbitrary::<u8>()?.into()).collect();
                    tasks.extend(queue.submit(&inputs, reserved, &new, &named));
                    queue.notify_workers(1);
                }
            }
            3..=4 => {
                if let Some(candidate) = queue.next() {
                    peer.write(input)?;
                    claims.extend(queue.claim(THEIRS, &candidate).map(|claimed| (claimed, outputs.try_take(THEIRS))));
                }
            }
            5..=6 => {
                if let Some((claimed, output)) = claims.pop() {
                    let _ = match input.arbitrary::<u8>()? % 5 {
                        0 => queue.complete(pools, &claimed, output.as_ref().map(output_of), Views::None),
                        1 => queue.enqueue(&claimed, output.as_ref().map(output_of), point(input.arbitrary()?)),
                        2 => queue.finish(pools, &claimed, output.as_ref(), Views::None),
                        3 => queue.fail(pools, &claimed, Reason::Failed, "text", input.arbitrary()?),
                        _ => queue.extend(&claimed, input.arbitrary()?),
                    };
                    queue.is_claimed(&claimed);
                    queue.drain(pools, &claimed);
                }
            }
            7 => {
                drop((queue.state(task), queue.describe(task), queue.failures(task)));
                if let Ok(output) = queue.output(task) {
                    peer.write(input)?;
                    drop(queue.take_output(pools, OURS, &output));
                }
            }
            8 => drop((queue.retry(task), queue.take(pools, OURS, task))),
            9 => {
                queue.attach(3);
                drop((queue.all_uses(), queue.is_named(3), queue.begin_detach(input.arbitrary::<u8>()?.into())));
                let _ = queue.dispose(pools, OURS, task, |_| true);
            }
            10 => {
                let reached = input.arbitrary()?;
                queue.tend(pools);
                queue.detach(pools, |row| row == THEIRS, Reason::Detached, |_| reached);
                queue.recover(pools, |row| row == THEIRS);
            }
            _ => {
                drop((queue.audit(), queue.workers(), queue.tasks(0, 100, |_| true), queue.totals()));
                drop(Queue::map(&memory));
            }
        }
    }
    queue.recover(pools, |_| true);
    for task in queue.tasks(0, 100, |_| true) {
        let _ = queue.dispose(pools, OURS, task.id, |_| true);
    }
    queue.recover(pools, |_| true);
    for audit in [inputs.audit(), outputs.audit()] {
        assert_eq!((audit.held, audit.handed, audit.published), (0, 0, 0), "the broker returns all blocks of the dead");
    }
    assert_eq!(queue.audit().invalid, 0);
    Ok(())
}

/// A point of a stream whose every number is part of `value`.
fn point(value: u64) -> StreamPoint {
    let cell = TimelineCell { slab: value as u32 % 512, cell: value as u32 % 1023, incarnation: value as u32 };
    StreamPoint { lane: value as u8, cell, value }
}

fn timeline(input: &mut Unstructured<'_>) -> Result<()> {
    let memory = Slab::create().expect("a slab can be created");
    let slab = Slab::map(&memory).expect("a slab can be mapped");
    let cell = slab.cell(0).expect("there is a first cell");
    let map = SharedMap::writable(&memory).expect("our own memory can be mapped");
    let words = map.atomics::<AtomicU64>(64, 8).expect("a cell has eight words");
    cell.start(0, 1);
    while !input.is_empty() {
        let word = &words[usize::from(input.arbitrary::<u8>()?) % words.len()];
        match input.arbitrary::<u8>()? % 8 {
            0 => word.store(input.arbitrary()?, Ordering::Relaxed),
            1 => drop(word.fetch_xor(1 << (input.arbitrary::<u8>()? % 64), Ordering::Relaxed)),
            2 => drop(cell.signal(input.arbitrary()?)),
            3 => cell.announce(input.arbitrary()?),
            4 => cell.taint(input.arbitrary()?),
            5 => drop(cell.begin_close()),
            6 => {
                let key = cell.prepare();
                cell.sleep(key, Duration::ZERO);
                cell.notify();
            }
            _ => {
                let v = input.arbitrary()?;
                let _ = (cell.progress(v), cell.check_next(v), cell.closing(), cell.tainted(), cell.late_store());
                let _ = (cell.value(), cell.announced(), cell.ending(), cell.incarnation());
            }
        }
    }
    let ended = cell.end(TimelineEnding::OwnerFaulted);
    assert!(ended.last <= MAX_VALUE);
    assert_eq!((cell.value(), cell.ending()), (ended.last, Some(ended.ending)), "a timeline has one end");
    Ok(())
}

/// The rows of members, and the traces behind them.
fn traces(input: &mut Unstructured<'_>) -> Result<()> {
    let memory = Members::create(2).expect("rows can be created");
    let members = Members::map(&memory).expect("rows can be mapped");
    let peer = Peer::of(&[&memory]);
    let traces = members.traces();
    let mut reader = traces.reader();
    while !input.is_empty() {
        peer.write(input)?;
        match input.arbitrary::<u8>()? % 5 {
            0 => members.beat(input.arbitrary()?, input.arbitrary()?),
            1 => drop(members.heartbeat(input.arbitrary()?)),
            2 => traces.renew(input.arbitrary()?),
            3 => {
                let event = trace::TraceEvent {
                    since: 1,
                    at: 2,
                    pid: 3,
                    tid: 4,
                    action: trace::Action::Publish,
                    object: input.arbitrary()?,
                    value: input.arbitrary()?,
                    attempt: 0,
                };
                traces.record(input.arbitrary()?, &event);
            }
            _ => reader.read(&traces, |event| assert!(event.since <= event.at)),
        }
    }
    traces.stop();
    Ok(())
}

fn output_of(held: &HeldSlot) -> NewOutput<'_> {
    NewOutput { held, contents: Contents::of_bytes(8) }
}
