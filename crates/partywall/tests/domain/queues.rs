//! Queues: tasks go to workers of several processes, come back from dead ones, and have one result each.

use std::{io::Read, sync::OnceLock, time::Duration};

use partywall::{
    ClaimedTask, DType, Domain, Error, Place, Queue, QueueOptions, Task, TaskFailure, TaskStatus, Ticket, Wait,
    error::{Busy, Gone, InvalidArgument, InvalidData, Mismatch, Unreachable},
    info::Named,
};
use partywall_shm::crash;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    TIMEOUT,
    world::{World, eventually},
};

/// The roles of processes that are killed, or that work.
#[allow(clippy::print_stdout)] // it is how a role talks to the test
pub(crate) fn play(role: &str) {
    if role == "queue sandboxed loser" {
        super::pidfds::forbid();
    }
    let domain = Domain::options().start(false).connect().unwrap();
    let queue = domain.queue("work").timeout(TIMEOUT).open().unwrap();
    match role {
        "queue worker" => {
            println!("ready");
            for task in queue.claims(Duration::MAX) {
                work(task.unwrap()).unwrap();
            }
        }
        "queue loser" | "queue sandboxed loser" => {
            let task = queue.claim(TIMEOUT).unwrap();
            println!("claimed {}", task.attempt());
            println!("ready");
            let _ = std::io::stdin().read(&mut [0]);
        }
        "queue submitter" => {
            let kept = submit(&queue, 3.0);
            let cancelled = queue.submit(Task::new("sqrt").cancel_with_submitter(true), TIMEOUT).unwrap();
            println!("submitted {} {}", kept.task(), cancelled.task());
            println!("ready");
            let _ = std::io::stdin().read(&mut [0]);
        }
        "queue keeper" => {
            let ticket = queue.submit(Task::new("none").max_attempts(1), TIMEOUT).unwrap();
            queue.claim(TIMEOUT).unwrap().fail("no").unwrap();
            queue.retry(&ticket.task()).unwrap();
            queue.claim(TIMEOUT).unwrap().complete().unwrap();
            queue.purge(&ticket.task()).unwrap();
            println!("ready");
            let _ = std::io::stdin().read(&mut [0]);
        }
        "queue other clock" => {
            while let Ok(task) = queue.claim(Duration::from_millis(50)) {
                println!("claimed {}", task.kind());
                task.complete().unwrap();
            }
            println!("ready");
            let _ = std::io::stdin().read(&mut [0]);
        }
        _ => panic!("{role}"),
    }
}

fn options(domain: &Domain) -> QueueOptions {
    domain.queue("work").tasks(8).inputs(8, 64).outputs(4, 64).place(Place::Host)
}

fn submit(queue: &Queue, value: f64) -> Ticket {
    let mut input = queue.inputs().alloc(TIMEOUT).unwrap();
    input.as_mut_slice::<f64>().unwrap().fill(value);
    queue.submit(Task::new("sqrt").input(input).output(64).arguments(b"a"), TIMEOUT).unwrap()
}

fn work(mut task: ClaimedTask) -> partywall::Result<()> {
    assert_eq!((task.kind().as_str(), task.arguments()), ("sqrt", &b"a"[..]));
    let roots: Vec<f64> = task.inputs()[0].as_slice::<f64>()?.iter().map(|value| value.sqrt()).collect();
    task.output_mut()?.as_mut_slice::<f64>()?.copy_from_slice(&roots);
    task.complete()
}

fn root(ticket: &Ticket) -> f64 {
    ticket.wait(TIMEOUT).unwrap().output().unwrap().as_slice::<f64>().unwrap()[0]
}

fn assert_idle(queue: &Queue) {
    eventually("the queue is idle", || {
        let stats = queue.stats();
        let tasks = stats.pending + stats.claimed + stats.enqueued + stats.done + stats.dead;
        (tasks, stats.free, stats.free_inputs, stats.free_outputs) == (0, 8, 8, 4)
    });
}

