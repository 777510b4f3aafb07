//! Failures for which other systems that share memory are known. Each test is named after what goes wrong there.
//!
//! | test | known of |
//! |---|---|
//! | `rebuilt_many_times_and_never_freed` | model servers whose workers reload weights: the old allocation stays as long as one process counts a reference that nobody returns |
//! | `exported_and_dropped_unread` | libraries in which the exporter keeps memory until a receiver has opened it |
//! | `killed_before_registration_finished` | middleware whose creation of a service has several visible steps: a kill between them leaves a name that nobody can use or create |
//! | `opened_twice_and_closed_once` | handles of CUDA's legacy IPC: a second open returns the same address, and one close unmaps it for both |
//! | `released_by_a_thread_without_a_context` | bindings whose destructors call the driver on whichever thread drops the object last |
//! | `needs_namespaces_equal_pids_in_two_namespaces` | systems that name a process by its pid in a shared file, once they run in containers |
//! | `removed_while_in_use` | servers that unmap a region when it is unregistered, with requests on it still running |
//! | `size_and_offset_overflow` | servers that add an offset and a size of a client without a check |
//!
//! Two more are failures of garbage-collected languages: `python/tests/host/test_known_failures.py`.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use partywall::{
    DType, Domain, Error, OpenOrBuild, Policy, Pool, Task,
    error::{InvalidArgument, NotFound},
};
use partywall_harness::{linger, place, say, wire};
use partywall_os::memfd;
use partywall_wire::{Call, Commit, Lifetime, Refusal, Table};

use super::{
    TIMEOUT,
    deaths::{NAMESPACE, can_make_namespaces},
    world::{World, commit, eventually, value},
};

/// The roles of processes that are killed.
pub(crate) fn play(role: &str) {
    let path = std::env::var_os("PARTYWALL_SOCKET").unwrap();
    let connect = || Domain::options().start(false).connect().unwrap();
    match role.trim_start_matches("known ") {
        // Its first message, without the last byte.
        "half hello" => {
            let socket = wire::Framed::new(partywall_os::socket::connect(path.as_ref()).unwrap());
            let hello = wire::encoded(&wire::hello(false, None));
            let own = partywall_os::process::own_pidfd().unwrap();
            assert!(socket.send(&hello[..hello.len() - 1], &[&own]));
            linger();
        }
        // A commit with its descriptor, without the last byte.
        "half commit" => {
            let mut client = wire::Client::join(path.as_ref());
            let chunk = memfd::frozen("partywall:test", &[1; 4096]).unwrap();
            let request = client.request(Call::Commit(small("model", vec![4096])), 1);
            assert!(client.call.send(&request[..request.len() - 1], &[&chunk]));
            linger();
        }
        "build" => {
            let domain = connect();
            let builder = domain.create("model", place()).tensor("x", DType::U32, &[4]);
            let _build = builder.allocate().unwrap();
            linger();
        }
        "claim" => {
            let domain = connect();
            let claimed = domain.open_or_build("model", TIMEOUT).unwrap();
            assert!(matches!(claimed, OpenOrBuild::Build(_)));
            linger();
        }
        "giver" => {
            let pool = connect().pool("frames").timeout(TIMEOUT).open().unwrap();
            pool.alloc(TIMEOUT).unwrap().offer().unwrap();
            linger();
        }
        name => {
            let domain = connect();
            let _owned = commit(&domain, name, 1, false);
            let _permit = domain.semaphore("permits", 2).unwrap().acquire(TIMEOUT).unwrap();
            say(&format!("pid {}", std::process::id()));
            linger();
        }
    }
}

fn small(name: &str, chunks: Vec<u64>) -> Commit {
    wire::host_commit(name, Lifetime::Kept, chunks, Table::Inline(b"table".to_vec()))
}

/// What the broker holds.
#[derive(Debug, PartialEq)]
struct Held {
    names: u64,
    versions: u64,
    leases: u64,
    fds: u64,
    bytes: u64,
}

