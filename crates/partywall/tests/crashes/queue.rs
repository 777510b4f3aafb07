// Holds 180, 216.
//! Queues: a process crashes between any two steps of submitting, claiming, completing, failing, taking, cancelling,
//! tending and recovering. Each task has one result or is a dead letter; no task and no block is lost; the other
//! processes continue.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    os::fd::{AsRawFd, OwnedFd},
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};

use partywall_harness::{
    WATCHDOG,
    crash::{self, Crashed, Fate, at_each_point},
};
use partywall_shm::{
    crash as points,
    pool::Pool,
    queue::{
        AttachedPart, Claimed, Contents, NewInput, NewOutput, NewTask, Pools, Queue, QueueAudit, QueueCondition,
        QueueLimits, Reason, StreamPoint, TaskId, TaskState, Views,
    },
    slots::HeldSlot,
    topic::TimelineCell,
};

use super::points::{
    CANCELLING, CLAIMING, COMPLETING, FAILING, LATE, NOTIFYING, QUEUE_RECOVERED, QUEUEING, RETRYING, SUBMITTING,
    TAKING, TAKING_VIEWED, TENDING, VIEWING, WAKING, assert_passed,
};

/// The row of the process that crashes.
const CRASHING: u16 = 1;
/// The row of a process that was dead, or hung, before.
const DEAD: u16 = 7;
/// The row of the test.
const OURS: u16 = 20;

const SHAPE: QueueLimits = QueueLimits { tasks: 8, inputs: 12, outputs: 12, lease: 0 };

/// The part that each task names.
const PART: AttachedPart = AttachedPart { attachment: 0, offset: 0, contents: Contents::of_bytes(1) };

/// Tasks that the test submits before a crash.
const TASKS: u64 = 3;

fn output_of(held: &HeldSlot) -> NewOutput<'_> {
    NewOutput { held, contents: Contents::of_bytes(8) }
}

/// A queue and its pools.
struct World {
    queue: Queue,
    inputs: Pool,
    outputs: Pool,
}

impl World {
    fn pools(&self) -> Pools<'_> {
        Pools { inputs: &self.inputs, outputs: &self.outputs }
    }

    /// Submits a task with one block and a part of an attached segment, if there is a slot.
    fn submit(&self, row: u16, number: u64, cancel: bool) -> Option<TaskId> {
        let reserved = self.queue.reserve(row)?;
        let block = self.inputs.try_take(row).expect("there are blocks enough");
        let arguments = number.to_le_bytes();
        let task = NewTask {
            kind: b"count",
            arguments: &arguments,
            ready: None,
            output: Some(Contents::of_bytes(8)),
            max_attempts: 5,
            cancel,
            now: 0,
        };
        let inputs = [NewInput::Block(&block, 0, Contents::of_bytes(1)), NewInput::Part(PART)];
        let id = self.queue.submit(&self.inputs, reserved, &task, &inputs).ok()?;
        self.queue.notify_workers(1);
        Some(id)
    }

    fn claim(&self, row: u16) -> Option<(Claimed, HeldSlot)> {
        loop {
            let candidate = self.queue.next()?;
            if let Some(claimed) = self.queue.claim(row, &candidate) {
                return Some((claimed, self.outputs.try_take(row).expect("there are blocks enough")));
            }
        }
    }

    /// Claims and completes all pending tasks.
    fn work(&self, row: u16) {
        while let Some((claimed, output)) = self.claim(row) {
            if self.queue.complete(self.pools(), &claimed, Some(output_of(&output)), Views::None).is_err() {
                self.outputs.free(&output).unwrap();
            }
        }
    }

    /// Claims and completes all pending tasks, whose blocks the program may still use.
    fn work_viewed(&self, row: u16) -> Vec<Claimed> {
        let mut completed = Vec::new();
        while let Some((claimed, output)) = self.claim(row) {
            match self.queue.complete(self.pools(), &claimed, Some(output_of(&output)), Views::Output) {
                Ok(()) => completed.push(claimed),
                Err(_) => {
                    self.queue.drain(self.pools(), &claimed);
                    self.outputs.free(&output).unwrap();
                }
            }
        }
        completed
    }

    /// Takes a result. Returns the number of its task.
    fn take(&self, row: u16, id: TaskId) -> Option<u64> {
        let number = self.number(id)?;
        let taken = self.queue.take(self.pools(), row, id).ok()?;
        if let Some(output) = &taken.output {
            match taken.viewed {
                true => self.queue.release_output(self.pools(), id, taken.attempt, output),
                false => self.outputs.free(output),
            }
            .unwrap();
        }
        Some(number)
    }

    fn number(&self, id: TaskId) -> Option<u64> {
        Some(u64::from_le_bytes(self.queue.describe(id)?.arguments.try_into().unwrap()))
    }

    fn ids(&self, of: TaskState) -> Vec<TaskId> {
        self.queue.tasks(0, 100, |state| state == of).into_iter().map(|task| task.id).collect()
    }
}

