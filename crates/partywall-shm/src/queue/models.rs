// Holds 26.
//! Queues under the model checker.
#![allow(clippy::unwrap_used, reason = "a model fails by panicking, as tests do")]

use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::{Arc, atomic::AtomicU64},
    thread,
};

use super::*;
use crate::{MAX_SLEEP, slots::HeldSlot};

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn output_of(held: &HeldSlot) -> NewOutput<'_> {
    NewOutput { held, contents: Contents::of_bytes(8) }
}

const WORKER: Row = 1;
const OTHER: Row = 2;
const READER: Row = 3;

/// A queue, and one block in each of its pools.
struct World {
    queue: Queue,
    inputs: Slots,
    outputs: Slots,
    /// What is in the blocks: the checker fails when one is written while another thread may read it.
    input: UnsafeCell<u64>,
    output: UnsafeCell<u64>,
}

impl World {
    fn new(tasks: u32) -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        let header = QueueHeader {
            tail: zero(),
            work: EventCount::new(),
            zero_80: std::array::from_fn(|_| zero()),
            head: zero(),
            space: EventCount::new(),
            zero_144: std::array::from_fn(|_| zero()),
            late: zero(),
            late_claimed: zero(),
            tended: zero(),
            results: EventCount::new(),
            completed: zero(),
            returned: zero(),
            detached: zero(),
            zero_248: zero(),
            attachments: std::array::from_fn(|_| AttachmentEntry::new()),
        };
        let queue = Queue {
            limits: QueueLimits { tasks, inputs: 1, outputs: 1, lease: 0 },
            header: vec![header],
            tasks: (0..tasks).map(|_| TaskSlot::new()).collect(),
            bodies: (0..tasks).map(|_| Body::new()).collect(),
        };
        let (input, output) = (UnsafeCell::new(0), UnsafeCell::new(0));
        Arc::new(Self { queue, inputs: Slots::new(1, 1), outputs: Slots::new(1, 1), input, output })
    }

    fn pools(&self) -> Pools<'_> {
        Pools { inputs: &self.inputs, outputs: &self.outputs }
    }

    fn submit(&self, row: Row, inputs: &[NewInput<'_>]) -> Option<TaskId> {
        let reserved = self.queue.reserve(row)?;
        let task =
            NewTask { kind: b"", arguments: b"", ready: None, output: None, max_attempts: 9, cancel: false, now: 0 };
        let id = self.queue.submit(&self.inputs, reserved, &task, inputs).ok()?;
        self.queue.notify_workers(1);
        Some(id)
    }

    /// Claims a task, and sleeps until there is one.
    fn claim(&self, row: Row) -> Claimed {
        let claimed = loop {
            let key = self.queue.prepare(QueueCondition::Work);
            match self.queue.next() {
                Some(candidate) => {
                    if let Some(claimed) = self.queue.claim(row, &candidate) {
                        break claimed;
                    }
                }
                None => self.queue.sleep(QueueCondition::Work, key, MAX_SLEEP),
            }
        };
        self.queue.pass_on(QueueCondition::Work);
        claimed
    }

    fn read_input(&self) -> u64 {
        // SAFETY: loom checks it: nobody writes the block now.
        #[allow(unsafe_code)]
        self.input.with(|input| unsafe { *input })
    }

    fn write_input(&self, value: u64) {
        // SAFETY: loom checks it: nobody else uses the block now.
        #[allow(unsafe_code)]
        self.input.with_mut(|input| unsafe { *input = value });
    }

    fn write_output(&self, value: u64) {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        self.output.with_mut(|output| unsafe { *output = value });
    }

    fn read_output(&self) -> u64 {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        self.output.with(|output| unsafe { *output })
    }

    fn take_back(&self, claimed: &Claimed) -> bool {
        let seen = self.queue.tasks[claimed.index].load();
        seen == claimed.word && self.queue.take_back(self.pools(), claimed.index, seen, Reason::Lease).is_ok()
    }
}

