// Holds 170, 172.
//! Timelines between streams. The scenes run on every driver.
//!
//! The tests of `crates/partywall` use this file, too, and run each scene on the simulated driver. Each program has its
//! own module `world`, which starts a broker and this program as another process that runs [`play`].
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, Gpu, MAX_VALUE, Place, Segment, Timeline, TimelineEnding,
    cuda::{Access, DeviceBuffer, DeviceSlice, Stream},
    error::{Gone, InvalidArgument, InvalidData, Unreachable},
};

use super::world::{TIMEOUT, World, eventually, gpu, in_a_child, next_order, say};

/// Carries out the commands of the test, in order.
pub(crate) fn play(prepared: bool) {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let data = domain.opener("data").read_write().timeout(TIMEOUT).open().unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let other = Stream::new(gpu.context()).unwrap();
    let gate = Gate::new(&gpu);
    gpu.kernels().unwrap();
    let mut writer = None;
    let input = domain.timeline("in").unwrap();
    if prepared {
        prepare(&domain, &stream);
    }
    say("ready");
    while let Some(order) = next_order() {
        let (order, v) = order.split_once(' ').unwrap_or((&order, "0"));
        let v: u64 = v.parse().unwrap();
        match order {
            "write" => writer = Some(domain.timeline_writer("out").unwrap()),
            "fill" => gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), slice(&data)).unwrap(),
            "double" => gpu.kernels().unwrap().enqueue_double(stream.as_ref(), slice(&data)).unwrap(),
            "wait" => input.wait_on(stream.as_ref(), v).unwrap(),
            "stop" => gate.stop(&stream),
            "go" => gate.go(&other),
            "signal" => writer.as_ref().unwrap().signal_on(stream.as_ref(), v).unwrap(),
            "rest" => writer.as_ref().unwrap().rests_on(&input),
            // On another stream, so that the signals of the first stream are still outstanding.
            "fault" => {
                // SAFETY: the first pages are never mapped, so the write faults on purpose. (Address 2⁴⁰ would not do:
                // a kernel can write there, measured on an H200 with driver 580.)
                #[allow(unsafe_code)]
                let nowhere = unsafe { DeviceSlice::from_raw(4096, 4, Access::ReadWrite) };
                gpu.kernels().unwrap().enqueue_fill(other.as_ref(), nowhere).unwrap();
            }
            "close" => drop(writer.take()),
            "try-signal" => {
                let refused = writer.as_ref().unwrap().signal(v);
                say(&format!("done {}", refused.err().map_or("signalled", |error| error.anchor())));
                continue;
            }
            "try-wait" => {
                let refused = input.wait_on(stream.as_ref(), v);
                say(&format!("done {}", refused.err().map_or("enqueued", |error| error.anchor())));
                continue;
            }
            other => panic!("unknown command {other}"),
        }
        say("done");
    }
}

pub(crate) fn ended(result: Result<(), Error>) -> (TimelineEnding, u64, u64) {
    match result {
        Err(Error::Gone(Gone::Timeline { ending, wanted, last, .. })) => (ending, wanted, last),
        other => panic!("{other:?}"),
    }
}

/// Returns whether a wait for `v` times out at the moment.
pub(crate) fn is_pending(timeline: &Timeline, v: u64) -> bool {
    match timeline.wait(v, Duration::ZERO) {
        Ok(()) => false,
        Err(Error::Timeout { .. }) => true,
        Err(other) => panic!("{other}"),
    }
}

/// A word of device memory that blocks streams of one process until it is written.
pub(crate) struct Gate {
    word: DeviceBuffer,
}

impl Gate {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
        gpu.stream().copy_from_host(word.as_slice(), &[0; 8]).unwrap();
        Self { word }
    }

    pub(crate) fn stop(&self, stream: &Stream) {
        stream.as_ref().enqueue_wait_u64(self.word.as_slice(), 1).unwrap();
    }

    pub(crate) fn go(&self, stream: &Stream) {
        stream.as_ref().enqueue_write_u64(self.word.as_slice(), 1).unwrap();
        stream.synchronize().unwrap();
    }
}