// Holds 218.
#[test]
fn task_carries_lengths_types_and_shapes() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).open_or_create().unwrap();
    let mut long = queue.inputs().alloc(TIMEOUT).unwrap();
    long.as_mut_slice::<f32>().unwrap().fill(7.0);
    long.release().unwrap();
    for _ in 0..9 {
        let mut input = queue.inputs().alloc(TIMEOUT).unwrap();
        input.set_range(8..).unwrap();
        input.set_tensor(DType::F32, &[1, 2]).unwrap();
        input.as_mut_slice::<f32>().unwrap().copy_from_slice(&[4.0, 9.0]);
        assert!(matches!(input.set_range(..65), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
        assert!(matches!(input.set_tensor(DType::F32, &[15]), Err(Error::Mismatch(Mismatch::BlockSize { .. }))));
        input.set_range(6..).unwrap();
        let misaligned = input.set_tensor(DType::F32, &[1]);
        assert!(matches!(misaligned, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
        input.set_range(8..).unwrap();
        input.set_tensor(DType::F32, &[1, 2]).unwrap();
        let task = Task::new("sqrt").input(input).output_tensor(DType::F32, &[2, 2]);
        let ticket = queue.submit(task, TIMEOUT).unwrap();
        let mut task = queue.claim(TIMEOUT).unwrap();
        assert_eq!(task.output_bytes(), 16);
        let (inputs, output) = task.inputs_and_output().unwrap();
        let input = &inputs[0];
        assert_eq!((input.len(), input.dtype(), input.shape()), (8, DType::F32, &[1, 2][..]));
        assert_eq!(input.as_slice::<f32>().unwrap(), [4.0, 9.0]);
        let mut bytes = [0; 8];
        input.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, *input.bytes().unwrap());
        assert!(input.read_at(1, &mut bytes).is_err(), "beyond the input");
        assert_eq!((output.len(), output.shape()), (16, &[2, 2][..]));
        assert_eq!(output.as_mut_slice::<f32>().unwrap().len(), 4);
        assert!(matches!(
            output.set_tensor(DType::F32, &[5]),
            Err(Error::Mismatch(Mismatch::Room { has: 16, needed: 20, .. }))
        ));
        task.output_mut().unwrap().set_tensor(DType::F32, &[2]).unwrap();
        task.output_mut().unwrap().as_mut_slice::<f32>().unwrap().copy_from_slice(&[2.0, 3.0]);
        task.complete().unwrap();
        let result = ticket.wait(TIMEOUT).unwrap();
        assert_eq!(result.bytes(), 8);
        let output = result.into_output().unwrap();
        assert_eq!((output.dtype(), output.shape()), (DType::F32, &[2][..]));
        assert_eq!(output.as_slice::<f32>().unwrap(), [2.0, 3.0]);
    }
}

#[test]
fn tasks_go_to_another_process_and_results_come_back() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let _workers = [(); 2].map(|()| world.play_until("queue worker", "ready"));
    let tickets: Vec<_> = (1..=6).map(|value| submit(&queue, f64::from(value * value))).collect();
    for (ticket, value) in tickets.iter().zip(1..) {
        assert_eq!(root(ticket), f64::from(value));
        assert_eq!(ticket.status(), TaskStatus::Gone);
    }
    assert_idle(&queue);
    assert_eq!((queue.stats().completed, queue.stats().returned), (6, 0));
}

// Holds 36.
#[test]
fn needs_namespaces_dead_letter_is_retried_from_another_user_namespace() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    // The user has another number there.
    let _keeper = world.play_through("queue keeper", &["unshare", "--user", "--map-user=1234"]);
    assert_idle(&queue);
}

/// A container that was moved between machines has a clock of its own.
// Holds 219.
#[test]
fn needs_namespaces_lease_holds_against_workers_in_other_time_namespaces() {
    for ahead in ["86400", "-5"] {
        let world = World::new();
        let domain = world.connect();
        let queue = options(&domain).lease(Duration::from_secs(3600)).create().unwrap();
        let ticket = queue.submit(Task::new("ours"), TIMEOUT).unwrap();
        let claimed = queue.claim(TIMEOUT).unwrap();
        let launcher =
            ["unshare", "--user", "--map-root-user", "--time", "--monotonic", ahead, "--fork", "--kill-child"];
        let _worker = world.play_through("queue other clock", &launcher);
        assert_eq!((queue.stats().returned, ticket.status()), (0, TaskStatus::Claimed { attempt: 1 }), "{ahead}");
        let others = domain.members().unwrap().into_iter().filter(|member| member.member != domain.member());
        let quiet: Vec<_> = others.map(|member| member.quiet.unwrap()).collect();
        assert!(quiet.len() == 1 && quiet[0] < 3_600_000, "its heartbeats are on the same clock: {quiet:?}");
        claimed.complete().unwrap();
        assert_eq!(queue.stats().completed, 1);
    }
}

