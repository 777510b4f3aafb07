#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use partywall_os::map::SharedMap;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::{
    MAX_SLEEP,
    members::now,
    pool::{Held, Pool},
    topic::TimelineCell,
};

const SHAPE: Shape = Shape { tasks: 4, inputs: 8, outputs: 8, lease: 0 };
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
    fn new(shape: Shape) -> Self {
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
        let blocks: Vec<_> = blocks.iter().map(NewInput::Block).collect();
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
        self.queue.complete(self.pools(), claimed, Some(&output)).inspect_err(|_| assert!(self.outputs.free(&output)))
    }

    fn take(&self, row: Row, id: TaskId) -> Result<u8, TaskState> {
        let taken = self.queue.take(self.pools(), row, id)?;
        assert!(self.outputs.free(&taken.output.unwrap()));
        Ok(taken.attempt)
    }

    /// Fails the test unless nothing is left but these tasks, and the blocks that they have.
    fn assert_left(&self, audit: Audit, inputs: u32, outputs: u32) {
        let shape = self.queue.shape();
        let used = audit.pending + audit.claimed + audit.enqueued + audit.done + audit.dead + audit.ending;
        assert_eq!(self.queue.audit(), Audit { free: shape.tasks - used, ..audit });
        let free = |pool: &Pool| pool.audit().free;
        assert_eq!((shape.inputs - free(&self.inputs), shape.outputs - free(&self.outputs)), (inputs, outputs));
    }
}

const TASK: NewTask<'_> =
    NewTask { kind: b"sqrt", arguments: b"seven", ready: None, output: 8, max_attempts: 3, cancel: false, now: 77 };

/// A part whose attachment's number has bits in both halves.
const PART: Part = Part { attachment: 0xfedc_ba98, offset: MAX_PART - 1, bytes: MAX_PART - 2 };

const NOTHING: Audit = Audit {
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
    world.assert_left(Audit { claimed: 1, ..NOTHING }, 2, 0);
    world.complete(&claimed).unwrap();
    world.assert_left(Audit { done: 1, ..NOTHING }, 0, 1);
    assert_eq!(world.complete(&claimed), Err(Fenced), "a second time");
    assert_eq!(world.take(OTHER, id), Ok(1));
    assert_eq!(world.take(OTHER, id), Err(TaskState::Gone));
    assert_eq!(world.queue.describe(id), None);
    world.assert_left(NOTHING, 0, 0);
    assert_eq!(world.queue.totals(), (1, 0));
}

/// Submits a task that names [`PART`], between two blocks.
fn submit_part(world: &World) -> Result<TaskId, NotSubmitted> {
    let reserved = world.queue.reserve(SUBMITTER).unwrap();
    let blocks = [(); 2].map(|()| world.inputs.try_take(SUBMITTER).unwrap());
    let inputs = [NewInput::Block(&blocks[0]), NewInput::Part(PART), NewInput::Block(&blocks[1])];
    let submitted = world.queue.submit(&world.inputs, reserved, &TASK, &inputs);
    if submitted.is_err() {
        blocks.iter().for_each(|block| assert!(world.inputs.free(block)));
    }
    submitted
}

#[test]
fn task_names_parts_of_attached_segments_only() {
    let world = World::new(SHAPE);
    assert_eq!(submit_part(&world), Err(NotSubmitted::Detached(PART.attachment)));
    world.assert_left(NOTHING, 0, 0);
    world.queue.attach(PART.attachment);
    let id = submit_part(&world).unwrap();
    let [Input::Block(_), Input::Part(part), Input::Block(_)] = world.queue.describe(id).unwrap().inputs[..] else {
        panic!("the inputs come in their order")
    };
    assert_eq!(part, PART);
    let other = PART.attachment - MAX_ATTACHMENTS;
    assert!(world.queue.is_attached(PART.attachment) && !world.queue.is_attached(other), "of the same entry");
    assert_eq!((world.queue.audit().attached, world.queue.all_uses()), (1, BTreeMap::from([(PART.attachment, 1)])));
    assert_eq!(attachment_number(MAX_ATTACHMENTS - 1, u32::MAX / MAX_ATTACHMENTS), Some(u32::MAX));
    assert_eq!(attachment_number(0, u32::MAX / MAX_ATTACHMENTS + 1), None);
}

#[test]
fn attachment_stays_as_long_as_an_attempt_may_read_it() {
    let world = World::new(SHAPE);
    world.queue.attach(PART.attachment);
    let id = submit_part(&world).unwrap();
    let in_use = Some(InUse { tasks: 1, first: id });
    let detach = || world.queue.begin_detach(PART.attachment);
    assert_eq!(detach(), in_use, "pending");
    let old = world.claim(WORKER).unwrap();
    assert_eq!(detach(), in_use, "claimed");
    assert_eq!(world.queue.detach(world.pools(), |row| row == WORKER, Reason::Died, |_| None), 1);
    let claimed = world.claim(OTHER).unwrap();
    world.complete(&claimed).unwrap();
    assert_eq!(detach(), in_use, "done, and the fenced attempt may still read");
    assert!(world.queue.is_attached(PART.attachment), "a refused detach changes nothing");
    world.queue.drain(world.pools(), &old);
    assert_eq!((detach(), world.queue.detached()), (None, 1));
    assert_eq!(submit_part(&world), Err(NotSubmitted::Detached(PART.attachment)));
    assert_eq!(world.take(SUBMITTER, id), Ok(2));
}