/// Makes the first call with a stream, which registers memory with the driver, before any stream waits.
pub(crate) fn prepare(domain: &Domain, stream: &Stream) {
    let writer = domain.timeline_writer(&format!("prepared-{}", domain.member())).unwrap();
    writer.signal_on(stream.as_ref(), 1).unwrap();
    stream.synchronize().unwrap();
}

/// Creates 4 KiB of GPU memory that all processes of a test write.
fn data(domain: &Domain, gpu: &Gpu) -> Segment {
    let builder = domain.create("data", Place::Gpu(gpu.uuid())).tensor("x", DType::U32, &[1024]);
    let mut build = builder.mutable(true).kept(true).allocate().unwrap();
    build.write("x", &[0; 4096]).unwrap();
    build.commit().unwrap()
}

pub(crate) fn slice(data: &Segment) -> DeviceSlice<'_> {
    data.tensor("x").unwrap().device().unwrap().as_slice()
}

/// Returns the factor by which the data exceeds the test pattern, once the stream has reached this point.
fn found(gpu: &Gpu, stream: &Stream, data: &Segment) -> u32 {
    stream.synchronize().unwrap();
    let times = (1..=4).find(|times| gpu.kernels().unwrap().verify(gpu.stream(), slice(data), *times) == Ok(None));
    times.unwrap_or(0)
}

/// The common state of a scene.
pub(crate) struct Stage {
    pub(crate) domain: Domain,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) data: Segment,
    pub(crate) stream: Stream,
    /// Another stream and its memory, to check whether the first stream still waits. Freeing them behind a wait would
    /// wait, too.
    other: (Stream, DeviceBuffer),
}

impl Stage {
    pub(crate) fn new(world: &World) -> Self {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let data = data(&domain, &gpu);
        let stream = Stream::new(gpu.context()).unwrap();
        gpu.kernels().unwrap();
        let other = (Stream::new(gpu.context()).unwrap(), DeviceBuffer::new(gpu.context(), 4096).unwrap());
        prepare(&domain, &stream);
        Self { domain, gpu, data, stream, other }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.stream.as_ref().is_done().unwrap()
    }

    /// Returns whether the stream still waits after another stream had time to work.
    pub(crate) fn still_waits(&self) -> bool {
        let (other, scratch) = &self.other;
        for _ in 0..3 {
            other.as_ref().enqueue_set(scratch.as_slice(), 1).unwrap();
            other.synchronize().unwrap();
        }
        !self.is_done()
    }
}

pub(crate) fn kernels_of_two_processes_come_one_after_the_other(world: &World) {
    let Stage { domain, gpu, data, stream, .. } = &Stage::new(world);
    let answer = domain.timeline("out").unwrap();
    let order = domain.timeline_writer("in").unwrap();
    let mut other = world.play("gpu");
    // All work is enqueued in advance, and the other process waits before its first command.
    other.request("write");
    for order in ["wait 1", "double", "signal 1", "wait 2", "double", "signal 2"] {
        other.request(order);
    }
    gpu.kernels().unwrap().enqueue_fill(stream.as_ref(), slice(data)).unwrap();
    answer.wait_announced(2, TIMEOUT).unwrap();
    assert_eq!((answer.announced(), answer.value()), (2, 0));
    order.signal_on(stream.as_ref(), 1).unwrap();
    answer.wait_on(stream.as_ref(), 1).unwrap();
    assert_eq!(found(gpu, stream, data), 2);
    answer.wait(1, TIMEOUT).unwrap();
    assert!(is_pending(&answer, 2));
    order.signal(2).unwrap();
    answer.wait_on(stream.as_ref(), 2).unwrap();
    assert_eq!(found(gpu, stream, data), 4);
    answer.check().unwrap();
}

/// Trap: the wait comes before the value was promised, before there is a writer, before its process was started.
pub(crate) fn a_wait_may_come_before_its_writer(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("out").unwrap();
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    assert!(stage.still_waits());
    let mut writer = world.play("gpu");
    for order in ["write", "fill", "signal 1"] {
        writer.request(order);
    }
    assert_eq!(found(&stage.gpu, &stage.stream, &stage.data), 1);
}

