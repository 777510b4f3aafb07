//! Attempts: fences, deaths, retries, dead letters.

use super::*;

// Holds 210.
#[test]
fn fenced_attempt_keeps_the_inputs_and_completes_nothing() {
    let world = World::new(SHAPE);
    let id = world.submit().unwrap();
    let lost = world.claim(OTHER).unwrap();
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    let again = world.claim(WORKER).unwrap();
    world.complete(&again).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(2));
    // The old worker may still read the inputs, and its slot cannot be another's.
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 0);
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
    world.assert_left(QueueAudit { pending: 1, ..NOTHING }, 1, 0);
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
    world.assert_left(QueueAudit { dead: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.retry(id).unwrap();
    assert_eq!(world.queue.retry(id), Err(NotRetried::State(TaskState::Pending)));
    let claimed_again = world.claim(WORKER).unwrap();
    assert_eq!((claimed_again.id(), claimed_again.attempt()), (id, 4));
    assert_eq!(world.queue.describe(id).unwrap().max_attempts, 6, "as many as before");
    world.queue.drain(world.pools(), &claimed);
    world.complete(&claimed_again).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(4));
    world.assert_left(NOTHING, 0, 0);
}

/// A task with one attempt, which was taken back from a worker that hangs, and retried.
fn retried_while_its_worker_hangs(world: &World) -> (TaskId, Claimed) {
    let id = world.submit_with(1, &NewTask { max_attempts: 1, ..TASK }).unwrap();
    let hung = world.claim(WORKER).unwrap();
    take_back(world, &hung).unwrap();
    assert_eq!(world.queue.state(id), TaskState::Dead);
    world.queue.retry(id).unwrap();
    (id, hung)
}

// Holds 26.
#[test]
fn attempt_before_a_retry_completes_nothing() {
    let world = World::new(SHAPE);
    let (id, first) = retried_while_its_worker_hangs(&world);
    let stale = world.claim(WORKER).unwrap();
    take_back(&world, &stale).unwrap();
    world.queue.retry(id).unwrap();
    let live = world.claim(WORKER).unwrap();
    assert_eq!(world.queue.extend(&stale, now() + 1000), Err(Fenced));
    for fenced in [first, stale] {
        assert_eq!(world.complete(&fenced), Err(Fenced));
        assert!(world.queue.is_claimed(&live));
    }
    world.complete(&live).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(live.attempt()));
    world.assert_left(NOTHING, 0, 0);
}

