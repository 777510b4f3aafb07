//! Hosts with cables between them: slow ones, ones that are pulled out, and a line that delays and loses packets.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use partywall::{DType, Domain, Error, Place, Policy, Publisher, Subscriber, Topic};
use partywall_harness::{
    Signal, eventually,
    hosts::{Condition, Host as Network, Line, Switch},
    noise, relay,
};

use crate::{Host, pull::get};

const TIMEOUT: Duration = Duration::from_secs(120);

/// Hosts on a switch, each connected to all before it. The first one exports everything, the others import from it.
fn switched<const N: usize>(policy: &str) -> (Switch, [Host; N]) {
    let switch = Switch::new(N as u8);
    let mut hosts: Vec<Host> = Vec::new();
    for (network, name) in switch.hosts().iter().zip(["a", "b", "c"]) {
        let mut host = Host::on(network, name);
        let others: Vec<_> = hosts.iter().map(|other| other.endpoint.as_str()).collect();
        let options: &[&str] =
            if hosts.is_empty() { &[] } else { &["--import", "//a/frames", "--policy", policy, "--history", "0"] };
        host.bridge(&others, &[&["--export", "*", "--timeout", "1000000"], options].concat());
        hosts.push(host);
    }
    let Ok(hosts) = hosts.try_into() else { panic!("there are names for three hosts") };
    (switch, hosts)
}

fn topic(domain: &Domain, max_bytes: u64) -> Topic {
    domain.topic("frames").max_bytes(max_bytes).place(Place::Host).open_or_create().unwrap()
}

/// A publisher at `from`, and a subscriber at `to` that gets what the publisher publishes.
fn stream(from: &Host, to: &Host, max_bytes: u64) -> (Topic, Publisher, Subscriber) {
    let origin = topic(&from.sandbox.domain(), max_bytes);
    let publisher = origin.publisher().unwrap();
    let here = to.sandbox.domain().topic("frames").timeout(TIMEOUT).open().unwrap();
    let subscriber = here.subscriber(Policy::Block).unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    (origin, publisher, subscriber)
}

/// Publishes as many samples, whose bytes and header say their number.
fn publish(publisher: &Publisher, numbers: std::ops::Range<u64>, bytes: &[u8]) {
    for number in numbers {
        let mut loan = publisher.loan(DType::U8, &[bytes.len() as u64], TIMEOUT).unwrap();
        loan.write(bytes).unwrap();
        loan.header(&number.to_le_bytes()).unwrap();
        loan.filled().publish(TIMEOUT).unwrap();
    }
}

/// Receives the next sample, and returns its number.
fn receive(subscriber: &Subscriber, bytes: &[u8]) -> u64 {
    let sample = subscriber.recv(TIMEOUT).unwrap();
    assert!(sample.bytes().unwrap() == bytes, "{sample:?} has other bytes");
    u64::from_le_bytes(sample.header().try_into().unwrap())
}

/// The bytes that have come through the cable of a host.
fn received_bytes(host: &Network) -> u64 {
    let devices = host.run(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
    let cable = devices.lines().find_map(|line| line.trim().strip_prefix("cable:")).unwrap();
    cable.split_whitespace().next().unwrap().parse().unwrap()
}

/// Samples of some megabytes cross a cable of so many megabits a second, all of them under `block`.
fn all_arrive(megabytes: usize, megabits: u32, count: u64) {
    let (switch, [a, b]) = switched("block");
    switch.limit(1, megabits);
    let bytes = noise(megabytes * 1_000_000, 1);
    let (_origin, publisher, subscriber) = stream(&a, &b, bytes.len() as u64);
    thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..count, &bytes));
        for number in 0..count {
            assert_eq!(receive(&subscriber, &bytes), number);
        }
    });
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_samples_of_12_and_33_mb_arrive_over_a_gigabit() {
    all_arrive(12, 1000, 6);
    all_arrive(33, 1000, 3);
}

