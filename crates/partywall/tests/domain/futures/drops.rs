// Holds 377.
//! Futures that are dropped while they are pending, or after their tasks were woken: they have taken nothing.

use std::time::Duration;

use partywall::{Error, Task, TaskStatus, WatchEvent, error::NotFound, info::NameEvent};
use partywall_harness::place;
use tokio_stream::StreamExt;

use super::{
    super::world::{World, commit, eventually, value as committed},
    Polled, block_on, pair, publish, queue, runtimes, submit, topic, value,
};

#[test]
fn dropped_receive_has_received_nothing() {
    let world = World::new();
    let (publisher, subscriber) = pair(&topic(&world.connect()));
    drop(Polled::new(subscriber.recv_async()).pending());
    let woken = Polled::new(subscriber.recv_async()).pending();
    publish(&publisher, 7);
    drop(woken.woken());
    assert_eq!(value(&block_on(subscriber.recv_async()).unwrap()), 7);
    assert!(subscriber.try_recv().unwrap().is_none(), "it was received once");

    let mut stream = subscriber.stream();
    drop(Polled::new(stream.next()).pending());
    publish(&publisher, 8);
    assert_eq!(value(&Polled::new(stream.next()).complete().unwrap().unwrap()), 8, "the stream goes on");
    let woken = Polled::new(stream.next()).pending();
    publish(&publisher, 9);
    drop(woken.woken());
    drop(stream);
    assert_eq!(value(&subscriber.try_recv().unwrap().unwrap()), 9);
}

#[test]
fn dropped_claim_has_claimed_nothing() {
    let world = World::new();
    let queue = queue(&world.connect());
    drop(Polled::new(queue.claim_async()).pending());
    let woken = Polled::new(queue.claim_async()).pending();
    let ticket = submit(&queue);
    drop(woken.woken());
    assert_eq!(ticket.status(), TaskStatus::Pending);
    let task = block_on(queue.claim_async()).unwrap();
    assert_eq!(task.attempt(), 1, "no other future had claimed it");
    drop(Polled::new(ticket.wait_async()).pending());
    let woken = Polled::new(ticket.wait_async()).pending();
    task.complete().unwrap();
    drop(woken.woken());
    assert_eq!(ticket.status(), TaskStatus::Done, "the ticket can be asked again");
    block_on(ticket.wait_done_async()).unwrap();
    assert_eq!(block_on(ticket.wait_async()).unwrap().attempt(), 1);
}

#[test]
fn dropped_claim_of_a_task_without_room_leaves_the_line_for_output_blocks() {
    let world = World::new();
    let queue = queue(&world.connect());
    let needing = || queue.submit(Task::new("fill").output(64), Duration::ZERO).unwrap();
    let tickets = [(); 3].map(|()| needing());
    let occupied = [(); 2].map(|()| queue.try_claim().unwrap().unwrap());
    let waiting = Polled::new(queue.claim_async()).pending();
    assert_eq!(queue.stats().free_outputs, 0);
    let [first, second] = occupied;
    first.complete().unwrap();
    drop(tickets[0].wait(Duration::ZERO).unwrap());
    drop(waiting.woken());
    assert_eq!((queue.stats().free_outputs, tickets[2].status()), (1, TaskStatus::Pending));
    block_on(queue.claim_async()).unwrap().complete().unwrap();
    drop((tickets[2].wait(Duration::ZERO).unwrap(), second));
}

#[test]
fn dropped_submission_has_not_submitted_the_task() {
    let world = World::new();
    let queue = queue(&world.connect());
    let tickets: Vec<_> = (0..8).map(|_| submit(&queue)).collect();
    let mut input = Some(queue.inputs().try_alloc().unwrap().unwrap());
    let mut full = || Polled::new(queue.submit_async(Task::new("late").input(input.take().unwrap()))).pending();
    let waiting = full();
    assert_eq!(queue.stats().free_inputs, 1);
    tickets[0].cancel().unwrap();
    drop(waiting.woken());
    assert_eq!((queue.stats().pending, queue.stats().free_inputs), (7, 2), "its input is free");
    let ticket = block_on(queue.submit_async(Task::new("late"))).unwrap();
    assert_eq!(ticket.status(), TaskStatus::Pending);
}

#[test]
fn dropped_acquire_leaves_the_line() {
    let world = World::new();
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let permit = semaphore.try_acquire().unwrap().unwrap();
    let first = Polled::new(semaphore.acquire_async()).pending();
    let second = Polled::new(semaphore.acquire_async()).pending();
    assert_eq!(semaphore.waiting(), 2);
    drop(first);
    assert_eq!(semaphore.waiting(), 1);
    drop(permit);
    drop(second.woken());
    assert_eq!((semaphore.available(), semaphore.waiting()), (1, 0), "the permit that was granted is free");
    drop(block_on(semaphore.acquire_async()).unwrap());
}

