// Holds 19, 180.
//! Programs in C that are killed or stopped at each crash point, and processes in Rust that go on: nothing is lost,
//! nothing leaks, nothing waits for ever.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    collections::BTreeSet,
    env,
    path::PathBuf,
    process::Command,
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use partywall::{ClaimedTask, DType, Domain, Error, Place, Policy, Publisher, Queue, Subscriber, Task, Ticket};
use partywall_harness::{
    WATCHDOG, World,
    crash::{Crashed, at_each_point},
    eventually,
};

/// The program with the roles, linked with the library that has crash points.
static PROGRAM: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let test = env::current_exe().unwrap();
    let library = test.ancestors().nth(2).unwrap().join("examples/libcrash_points.so");
    assert!(library.exists(), "cargo build --workspace --example crash_points makes {}", library.display());
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("crash");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-I"]);
    compile.args([
        concat!(env!("CARGO_MANIFEST_DIR"), "/include"),
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/crash.c"),
    ]);
    let output = compile.arg(library).arg("-o").arg(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (scratch, program)
});

/// Crashes a role of the program at each of its points. Each process has objects of its own, under a name of its own.
/// Returns the points. In the end nothing is left of any of them.
fn crash_at_each_point<T>(
    role: &str,
    prepare: impl Fn(&Domain, &str) -> T,
    mut go_on: impl FnMut(&Domain, &str, Crashed, T),
) -> BTreeSet<String> {
    let world = World::new();
    let domain = world.connect();
    let runs = AtomicU32::new(0);
    let points = at_each_point(
        || {
            let name = format!("{role}{}", runs.fetch_add(1, Ordering::Relaxed));
            let objects = prepare(&domain, &name);
            let mut command = Command::new(&PROGRAM.1);
            command.arg(role).arg(&name).env("PARTYWALL_SOCKET", world.socket());
            (command, (name, objects))
        },
        |crashed, (name, objects)| go_on(&domain, &name, crashed, objects),
    );
    eventually("all is released", || {
        let status = domain.status().unwrap();
        let left = (status.members, status.names, status.versions, status.leases, status.unproven);
        (left, status.timelines, status.semaphores) == ((0, 0, 0, 0, 0), 0, 0)
    });
    points
}

fn assert_passed(points: &BTreeSet<String>, expected: &[&str]) {
    let missed: Vec<_> = expected.iter().filter(|point| !points.contains(**point)).collect();
    assert!(missed.is_empty(), "{missed:?} are not among {points:?}");
}

fn send(publisher: &Publisher, value: u64) {
    let mut loan = publisher.loan(DType::U64, &[1], WATCHDOG).unwrap();
    loan.as_mut_slice::<u64>().unwrap()[0] = value;
    loan.header(&value.to_le_bytes()).unwrap();
    loan.filled().publish(WATCHDOG).unwrap();
}

/// Returns the next sample, which must be whole.
fn receive(subscriber: &Subscriber) -> u64 {
    let sample = subscriber.recv(WATCHDOG).unwrap();
    let value = sample.as_slice::<u64>().unwrap()[0];
    assert_eq!(sample.header(), value.to_le_bytes());
    value
}

#[test]
fn publisher_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| {
        let topic = domain.topic(name).max_bytes(8).publishers(2).subscribers(2).create().unwrap();
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        let blocks = topic.stats().free;
        (topic, subscriber, blocks)
    };
    let points = crash_at_each_point("publish", prepare, |_, _, crashed, (topic, subscriber, blocks)| {
        let what = format!("{:?} at {:?}", crashed.fate, crashed.point);
        let publisher = topic.publisher().unwrap();
        let mut theirs = 100;
        // Returns once the sample of this process is received, and counts those of the other one.
        let mut until = |value| {
            loop {
                let received = receive(&subscriber);
                if received == value {
                    return theirs;
                }
                assert_eq!(received, theirs, "{what}: none is lost or doubled");
                theirs += 1;
            }
        };
        for value in 0..5 {
            send(&publisher, value);
            until(value);
        }
        let is_dead = crashed.is_dead_in_the_end();
        eventually("it has left the topic", || topic.stats().publishers.len() == 1);
        send(&publisher, 5);
        let published = until(5);
        assert!(is_dead || published == 103, "{what}: {published}");
        drop(publisher);
        eventually("its blocks are free", || {
            let stats = topic.stats();
            stats.free + stats.in_ring == blocks
        });
    });
    let expected = [
        "c: loan filled, not published",
        "topic: in the ring, tail not moved",
        "topic: publisher's words set, port not open",
    ];
    assert_passed(&points, &expected);
}