impl Held {
    fn by(domain: &Domain) -> Self {
        let status = domain.status().unwrap();
        let bytes = status.bytes.iter().map(|(_, bytes)| bytes).sum();
        Self { names: status.names, versions: status.versions, leases: status.leases, fds: status.fds, bytes }
    }

    fn nothing() -> Self {
        Self { names: 0, versions: 0, leases: 0, fds: 0, bytes: 0 }
    }
}

fn pool(domain: &Domain) -> Pool {
    domain.pool("frames").blocks(2).block_bytes(64).place(place()).create().unwrap()
}

// Holds 165.
#[test]
fn rebuilt_many_times_and_never_freed() {
    let world = World::new();
    let trainer = world.connect();
    let worker = world.connect();
    let mut serving = None;
    let mut first = None;
    for version in 1..=200 {
        drop(commit(&trainer, "model", version, true));
        // The worker opens the new version before it drops the old one.
        let opened = worker.open("model", TIMEOUT).unwrap();
        assert_eq!(value(&opened), version);
        serving = Some(opened);
        let held = Held::by(&trainer);
        assert_eq!(first.get_or_insert(held), &Held::by(&trainer), "after version {version}");
    }
    drop(serving);
    trainer.remove("model").unwrap();
    assert_eq!(Held::by(&trainer), Held::nothing());
}

// Holds 165.
#[test]
fn exported_and_dropped_unread() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    drop(commit(&domain, "segment", 1, false));
    assert_eq!(Held::by(&domain), Held::nothing());

    let topic = domain.topic("samples").max_bytes(64).depth(2).subscribers(1).place(place()).create().unwrap();
    let free = topic.stats().free;
    let subscriber = other.topic("samples").timeout(TIMEOUT).open().unwrap().subscriber(Policy::Block).unwrap();
    let publisher = topic.publisher().unwrap();
    for _ in 0..2 {
        publisher.loan(DType::U8, &[8], TIMEOUT).unwrap().filled().publish(TIMEOUT).unwrap();
    }
    drop(subscriber);
    // Nobody has read the two, and the next ones take their places in the ring.
    for _ in 0..20 {
        publisher.loan(DType::U8, &[8], TIMEOUT).unwrap().filled().publish(TIMEOUT).unwrap();
    }
    drop(publisher);
    assert_eq!(topic.stats().free + topic.stats().in_ring, free);
    drop(topic);

    let blocks = pool(&domain);
    world.play("known giver").kill();
    eventually("the block that was offered is free", || blocks.stats().free == blocks.blocks());
    drop(blocks);

    let queue = domain.queue("tasks").tasks(2).inputs(2, 64).outputs(2, 64).place(place()).create().unwrap();
    let ticket = queue.submit(Task::new("none").output(8), TIMEOUT).unwrap();
    queue.claim(TIMEOUT).unwrap().complete().unwrap();
    // Another process could still take the result, until nobody has the queue.
    drop((ticket, queue));
    eventually("all is free", || Held::by(&domain) == Held::nothing());
}

// Holds 165.
#[test]
fn killed_before_registration_finished() {
    let world = World::new();
    let domain = world.connect();
    for role in ["half hello", "half commit", "build", "claim"] {
        let mut killed = world.play(&format!("known {role}"));
        assert_eq!(domain.names().unwrap().iter().filter(|name| name.latest.is_some()).count(), 0, "{role}");
        killed.kill();
        let OpenOrBuild::Build(claim) = domain.open_or_build("model", TIMEOUT).unwrap() else {
            panic!("{role}: nobody has committed it");
        };
        let mut build = claim.create(place()).tensor("x", DType::U32, &[1]).allocate().unwrap();
        build.write("x", &[7; 4]).unwrap();
        let built = build.commit().unwrap();
        assert_eq!(built.version(), 1, "{role}");
        drop(built);
        eventually("all is free", || Held::by(&domain) == Held::nothing() && domain.members().unwrap().len() == 1);
    }
}

