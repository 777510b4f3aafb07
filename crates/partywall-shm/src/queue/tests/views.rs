//! Workers that end an attempt while their program may still use its blocks.

use super::*;

/// Completes a task, and leaves its record open. Returns the attempt.
fn complete_viewed(world: &World) -> (TaskId, Claimed) {
    let id = world.submit().unwrap();
    let claimed = world.claim(WORKER).unwrap();
    let output = world.outputs.try_take(WORKER).unwrap();
    world.queue.complete(world.pools(), &claimed, Some(output_of(&output)), Views::Output).unwrap();
    (id, claimed)
}

#[test]
fn viewed_inputs_keep_no_output() {
    for left_first in [false, true] {
        let world = World::new(SHAPE);
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        let output = world.outputs.try_take(WORKER).unwrap();
        let views = if left_first { Views::Output } else { Views::Inputs };
        world.queue.complete(world.pools(), &claimed, Some(output_of(&output)), views).unwrap();
        if left_first {
            world.queue.leave_output(world.pools(), &claimed);
        }
        assert_eq!(world.take(OTHER, id), Ok(1));
        world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 0);
        world.queue.drain(world.pools(), &claimed);
        world.assert_left(NOTHING, 0, 0);
        // Left after the result was given back, or purged.
        for purged in [false, true] {
            let (id, claimed) = complete_viewed(&world);
            if purged {
                world.queue.dispose(world.pools(), OTHER, id, |_| true).unwrap();
            } else {
                let held = take(&world, id);
                release(&world, id, &held).unwrap();
            }
            world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
            world.queue.leave_output(world.pools(), &claimed);
            world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 0);
            world.queue.drain(world.pools(), &claimed);
            world.assert_left(NOTHING, 0, 0);
        }
    }
}

fn take(world: &World, id: TaskId) -> HeldSlot {
    let taken = world.queue.take(world.pools(), OTHER, id).unwrap();
    assert!(taken.viewed);
    taken.output.unwrap()
}

fn release(world: &World, id: TaskId, held: &HeldSlot) -> Result<(), Stale> {
    world.queue.release_output(world.pools(), id, 1, held)
}

// Holds 250.
#[test]
fn viewed_blocks_are_free_once_the_result_is_given_back_and_the_worker_drained() {
    for worker_first in [false, true] {
        let world = World::new(SHAPE);
        let (id, claimed) = complete_viewed(&world);
        world.assert_left(QueueAudit { done: 1, open: 1, ..NOTHING }, 1, 1);
        let held = take(&world, id);
        world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
        if worker_first {
            world.queue.drain(world.pools(), &claimed);
            world.assert_left(NOTHING, 0, 1);
            release(&world, id, &held).unwrap();
        } else {
            release(&world, id, &held).unwrap();
            assert!(release(&world, id, &held).is_err(), "it is given back once");
            world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
            world.queue.drain(world.pools(), &claimed);
        }
        world.assert_left(NOTHING, 0, 0);
    }
}

#[test]
fn viewed_result_that_is_not_taken_keeps_its_block() {
    let world = World::new(SHAPE);
    let (id, claimed) = complete_viewed(&world);
    world.queue.dispose(world.pools(), OTHER, id, |_| true).unwrap();
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
    world.queue.drain(world.pools(), &claimed);
    world.assert_left(NOTHING, 0, 0);
    // Drained before.
    let (id, claimed) = complete_viewed(&world);
    world.queue.drain(world.pools(), &claimed);
    world.assert_left(QueueAudit { done: 1, ..NOTHING }, 0, 1);
    assert_eq!(world.take(OTHER, id), Ok(1));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn viewed_result_that_nobody_wants_keeps_its_block() {
    let world = World::new(SHAPE);
    let id = world.submit_with(1, &NewTask { cancel: true, ..TASK }).unwrap();
    let claimed = world.claim(WORKER).unwrap();
    world.queue.detach(world.pools(), |row| row == SUBMITTER, Reason::Died, |_| None);
    let output = world.outputs.try_take(WORKER).unwrap();
    world.queue.complete(world.pools(), &claimed, Some(output_of(&output)), Views::Output).unwrap();
    assert_eq!(world.queue.state(id), TaskState::Gone);
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
    world.queue.drain(world.pools(), &claimed);
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn recovery_keeps_viewed_blocks_until_the_worker_is_dead() {
    let world = World::new(SHAPE);
    let recover = |dead| world.queue.recover(world.pools(), |row| row == dead);
    // The reader dies with the result.
    let (id, claimed) = complete_viewed(&world);
    let _taken = take(&world, id);
    recover(OTHER);
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 1);
    world.queue.drain(world.pools(), &claimed);
    world.assert_left(NOTHING, 0, 0);
    // The worker dies while the reader has the result, and after the reader gave it back.
    for given_back in [false, true] {
        let (id, _) = complete_viewed(&world);
        let held = take(&world, id);
        if given_back {
            release(&world, id, &held).unwrap();
        }
        recover(WORKER);
        world.assert_left(NOTHING, 0, u32::from(!given_back));
        assert_eq!(release(&world, id, &held).is_err(), given_back);
        world.assert_left(NOTHING, 0, 0);
    }
}

#[test]
fn block_of_a_viewed_result_is_no_other_tasks_after_its_slot_is() {
    let world = World::new(QueueLimits { tasks: 1, ..SHAPE });
    let (id, claimed) = complete_viewed(&world);
    let held = take(&world, id);
    world.queue.drain(world.pools(), &claimed);
    // The slot has another task, with an attempt of the same number that is open.
    let (other, again) = complete_viewed(&world);
    assert_eq!((other.index, again.attempt()), (id.index, claimed.attempt()));
    release(&world, id, &held).unwrap();
    world.assert_left(QueueAudit { done: 1, open: 1, ..NOTHING }, 1, 1);
    let held = take(&world, other);
    release(&world, other, &held).unwrap();
    world.queue.drain(world.pools(), &again);
    world.assert_left(NOTHING, 0, 0);
}