// Holds 454.
#[test]
fn needs_minutes_needs_namespaces_hosts_samples_of_100_mb_arrive_over_100_megabits() {
    all_arrive(100, 100, 4);
}

// Holds 454.
#[test]
fn needs_minutes_needs_namespaces_hosts_samples_of_3_mb_arrive_over_one_megabit() {
    all_arrive(3, 1, 2);
}

/// Under a policy that drops, what is received and what is missed are all that was published, and the last one arrives.
fn received_and_missed_are_all(policy: &str) {
    const COUNT: u64 = 40;
    let (switch, [a, b]) = switched(policy);
    switch.limit(1, 1000);
    let bytes = noise(12_000_000, 2);
    let (origin, publisher, subscriber) = stream(&a, &b, bytes.len() as u64);
    thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..COUNT, &bytes));
        let mut received = 0;
        loop {
            let sample = subscriber.recv(TIMEOUT).unwrap();
            received += 1;
            // The numbers of the local publisher count what was missed.
            assert_eq!(sample.header(), sample.sequence().to_le_bytes());
            assert!(sample.bytes().unwrap() == bytes);
            if sample.sequence() + 1 == COUNT {
                break;
            }
        }
        assert!(received < COUNT, "the cable was too fast for anything to be dropped");
        let dropped = || origin.stats().subscribers.iter().map(|subscriber| subscriber.dropped).sum::<u64>();
        assert_eq!(received + dropped(), COUNT);
    });
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_received_and_missed_are_all_under_drop_oldest() {
    received_and_missed_are_all("drop-oldest");
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_received_and_missed_are_all_under_latest() {
    received_and_missed_are_all("latest");
}

// Holds 441.
#[test]
fn needs_namespaces_hosts_killed_stopped_and_unplugged_ones_are_unreachable() {
    let (switch, [a, mut b]) = switched("block");
    let first = a.await_state("b", "alive")["instance"].clone();
    let bridge = b.bridge.as_ref().unwrap();
    bridge.signal(Signal::STOP);
    a.await_state("b", "unreachable");
    bridge.signal(Signal::CONT);
    assert_eq!(a.await_state("b", "alive")["instance"], first);
    switch.plug(1, false);
    a.await_state("b", "unreachable");
    b.await_state("a", "unreachable");
    switch.plug(1, true);
    assert_eq!(a.await_state("b", "alive")["instance"], first);
    b.bridge.take().unwrap().kill();
    a.await_state("b", "unreachable");
    b.bridge(&[&a.endpoint], &[]);
    assert_ne!(a.await_state("b", "alive")["instance"], first);
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_stream_goes_on_after_a_cable_was_pulled() {
    const COUNT: u64 = 60;
    let (switch, [a, b]) = switched("block");
    let bytes = noise(3 << 20, 3);
    let (_origin, publisher, subscriber) = stream(&a, &b, bytes.len() as u64);
    thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..COUNT, &bytes));
        (0..5).for_each(|number| assert_eq!(receive(&subscriber, &bytes), number));
        switch.plug(1, false);
        a.await_state("b", "unreachable");
        switch.plug(1, true);
        (5..COUNT).for_each(|number| assert_eq!(receive(&subscriber, &bytes), number));
    });
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_others_go_on_while_a_cable_is_pulled() {
    let switch = Switch::new(3);
    let [mut a, mut b, mut c] = [0, 1, 2].map(|at| Host::on(&switch.hosts()[at], ["a", "b", "c"][at]));
    a.bridge(&[], &["--export", "*"]);
    b.bridge(&[&a.endpoint], &["--import", "//a/frames", "--policy", "drop-oldest"]);
    c.bridge(&[&a.endpoint], &["--import", "//a/frames", "--policy", "block"]);
    let bytes = noise(1 << 20, 8);
    let origin = topic(&a.sandbox.domain(), bytes.len() as u64);
    let publisher = origin.publisher().unwrap();
    publisher.wait_for_subscribers(2, TIMEOUT).unwrap();
    let subscribe = |host: &Host| topic(&host.sandbox.domain(), bytes.len() as u64).subscriber(Policy::Block).unwrap();
    let (at_b, at_c) = (subscribe(&b), subscribe(&c));
    let (is_over, received) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                publish(&publisher, 0..1, &bytes);
            }
        });
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                receive(&at_c, &bytes);
                received.fetch_add(1, Ordering::Relaxed);
            }
        });
        receive(&at_b, &bytes);
        switch.plug(1, false);
        let before = received.load(Ordering::Relaxed);
        eventually("//b is unreachable", || {
            c.run(&["ls", "//a"]).expect(0);
            a.view("b")["state"] == "unreachable"
        });
        // The link of `b` is full for most of this time.
        let during = received.load(Ordering::Relaxed) - before;
        assert!(during >= 10, "{during} samples have come");
    });
}