#[test]
fn attachment_stays_for_a_dead_letter_and_for_a_task_that_is_described() {
    let world = World::new(SHAPE);
    world.queue.attach(PART.attachment);
    let id = submit_part(&world).unwrap();
    for _ in 0..TASK.max_attempts {
        let claimed = world.claim(WORKER).unwrap();
        world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
    }
    assert_eq!(world.queue.begin_detach(PART.attachment), Some(InUse { tasks: 1, first: id }), "it may be retried");
    world.queue.dispose(world.pools(), OTHER, id, |state| state == TaskState::Dead).unwrap();
    // A submitter that is stopped before its task is pending, as far as the memory shows.
    let reserved = world.queue.reserve(SUBMITTER).unwrap();
    world.queue.bodies[reserved.index].write(SUBMITTER, &TASK, &[NewInput::Part(PART)]);
    assert_eq!(world.queue.begin_detach(PART.attachment).map(|in_use| in_use.tasks), Some(1));
    world.queue.recover(world.pools(), |row| row == SUBMITTER);
    assert_eq!(world.queue.begin_detach(PART.attachment), None);
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

#[test]
fn endless_task_costs_its_own_place_only() {
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
fn fenced_attempt_keeps_the_inputs_and_completes_nothing() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let lost = world.claim(OTHER).unwrap();
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    let again = world.claim(WORKER).unwrap();
    world.complete(&again).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(2));
    // The old worker may still read the inputs, and its place cannot be another's.
    world.assert_left(Audit { ending: 1, open: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.complete(&lost), Err(Fenced));
    world.assert_left(NOTHING, 0, 0);
    assert_eq!(world.complete(&lost), Err(Fenced));
}

#[test]
fn death_of_a_worker_gives_its_task_and_blocks_back() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let lost = world.claim(WORKER).unwrap();
    let _output = world.outputs.try_take(WORKER).unwrap();
    let recover = || world.queue.recover(world.pools(), |row| row == WORKER);
    assert_eq!((recover(), recover()), (1, 0));
    world.assert_left(Audit { pending: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.queue.failures(id).0, [(1, Reason::Died)]);
    let again = world.claim(OTHER).unwrap();
    assert_eq!((again.id(), again.attempt(), lost.id()), (id, 2, id));
    world.complete(&again).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(2));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn last_attempt_makes_a_dead_letter_that_can_be_late() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    for text in ["one", "two"] {
        let claimed = world.claim(WORKER).unwrap();
        world.queue.fail(world.pools(), &claimed, Reason::Failed, text, true).unwrap();
        assert_eq!(world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true), Err(Fenced));
    }
    let claimed = world.claim(WORKER).unwrap();
    world.queue.fail(world.pools(), &claimed, Reason::Dropped, "", false).unwrap();
    assert_eq!((world.queue.state(id), world.claim(WORKER)), (TaskState::Dead, None));
    let reasons = vec![(1, Reason::Failed), (2, Reason::Failed), (3, Reason::Dropped)];
    assert_eq!(world.queue.failures(id).0, reasons);
    world.assert_left(Audit { dead: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.retry(id).unwrap();
    assert_eq!(world.queue.retry(id), Err(TaskState::Pending));
    let claimed_again = world.claim(WORKER).unwrap();
    assert_eq!((claimed_again.id(), claimed_again.attempt()), (id, 1));
    world.queue.drain(world.pools(), &claimed);
    world.complete(&claimed_again).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn failure_keeps_its_text() {
    let world = World::new(SHAPE);
    let long = "e".repeat(MAX_REASON + 10);
    for (text, kept) in [("no such file", "no such file"), (&long, &long[..MAX_REASON]), ("", "")] {
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        world.queue.fail(world.pools(), &claimed, Reason::Failed, text, true).unwrap();
        assert_eq!(world.queue.failures(id), (vec![(1, Reason::Failed)], kept.as_bytes().to_vec()));
        world.queue.dispose(world.pools(), SUBMITTER, id, |_| true).unwrap();
    }
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn pending_task_can_be_cancelled_and_a_running_one_not() {
    let world = World::new(SHAPE);
    let [first, second] = [(); 2].map(|()| world.submit().unwrap());
    let cancel = |id| world.queue.dispose(world.pools(), SUBMITTER, id, |state| state == TaskState::Pending);
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!((claimed.id(), cancel(first)), (first, Err(TaskState::Claimed { row: WORKER, attempt: 1 })));
    assert_eq!((cancel(second), cancel(second)), (Ok(()), Err(TaskState::Gone)));
    assert_eq!(world.claim(WORKER), None);
    world.complete(&claimed).unwrap();
    assert_eq!(cancel(first), Err(TaskState::Done));
    world.assert_left(Audit { done: 1, ..NOTHING }, 0, 1);
    world.queue.dispose(world.pools(), OTHER, first, |state| state == TaskState::Done).unwrap();
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn tasks_end_with_their_submitter_if_they_are_to() {
    let world = World::new(SHAPE);
    let kept = world.submit().unwrap();
    let task = NewTask { cancel: true, ..TASK };
    let [done, running, pending] = [(); 3].map(|()| world.submit_with(1, &task).unwrap());
    let claims = [kept, done, running].map(|id| {
        let claimed = world.claim(WORKER).unwrap();
        assert_eq!(claimed.id(), id);
        claimed
    });
    world.complete(&claims[0]).unwrap();
    world.complete(&claims[1]).unwrap();
    world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| None);
    assert_eq!(
        [kept, done, pending].map(|id| world.queue.state(id)),
        [TaskState::Done, TaskState::Gone, TaskState::Gone]
    );
    world.assert_left(Audit { done: 1, claimed: 1, ..NOTHING }, 1, 1);
    // Nobody wants its result.
    world.complete(&claims[2]).unwrap();
    world.assert_left(Audit { done: 1, ..NOTHING }, 0, 1);
    world.queue.recover(world.pools(), |row| row == SUBMITTER);
    assert_eq!(world.take(OTHER, kept), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn unwanted_task_of_a_dead_worker_is_over() {
    let world = World::new(SHAPE);
    world.submit_with(1, &NewTask { cancel: true, ..TASK }).unwrap();
    world.claim(WORKER).unwrap();
    world.queue.recover(world.pools(), |row| row == SUBMITTER);
    world.assert_left(Audit { claimed: 1, ..NOTHING }, 1, 0);
    world.queue.recover(world.pools(), |row| row == WORKER);
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn ended_lease_gives_the_task_to_another_worker() {
    let world = World::new(Shape { lease: 1000, ..SHAPE });
    let id = world.submit().unwrap();
    let begin = now();
    let hung = world.claim(OTHER).unwrap();
    world.queue.tend_at(world.pools(), begin + 500);
    assert!(world.queue.is_claimed(&hung));
    world.queue.extend(&hung, begin + 5000).unwrap();
    world.queue.tend_at(world.pools(), begin + 4999);
    assert!(world.queue.is_claimed(&hung));
    world.queue.tend_at(world.pools(), begin + 5000);
    assert!(!world.queue.is_claimed(&hung));
    assert_eq!(world.queue.extend(&hung, begin + 9000), Err(Fenced));
    let again = world.claim(WORKER).unwrap();
    assert_eq!((again.id(), again.attempt()), (id, 2));
    assert_eq!(world.complete(&hung), Err(Fenced));
    assert_eq!(world.queue.failures(id).0, [(1, Reason::Lease)]);
    world.complete(&again).unwrap();
    world.take(SUBMITTER, id).unwrap();
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn worker_that_stops_before_its_lease_gets_one() {
    let world = World::new(Shape { lease: 1000, ..SHAPE });
    world.submit().unwrap();
    let begin = now();
    let claimed = world.claim(WORKER).unwrap();
    // As if it had been stopped before it wrote its lease.
    world.queue.bodies[claimed.index].lease.store(0, Ordering::Relaxed);
    world.queue.tend_at(world.pools(), begin + 2000);
    world.queue.tend_at(world.pools(), begin + 2999);
    assert!(world.queue.is_claimed(&claimed));
    world.queue.tend_at(world.pools(), begin + 3000);
    assert!(!world.queue.is_claimed(&claimed));
}

#[test]
fn one_waiter_at_a_time_tends_the_queue() {
    let world = World::new(SHAPE);
    assert!(world.queue.tend(world.pools()));
    assert!(!world.queue.tend(world.pools()));
    world.queue.control().tended.store(u64::MAX, Ordering::Relaxed);
    assert!(world.queue.tend(world.pools()), "no member writes a time in the future");
}

#[test]
fn sleep_of_a_waiter_ends_when_leases_have_to_be_checked() {
    let every = TEND_EVERY.as_millis() as u64;
    let leased = World::new(Shape { lease: 1000, ..SHAPE });
    let tended = 7000;
    leased.queue.control().tended.store(tended, Ordering::Relaxed);
    let limit = |now| leased.queue.sleep_limit_at(now).as_millis() as u64;
    assert_eq!((limit(tended), limit(tended + 20), limit(tended + every - 1)), (every, every - 20, 1));
    assert_eq!((limit(tended + every), limit(tended + 10 * every), limit(tended - 1)), (1, 1, 1), "a check is due");
    let unlimited = World::new(Shape { lease: 0, ..SHAPE });
    assert_eq!(unlimited.queue.sleep_limit_at(tended), MAX_SLEEP);
}

#[test]
fn enqueued_task_is_decided_by_its_timeline() {
    let cell = TimelineCell { slab: 1, cell: 2, incarnation: 3 };
    for (reached, state, outputs) in
        [(Some(7), TaskState::Done, 1), (Some(6), TaskState::Pending, 0), (None, TaskState::Pending, 0)]
    {
        let world = World::new(SHAPE);
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        let output = world.outputs.try_take(WORKER).unwrap();
        world.queue.enqueue(&claimed, Some(&output), StreamPoint { lane: 0, cell, value: 7 }).unwrap();
        assert_eq!(world.queue.state(id), TaskState::Enqueued { row: WORKER, attempt: 1 });
        world.queue.detach(world.pools(), |row| row == WORKER, Reason::Died, |of| reached.filter(|_| of == cell));
        assert_eq!(world.queue.state(id), state);
        world.queue.recover(world.pools(), |row| row == WORKER);
        assert_eq!(world.queue.state(id), state);
        assert_eq!(world.outputs.audit().published, outputs);
    }
}

#[test]
fn enqueued_task_is_finished_by_its_worker() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let claimed = world.claim(WORKER).unwrap();
    let output = world.outputs.try_take(WORKER).unwrap();
    let cell = TimelineCell { slab: 0, cell: 0, incarnation: 0 };
    world.queue.enqueue(&claimed, Some(&output), StreamPoint { lane: 0, cell, value: 1 }).unwrap();
    assert!(world.queue.is_claimed(&claimed));
    assert_eq!(world.queue.enqueue(&claimed, Some(&output), StreamPoint { lane: 0, cell, value: 1 }), Err(Fenced));
    world.queue.finish(world.pools(), &claimed, Some(&output)).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn output_of_an_enqueued_task_is_taken_once_it_is_done() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    assert_eq!(world.queue.output(id), Err(TaskState::Pending));
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!(world.queue.output(id), Err(TaskState::Claimed { row: WORKER, attempt: 1 }));
    let held = world.outputs.try_take(WORKER).unwrap();
    let at = StreamPoint { lane: 31, cell: TimelineCell { slab: 1, cell: 2, incarnation: u32::MAX }, value: 4 };
    world.queue.enqueue(&claimed, Some(&held), at).unwrap();
    let output = world.queue.output(id).unwrap();
    assert_eq!((output.attempt, output.bytes, output.pending), (1, TASK.output, Some((WORKER, at))));
    let take = || world.queue.take_output(world.pools(), SUBMITTER, &output);
    assert_eq!(take(), Err(TaskState::Enqueued { row: WORKER, attempt: 1 }));
    world.queue.finish(world.pools(), &claimed, Some(&held)).unwrap();
    assert_eq!(world.queue.output(id), Ok(Output { pending: None, ..output }));
    let taken = take().unwrap().output.unwrap();
    assert_eq!(taken.index(), output.block.unwrap().index);
    assert!(world.outputs.free(&taken));
    assert_eq!((take(), world.queue.output(id)), (Err(TaskState::Gone), Err(TaskState::Gone)));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn output_of_an_attempt_that_failed_is_not_the_result() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let at = StreamPoint { lane: 0, cell: TimelineCell { slab: 0, cell: 0, incarnation: 0 }, value: 1 };
    let enqueue = || {
        let claimed = world.claim(WORKER).unwrap();
        let held = world.outputs.try_take(WORKER).unwrap();
        world.queue.enqueue(&claimed, Some(&held), at).unwrap();
        (claimed, held)
    };
    let (lost, _) = enqueue();
    let read = world.queue.output(id).unwrap();
    world.queue.recover(world.pools(), |row| row == WORKER);
    let take = || world.queue.take_output(world.pools(), SUBMITTER, &read);
    assert_eq!(take(), Err(TaskState::Pending));
    for attempt in 2..=TASK.max_attempts {
        let claimed = world.claim(OTHER).unwrap();
        assert_eq!(claimed.attempt(), attempt);
        world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
    }
    // After that the numbers begin again, and the block is another one of its generation.
    world.queue.retry(id).unwrap();
    let (again, held) = enqueue();
    assert_eq!((again.attempt(), held.index()), (lost.attempt(), read.block.unwrap().index));
    world.queue.finish(world.pools(), &again, Some(&held)).unwrap();
    assert_eq!(take(), Err(TaskState::Done));
    assert_eq!(world.take(SUBMITTER, id), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn task_whose_inputs_are_never_complete_is_a_dead_letter() {
    let cell = TimelineCell { slab: 0, cell: 5, incarnation: 0 };
    let task = NewTask { ready: Some(StreamPoint { lane: 0, cell, value: 10 }), ..TASK };
    for (reached, state) in [(10, TaskState::Pending), (9, TaskState::Dead)] {
        let world = World::new(SHAPE);
        let [first, second] = [(); 2].map(|()| world.submit_with(1, &task).unwrap());
        world.claim(WORKER).unwrap();
        world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| Some(reached));
        assert_eq!(world.queue.state(second), state);
        if state == TaskState::Dead {
            assert_eq!(world.queue.state(first), TaskState::Dead);
            assert_eq!(world.queue.failures(second).0, [(0, Reason::Inputs)]);
        }
    }
}

#[test]
fn task_with_complete_inputs_outlives_its_submitter() {
    let cell = TimelineCell { slab: 0, cell: 5, incarnation: 0 };
    let task = NewTask { ready: Some(StreamPoint { lane: 0, cell, value: 10 }), ..TASK };
    let world = World::new(SHAPE);
    let [first, second] = [(); 2].map(|()| world.submit_with(1, &task).unwrap());
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!(world.queue.describe(first).unwrap().ready, task.ready);
    world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| Some(10));
    world.queue.recover(world.pools(), |row| row == SUBMITTER);
    // Another member has the row, and its timeline the cell.
    world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| None);
    assert!(world.queue.is_claimed(&claimed));
    assert_eq!((world.queue.state(second), world.queue.describe(second).unwrap().ready), (TaskState::Pending, None));
}

#[test]
fn task_without_inputs_keeps_them_for_a_fenced_attempt_and_cannot_be_retried() {
    let cell = TimelineCell { slab: 0, cell: 5, incarnation: 0 };
    let world = World::new(SHAPE);
    let task = NewTask { ready: Some(StreamPoint { lane: 0, cell, value: 10 }), ..TASK };
    let id = world.submit_with(1, &task).unwrap();
    let fenced = world.claim(OTHER).unwrap();
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| Some(9));
    world.assert_left(Audit { dead: 1, open: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.queue.retry(id), Err(TaskState::Dead));
    world.queue.dispose(world.pools(), OTHER, id, |_| true).unwrap();
    world.assert_left(Audit { ending: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.drain(world.pools(), &fenced);
    world.assert_left(NOTHING, 0, 0);
}

/// A member that looks for ended leases is stopped before it records one, and goes on when the place has another task.
#[test]
fn slow_record_does_not_replace_a_later_one() {
    let world = World::new(Shape { tasks: 1, ..SHAPE });
    let first = world.submit().unwrap();
    let seen = world.claim(WORKER).unwrap();
    world.complete(&seen).unwrap();
    world.take(SUBMITTER, first).unwrap();
    world.submit().unwrap();
    let fenced = world.claim(OTHER).unwrap();
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    assert!(!world.queue.take_back(world.pools(), seen.index, seen.word, Reason::Lease));
    world.assert_left(Audit { pending: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.drain(world.pools(), &fenced);
    world.assert_left(Audit { pending: 1, ..NOTHING }, 1, 0);
}

/// A reader dies before it has the block of a result, and the worker is stopped before it gives the block up.
#[test]
fn output_of_a_dead_reader_and_a_slow_worker_is_not_lost() {
    let world = World::new(SHAPE);
    world.submit().unwrap();
    let claimed = world.claim(WORKER).unwrap();
    let output = world.outputs.try_take(WORKER).unwrap();
    let body = &world.queue.bodies[claimed.index];
    body.record(1).set_output(Some(BlockId { index: output.index(), generation: output.generation() }), None);
    world.queue.record(claimed.index, claimed.word, body::RecordWord::drained(None, claimed.word));
    let place = &world.queue.places[claimed.index];
    assert!(place.change(claimed.word, claimed.word.with(State::Ending, OTHER)));
    world.queue.recover(world.pools(), |row| row == OTHER);
    // The worker goes on.
    world.outputs.publish(output.index(), output.word());
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn fenced_attempts_may_fill_all_records_and_block_no_other_task() {
    let world = World::new(SHAPE);
    let id = world.submit_with(1, &NewTask { max_attempts: 100, ..TASK }).unwrap();
    let next = world.submit().unwrap();
    let mut lost = Vec::new();
    for _ in 0..RECORDS {
        let claimed = world.claim(OTHER).unwrap();
        assert_eq!(claimed.id(), id);
        world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
        lost.push(claimed);
    }
    // The next attempt would have the record of the first one.
    assert_eq!(world.claim(WORKER).unwrap().id(), next);
    assert_eq!(world.claim(WORKER), None);
    world.queue.drain(world.pools(), &lost[0]);
    assert_eq!(world.claim(WORKER).unwrap().attempt(), RECORDS as u8 + 1);
}

#[test]
fn submitter_that_dies_leaves_no_place_and_no_block() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let _reserved = world.queue.reserve(SUBMITTER).unwrap();
    let _block = world.inputs.try_take(SUBMITTER).unwrap();
    assert_eq!(world.queue.recover(world.pools(), |row| row == SUBMITTER), 1);
    world.assert_left(Audit { pending: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.claim(WORKER).unwrap().id(), id);
}

#[test]
fn slow_submitter_loses_no_task() {
    let world = World::new(SHAPE);
    let slow = world.queue.reserve(OTHER).unwrap();
    let [first, second] = [(); 2].map(|()| world.submit().unwrap());
    assert_eq!(world.claim(WORKER).unwrap().id(), first);
    // `head` has passed its place.
    let id = world.queue.submit(&world.inputs, slow, &TASK, &[]).unwrap();
    assert_eq!(world.claim(WORKER).unwrap().id(), id);
    assert_eq!(world.claim(WORKER).unwrap().id(), second);
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
#[test]
fn many_submit_claim_and_take_at_once() {
    const EACH: u32 = 2_000;
    let world = World::new(Shape { tasks: 16, inputs: 32, outputs: 32, lease: 0 });
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
                    let space = world.queue.prepare(Event::Space);
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
                            world.queue.submit(&world.inputs, reserved, &task, &[NewInput::Block(&block)]).unwrap(),
                        );
                        world.queue.notify_workers(1);
                        submitted += 1;
                        continue;
                    }
                    let Some(id) = tickets.front().copied() else {
                        world.queue.sleep(Event::Space, space, limit);
                        continue;
                    };
                    let result = world.queue.prepare(Event::Result);
                    match world.queue.take(world.pools(), row, id) {
                        Ok(taken) => {
                            assert!(world.outputs.free(&taken.output.unwrap()));
                            right.fetch_add(1, Ordering::Relaxed);
                            tickets.pop_front();
                        }
                        Err(TaskState::Gone) => panic!("it was lost"),
                        Err(_) => world.queue.sleep(Event::Result, result, limit),
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
                    let work = world.queue.prepare(Event::Work);
                    let Some(candidate) = world.queue.next() else {
                        if let Some(claimed) = lost.pop_front() {
                            world.queue.drain(world.pools(), &claimed);
                        }
                        world.queue.sleep(Event::Work, work, limit);
                        continue;
                    };
                    let Some(claimed) = world.queue.claim(row, &candidate) else { continue };
                    attempts.fetch_add(1, Ordering::Relaxed);
                    count += 1;
                    if count.is_multiple_of(7) {
                        // As when a lease ends.
                        let seen = world.queue.places[claimed.index].load();
                        assert!(world.queue.take_back(world.pools(), claimed.index, seen, Reason::Lease));
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

#[derive(Debug, Clone)]
enum Step {
    Submit(u16, bool),
    Reserve(u16),
    SubmitReserved,
    Claim(u16),
    Complete(usize),
    Fail(usize, bool),
    Drain(usize),
    Take(usize),
    Cancel(usize),
    Purge(usize),
    Retry(usize),
    Detach(u16),
    Die(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let submitter = 1..3_u16;
    let worker = 10..13_u16;
    prop_oneof![
        6 => (submitter.clone(), any::<bool>()).prop_map(|(row, cancel)| Step::Submit(row, cancel)),
        1 => submitter.clone().prop_map(Step::Reserve),
        1 => Just(Step::SubmitReserved),
        6 => worker.clone().prop_map(Step::Claim),
        4 => any::<usize>().prop_map(Step::Complete),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, drained)| Step::Fail(which, drained)),
        2 => any::<usize>().prop_map(Step::Drain),
        3 => any::<usize>().prop_map(Step::Take),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => any::<usize>().prop_map(Step::Purge),
        1 => any::<usize>().prop_map(Step::Retry),
        1 => worker.clone().prop_map(Step::Detach),
        1 => prop_oneof![submitter, worker].prop_map(Step::Die),
    ]
}

/// A simple model of a task.
#[derive(Debug, Clone)]
struct Modelled {
    state: TaskState,
    submitter: u16,
    cancel: bool,
    unwanted: bool,
    attempts: u8,
}

const MODEL_ATTEMPTS: u8 = 3;

impl Modelled {
    fn end_attempt(&mut self) {
        self.state = match (self.unwanted, self.attempts >= MODEL_ATTEMPTS) {
            (true, _) => TaskState::Gone,
            (false, true) => TaskState::Dead,
            (false, false) => TaskState::Pending,
        };
    }

    fn detach(&mut self, row: u16) {
        if matches!(self.state, TaskState::Claimed { row: worker, .. } if worker == row) {
            self.end_attempt();
        }
        if self.cancel && self.submitter == row {
            match self.state {
                TaskState::Pending | TaskState::Done | TaskState::Dead => self.state = TaskState::Gone,
                _ => self.unwanted = true,
            }
        }
    }
}

proptest! {
    /// Rows 1 and 2 submit, rows 10 to 12 work, row 20 reads.
    #[test]
    fn queue_agrees_with_its_model(steps in vec(step(), 1..150)) {
        let world = World::new(Shape { tasks: 5, inputs: 8, outputs: 16, lease: 0 });
        let mut tasks: BTreeMap<TaskId, Modelled> = BTreeMap::new();
        let mut order: Vec<TaskId> = Vec::new();
        let mut late = BTreeSet::new();
        let mut claims: Vec<Claimed> = Vec::new();
        let mut reserved: Option<(u16, Reserved, usize)> = None;
        let pick = |claims: &Vec<Claimed>, which: usize| (!claims.is_empty()).then(|| which % claims.len());
        for step in steps {
            match step {
                Step::Submit(row, cancel) => {
                    let Some(place) = world.queue.reserve(row) else {
                        // Nothing is refused while a place is free, but behind a pending task.
                        let pending = order.iter().any(|id| tasks[id].state == TaskState::Pending);
                        prop_assert!(pending || world.queue.audit().free == 0);
                        continue;
                    };
                    let Some(block) = world.inputs.try_take(row) else {
                        world.queue.give_back(place);
                        continue;
                    };
                    let task = NewTask { cancel, max_attempts: MODEL_ATTEMPTS, ..TASK };
                    let id = world.queue.submit(&world.inputs, place, &task, &[NewInput::Block(&block)]).unwrap();
                    let modelled = Modelled { state: TaskState::Pending, submitter: row, cancel, unwanted: false, attempts: 0 };
                    prop_assert!(tasks.insert(id, modelled).is_none());
                    order.push(id);
                }
                Step::Reserve(row) => if reserved.is_none() {
                    reserved = world.queue.reserve(row).map(|place| (row, place, order.len()));
                },
                Step::SubmitReserved => if let Some((row, place, at)) = reserved.take() {
                    let task = NewTask { max_attempts: MODEL_ATTEMPTS, ..TASK };
                    let id = world.queue.submit(&world.inputs, place, &task, &[]).unwrap();
                    let modelled =
                        Modelled { state: TaskState::Pending, submitter: row, cancel: false, unwanted: false, attempts: 0 };
                    prop_assert!(tasks.insert(id, modelled).is_none());
                    order.insert(at, id);
                    late.insert(id);
                },
                Step::Claim(row) => {
                    let claimed = world.claim(row);
                    let pending = |id: &&TaskId| tasks[id].state == TaskState::Pending;
                    let Some(claimed) = claimed else {
                        // Only tasks whose records are all open may be left.
                        let open = world.queue.audit().open;
                        prop_assert!(order.iter().find(pending).is_none() || open > 0);
                        continue;
                    };
                    let id = claimed.id();
                    prop_assert_eq!(tasks[&id].state, TaskState::Pending);
                    if tasks[&id].attempts == 0 && !late.contains(&id) {
                        let mut earlier = order.iter().take_while(|other| **other != id).filter(pending);
                        prop_assert!(earlier.all(|other| tasks[other].attempts > 0 || late.contains(other)));
                    }
                    let task = tasks.get_mut(&id).unwrap();
                    task.attempts += 1;
                    prop_assert_eq!(claimed.attempt(), task.attempts);
                    task.state = TaskState::Claimed { row, attempt: task.attempts };
                    claims.push(claimed);
                }
                Step::Complete(which) => if let Some(which) = pick(&claims, which) {
                    let claimed = claims.remove(which);
                    let task = tasks.get_mut(&claimed.id()).unwrap();
                    let row = claimed.word.row();
                    let stands = task.state == TaskState::Claimed { row, attempt: claimed.attempt() };
                    prop_assert_eq!(world.queue.is_claimed(&claimed), stands);
                    if world.outputs.audit().free == 0 {
                        claims.push(claimed);
                        continue;
                    }
                    prop_assert_eq!(world.complete(&claimed).is_ok(), stands);
                    if stands {
                        task.state = if task.unwanted { TaskState::Gone } else { TaskState::Done };
                    }
                },
                Step::Fail(which, drained) => if let Some(which) = pick(&claims, which) {
                    let claimed = claims.remove(which);
                    let task = tasks.get_mut(&claimed.id()).unwrap();
                    let stands = task.state == TaskState::Claimed { row: claimed.word.row(), attempt: claimed.attempt() };
                    let failed = world.queue.fail(world.pools(), &claimed, Reason::Failed, "", drained);
                    prop_assert_eq!(failed.is_ok(), stands);
                    if stands {
                        task.end_attempt();
                    }
                    if !drained {
                        claims.push(claimed);
                    }
                },
                Step::Drain(which) => if let Some(which) = pick(&claims, which)
                    && !world.queue.is_claimed(&claims[which])
                {
                    world.queue.drain(world.pools(), &claims.remove(which));
                },
                Step::Take(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let task = tasks.get_mut(&id).unwrap();
                    match world.take(20, id) {
                        Ok(attempt) => {
                            prop_assert_eq!((task.state, task.attempts), (TaskState::Done, attempt));
                            task.state = TaskState::Gone;
                        }
                        Err(state) => prop_assert_eq!(state, task.state),
                    }
                },
                Step::Cancel(which) | Step::Purge(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let of = |state| (state == TaskState::Pending) == matches!(step, Step::Cancel(_));
                    let task = tasks.get_mut(&id).unwrap();
                    let can = matches!(task.state, TaskState::Pending | TaskState::Done | TaskState::Dead) && of(task.state);
                    prop_assert_eq!(world.queue.dispose(world.pools(), 20, id, of).is_ok(), can);
                    if can {
                        task.state = TaskState::Gone;
                    }
                },
                Step::Retry(which) => if !order.is_empty() {
                    let id = order[which % order.len()];
                    let task = tasks.get_mut(&id).unwrap();
                    prop_assert_eq!(world.queue.retry(id).is_ok(), task.state == TaskState::Dead);
                    if task.state == TaskState::Dead {
                        (task.state, task.attempts) = (TaskState::Pending, 0);
                        late.insert(id);
                    }
                },
                Step::Detach(row) => {
                    world.queue.detach(world.pools(), |gone| gone == row, Reason::Detached, |_| None);
                    tasks.values_mut().for_each(|task| task.detach(row));
                }
                Step::Die(row) => {
                    world.queue.recover(world.pools(), |dead| dead == row);
                    tasks.values_mut().for_each(|task| task.detach(row));
                    claims.retain(|claimed| claimed.word.row() != row);
                    if reserved.as_ref().is_some_and(|(submitter, ..)| *submitter == row) {
                        reserved = None;
                    }
                }
            }
            for (id, task) in &tasks {
                prop_assert_eq!(world.queue.state(*id), task.state);
            }
            // Inputs are held exactly as long as an attempt may read them.
            let audit = world.queue.audit();
            prop_assert_eq!(audit.invalid, 0);
            prop_assert!(audit.open as usize <= claims.len());
            let results = tasks.values().filter(|task| task.state == TaskState::Done).count() as u32;
            prop_assert_eq!(world.outputs.audit().published, results);
        }
        for claimed in claims {
            if world.queue.fail(world.pools(), &claimed, Reason::Dropped, "", true).is_err() {
                world.queue.drain(world.pools(), &claimed);
            }
        }
        world.queue.recover(world.pools(), |_| true);
        for id in order {
            let _ = world.queue.dispose(world.pools(), 20, id, |_| true);
        }
        world.assert_left(NOTHING, 0, 0);
    }

    /// For arbitrary memory, every call returns without a panic, and no block is lost once all are dead.
    #[test]
    fn arbitrary_bytes_are_not_trusted(words in vec((any::<prop::sample::Index>(), any::<u64>(), 0..4_u8, 0..3_usize), 0..200)) {
        let shape = Shape { lease: 10, ..SHAPE };
        let queue = Queue::create(shape).unwrap();
        let pools = [Pool::create(shape.inputs).unwrap(), Pool::create(shape.outputs).unwrap()];
        let maps = [&queue, &pools[0], &pools[1]].map(|fd| SharedMap::writable(fd).unwrap());
        let [inputs, outputs] = pools.each_ref().map(|fd| Pool::map(fd).unwrap());
        let world = World { queue: Queue::map(&queue).unwrap(), inputs, outputs };
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        // Behind what is only looked at when it is mapped.
        let all = maps.each_ref().map(|map| map.atomics::<AtomicU64>(64, map.len() / 8 - 8).unwrap());
        for (index, word, sort, part) in words {
            let word = match sort {
                0 => word,
                1 => word & 0xff,
                2 => word & 0x1ff | 1 << 29,
                _ => u64::MAX << (word & 63),
            };
            all[part][index.index(all[part].len())].store(word, Ordering::Relaxed);
        }
        let use_all = |claimed: &Claimed, id: TaskId| {
            world.queue.state(id);
            world.queue.describe(id);
            world.queue.failures(id);
            if let Some(reserved) = world.queue.reserve(SUBMITTER) {
                let blocks: Vec<Held> = world.inputs.try_take(SUBMITTER).into_iter().collect();
                let mut inputs: Vec<_> = blocks.iter().map(NewInput::Block).collect();
                inputs.push(NewInput::Part(PART));
                let _ = world.queue.submit(&world.inputs, reserved, &TASK, &inputs);
            }
            if let Some(candidate) = world.queue.next() {
                world.queue.claim(WORKER, &candidate);
            }
            let _ = world.queue.extend(claimed, now());
            let _ = world.queue.complete(world.pools(), claimed, None);
            let output = world.queue.output(id);
            let _ = output.map(|output| world.queue.take_output(world.pools(), OTHER, &output));
            let _ = world.queue.take(world.pools(), OTHER, id);
            let _ = world.queue.retry(id);
            let _ = world.queue.dispose(world.pools(), OTHER, id, |_| true);
            world.queue.attach(PART.attachment);
            world.queue.all_uses();
            world.queue.begin_detach(PART.attachment);
            world.queue.tend(world.pools());
        };
        use_all(&claimed, id);
        world.queue.audit();
        world.queue.tasks(0, 100, |_| true);
        world.queue.tend_at(world.pools(), u64::MAX >> 1);
        world.queue.detach(world.pools(), |row| row % 2 == 0, Reason::Detached, |_| Some(u64::MAX));
        world.queue.recover(world.pools(), |row| row % 2 == 0);
        world.queue.recover(world.pools(), |_| true);
        for task in world.queue.tasks(0, 100, |_| true) {
            let _ = world.queue.dispose(world.pools(), OTHER, task.id, |_| true);
        }
        world.queue.recover(world.pools(), |_| true);
        for pool in [&world.inputs, &world.outputs] {
            let audit = pool.audit();
            prop_assert_eq!((audit.held, audit.handed, audit.published), (0, 0, 0));
        }
        prop_assert_eq!(world.queue.audit().invalid, 0);
        use_all(&claimed, id);
    }
}
