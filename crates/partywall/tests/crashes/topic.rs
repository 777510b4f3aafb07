// Holds 180, 193, 195.
//! Topics: a process crashes between any two steps of publishing, receiving, joining, leaving and recovering. Every
//! subscriber with a promise still receives each published sample whole, once and in order; no block is lost; and no
//! process waits for a step of another, except a publisher for a blocking subscriber.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    os::fd::{AsRawFd, OwnedFd},
    process::Command,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use partywall_harness::{
    WATCHDOG,
    crash::{self, Crashed, Fate, at_each_point},
    eventually,
};
use partywall_os::{map::SharedMap, memfd};
use partywall_shm::{
    crash as points, members,
    pool::Pool,
    slots::HeldSlot,
    timeline::TimelineEnding,
    topic::{
        HeldSample, Message, PublisherHandle, Received, Status, SubscriberHandle, Topic, TopicLimits, Unpublished,
    },
};
use partywall_wire::{Ages, BlockCounts};

use super::points::{
    JOINING_TO_PUBLISH, MAKING_SPACE, NOTIFYING, OVERTAKEN, PUBLISHING, RECEIVING, RETIRING, SUBSCRIBING,
    TAKING_A_PORT, TOPIC_RECOVERED, assert_passed,
};

/// The row of the process that crashes.
const CRASHING: u16 = 1;
/// The row of a process that was dead before.
const DEAD: u16 = 7;
/// The rows of the test.
const OURS: u16 = 20;
const READER: u16 = 21;

/// As few blocks as the documentation promises to be enough.
const SHAPE: TopicLimits =
    TopicLimits { blocks: 2 + 2 * 3 + 3 * 2, depth: 2, publishers: 3, loans: 2, subscribers: 3, held: 2 };

/// Samples that a process publishes or receives until its role is complete.
const SAMPLES: u64 = 4;

/// A topic, its pool, and the contents of the blocks.
struct World {
    topic: Topic,
    pool: Pool,
    memory: SharedMap,
}

impl World {
    /// Takes a block, which must be available soon: that many are promised.
    fn loan(&self, row: u16) -> HeldSlot {
        let started = Instant::now();
        loop {
            let found = self.pool.try_take(row).or_else(|| {
                self.topic.sweep(&self.pool);
                self.pool.try_take(row)
            });
            match found {
                Some(held) => return held,
                None => std::thread::yield_now(),
            }
            assert!(started.elapsed() < WATCHDOG, "watchdog: the wait does not end");
        }
    }

    fn publish(&self, handle: &mut PublisherHandle, row: u16, value: u64, status: Status) -> Option<HeldSlot> {
        self.publish_viewed(handle, row, value, status, false)
    }

    fn publish_viewed(
        &self,
        handle: &mut PublisherHandle,
        row: u16,
        value: u64,
        status: Status,
        is_viewed: bool,
    ) -> Option<HeldSlot> {
        let held = self.loan(row);
        let started = Instant::now();
        self.word(held.index()).store(value, Ordering::Relaxed);
        let message = Message {
            status,
            lane: 0,
            value: 1,
            stamp: 1,
            dtype: 1,
            shape: &[8],
            bytes: 8,
            header: &value.to_le_bytes(),
        };
        loop {
            let seen = self.topic.prepare_for_space();
            let published = match is_viewed {
                true => self.topic.publish_viewed(&self.pool, handle, &held, &message),
                false => self.topic.publish(&self.pool, handle, &held, &message),
            };
            match published {
                Ok(_) => break,
                Err(Unpublished::Busy) => {}
                Err(Unpublished::Blocked { id, .. }) => {
                    self.topic.set_blocked(handle.port(), Some((id, members::now())));
                    self.topic.sleep_for_space(seen, Duration::from_millis(20));
                }
                Err(Unpublished::Detached) => {
                    self.pool.free(&held).unwrap();
                    return None;
                }
            }
            assert!(started.elapsed() < WATCHDOG, "watchdog: the wait does not end");
        }
        self.topic.set_blocked(handle.port(), None);
        Some(held)
    }

