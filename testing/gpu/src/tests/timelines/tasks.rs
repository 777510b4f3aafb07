//! Tasks of queues whose inputs and outputs are written by streams. The scenes run on every driver, as in `scenes.rs`.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::time::Duration;

use partywall::{
    ClaimedTask, DType, Domain, Error, Gpu, Place, Queue, Task, TaskStatus, Ticket, TimelineWriter,
    cuda::Stream,
    error::{Busy, Gone, InvalidData},
};

use super::world::{TIMEOUT, World, eventually, gpu, next_order, say};

/// How long to check that something does not happen.
const MOMENT: Duration = Duration::from_millis(50);

/// Carries out the commands of the test, one word each, in order. The stream of this process stops at `stop` until the
/// test opens the gate.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    gpu.kernels().unwrap();
    let queue = domain.queue("work").open().unwrap();
    let gate = domain.timeline("gate").unwrap();
    let mut task: Option<ClaimedTask> = None;
    let mut ticket: Option<Ticket> = None;
    say("ready");
    while let Some(order) = next_order() {
        let (what, argument) = order.split_once(' ').unwrap_or((&order, ""));
        match what {
            "stop" => gate.wait_on(stream.as_ref(), argument.parse().unwrap()).unwrap(),
            "claim" => task = Some(queue.claim(TIMEOUT).unwrap()),
            "double" => double(&gpu, &stream, task.as_ref().unwrap()),
            "complete" => task.take().unwrap().complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap(),
            "drop" => task = None,
            "attach" => ticket = Some(attach(&gpu, &queue, &stream)),
            "submit" => ticket = Some(submit(&gpu, &queue, &stream)),
            "ticket" => {
                say(&format!("done {}", ticket.as_ref().unwrap().task()));
                continue;
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

/// Submits a task whose input a stream will fill.
fn submit(gpu: &Gpu, queue: &Queue, stream: &Stream) -> Ticket {
    let input = queue.inputs().alloc(TIMEOUT).unwrap();
    gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), input.device().unwrap().as_slice()).unwrap();
    let task = Task::new("double").input(input).output(4096).max_attempts(2);
    queue.submit_on(task, stream.as_ref(), TIMEOUT).unwrap()
}

/// Commits a segment that this process owns, attaches it, and submits a task whose input is its second tensor.
fn attach(gpu: &Gpu, queue: &Queue, stream: &Stream) -> Ticket {
    let builder = queue.domain().create("weights", Place::Gpu(gpu.uuid()));
    let build = builder.tensor("first", DType::U8, &[4096]).tensor("second", DType::U8, &[4096]).allocate().unwrap();
    let second = build.device("second").unwrap();
    gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), second.as_slice()).unwrap();
    let segment = build.commit().unwrap();
    let weights = queue.attach(&segment).unwrap();
    let part = weights.tensor(&segment.tensor("second").unwrap()).unwrap();
    queue.submit(Task::new("double").part(part).output(4096), TIMEOUT).unwrap()
}

/// Enqueues the work of a task behind its input.
fn double(gpu: &Gpu, stream: &Stream, task: &ClaimedTask) {
    task.wait_inputs_on(stream.as_ref()).unwrap();
    let input = task.inputs()[0].device().unwrap();
    let output = task.output().unwrap().device().unwrap();
    stream.as_ref().enqueue_copy(output.as_slice(), input.as_slice()).unwrap();
    gpu.kernels().unwrap().enqueue_double(stream.as_ref(), output.as_slice()).unwrap();
}

/// Takes the result, checks it, and returns the number of its attempt.
fn take(gpu: &Gpu, ticket: &Ticket) -> u8 {
    let result = ticket.wait(TIMEOUT).unwrap();
    let output = result.output().unwrap().device().unwrap();
    assert_eq!(gpu.kernels().unwrap().verify(gpu.stream(), output.as_slice(), 2).unwrap(), None);
    let attempt = result.attempt();
    result.into_output().unwrap().release().unwrap();
    attempt
}

