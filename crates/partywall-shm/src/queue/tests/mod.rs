//! Tests of queues: rule by rule, by many threads at once, and at random.

#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

mod attachments;
mod attempts;
mod audit;
mod endings;
mod enqueued;
mod random;
mod views;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use super::*;
use crate::{
    DType, MAX_SLEEP,
    members::now,
    pool::Pool,
    slots::{HeldSlot, Stale},
    topic::TimelineCell,
};

const SHAPE: QueueLimits = QueueLimits { tasks: 4, inputs: 8, outputs: 8, lease: 0 };
const SUBMITTER: Row = 1;
const WORKER: Row = 2;
const OTHER: Row = 3;

/// A queue and its pools.
struct World {
    queue: Queue,
    inputs: Pool,
    outputs: Pool,
}

impl World {
    fn new(shape: QueueLimits) -> Self {
        let pool = |blocks| Pool::map(Pool::create(blocks).unwrap()).unwrap();
        let queue = Queue::map(Queue::create(shape).unwrap()).unwrap();
        Self { queue, inputs: pool(shape.inputs), outputs: pool(shape.outputs) }
    }

    fn pools(&self) -> Pools<'_> {
        Pools { inputs: &self.inputs, outputs: &self.outputs }
    }

    fn submit_with(&self, blocks: usize, task: &NewTask<'_>) -> Option<TaskId> {
        let reserved = self.queue.reserve(SUBMITTER)?;
        let blocks: Vec<_> = (0..blocks).map(|_| self.inputs.try_take(SUBMITTER).unwrap()).collect();
        let blocks: Vec<_> = blocks.iter().map(|block| NewInput::Block(block, 0, Contents::of_bytes(1))).collect();
        let id = self.queue.submit(&self.inputs, reserved, task, &blocks).unwrap();
        self.queue.notify_workers(1);
        Some(id)
    }

    fn submit(&self) -> Option<TaskId> {
        self.submit_with(1, &TASK)
    }

    fn claim(&self, row: Row) -> Option<Claimed> {
        let candidate = self.queue.next()?;
        Some(self.queue.claim(row, &candidate).unwrap())
    }

    fn complete(&self, claimed: &Claimed) -> Result<(), Fenced> {
        let output = self.outputs.try_take(claimed.word.row()).unwrap();
        self.queue
            .complete(self.pools(), claimed, Some(output_of(&output)), Views::None)
            .inspect_err(|_| self.outputs.free(&output).unwrap())
    }

    fn take(&self, row: Row, id: TaskId) -> Result<u8, TaskState> {
        let taken = self.queue.take(self.pools(), row, id)?;
        self.outputs.free(&taken.output.unwrap()).unwrap();
        Ok(taken.attempt)
    }

    /// Fails the test unless nothing is left but these tasks, and the blocks that they have.
    fn assert_left(&self, audit: QueueAudit, inputs: u32, outputs: u32) {
        let shape = self.queue.limits();
        let used = audit.pending + audit.claimed + audit.enqueued + audit.done + audit.dead + audit.ending;
        assert_eq!(self.queue.audit(), QueueAudit { free: shape.tasks - used, ..audit });
        let free = |pool: &Pool| pool.audit().free;
        assert_eq!((shape.inputs - free(&self.inputs), shape.outputs - free(&self.outputs)), (inputs, outputs));
    }
}

const TASK: NewTask<'_> = NewTask {
    kind: b"sqrt",
    arguments: b"seven",
    ready: None,
    output: Some(Contents::of_bytes(8)),
    max_attempts: 3,
    cancel: false,
    now: 77,
};

/// A part with the largest numbers.
const PART: AttachedPart =
    AttachedPart { attachment: 0xfedc_ba98, offset: MAX_PART - 1, contents: Contents::of_bytes(MAX_PART - 2) };

fn output_of(held: &HeldSlot) -> NewOutput<'_> {
    NewOutput { held, contents: Contents::of_bytes(8) }
}

const NOTHING: QueueAudit = QueueAudit {
    free: 0,
    writing: 0,
    pending: 0,
    claimed: 0,
    enqueued: 0,
    done: 0,
    dead: 0,
    ending: 0,
    open: 0,
    invalid: 0,
    attached: 0,
};

fn take_back(world: &World, claimed: &Claimed) -> Result<(), Stale> {
    world.queue.take_back(world.pools(), claimed.index, world.queue.tasks[claimed.index].load(), Reason::Lease)
}