/// Another thread of the submitter does the task before `submit` has returned.
#[test]
fn submitter_can_work_itself_at_once() {
    static QUEUE: OnceLock<Queue> = OnceLock::new();
    fn work_at(point: &'static str) {
        if point != "queue: pending, blocks still held" {
            return crash::arm(0, work_at);
        }
        let queue = QUEUE.get().unwrap();
        work(queue.claim(TIMEOUT).unwrap()).unwrap();
        let blocks = [(); 8].map(|()| queue.inputs().alloc(TIMEOUT).unwrap());
        for mut block in blocks {
            block.as_mut_slice::<f64>().unwrap().fill(5.0);
        }
    }
    let world = World::new();
    let queue = QUEUE.get_or_init(|| options(&world.connect()).create().unwrap());
    crash::arm(0, work_at);
    let ticket = submit(queue, 49.0);
    assert_eq!(crash::disarm(), None);
    assert_eq!(root(&ticket), 7.0);
    assert_idle(queue);
}

// Holds 27.
#[test]
fn task_of_a_killed_worker_goes_to_another() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let ticket = submit(&queue, 16.0);
    let (mut loser, attempt) = world.play_after("queue loser", "claimed ");
    assert_eq!((attempt.as_str(), ticket.status()), ("1", TaskStatus::Claimed { attempt: 1 }));
    assert!(matches!(ticket.wait(Duration::from_millis(10)), Err(Error::Timeout { .. })));
    loser.kill();
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!((task.attempt(), task.task()), (2, ticket.task()));
    work(task).unwrap();
    let result = ticket.wait(TIMEOUT).unwrap();
    assert_eq!((result.attempt(), result.bytes()), (2, 64));
    assert_eq!(result.output().unwrap().as_slice::<f64>().unwrap()[0], 4.0);
    drop(result);
    assert_idle(&queue);
}

/// As under MPS: the death is no proof that the worker's kernels have ended.
#[test]
fn task_without_proof_of_death_gets_another_output() {
    let world = World::prepared(|_| (), super::pidfds::forbid);
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let ticket = submit(&queue, 25.0);
    let mut loser = world.play("queue sandboxed loser");
    loser.kill();
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!((task.task(), task.attempt()), (ticket.task(), 2));
    work(task).unwrap();
    assert_eq!(root(&ticket), 5.0);
    let others = [(); 7].map(|()| queue.inputs().alloc(TIMEOUT).unwrap());
    let last = queue.inputs().alloc(Duration::from_millis(50));
    assert!(matches!(last, Err(Error::Timeout { .. })), "the dead worker may still read it");
    eventually("its output is in quarantine, too", || queue.stats().free_outputs == 3);
    domain.free_unproven(Some(loser.pid())).unwrap();
    queue.inputs().alloc(TIMEOUT).unwrap().release().unwrap();
    drop(others);
    assert_idle(&queue);
}

// Holds 212.
#[test]
fn tasks_of_a_killed_submitter_stay_unless_they_are_to_end_with_it() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let (mut submitter, tasks) = world.play_after("queue submitter", "submitted ");
    let [kept, cancelled] = tasks.split_once(' ').map(|(kept, cancelled)| [kept, cancelled]).unwrap();
    let ticket = |text: &str| queue.ticket(&text.parse().unwrap()).unwrap();
    submitter.kill();
    eventually("the broker has ended it", || ticket(cancelled).status() == TaskStatus::Gone);
    work(queue.claim(TIMEOUT).unwrap()).unwrap();
    assert_eq!(root(&ticket(kept)), 3_f64.sqrt());
    assert!(matches!(ticket(kept).wait(TIMEOUT), Err(Error::Gone(Gone::Task { .. }))));
    assert_idle(&queue);
}