// Holds 166.
#[test]
fn opened_twice_and_closed_once() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "model", 5, true));
    // By two connections, and twice by one of them.
    let other = world.connect();
    let mut opened = vec![domain.open("model", TIMEOUT).unwrap()];
    opened.extend((0..2).map(|_| other.open("model", TIMEOUT).unwrap()));
    while let Some(closed) = opened.pop() {
        closed.release().unwrap();
        assert!(opened.iter().all(|segment| value(segment) == 5));
    }
    assert_eq!(Held::by(&domain).leases, 0);
    assert_eq!(value(&other.open("model", TIMEOUT).unwrap()), 5);
}

// Holds 166.
#[test]
fn released_by_a_thread_without_a_context() {
    /// Drops a value on a thread that has called nothing before.
    fn elsewhere(dropped: impl Send + 'static) {
        thread::spawn(move || drop(dropped)).join().unwrap();
    }
    let world = World::new();
    let domain = world.connect();
    let builder = domain.create("build", place()).tensor("x", DType::U32, &[4]);
    elsewhere(builder.allocate().unwrap());
    let written = commit(&domain, "model", 3, false);
    let opened = world.connect().open("model", TIMEOUT).unwrap();
    elsewhere(opened);
    assert_eq!(value(&written), 3);
    elsewhere(written);

    let blocks = pool(&domain);
    elsewhere(blocks.alloc(TIMEOUT).unwrap());
    assert_eq!(blocks.stats().free, blocks.blocks());
    elsewhere(blocks);

    let topic = domain.topic("samples").max_bytes(64).place(place()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    elsewhere(publisher.loan(DType::U8, &[8], TIMEOUT).unwrap());
    publisher.loan(DType::U8, &[8], TIMEOUT).unwrap().filled().publish(TIMEOUT).unwrap();
    elsewhere(subscriber.recv(TIMEOUT).unwrap());
    elsewhere((publisher, subscriber, topic));
    eventually("all is free", || Held::by(&domain) == Held::nothing());
}

// Holds 116.
#[test]
fn needs_namespaces_equal_pids_in_two_namespaces() {
    assert!(can_make_namespaces(), "this machine does not let us make namespaces");
    let world = World::new();
    let domain = world.connect();
    let mut one = world.play_through_after("known one", &NAMESPACE, "pid ");
    let mut two = world.play_through_after("known two", &NAMESPACE, "pid ");
    assert_eq!((one.1.as_str(), two.1.as_str()), ("1", "1"), "each is the first process of its namespace");
    let permits = domain.semaphore("permits", 2).unwrap();
    assert_eq!((domain.members().unwrap().len(), permits.available()), (3, 0));
    let theirs = [domain.open("one", TIMEOUT).unwrap(), domain.open("two", TIMEOUT).unwrap()];
    one.0.kill();
    theirs[0].wait_withdrawn(TIMEOUT).unwrap();
    eventually("the end of one", || domain.members().unwrap().len() == 2 && permits.available() == 1);
    // The other one has what it had.
    assert_eq!(value(&domain.open("two", Duration::ZERO).unwrap()), 1);
    assert!(matches!(domain.open("one", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    two.0.kill();
    theirs[1].wait_withdrawn(TIMEOUT).unwrap();
    eventually("the end of both", || domain.members().unwrap().len() == 1 && permits.available() == 2);
}

// Holds 166.
#[test]
fn removed_while_in_use() {
    let world = World::new();
    let domain = world.connect();
    let other = world.connect();
    drop(commit(&domain, "model", 5, true));
    let used = other.open("model", TIMEOUT).unwrap();
    let start = Arc::new(Barrier::new(2));
    thread::scope(|scope| {
        let start = &start;
        let used = &used;
        scope.spawn(move || {
            start.wait();
            (0..200).for_each(|_| assert_eq!(value(used), 5));
        });
        start.wait();
        domain.remove("model").unwrap();
        // Another object takes the name, while the first is read.
        for next in 0..20 {
            drop(commit(&domain, "model", next, false));
        }
    });
    assert_eq!((value(&used), used.version(), Held::by(&domain).versions), (5, 1, 1));
    drop(used);

    let blocks = pool(&domain);
    let theirs = other.pool("frames").timeout(TIMEOUT).open().unwrap();
    let block = theirs.alloc(TIMEOUT).unwrap();
    domain.remove("frames").unwrap();
    assert_eq!((blocks.stats().held, block.len()), (1, 64));
    drop(block);
    assert_eq!(blocks.stats().free, 2);
    drop((blocks, theirs));
    eventually("all is free", || Held::by(&domain) == Held::nothing());
}

// Holds 157.
#[test]
fn size_and_offset_overflow() {
    let world = World::new();
    let domain = world.connect();
    // Shapes, and their sums.
    let shapes: [&[&[u64]]; 4] =
        [&[&[u64::MAX]], &[&[1 << 32, 1 << 32]], &[&[1 << 62], &[1 << 62]], &[&[u64::MAX / 4, 3]]];
    for shapes in shapes {
        let builder = domain.create("model", place());
        let tensor = |builder: partywall::Builder, at: usize| builder.tensor(&format!("{at}"), DType::U32, shapes[at]);
        let refused = (0..shapes.len()).fold(builder, tensor).allocate().err();
        assert!(refused.is_some(), "{shapes:?}");
    }
    for (blocks, bytes) in [(2, u64::MAX), (2, 1 << 63), (3, u64::MAX / 3 + 1)] {
        let pool = domain.pool("frames").blocks(blocks).block_bytes(bytes).place(place());
        assert!(pool.create().is_err(), "{blocks} x {bytes}");
    }
    let topic = domain.topic("samples").max_bytes(u64::MAX - 1).place(place());
    assert!(topic.create().is_err());

    // Offsets, in what is there.
    let builder = domain.create("model", place()).tensor("x", DType::U8, &[4096]).mutable(true);
    let segment = builder.allocate().unwrap().commit().unwrap();
    let tensor = segment.tensor("x").unwrap();
    for (offset, bytes) in [(u64::MAX, 1), (u64::MAX - 3, 8), (4096, 1), (4090, 8), (1 << 63, 16)] {
        let is_range = |result| matches!(result, Err(Error::InvalidArgument(InvalidArgument::Range { .. })));
        assert!(is_range(tensor.read_at(offset, &mut vec![0; bytes])), "{offset} + {bytes}");
        assert!(is_range(tensor.write_at(offset, &vec![0; bytes])), "{offset} + {bytes}");
    }
    let queue = domain.queue("tasks").tasks(2).inputs(2, 64).outputs(2, 64).place(place()).create().unwrap();
    let attached = queue.attach(&segment).unwrap();
    let bytes = attached.bytes();
    assert!(attached.part(bytes - 8..).is_ok());
    for (start, end) in [(u64::MAX - 8, u64::MAX), (bytes - 8, u64::MAX), (bytes, bytes + 8), (8, 8)] {
        assert!(attached.part(start..end).is_err(), "{start} to {end} of {bytes}");
    }
    assert!(attached.part(u64::MAX..=u64::MAX).is_err());
    queue.detach(&attached, TIMEOUT).unwrap();
    drop((queue, attached, segment));
    eventually("all is free", || Held::by(&domain) == Held::nothing());

    // The same numbers, from a client that does not check them.
    let mut client = wire::Client::join(world.socket());
    let chunk = memfd::frozen("partywall:test", &[1; 4096]).unwrap();
    for sizes in [vec![u64::MAX], vec![u64::MAX, 1], vec![1 << 63, 1 << 63], vec![u64::MAX - 4095, 4096]] {
        let fds = vec![&chunk; sizes.len()];
        let refused = client.ask_with(Call::Commit(small("model", sizes.clone())), &fds).0;
        assert!(matches!(refused, Err(Refusal::BadFd { .. } | Refusal::Invalid { .. })), "{sizes:?}: {refused:?}");
    }
    assert_eq!(Held::by(&domain), Held::nothing());
}
