// Holds 25.
//! Samples of topics that GPUs write and read. The scenes run on every driver, as in `scenes.rs`.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{thread, time::Duration};

use partywall::{
    DType, Domain, Error, Gpu, Place, Policy, Published, Publisher, Sample, Subscriber, TimelineEnding, TimelineWriter,
    Topic, TopicOptions, Wait,
    cuda::{Access, DeviceSlice, Stream, kernels},
    error::{Busy, InvalidData},
};

use super::world::{TIMEOUT, World, eventually, gpu, next_order, say};

/// How long to check that something does not happen.
const MOMENT: Duration = Duration::from_millis(50);

/// Elements of a sample.
const ELEMENTS: u64 = 1024;

/// Carries out the commands of the test, one word each, in order. The stream of this process stops at `stop` until the
/// test opens the gate.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let [stream, other] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    gpu.kernels().unwrap();
    let topic = domain.topic("frames").open().unwrap();
    let gate = domain.timeline("gate").unwrap();
    let mut publisher = None;
    let mut subscriber = None;
    let mut sample = None;
    say("ready");
    while let Some(order) = next_order() {
        let (what, argument) = order.split_once(' ').unwrap_or((&order, ""));
        match what {
            "join" => publisher = Some(topic.publisher().unwrap()),
            "leave" => publisher = None,
            "stop" => gate.wait_on(stream.as_ref(), argument.parse().unwrap()).unwrap(),
            "publish" => _ = publish(&gpu, &stream, publisher.as_ref().unwrap(), &[]),
            "full" => {
                let publisher: &Publisher = publisher.as_ref().unwrap();
                assert!(publisher.try_loan(DType::U32, &[ELEMENTS]).unwrap().is_none());
                let late = publisher.loan(DType::U32, &[ELEMENTS], MOMENT);
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                let wait = Wait::from(TIMEOUT).cancelled_by(&|| true);
                let cancelled = publisher.loan(DType::U32, &[ELEMENTS], wait);
                assert!(matches!(cancelled, Err(Error::Cancelled { .. })), "{cancelled:?}");
            }
            "synchronise" => stream.synchronize().unwrap(),
            "subscribe" => subscriber = Some(topic.subscriber(Policy::Latest).unwrap()),
            "receive" => {
                let received = receive(subscriber.as_ref().unwrap());
                received.device_on(stream.as_ref()).unwrap();
                sample = Some(received);
            }
            "drop" => sample = None,
            "give" => sample.take().unwrap().release_on(stream.as_ref()).unwrap(),
            "fault" => {
                // SAFETY: the first pages are never mapped, so the write faults on purpose.
                #[allow(unsafe_code)]
                let nowhere = unsafe { DeviceSlice::from_raw(4096, 4, Access::ReadWrite) };
                gpu.kernels().unwrap().enqueue_fill(other.as_ref(), nowhere).unwrap();
                eventually("the loss is detected", || other.synchronize().is_err());
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

/// Publishes the output of a kernel on `stream`.
fn publish(gpu: &Gpu, stream: &Stream, publisher: &Publisher, inputs: &[&Sample]) -> Published {
    let mut loan = publisher.loan(DType::U32, &[ELEMENTS], TIMEOUT).unwrap();
    inputs.iter().for_each(|input| loan.rests_on(input).unwrap());
    gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), loan.device().unwrap().as_slice()).unwrap();
    loan.filled().publish_on(stream.as_ref(), TIMEOUT).unwrap()
}

fn receive(subscriber: &Subscriber) -> Sample {
    subscriber.recv(TIMEOUT).unwrap()
}

/// Returns whether a kernel on `stream` finds the output of the other kernel.
fn is_filled(gpu: &Gpu, stream: &Stream, sample: &Sample) -> bool {
    let range = sample.device_on(stream.as_ref()).unwrap();
    gpu.kernels().unwrap().verify(stream.as_ref(), range.as_slice(), 1).unwrap().is_none()
}

/// Creates a topic with few blocks, and the timeline that streams of other processes wait for.
fn stage(world: &World) -> (Domain, Topic, TimelineWriter) {
    stage_of(world, |topic| topic.publishers(2).subscribers(3).held(2))
}

fn stage_of(world: &World, shape: impl FnOnce(TopicOptions) -> TopicOptions) -> (Domain, Topic, TimelineWriter) {
    let domain = world.connect();
    let gpu = gpu(&domain);
    gpu.kernels().unwrap();
    let topic = shape(domain.topic("frames").max_bytes(4 * ELEMENTS).depth(2));
    let topic = topic.place(Place::Gpu(gpu.uuid())).create().unwrap();
    let gate = domain.timeline_writer("gate").unwrap();
    (domain, topic, gate)
}

/// A publisher publishes on one stream while another of its streams is stopped.
pub(crate) fn streams_of_one_publisher_do_not_wait_for_each_other(world: &World) {
    let (domain, topic, gate) = stage_of(world, |topic| topic.depth(4).publishers(1).subscribers(1).held(3));
    let gpu = gpu(&domain);
    let [standing, running] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    domain.timeline("gate").unwrap().wait_on(standing.as_ref(), 1).unwrap();
    let sent = [&standing, &running, &standing].map(|stream| publish(&gpu, stream, &publisher, &[]).sequence);
    let samples = sent.map(|_| receive(&subscriber));
    assert_eq!(samples.each_ref().map(Sample::sequence), sent);
    samples[1].wait(TIMEOUT).unwrap();
    assert!(is_filled(&gpu, &running, &samples[1]), "its stream has not waited for the other");
    for late in [&samples[0], &samples[2]] {
        assert!(matches!(late.check(), Err(Error::Busy(Busy::NotReady { .. }))));
        assert!(matches!(late.read_at(0, &mut [0; 4]), Err(Error::Busy(Busy::NotReady { .. }))));
    }
    gate.signal(1).unwrap();
    publisher.drain(TIMEOUT).unwrap();
    samples.iter().for_each(|sample| sample.check().unwrap());
    let mut word = [0; 4];
    samples[2].read_at(0, &mut word).unwrap();
    assert_eq!(u32::from_ne_bytes(word), kernels::expected(0));
    drop(samples);
    unused(&topic);
}

/// Waits until all blocks are unused, or in the ring.
fn unused(topic: &Topic) {
    eventually("all blocks are back", || {
        let stats = topic.stats();
        (stats.held, stats.read) == (0, 0)
    });
}

pub(crate) fn a_sample_is_received_before_it_is_written_and_read_behind_that(world: &World) {
    let (domain, topic, gate) = stage(world);
    let gpu = gpu(&domain);
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut other = world.play("sample");
    let stream = Stream::new(gpu.context()).unwrap();
    for order in ["join", "stop 1", "publish"] {
        other.request(order);
    }
    let sample = receive(&subscriber);
    assert_eq!((sample.dtype(), sample.shape(), sample.sequence()), (DType::U32, &[ELEMENTS][..], 0));
    assert!(matches!(sample.check(), Err(Error::Busy(Busy::NotReady { .. }))));
    assert!(matches!(sample.wait(MOMENT), Err(Error::Timeout { .. })));
    sample.device_on(stream.as_ref()).unwrap();
    assert!(!stream.as_ref().is_done().unwrap(), "it waits for the other's stream");
    let opening = thread::spawn(move || {
        thread::sleep(MOMENT);
        gate.signal(1).unwrap();
        gate
    });
    assert!(is_filled(&gpu, &stream, &sample));
    sample.check().unwrap();
    sample.wait(Duration::ZERO).unwrap();
    sample.release_on(stream.as_ref()).unwrap();
    let _gate = opening.join().unwrap();
    for sequence in 1..50 {
        other.request("publish");
        let sample = receive(&subscriber);
        assert_eq!((sample.sequence(), sample.missed()), (sequence, 0));
        assert!(is_filled(&gpu, &stream, &sample));
        sample.check().unwrap();
        match sequence % 3 {
            0 => drop(sample),
            1 => sample.release().unwrap(),
            _ => sample.release_on(stream.as_ref()).unwrap(),
        }
    }
    other.request("leave");
    unused(&topic);
    eventually("its place is free", || topic.stats().publishers.is_empty());
}

pub(crate) fn blocks_that_streams_write_are_not_used_again(world: &World) {
    let (domain, topic, gate) = stage(world);
    let gpu = gpu(&domain);
    let mut other = world.play("sample");
    for order in ["join", "stop 1", "publish", "publish", "leave"] {
        other.request(order);
    }
    // They are overwritten in the ring, and no subscriber has received them.
    let publisher = topic.publisher().unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    for _ in 0..50 {
        publish(&gpu, &stream, &publisher, &[]);
        stream.synchronize().unwrap();
    }
    eventually("only blocks of the other process are held", || topic.stats().held == 2);
    assert_eq!(topic.stats().publishers.len(), 2, "it has left, but its stream is not done");
    gate.signal(1).unwrap();
    unused(&topic);
    eventually("its place is free", || topic.stats().publishers.len() == 1);
}

/// The publisher can take as many blocks as the depth of the ring plus its loans. The other blocks stay available to
/// others, even while it is stopped.
pub(crate) fn a_publisher_that_is_ahead_of_its_gpu_leaves_blocks_for_others(world: &World) {
    let (domain, topic, gate) = stage(world);
    let gpu = gpu(&domain);
    let mut other = world.play("sample");
    for order in ["join", "stop 1", "publish", "publish", "publish", "publish", "full"] {
        other.request(order);
    }
    let publisher = topic.publisher().unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    for _ in 0..20 {
        publish(&gpu, &stream, &publisher, &[]);
        stream.synchronize().unwrap();
    }
    gate.signal(1).unwrap();
    for order in ["publish", "leave"] {
        other.request(order);
    }
    unused(&topic);
}

/// As above, with all publishers but one ahead of their GPUs, and a subscriber that holds as many samples as it may.
/// The topic has `depth` additional blocks for each of these publishers.
pub(crate) fn all_publishers_but_one_ahead_of_their_gpus_leave_blocks_for_the_last(world: &World) {
    let depth = 2;
    let publishers = 3;
    let needed = depth + 2 * publishers + 1;
    let (domain, topic, gate) = stage_of(world, |topic| {
        topic.publishers(publishers).subscribers(1).held(1).blocks(needed + (publishers - 1) * depth)
    });
    let gpu = gpu(&domain);
    let subscriber = topic.subscriber(Policy::Latest).unwrap();
    let mut others = [(); 2].map(|()| world.play("sample"));
    for order in ["join", "stop 1", "publish", "publish", "publish", "publish", "full"] {
        others.iter_mut().for_each(|other| _ = other.request(order));
    }
    let _held = receive(&subscriber);
    let publisher = topic.publisher().unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    for _ in 0..20 {
        publish(&gpu, &stream, &publisher, &[]);
        stream.synchronize().unwrap();
    }
    gate.signal(1).unwrap();
    others.iter_mut().for_each(|other| _ = other.request("leave"));
}

/// The publisher is killed before its stream has written the sample. Its receivers are notified, and so are the
/// receivers of samples derived from it.
pub(crate) fn unfinished_samples_of_a_dead_publisher_have_failed_and_taint_derived_ones(world: &World) {
    let (domain, topic, _gate) = stage(world);
    let gpu = gpu(&domain);
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut other = world.play("sample");
    let stream = Stream::new(gpu.context()).unwrap();
    let publisher = topic.publisher().unwrap();
    for order in ["join", "publish", "synchronise", "stop 1", "publish"] {
        other.request(order);
    }
    let [finished, unfinished] = [(); 2].map(|()| receive(&subscriber));
    // Derived from both, by a stream that waits for the second one.
    finished.device_on(stream.as_ref()).unwrap();
    unfinished.device_on(stream.as_ref()).unwrap();
    publish(&gpu, &stream, &publisher, &[&finished, &unfinished]);
    assert!(!stream.as_ref().is_done().unwrap());
    other.kill();
    stream.synchronize().unwrap();
    finished.check().unwrap();
    let failed = |error: Error| match error {
        Error::InvalidData(InvalidData::SampleFailed { position, ending, .. }) => {
            assert_eq!((position, ending), (1, TimelineEnding::OwnerDied))
        }
        other => panic!("{other:?}"),
    };
    failed(unfinished.check().unwrap_err());
    failed(unfinished.wait(Duration::ZERO).unwrap_err());
    failed(unfinished.device_on(stream.as_ref()).unwrap_err());
    drop(finished);
    let made_of_it = receive(&subscriber);
    assert!(matches!(made_of_it.check(), Err(Error::InvalidData(InvalidData::SampleTainted { position: 2, .. }))));
    // Other samples are not affected.
    drop((unfinished, made_of_it));
    publish(&gpu, &stream, &publisher, &[]);
    let next = receive(&subscriber);
    assert!(is_filled(&gpu, &stream, &next));
    next.check().unwrap();
    drop((next, publisher));
    unused(&topic);
}

/// The status of a sample is pending while that of one of its inputs is pending.
pub(crate) fn check_waits_for_the_inputs_of_a_sample(world: &World) {
    let (domain, topic, gate) = stage(world);
    let gpu = gpu(&domain);
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut other = world.play("sample");
    let stream = Stream::new(gpu.context()).unwrap();
    let publisher = topic.publisher().unwrap();
    for order in ["join", "stop 1", "publish"] {
        other.request(order);
    }
    let input = receive(&subscriber);
    // Its own stream does not wait for the input, and finishes first.
    publish(&gpu, &stream, &publisher, &[&input]);
    stream.synchronize().unwrap();
    let made_of_it = receive(&subscriber);
    made_of_it.wait(TIMEOUT).unwrap();
    assert!(matches!(made_of_it.check(), Err(Error::Timeout { .. })), "its status is pending");
    // The input is kept until the status is settled.
    drop(input);
    assert_eq!(topic.stats().subscribers[0].held, 2);
    gate.signal(1).unwrap();
    made_of_it.check().unwrap();
    eventually("it is released", || topic.stats().subscribers[0].held == 1);
    drop((made_of_it, publisher));
    unused(&topic);
}

/// Reads of a process end no later than the process.
pub(crate) fn samples_come_back_when_the_gpu_is_done_or_the_process_is_dead(world: &World) {
    let (domain, topic, gate) = stage(world);
    let gpu = gpu(&domain);
    let mut other = world.play("sample");
    let stream = Stream::new(gpu.context()).unwrap();
    let publisher = topic.publisher().unwrap();
    let is_read = || {
        thread::sleep(MOMENT);
        topic.stats().subscribers.iter().map(|subscriber| subscriber.held).sum::<u32>()
    };
    other.request("subscribe");
    for (round, how) in [(1, "drop"), (2, "give")] {
        publish(&gpu, &stream, &publisher, &[]);
        for order in [&format!("stop {round}"), "receive", how] {
            other.request(order);
        }
        assert_eq!(is_read(), 1, "one of its streams will still read it");
        gate.signal(round).unwrap();
        eventually("it is released", || topic.stats().subscribers[0].held == 0);
    }
    publish(&gpu, &stream, &publisher, &[]);
    for order in ["stop 3", "receive", "give"] {
        other.request(order);
    }
    assert_eq!(is_read(), 1);
    other.kill();
    eventually("its place is free", || topic.stats().subscribers.is_empty());
    drop(publisher);
    unused(&topic);
}

/// The streams of the publisher may still run, so its block stays held.
pub(crate) fn unfinished_samples_of_a_publisher_with_a_lost_context_have_failed(world: &World) {
    let (domain, topic, _gate) = stage(world);
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut other = world.play("sample");
    for order in ["join", "stop 1", "publish", "fault"] {
        other.request(order);
    }
    let sample = receive(&subscriber);
    eventually("it has failed", || {
        matches!(
            sample.check(),
            Err(Error::InvalidData(InvalidData::SampleFailed { ending: TimelineEnding::OwnerFaulted, .. }))
        )
    });
    drop(sample);
    let gpu = gpu(&domain);
    let publisher = topic.publisher().unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    for _ in 0..2 {
        publish(&gpu, &stream, &publisher, &[]);
        receive(&subscriber).release().unwrap();
    }
    eventually("it is overwritten", || topic.stats().held == 1);
    drop(publisher);
    other.kill();
    unused(&topic);
}

/// The connection ends and the process leaves the topic, but not before its GPU is done.
pub(crate) fn a_connection_that_ends_completes_what_it_has_published(world: &World) {
    let (outside, topic, gate) = stage(world);
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let domain = world.connect();
    let ours = gpu(&domain);
    let stream = Stream::new(ours.context()).unwrap();
    ours.kernels().unwrap();
    let theirs = domain.topic("frames").open().unwrap();
    let publisher = theirs.publisher().unwrap();
    domain.timeline("gate").unwrap().wait_on(stream.as_ref(), 1).unwrap();
    publish(&ours, &stream, &publisher, &[]);
    let sample = receive(&subscriber);
    let ending = thread::spawn(move || drop((publisher, theirs, domain)));
    thread::sleep(MOMENT);
    assert!(matches!(sample.check(), Err(Error::Busy(Busy::NotReady { .. }))));
    gate.signal(1).unwrap();
    ending.join().unwrap();
    sample.check().unwrap();
    let stream = Stream::new(gpu(&outside).context()).unwrap();
    assert!(is_filled(&gpu(&outside), &stream, &sample));
    sample.release().unwrap();
    unused(&topic);
}