pub(crate) fn play(role: &str, queue: File) {
    let open = |name| OpenOptions::new().read(true).write(true).open(std::env::var(name).unwrap()).unwrap();
    let world = World {
        queue: Queue::map(queue).unwrap(),
        inputs: Pool::map(open(INPUTS)).unwrap(),
        outputs: Pool::map(open(OUTPUTS)).unwrap(),
    };
    let pools = world.pools();
    let queue = &world.queue;
    match role {
        "submits" => {
            crash::arm();
            for number in 1000..1003 {
                world.submit(CRASHING, number, false);
            }
            if let Some(reserved) = queue.reserve(CRASHING) {
                queue.give_back(reserved);
            }
        }
        "submits late" => {
            // Meanwhile workers pass the slot of the task.
            let reserved = queue.reserve(CRASHING).unwrap();
            world.work(CRASHING);
            crash::arm();
            let task = NewTask {
                kind: b"",
                arguments: &999_u64.to_le_bytes(),
                ready: None,
                output: None,
                max_attempts: 5,
                cancel: false,
                now: 0,
            };
            let _ = queue.submit(&world.inputs, reserved, &task, &[NewInput::Part(PART)]);
            world.work(CRASHING);
            queue.next();
        }
        "works" => {
            crash::arm();
            world.work(CRASHING);
        }
        "works with views" => {
            crash::arm();
            for claimed in world.work_viewed(CRASHING) {
                queue.leave_output(pools, &claimed);
                queue.drain(pools, &claimed);
            }
        }
        "is woken" => {
            crash::arm();
            queue.prepare(QueueCondition::Work);
            queue.notify_workers(1);
            queue.pass_on(QueueCondition::Work);
        }
        "completes what a stream writes" => {
            crash::arm();
            while let Some((claimed, output)) = world.claim(CRASHING) {
                let cell = TimelineCell { slab: 0, cell: 0, incarnation: 0 };
                let enqueued =
                    queue.enqueue(&claimed, Some(output_of(&output)), StreamPoint { lane: 0, cell, value: 1 });
                if enqueued.and_then(|()| queue.finish(pools, &claimed, Some(&output), Views::None)).is_err() {
                    world.outputs.free(&output).unwrap();
                }
            }
        }
        "fails and drains" => {
            crash::arm();
            for drained in [true, false, false] {
                let Some((claimed, output)) = world.claim(CRASHING) else { break };
                let _ = queue.fail(pools, &claimed, Reason::Failed, "why", drained);
                if !drained {
                    queue.drain(pools, &claimed);
                }
                world.outputs.free(&output).unwrap();
            }
        }
        "takes results" => {
            crash::arm();
            for id in world.ids(TaskState::Done) {
                world.take(CRASHING, id);
            }
        }
        "cancels and purges" => {
            crash::arm();
            for of in [TaskState::Pending, TaskState::Done] {
                for id in world.ids(of) {
                    let _ = queue.dispose(pools, CRASHING, id, |state| state == of);
                }
            }
        }
        "retries" => {
            crash::arm();
            for id in world.ids(TaskState::Dead) {
                let _ = queue.retry(id);
            }
        }
        "tends" => {
            crash::arm();
            queue.tend(pools);
        }
        "is the broker" => {
            crash::arm();
            queue.detach(pools, |row| row == DEAD, Reason::Died, |_| None);
            queue.recover(pools, |row| row == DEAD);
        }
        _ => panic!("{role}"),
    }
    crash::disarm();
}