/// Trap: a kernel's first launch behind a wait, which loads code and waits for the device.
pub(crate) fn kernels_run_while_a_stream_waits_if_they_were_loaded_before(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let gpu = &stage.gpu;
    let writer = stage.domain.timeline_writer("x").unwrap();
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    assert!(stage.still_waits());
    gpu.kernels().unwrap().enqueue_fill(gpu.stream(), slice(&stage.data)).unwrap();
    gpu.stream().synchronize().unwrap();
    assert!(!stage.is_done());
    writer.signal(1).unwrap();
    stage.stream.synchronize().unwrap();
    // On another connection they are loaded too late, and the thread continues only with the wait.
    let again = partywall::Gpu::open(gpu.uuid()).unwrap();
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    thread::scope(|scope| {
        let loading = scope.spawn(|| again.kernels().map(drop));
        thread::sleep(Duration::from_millis(50));
        assert!(!loading.is_finished());
        writer.signal(2).unwrap();
        loading.join().unwrap().unwrap();
    });
}

/// Trap: `CUDA_LAUNCH_BLOCKING`, with which a wait stops its process.
pub(crate) fn launch_blocking_is_found_before_a_wait_is_enqueued(world: &World) {
    let stage = Stage::new(world);
    let order = stage.domain.timeline_writer("in").unwrap();
    order.signal(3).unwrap();
    for (value, refused) in [("1", "launch-blocking"), ("yes", "launch-blocking"), ("0", "enqueued"), ("", "enqueued")]
    {
        let mut other = world.play_with("gpu", |command| {
            command.env("CUDA_LAUNCH_BLOCKING", value);
        });
        assert_eq!(other.request("try-wait 3"), "enqueued", "a wait for a reached value blocks nothing");
        assert_eq!(other.request("try-wait 4"), refused);
    }
}

/// Trap: a call that waits for the whole device behind a wait. Nothing that ends the wait needs the driver.
pub(crate) fn a_thread_that_is_held_up_in_the_driver_holds_up_no_signal(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let buffers = [(), ()].map(|()| DeviceBuffer::new(stage.gpu.context(), 1 << 20).unwrap());
    let [first, second] = buffers;
    thread::scope(|scope| {
        timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
        let freeing = scope.spawn(|| drop(first));
        thread::sleep(Duration::from_millis(50));
        assert!(!freeing.is_finished());
        writer.signal(1).unwrap();
        freeing.join().unwrap();
        // The same with a timeout, which the service thread has to enforce meanwhile.
        let limited = timeline.wait_on_for(stage.stream.as_ref(), 2, Duration::from_millis(50)).unwrap();
        drop(second);
        eventually("the end of the wait", || limited.is_over());
        assert!(matches!(limited.outcome(), Some(Err(Error::Timeout { .. }))));
    });
    // Allocating does not wait.
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    let builder = stage.domain.create("more", Place::Gpu(stage.gpu.uuid())).tensor("x", DType::U32, &[1024]);
    let more = builder.allocate().unwrap();
    assert!(!stage.is_done());
    writer.signal(2).unwrap();
    drop(more);
    stage.stream.synchronize().unwrap();
}

/// Trap: two streams signal one timeline, and the earlier value would arrive later.
pub(crate) fn a_second_stream_waits_for_what_the_first_one_owes(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let [second, opener] = [(), ()].map(|()| Stream::new(stage.gpu.context()).unwrap());
    let gate = Gate::new(&stage.gpu);
    gate.stop(&stage.stream);
    writer.signal_on(stage.stream.as_ref(), 1).unwrap();
    writer.signal_on(stage.stream.as_ref(), 2).unwrap();
    thread::scope(|scope| {
        let signalling = scope.spawn(|| {
            writer.signal_on(second.as_ref(), 3).unwrap();
            writer.signal(4).unwrap();
        });
        thread::sleep(Duration::from_millis(50));
        assert!(!signalling.is_finished());
        assert_eq!((timeline.value(), timeline.announced()), (0, 2));
        gate.go(&opener);
        signalling.join().unwrap();
    });
    assert_eq!((timeline.value(), timeline.announced()), (4, 4));
}