    /// Waits for a sample. Returns `None` if the subscriber was detached, or no further sample will come.
    fn receive(&self, handle: &mut SubscriberHandle, is_over: impl Fn() -> bool) -> Option<HeldSample> {
        loop {
            let was_over = is_over();
            let seen = self.topic.prepare_for_sample();
            match self.topic.receive(&self.pool, handle) {
                Received::Sample(taken) => return Some(taken),
                Received::Detached => return None,
                Received::Empty if was_over => return None,
                Received::Empty => self.topic.sleep_for_sample(seen, Duration::from_millis(20)),
                Received::Busy => {}
                Received::Full => panic!("it holds less than it may"),
            }
        }
    }

    /// Reads a sample, which must be whole.
    fn read(&self, taken: &HeldSample) -> u64 {
        let value = self.word(taken.block()).load(Ordering::Relaxed);
        assert_eq!(self.topic.header(taken), value.to_le_bytes());
        value
    }

    fn word(&self, block: u32) -> &AtomicU64 {
        &self.memory.atomics::<AtomicU64>(0, SHAPE.blocks as usize).unwrap()[block as usize]
    }

    fn audit(&self) -> BlockCounts {
        let audit = self.topic.audit(&self.pool);
        assert_eq!(audit.invalid, 0, "{audit:?}");
        audit
    }
}

/// The world of the process that crashes.
static WORLD: OnceLock<World> = OnceLock::new();

/// Lets the whole ring be overwritten while this process has a hold on a sample that it has not checked again. From
/// then on the process crashes where the test wants it to.
fn overwrite(point: &'static str) {
    if point != "topic: hold written, not known to be seen" {
        return points::arm(0, overwrite);
    }
    let world = WORLD.get().unwrap();
    let mut handle = world.topic.join_as_publisher(CRASHING).unwrap();
    for value in 0..SAMPLES {
        world.publish(&mut handle, CRASHING, value, Status::Ready);
    }
    world.topic.detach_publisher(handle.port());
    world.topic.leave_as_publisher(handle.port());
    crash::arm();
}

/// The point that the first of two publications has reached when the second one begins.
static FIRST: OnceLock<String> = OnceLock::new();

/// Once the first publication has reached that point, a second publisher publishes, and crashes where the test wants it
/// to. Each of the two has another loan.
fn publish_meanwhile(point: &'static str) {
    if FIRST.get().unwrap() != point {
        return points::arm(0, publish_meanwhile);
    }
    let world = WORLD.get().unwrap();
    let mut handle = world.topic.join_as_publisher(CRASHING).unwrap();
    let _in_hand = world.loan(CRASHING);
    crash::arm();
    for value in 0..2 {
        world.publish(&mut handle, CRASHING, value, Status::Ready);
    }
}