/// Creates a queue with one input and two outputs, and the timeline that streams wait for.
fn stage(world: &World) -> (Domain, Queue, TimelineWriter) {
    let domain = world.connect();
    let gpu = gpu(&domain);
    gpu.kernels().unwrap();
    let options = domain.queue("work").tasks(4).inputs(1, 4096).outputs(2, 4096).place(Place::Gpu(gpu.uuid()));
    let queue = options.create().unwrap();
    let gate = domain.timeline_writer("gate").unwrap();
    (domain, queue, gate)
}

fn is_idle(queue: &Queue) -> bool {
    let stats = queue.stats();
    (stats.free, stats.free_inputs, stats.free_outputs) == (4, 1, 2)
}

/// The input is written, the task is done and the result is complete, all behind the gate. Only the host that reads the
/// result waits.
pub(crate) fn task_goes_from_stream_to_stream(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    domain.timeline("gate").unwrap().wait_on(stream.as_ref(), 1).unwrap();
    let ticket = submit(&gpu, &queue, &stream);
    let mut worker = world.play("task");
    for order in ["claim", "double", "complete"] {
        worker.request(order);
    }
    assert_eq!(ticket.status(), TaskStatus::Enqueued { attempt: 1 });
    assert!(matches!(ticket.wait(MOMENT), Err(Error::Timeout { .. })));
    assert!(matches!(ticket.cancel(), Err(Error::Busy(Busy::TaskRunning { attempt: 1, .. }))));
    assert!(matches!(queue.inputs().alloc(MOMENT), Err(Error::Timeout { .. })), "a kernel will still read it");
    gate.signal(1).unwrap();
    assert_eq!(take(&gpu, &ticket), 1);
    eventually("all is free", || is_idle(&queue));
}

/// A process submits and completes tasks on one stream while another of its streams is stopped.
pub(crate) fn streams_of_one_process_do_not_wait_for_each_other(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let [standing, running] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    domain.timeline("gate").unwrap().wait_on(standing.as_ref(), 1).unwrap();
    let submit = |stream: &Stream| queue.submit_on(Task::new("count"), stream.as_ref(), TIMEOUT).unwrap();
    let [first, second] = [&standing, &running].map(submit);
    let [slow, fast] = [(); 2].map(|()| queue.claim(TIMEOUT).unwrap());
    assert_eq!((slow.task(), fast.task()), (first.task(), second.task()));
    fast.wait_inputs(TIMEOUT).unwrap();
    assert!(matches!(slow.wait_inputs(MOMENT), Err(Error::Timeout { .. })));
    slow.wait_inputs_on(standing.as_ref()).unwrap();
    slow.complete_on(standing.as_ref()).map_err(|refused| refused.0).unwrap();
    fast.complete_on(running.as_ref()).map_err(|refused| refused.0).unwrap();
    second.wait(TIMEOUT).unwrap();
    assert_eq!(first.status(), TaskStatus::Enqueued { attempt: 1 });
    gate.signal(1).unwrap();
    first.wait(TIMEOUT).unwrap();
    eventually("all is free", || is_idle(&queue));
}