// Holds 211.
#[test]
fn ended_lease_fences_a_worker_that_hangs() {
    let world = World::new();
    let queue = options(&world.connect()).lease(Duration::from_millis(50)).create().unwrap();
    let ticket = submit(&queue, 9.0);
    let mut hung = queue.claim(TIMEOUT).unwrap();
    hung.extend(Duration::from_millis(20)).unwrap();
    // The waiting worker finds that the lease has ended.
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!((task.task(), task.attempt(), hung.is_claimed()), (ticket.task(), 2, false));
    hung.output_mut().unwrap().as_mut_slice::<f64>().unwrap().fill(-1.0);
    work(task).unwrap();
    assert!(matches!(hung.extend(TIMEOUT), Err(Error::Gone(Gone::Claim { .. }))));
    assert!(matches!(hung.complete(), Err(Error::Gone(Gone::Claim { attempt: 1, .. }))));
    assert_eq!(root(&ticket), 3.0);
    assert_idle(&queue);
}

#[test]
fn task_that_hung_workers_keep_from_being_claimed_says_so() {
    let world = World::new();
    let queue = options(&world.connect()).lease(Duration::from_secs(3600)).create().unwrap();
    let ticket = queue.submit(Task::new("sqrt").max_attempts(1), TIMEOUT).unwrap();
    let hang = || {
        let hung = queue.claim(TIMEOUT).unwrap();
        hung.extend(Duration::ZERO).unwrap();
        assert!(matches!(ticket.wait(TIMEOUT), Err(Error::InvalidData(InvalidData::TaskFailed { .. }))));
        queue.retry(&ticket.task()).unwrap();
        hung
    };
    let mut hung: Vec<_> = (0..4).map(|_| hang()).collect();
    let claimed = queue.claim(Duration::ZERO).unwrap_err().to_string();
    assert!(claimed.contains("workers that lost earlier attempts of all pending tasks (1) still run"), "{claimed}");
    let waited = ticket.wait(Duration::ZERO).unwrap_err().to_string();
    assert!(waited.contains("because workers that lost earlier attempts of it still run"), "{waited}");
    hung.swap_remove(0).fail("it woke up").unwrap_err();
    queue.claim(TIMEOUT).unwrap().complete().unwrap();
    ticket.wait(TIMEOUT).unwrap();
    drop(hung);
    assert_idle(&queue);
}

#[test]
fn task_without_output_passes_those_that_wait_for_an_output_block() {
    let world = World::new();
    let queue = world.connect().queue("work").tasks(8).outputs(1, 8).place(Place::Host).create().unwrap();
    let submit = |kind, output| queue.submit(Task::new(kind).output(output), TIMEOUT).unwrap();
    let unread = submit("unread", 8);
    queue.claim(TIMEOUT).unwrap().complete().unwrap();
    let [waits, first, second] = [("waits", 8), ("first", 0), ("second", 0)].map(|(kind, output)| submit(kind, output));
    for ticket in [&first, &second] {
        let task = queue.claim(TIMEOUT).unwrap();
        assert_eq!(task.task(), ticket.task());
        task.complete().unwrap();
    }
    assert!(queue.try_claim().unwrap().is_none());
    assert!(matches!(queue.claim(Duration::ZERO), Err(Error::Busy(Busy::OutputsFull { .. }))));
    drop(unread.wait(TIMEOUT).unwrap());
    assert_eq!(queue.claim(TIMEOUT).unwrap().task(), waits.task());
}