pub(crate) fn play(role: &str, topic: File) {
    let open = |name| OpenOptions::new().read(true).write(true).open(std::env::var(name).unwrap()).unwrap();
    let world = WORLD.get_or_init(|| World {
        topic: Topic::map(topic).unwrap(),
        pool: Pool::map(open(POOL)).unwrap(),
        memory: SharedMap::writable(open(DATA)).unwrap(),
    });
    let World { topic, pool, .. } = world;
    let publisher = || topic.join_as_publisher(CRASHING).unwrap();
    if let Some(point) = role.strip_prefix(PUBLISHES_TWICE) {
        FIRST.set(point.to_owned()).unwrap();
        let mut handle = publisher();
        points::arm(0, publish_meanwhile);
        let _in_hand = world.loan(CRASHING);
        world.publish(&mut handle, CRASHING, 0, Status::Ready);
        return crash::disarm();
    }
    match role {
        "publishes" => {
            let mut handle = publisher();
            crash::arm();
            for value in 0..SAMPLES {
                world.publish(&mut handle, CRASHING, value, Status::Ready);
            }
        }
        "publishes what a stream writes" => {
            let mut handle = publisher();
            crash::arm();
            for value in 0..SAMPLES {
                let held = world.publish(&mut handle, CRASHING, value, Status::Timeline).unwrap();
                topic.settle(held.index(), held.generation(), Status::Done);
                topic.retire(pool, &held);
            }
        }
        "publishes what it views" => {
            let mut handle = publisher();
            crash::arm();
            let mut viewed = None;
            for value in 0..SAMPLES {
                let held = world.publish_viewed(&mut handle, CRASHING, value, Status::Ready, true);
                if let Some(former) = viewed.replace(held.unwrap()) {
                    topic.retire(pool, &former);
                }
            }
        }
        "joins as a publisher and leaves" => {
            crash::arm();
            let mut handle = publisher();
            world.publish(&mut handle, CRASHING, 0, Status::Ready);
            topic.detach_publisher(handle.port());
            topic.leave_as_publisher(handle.port());
        }
        "joins as a subscriber and leaves" => {
            crash::arm();
            // The process may have been detached before it had joined.
            if let Some(handle) = topic.join_as_subscriber(CRASHING, None, 1) {
                topic.detach_subscriber(handle.port());
                topic.leave_as_subscriber(handle.port());
            }
        }
        "receives" | "receives the latest" => {
            let queue = (role == "receives the latest").then_some(1);
            let mut handle = topic.join_as_subscriber(CRASHING, queue, 0).unwrap();
            crash::arm();
            let mut before = None;
            for _ in 0..SAMPLES {
                let Some(taken) = world.receive(&mut handle, || false) else { break };
                topic.add_age(&handle, &taken, 100);
                world.read(&taken);
                if let Some(before) = before.replace(taken) {
                    topic.release(pool, &before);
                }
            }
            if let Some(last) = before {
                topic.release(pool, &last);
            }
            topic.detach_subscriber(handle.port());
            topic.leave_as_subscriber(handle.port());
        }
        "receives what is overwritten" => {
            let mut handle = topic.join_as_subscriber(CRASHING, Some(1), 0).unwrap();
            points::arm(0, overwrite);
            if let Some(taken) = world.receive(&mut handle, || false) {
                world.read(&taken);
                topic.release(pool, &taken);
            }
        }
        "is the broker" => {
            crash::arm();
            topic.detach(|row| row == DEAD, TimelineEnding::OwnerDied, |_| None);
            topic.recover(pool, |row| row == DEAD);
        }
        _ => panic!("{role}"),
    }
    crash::disarm();
}

/// The processes around the crashing one: a publisher, and a reader that must miss nothing.
struct Others {
    world: Arc<World>,
    publisher: PublisherHandle,
    /// The crashing process opens these file descriptors by their numbers in this process.
    _memory: [OwnedFd; 3],
    over: Arc<AtomicBool>,
    reader: JoinHandle<Vec<(u64, u64, u64)>>,
}

impl Others {
    fn start(what: &str) -> (Command, Self) {
        let topic = Topic::create(SHAPE).unwrap();
        let pool = Pool::create(SHAPE.blocks).unwrap();
        let data = memfd::Draft::create("data", 4096).unwrap().share().unwrap();
        let mut command = super::role(&format!("topic {what}"), &topic);
        let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        command.env(POOL, path(&pool)).env(DATA, path(&data));
        let world = World {
            topic: Topic::map(&topic).unwrap(),
            pool: Pool::map(&pool).unwrap(),
            memory: SharedMap::writable(&data).unwrap(),
        };
        let world = Arc::new(world);
        let over = Arc::new(AtomicBool::new(false));
        let publisher = world.topic.join_as_publisher(OURS).unwrap();
        let handle = world.topic.join_as_subscriber(READER, None, 0).unwrap();
        let reader = std::thread::spawn({
            let world = world.clone();
            let over = over.clone();
            move || read_all(&world, handle, &over)
        });
        (command, Self { world, publisher, _memory: [topic, pool, data], over, reader })
    }

    /// Publishes in a thread that waits for blocking subscribers.
    fn publish(&mut self, samples: u64) {
        for value in 0..samples {
            self.world.publish(&mut self.publisher, OURS, value, Status::Ready);
        }
    }

