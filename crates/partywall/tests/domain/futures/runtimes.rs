// Holds 377, 379.
//! Runtimes of tokio, other executors, and none.

use std::{collections::BTreeSet, sync::Arc};

use partywall::{Domain, Error, Queue, Semaphore, Subscriber, Ticket, Timeline, error::Gone};
use tokio::runtime::Builder;
use tokio_stream::StreamExt;

use super::{
    super::world::{World, commit, eventually, value as committed},
    Polled, block_on, pair, publish, queue, runtimes, soon, submit, topic, value,
};

#[test]
fn futures_go_to_any_thread() {
    fn anywhere(future: impl Send) {
        drop(future);
    }
    fn all(
        domain: &Domain,
        subscriber: &Subscriber,
        queue: &Queue,
        ticket: &Ticket,
        seats: &Semaphore,
        steps: &Timeline,
    ) {
        anywhere(domain.open_async("x"));
        anywhere(subscriber.recv_async());
        anywhere(subscriber.stream());
        anywhere(queue.claim_async());
        anywhere(queue.claim_stream());
        anywhere(ticket.wait_async());
        anywhere(seats.acquire_async());
        anywhere(steps.wait_async(1));
    }
    let world = World::new();
    let domain = world.connect();
    let queue = queue(&domain);
    let (_publisher, subscriber) = pair(&topic(&domain));
    let _writer = domain.timeline_writer("steps").unwrap();
    let seats = domain.semaphore("seats", 1).unwrap();
    all(&domain, &subscriber, &queue, &submit(&queue), &seats, &domain.timeline("steps").unwrap());
}

#[test]
fn futures_complete_on_both_runtimes() {
    for runtime in runtimes() {
        let world = World::new();
        let domain = world.connect();
        let other = world.connect();
        runtime.block_on(async {
            let opened = tokio::spawn({
                let domain = domain.clone();
                async move { soon(domain.open_async("weights")).await.map(|weights| committed(&weights)) }
            });
            let work = tokio::spawn({
                let queue = queue(&other);
                async move { soon(queue.claim_async()).await.unwrap().complete() }
            });
            tokio::task::yield_now().await;
            let segment = commit(&other, "weights", 7, false);
            assert_eq!(opened.await.unwrap().unwrap(), 7);
            let ticket = submit(&queue(&domain));
            assert_eq!(soon(ticket.wait_async()).await.unwrap().bytes(), 0);
            work.await.unwrap().unwrap();
            drop(segment);
            let options = (domain.queue("late").tasks(2), domain.topic("late-topic"));
            let (queue, topic) = (options.0.open_async(), options.1.open_async());
            let create = async {
                let queue = other.queue("late").tasks(2).place(partywall_harness::place()).create().unwrap();
                (queue, other.topic("late-topic").max_bytes(4).place(partywall_harness::place()).create().unwrap())
            };
            let (queue, topic, _created) = soon(async { tokio::join!(queue, topic, create) }).await;
            assert_eq!((queue.unwrap().capacity(), topic.unwrap().name()), (2, "late-topic"));
            assert!(matches!(soon(domain.queue("late").tasks(3).open_async()).await, Err(Error::Mismatch(_))));
        });
    }
}

#[test]
fn streams_end_when_the_topic_is_idle_and_after_an_error() {
    let world = World::new();
    let domain = world.connect();
    let topic = topic(&domain);
    let subscriber = topic.subscribe(partywall::Policy::Block).until_idle(true).join().unwrap();
    let publisher = topic.publisher().unwrap();
    let [runtime, _] = runtimes();
    runtime.block_on(async {
        publish(&publisher, 1);
        publish(&publisher, 2);
        drop(publisher);
        let values: Vec<_> = soon(subscriber.stream().map(|sample| value(&sample.unwrap())).collect()).await;
        assert_eq!(values, [1, 2]);
        assert!(matches!(soon(subscriber.recv_async()).await, Err(Error::Gone(Gone::TopicIdle { .. }))));

        subscriber.detach();
        let mut stream = subscriber.stream();
        assert!(matches!(soon(stream.next()).await, Some(Err(_))));
        assert!(soon(stream.next()).await.is_none(), "it does not repeat the error for ever");
    });
}

#[test]
fn waits_in_shared_memory_need_no_runtime() {
    let world = World::new();
    let domain = world.connect();
    let (publisher, subscriber) = pair(&topic(&domain));
    let queue = queue(&domain);
    let writer = domain.timeline_writer("steps").unwrap();
    let timeline = domain.timeline("steps").unwrap();
    std::thread::scope(|scope| {
        let received = scope.spawn(|| value(&block_on(subscriber.recv_async()).unwrap()));
        let reached = scope.spawn(|| block_on(timeline.wait_async(3)));
        let worker = scope.spawn(|| block_on(queue.claim_async()).unwrap().complete());
        publish(&publisher, 5);
        writer.signal(3).unwrap();
        assert_eq!(block_on(submit(&queue).wait_async()).unwrap().attempt(), 1);
        assert_eq!(received.join().unwrap(), 5);
        reached.join().unwrap().unwrap();
        worker.join().unwrap().unwrap();
    });
}

#[test]
fn runtime_that_ends_gives_everything_back() {
    let world = World::new();
    let domain = world.connect();
    let semaphore = Arc::new(domain.semaphore("seats", 1).unwrap());
    let permit = semaphore.try_acquire().unwrap().unwrap();
    let waits = || domain.members().unwrap().iter().map(|member| member.waits.len()).sum::<usize>();
    for runtime in runtimes() {
        for _ in 0..2 {
            let semaphore = semaphore.clone();
            let domain = domain.clone();
            runtime.spawn(async move { semaphore.acquire_async().await.map(drop) });
            runtime.spawn(async move { domain.open_async("never").await.map(drop) });
        }
        // The runtime with one thread only runs here.
        runtime.block_on(async {
            while (semaphore.waiting(), waits()) < (2, 2) {
                tokio::task::yield_now().await;
            }
        });
        runtime.shutdown_background();
        eventually("nothing waits", || (semaphore.waiting(), waits()) == (0, 0));
    }
    drop(permit);
    assert_eq!(semaphore.available(), 1);

    let ended = Builder::new_current_thread().build().unwrap();
    let handle = ended.handle().clone();
    drop(ended);
    let _inside = handle.enter();
    let error = Polled::new(domain.open_async("never")).complete().unwrap_err();
    assert!(matches!(error, Error::Cancelled { .. }), "{error}");
}

/// One poll task wakes them all; an eventfd for each would use up the descriptors of a server.
#[test]
fn thousands_of_futures_use_no_descriptors() {
    super::super::world::alone(|| {
        let world = World::new();
        let domain = world.connect();
        let queue = domain.queue("many").tasks(4096).place(partywall_harness::place()).create().unwrap();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        let tickets: Vec<_> = (0..2000).map(|_| submit(&queue)).collect();
        let waiting: Vec<_> = tickets.iter().map(|ticket| Polled::new(ticket.wait_async()).pending()).collect();
        // The broker is in this process, and has a few of its own.
        assert!(descriptors() < before + 100, "{} after {before}", descriptors());
        let mut done = BTreeSet::new();
        for task in queue.claims(std::time::Duration::ZERO) {
            let task = task.unwrap();
            done.insert(task.task().to_string());
            task.complete().unwrap();
        }
        assert_eq!(done.len(), 2000);
        for future in waiting {
            future.complete().unwrap();
        }
    });
}