/// Trap: another device is current on the thread, or the words were registered by another device's context.
pub(crate) fn whichever_device_is_current(world: &World) {
    let stage = Stage::new(world);
    let second = stage.domain.gpu(partywall::gpu::devices().unwrap()[1].uuid().unwrap()).unwrap();
    let there = Stream::new(second.context()).unwrap();
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    second.context().make_current().unwrap();
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    timeline.wait_on(there.as_ref(), 1).unwrap();
    stage.gpu.context().make_current().unwrap();
    assert!(stage.still_waits());
    writer.signal_on(gpu(&stage.domain).stream(), 1).unwrap();
    writer.signal_on(there.as_ref(), 2).unwrap();
    stage.stream.synchronize().unwrap();
    there.synchronize().unwrap();
    assert_eq!(timeline.device_ptr(&second).unwrap(), timeline.device_ptr(&stage.gpu).unwrap());
    timeline.wait(2, TIMEOUT).unwrap();
}

/// Trap: values near the end of their range, where a wrong comparison is signed.
pub(crate) fn streams_compare_the_largest_values(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    timeline.wait_on(stage.stream.as_ref(), MAX_VALUE).unwrap();
    assert!(matches!(
        timeline.wait_on(stage.stream.as_ref(), MAX_VALUE + 1),
        Err(Error::InvalidArgument(InvalidArgument::Value { .. }))
    ));
    assert!(matches!(
        writer.signal_on(stage.gpu.stream(), u64::MAX),
        Err(Error::InvalidArgument(InvalidArgument::Value { .. }))
    ));
    writer.signal_on(stage.gpu.stream(), MAX_VALUE - 1).unwrap();
    stage.gpu.stream().synchronize().unwrap();
    assert!(stage.still_waits());
    writer.signal_on(stage.gpu.stream(), MAX_VALUE).unwrap();
    stage.stream.synchronize().unwrap();
    // From the largest value, poison is still larger.
    let last = stage.domain.timeline("y").unwrap();
    last.wait_on(stage.stream.as_ref(), MAX_VALUE).unwrap();
    last.abandon().unwrap();
    stage.stream.synchronize().unwrap();
    assert_eq!(ended(last.check()), (TimelineEnding::Abandoned, MAX_VALUE, 0));
}

/// Trap: a waiter is killed while its stream waits.
pub(crate) fn a_killed_waiter_harms_no_other_process(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("in").unwrap();
    let writer = stage.domain.timeline_writer("in").unwrap();
    let mut victim = world.play("gpu");
    for order in ["wait 1", "double"] {
        victim.request(order);
    }
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    victim.kill();
    eventually("its death is proved", || stage.domain.members().unwrap().len() == 1);
    assert!(stage.still_waits());
    stage.gpu.kernels().unwrap().enqueue_fill(stage.gpu.stream(), slice(&stage.data)).unwrap();
    writer.signal_on(stage.gpu.stream(), 1).unwrap();
    assert_eq!(found(&stage.gpu, &stage.stream, &stage.data), 1);
    timeline.check().unwrap();
}

pub(crate) fn a_killed_writer_with_signals_under_way_ends_every_wait(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("out").unwrap();
    let mut writer = world.play("gpu");
    for order in ["write", "fill", "signal 1", "stop", "fill", "signal 2"] {
        writer.request(order);
    }
    timeline.wait(1, TIMEOUT).unwrap();
    timeline.wait_announced(2, TIMEOUT).unwrap();
    assert!(is_pending(&timeline, 2));
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    let limited = timeline.wait_on_for(stage.gpu.stream(), 2, TIMEOUT).unwrap();
    timeline.check().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| timeline.wait(2, TIMEOUT));
        assert!(stage.still_waits());
        writer.kill();
        assert_eq!(ended(waiter.join().unwrap()), (TimelineEnding::OwnerDied, 2, 1));
    });
    stage.stream.synchronize().unwrap();
    assert_eq!(ended(timeline.check()), (TimelineEnding::OwnerDied, 2, 1));
    eventually("the end of the limited wait", || limited.is_over());
    assert_eq!(ended(limited.outcome().unwrap()), (TimelineEnding::OwnerDied, 2, 1));
    // A new wait is refused, and reached values stay reached.
    assert_eq!(ended(timeline.wait_on(stage.stream.as_ref(), 3)), (TimelineEnding::OwnerDied, 3, 1));
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    // The next writer continues after the last value that was really signalled.
    let mut writer = world.play("gpu");
    writer.request("write");
    assert!(timeline.follow().unwrap());
    timeline.check().unwrap();
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    for order in ["fill", "signal 2"] {
        writer.request(order);
    }
    assert_eq!(found(&stage.gpu, &stage.stream, &stage.data), 1);
    timeline.check().unwrap();
}

