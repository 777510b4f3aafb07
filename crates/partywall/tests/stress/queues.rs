//! Queues whose processes are killed and stopped at any moment: while they submit, claim, work, complete and take.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{
    Attachment, Block, ClaimedTask, DType, Domain, Error, MAX_ARGUMENTS, MAX_KIND, Queue, QueueOptions, Segment, Task,
    Ticket,
    error::{Busy, Gone},
};
use partywall_harness::{device, place};
use partywall_os::map::SharedMap;
use partywall_wire::Answer;

use super::{
    Dice, WATCHDOG, eventually,
    place::{Actor, Place, say},
    pools::{BYTES, copy, read, write},
    rounds,
    wire::{self, Client},
    within,
};

/// The number in the segment that all tasks name.
const WEIGHTS: u64 = 77;
const TASKS: u32 = 16;
const INPUTS: u32 = 20;
const OUTPUTS: u32 = 24;
/// The number of tasks that a submitter has in the queue at once.
const AHEAD: usize = 4;
const WORKERS: usize = 3;

pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    let queue = domain.queue("work").timeout(WATCHDOG).open().unwrap();
    say("ready");
    match words[0] {
        "working" => {
            let mut dice = Dice(words[1].parse().unwrap());
            for task in queue.claims(Duration::MAX) {
                work(task.unwrap(), &mut dice);
            }
        }
        "submitting" => {
            let mut submitter = Submitter::new(&queue, words[1].parse().unwrap(), true);
            loop {
                submitter.turn();
            }
        }
        "guest" => loop {
            use_for_a_while(&queue);
        },
        other => panic!("{other}"),
    }
}

fn options(domain: &Domain) -> QueueOptions {
    let pools = |options: QueueOptions| options.inputs(INPUTS, BYTES as u64).outputs(OUTPUTS, BYTES as u64);
    pools(domain.queue("work").tasks(TASKS)).place(place()).timeout(WATCHDOG)
}

fn pattern(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BYTES / 8)
}

/// Commits the segment that all tasks name. Submitters attach it, and detach it at any moment.
fn commit_weights(domain: &Domain) -> Segment {
    let mut build =
        domain.create("weights", place()).tensor("x", DType::U8, &[BYTES as u64]).kept(true).allocate().unwrap();
    build.write("x", &pattern(WEIGHTS)).unwrap();
    build.commit().unwrap()
}

/// Returns the answer of a worker for a number.
fn answer(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

/// Completes a task, drops it, or fails it. The task may belong to another worker by then.
fn work(mut task: ClaimedTask, dice: &mut Dice) {
    let number = u64::from_le_bytes(task.arguments().try_into().unwrap());
    if dice.below(10) == 0 {
        std::thread::sleep(Duration::from_micros(dice.below(3000)));
    }
    let input = &task.inputs()[0];
    let input = if device() == "host" { input.bytes().unwrap().to_vec() } else { copy(&input.device().unwrap()) };
    // The inputs are valid even if the claim has been taken back, because they are held as long as this attempt may
    // read them.
    assert!(input == pattern(number), "the input of {number} is another's");
    let mut weights = vec![0; BYTES];
    task.inputs()[1].read_at(0, &mut weights).expect("it is attached as long as a task names it");
    assert!(weights == pattern(WEIGHTS));
    let ended = match dice.below(20) {
        0 => return drop(task),
        1 => task.fail("the dice say so"),
        _ => {
            write(task.output_mut().unwrap(), &pattern(answer(number)));
            task.complete()
        }
    };
    match ended {
        Ok(()) | Err(Error::Gone(Gone::Claim { .. })) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Submits numbers and checks their answers.
struct Submitter<'a> {
    queue: &'a Queue,
    segment: Segment,
    weights: Attachment,
    tickets: VecDeque<(u64, Ticket)>,
    next: u64,
    cancel: bool,
    checked: u64,
}

impl<'a> Submitter<'a> {
    fn new(queue: &'a Queue, seed: u64, cancel: bool) -> Self {
        let segment = queue.domain().open("weights", WATCHDOG).unwrap();
        let weights = queue.attach(&segment).unwrap();
        Self { queue, segment, weights, tickets: VecDeque::new(), next: seed << 32, cancel, checked: 0 }
    }

    /// Submits a task, and checks the oldest if there are enough.
    fn turn(&mut self) {
        let number = self.next;
        self.next += 1;
        let mut input = self.queue.inputs().alloc(WATCHDOG).unwrap();
        write(&mut input, &pattern(number));
        let ticket = self.submit(number, input);
        self.tickets.push_back((number, ticket));
        if number.is_multiple_of(5) {
            match self.queue.detach(&self.weights, Duration::ZERO) {
                Ok(()) | Err(Error::Busy(Busy::AttachmentInUse { .. }) | Error::Gone(Gone::Attachment { .. })) => {}
                Err(error) => panic!("{error}"),
            }
        }
        if self.tickets.len() >= AHEAD {
            self.check();
        }
    }

    fn submit(&mut self, number: u64, mut input: Block) -> Ticket {
        loop {
            let weights = self.weights.tensor(&self.segment.tensor("x").unwrap()).unwrap();
            let task = Task::new("answer").input(input).part(weights).output(BYTES as u64);
            let task = task.arguments(&number.to_le_bytes()).max_attempts(u8::MAX).cancel_with_submitter(self.cancel);
            match self.queue.submit(task, WATCHDOG) {
                Ok(ticket) => return ticket,
                // Another process has detached the segment, or this one has.
                Err(mut refused) if matches!(refused.error, Error::Gone(Gone::Attachment { .. })) => {
                    self.weights = self.queue.attach(&self.segment).unwrap();
                    input = refused.tasks.remove(0).into_inputs().remove(0);
                }
                Err(refused) => panic!("{refused}"),
            }
        }
    }

    fn check(&mut self) {
        let Some((number, ticket)) = self.tickets.pop_front() else { return };
        let result = ticket.wait(WATCHDOG).unwrap();
        assert!(read(result.output().unwrap()) == pattern(answer(number)), "{number} has another answer");
        assert!(matches!(ticket.try_take(), Err(Error::Gone(Gone::Task { .. }))), "{number} has two answers");
        self.checked += 1;
    }
}

/// Submits and checks while `disturb` kills or stops others. Returns the number of tasks that were answered.
fn submit_during(queue: &Queue, disturb: impl FnOnce()) -> u64 {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let submitters = [1, 2].map(|seed| {
            let done = &done;
            scope.spawn(move || {
                let mut submitter = Submitter::new(queue, seed, false);
                while !done.load(Ordering::Relaxed) {
                    submitter.turn();
                }
                while !submitter.tickets.is_empty() {
                    submitter.check();
                }
                assert_eq!(submitter.checked, submitter.next - (seed << 32), "none is lost");
                submitter.checked
            })
        });
        disturb();
        done.store(true, Ordering::Relaxed);
        submitters.map(|submitter| submitter.join().unwrap()).iter().sum()
    })
}

