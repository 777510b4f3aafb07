//! Tasks that are cancelled, whose submitter ends, or whose lease does.

use super::*;

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
    world.assert_left(QueueAudit { done: 1, ..NOTHING }, 0, 1);
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
    world.assert_left(QueueAudit { done: 1, claimed: 1, ..NOTHING }, 1, 1);
    // Nobody wants its result.
    world.complete(&claims[2]).unwrap();
    world.assert_left(QueueAudit { done: 1, ..NOTHING }, 0, 1);
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
    world.assert_left(QueueAudit { claimed: 1, ..NOTHING }, 1, 0);
    world.queue.recover(world.pools(), |row| row == WORKER);
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn ended_lease_gives_the_task_to_another_worker() {
    let world = World::new(QueueLimits { lease: 1000, ..SHAPE });
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
    let world = World::new(QueueLimits { lease: 1000, ..SHAPE });
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
    let leased = World::new(QueueLimits { lease: 1000, ..SHAPE });
    let tended = 7000;
    leased.queue.control().tended.store(tended, Ordering::Relaxed);
    let limit = |now| leased.queue.sleep_limit_at(now).as_millis() as u64;
    assert_eq!((limit(tended), limit(tended + 20), limit(tended + every - 1)), (every, every - 20, 1));
    assert_eq!((limit(tended + every), limit(tended + 10 * every), limit(tended - 1)), (1, 1, 1), "a check is due");
    let unlimited = World::new(QueueLimits { lease: 0, ..SHAPE });
    assert_eq!(unlimited.queue.sleep_limit_at(tended), MAX_SLEEP);
}

#[test]
fn submitter_that_dies_leaves_no_slot_and_no_block() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let _reserved = world.queue.reserve(SUBMITTER).unwrap();
    let _block = world.inputs.try_take(SUBMITTER).unwrap();
    assert_eq!(world.queue.recover(world.pools(), |row| row == SUBMITTER), 1);
    world.assert_left(QueueAudit { pending: 1, ..NOTHING }, 1, 0);
    assert_eq!(world.claim(WORKER).unwrap().id(), id);
}

#[test]
fn slow_submitter_loses_no_task() {
    let world = World::new(SHAPE);
    let slow = world.queue.reserve(OTHER).unwrap();
    let [first, second] = [(); 2].map(|()| world.submit().unwrap());
    assert_eq!(world.claim(WORKER).unwrap().id(), first);
    // `head` has passed its slot.
    let id = world.queue.submit(&world.inputs, slow, &TASK, &[]).unwrap();
    assert_eq!(world.claim(WORKER).unwrap().id(), id);
    assert_eq!(world.claim(WORKER).unwrap().id(), second);
}