pub(crate) fn a_writer_that_closes_keeps_what_its_streams_promised(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("out").unwrap();
    let mut writer = world.play("gpu");
    for order in ["write", "stop", "fill", "signal 1"] {
        writer.request(order);
    }
    let beyond = Stream::new(stage.gpu.context()).unwrap();
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    timeline.wait_on(beyond.as_ref(), 2).unwrap();
    thread::scope(|scope| {
        let promised = scope.spawn(|| timeline.wait(1, TIMEOUT));
        let more = scope.spawn(|| timeline.wait(2, TIMEOUT));
        writer.request("close");
        assert_eq!(ended(more.join().unwrap()), (TimelineEnding::Closed, 2, 0));
        assert!(stage.still_waits() && !promised.is_finished());
        assert!(!beyond.as_ref().is_done().unwrap(), "a stream sees the end only when all promised values are stored");
        writer.request("go");
        promised.join().unwrap().unwrap();
    });
    assert_eq!(found(&stage.gpu, &stage.stream, &stage.data), 1);
    beyond.synchronize().unwrap();
    assert_eq!(ended(timeline.check()), (TimelineEnding::Closed, 2, 1));
}

pub(crate) fn the_end_of_a_connection_waits_for_what_its_streams_promised(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let domain = world.connect();
    let gpu = gpu(&domain);
    let [signalling, opener] = [(), ()].map(|()| Stream::new(gpu.context()).unwrap());
    let gate = Gate::new(&gpu);
    gate.stop(&signalling);
    let writer = domain.timeline_writer("x").unwrap();
    writer.signal_on(signalling.as_ref(), 1).unwrap();
    thread::scope(|scope| {
        let ending = scope.spawn(move || drop((writer, domain)));
        thread::sleep(Duration::from_millis(50));
        assert!(!ending.is_finished());
        assert_eq!(ended(timeline.wait(2, TIMEOUT)), (TimelineEnding::Closed, 2, 0));
        gate.go(&opener);
        ending.join().unwrap();
    });
    timeline.wait(1, TIMEOUT).unwrap();
    assert_eq!(stage.domain.members().unwrap().len(), 1);
}

pub(crate) fn a_lost_context_is_found_and_reported(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("out").unwrap();
    let mut writer = world.play("gpu");
    for order in ["write", "signal 1", "stop", "signal 2"] {
        writer.request(order);
    }
    timeline.wait(1, TIMEOUT).unwrap();
    timeline.wait_on(stage.stream.as_ref(), 2).unwrap();
    writer.request("fault");
    // It makes no further call; its service threads detect the loss.
    assert_eq!(ended(timeline.wait(2, TIMEOUT)), (TimelineEnding::OwnerFaulted, 2, 1));
    stage.stream.synchronize().unwrap();
    assert_eq!(ended(timeline.check()), (TimelineEnding::OwnerFaulted, 2, 1));
    assert_eq!(writer.request("try-signal 3"), "broken-context");
    assert_eq!(writer.request("try-wait 3"), "broken-context");
    writer.kill();
}