fn assert_idle(queue: &Queue) {
    eventually("the queue is idle", || {
        let stats = queue.stats();
        (stats.free, stats.free_inputs, stats.free_outputs) == (TASKS, INPUTS, OUTPUTS)
    });
    assert!(queue.tasks(1, |_| true).is_empty());
}

fn start(place: &Place, role: &str, seed: usize) -> Actor {
    place.play(&format!("queue {role} {seed}"))
}

/// Workers and a submitter are killed again and again. Each task of a living submitter is answered exactly once.
#[test]
fn processes_killed_at_any_moment_lose_no_task() {
    let place = Place::new();
    let domain = place.connect();
    let _weights = commit_weights(&domain);
    let queue = options(&domain).create().unwrap();
    let mut victims: Vec<_> = (0..WORKERS).map(|seed| start(&place, "working", seed)).collect();
    victims.push(start(&place, "submitting", 50));
    let kills = rounds(60);
    let answers = submit_during(&queue, || {
        let mut dice = Dice(11);
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(dice.below(30_000)));
            let victim = dice.below(victims.len() as u64) as usize;
            victims[victim].kill();
            let role = if victim == WORKERS { "submitting" } else { "working" };
            victims[victim] = start(&place, role, 100 + kill);
        }
    });
    drop(victims);
    assert_idle(&queue);
    let stats = queue.stats();
    eprintln!("{kills} kills, {answers} tasks with their answer, {} attempts in vain", stats.returned);
}

/// Workers are stopped for longer than their leases, and continue. Other workers do their tasks, and their own results
/// are discarded.
#[test]
fn workers_stopped_at_any_moment_lose_their_tasks_to_others() {
    let place = Place::new();
    let domain = place.connect();
    let lease = Duration::from_millis(20);
    let _weights = commit_weights(&domain);
    let queue = options(&domain).lease(lease).create().unwrap();
    let mut workers: Vec<_> = (0..WORKERS).map(|seed| start(&place, "working", seed)).collect();
    let stops = rounds(15);
    let answers = submit_during(&queue, || {
        let mut dice = Dice(13);
        for stop in 0..stops {
            std::thread::sleep(Duration::from_micros(dice.below(20_000)));
            let stopped = dice.below(WORKERS as u64) as usize;
            workers[stopped].stop();
            std::thread::sleep(5 * lease);
            // One worker is never continued.
            if stop == 5 {
                workers[stopped].kill();
                workers[stopped] = start(&place, "working", 100);
            } else {
                workers[stopped].resume();
            }
        }
    });
    drop(workers);
    assert_idle(&queue);
    eprintln!("{stops} stops, {answers} tasks with their answer, {} attempts in vain", queue.stats().returned);
}

