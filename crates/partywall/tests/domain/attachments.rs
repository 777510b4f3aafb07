//! Segments that queues hold: tasks name parts of them, workers of other processes read them in place, and they outlive
//! every process but the queue's.

use std::{io::Read, time::Duration};

use partywall::{
    Attachment, ClaimedTask, DType, Domain, Error, Place, Queue, QueueOptions, SegmentPart, Task, TaskInput,
    error::{Busy, Gone, InvalidArgument, LimitReached, Mismatch, NotFound},
    info::QueueHolder,
};
use partywall_harness::{
    device, place,
    wire::{Client, called},
};
use partywall_shm::{
    pool::Pool,
    queue::{AttachedPart, Contents, MAX_PART, NewInput, NewTask, Queue as Words},
};
use partywall_wire::{Access, Answer, Call, Limit, Open};

use super::{
    TIMEOUT,
    world::{World, commit, eventually},
};

/// Processes that work, and that are killed.
#[allow(clippy::print_stdout)] // it is how a role talks to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let queue = domain.queue("work").timeout(TIMEOUT).open().unwrap();
    match role {
        "attachments worker" => {
            println!("ready");
            for task in queue.claims(Duration::MAX) {
                sum(task.unwrap()).unwrap();
            }
        }
        "attachments attacher" => {
            let weights = commit(&domain, "weights", 7, false);
            let attached = queue.attach(&weights).unwrap();
            let task = Task::new("sum").part(attached.part(..16).unwrap()).output(8);
            println!("task {}", queue.submit(task, TIMEOUT).unwrap().task());
            println!("ready");
            let _ = std::io::stdin().read(&mut [0]);
        }
        _ => panic!("{role}"),
    }
}

fn options(domain: &Domain) -> QueueOptions {
    domain.queue("work").tasks(4).inputs(4, 16).outputs(4, 8).place(place()).timeout(TIMEOUT)
}

/// The bytes of an input, in place if the CPU can reach them.
fn read(input: &TaskInput) -> partywall::Result<Vec<u8>> {
    // Before its length is believed.
    let gpu = input.gpu()?;
    let mut bytes = vec![0; input.len() as usize];
    input.read_at(0, &mut bytes)?;
    match gpu {
        None => assert_eq!(input.bytes()?, bytes),
        Some(_) => assert_eq!(input.device()?.bytes(), input.len()),
    }
    assert!(input.read_at(1, &mut bytes).is_err(), "a byte more than it has");
    Ok(bytes)
}

/// Adds all numbers of all inputs.
fn sum(mut task: ClaimedTask) -> partywall::Result<()> {
    let mut sum = 0_u64;
    for input in task.inputs() {
        sum += read(input)?
            .chunks_exact(4)
            .map(|word| u64::from(u32::from_ne_bytes(word.try_into().unwrap())))
            .sum::<u64>();
    }
    task.output_mut()?.write(&sum.to_ne_bytes())?;
    task.complete()
}