#[test]
fn subscriber_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| {
        let topic = domain.topic(name).max_bytes(8).depth(4).subscribers(2).held(3).create().unwrap();
        let publisher = topic.publisher().unwrap();
        (0..3).for_each(|value| send(&publisher, value));
        (topic, publisher)
    };
    let points = crash_at_each_point("receive", prepare, |_, _, crashed, (topic, publisher)| {
        let what = format!("{:?} at {:?}", crashed.fate, crashed.point);
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        for value in 10..20 {
            send(&publisher, value);
            assert_eq!(receive(&subscriber), value, "{what}: others miss nothing");
        }
        crashed.is_dead_in_the_end();
        eventually("what it held is free", || {
            let stats = topic.stats();
            stats.subscribers.len() == 1 && stats.read == 0
        });
        send(&publisher, 20);
        assert_eq!(receive(&subscriber), 20, "{what}");
    });
    assert_passed(
        &points,
        &["c: sample held", "topic: hold written, not known to be seen", "topic: subscriber counted, cursor not final"],
    );
}

/// Checks that a version is one of those that were committed, whole.
fn assert_whole(domain: &Domain, name: &str) {
    let segment = domain.open(name, WATCHDOG).unwrap();
    for tensor in ["a", "b"] {
        let bytes = segment.tensor(tensor).unwrap().to_vec().unwrap();
        assert_eq!(bytes, segment.version().to_le_bytes().repeat(512), "{tensor}");
    }
    if let Ok(grown) = segment.tensor("c") {
        assert_eq!(grown.shape(), [512]);
    }
}

/// A kept name, which is removed in the end.
struct KeptName(Domain, String);

impl Drop for KeptName {
    fn drop(&mut self) {
        self.0.remove(&self.1).unwrap();
    }
}

#[test]
fn builder_in_c_crashes() {
    let commit = |domain: &Domain, name: &str, value| {
        let builder = domain.create(name, Place::Host).kept(true);
        let builder = builder.tensor("a", DType::U64, &[512]).tensor("b", DType::U64, &[512]);
        let mut build = builder.allocate().unwrap();
        for tensor in ["a", "b"] {
            build.as_mut_slice::<u64>(tensor).unwrap().fill(value);
        }
        build.commit().unwrap()
    };
    let points = crash_at_each_point(
        "build",
        |domain, name| {
            drop(commit(domain, name, 1));
            KeptName(domain.clone(), name.to_owned())
        },
        |domain, name, crashed, _kept| {
            assert_whole(domain, name);
            crashed.is_dead_in_the_end();
            assert_whole(domain, name);
            let next = domain.open(name, WATCHDOG).unwrap().version() + 1;
            drop(commit(domain, name, next));
            assert_whole(domain, name);
        },
    );
    assert_passed(&points, &["c: half written", "c: written, not committed", "c: growth declared"]);
}

fn create_queue(domain: &Domain, name: &str) -> Queue {
    domain.queue(name).tasks(4).inputs(4, 8).outputs(4, 8).place(Place::Host).create().unwrap()
}

fn submit(queue: &Queue, value: u64) -> Ticket {
    let mut input = queue.inputs().alloc(WATCHDOG).unwrap();
    input.as_mut_slice::<u64>().unwrap()[0] = value;
    queue.submit(Task::new("add").input(input).output(8), WATCHDOG).unwrap()
}