/// A member writes arbitrary values to the control memory of a queue and of its pools. Every call of the other members
/// on the queue still ends; tasks and blocks may be lost.
#[test]
fn corrupt_control_memory_of_a_queue_hangs_no_call() {
    let place = Place::new();
    let domain = place.connect();
    let options = |name| {
        let options = domain.queue(name).tasks(4).inputs(4, 64).outputs(4, 64).lease(Duration::from_millis(2));
        options.place(partywall::Place::Host)
    };
    let queue = Arc::new(options("work").create().unwrap());
    let weights = domain.create("weights", partywall::Place::Host).tensor("x", DType::U8, &[64]);
    let _weights = weights.kept(true).allocate().unwrap().commit().unwrap();
    let mut hostile = Client::join(&place.socket());
    let (answer, fds) = hostile.ask_with(wire::open("work", false), &[]);
    assert!(matches!(answer, Ok(Answer::Opened(_))));
    let maps: Vec<_> = fds[fds.len() - 3..].iter().map(|fd| SharedMap::writable(fd).unwrap()).collect();
    // All words except those that are read only at mapping.
    let words: Vec<_> = maps.iter().map(|map| map.slice::<u64>(64, map.len() / 8 - 8).unwrap()).collect();
    let intact: Vec<_> =
        words.iter().map(|words| (0..words.len()).map(|at| words.get(at)).collect::<Vec<_>>()).collect();
    let done = Arc::new(AtomicBool::new(false));
    let users = [(); 2].map(|()| {
        let queue = queue.clone();
        let done = done.clone();
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                use_for_a_while(&queue);
            }
        })
    });
    // Other processes join and die, so that the broker recovers; and the broker is asked for its counts.
    let asker = {
        let other = place.connect();
        let done = done.clone();
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                other.inspect("work").unwrap();
                drop(other.queue("work").open().unwrap());
            }
        })
    };
    let mut dice = Dice(37);
    for round in 0..rounds(4_000) {
        // Otherwise hardly any call would come far.
        if round % 16 == 0 {
            for (words, intact) in words.iter().zip(&intact) {
                intact.iter().enumerate().for_each(|(at, word)| words.set(at, *word));
            }
        }
        std::thread::sleep(Duration::from_micros(dice.below(100)));
        let words = &words[(dice.below(6) as usize).min(2)];
        let at = if dice.below(2) == 0 { dice.below(64) } else { dice.below(words.len() as u64) } as usize;
        let at = at.min(words.len() - 1);
        let word = match dice.below(4) {
            0 => dice.below(u64::MAX),
            1 => words.get(at) ^ 1 << dice.below(64),
            2 => dice.below(32) << 16 | dice.below(24),
            _ => dice.below(16) | dice.below(4) << 8 | dice.below(8) << 18,
        };
        words.set(at, word);
        if round % 400 == 0 {
            place.play("queue guest").kill();
        }
    }
    done.store(true, Ordering::Relaxed);
    within(WATCHDOG, "all calls end", move || {
        users.into_iter().chain([asker]).for_each(|user| user.join().unwrap());
    });
    // The domain is unchanged.
    let other = options("others").create().unwrap();
    let ticket = other.submit(Task::new("echo").output(8), Duration::ZERO).unwrap();
    other.claim(Duration::ZERO).unwrap().complete().unwrap();
    assert_eq!(ticket.wait(Duration::ZERO).unwrap().bytes(), 8);
}

/// Calls all operations of queues, and accepts any result.
fn use_for_a_while(queue: &Queue) {
    queue.stats();
    let segment = queue.domain().open("weights", WATCHDOG).unwrap();
    for timeout in [Duration::ZERO, Duration::from_micros(200)] {
        let weights = queue.attach(&segment).ok();
        let mut task = Task::new("any").arguments(&[1; 512]).output(64).max_attempts(2);
        if let Ok(input) = queue.inputs().alloc(timeout) {
            task = task.input(input);
        }
        if let Some(part) = weights.as_ref().and_then(|weights| weights.part(..8).ok()) {
            task = task.part(part);
        }
        let ticket = queue.submit(task, timeout).ok();
        if let Ok(mut task) = queue.claim(timeout) {
            assert!(task.arguments().len() <= MAX_ARGUMENTS && task.kind().chars().count() <= MAX_KIND);
            for input in task.inputs() {
                drop((input.bytes().map(<[u8]>::to_vec), input.read_at(0, &mut [0; 8])));
            }
            if let Ok(bytes) = task.output_mut().and_then(Block::bytes_mut) {
                bytes.fill(1);
            }
            drop((task.wait_inputs(timeout), task.extend(timeout)));
            drop(if timeout.is_zero() { task.complete() } else { task.fail("any") });
        }
        drop(queue.try_claim());
        if let Some(ticket) = &ticket {
            drop((ticket.wait(timeout), ticket.wait_done(timeout), ticket.cancel()));
        }
        for task in queue.tasks(8, |_| true) {
            drop((queue.retry(&task.task), queue.purge(&task.task)));
        }
        if let Some(weights) = &weights {
            drop(queue.detach(weights, timeout));
        }
    }
}