fn result(queue: &Queue, task: Task) -> u64 {
    let ticket = queue.submit(task.output(8), TIMEOUT).unwrap();
    let result = ticket.wait(TIMEOUT).unwrap();
    let block = result.output().unwrap();
    let mut bytes = [0; 8];
    block.read_at(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Submits a task that names a part. No worker claims it.
fn name(queue: &Queue, part: &SegmentPart) -> partywall::Ticket {
    queue.submit(Task::new("sum").part(part.clone()).output(8), TIMEOUT).unwrap()
}

fn assert_is_in_use(detached: partywall::Result<()>, expected: u32) {
    match detached {
        Err(Error::Busy(Busy::AttachmentInUse { queue, segment, tasks, first })) => {
            assert_eq!((queue.as_str(), segment.as_str(), tasks), ("work", "\"weights@1\"", expected));
            assert!(first.starts_with("work@1#"), "{first}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn workers_of_another_process_read_parts_of_a_segment_in_place() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let mut build = domain
        .create("weights", place())
        .tensor("ones", DType::U32, &[4])
        .tensor("counted", DType::U32, &[3])
        .allocate()
        .unwrap();
    build.write("ones", &1_u32.to_ne_bytes().repeat(4)).unwrap();
    build.write("counted", &[10_u32, 20, 30].map(u32::to_ne_bytes).concat()).unwrap();
    let segment = build.commit().unwrap();
    let weights = queue.attach(&segment).unwrap();
    assert_eq!((weights.name(), weights.version(), weights.bytes()), ("weights", 1, segment.bytes()));
    let _worker = world.play_until("attachments worker", "ready");
    let tensor = |name| weights.tensor(&segment.tensor(name).unwrap()).unwrap();
    assert_eq!(result(&queue, Task::new("sum").part(tensor("ones"))), 4);
    // A block between two parts.
    let mut block = queue.inputs().alloc(TIMEOUT).unwrap();
    let numbers = [100_u32, 100, 100, 100].map(u32::to_ne_bytes).concat();
    block.write(&numbers).unwrap();
    let task = Task::new("sum").part(tensor("ones")).input(block).part(tensor("counted"));
    assert_eq!(result(&queue, task), 464);
    for _ in 0..20 {
        assert_eq!(result(&queue, Task::new("sum").part(weights.part(..4).unwrap())), 1);
    }
    let holders = domain.inspect("weights").unwrap().holders;
    let leases: Vec<_> = holders.iter().map(|holder| holder.leases).collect();
    assert_eq!(leases, [1, 1], "the worker has opened it once");
}

// Holds 216.
#[test]
fn attached_segment_outlives_its_owner_and_the_process_that_attached_it() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let mut attacher = world.play_until("attachments attacher", "ready");
    attacher.kill();
    eventually("its name is gone", || {
        let opened = domain.open("weights", Duration::ZERO);
        matches!(opened, Err(Error::NotFound(NotFound::Name { .. }) | Error::Gone(_)))
    });
    let held = domain.inspect("weights@1").unwrap();
    assert_eq!(held.queues, [QueueHolder { name: "work".into(), version: 1, attachment: 0 }]);
    assert_eq!(domain.inspect("work").unwrap().control.unwrap().queue.unwrap().attached[0].tasks, 1);
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!(read(&task.inputs()[0]).unwrap(), 7_u32.to_ne_bytes().repeat(4));
    let segment = task.inputs()[0].segment().unwrap().unwrap();
    assert_eq!((segment.name(), segment.len(), segment.is_writable()), ("weights", 1, false));
    drop(segment);
    sum(task).unwrap();
    assert_eq!(queue.stats().attached, 1);
    drop(queue);
    assert!(matches!(domain.inspect("weights@1"), Err(Error::NotFound(_) | Error::Gone(_))), "it went with the queue");
}

// Holds 216.
#[test]
fn segment_is_detached_once_no_task_names_it() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let other = world.connect();
    let theirs = options(&other).open().unwrap();
    let weights = queue.attach(&commit(&domain, "weights", 5, true)).unwrap();
    let again = theirs.attach(&other.open("weights", TIMEOUT).unwrap()).unwrap();
    let part = weights.part(..).unwrap();
    let tickets = [name(&queue, &part), name(&queue, &part)];
    assert_is_in_use(queue.detach(&weights, Duration::ZERO), 2);
    tickets[0].cancel().unwrap();
    assert_is_in_use(theirs.detach(&again, Duration::ZERO), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| theirs.detach(&again, TIMEOUT).unwrap());
        let task = queue.claim(TIMEOUT).unwrap();
        assert_is_in_use(queue.detach(&weights, Duration::ZERO), 1);
        sum(task).unwrap();
    });
    let gone = |error: &Error| matches!(error, Error::Gone(Gone::Attachment { attachment: 0, .. }));
    let refused = queue.submit(Task::new("sum").part(part), TIMEOUT).unwrap_err();
    assert!(gone(&refused.error) && refused.tasks.len() == 1, "{refused:?}");
    assert!(gone(&queue.detach(&weights, TIMEOUT).unwrap_err()));
    assert!(queue.try_claim().unwrap().is_none());
    eventually("this worker has closed it", || domain.inspect("weights").unwrap().holders.is_empty());
    let weights = queue.attach(&domain.open("weights", TIMEOUT).unwrap()).unwrap();
    let ticket = name(&queue, &weights.part(4..8).unwrap());
    sum(queue.claim(TIMEOUT).unwrap()).unwrap();
    ticket.wait(TIMEOUT).unwrap();
}

#[test]
fn dead_letters_keep_their_segment() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let weights = queue.attach(&commit(&domain, "weights", 5, false)).unwrap();
    let task = Task::new("sum").part(weights.part(..8).unwrap()).output(8).max_attempts(1);
    let ticket = queue.submit(task, TIMEOUT).unwrap();
    queue.claim(TIMEOUT).unwrap().fail("on purpose").unwrap();
    assert_is_in_use(queue.detach(&weights, Duration::ZERO), 1);
    queue.retry(&ticket.task()).unwrap();
    sum(queue.claim(TIMEOUT).unwrap()).unwrap();
    queue.detach(&weights, Duration::ZERO).unwrap();
    assert_eq!(queue.stats().attached, 0);
    eventually("only the queue held it, and this process closes it", || {
        matches!(domain.inspect("weights@1"), Err(Error::NotFound(_) | Error::Gone(_)))
    });
}