/// The processes around the crashing one.
struct Others {
    world: World,
    /// The crashing process opens these file descriptors by their numbers in this process.
    _memory: [OwnedFd; 3],
}

impl Others {
    fn start(what: &str, shape: QueueLimits, prepare: impl FnOnce(&World)) -> (Command, Self) {
        let queue = Queue::create(shape).unwrap();
        let pools = [shape.inputs, shape.outputs].map(|blocks| Pool::create(blocks).unwrap());
        let mut command = super::role(&format!("queue {what}"), &queue);
        let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        command.env(INPUTS, path(&pools[0])).env(OUTPUTS, path(&pools[1]));
        let [inputs, outputs] = pools.each_ref().map(|pool| Pool::map(pool).unwrap());
        let world = World { queue: Queue::map(&queue).unwrap(), inputs, outputs };
        world.queue.attach(PART.attachment);
        prepare(&world);
        let [inputs, outputs] = pools;
        (command, Self { world, _memory: [queue, inputs, outputs] })
    }

    /// Submits, completes and takes tasks without waiting for the crashed process.
    fn go_on(&self, first: u64) {
        let started = Instant::now();
        for number in first..first + 4 {
            let id = loop {
                if let Some(id) = self.world.submit(OURS, number, false) {
                    break id;
                }
                self.world.work(OURS);
                assert!(started.elapsed() < WATCHDOG, "watchdog: there is no slot");
            };
            loop {
                let key = self.world.queue.prepare(QueueCondition::Result);
                self.world.work(OURS);
                match self.world.take(OURS, id) {
                    Some(taken) => break assert_eq!(taken, number),
                    None => self.world.queue.sleep(QueueCondition::Result, key, Duration::from_millis(5)),
                }
                assert!(started.elapsed() < WATCHDOG, "watchdog: its task is not done");
            }
        }
    }

    /// Checks what follows a crash at any point. Returns the number of remaining results of each task, of the test or
    /// of the crashed process.
    fn finish(self, crashed: Crashed) -> BTreeMap<u64, u32> {
        let what = format!("{crashed:?}");
        let World { queue, inputs, outputs } = &self.world;
        let is_named = !queue.tasks(0, 1, |state| state != TaskState::Done).is_empty();
        if queue.begin_detach(PART.attachment).is_none() {
            assert!(!is_named, "{what}: a task names a detached segment");
            queue.attach(PART.attachment);
        }
        self.go_on(2000);
        let is_paused = crashed.fate == Fate::Paused;
        if crashed.is_dead_in_the_end() {
            queue.recover(self.world.pools(), |row| row == CRASHING);
        }
        self.go_on(3000);
        self.world.work(OURS);
        let mut results = BTreeMap::new();
        for id in self.world.ids(TaskState::Done) {
            *results.entry(self.world.take(OURS, id).unwrap()).or_insert(0) += 1;
        }
        assert!(results.values().all(|count| *count == 1), "{what}: {results:?}");
        for id in self.world.ids(TaskState::Dead) {
            queue.dispose(self.world.pools(), OURS, id, |_| true).unwrap();
        }
        // By now all processes have ended. One that was only paused has nothing left either.
        if !is_paused {
            queue.recover(self.world.pools(), |row| [CRASHING, DEAD, OURS].contains(&row));
        } else {
            queue.recover(self.world.pools(), |row| row == DEAD);
        }
        self.world.work(OURS);
        for id in self.world.ids(TaskState::Done) {
            *results.entry(self.world.take(OURS, id).unwrap()).or_insert(0) += 1;
        }
        assert_eq!(queue.begin_detach(PART.attachment), None, "{what}: no task names it");
        let idle = QueueAudit { free: queue.limits().tasks, ..QueueAudit::default() };
        assert_eq!(queue.audit(), idle, "{what}: no slot is lost");
        assert_eq!(
            (inputs.audit().free, outputs.audit().free),
            (SHAPE.inputs, SHAPE.outputs),
            "{what}: no block is lost"
        );
        results
    }
}