#[test]
fn task_goes_to_a_worker_and_its_result_to_one_reader() {
    let world = World::new(SHAPE);
    let id = world.submit_with(2, &TASK).unwrap();
    assert_eq!(world.queue.state(id), TaskState::Pending);
    let description = world.queue.describe(id).unwrap();
    assert_eq!((&description.kind[..], &description.arguments[..]), (&b"sqrt"[..], &b"seven"[..]));
    assert_eq!((description.inputs.len(), description.submitter, description.submitted), (2, SUBMITTER, 77));
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!((claimed.id(), claimed.attempt()), (id, 1));
    assert_eq!(world.queue.state(id), TaskState::Claimed { row: WORKER, attempt: 1 });
    assert_eq!(world.take(OTHER, id), Err(TaskState::Claimed { row: WORKER, attempt: 1 }));
    world.assert_left(QueueAudit { claimed: 1, ..NOTHING }, 2, 0);
    world.complete(&claimed).unwrap();
    world.assert_left(QueueAudit { done: 1, ..NOTHING }, 0, 1);
    assert_eq!(world.complete(&claimed), Err(Fenced), "a second time");
    assert_eq!(world.take(OTHER, id), Ok(1));
    assert_eq!(world.take(OTHER, id), Err(TaskState::Gone));
    assert_eq!(world.queue.describe(id), None);
    world.assert_left(NOTHING, 0, 0);
    assert_eq!(world.queue.totals(), (1, 0));
}

// Holds 218.
#[test]
fn contents_of_inputs_and_outputs_travel_with_a_task() {
    let world = World::new(QueueLimits { tasks: 1, ..SHAPE });
    let tensor = |shape: &[u64]| Contents::of_tensor(DType::F32, shape).unwrap();
    for length in [6_u64, 2, 0, 9] {
        let reserved = world.queue.reserve(SUBMITTER).unwrap();
        let block = world.inputs.try_take(SUBMITTER).unwrap();
        let inputs = [
            NewInput::Block(&block, 16, tensor(&[length, 3])),
            NewInput::Part(AttachedPart { contents: Contents::of_bytes(length), ..PART }),
        ];
        let task = NewTask { output: Some(tensor(&[2, length])), ..TASK };
        world.queue.attach(PART.attachment);
        let id = world.queue.submit(&world.inputs, reserved, &task, &inputs).unwrap();
        let found = world.queue.describe(id).unwrap();
        assert_eq!(found.output, task.output);
        let [Input::Block(_, 16, first), Input::Part(second)] = found.inputs[..] else { panic!("{found:?}") };
        assert_eq!((first, second.contents), (tensor(&[length, 3]), Contents::of_bytes(length)));
        // The worker writes less.
        let claimed = world.claim(WORKER).unwrap();
        let held = world.outputs.try_take(WORKER).unwrap();
        let output = NewOutput { held: &held, contents: tensor(&[length]) };
        world.queue.complete(world.pools(), &claimed, Some(output), Views::None).unwrap();
        assert_eq!(world.queue.output(id).unwrap().contents, Some(tensor(&[length])));
        let taken = world.queue.take(world.pools(), OTHER, id).unwrap();
        assert_eq!(taken.contents, Some(tensor(&[length])));
        world.outputs.free(&taken.output.unwrap()).unwrap();
    }
}

#[test]
fn tasks_are_claimed_in_their_order_around_the_ring() {
    let world = World::new(SHAPE);
    let mut submitted = VecDeque::new();
    for round in 0..20 {
        while let Some(id) = world.submit() {
            submitted.push_back(id);
        }
        assert_eq!(submitted.len(), 4, "round {round}");
        for _ in 0..=round % 4 {
            let claimed = world.claim(WORKER).unwrap();
            assert_eq!(Some(claimed.id()), submitted.pop_front());
            world.complete(&claimed).unwrap();
            world.take(SUBMITTER, claimed.id()).unwrap();
        }
    }
}

// Holds 211.
#[test]
fn endless_task_costs_its_own_slot_only() {
    let world = World::new(SHAPE);
    world.submit().unwrap();
    let endless = world.claim(OTHER).unwrap();
    for _ in 0..3 {
        let ids: Vec<_> = std::iter::from_fn(|| world.submit()).collect();
        assert_eq!(ids.len(), 3);
        for id in ids {
            let claimed = world.claim(WORKER).unwrap();
            assert_eq!(claimed.id(), id);
            world.complete(&claimed).unwrap();
            world.take(SUBMITTER, id).unwrap();
        }
    }
    world.complete(&endless).unwrap();
}

#[test]
fn task_that_came_back_goes_first() {
    let world = World::new(SHAPE);
    let [first, second, _] = [(); 3].map(|()| world.submit().unwrap());
    let lost = world.claim(OTHER).unwrap();
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!((lost.id(), claimed.id()), (first, second));
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    let again = world.claim(WORKER).unwrap();
    assert_eq!((again.id(), again.attempt()), (first, 2));
    assert_eq!(world.queue.failures(first).0, [(1, Reason::Detached)]);
}

