//! A queue with a hostile member.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{Block, DType, Domain, MAX_ARGUMENTS, MAX_KIND, Queue, Task};
use partywall_os::map::SharedMap;
use partywall_wire::Answer;

use super::{
    Dice, WATCHDOG,
    place::{Place, say},
    rounds,
    wire::{self, Client},
    within,
};

pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let queue = domain.queue("work").timeout(WATCHDOG).open().unwrap();
    say("ready");
    loop {
        use_for_a_while(&queue);
    }
}

/// A member writes arbitrary values to the control memory of a queue and of its pools. Every call of the other members
/// on the queue still ends; tasks and blocks may be lost.
// Holds 158.
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