/// Fails unless each of the test's tasks has a result.
fn assert_all(results: &BTreeMap<u64, u32>, what: &str) {
    assert!((0..TASKS).all(|number| results.get(&number) == Some(&1)), "{what}: {results:?}");
}

fn submit(world: &World) {
    for number in 0..TASKS {
        world.submit(OURS, number, false).unwrap();
    }
}

#[test]
fn crash_in_submit_loses_no_slot() {
    let points = at_each_point(
        || Others::start("submits", SHAPE, |_| {}),
        |crashed, others| {
            let (what, is_paused) = (format!("{crashed:?}"), crashed.fate == Fate::Paused);
            let results = others.finish(crashed);
            assert!(!is_paused || results.len() == 3, "{what}: {results:?}");
        },
    );
    assert_passed(&points, &[SUBMITTING]);
    let points = at_each_point(
        || Others::start("submits late", SHAPE, submit),
        |crashed, others| {
            let what = format!("{crashed:?}");
            assert_all(&others.finish(crashed), &what);
        },
    );
    assert_passed(&points, &[LATE]);
}

#[test]
fn crash_in_claim_or_completion_loses_no_task() {
    for (role, expected) in [
        ("works", &[CLAIMING, COMPLETING][..]),
        ("works with views", &[COMPLETING, VIEWING]),
        ("is woken", &[WAKING]),
        ("completes what a stream writes", &[QUEUEING]),
        ("fails and drains", &[FAILING]),
    ] {
        let points = at_each_point(
            || Others::start(role, SHAPE, submit),
            |crashed, others| {
                let what = format!("{role}: {crashed:?}");
                assert_all(&others.finish(crashed), &what);
            },
        );
        assert_passed(&points, expected);
    }
}

#[test]
fn crash_in_notify_loses_no_wake() {
    let sleeper = |world: &World| {
        submit(world);
        // As a thread that is about to sleep.
        for event in [QueueCondition::Work, QueueCondition::Space, QueueCondition::Result] {
            world.queue.prepare(event);
        }
    };
    let points = at_each_point(
        || Others::start("works", SHAPE, sleeper),
        |crashed, others| {
            let what = format!("{crashed:?}");
            assert_all(&others.finish(crashed), &what);
        },
    );
    assert_passed(&points, &[NOTIFYING]);
}

// Holds 180.
#[test]
fn crash_in_take_loses_no_result() {
    let done = |world: &World| {
        submit(world);
        world.work(OURS);
    };
    let points =
        at_each_point(|| Others::start("takes results", SHAPE, done), |crashed, others| drop(others.finish(crashed)));
    assert_passed(&points, &[TAKING]);
    // The worker is dead, which the broker does not know yet.
    let viewed = |world: &World| {
        submit(world);
        world.work_viewed(DEAD);
    };
    let points =
        at_each_point(|| Others::start("takes results", SHAPE, viewed), |crashed, others| drop(others.finish(crashed)));
    assert_passed(&points, &[TAKING_VIEWED]);
}

#[test]
fn crash_in_cancel_or_purge_frees_everything() {
    let mixed = |world: &World| {
        submit(world);
        world.work(OURS);
        for number in 10..13 {
            world.submit(OURS, number, false).unwrap();
        }
    };
    let points = at_each_point(
        || Others::start("cancels and purges", SHAPE, mixed),
        |crashed, others| drop(others.finish(crashed)),
    );
    assert_passed(&points, &[CANCELLING]);
}

#[test]
fn crash_in_retry_loses_no_task() {
    let dead = |world: &World| {
        submit(world);
        for _ in 0..5 * TASKS {
            let (claimed, output) = world.claim(OURS).unwrap();
            world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
            world.outputs.free(&output).unwrap();
        }
    };
    let points =
        at_each_point(|| Others::start("retries", SHAPE, dead), |crashed, others| drop(others.finish(crashed)));
    assert_passed(&points, &[RETRYING]);
}