#[test]
fn tasks_are_listed_with_their_outcomes() {
    let world = World::new(SHAPE);
    let dead = world.submit_with(0, &NewTask { max_attempts: 1, ..TASK }).unwrap();
    let pending = world.submit().unwrap();
    let claimed = world.claim(WORKER).unwrap();
    world.queue.fail(world.pools(), &claimed, Reason::Failed, "why", true).unwrap();
    let all = world.queue.tasks(0, 10, |_| true);
    assert_eq!(all.iter().map(|task| task.id).collect::<Vec<_>>(), [dead, pending]);
    let expected = (TaskState::Dead, 1, 1, vec![(1, Reason::Failed)], b"why".to_vec());
    let first = &all[0];
    assert_eq!((first.state, first.attempts, first.max_attempts, first.failures.clone(), first.text.clone()), expected);
    assert_eq!(world.queue.tasks(0, 10, |state| state == TaskState::Pending).len(), 1);
    assert_eq!((world.queue.tasks(1, 10, |_| true).len(), world.queue.tasks(0, 1, |_| true).len()), (1, 1));
}

/// Submitters, workers of which some forget their claims, and readers: each task has one result, and nothing is left.
// Holds 26.
#[test]
fn many_submit_claim_and_take_at_once() {
    const EACH: u32 = 2_000;
    let world = World::new(QueueLimits { tasks: 16, inputs: 32, outputs: 32, lease: 0 });
    let right = AtomicU32::new(0);
    let attempts = AtomicU64::new(0);
    let limit = Duration::from_millis(20);
    std::thread::scope(|scope| {
        for row in [1, 2] {
            let (world, right) = (&world, &right);
            scope.spawn(move || {
                let mut tickets = VecDeque::new();
                let mut submitted = 0;
                while submitted < EACH || !tickets.is_empty() {
                    let space = world.queue.prepare(QueueCondition::Space);
                    let reserved = if submitted < EACH { world.queue.reserve(row) } else { None };
                    if let Some(reserved) = reserved {
                        let block = loop {
                            if let Some(block) = world.inputs.try_take(row) {
                                break block;
                            }
                            std::thread::yield_now();
                        };
                        let arguments = submitted.to_le_bytes();
                        let task = NewTask { arguments: &arguments, max_attempts: 200, ..TASK };
                        tickets.push_back(
                            world
                                .queue
                                .submit(
                                    &world.inputs,
                                    reserved,
                                    &task,
                                    &[NewInput::Block(&block, 0, Contents::of_bytes(1))],
                                )
                                .unwrap(),
                        );
                        world.queue.notify_workers(1);
                        submitted += 1;
                        continue;
                    }
                    let Some(id) = tickets.front().copied() else {
                        world.queue.sleep(QueueCondition::Space, space, limit);
                        continue;
                    };
                    let result = world.queue.prepare(QueueCondition::Result);
                    match world.queue.take(world.pools(), row, id) {
                        Ok(taken) => {
                            world.outputs.free(&taken.output.unwrap()).unwrap();
                            right.fetch_add(1, Ordering::Relaxed);
                            tickets.pop_front();
                        }
                        Err(TaskState::Gone) => panic!("it was lost"),
                        Err(_) => world.queue.sleep(QueueCondition::Result, result, limit),
                    }
                }
            });
        }
        for row in [10, 11] {
            let (world, right, attempts) = (&world, &right, &attempts);
            scope.spawn(move || {
                let mut count = 0_u32;
                let mut lost = VecDeque::new();
                while right.load(Ordering::Relaxed) < 2 * EACH {
                    let work = world.queue.prepare(QueueCondition::Work);
                    let Some(candidate) = world.queue.next() else {
                        if let Some(claimed) = lost.pop_front() {
                            world.queue.drain(world.pools(), &claimed);
                        }
                        world.queue.sleep(QueueCondition::Work, work, limit);
                        continue;
                    };
                    let Some(claimed) = world.queue.claim(row, &candidate) else { continue };
                    attempts.fetch_add(1, Ordering::Relaxed);
                    count += 1;
                    if count.is_multiple_of(7) {
                        // As when a lease ends.
                        let seen = world.queue.tasks[claimed.index].load();
                        world.queue.take_back(world.pools(), claimed.index, seen, Reason::Lease).unwrap();
                        lost.push_back(claimed);
                        if lost.len() > 2 {
                            assert_eq!(world.complete(&lost.pop_front().unwrap()), Err(Fenced));
                        }
                    } else {
                        world.complete(&claimed).unwrap();
                    }
                }
                while let Some(claimed) = lost.pop_front() {
                    world.queue.drain(world.pools(), &claimed);
                }
            });
        }
    });
    assert_eq!(right.into_inner(), 2 * EACH);
    world.assert_left(NOTHING, 0, 0);
    let (completed, returned) = world.queue.totals();
    assert_eq!((completed, completed + returned), (2 * u64::from(EACH), attempts.into_inner()));
}