/// A stage of a pipeline dies. The later stages continue with invalid data, and report it.
pub(crate) fn dead_stage_taints_values_down_the_chain(world: &World) {
    let stage = Stage::new(world);
    let [second, third] = [(), ()].map(|()| world.connect());
    let [on_second, on_third] = [&second, &third].map(|domain| Stream::new(gpu(domain).context()).unwrap());
    let mut first = world.play("gpu");
    first.request("write");
    let input = second.timeline("out").unwrap();
    let middle = second.timeline_writer("middle").unwrap();
    let output = third.timeline("middle").unwrap();
    let end = stage.domain.timeline_writer("end").unwrap();
    let last = third.timeline("end").unwrap();
    middle.rests_on(&input);
    end.rests_on(&output);
    for v in 1..=3 {
        input.wait_on(on_second.as_ref(), v).unwrap();
        middle.signal_on(on_second.as_ref(), 10 * v).unwrap();
        output.wait_on(on_third.as_ref(), 10 * v).unwrap();
        end.signal_on(on_third.as_ref(), 100 * v).unwrap();
    }
    for order in ["fill", "signal 1", "stop", "fill", "signal 2"] {
        first.request(order);
    }
    last.wait(100, TIMEOUT).unwrap();
    last.check().unwrap();
    first.kill();
    // Streams cannot be notified: they run to the end and read incomplete data.
    last.wait(300, TIMEOUT).unwrap();
    assert_eq!((middle.timeline().value(), end.timeline().value()), (30, 300));
    eventually("the mark", || last.check().is_err());
    let from = |refused: Result<(), Error>| match refused {
        Err(Error::InvalidData(InvalidData::Tainted { name, from })) => (name, from),
        other => panic!("{other:?}"),
    };
    assert_eq!(from(last.check()), ("end".to_owned(), 200));
    assert_eq!(from(output.check()), ("middle".to_owned(), 20));
    assert_eq!(from(middle.signal(31)), ("middle".to_owned(), 20));
    assert_eq!(from(end.signal_on(on_third.as_ref(), 301)), ("end".to_owned(), 200));
    assert_eq!(ended(input.check()), (TimelineEnding::OwnerDied, 3, 1));
    // Values that do not rest on it stay valid, and the chain restarts from the first stage.
    third.timeline("middle").unwrap().check().unwrap();
    let mut first = world.play("gpu");
    first.request("write");
    assert!(input.follow().unwrap());
    drop(middle);
    let middle = second.timeline_writer("middle").unwrap();
    middle.rests_on(&input);
    assert!(output.follow().unwrap());
    input.wait_on(on_second.as_ref(), 2).unwrap();
    middle.signal_on(on_second.as_ref(), 40).unwrap();
    first.request("signal 2");
    output.wait(40, TIMEOUT).unwrap();
    output.check().unwrap();
}

pub(crate) fn an_input_counts_though_its_handle_is_gone(world: &World) {
    let stage = Stage::new(world);
    let domain = &stage.domain;
    let stream = stage.stream.as_ref();
    let input = domain.timeline("out").unwrap();
    let writer = domain.timeline_writer("own").unwrap();
    let mut first = world.play("gpu");
    for order in ["write", "stop", "signal 1"] {
        first.request(order);
    }
    writer.rests_on(&input);
    writer.signal(1).unwrap();
    input.wait_on(stream, 1).unwrap();
    writer.signal_on(stream, 2).unwrap();
    drop(input);
    first.kill();
    let own = domain.timeline("own").unwrap();
    own.wait(2, TIMEOUT).unwrap();
    eventually("the mark", || matches!(own.check(), Err(Error::InvalidData(InvalidData::Tainted { from: 2, .. }))));
    // Closing does not hide it.
    drop(writer);
    assert!(matches!(own.check(), Err(Error::InvalidData(InvalidData::Tainted { from: 2, .. }))));
}

pub(crate) fn a_failed_input_that_nothing_rests_on_yet_only_refuses(world: &World) {
    let stage = Stage::new(world);
    let domain = &stage.domain;
    let stream = stage.stream.as_ref();
    let input = domain.timeline("in").unwrap();
    let writer = domain.timeline_writer("out").unwrap();
    let first = domain.timeline_writer("in").unwrap();
    writer.rests_on(&input);
    writer.signal(1).unwrap();
    input.wait_on(stream, 5).unwrap();
    first.signal(4).unwrap();
    drop(first);
    stage.stream.synchronize().unwrap();
    assert!(matches!(writer.signal(2), Err(Error::InvalidData(InvalidData::Tainted { from: 2, .. }))));
    let next = domain.timeline_writer("in").unwrap();
    assert!(input.follow().unwrap());
    writer.signal(2).unwrap();
    next.signal(5).unwrap();
    input.wait_on(stream, 5).unwrap();
    drop(next);
    writer.signal_on(stream, 3).unwrap();
    writer.signal(4).unwrap();
    writer.timeline().check().unwrap();
}

