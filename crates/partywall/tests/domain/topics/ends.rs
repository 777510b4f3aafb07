//! What becomes of samples and waits when a process, the broker or a handle goes, or stops.

use std::sync::Arc;

use partywall::{
    DType, Error, Policy, Publisher,
    error::{Busy, Gone, Unreachable},
    info::MemberState,
};
use rustix::process::{Pid, Signal, kill_process};

use super::{
    super::{
        TIMEOUT,
        world::{Actor, World, eventually},
    },
    SHORT, filled, frames, publish, receive, unused, value, write,
};

// Holds 191.
#[test]
fn published_samples_of_a_dead_publisher_stay() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut dead = world.play("topic publisher");
    assert_eq!(topic.stats().held, 1);
    dead.kill();
    eventually("its loan is back", || topic.stats().held == 0);
    assert!(topic.stats().publishers.is_empty());
    let sample = subscriber.recv(TIMEOUT).unwrap();
    assert_eq!(value(&sample), 7);
    sample.check().unwrap();
    drop(sample);
    publish(&topic.publisher().unwrap(), 8);
    assert_eq!(receive(&subscriber), 8);
    unused(&topic);
}

/// A reader that holds two samples, with a third one to come.
fn reader(world: &World, role: &str, publisher: &Publisher) -> Actor {
    let mut reader = world.play_until(role, "subscribed");
    for value in 1..3 {
        publish(publisher, value);
        reader.expect("received");
    }
    reader
}

// Holds 191.
#[test]
fn dead_subscriber_is_not_waited_for_and_its_samples_are_freed() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let mut dead = reader(&world, "topic reader", &publisher);
    for value in 3..7 {
        publish(&publisher, value);
    }
    let full = filled(&publisher, 7).publish(SHORT).unwrap_err();
    assert!(matches!(full.error, Error::Busy(Busy::TopicFull { .. })));
    assert_eq!((topic.stats().read, topic.stats().subscribers.len()), (2, 1));
    dead.kill();
    full.value.publish(TIMEOUT).unwrap();
    eventually("its port is free", || topic.stats().subscribers.is_empty());
    unused(&topic);
}

// Holds 24.
#[test]
fn stopped_lossy_subscriber_slows_no_publisher() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let mut stopped = reader(&world, "topic latest reader", &publisher);
    signal(&stopped, Signal::STOP);
    let ours = topic.subscriber(Policy::Block).unwrap();
    for value in 3..1000 {
        filled(&publisher, value).publish(TIMEOUT).unwrap();
        assert_eq!(receive(&ours), value);
    }
    assert_eq!(topic.stats().read, 2, "it holds what it held");
    signal(&stopped, Signal::CONT);
    drop(ours);
    stopped.proceed();
    assert_eq!(stopped.expect("error"), "this subscriber of topic \"frames\" holds 2 samples, which is its limit");
    assert_eq!(stopped.expect("still"), "[1, 2]");
}

// Holds 24.
#[test]
fn hung_blocking_subscriber_is_named_and_can_be_evicted() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let mut hung = reader(&world, "topic reader", &publisher);
    signal(&hung, Signal::STOP);
    for value in 3..7 {
        publish(&publisher, value);
    }
    let full = filled(&publisher, 7).publish(SHORT).unwrap_err();
    match &full.error {
        Error::Busy(Busy::TopicFull {
            topic,
            pid: Some(pid),
            state: Some(MemberState::Alive | MemberState::Hung),
            ..
        }) => {
            assert_eq!((topic.as_str(), *pid), ("frames", hung.pid()));
        }
        other => panic!("{other:?}"),
    }
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| full.value.publish(TIMEOUT));
        eventually("it is seen to be stalled", || topic.stats().subscribers[0].stalled.is_some());
        assert_eq!(topic.stats().publishers[0].blocked.unwrap().0, topic.stats().subscribers[0].id);
        domain.evict(hung.pid(), false).unwrap();
        waiting.join().unwrap()
    });
    assert_eq!(waiting.unwrap().position, 6);
    for value in 8..100 {
        publish(&publisher, value);
    }
    assert_eq!(topic.stats().read, 2, "a sample that it reads stays");
    signal(&hung, Signal::CONT);
    hung.proceed();
    assert!(hung.expect("error").contains("was evicted by pid"));
    assert_eq!(hung.expect("still"), "[1, 2]");
    hung.kill();
    unused(&topic);
}