#[test]
fn no_wake_is_lost_and_no_task_claimed_twice() {
    check(2, || {
        let world = World::new(2);
        let submitter = {
            let world = world.clone();
            thread::spawn(move || world.submit(READER, &[]).unwrap())
        };
        let worker = {
            let world = world.clone();
            thread::spawn(move || world.claim(WORKER).id())
        };
        let first = world.submit(OTHER, &[]).unwrap();
        let claimed = world.claim(OTHER).id();
        let (second, other) = (submitter.join().unwrap(), worker.join().unwrap());
        assert!([first, second].contains(&claimed) && [first, second].contains(&other) && claimed != other);
    });
}

#[test]
fn recovery_wakes_workers_that_a_dead_one_left_asleep() {
    check(3, || {
        let world = World::new(2);
        let worker = {
            let world = world.clone();
            thread::spawn(move || world.claim(WORKER))
        };
        // A notifier has woken another worker, which died before it set the mark again.
        world.queue.control().work.clear_mark();
        world.submit(READER, &[]).unwrap();
        world.queue.recover(world.pools(), |row| row == OTHER);
        worker.join().unwrap();
    });
}

#[test]
fn submitter_that_head_passes_loses_no_task() {
    check(3, || {
        let world = World::new(3);
        let slow = world.queue.reserve(READER).unwrap();
        world.submit(OTHER, &[]).unwrap();
        let worker = {
            let world = world.clone();
            thread::spawn(move || [world.claim(WORKER).id(), world.claim(WORKER).id()])
        };
        let task =
            NewTask { kind: b"", arguments: b"", ready: None, output: None, max_attempts: 9, cancel: false, now: 0 };
        let id = world.queue.submit(&world.inputs, slow, &task, &[]).unwrap();
        world.queue.notify_workers(1);
        assert!(worker.join().unwrap().contains(&id));
    });
}

// Holds 210.
#[test]
fn input_is_not_written_while_a_fenced_attempt_reads_it() {
    check(2, || {
        let world = World::new(1);
        let block = world.inputs.try_take(READER).unwrap();
        world.write_input(7);
        let id = world.submit(READER, &[NewInput::Block(&block, 0, Contents::of_bytes(1))]).unwrap();
        let claimed = world.claim(WORKER);
        let old = {
            let world = world.clone();
            thread::spawn(move || {
                assert_eq!(world.read_input(), 7);
                world.queue.complete(world.pools(), &claimed, None, Views::None).is_ok()
            })
        };
        let taken_back = world.take_back(&claimed);
        if taken_back {
            let again = world.claim(OTHER);
            assert_eq!((again.id(), again.attempt()), (id, 2));
            assert_eq!(world.read_input(), 7);
            world.queue.complete(world.pools(), &again, None, Views::None).unwrap();
        }
        // Its next holder writes it.
        if let Some(_held) = world.inputs.try_take(READER) {
            world.write_input(8);
        }
        assert_eq!(old.join().unwrap(), !taken_back, "there is one result");
        let taken = world.queue.take(world.pools(), READER, id).unwrap();
        assert_eq!(taken.attempt, if taken_back { 2 } else { 1 });
        assert!(world.queue.reserve(READER).is_some(), "the slot is free");
    });
}