pub(crate) fn a_limited_wait_ends_by_the_value_or_by_the_clock(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let stream = stage.stream.as_ref();
    let start = Instant::now();
    let late = timeline.wait_on_for(stream, 1, Duration::from_millis(30)).unwrap();
    stage.stream.synchronize().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30));
    eventually("the end", || late.is_over());
    assert!(matches!(late.outcome(), Some(Err(Error::Timeout { .. }))));
    let in_time = timeline.wait_on_for(stream, 1, Duration::MAX).unwrap();
    assert!(stage.still_waits() && !in_time.is_over() && in_time.outcome().is_none());
    // Each wait has its own word: neither the value of the next wait nor a drop ends this one.
    drop(timeline.wait_on_for(stage.gpu.stream(), 1, Duration::ZERO).unwrap());
    stage.gpu.stream().synchronize().unwrap();
    assert!(stage.still_waits());
    writer.signal(1).unwrap();
    stage.stream.synchronize().unwrap();
    eventually("the end", || in_time.is_over());
    in_time.outcome().unwrap().unwrap();
    timeline.wait_on_for(stream, 1, Duration::ZERO).unwrap().outcome().unwrap().unwrap();
    // More waits at a time than a slab has words. On several streams, because the driver blocks a thread that enqueues
    // behind so many.
    let streams: Vec<_> = (0..6).map(|_| Stream::new(stage.gpu.context()).unwrap()).collect();
    let wait = |stream: &Stream| timeline.wait_on_for(stream.as_ref(), 2, Duration::MAX).unwrap();
    let many: Vec<_> = streams.iter().flat_map(|stream| (0..250).map(move |_| wait(stream))).collect();
    drop(timeline);
    writer.signal(2).unwrap();
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    eventually("the end of all", || many.iter().all(partywall::LimitedWait::is_over));
}

pub(crate) fn waits_of_streams_are_listed(world: &World) {
    let stage = Stage::new(world);
    let writer = stage.domain.timeline_writer("x").unwrap();
    let [plain, limited] = ["x", "y"].map(|name| stage.domain.timeline(name).unwrap());
    let listed = || {
        let members = stage.domain.members().unwrap();
        let waits = members.into_iter().flat_map(|member| member.waits);
        waits.map(|wait| (wait.name, wait.target, wait.by, wait.ms.is_some())).collect::<Vec<_>>()
    };
    let pid = std::process::id();
    plain.wait_on(stage.stream.as_ref(), 7).unwrap();
    eventually("the wait of the stream is listed", || listed() == [("x".to_owned(), Some(7), Some(pid), true)]);
    // The longest wait is listed, here the first.
    let _late = limited.wait_on_for(stage.gpu.stream(), 3, Duration::MAX).unwrap();
    writer.signal(7).unwrap();
    eventually("the wait with a timeout is listed", || listed() == [("y".to_owned(), Some(3), None, true)]);
    limited.abandon().unwrap();
    eventually("nothing is waited for", || listed().is_empty());
}

pub(crate) fn a_sleeping_host_is_woken_by_a_stream(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let gate = Gate::new(&stage.gpu);
    let opener = Stream::new(stage.gpu.context()).unwrap();
    for v in 1..=20 {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| timeline.wait(v, TIMEOUT));
            writer.signal_on_and_wake(stage.stream.as_ref(), v).unwrap();
            waiter.join().unwrap().unwrap();
        });
    }
    gate.stop(&stage.stream);
    writer.signal_on_and_wake(stage.stream.as_ref(), 21).unwrap();
    assert!(is_pending(&timeline, 21));
    gate.go(&opener);
    timeline.wait(21, TIMEOUT).unwrap();
}

pub(crate) fn a_kernel_signals_what_its_host_promises(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    let word = writer.timeline().device_ptr(&stage.gpu).unwrap();
    // SAFETY: the word of a timeline, which outlives the work.
    #[allow(unsafe_code)]
    let word = unsafe { DeviceSlice::from_raw(word, 8, Access::ReadWrite) };
    let gate = Gate::new(&stage.gpu);
    gate.stop(&stage.stream);
    // As a kernel of the caller would do.
    stage.stream.as_ref().enqueue_write_u64(word, 1).unwrap();
    writer.promise_on(stage.stream.as_ref(), 1).unwrap();
    timeline.wait_announced(1, TIMEOUT).unwrap();
    assert!(is_pending(&timeline, 1));
    gate.go(&Stream::new(stage.gpu.context()).unwrap());
    timeline.wait(1, TIMEOUT).unwrap();
    writer.signal(2).unwrap();
}

pub(crate) fn names(domain: &Domain) -> usize {
    domain.objects().unwrap().len()
}