#[test]
fn futures_and_threads_stand_in_one_line() {
    let world = World::new();
    let semaphore = world.connect().semaphore("seats", 1).unwrap();
    let other = world.connect().semaphore("seats", 1).unwrap();
    let permit = semaphore.try_acquire().unwrap().unwrap();
    let future = Polled::new(semaphore.acquire_async()).pending();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| other.acquire(super::TIMEOUT).unwrap());
        eventually("the thread waits", || semaphore.waiting() == 2);
        drop(permit);
        let permit = future.complete().unwrap();
        assert!(!thread.is_finished(), "the future came first");
        drop(permit);
        drop(thread.join().unwrap());
    });
}

#[test]
fn dropped_alloc_leaves_the_line() {
    let world = World::new();
    let pool = world.connect().pool("blocks").blocks(1).block_bytes(64).place(place()).create().unwrap();
    let block = pool.try_alloc().unwrap().unwrap();
    let future = Polled::new(pool.alloc_async()).pending();
    assert_eq!(pool.stats().waiting, 1);
    drop(block);
    drop(future.woken());
    assert_eq!((pool.stats().free, pool.stats().waiting), (1, 0));
    drop(block_on(pool.alloc_async()).unwrap());
}

#[test]
fn dropped_wait_for_a_value_changes_nothing() {
    let world = World::new();
    let domain = world.connect();
    let writer = domain.timeline_writer("steps").unwrap();
    let timeline = domain.timeline("steps").unwrap();
    drop(Polled::new(timeline.wait_async(1)).pending());
    let woken = Polled::new(timeline.wait_async(1)).pending();
    writer.signal(1).unwrap();
    drop(woken.woken());
    block_on(timeline.wait_async(1)).unwrap();
    assert!(matches!(block_on(timeline.wait_async(u64::MAX)), Err(Error::InvalidArgument(_))));
}

/// The future is dropped after each of its polls in turn, before and after its task is woken.
#[test]
fn dropped_open_keeps_nothing_open() {
    let [runtime, _] = runtimes();
    let _inside = runtime.enter();
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    let leases = || other.status().unwrap().leases;
    let waits = || other.members().unwrap().iter().any(|member| !member.waits.is_empty());
    for stage in 0.. {
        let mut opening = Polled::new(domain.open_async("late")).at_rest();
        eventually("it waits in the broker", waits);
        let committer = commit(&other, "late", 7, false);
        let held = leases();
        let mut opened = None;
        for _ in 0..stage / 2 {
            opening.bell.wait();
            opened = opening.poll();
            if opened.is_some() {
                break;
            }
        }
        if let Some(opened) = opened {
            assert_eq!(committed(&opened.unwrap()), 7);
            assert!(stage >= 2, "it was granted before it was committed");
            break;
        }
        if stage % 2 == 1 {
            opening.bell.wait();
        }
        drop(opening);
        eventually("what it was granted is back", || !waits() && leases() <= held.min(1));
        drop(committer);
        eventually("the name is gone", || matches!(other.inspect("late"), Err(Error::NotFound(NotFound::Name { .. }))));
    }
}

#[test]
fn dropped_open_of_a_name_that_never_comes_ends_its_wait() {
    let [runtime, _] = runtimes();
    let _inside = runtime.enter();
    let world = World::new();
    let domain = world.connect();
    let waits = || domain.members().unwrap().iter().map(|member| member.waits.len()).sum::<usize>();
    let never: Vec<_> = (0..3).map(|_| Polled::new(domain.open_async("never")).at_rest()).collect();
    let topic = domain.topic("never");
    let never_topic = Polled::new(topic.open_async()).at_rest();
    eventually("all wait in the broker", || waits() == 4);
    drop((never, never_topic));
    eventually("none waits", || waits() == 0);
    domain.ping().unwrap();
}

#[test]
fn dropped_watch_loses_no_event() {
    let [runtime, _] = runtimes();
    let _inside = runtime.enter();
    let world = World::new();
    let mut watch = world.connect().watch("*").unwrap();
    let other = world.connect();
    drop(Polled::new(watch.next_async()).pending());
    drop(Polled::new(watch.next_async()).at_rest());
    let woken = Polled::new(watch.next_async()).at_rest();
    let _committed = commit(&other, "x", 1, false);
    drop(woken.woken());
    let point = watch.point();
    let mut next = |name: &str| match Polled::new(watch.next_async()).complete().unwrap() {
        WatchEvent::Name(NameEvent { name: happened, .. }) => assert_eq!(happened, name),
        missed => panic!("{missed:?}"),
    };
    next("x"); // created
    next("x"); // committed
    drop(commit(&other, "y", 1, false));
    next("y");
    assert_ne!(watch.point(), point);
}