#[test]
fn result_is_seen_with_its_output_by_one_reader() {
    check(2, || {
        let world = World::new(1);
        let id = world.submit(READER, &[]).unwrap();
        let claimed = world.claim(WORKER);
        let worker = {
            let world = world.clone();
            thread::spawn(move || {
                let output = world.outputs.try_take(WORKER).unwrap();
                world.write_output(49);
                world.queue.complete(world.pools(), &claimed, Some(output_of(&output)), Views::None).unwrap();
            })
        };
        let read = move |world: &World, row| {
            let Ok(taken) = world.queue.take(world.pools(), row, id) else { return 0 };
            let output = taken.output.unwrap();
            assert_eq!(world.read_output(), 49);
            world.outputs.free(&output).unwrap();
            1
        };
        let reader = {
            let world = world.clone();
            thread::spawn(move || read(&world, OTHER))
        };
        let ours = read(&world, READER);
        let theirs = reader.join().unwrap();
        worker.join().unwrap();
        assert_eq!(ours + theirs + read(&world, READER), 1);
        assert!(world.outputs.try_take(READER).is_some(), "the output is free");
    });
}

#[test]
fn viewed_output_is_not_written_before_the_worker_has_drained() {
    check(3, || {
        let world = World::new(1);
        let id = world.submit(READER, &[]).unwrap();
        let claimed = world.claim(WORKER);
        let output = world.outputs.try_take(WORKER).unwrap();
        world.write_output(49);
        world.queue.complete(world.pools(), &claimed, Some(output_of(&output)), Views::Output).unwrap();
        let worker = {
            let world = world.clone();
            thread::spawn(move || {
                assert_eq!(world.read_output(), 49);
                world.queue.leave_output(world.pools(), &claimed);
                world.queue.drain(world.pools(), &claimed);
            })
        };
        let taken = world.queue.take(world.pools(), READER, id).unwrap();
        let held = taken.output.unwrap();
        match taken.viewed {
            true => world.queue.release_output(world.pools(), id, taken.attempt, &held),
            false => world.outputs.free(&held),
        }
        .unwrap();
        // Its next holder writes it.
        if let Some(held) = world.outputs.try_take(OTHER) {
            world.write_output(64);
            world.outputs.free(&held).unwrap();
        }
        worker.join().unwrap();
        assert!(world.outputs.try_take(READER).is_some(), "the output is free");
        assert!(world.queue.reserve(READER).is_some(), "the slot is free");
    });
}

#[test]
fn attempt_that_drains_last_frees_the_slot() {
    check(3, || {
        let world = World::new(1);
        let id = world.submit(READER, &[]).unwrap();
        let old = world.claim(WORKER);
        assert!(world.take_back(&old));
        let again = world.claim(OTHER);
        let drain = {
            let world = world.clone();
            thread::spawn(move || world.queue.drain(world.pools(), &old))
        };
        world.queue.complete(world.pools(), &again, None, Views::None).unwrap();
        world.queue.take(world.pools(), READER, id).unwrap();
        drain.join().unwrap();
        assert!(world.queue.reserve(READER).is_some());
    });
}

#[test]
fn task_passed_over_for_an_open_record_is_found_once_it_drains() {
    check(3, || {
        let world = World::new(1);
        let id = world.submit(READER, &[]).unwrap();
        let all = [(); RECORDS].map(|()| {
            let claimed = world.claim(WORKER);
            assert!(world.take_back(&claimed));
            claimed
        });
        let drain = {
            let world = world.clone();
            thread::spawn(move || world.queue.drain(world.pools(), &all[0]))
        };
        assert_eq!(world.claim(OTHER).id(), id);
        drain.join().unwrap();
    });
}

// Holds 216.
#[test]
fn attachment_ends_or_a_task_names_it() {
    check(3, || {
        let world = World::new(1);
        world.queue.attach(0);
        let submitter = {
            let world = world.clone();
            let part = AttachedPart { attachment: 0, offset: 0, contents: Contents::of_bytes(1) };
            thread::spawn(move || world.submit(READER, &[NewInput::Part(part)]))
        };
        let in_use = world.queue.begin_detach(0);
        // A refused detach may have been seen as if it were granted, and then nothing is submitted.
        let submitted = submitter.join().unwrap();
        assert!(in_use.is_some() || submitted.is_none(), "a task names a segment that may be gone");
        assert_eq!(world.queue.is_attached(0), in_use.is_some());
    });
}