// Holds 210.
#[test]
fn fenced_attempt_after_a_retry_keeps_the_inputs() {
    let world = World::new(SHAPE);
    let (id, first) = retried_while_its_worker_hangs(&world);
    world.queue.drain(world.pools(), &first);
    let hung = world.claim(WORKER).unwrap();
    take_back(&world, &hung).unwrap();
    world.queue.dispose(world.pools(), OTHER, id, |state| state == TaskState::Dead).unwrap();
    world.assert_left(QueueAudit { ending: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.drain(world.pools(), &hung);
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn retried_task_waits_for_no_worker_that_hangs_while_a_record_is_free() {
    let world = World::new(SHAPE);
    let (id, first) = retried_while_its_worker_hangs(&world);
    let mut hung = vec![first];
    for open in 2..=RECORDS as u32 {
        let claimed = world.claim(WORKER).unwrap();
        take_back(&world, &claimed).unwrap();
        world.queue.retry(id).unwrap();
        hung.push(claimed);
        assert_eq!(world.queue.audit().open, open);
    }
    assert_eq!((world.claim(OTHER), world.queue.held_back(), world.queue.is_held_back(id)), (None, 1, true));
    world.queue.drain(world.pools(), &hung[0]);
    assert_eq!((world.queue.held_back(), world.queue.is_held_back(id)), (0, false));
    let claimed = world.claim(OTHER).unwrap();
    world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
    // The next record is open, and the one after the last attempt's is not.
    world.queue.retry(id).unwrap();
    let claimed = world.claim(OTHER).unwrap();
    world.complete(&claimed).unwrap();
    assert_eq!(world.take(SUBMITTER, id), Ok(claimed.attempt()));
    hung[1..].iter().for_each(|hung| world.queue.drain(world.pools(), hung));
    world.assert_left(NOTHING, 0, 0);
}

#[test]
fn task_has_no_more_attempts_than_numbers() {
    let world = World::new(SHAPE);
    let id = world.submit_with(1, &NewTask { max_attempts: 100, ..TASK }).unwrap();
    for attempt in 1..=MAX_ATTEMPTS {
        let claimed = world.claim(WORKER).unwrap();
        assert_eq!(claimed.attempt(), attempt);
        world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
        if world.queue.state(id) == TaskState::Dead && attempt < MAX_ATTEMPTS {
            world.queue.retry(id).unwrap();
        }
    }
    assert_eq!(world.queue.retry(id), Err(NotRetried::Exhausted));
    assert_eq!(world.queue.state(id), TaskState::Dead);
}

#[test]
fn retry_that_comes_late_gives_a_later_task_no_attempts() {
    let world = World::new(SHAPE);
    let submit = || world.submit_with(1, &NewTask { max_attempts: 1, ..TASK }).unwrap();
    let fail = || {
        let claimed = world.claim(WORKER).unwrap();
        world.queue.fail(world.pools(), &claimed, Reason::Failed, "", true).unwrap();
    };
    let id = submit();
    fail();
    let body = &world.queue.bodies[id.index as usize];
    let seen = body.origin();
    world.queue.dispose(world.pools(), OTHER, id, |_| true).unwrap();
    // The ring comes round to the slot.
    let later = std::iter::repeat_with(submit).find(|later| later.index == id.index).unwrap();
    assert!(body.allow_more(seen, 1).is_err());
    assert_eq!(world.queue.describe(later).unwrap().max_attempts, 1);
}

#[test]
fn failure_keeps_its_text() {
    let world = World::new(SHAPE);
    let [fits, long] = [0, 1].map(|more| "e".repeat(MAX_REASON + more));
    let wide = "é".repeat(MAX_REASON);
    let cut = |text: &str, bytes: usize| format!("{}…", &text[..bytes]);
    let texts = [
        ("no such file", "no such file".to_owned()),
        (&long, cut(&long, 124)),
        (&fits, fits.clone()),
        (&wide, cut(&wide, 124)),
        (&format!("e{wide}"), cut(&format!("e{wide}"), 123)),
        ("", String::new()),
    ];
    for (text, kept) in texts {
        let id = world.submit().unwrap();
        let claimed = world.claim(WORKER).unwrap();
        world.queue.fail(world.pools(), &claimed, Reason::Failed, text, true).unwrap();
        assert_eq!(world.queue.failures(id), (vec![(1, Reason::Failed)], kept.into_bytes()));
        world.queue.dispose(world.pools(), SUBMITTER, id, |_| true).unwrap();
    }
    world.assert_left(NOTHING, 0, 0);
}

/// A member that checks for ended leases is stopped before it records one, and goes on when the slot has another task.
#[test]
fn slow_record_does_not_replace_a_later_one() {
    let world = World::new(QueueLimits { tasks: 1, ..SHAPE });
    let first = world.submit().unwrap();
    let seen = world.claim(WORKER).unwrap();
    world.complete(&seen).unwrap();
    world.take(SUBMITTER, first).unwrap();
    world.submit().unwrap();
    let fenced = world.claim(OTHER).unwrap();
    world.queue.detach(world.pools(), |row| row == OTHER, Reason::Detached, |_| None);
    assert!(world.queue.take_back(world.pools(), seen.index, seen.word, Reason::Lease).is_err());
    world.assert_left(QueueAudit { pending: 1, open: 1, ..NOTHING }, 1, 0);
    world.queue.drain(world.pools(), &fenced);
    world.assert_left(QueueAudit { pending: 1, ..NOTHING }, 1, 0);
}

/// A reader dies before it has the block of a result, and the worker is stopped before it gives the block up.
#[test]
fn output_of_a_dead_reader_and_a_slow_worker_is_not_lost() {
    let world = World::new(SHAPE);
    world.submit().unwrap();
    let claimed = world.claim(WORKER).unwrap();
    let output = world.outputs.try_take(WORKER).unwrap();
    let body = &world.queue.bodies[claimed.index];
    body.record(1).set_output(Some(output_of(&output)), None);
    world.queue.record(claimed.index, claimed.word, body::RecordWord::drained(None, claimed.word));
    let slot = &world.queue.tasks[claimed.index];
    slot.change(claimed.word, claimed.word.with(TaskSlotState::Ending, OTHER)).unwrap();
    world.queue.recover(world.pools(), |row| row == OTHER);
    // The worker goes on.
    assert_eq!(world.outputs.publish(output.index(), output.word()), Err(Stale));
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