/// A worker hangs, and its leases have ended.
#[test]
fn crash_in_tend_loses_no_task() {
    let hung = |world: &World| {
        submit(world);
        for _ in 0..2 {
            let (claimed, output) = world.claim(DEAD).unwrap();
            world.outputs.free(&output).unwrap();
            world.queue.extend(&claimed, 0).unwrap();
        }
    };
    let shape = QueueLimits { lease: 3_600_000, ..SHAPE };
    let points = at_each_point(
        || Others::start("tends", shape, hung),
        |crashed, others| {
            let what = format!("{crashed:?}");
            let is_paused = crashed.fate == Fate::Paused;
            // Other processes tend the queue if the crashed process does not.
            std::thread::sleep(2 * partywall_shm::queue::TEND_EVERY);
            others.world.queue.tend(others.world.pools());
            let results = others.finish(crashed);
            assert!(is_paused || results.len() as u64 == TASKS, "{what}: {results:?}");
        },
    );
    assert_passed(&points, &[TENDING]);
}

/// The broker crashes while it recovers the queue after the death of a process.
#[test]
fn crash_in_recovery_loses_no_task() {
    let left = |world: &World| {
        submit(world);
        world.work(OURS);
        // The dead process has begun to take a result, and has submitted tasks, a slot, an attempt, and blocks.
        for number in 10..12 {
            world.submit(DEAD, number, number == 10).unwrap();
        }
        world.submit(OURS, 12, false).unwrap();
        let (claimed, output) = world.claim(DEAD).unwrap();
        drop((world.queue.reserve(DEAD), world.inputs.try_take(DEAD), claimed, output));
    };
    let points = at_each_point(
        || Others::start("is the broker", SHAPE, left),
        |crashed, others| {
            let what = format!("{crashed:?}");
            // Another broker starts again.
            let is_paused = crashed.fate == Fate::Paused;
            if !is_paused {
                others.world.queue.recover(others.world.pools(), |row| row == DEAD);
            }
            assert_all(&others.finish(crashed), &what);
        },
    );
    assert_passed(&points, &[QUEUE_RECOVERED]);
}

static RETRIED: OnceLock<Others> = OnceLock::new();

/// Claims the pending task as soon as a late worker has drained its attempt.
fn claim_at_once(point: &'static str) {
    if !point.starts_with("queue: attempt drained") {
        return points::arm(0, claim_at_once);
    }
    let world = &RETRIED.get().unwrap().world;
    world.queue.claim(OURS, &world.queue.next().unwrap()).unwrap();
}

/// A worker hangs in the last attempt. The dead letter is retried, and the same process claims it again while the first
/// attempt ends.
#[test]
fn late_worker_does_not_end_a_retried_attempt() {
    let shape = QueueLimits { lease: 3_600_000, ..SHAPE };
    let World { queue, inputs, outputs } = &RETRIED.get_or_init(|| Others::start("works", shape, |_| {}).1).world;
    let task = NewTask {
        kind: b"",
        arguments: b"",
        ready: None,
        output: Some(Contents::of_bytes(8)),
        max_attempts: 1,
        cancel: false,
        now: 0,
    };
    let id = queue.submit(inputs, queue.reserve(OURS).unwrap(), &task, &[]).unwrap();
    let pools = Pools { inputs, outputs };
    let late = queue.claim(OURS, &queue.next().unwrap()).unwrap();
    queue.extend(&late, 0).unwrap();
    queue.tend(pools);
    queue.retry(id).unwrap();
    points::arm(0, claim_at_once);
    let output = outputs.try_take(OURS).unwrap();
    assert!(queue.complete(pools, &late, Some(output_of(&output)), Views::None).is_err());
    assert_eq!(points::disarm(), None);
    assert_eq!(queue.state(id), TaskState::Claimed { row: OURS, attempt: 2 });
}

const INPUTS: &str = "PARTYWALL_TEST_INPUTS";
const OUTPUTS: &str = "PARTYWALL_TEST_OUTPUTS";
