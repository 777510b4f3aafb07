//! The ages of samples.

use std::{thread, time::Instant};

use partywall::{Policy, info::Ages};

use super::{
    super::{
        TIMEOUT,
        world::{World, eventually},
    },
    SHORT, frames, publish, receive, value,
};

// Holds 200.
#[test]
fn ages_are_measured_once_a_process_asks() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let measuring = topic.subscribe(Policy::Block).measure_ages(true).join().unwrap();
    let exchange = || {
        let published = Instant::now();
        publish(&publisher, 1);
        thread::sleep(SHORT);
        let sample = measuring.recv(TIMEOUT).unwrap();
        assert!(sample.age().unwrap() >= SHORT && sample.age().unwrap() <= published.elapsed());
        drop(sample);
        receive(&subscriber);
        published.elapsed()
    };
    let first = exchange();
    let ages = measuring.stats().ages;
    assert_eq!((ages.count, ages.younger[Ages::BOUNDS - 1]), (1, 1));
    assert!(ages.max >= SHORT.as_nanos() as u64 && ages.max <= first.as_nanos() as u64, "{ages:?}");
    assert!((ages.p50, ages.p99, ages.sum) == (ages.max, ages.max, ages.max) && ages.younger[10] == 0, "{ages:?}");
    // That was the first question.
    exchange();
    let ages = subscriber.stats().ages;
    assert!(ages.count == 1 && ages.max >= SHORT.as_nanos() as u64, "{ages:?}");
    assert_eq!(measuring.stats().ages.count, 2);
    // As an observer sees it through the broker.
    let shown = domain.inspect("frames").unwrap().control.unwrap().topic.unwrap();
    assert_eq!(shown.subscribers.iter().map(|shown| shown.ages.count).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(shown.subscribers[0].ages, ages);
}

#[test]
fn question_of_another_process_makes_subscribers_measure() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let count = || {
        publish(&publisher, 1);
        receive(&subscriber);
        let shown = domain.inspect("frames").unwrap().control.unwrap().topic.unwrap();
        shown.subscribers[0].ages.count
    };
    assert_eq!([count(), count(), count()], [0, 1, 2]);
}

#[test]
fn sample_without_a_stamp_has_no_age() {
    let world = World::new();
    let domain = world.connect();
    let stamping = frames(&domain).create().unwrap();
    let topic = frames(&domain).stamps(false).open().unwrap();
    let [silent, stamped] = [&topic, &stamping].map(|topic| topic.publisher().unwrap());
    let subscriber = topic.subscribe(Policy::Block).measure_ages(true).join().unwrap();
    let is_aged = |publisher| {
        publish(publisher, 1);
        subscriber.recv(TIMEOUT).unwrap().age().is_some()
    };
    assert_eq!([is_aged(&silent), is_aged(&stamped), is_aged(&silent)], [false, true, false]);
    assert_eq!(subscriber.stats().ages.count, 1);
}

// Holds 200.
#[test]
fn age_leaves_out_the_wait_for_room() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscribe(Policy::Block).measure_ages(true).join().unwrap();
    for value in 0..topic.depth() {
        publish(&publisher, value);
    }
    thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 9));
        eventually("the publisher waits", || topic.stats().publishers[0].blocked.is_some());
        let blocked = Instant::now();
        // Longer than an attempt that had begun before.
        thread::sleep(10 * SHORT);
        (0..topic.depth()).for_each(|value| assert_eq!(receive(&subscriber), value));
        let last = subscriber.recv(TIMEOUT).unwrap();
        assert!(last.age().unwrap() < blocked.elapsed());
        assert_eq!(value(&last), 9);
    });
}