// Holds 27.
#[test]
fn failed_task_becomes_a_dead_letter_that_says_why() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let ticket = queue.submit(Task::new("sqrt").max_attempts(2), TIMEOUT).unwrap();
    queue.claim(TIMEOUT).unwrap().fail("no such file").unwrap();
    drop(queue.claim(TIMEOUT).unwrap());
    match ticket.wait(TIMEOUT) {
        Err(Error::InvalidData(InvalidData::TaskFailed { attempts: 2, reason, .. })) => {
            assert_eq!(reason, "its worker gave it up")
        }
        other => panic!("{other:?}"),
    }
    let dead = queue.tasks(10, |status| status == TaskStatus::Dead);
    let [info] = &dead[..] else { panic!("{dead:?}") };
    assert_eq!((&info.task, info.kind.as_str(), info.attempts, info.max_attempts), (&ticket.task(), "sqrt", 2, 2));
    let failures = [(1, TaskFailure::Failed), (2, TaskFailure::Dropped)];
    assert_eq!((&info.failures[..], info.text.as_str()), (&failures[..], "no such file"));
    queue.retry(&info.task).unwrap();
    queue.claim(TIMEOUT).unwrap().fail("no space").unwrap();
    let [info] = &queue.tasks(10, |_| true)[..] else { panic!("one task") };
    assert_eq!((info.failures.last(), info.text.as_str()), (Some(&(3, TaskFailure::Failed)), "no space"));
    assert_eq!((info.attempts, info.max_attempts), (3, 4), "as many more as before");
    queue.claim(TIMEOUT).unwrap().complete().unwrap();
    assert!(ticket.wait(TIMEOUT).unwrap().output().is_none());
    // A result that is not taken.
    let ticket = queue.submit(Task::new("sqrt"), TIMEOUT).unwrap();
    assert!(matches!(queue.purge(&ticket.task()), Err(Error::Busy(Busy::TaskState { status: "pending", .. }))));
    queue.claim(TIMEOUT).unwrap().complete().unwrap();
    queue.purge(&ticket.task()).unwrap();
    assert_idle(&queue);
}

#[test]
fn waiting_for_the_end_of_a_task_leaves_its_result() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let ticket = submit(&queue, 4.0);
    assert!(matches!(ticket.wait_done(Duration::ZERO), Err(Error::Timeout { .. })));
    work(queue.claim(TIMEOUT).unwrap()).unwrap();
    for _ in 0..2 {
        ticket.wait_done(TIMEOUT).unwrap();
    }
    assert_eq!(root(&ticket), 2.0);
    assert!(matches!(ticket.wait_done(TIMEOUT), Err(Error::Gone(Gone::Task { .. }))));
    let ticket = queue.submit(Task::new("sqrt").max_attempts(1), TIMEOUT).unwrap();
    queue.claim(TIMEOUT).unwrap().fail("no such file").unwrap();
    assert!(matches!(ticket.wait_done(TIMEOUT), Err(Error::InvalidData(InvalidData::TaskFailed { attempts: 1, .. }))));
    queue.purge(&ticket.task()).unwrap();
    assert_idle(&queue);
}

#[test]
fn queue_event_wakes_an_event_loop_at_each_end() {
    let mut world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let event = queue.event().unwrap();
    let is_readable = |wait: Duration| {
        let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    };
    let tickets: Vec<_> = (0..3).map(|_| submit(&queue, 4.0)).collect();
    work(queue.claim(TIMEOUT).unwrap()).unwrap();
    assert!(is_readable(TIMEOUT));
    assert!(is_readable(TIMEOUT));
    event.clear().unwrap();
    assert_eq!(root(&tickets[0]), 2.0);
    tickets[1].cancel().unwrap();
    assert!(is_readable(TIMEOUT));
    event.clear().unwrap();
    assert!(matches!(tickets[1].status(), TaskStatus::Gone));
    work(queue.claim(TIMEOUT).unwrap()).unwrap();
    assert!(is_readable(TIMEOUT));
    assert_eq!(root(&tickets[2]), 2.0);
    assert_idle(&queue);
    world.end_broker();
    eventually("the broker has gone", || event.clear().is_err());
    assert!(matches!(event.clear(), Err(Error::Unreachable(Unreachable::Gone { .. }))));
}

#[test]
fn only_a_pending_task_can_be_cancelled() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let ticket = submit(&queue, 1.0);
    let task = queue.claim(TIMEOUT).unwrap();
    assert!(matches!(ticket.cancel(), Err(Error::Busy(Busy::TaskRunning { attempt: 1, .. }))));
    drop(task);
    ticket.cancel().unwrap();
    assert!(matches!(ticket.cancel(), Err(Error::Gone(Gone::Task { .. }))));
    assert!(matches!(queue.claim(Duration::ZERO), Err(Error::Timeout { .. })));
    assert_idle(&queue);
}