#[test]
fn invalid_parts_and_attachments_are_refused() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let segment = commit(&domain, "weights", 5, true);
    let weights = queue.attach(&segment).unwrap();
    let bytes = weights.bytes();
    for part in [weights.part(4..4), weights.part(bytes..), weights.part(1..=bytes), weights.part(..u64::MAX)] {
        assert!(matches!(part, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{part:?}");
    }
    let is_mismatch = |error: &Error| matches!(error, Error::Mismatch(Mismatch::Options { .. }));
    let other = commit(&domain, "other", 1, true);
    assert!(is_mismatch(&weights.tensor(&other.tensor("x").unwrap()).unwrap_err()));
    assert!(is_mismatch(&queue.attach(&world.connect().open("weights", TIMEOUT).unwrap()).unwrap_err()));
    let elsewhere = domain.queue("elsewhere").place(place()).create().unwrap();
    let part = elsewhere.attach(&segment).unwrap().part(..).unwrap();
    assert!(is_mismatch(&elsewhere.detach(&weights, Duration::ZERO).unwrap_err()));
    let refused = queue.submit(Task::new("sum").part(part), TIMEOUT).unwrap_err();
    assert!(is_mismatch(&refused.error), "{refused:?}");
    let part = weights.part(..).unwrap();
    let nine = (0..9).fold(Task::new("sum"), |task, _| task.part(part.clone()));
    let refused = queue.submit(nine, TIMEOUT).unwrap_err();
    assert!(matches!(refused.error, Error::InvalidArgument(InvalidArgument::Task { .. })), "{refused:?}");
    let many: Vec<_> = (1..32).map(|i| commit(&domain, &format!("many/{i}"), i, true)).collect();
    let all: Vec<Attachment> = many.iter().map(|segment| queue.attach(segment).unwrap()).collect();
    let full = queue.attach(&other).unwrap_err();
    let limit = LimitReached::Broker { limit: Limit::Attachments, allowed: 32, needed: 33, holders: Vec::new() };
    assert_eq!(full.to_string(), Error::from(limit).to_string());
    queue.detach(&all[3], Duration::ZERO).unwrap();
    queue.attach(&other).unwrap();
}

#[test]
fn peer_that_makes_up_parts_gets_an_error_for_the_worker() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    queue.attach(&commit(&domain, "weights", 5, false)).unwrap();
    let mut peer = Client::join(world.socket());
    let open = Open { name: called("work"), version: None, access: Access::Write, wait: false };
    let (Ok(Answer::Opened(_)), fds) = peer.ask_with(Call::Open(open), &[]) else { panic!("it is there") };
    let (inputs, words) = (Pool::map(&fds[1]).unwrap(), Words::map(&fds[3]).unwrap());
    let task = NewTask { kind: b"", arguments: b"", ready: None, output: None, max_attempts: 1, cancel: false, now: 0 };
    for (attachment, offset, bytes) in
        [(77, 0, 1), (u32::MAX, 0, 1), (0, 0, MAX_PART - 1), (0, MAX_PART - 1, 1), (0, 1, 0)]
    {
        // The control memory says that the segment is attached, the broker that it is not.
        words.attach(attachment);
        let part = NewInput::Part(AttachedPart { attachment, offset, contents: Contents::of_bytes(bytes) });
        words.submit(&inputs, words.reserve(peer.welcome.row).unwrap(), &task, &[part]).unwrap();
        let task = queue.claim(TIMEOUT).unwrap();
        let error = read(&task.inputs()[0]).unwrap_err();
        let is_expected = match &error {
            Error::Gone(Gone::Attachment { attachment: named, .. }) => attachment != 0 && *named == attachment,
            Error::InvalidArgument(InvalidArgument::Range { .. }) => attachment == 0,
            _ => false,
        };
        assert!(is_expected, "{error:?}");
        let name = task.task();
        task.fail("it names nothing").unwrap();
        queue.purge(&name).unwrap();
    }
}

