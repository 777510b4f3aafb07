//! A long life in a short time: no process and no control memory grows.
//!
//! `PARTYWALL_STRESS=50` makes the counts the full ones: 10⁶ attachments, 10⁵ versions, 10⁷ messages and 10³ restarts
//! of the broker. An attachment opens a segment, reads it and releases it; each hundredth comes with a connection of
//! its own.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    thread,
    time::{Duration, Instant},
};

use partywall::{DType, Domain, Place, Policy, Topic, info::StatusInfo};
use partywall_harness::{Actor, Sandbox, WATCHDOG, commit, kill, next_order, say};

const ATTACHMENTS: u64 = 20_000;
const VERSIONS: u64 = 2_000;
const MESSAGES: u64 = 200_000;
const RESTARTS: u64 = 20;

/// How much memory a process may have more than before, in KiB: allocators keep some of what is freed, and the broker's
/// journal and log of events grow up to their bounds.
const SLACK_KIB: u64 = 4096;

/// How many mappings a process may have more than before, those of its allocator.
const SLACK_MAPPINGS: usize = 16;

/// How many restarts, and how many operations of every kind, come before the first count.
const WARM_UP: [u64; 2] = [5, 500];

/// How many operations a process is asked for at once.
const PART: usize = 10_000;

/// Runs the processes that the test starts.
pub(crate) fn play(role: &str) {
    let connect = || Domain::options().start(false).connect().unwrap();
    let domain = connect();
    let topic = || domain.topic("messages").timeout(WATCHDOG).open().unwrap();
    // Each order is a number of operations.
    let repeat = |operation: &mut dyn FnMut(u64)| {
        say("ready");
        while let Some(order) = next_order() {
            (0..order.parse().unwrap()).for_each(&mut *operation);
            say("done");
        }
    };
    match role {
        "attach" => repeat(&mut |count| {
            let own = (count % 100 == 0).then(connect);
            let segment = own.as_ref().unwrap_or(&domain).open("attached", WATCHDOG).unwrap();
            assert_eq!(segment.tensor("x").unwrap().as_bytes().unwrap()[0], 1);
            segment.release().unwrap();
        }),
        "commit" => repeat(&mut |_| commit(&domain, "versions", 1).release().unwrap()),
        "publish" => {
            let publisher = topic().publisher().unwrap();
            let mut message = 0;
            repeat(&mut |_| {
                message += 1;
                let mut loan = publisher.loan(DType::U64, &[1], WATCHDOG).unwrap();
                loan.as_mut_slice::<u64>().unwrap()[0] = message;
                loan.filled().publish(WATCHDOG).unwrap();
            });
        }
        "subscribe" => {
            let subscriber = topic().subscriber(Policy::Block).unwrap();
            let mut message = 0;
            repeat(&mut |_| {
                message += 1;
                assert_eq!(subscriber.recv(WATCHDOG).unwrap().as_slice::<u64>().unwrap()[0], message);
            });
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Everything of a process that could grow.
#[derive(Debug, Clone, PartialEq)]
struct Size {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// Memory of its own.
    kib: u64,
    /// Memory of the memfds that it has open.
    memfd_kib: u64,
}

impl Size {
    fn of(pid: u32) -> Self {
        let count = |of: &str| fs::read_dir(format!("/proc/{pid}/{of}")).unwrap().count();
        let text = |of: &str| fs::read_to_string(format!("/proc/{pid}/{of}")).unwrap();
        let kib = text("status").lines().find_map(|line| {
            let kib = line.strip_prefix("RssAnon:")?.trim().trim_end_matches(" kB");
            kib.parse().ok()
        });
        let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
        let is_memfd = |path: &std::path::PathBuf| {
            fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:"))
        };
        let files = files.filter(is_memfd).filter_map(|path| fs::metadata(path).ok());
        let blocks: BTreeMap<u64, u64> = files.map(|file| (file.ino(), file.blocks())).collect();
        Self {
            descriptors: count("fd"),
            threads: count("task"),
            mappings: text("maps").lines().count(),
            kib: kib.unwrap(),
            memfd_kib: blocks.values().sum::<u64>() / 2,
        }
    }

    fn has_grown_since(&self, before: &Self) -> bool {
        self.descriptors > before.descriptors
            || self.threads > before.threads
            || self.mappings > before.mappings + SLACK_MAPPINGS
            || self.kib > before.kib + SLACK_KIB
            || self.memfd_kib > before.memfd_kib + SLACK_KIB
    }
}

struct World {
    domain: Domain,
    topic: Topic,
    actors: BTreeMap<&'static str, Actor>,
    // Dropped last.
    _sandbox: Sandbox,
}

impl World {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        let domain = sandbox.domain();
        commit(&domain, "attached", 1).release().unwrap();
        let topic = domain.topic("messages").max_bytes(64).depth(64).place(Place::Host).create().unwrap();
        let actors = ["attach", "commit", "subscribe", "publish"].map(|role| {
            let mut command = sandbox.program(std::env::current_exe().unwrap());
            let mut actor = Actor::start(command.env("PARTYWALL_SOCKET", sandbox.socket()), role);
            actor.expect("ready");
            (role, actor)
        });
        Self { domain, topic, actors: actors.into(), _sandbox: sandbox }
    }

    /// Has some processes do a number of operations each, at the same time.
    fn repeat(&mut self, roles: &[&str], count: u64) {
        // In parts that a watchdog can watch.
        for part in (0..count).step_by(PART).map(|done| (count - done).min(PART as u64)) {
            let of = |actor: &&str| roles.contains(actor);
            let mut actors: Vec<_> = self.actors.iter_mut().filter(|(role, _)| of(role)).collect();
            actors.iter_mut().for_each(|(_, actor)| actor.send(&part.to_string()));
            actors.iter_mut().for_each(|(_, actor)| drop(actor.expect("done")));
        }
    }

    /// One operation of every kind.
    fn once(&mut self) {
        self.repeat(&["attach", "commit", "publish", "subscribe"], 1);
    }

    /// Kills the broker's worker, which its supervisor replaces, and has everybody use the next one.
    fn restart(&mut self) {
        let pid = self.domain.status().unwrap().pid;
        kill(pid);
        self.once();
    }

    fn sizes(&self) -> BTreeMap<&'static str, Size> {
        let status = self.domain.status().unwrap();
        let brokers = [("worker", status.pid), ("supervisor", status.supervisor.unwrap())];
        let actors = self.actors.iter().map(|(role, actor)| (*role, actor.pid()));
        brokers.into_iter().chain(actors).map(|(role, pid)| (role, Size::of(pid))).collect()
    }

    fn count(&self) -> Count {
        let topic = self.topic.stats();
        Count {
            sizes: self.sizes(),
            status: StatusInfo { pid: 0, restarts: 0, ..self.domain.status().unwrap() },
            members: self.domain.members().unwrap().len(),
            blocks: topic.free + topic.in_ring,
            ports: topic.publishers.len() + topic.subscribers.len(),
        }
    }

    /// Fails if anything is larger than before.
    fn assert_nothing_has_grown_since(&self, before: &Count, after: &str) {
        // The broker closes what it was given, and threads end, a little later.
        let deadline = Instant::now() + WATCHDOG;
        loop {
            let now = self.count();
            if !now.has_grown_since(before) {
                return eprintln!("after {after}: {:#?}", now.sizes);
            }
            assert!(Instant::now() < deadline, "after {after}: {now:#?}\nbefore: {before:#?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// What the processes and the broker have.
#[derive(Debug)]
struct Count {
    sizes: BTreeMap<&'static str, Size>,
    /// Apart from the process that serves.
    status: StatusInfo,
    members: usize,
    /// Blocks of the topic that are free, or in its ring.
    blocks: u32,
    /// Publishers and subscribers of the topic.
    ports: usize,
}

impl Count {
    fn has_grown_since(&self, before: &Self) -> bool {
        let slots = |count: &Self| (count.status.clone(), count.members, count.blocks, count.ports);
        slots(self) != slots(before) || self.sizes.iter().any(|(role, size)| size.has_grown_since(&before.sizes[role]))
    }
}

// Holds 167.
#[test]
fn needs_minutes_nothing_grows_in_a_long_life() {
    let times: u64 = std::env::var("PARTYWALL_STRESS").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    let mut world = World::new();
    (0..WARM_UP[0]).for_each(|_| world.restart());
    world.repeat(&["attach", "commit", "publish", "subscribe"], WARM_UP[1]);
    let before = world.count();
    eprintln!("before: {:#?}", before.sizes);
    world.repeat(&["attach"], times * ATTACHMENTS);
    world.assert_nothing_has_grown_since(&before, "attachments");
    world.repeat(&["commit"], times * VERSIONS);
    world.assert_nothing_has_grown_since(&before, "versions");
    world.repeat(&["publish", "subscribe"], times * MESSAGES);
    world.assert_nothing_has_grown_since(&before, "messages");
    (0..times * RESTARTS).for_each(|_| world.restart());
    world.assert_nothing_has_grown_since(&before, "restarts");
}