    /// Checks what follows a crash at any point. Returns how many samples the crashed process has published.
    fn go_on(mut self, crashed: Crashed) -> u64 {
        let what = format!("{crashed:?}");
        let is_paused = crashed.fate == Fate::Paused;
        self.publish(10);
        self.world.audit();
        for Ages { count, younger, .. } in self.world.topic.subscribers().into_iter().map(|state| state.ages) {
            assert!((younger[0]..=younger[0] + 1).contains(&count), "{what}: at most the last age is half counted");
        }
        if crashed.is_dead_in_the_end() {
            self.world.topic.recover(&self.world.pool, |row| row == CRASHING);
        }
        self.publish(10);
        self.over.store(true, Ordering::Release);
        let received = self.reader.join().unwrap();
        let mut published = BTreeMap::new();
        for (publisher, sequence, _) in received {
            let next = published.entry(publisher).or_insert(0);
            assert_eq!(sequence, *next, "{what}: each once, and in order");
            *next += 1;
        }
        let ours = published.remove(&self.publisher.id());
        assert_eq!(ours, Some(self.publisher.sequence()), "{what}: all is received");
        let theirs: u64 = published.values().sum();
        // By now all of them have ended.
        self.world.topic.recover(&self.world.pool, |row| [CRASHING, OURS, READER].contains(&row));
        let audit = self.world.audit();
        assert_eq!((audit.free, audit.in_ring), (SHAPE.blocks - 2, 2), "{what}: no block is lost: {audit:?}");
        assert!(self.world.topic.publishers().is_empty() && self.world.topic.subscribers().is_empty(), "{what}");
        assert!(self.world.topic.is_idle(self.world.topic.published()), "{what}: the topic is idle");
        assert!(!is_paused || self.world.topic.published() == self.publisher.sequence() + theirs, "{what}");
        theirs
    }
}

/// Receives until it is over: publisher, sequence and value of each.
fn read_all(world: &World, mut handle: SubscriberHandle, over: &AtomicBool) -> Vec<(u64, u64, u64)> {
    let mut all = Vec::new();
    while let Some(taken) = world.receive(&mut handle, || over.load(Ordering::Acquire)) {
        let value = world.read(&taken);
        let description = world.topic.describe(&taken);
        assert_eq!((taken.missed(), taken.position()), (0, all.len() as u64), "nothing is lost");
        all.push((description.publisher, description.sequence, value));
        assert_eq!(world.read(&taken), value, "it stays while it is held");
        world.topic.release(&world.pool, &taken);
    }
    all
}

#[test]
fn crash_in_publish_loses_no_block() {
    let points = at_each_point(
        || {
            let (command, mut others) = Others::start("publishes");
            // All blocks have been used, and no process has freed the unused ones.
            others.publish(SHAPE.blocks.into());
            (command, others)
        },
        |crashed, others| {
            let is_paused = crashed.fate == Fate::Paused;
            let theirs = others.go_on(crashed);
            assert!(theirs == SAMPLES || !is_paused && theirs < SAMPLES, "{theirs}");
        },
    );
    assert_passed(&points, &[PUBLISHING, NOTIFYING]);
}

/// Two publishers are stopped at the same time, each at any point and with all blocks that it is promised. The third
/// continues.
#[test]
fn two_publishers_stopped_in_publish_do_not_stop_a_third() {
    for first in PUBLISHING {
        at_each_point(
            || {
                let (command, mut others) = Others::start(&format!("{PUBLISHES_TWICE}{first}"));
                others.publish(SHAPE.blocks.into());
                (command, others)
            },
            |crashed, others| {
                let is_paused = crashed.fate == Fate::Paused;
                let theirs = others.go_on(crashed);
                assert!(theirs == 3 || !is_paused && theirs < 3, "{first}: {theirs}");
            },
        );
    }
}

#[test]
fn crash_while_a_block_stays_held_loses_no_block() {
    for role in ["publishes what a stream writes", "publishes what it views"] {
        let points = at_each_point(
            || Others::start(role),
            |crashed, others| {
                others.go_on(crashed);
            },
        );
        assert_passed(&points, &[RETIRING]);
    }
}

#[test]
fn crash_in_join_or_leave_of_a_publisher_frees_its_port() {
    let points = at_each_point(
        || Others::start("joins as a publisher and leaves"),
        |crashed, others| {
            assert!(others.go_on(crashed) <= 1);
        },
    );
    assert_passed(&points, &[TAKING_A_PORT, JOINING_TO_PUBLISH]);
}

