// Holds 213.
//! What an audit finds wrong.

use super::*;

/// Frees the input of a task behind its back. Returns false if there is none.
fn steal(world: &World, id: TaskId) -> bool {
    let inputs = world.queue.describe(id).unwrap().inputs;
    let [Input::Block(block, ..)] = inputs[..] else { panic!("{inputs:?}") };
    let seen = world.inputs.seen(block.index).unwrap();
    seen.ticket() == block.generation && world.inputs.free_seen(block.index, seen).is_ok()
}

fn lost(world: &World) -> u32 {
    world.queue.lost_inputs(&world.inputs)
}

#[test]
fn lost_inputs_of_tasks_are_counted_until_the_task_is_done() {
    let world = World::new(SHAPE);
    let [pending, claimed] = [(); 2].map(|()| world.submit().unwrap());
    let worker = world.claim(WORKER).unwrap();
    assert_eq!((lost(&world), worker.id()), (0, pending));
    assert!(steal(&world, pending) && steal(&world, claimed));
    assert_eq!(lost(&world), 2);
    // The block of another holder is no input either.
    let _other = world.inputs.try_take(OTHER).unwrap();
    assert_eq!(lost(&world), 2);
    world.complete(&worker).unwrap();
    assert_eq!(lost(&world), 1);
}

#[test]
fn lost_inputs_of_open_attempts_are_counted_although_the_task_is_done() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let hung = world.claim(WORKER).unwrap();
    take_back(&world, &hung).unwrap();
    let other = world.claim(OTHER).unwrap();
    world.complete(&other).unwrap();
    world.assert_left(QueueAudit { done: 1, open: 1, ..NOTHING }, 1, 1);
    assert_eq!(lost(&world), 0);
    assert!(steal(&world, id));
    assert_eq!(lost(&world), 1);
    world.queue.drain(world.pools(), &hung);
    assert_eq!(lost(&world), 0, "nobody needs it any more");
}
