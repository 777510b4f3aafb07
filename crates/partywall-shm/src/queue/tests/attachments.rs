//! Tasks that name parts of attached segments.

use super::*;

/// Submits a task that names [`PART`], between two blocks.
fn submit_part(world: &World) -> Result<TaskId, NotSubmitted> {
    let reserved = world.queue.reserve(SUBMITTER).unwrap();
    let blocks = [(); 2].map(|()| world.inputs.try_take(SUBMITTER).unwrap());
    let inputs = [
        NewInput::Block(&blocks[0], 0, Contents::of_bytes(1)),
        NewInput::Part(PART),
        NewInput::Block(&blocks[1], 0, Contents::of_bytes(1)),
    ];
    let submitted = world.queue.submit(&world.inputs, reserved, &TASK, &inputs);
    if submitted.is_err() {
        blocks.iter().for_each(|block| world.inputs.free(block).unwrap());
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
    let [Input::Block(..), Input::Part(part), Input::Block(..)] = world.queue.describe(id).unwrap().inputs[..] else {
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
    world.queue.bodies[reserved.index].write(reserved.word, &TASK, &[NewInput::Part(PART)]);
    assert_eq!(world.queue.begin_detach(PART.attachment).map(|in_use| in_use.tasks), Some(1));
    world.queue.recover(world.pools(), |row| row == SUBMITTER);
    assert_eq!(world.queue.begin_detach(PART.attachment), None);
}