/// Publishes, and waits until that is done or waits for the crashed process. Then detaches that process, as the broker
/// does when a process is dead or evicted.
fn detach_when_waited_for(mut others: Others) -> Others {
    let world = others.world.clone();
    let publishing = std::thread::spawn(move || {
        others.publish(10);
        others
    });
    await_end_or_stall(&world, &publishing);
    detach(&world);
    publishing.join().unwrap()
}

/// Waits until the publication is done or waits for the crashed subscriber.
fn await_end_or_stall(world: &World, publishing: &JoinHandle<Others>) {
    let keeps_waiting =
        || world.topic.subscribers().iter().any(|state| state.row == CRASHING && state.stalled.is_some());
    eventually("publishing ends, or it waits for the crashed subscriber", || {
        publishing.is_finished() || keeps_waiting()
    });
}

fn detach(world: &World) {
    world.topic.detach(|row| row == CRASHING, TimelineEnding::Evicted, |_| None);
}

#[test]
fn crash_in_join_or_leave_of_a_subscriber_frees_its_port() {
    let points = at_each_point(
        || {
            let (command, mut others) = Others::start("joins as a subscriber and leaves");
            others.publish(3);
            (command, others)
        },
        |crashed, others| {
            detach_when_waited_for(others).go_on(crashed);
        },
    );
    assert_passed(&points, &[TAKING_A_PORT, SUBSCRIBING]);
}

/// A process that receives while ours publishes.
fn receiving(role: &str) -> std::collections::BTreeSet<String> {
    at_each_point(
        || {
            let (command, others) = Others::start(role);
            let world = others.world.clone();
            let publishing = std::thread::spawn(move || {
                let mut others = others;
                eventually("it has joined", || others.world.topic.subscribers().len() > 1);
                others.publish(2 * SAMPLES);
                others
            });
            (command, (world, publishing))
        },
        |crashed, (world, publishing)| {
            await_end_or_stall(&world, &publishing);
            // A subscriber that may miss samples blocks no publisher.
            assert!(role == "receives" || publishing.is_finished());
            detach(&world);
            publishing.join().unwrap().go_on(crashed);
        },
    )
}

#[test]
fn crash_in_receive_of_all_samples_loses_no_block() {
    let points = receiving("receives");
    assert_passed(&points, &[RECEIVING, MAKING_SPACE]);
}

#[test]
fn crash_in_receive_of_the_latest_loses_no_block() {
    let points = receiving("receives the latest");
    assert_passed(&points, &[RECEIVING]);
}

#[test]
fn crash_in_receive_of_an_overwritten_sample_loses_no_block() {
    let points = receiving("receives what is overwritten");
    assert_passed(&points, &[OVERTAKEN]);
}

/// The broker dies while it reclaims the blocks of a dead member. The next attempt, by this or another broker, starts
/// again.
#[test]
fn crash_in_reclaim_of_a_dead_member_loses_no_block() {
    let points = at_each_point(
        || {
            let (command, others) = Others::start("is the broker");
            let World { topic, pool, .. } = &*others.world;
            let mut publisher = topic.join_as_publisher(DEAD).unwrap();
            let _written = others.world.publish(&mut publisher, DEAD, 1, Status::Timeline).unwrap();
            let mut reader = topic.join_as_subscriber(DEAD, None, 1).unwrap();
            let _read = others.world.receive(&mut reader, || true).unwrap();
            let _loan = pool.try_take(DEAD).unwrap();
            (command, others)
        },
        |crashed, others| {
            let world = others.world.clone();
            world.topic.detach(|row| row == DEAD, TimelineEnding::OwnerDied, |_| None);
            world.topic.recover(&world.pool, |row| row == DEAD);
            assert_eq!(others.go_on(crashed), 1);
        },
    );
    assert_passed(&points, &[TOPIC_RECOVERED]);
}

/// A role, followed by the point that the first of two publications has reached.
const PUBLISHES_TWICE: &str = "publishes twice at once: ";

const POOL: &str = "PARTYWALL_TEST_POOL";
const DATA: &str = "PARTYWALL_TEST_DATA";
