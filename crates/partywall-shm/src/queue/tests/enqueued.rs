//! Tasks whose work is on a GPU: inputs that are not complete yet, and results that are not.

use super::*;

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
        world.queue.enqueue(&claimed, Some(output_of(&output)), StreamPoint { lane: 0, cell, value: 7 }).unwrap();
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
    world.queue.enqueue(&claimed, Some(output_of(&output)), StreamPoint { lane: 0, cell, value: 1 }).unwrap();
    assert!(world.queue.is_claimed(&claimed));
    assert_eq!(
        world.queue.enqueue(&claimed, Some(output_of(&output)), StreamPoint { lane: 0, cell, value: 1 }),
        Err(Fenced)
    );
    world.queue.finish(world.pools(), &claimed, Some(&output), Views::None).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

// Holds 215.
#[test]
fn output_of_an_enqueued_task_is_taken_once_it_is_done() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    assert_eq!(world.queue.output(id), Err(TaskState::Pending));
    let claimed = world.claim(WORKER).unwrap();
    assert_eq!(world.queue.output(id), Err(TaskState::Claimed { row: WORKER, attempt: 1 }));
    let held = world.outputs.try_take(WORKER).unwrap();
    let at = StreamPoint { lane: 31, cell: TimelineCell { slab: 1, cell: 2, incarnation: u32::MAX }, value: 4 };
    world.queue.enqueue(&claimed, Some(output_of(&held)), at).unwrap();
    let output = world.queue.output(id).unwrap();
    assert_eq!((output.attempt, output.contents, output.pending), (1, TASK.output, Some((WORKER, at))));
    let take = || world.queue.take_output(world.pools(), SUBMITTER, &output);
    assert_eq!(take(), Err(TaskState::Enqueued { row: WORKER, attempt: 1 }));
    world.queue.finish(world.pools(), &claimed, Some(&held), Views::None).unwrap();
    assert_eq!(world.queue.output(id), Ok(Output { pending: None, ..output }));
    let taken = take().unwrap().output.unwrap();
    assert_eq!(taken.index(), output.block.unwrap().index);
    world.outputs.free(&taken).unwrap();
    assert_eq!((take(), world.queue.output(id)), (Err(TaskState::Gone), Err(TaskState::Gone)));
    world.assert_left(NOTHING, 0, 0);
}

// Holds 215.
#[test]
fn output_of_an_attempt_that_failed_is_not_the_result() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let at = StreamPoint { lane: 0, cell: TimelineCell { slab: 0, cell: 0, incarnation: 0 }, value: 1 };
    let enqueue = || {
        let claimed = world.claim(WORKER).unwrap();
        let held = world.outputs.try_take(WORKER).unwrap();
        world.queue.enqueue(&claimed, Some(output_of(&held)), at).unwrap();
        (claimed, held)
    };
    let _lost = enqueue();
    let read = world.queue.output(id).unwrap();
    world.queue.recover(world.pools(), |row| row == WORKER);
    let take = || world.queue.take_output(world.pools(), SUBMITTER, &read);
    assert_eq!(take(), Err(TaskState::Pending));
    for attempt in 2..=TASK.max_attempts {
        let claimed = world.claim(OTHER).unwrap();
        assert_eq!(claimed.attempt(), attempt);
        world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
    }
    // The same worker has it again, and the same block.
    world.queue.retry(id).unwrap();
    let (again, held) = enqueue();
    assert_eq!((again.attempt(), held.index()), (4, read.block.unwrap().index));
    world.queue.finish(world.pools(), &again, Some(&held), Views::None).unwrap();
    assert_eq!(take(), Err(TaskState::Done));
    assert_eq!(world.take(SUBMITTER, id), Ok(4));
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
    world.assert_left(QueueAudit { dead: 1, open: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.queue.retry(id), Err(NotRetried::InputsLost));
    world.queue.dispose(world.pools(), OTHER, id, |_| true).unwrap();
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.drain(world.pools(), &fenced);
    world.assert_left(NOTHING, 0, 0);
}