pub(crate) fn a_lease_is_kept_until_streams_have_passed_their_waits(world: &World) {
    let stage = Stage::new(world);
    let domain = &stage.domain;
    let other = world.connect();
    let signals = other.timeline_writer("theirs").unwrap();
    let theirs = domain.timeline("theirs").unwrap();
    let ours = domain.timeline_writer("ours").unwrap();
    theirs.wait_on(stage.stream.as_ref(), 1).unwrap();
    ours.signal_on(stage.stream.as_ref(), 1).unwrap();
    drop(theirs);
    drop(signals);
    stage.stream.synchronize().unwrap();
    // A signal of the stream proves that it has passed the wait.
    eventually("the end of the name", || names(&other) == 1);
    // A stream without signals writes a mark after many waits.
    for index in 0..40 {
        let name = format!("many-{index}");
        domain.timeline(&name).unwrap().wait_on(stage.stream.as_ref(), 1).unwrap();
        other.timeline_writer(&name).unwrap().signal(1).unwrap();
    }
    stage.stream.synchronize().unwrap();
    eventually("the end of most names", || names(&other) <= 10);
    assert!(names(&other) > 1, "the stream may not have passed the last waits");
    drop((ours, stage));
    assert_eq!(names(&other), 0);
    assert_eq!(other.members().unwrap().len(), 1);
}

pub(crate) fn a_domain_that_is_dropped_lives_on_for_streams_that_wait(world: &World) {
    // The segment belongs to another connection, because dropping it here would wait for the stream.
    let bystander = Stage::new(world);
    let members = || bystander.domain.members().unwrap().len();
    for killed in [false, true] {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let stream = Stream::new(gpu.context()).unwrap();
        let mut writer = Some(world.play("gpu"));
        for order in ["write", "stop", "signal 1"] {
            writer.as_mut().unwrap().request(order);
        }
        domain.timeline("out").unwrap().wait_on(stream.as_ref(), 1).unwrap();
        drop(domain);
        assert_eq!(members(), 3, "a member has to release the stream");
        if killed {
            writer.take().unwrap().kill();
        } else {
            writer.as_mut().unwrap().request("go");
        }
        stream.synchronize().unwrap();
        eventually("the end of the connection", || members() == 2 - usize::from(killed));
        drop(writer);
        eventually("the end of the writer", || members() == 1);
    }
}

/// Trap: two domains in one process both register their words.
pub(crate) fn two_domains_of_one_process_use_one_gpu(world: &World) {
    let elsewhere = World::new();
    let one = Stage::new(world);
    let other = Stage::new(&elsewhere);
    let pairs =
        [&one, &other].map(|stage| (stage.domain.timeline("x").unwrap(), stage.domain.timeline_writer("x").unwrap()));
    let [(waits, signals), (waits_too, signals_too)] = &pairs;
    waits.wait_on(one.stream.as_ref(), 1).unwrap();
    waits_too.wait_on(other.stream.as_ref(), 1).unwrap();
    signals.signal_on(other.gpu.stream(), 1).unwrap();
    one.stream.synchronize().unwrap();
    assert!(other.still_waits());
    signals_too.signal_on(one.gpu.stream(), 1).unwrap();
    other.stream.synchronize().unwrap();
}

/// Trap: a fork after the connection was made and used with a GPU.
pub(crate) fn a_forked_child_enqueues_nothing(world: &World) {
    let stage = Stage::new(world);
    let timeline = stage.domain.timeline("x").unwrap();
    let writer = stage.domain.timeline_writer("x").unwrap();
    timeline.wait_on(stage.stream.as_ref(), 1).unwrap();
    let stream = stage.stream.as_ref();
    let forked = |result: Result<(), Error>| matches!(result, Err(Error::Unreachable(Unreachable::Forked { .. })));
    assert!(in_a_child(|| {
        forked(timeline.wait_on(stream, 2))
            && forked(timeline.wait_on_for(stream, 2, TIMEOUT).map(drop))
            && forked(writer.signal_on(stream, 1))
            && forked(writer.signal_on_and_wake(stream, 1))
            && forked(timeline.device_ptr(&stage.gpu).map(drop))
    }));
    assert!(stage.still_waits());
    writer.signal_on(stage.gpu.stream(), 1).unwrap();
    stage.stream.synchronize().unwrap();
}