/// What happens to a host, and passes.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Stopped,
    Unplugged,
    Killed,
}

/// The samples of one host on their way to another one.
struct Flow {
    publisher: Publisher,
    subscriber: Subscriber,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Flow {
    fn new(from: &Host, to: &Host) -> Self {
        let name = format!("from-{}", from.name);
        let topic = |host: &Host| {
            let domain = host.sandbox.domain();
            domain.topic(&name).max_bytes(256 << 10).place(Place::Host).open_or_create().unwrap()
        };
        let (publisher, subscriber) = (topic(from).publisher().unwrap(), topic(to).subscriber(Policy::Block).unwrap());
        Self { publisher, subscriber, sent: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    fn send(&self, is_over: &AtomicBool) {
        let bytes = noise(256 << 10, 6);
        while !is_over.load(Ordering::Relaxed) {
            let number = self.sent.load(Ordering::Relaxed);
            publish(&self.publisher, number..number + 1, &bytes);
            self.sent.store(number + 1, Ordering::Relaxed);
            // Enough to fill the buffers of a dead link.
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn receive(&self, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            match self.subscriber.recv(Duration::from_millis(100)) {
                Ok(sample) => {
                    let number = u64::from_le_bytes(sample.header().try_into().unwrap());
                    assert!(self.received.fetch_max(number + 1, Ordering::Relaxed) <= number, "{number} came again");
                }
                Err(Error::Timeout { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits until a sample has crossed that is not yet published.
    fn await_new(&self) {
        let sent = self.sent.load(Ordering::Relaxed);
        eventually("a new sample crosses", || self.received.load(Ordering::Relaxed) > sent);
    }
}

/// Ends the threads of a test that fails, too.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts the bridge of a host, which connects to the other one.
fn start_mutual(host: &mut Host, other: &str, endpoint: &str) {
    let import = format!("//{other}/from-{other}");
    host.bridge(&[endpoint], &["--export", "from-*", "--import", &import, "--policy", "block", "--history", "0"]);
}

// Holds 441.
#[test]
fn needs_namespaces_hosts_that_connect_to_each_other_find_each_other_again() {
    let switch = Switch::new(2);
    let mut hosts = [0, 1].map(|at| Host::on(&switch.hosts()[at], ["a", "b"][at]));
    let start = |hosts: &mut [Host; 2], at: usize| {
        let (other, endpoint) = (hosts[1 - at].name.clone(), hosts[1 - at].endpoint.clone());
        start_mutual(&mut hosts[at], &other, &endpoint);
    };
    start(&mut hosts, 0);
    start(&mut hosts, 1);
    let flows = [Flow::new(&hosts[0], &hosts[1]), Flow::new(&hosts[1], &hosts[0])];
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&is_over);
        for flow in &flows {
            scope.spawn(|| flow.send(&is_over));
            scope.spawn(|| flow.receive(&is_over));
        }
        // Times around the lease, after which the two sides lose the link at different moments.
        for (at, fault, milliseconds) in [
            (1, Fault::Stopped, 5500),
            (0, Fault::Unplugged, 7000),
            (0, Fault::Stopped, 4200),
            (1, Fault::Killed, 0),
            (1, Fault::Unplugged, 4600),
            (1, Fault::Stopped, 7500),
            (0, Fault::Killed, 0),
            (0, Fault::Stopped, 3400),
        ] {
            let time = Duration::from_millis(milliseconds);
            let bridge = hosts[at].bridge.as_ref().unwrap();
            match fault {
                Fault::Stopped => {
                    bridge.signal(Signal::STOP);
                    thread::sleep(time);
                    bridge.signal(Signal::CONT);
                }
                Fault::Unplugged => {
                    switch.plug(at, false);
                    thread::sleep(time);
                    switch.plug(at, true);
                }
                Fault::Killed => {
                    hosts[at].bridge.take().unwrap().kill();
                    start(&mut hosts, at);
                }
            }
            for (host, other) in [(&hosts[0], "b"), (&hosts[1], "a")] {
                host.await_state(other, "alive");
            }
            flows.iter().for_each(Flow::await_new);
            for (host, other) in [(&hosts[0], "//b"), (&hosts[1], "//a")] {
                eventually("questions are answered", || host.run(&["ls", other]).code == Some(0));
            }
        }
    });
}

// Holds 448.
#[test]
fn needs_namespaces_hosts_pull_goes_on_from_another_source_when_a_cable_is_pulled() {
    let (switch, [a, b, c]) = switched("block");
    let bytes = noise(24 << 20, 4);
    let file = a.sandbox.file("put", &bytes);
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "host"]).expect(0);
    b.run(&["pull", "//a/llm", "--device", "host"]).expect(0);
    for host in ["a", "b"] {
        c.await_state(host, "alive");
    }
    // Slow enough for most of the pieces to be missing when the cable is pulled.
    switch.limit(2, 50);
    let pull = c.spawn(&["--json", "pull", "//a/llm", "--also", "b", "--device", "host"]);
    eventually("a part has come", || received_bytes(&switch.hosts()[2]) > 4 << 20);
    switch.plug(0, false);
    assert!(!pull.has_ended());
    switch.unlimit(2);
    pull.wait().expect(0);
    c.await_state("a", "unreachable");
    assert!(get(&c, "llm") == bytes);
}

// Holds 454.
#[test]
fn needs_namespaces_hosts_samples_and_pulls_cross_a_line_that_delays_and_loses() {
    const COUNT: u64 = 40;
    let mut line = Line::new(&relay(), 5);
    let [first, second] = line.hosts();
    let mut a = Host::on(first, "a");
    let mut b = Host::on(second, "b");
    a.bridge(&[], &["--export", "*", "--timeout", "1000000"]);
    b.bridge(&[&a.endpoint], &["--import", "//a/frames", "--policy", "block"]);
    let bytes = noise((1 << 20) + 7, 5);
    let file = a.sandbox.file("put", &bytes);
    a.run(&["put", file.to_str().unwrap(), "llm", "--device", "host"]).expect(0);
    let (_origin, publisher, subscriber) = stream(&a, &b, bytes.len() as u64);
    let bad = Condition {
        delay: Duration::from_millis(10),
        jitter: Duration::from_millis(3),
        loss: 0.005,
        ..Condition::default()
    };
    line.set(bad);
    thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..COUNT, &bytes));
        (0..10).for_each(|number| assert_eq!(receive(&subscriber, &bytes), number));
        b.run(&["pull", "//a/llm", "--device", "host"]).expect(0);
        assert!(get(&b, "llm") == bytes);
        // Nothing gets to `b`, whose own packets still arrive.
        line.set(Condition { is_open: [false, true], ..bad });
        b.await_state("a", "unreachable");
        line.set(bad);
        (10..COUNT).for_each(|number| assert_eq!(receive(&subscriber, &bytes), number));
    });
}