fn add(mut task: ClaimedTask) {
    let value = task.inputs()[0].as_slice::<u64>().unwrap()[0];
    task.output_mut().unwrap().as_mut_slice::<u64>().unwrap()[0] = value + 1;
    task.complete().unwrap();
}

/// Works until the condition holds.
fn work_until(queue: &Queue, what: &str, mut condition: impl FnMut() -> bool) {
    eventually(what, || {
        if let Some(task) = queue.try_claim().unwrap() {
            add(task);
        }
        condition()
    });
}

fn assert_idle(queue: &Queue) {
    work_until(queue, "all slots and blocks are free", || {
        let stats = queue.stats();
        assert_eq!(stats.dead, 0, "{stats:?}");
        (stats.free, stats.free_inputs, stats.free_outputs) == (4, 4, 4)
    });
}

#[test]
fn worker_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| {
        let queue = create_queue(domain, name);
        let tickets = [10, 20].map(|value| submit(&queue, value));
        (queue, tickets)
    };
    let points = crash_at_each_point("work", prepare, |_, _, crashed, (queue, tickets)| {
        // While it is stopped, another worker completes the tasks that come.
        let third = submit(&queue, 30);
        work_until(&queue, "another task is completed", || {
            third.try_take().unwrap().is_some_and(|result| output(&result) == 31)
        });
        crashed.is_dead_in_the_end();
        for (ticket, sum) in tickets.into_iter().zip([11, 21]) {
            work_until(&queue, "its tasks are completed", || {
                ticket.try_take().unwrap().is_some_and(|result| output(&result) == sum)
            });
        }
        assert_idle(&queue);
    });
    assert_passed(
        &points,
        &["c: output written, not completed", "queue: claimed, no lease", "queue: done, nobody notified"],
    );
}

#[test]
fn submitter_in_c_crashes() {
    let points = crash_at_each_point("submit", create_queue, |_, _, crashed, queue| {
        let ours = submit(&queue, 30);
        work_until(&queue, "another task is completed", || {
            ours.try_take().unwrap().is_some_and(|result| output(&result) == 31)
        });
        crashed.is_dead_in_the_end();
        assert_idle(&queue);
    });
    assert_passed(&points, &["c: input written, not submitted", "queue: described, not pending"]);
}

fn output(result: &partywall::TaskResult) -> u64 {
    result.output().unwrap().as_slice::<u64>().unwrap()[0]
}

#[test]
fn holder_of_a_permit_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| domain.semaphore(name, 1).unwrap();
    let points = crash_at_each_point("acquire", prepare, |_, _, crashed, semaphore| {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(semaphore.acquire(WATCHDOG).unwrap()));
            crashed.is_dead_in_the_end();
            waiter.join().unwrap();
        });
        assert_eq!(semaphore.available(), 1);
    });
    assert_passed(&points, &["c: permit held", "slots: slot freed, nobody served"]);
}

#[test]
fn writer_of_a_timeline_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| domain.timeline(name).unwrap();
    let points = crash_at_each_point("signal", prepare, |_, _, crashed, timeline| {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| timeline.wait(3, WATCHDOG));
            crashed.is_dead_in_the_end();
            assert!(matches!(waiter.join().unwrap(), Err(Error::Gone(_))), "the wait for it ends");
        });
    });
    assert_passed(&points, &["c: one signalled", "timeline: signalled, nobody notified"]);
}

#[test]
fn holder_of_a_block_in_c_crashes() {
    let prepare = |domain: &Domain, name: &str| domain.pool(name).blocks(1).block_bytes(64).create().unwrap();
    let points = crash_at_each_point("allocate", prepare, |_, _, crashed, pool| {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(pool.alloc(WATCHDOG).unwrap()));
            crashed.is_dead_in_the_end();
            waiter.join().unwrap();
        });
        assert_eq!(pool.stats().free, 1);
    });
    assert_passed(&points, &["c: block held", "c: block offered", "slots: slot offered, holder not notified"]);
}
