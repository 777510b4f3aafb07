//! Topics that cross from host to host.

use std::time::Duration;

use partywall::{DType, Domain, Place, Policy, Publisher, Subscriber, Topic};

use partywall_harness::{Signal, eventually};

use super::Host;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Creates a topic, unless an import has done so.
fn create(domain: &Domain, name: &str, max_bytes: u64) -> Topic {
    domain.topic(name).max_bytes(max_bytes).place(Place::Host).open_or_create().unwrap()
}

fn open(domain: &Domain, name: &str) -> Topic {
    domain.topic(name).timeout(TIMEOUT).open().unwrap()
}

fn publish(publisher: &Publisher, value: u8, len: usize) {
    let mut loan = publisher.loan(DType::U8, &[len as u64], TIMEOUT).unwrap();
    loan.write(&bytes(value, len)).unwrap();
    loan.header(&[value; 3]).unwrap();
    loan.filled().publish(TIMEOUT).unwrap();
}

fn receive(subscriber: &Subscriber, value: u8, len: usize) {
    let sample = subscriber.recv(TIMEOUT).unwrap();
    assert_eq!((sample.dtype(), sample.shape(), sample.header()), (DType::U8, &[len as u64][..], vec![value; 3]));
    assert!(sample.bytes().unwrap() == bytes(value, len), "sample {value} has other bytes");
}

fn bytes(value: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| value.wrapping_add((i % 251) as u8)).collect()
}

// Holds 453.
#[test]
fn samples_cross_with_their_order_types_and_headers() {
    let a = Host::start("a", &[], &["--export", "frames/*"]);
    let b = Host::start("b", &[&a], &["--import", "//a/frames/*", "--policy", "block"]);
    let (origin, here) = (a.sandbox.domain(), b.sandbox.domain());
    let publisher = create(&origin, "frames/left", 5 << 20).publisher().unwrap();
    let _secret = create(&origin, "secret", 1).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let topic = open(&here, "frames/left");
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..40).for_each(|value| publish(&publisher, value, length(value))));
        (0..40).for_each(|value| receive(&subscriber, value, length(value)));
    });
    assert!(here.topic("secret").open().is_err());
}

fn length(value: u8) -> usize {
    [0, 1, 1000, 70_000, 1 << 20, (1 << 20) + 1, 5 << 20][value as usize % 7]
}

// Holds 454.
#[test]
fn samples_that_are_dropped_at_the_origin_show_as_a_gap() {
    let a = Host::start("a", &[], &["--export", "fast"]);
    let b = Host::start("b", &[&a], &["--import", "//a/fast"]);
    let publisher = create(&a.sandbox.domain(), "fast", 1 << 20).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let subscriber = open(&b.sandbox.domain(), "fast").subscriber(Policy::Block).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..300_u64 {
                let mut loan = publisher.loan(DType::U8, &[1 << 20], TIMEOUT).unwrap();
                loan.header(&number.to_le_bytes()).unwrap();
                loan.filled().publish(TIMEOUT).unwrap();
            }
        });
        // The last one is never dropped. Received and missed are all that was published, at each sample.
        loop {
            let sample = subscriber.recv(TIMEOUT).unwrap();
            assert_eq!(sample.header(), sample.sequence().to_le_bytes());
            if sample.sequence() == 299 {
                break;
            }
        }
    });
}

// Holds 454.
#[test]
fn importer_that_was_unreachable_gets_all_samples_under_block() {
    let a = Host::start("a", &[], &["--export", "frames", "--timeout", "1000000"]);
    let b = Host::start("b", &[&a], &["--import", "//a/frames", "--policy", "block"]);
    let publisher = create(&a.sandbox.domain(), "frames", 3 << 20).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let subscriber = open(&b.sandbox.domain(), "frames").subscriber(Policy::Block).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..60).for_each(|value| publish(&publisher, value, 3 << 20)));
        (0..5).for_each(|value| receive(&subscriber, value, 3 << 20));
        let bridge = b.bridge.as_ref().unwrap();
        bridge.signal(Signal::STOP);
        a.await_state("b", "unreachable");
        bridge.signal(Signal::CONT);
        (5..60).for_each(|value| receive(&subscriber, value, 3 << 20));
    });
}

// Holds 455.
#[test]
fn bridge_that_ends_holds_up_no_publisher() {
    let a = Host::start("a", &[], &["--export", "counts", "--timeout", "1000000"]);
    let mut b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    let origin = create(&a.sandbox.domain(), "counts", 8);
    let publisher = origin.publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let bridge = b.bridge.take().unwrap();
    bridge.signal(Signal::TERM);
    bridge.wait().expect(0);
    eventually("the export has left", || origin.stats().subscribers.is_empty());
}

// Holds 453.
#[test]
fn two_hosts_that_import_the_same_topic_from_each_other_get_each_sample_once() {
    let names = ["--policy", "block", "--export", "chat", "--import"];
    let a = Host::start("a", &[], &[&names[..], &["//b/chat"]].concat());
    let b = Host::start("b", &[&a], &[&names[..], &["//a/chat"]].concat());
    let topics = [create(&a.sandbox.domain(), "chat", 8), create(&b.sandbox.domain(), "chat", 8)];
    let subscribers = topics.each_ref().map(|topic| topic.subscriber(Policy::Block).unwrap());
    let publishers = topics.each_ref().map(|topic| topic.publisher().unwrap());
    // The test, and the bridge for the other host.
    publishers.iter().for_each(|publisher| publisher.wait_for_subscribers(2, TIMEOUT).unwrap());
    for value in 0..30 {
        publish(&publishers[usize::from(value) % 2], value, 8);
        // One that came twice would be the next one.
        subscribers.iter().for_each(|subscriber| receive(subscriber, value, 8));
    }
    assert!(subscribers.iter().all(|subscriber| subscriber.try_recv().unwrap().is_none()));
}

// Holds 454.
#[test]
fn killed_exporter_leaves_a_gap_that_shows_and_nothing_twice() {
    let mut a = Host::start("a", &[], &["--export", "counts"]);
    let b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    let (origin, here) = (a.sandbox.domain(), b.sandbox.domain());
    let publisher = create(&origin, "counts", 8).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let subscriber = open(&here, "counts").subscriber(Policy::Block).unwrap();
    for value in 0..10 {
        publish(&publisher, value, 8);
        receive(&subscriber, value, 8);
    }
    a.bridge.take().unwrap().kill();
    // More than the ring keeps.
    for value in 10..20 {
        publish(&publisher, value, 8);
    }
    a.bridge(&[], &["--export", "counts"]);
    // The last three are history for the resumed stream.
    for value in 17..20 {
        receive(&subscriber, value, 8);
    }
    publish(&publisher, 20, 8);
    let sample = subscriber.recv(TIMEOUT).unwrap();
    // Another publisher of the bridge: its numbers count from the samples that were missed.
    assert_eq!((sample.bytes().unwrap()[0], sample.sequence()), (20, 10));
}

// Holds 455.
#[test]
fn killed_importer_holds_up_no_publisher_beyond_the_timeout() {
    let a = Host::start("a", &[], &["--export", "counts"]);
    let mut b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    let publisher = create(&a.sandbox.domain(), "counts", 8).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    b.bridge.take().unwrap().kill();
    // More than the ring and the credit.
    (0..200).for_each(|value| publish(&publisher, value, 8));
}