#[test]
fn samples_are_exchanged_and_waits_end_without_a_broker() {
    let mut world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    world.end_broker();
    for value in 0..10 {
        publish(&publisher, value);
        let sample = subscriber.recv(TIMEOUT).unwrap();
        assert_eq!(self::value(&sample), value);
        // Not dropped: room that a GPU is about to make would have to be waited for.
        sample.release().unwrap();
    }
    eventually("waits end", || matches!(subscriber.recv(SHORT), Err(Error::Unreachable(Unreachable::Gone { .. }))));
    for value in 0..4 {
        publish(&publisher, value);
    }
    assert!(matches!(
        filled(&publisher, 4).publish(TIMEOUT).unwrap_err().error,
        Error::Unreachable(Unreachable::Gone { .. })
    ));
}

#[test]
fn samples_outlive_their_subscriber_and_the_handle_of_the_topic() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    publish(&publisher, 1);
    let sample = subscriber.recv(TIMEOUT).unwrap();
    drop(subscriber);
    for value in 2..50 {
        publish(&publisher, value);
    }
    let loan = publisher.loan(DType::U32, &[1], TIMEOUT).unwrap();
    drop((publisher, topic));
    assert_eq!(value(&sample), 1);
    let again = domain.topic("frames").open().unwrap();
    let stats = again.stats();
    assert_eq!((stats.read, stats.held, stats.publishers.len(), stats.subscribers.len()), (1, 1, 1, 1));
    drop((loan, sample));
    unused(&again);
    assert!(again.stats().publishers.is_empty() && again.stats().subscribers.is_empty());
    drop(again);
    eventually("the name goes with its last handle", || domain.names().unwrap().is_empty());
}

#[test]
fn ended_topic_leaves_nothing_in_the_broker() {
    let world = World::new();
    let outside = world.connect();
    let holdings = || {
        let status = outside.status().unwrap();
        (status.names, status.versions, status.leases, status.fds, status.bytes, outside.objects().unwrap().len())
    };
    let before = holdings();
    for streams in [false, true] {
        let domain = world.connect();
        let topic = frames(&domain).create().unwrap();
        let publisher = topic.publisher().unwrap();
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        let filled = filled(&publisher, 1);
        match topic.gpu().filter(|_| streams) {
            Some(gpu) => _ = filled.publish_on(gpu.stream(), TIMEOUT).unwrap(),
            None => _ = filled.publish(TIMEOUT).unwrap(),
        }
        assert_eq!(receive(&subscriber), 1);
        drop((publisher, subscriber, topic));
        eventually("the topic is gone", || outside.names().unwrap().is_empty());
        drop(domain);
        eventually("nothing is left", || {
            let now = holdings();
            // The memory of timelines stays once there is any.
            now == before || streams && (now.0, now.1, now.2, now.5) == (before.0, before.1, before.2, before.5)
        });
    }
}

#[test]
fn detached_subscriber_is_not_waited_for() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    publish(&publisher, 1);
    let sample = subscriber.recv(TIMEOUT).unwrap();
    subscriber.detach();
    subscriber.detach();
    assert!(matches!(subscriber.try_recv(), Err(Error::Gone(Gone::Detached { .. }))));
    let kept = Arc::new(());
    for value in 2..50 {
        let mut loan = publisher.loan(DType::U32, &[1], TIMEOUT).unwrap();
        loan.keep(kept.clone());
        write(&mut loan, value);
        loan.filled().publish(TIMEOUT).unwrap();
    }
    publisher.drain(TIMEOUT).unwrap();
    assert_eq!((value(&sample), Arc::strong_count(&kept)), (1, 1));
    let mut loan = publisher.loan(DType::U32, &[1], TIMEOUT).unwrap();
    loan.keep(kept.clone());
    drop(loan);
    eventually("what the loan kept is let go of", || Arc::strong_count(&kept) == 1);
}

fn signal(actor: &Actor, signal: Signal) {
    kill_process(Pid::from_raw(actor.pid() as i32).unwrap(), signal).unwrap();
}