#[test]
fn full_queue_makes_submitters_wait() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let task = || Task::new("sqrt");
    let refused = queue.submit_all((0..10).map(|_| task()), Duration::ZERO).unwrap_err();
    assert!(
        matches!(refused.error, Error::Busy(Busy::QueueFull { tasks: 8, results: 0, outputs_full: false, .. })),
        "{}",
        refused.error
    );
    assert_eq!((refused.submitted.len(), refused.tasks.len()), (8, 2));
    let at_once = queue.try_submit(task()).unwrap_err();
    assert!(matches!(at_once.error, Error::Busy(Busy::QueueFull { .. })), "{}", at_once.error);
    let cancelled = || true;
    let wait = Wait::from(TIMEOUT).cancelled_by(&cancelled);
    assert!(matches!(queue.submit(task(), wait).unwrap_err().error, Error::Cancelled { .. }));
    std::thread::scope(|scope| {
        let submitter = scope.spawn(|| queue.submit(task(), TIMEOUT).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        for task in queue.claim_all(100, TIMEOUT).unwrap() {
            task.complete().unwrap();
        }
        for ticket in &refused.submitted {
            ticket.wait(TIMEOUT).unwrap();
        }
        submitter.join().unwrap().cancel().unwrap();
    });
    assert_idle(&queue);
}

#[test]
fn unread_results_that_fill_the_outputs_are_named() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let mut tickets: Vec<_> = (0..4).map(|_| submit(&queue, 1.0)).collect();
    for _ in 0..4 {
        work(queue.claim(TIMEOUT).unwrap()).unwrap();
    }
    // A free slot is enough for a task, although no output block is free.
    tickets.push(submit(&queue, 1.0));
    assert!(queue.try_claim().unwrap().is_none());
    match queue.claim(Duration::from_millis(1)) {
        Err(Error::Busy(Busy::OutputsFull { outputs: 4, results: 4, .. })) => {}
        other => panic!("{other:?}"),
    }
    let late = tickets[4].wait(Duration::from_millis(1)).unwrap_err().to_string();
    assert!(late.contains("pending, because no output block is free"), "{late}");
    // It is not lost, and not counted as an attempt.
    assert_eq!(root(&tickets[0]), 1.0);
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!(task.attempt(), 1);
    work(task).unwrap();
    tickets[1..].iter().for_each(|ticket| assert_eq!(root(ticket), 1.0));
    assert_idle(&queue);
}

#[test]
fn submitting_to_a_full_queue_counts_the_unread_results() {
    let world = World::new();
    let queue = options(&world.connect()).create().unwrap();
    let fails = |wait| match queue.submit(Task::new("sqrt").output(64), wait).unwrap_err().error {
        Error::Busy(full @ Busy::QueueFull { .. }) => full,
        other => panic!("{other:?}"),
    };
    let mut tickets: Vec<_> = (0..2).map(|_| submit(&queue, 1.0)).collect();
    (0..2).for_each(|_| work(queue.claim(TIMEOUT).unwrap()).unwrap());
    tickets.extend((0..6).map(|_| submit(&queue, 1.0)));
    let some = fails(Duration::from_millis(1));
    assert!(matches!(some, Busy::QueueFull { tasks: 8, results: 2, outputs_full: false, .. }), "{some}");
    (0..2).for_each(|_| work(queue.claim(TIMEOUT).unwrap()).unwrap());
    let all = fails(Duration::from_millis(1));
    assert!(matches!(all, Busy::QueueFull { tasks: 8, results: 4, outputs_full: true, .. }), "{all}");
    let text = Error::from(all).to_string();
    assert!(text.ends_with("and 4 slots hold results that were not taken; no output block is free"), "{text}");

    tickets[..4].iter().for_each(|ticket| assert_eq!(root(ticket), 1.0));
    (0..4).for_each(|_| work(queue.claim(TIMEOUT).unwrap()).unwrap());
    tickets[4..].iter().for_each(|ticket| assert_eq!(root(ticket), 1.0));
    assert_idle(&queue);
}