/// Tests inputs in other memory than the outputs, as on a GPU.
#[test]
fn host_queue_names_parts_of_a_segment_elsewhere() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).place(Place::Host).create().unwrap();
    let weights = queue.attach(&commit(&domain, "weights", 9, false)).unwrap();
    let ticket = name(&queue, &weights.part(..8).unwrap());
    let mut task = queue.claim(TIMEOUT).unwrap();
    let bytes = read(&task.inputs()[0]).unwrap();
    task.output_mut().unwrap().as_mut_slice::<u8>().unwrap().copy_from_slice(&bytes);
    task.complete().unwrap();
    let result = ticket.wait(TIMEOUT).unwrap();
    assert_eq!(result.output().unwrap().as_slice::<u32>().unwrap(), [9, 9]);
}

#[test]
fn parts_of_a_mutable_segment_change_and_grow() {
    let world = World::new();
    let domain = world.connect();
    let queue = options(&domain).create().unwrap();
    let builder = domain.create("weights", place()).tensor("x", DType::U32, &[4]).mutable(true).reserve(1 << 24);
    let segment = builder.allocate().unwrap().commit().unwrap();
    let weights = queue.attach(&segment).unwrap();
    let sum_of = |task: Task| {
        let ticket = queue.submit(task.output(8), TIMEOUT).unwrap();
        let task = queue.claim(TIMEOUT).unwrap();
        let input = &task.inputs()[0];
        let tensor = input.segment().unwrap().unwrap().tensors().pop().unwrap().to_vec().unwrap();
        if device() == "host" {
            assert!(matches!(input.bytes(), Err(Error::Mismatch(Mismatch::Kind { .. }))), "others may write it");
            assert!(!input.as_ptr().unwrap().is_null());
        } else {
            assert_eq!(input.device().unwrap().bytes(), input.len());
        }
        task.fail("it was only read").unwrap();
        queue.claim(TIMEOUT).unwrap().complete().unwrap();
        drop(ticket.wait(TIMEOUT).unwrap());
        tensor
    };
    let first = weights.tensor(&segment.tensor("x").unwrap()).unwrap();
    segment.tensor("x").unwrap().write_at(0, &[1; 16]).unwrap();
    assert_eq!(sum_of(Task::new("sum").part(first.clone())), [1; 16]);
    segment.tensor("x").unwrap().write_at(0, &[2; 16]).unwrap();
    assert_eq!(sum_of(Task::new("sum").part(first)), [2; 16]);
    // The new part is known to the worker, and to a submitter that attaches the segment again.
    segment.grow().tensor("y", DType::U32, &[1 << 20]).commit().unwrap();
    let grown = segment.tensor("y").unwrap();
    assert!(weights.tensor(&grown).is_err());
    let grown = queue.attach(&segment).unwrap().tensor(&grown).unwrap();
    assert_eq!(sum_of(Task::new("sum").part(grown)), vec![0; 4 << 20]);
}