pub(crate) fn part_of_a_segment_is_read_after_the_process_that_attached_it_was_killed(world: &World) {
    let (domain, queue, _gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let mut attacher = world.play("task");
    attacher.request("attach");
    let ticket = queue.ticket(&attacher.request("ticket").parse().unwrap()).unwrap();
    attacher.kill();
    eventually("its name is gone", || domain.open("weights", Duration::ZERO).is_err());
    let task = queue.claim(TIMEOUT).unwrap();
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    assert_eq!(take(&gpu, &ticket), 1);
    eventually("all is free", || is_idle(&queue));
    drop((ticket, queue));
    eventually("it has gone with the queue", || domain.inspect("weights@1").is_err());
}

/// The submitter's stream reads the result behind the worker's, while the task is enqueued.
pub(crate) fn result_is_read_behind_the_stream_of_its_worker(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let [writing, reading] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    let copies = domain.pool("copies").blocks(1).block_bytes(4096).place(Place::Gpu(gpu.uuid())).create().unwrap();
    let copy = copies.alloc(TIMEOUT).unwrap();
    domain.timeline("gate").unwrap().wait_on(writing.as_ref(), 1).unwrap();
    let ticket = submit(&gpu, &queue, &writing);
    let mut worker = world.play("task");
    for order in ["claim", "double", "complete"] {
        worker.request(order);
    }
    let result = ticket.wait_on(reading.as_ref(), TIMEOUT).unwrap();
    reading.as_ref().enqueue_copy(copy.device().unwrap().as_slice(), result.device().unwrap().as_slice()).unwrap();
    let other = Stream::new(gpu.context()).unwrap();
    result.wait_on(other.as_ref()).unwrap();
    assert!(matches!(result.take(MOMENT), Err(Error::Timeout { .. })));
    assert!(!other.as_ref().is_done().unwrap(), "it waits for the worker's stream, too");
    gate.signal(1).unwrap();
    let taken = result.take(TIMEOUT).unwrap();
    assert_eq!((taken.attempt(), taken.bytes()), (1, 4096));
    taken.into_output().unwrap().release_on(reading.as_ref()).unwrap();
    reading.synchronize().unwrap();
    other.synchronize().unwrap();
    assert!(matches!(result.device(), Err(Error::Gone(Gone::Task { .. }))));
    assert!(matches!(result.wait_on(other.as_ref()), Err(Error::Gone(Gone::Task { .. }))));
    assert!(matches!(result.take(TIMEOUT), Err(Error::Gone(Gone::Task { .. }))));
    assert_eq!(gpu.kernels().unwrap().verify(gpu.stream(), copy.device().unwrap().as_slice(), 2).unwrap(), None);
    eventually("all is free", || is_idle(&queue));
}

/// Kills a worker: the reader's stream continues with an incomplete output.
pub(crate) fn result_of_a_worker_killed_with_its_stream_standing_is_not_valid(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let ticket = submit(&gpu, &queue, &stream);
    let mut worker = world.play("task");
    for order in ["claim", "stop 1", "double", "complete"] {
        worker.request(order);
    }
    let result = ticket.wait_on(stream.as_ref(), TIMEOUT).unwrap();
    worker.kill();
    stream.synchronize().unwrap();
    let is_failed = |error| matches!(error, Error::InvalidData(InvalidData::TaskAttempt { attempt: 1, .. }));
    assert!(is_failed(result.take(TIMEOUT).unwrap_err()));
    assert!(is_failed(result.wait_on(stream.as_ref()).unwrap_err()));
    let task = queue.claim(TIMEOUT).unwrap();
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    let again = ticket.wait_on(stream.as_ref(), TIMEOUT).unwrap();
    assert_eq!(again.attempt(), 2);
    assert!(is_failed(result.take(TIMEOUT).unwrap_err()));
    assert!(is_failed(result.wait_on(stream.as_ref()).unwrap_err()));
    again.take(TIMEOUT).unwrap().into_output().unwrap().release().unwrap();
    drop(gate);
    eventually("all is free", || is_idle(&queue));
}

/// Lets two readers read one output: the first that takes it gets the result.
pub(crate) fn result_that_another_reader_has_taken_is_gone(world: &World) {
    let (domain, queue, _gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let ticket = submit(&gpu, &queue, &stream);
    let task = queue.claim(TIMEOUT).unwrap();
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    let [first, second] = [(); 2].map(|()| ticket.wait_on(stream.as_ref(), TIMEOUT).unwrap());
    first.take(TIMEOUT).unwrap().into_output().unwrap().release().unwrap();
    assert!(matches!(second.take(TIMEOUT).unwrap_err(), Error::Gone(Gone::Task { .. })));
    assert!(matches!(ticket.wait_on(stream.as_ref(), TIMEOUT), Err(Error::Gone(Gone::Task { .. }))));
    eventually("all is free", || is_idle(&queue));
}

pub(crate) fn task_of_a_worker_killed_with_its_stream_standing_goes_to_another(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let ticket = submit(&gpu, &queue, &stream);
    let mut worker = world.play("task");
    for order in ["claim", "stop 1", "double", "complete"] {
        worker.request(order);
    }
    assert_eq!(ticket.status(), TaskStatus::Enqueued { attempt: 1 });
    worker.kill();
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!((task.attempt(), task.task()), (2, ticket.task()));
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    assert_eq!(take(&gpu, &ticket), 2);
    drop(gate);
    eventually("all is free", || is_idle(&queue));
}

pub(crate) fn task_of_a_submitter_killed_with_its_stream_standing_has_failed(world: &World) {
    let (_domain, queue, _gate) = stage(world);
    let mut submitter = world.play("task");
    for order in ["stop 1", "submit"] {
        submitter.request(order);
    }
    let ticket = queue.ticket(&submitter.request("ticket").parse().unwrap()).unwrap();
    let task = queue.claim(TIMEOUT).unwrap();
    assert!(matches!(task.wait_inputs(MOMENT), Err(Error::Timeout { .. })));
    submitter.kill();
    assert!(matches!(task.wait_inputs(TIMEOUT), Err(Error::InvalidData(InvalidData::TaskInputs { .. }))));
    eventually("the broker has returned it", || !task.is_claimed());
    assert!(matches!(task.complete(), Err(Error::InvalidData(_) | Error::Gone(Gone::Claim { .. }))));
    assert!(matches!(ticket.wait(TIMEOUT), Err(Error::InvalidData(InvalidData::TaskFailed { .. }))));
    assert!(matches!(queue.retry(&ticket.task()), Err(Error::InvalidData(InvalidData::TaskInputs { .. }))));
    queue.purge(&ticket.task()).unwrap();
    eventually("all is free", || is_idle(&queue));
}

/// Kills a submitter: the worker's stream continues with incomplete inputs.
pub(crate) fn task_completed_on_a_stream_without_its_inputs_has_failed(world: &World) {
    let (domain, queue, _gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let mut submitter = world.play("task");
    for order in ["stop 1", "submit"] {
        submitter.request(order);
    }
    let ticket = queue.ticket(&submitter.request("ticket").parse().unwrap()).unwrap();
    let task = queue.claim(TIMEOUT).unwrap();
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    submitter.kill();
    assert!(matches!(ticket.wait(TIMEOUT), Err(Error::InvalidData(InvalidData::TaskFailed { .. }))));
    queue.purge(&ticket.task()).unwrap();
    eventually("all is free", || is_idle(&queue));
}

pub(crate) fn task_whose_inputs_are_complete_outlives_its_submitter(world: &World) {
    let (domain, queue, _gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let mut submitter = world.play("task");
    submitter.request("submit");
    let ticket = queue.ticket(&submitter.request("ticket").parse().unwrap()).unwrap();
    let task = queue.claim(TIMEOUT).unwrap();
    task.wait_inputs(TIMEOUT).unwrap();
    drop(task);
    submitter.kill();
    eventually("the submitter has gone", || domain.members().unwrap().len() == 1);
    let task = queue.claim(TIMEOUT).unwrap();
    task.wait_inputs(TIMEOUT).unwrap();
    double(&gpu, &stream, &task);
    task.complete_on(stream.as_ref()).map_err(|refused| refused.0).unwrap();
    assert_eq!(take(&gpu, &ticket), 2);
    eventually("all is free", || is_idle(&queue));
}

/// A worker drops a task while one of its kernels will still read the input.
pub(crate) fn input_of_a_dropped_task_is_kept_until_the_gpu_is_done(world: &World) {
    let (domain, queue, gate) = stage(world);
    let gpu = gpu(&domain);
    let stream = Stream::new(gpu.context()).unwrap();
    let ticket = submit(&gpu, &queue, &stream);
    let mut worker = world.play("task");
    for order in ["claim", "stop 1", "double", "drop"] {
        worker.request(order);
    }
    let task = queue.claim(TIMEOUT).unwrap();
    assert_eq!(task.attempt(), 2);
    double(&gpu, &stream, &task);
    stream.synchronize().unwrap();
    task.complete().unwrap();
    assert_eq!(take(&gpu, &ticket), 2);
    assert!(matches!(queue.inputs().alloc(MOMENT), Err(Error::Timeout { .. })), "the first attempt will still read it");
    gate.signal(1).unwrap();
    queue.inputs().alloc(TIMEOUT).unwrap().release().unwrap();
    eventually("all is free", || is_idle(&queue));
}