#[test]
fn bad_tasks_are_refused_with_a_reason() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let refused = |task: Task| {
        let refused = queue.submit(task, TIMEOUT).unwrap_err();
        assert_eq!((refused.tasks.len(), refused.submitted.len()), (1, 0));
        refused.error
    };
    let is_range = |error: &Error| matches!(error, Error::InvalidArgument(InvalidArgument::Task { .. }));
    for task in [Task::new(&"k".repeat(33)), Task::new("k").arguments(&[0; 513]), Task::new("k").max_attempts(0)] {
        let error = refused(task);
        assert!(is_range(&error), "{error}");
    }
    let larger = refused(Task::new("k").output(65));
    assert!(matches!(larger, Error::Mismatch(Mismatch::BlockSize { of: Named::Queue, has: 64, needed: 65, .. })));
    let other = domain.pool("other").blocks(1).block_bytes(64).place(Place::Host).create().unwrap();
    let foreign = refused(Task::new("k").input(other.alloc(TIMEOUT).unwrap()));
    assert!(
        matches!(&foreign, Error::Mismatch(Mismatch::Options { of: Named::Queue, why, .. }) if why.contains("another pool")),
        "{foreign}"
    );
    assert_eq!(other.stats().free, 1, "it came back with the task");
    // Room that was not asked for.
    queue.submit(Task::new("k"), TIMEOUT).unwrap();
    let mut task = queue.claim(TIMEOUT).unwrap();
    assert!(is_range(&task.output_mut().unwrap_err()));
    assert!(is_range(&task.output().unwrap_err()));
    task.complete().unwrap();
    // A task of another queue.
    let other = domain.queue("others").place(Place::Host).create().unwrap();
    let task = other.submit(Task::new("k"), TIMEOUT).unwrap().task();
    assert!(matches!(queue.ticket(&task), Err(Error::Mismatch(Mismatch::Options { of: Named::Queue, .. }))));
}

#[test]
fn queue_with_other_options_is_refused() {
    let world = World::new();
    let domain = world.connect();
    let _queue = options(&domain).lease(Duration::from_secs(1)).create().unwrap();
    let work = || domain.queue("work");
    for (options, why) in [
        (work().tasks(9), "room for 8 tasks, not 9"),
        (work().inputs(9, 64), "8 blocks of inputs, not 9"),
        (work().inputs(8, 65), "inputs of 64 bytes, not 65"),
        (work().outputs(5, 64), "4 blocks of outputs, not 5"),
        (work().lease(Duration::from_secs(2)), "a lease of 1000 ms, not 2000"),
    ] {
        match options.open() {
            Err(Error::Mismatch(Mismatch::Options { of: Named::Queue, why: found, .. })) => {
                assert!(found.contains(why), "{found}")
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(domain.pool("work").open(), Err(Error::Mismatch(Mismatch::Object { is: Named::Queue, .. }))));
    assert!(matches!(
        domain.open("work", Duration::ZERO),
        Err(Error::Mismatch(Mismatch::Object { is: Named::Queue, .. }))
    ));
    for options in [
        domain.queue(&"q".repeat(201)),
        work().tasks(0),
        work().inputs(0, 1),
        work().outputs(1, 0),
        work().lease(Duration::ZERO),
        work().lease(Duration::MAX),
    ] {
        let refused = options.place(Place::Host).create();
        assert!(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Options { .. }))), "{refused:?}");
    }
}

#[test]
fn broker_lists_the_contents_of_a_queue() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let _tickets = [(); 3].map(|()| submit(&queue, 4.0));
    work(queue.claim(TIMEOUT).unwrap()).unwrap();
    let _task = queue.claim(TIMEOUT).unwrap();
    let info = domain.inspect("work").unwrap();
    let control = info.control.unwrap();
    let info = control.queue.unwrap();
    assert_eq!((info.usage.pending, info.usage.claimed, info.usage.done, info.usage.free), (1, 1, 1, 5));
    assert_eq!((control.blocks.free, control.blocks.in_ring), (6, 2));
    assert_eq!((info.outputs.free, info.outputs.held, info.outputs.in_ring), (2, 1, 1));
    assert_eq!(queue.stats().done, 1);
}
