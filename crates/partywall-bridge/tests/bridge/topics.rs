//! Topics that cross from host to host.

use std::time::Duration;

use partywall::{DType, DeviceChoice, Domain, Error, Place, Policy, Publisher, Subscriber, Topic, error::Gone, gpu};

use partywall_harness::{Running, Sandbox, Signal, eventually, simulated};

use super::{Host, command};

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
        let mut published = 0;
        while published < 300 {
            let sample = subscriber.recv(TIMEOUT).unwrap();
            published += sample.missed() + 1;
            assert_eq!(sample.header(), sample.sequence().to_le_bytes());
            assert_eq!(sample.sequence() + 1, published);
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
fn wait_for_samples_ends_with_the_publishers_of_the_other_host() {
    let mut a = Host::start("a", &[], &["--export", "counts"]);
    let b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    let origin = create(&a.sandbox.domain(), "counts", 8);
    let publisher = origin.publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let here = open(&b.sandbox.domain(), "counts");
    let subscriber = here.subscribe(Policy::Block).until_idle(true).join().unwrap();
    let is_over = || matches!(subscriber.recv(TIMEOUT), Err(Error::Gone(Gone::TopicIdle { .. })));
    (0..20).for_each(|value| publish(&publisher, value, 8));
    drop(publisher);
    (0..20).for_each(|value| receive(&subscriber, value, 8));
    assert!(is_over());
    // What this host has is there for those that come later.
    receive(&here.subscribe(Policy::Latest).history(1).join().unwrap(), 19, 8);
    // It goes on with another publisher, and before that publishes.
    let publisher = origin.publisher().unwrap();
    eventually("the topic is busy again", || subscriber.try_recv().is_ok());
    publish(&publisher, 20, 8);
    receive(&subscriber, 20, 8);
    // Its publisher lives, but nobody knows.
    a.bridge.take().unwrap().kill();
    assert!(is_over());
}

// Holds 455.
#[test]
fn topic_ends_with_the_last_process_of_its_host_and_may_be_created_again() {
    let a = Host::start("a", &[], &["--export", "counts"]);
    let b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    for round in 0..3 {
        let (origin, here) = (a.sandbox.domain(), b.sandbox.domain());
        let topic = create(&origin, "counts", 8);
        let publisher = topic.publisher().unwrap();
        publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
        let subscriber = open(&here, "counts").subscriber(Policy::Block).unwrap();
        // Fewer than before, in another ring.
        let count = 30 - 10 * round;
        (0..count).for_each(|value| {
            publish(&publisher, value, 8);
            receive(&subscriber, value, 8);
        });
        if round < 2 {
            drop((publisher, topic, subscriber));
            for domain in [&origin, &here] {
                eventually("the topic is gone", || domain.inspect("counts").is_err());
            }
            continue;
        }
        // At once, so that the new one is offered before the export of the former one has noticed.
        origin.remove("counts").unwrap();
        let publisher = create(&origin, "counts", 8).publisher().unwrap();
        publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
        publish(&publisher, 77, 8);
        receive(&subscriber, 77, 8);
    }
}

// Holds 453.
#[test]
fn topic_that_was_removed_here_is_created_again() {
    let a = Host::start("a", &[], &["--export", "counts"]);
    let b = Host::start("b", &[&a], &["--import", "//a/counts", "--policy", "block"]);
    let publisher = create(&a.sandbox.domain(), "counts", 8).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let here = b.sandbox.domain();
    open(&here, "counts");
    here.remove("counts").unwrap();
    let again = || here.topic("counts").open().ok();
    eventually("the next sample creates it", || {
        publish(&publisher, 1, 8);
        again().is_some()
    });
    let subscriber = again().unwrap().subscriber(Policy::Block).unwrap();
    publish(&publisher, 2, 8);
    while subscriber.recv(TIMEOUT).unwrap().bytes().unwrap() != bytes(2, 8) {}
}

/// A host on the simulated driver.
fn simulated_host(name: &str, others: &[&Host], options: &[&str]) -> Host {
    let sandbox = Sandbox::simulated(1);
    let endpoint = "127.0.0.1:0".into();
    let mut host = Host { sandbox, name: name.into(), bridge: None, endpoint, network: None };
    host.bridge(&others.iter().map(|other| &other.endpoint[..]).collect::<Vec<_>>(), options);
    host
}

// Holds 453.
#[test]
fn samples_cross_between_gpus_and_pinned_memory() {
    simulated("topics::samples_cross_between_gpus_and_pinned_memory", |_| {
        let gpu = gpu::resolve(DeviceChoice::Cuda(0)).unwrap().0;
        let pinned = gpu::resolve(DeviceChoice::Pinned(None)).unwrap().0;
        for (from, device, to) in [(gpu, "pinned", pinned), (pinned, "cuda:0", gpu)] {
            let a = simulated_host("a", &[], &["--export", "frames"]);
            let options = ["--import", "//a/frames", "--policy", "block", "--device", device];
            let b = simulated_host("b", &[&a], &options);
            let topic = a.sandbox.domain().topic("frames").max_bytes(3 << 20).place(from).create().unwrap();
            let publisher = topic.publisher().unwrap();
            publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
            let here = open(&b.sandbox.domain(), "frames");
            assert_eq!(here.place(), to);
            let subscriber = here.subscriber(Policy::Block).unwrap();
            let lengths = [5, 3 << 20, 0, 1 << 20, (1 << 20) + 7];
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (value, len) in (0..).zip(lengths) {
                        let mut loan = publisher.loan(DType::U8, &[len as u64], TIMEOUT).unwrap();
                        loan.write(&bytes(value, len)).unwrap();
                        // Complete once a stream has got there.
                        let published = match topic.gpu() {
                            Some(gpu) => loan.filled().publish_on(gpu.stream(), TIMEOUT),
                            None => loan.filled().publish(TIMEOUT),
                        };
                        published.unwrap();
                    }
                });
                for (value, len) in (0..).zip(lengths) {
                    let sample = subscriber.recv(TIMEOUT).unwrap();
                    let mut got = vec![0; sample.len() as usize];
                    sample.read_at(0, &mut got).unwrap();
                    assert!(got == bytes(value, len), "sample {value} has other bytes");
                }
            });
        }
    });
}

// Holds 453.
#[test]
fn place_that_is_not_there_is_refused_at_the_start() {
    let sandbox = Sandbox::simulated(1);
    for (device, why) in [("cuda:7", "cuda:7"), ("moon", "is not a device")] {
        let arguments = ["bridge", "--listen", "127.0.0.1:0", "--import", "//a/frames", "--device", device];
        let refused = Running::spawn(&mut command(&sandbox, &arguments)).wait();
        assert!(refused.code != Some(0) && refused.stderr.contains(why), "{}", refused.stderr);
    }
}

// Holds 454.
#[test]
fn samples_that_the_topic_here_does_not_take_are_missed() {
    let a = Host::start("a", &[], &["--export", "frames"]);
    let mut b = Host::start("b", &[&a], &[]);
    let subscriber = create(&b.sandbox.domain(), "frames", 8).subscriber(Policy::Block).unwrap();
    b.bridge.take().unwrap().kill();
    b.bridge(&[&a.endpoint], &["--import", "//a/frames", "--policy", "block"]);
    let publisher = create(&a.sandbox.domain(), "frames", 1 << 20).publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    [8, 9, 1 << 20, 8].into_iter().for_each(|len| publish(&publisher, 1, len));
    let missed = [(); 2].map(|()| subscriber.recv(TIMEOUT).unwrap().missed());
    assert_eq!(missed, [0, 2]);
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
