// Holds 176.
//! Timelines in CUDA graphs. The scenes run on every driver, as those of `scenes`.
#![allow(clippy::unwrap_used)] // tests, their helpers included

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use partywall::{
    Domain, Error, Gpu, GraphLaunch, GraphSignal, GraphWait, MAX_VALUE, Timeline, TimelineEnding, TimelineWriter,
    cuda::{AccessError, DeviceBuffer, Graph, Stream, StreamRef},
    error::{DeviceFault, InvalidArgument, InvalidData},
};

use super::{
    scenes::{Gate, Stage, ended, is_pending, names, prepare, slice},
    world::{TIMEOUT, World, eventually, gpu, next_order, say},
};

/// A graph that waits, works and signals.
struct Step {
    graph: Graph,
    wait: GraphWait,
    signal: GraphSignal,
}

impl Step {
    fn capture(domain: &Domain, gpu: &Gpu, work: impl FnOnce(StreamRef<'_>) -> Result<(), AccessError>) -> Self {
        let mut nodes = None;
        let captured = Graph::capture(gpu.context(), |stream| -> Result<(), Box<dyn std::error::Error>> {
            let wait = domain.capture_wait(stream)?;
            work(stream)?;
            nodes = Some((wait, domain.capture_signal(stream)?));
            Ok(())
        });
        let graph = captured.unwrap();
        let (wait, signal) = nodes.unwrap();
        Self { graph, wait, signal }
    }

    /// Captures a graph without work of its own.
    fn empty(stage: &Stage) -> Self {
        Self::capture(&stage.domain, &stage.gpu, |_| Ok(()))
    }

    fn launch(
        &self,
        stream: &Stream,
        wait: Option<(&Timeline, u64)>,
        signal: Option<(&TimelineWriter, u64)>,
    ) -> Result<(), Error> {
        let mut launch = GraphLaunch::new(self.graph.as_ref(), stream.as_ref());
        if let Some((timeline, v)) = wait {
            launch = launch.wait(&self.wait, timeline, v);
        }
        if let Some((writer, v)) = signal {
            launch = launch.signal(&self.signal, writer, v);
        }
        launch.run(|| {
            replay(&self.graph, stream);
            Ok(())
        })
    }
}

/// Captures a graph of signals, one behind the other.
fn signals(stage: &Stage, count: usize) -> (Graph, Vec<GraphSignal>) {
    let mut nodes = Vec::new();
    let captured = Graph::capture(stage.gpu.context(), |stream| -> Result<(), Box<dyn std::error::Error>> {
        for _ in 0..count {
            nodes.push(stage.domain.capture_signal(stream)?);
        }
        Ok(())
    });
    (captured.unwrap(), nodes)
}

/// What a node of [`chain`] does.
enum Link<'a> {
    Wait(&'a Timeline, u64),
    Signal(&'a TimelineWriter, u64),
}

/// Captures a graph of these nodes, one behind the other, and launches it once.
fn chain(stage: &Stage, links: &[Link<'_>]) -> Result<(), Error> {
    let mut waits = Vec::new();
    let mut signals = Vec::new();
    let captured = Graph::capture(stage.gpu.context(), |stream| -> Result<(), Box<dyn std::error::Error>> {
        for link in links {
            match *link {
                Link::Wait(timeline, v) => waits.push((stage.domain.capture_wait(stream)?, timeline, v)),
                Link::Signal(writer, v) => signals.push((stage.domain.capture_signal(stream)?, writer, v)),
            }
        }
        Ok(())
    });
    let graph = captured.unwrap();
    let launch = GraphLaunch::new(graph.as_ref(), stage.stream.as_ref());
    let launch = waits.iter().fold(launch, |launch, (node, timeline, v)| launch.wait(node, timeline, *v));
    let launch = signals.iter().fold(launch, |launch, (node, writer, v)| launch.signal(node, writer, *v));
    launch.run(|| {
        replay(&graph, &stage.stream);
        Ok(())
    })
}

/// Launches a graph.
fn replay(graph: &Graph, stream: &Stream) {
    // SAFETY: the tests keep the memory of their graphs until their streams are done.
    #[allow(unsafe_code)]
    unsafe { graph.launch(stream.as_ref()) }.unwrap();
}

/// A word that checks lower if they find wrong data.
struct FirstBad(DeviceBuffer);

impl FirstBad {
    fn new(gpu: &Gpu) -> Self {
        let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
        gpu.stream().copy_from_host(word.as_slice(), &[0xFF; 8]).unwrap();
        Self(word)
    }

    /// Returns the index of the first wrong word, once the stream has reached this point.
    fn found(&self, stream: &Stream) -> Option<u64> {
        let mut bytes = [0; 8];
        stream.as_ref().copy_to_host(&mut bytes, self.0.as_slice()).unwrap();
        let index = u64::from_ne_bytes(bytes);
        (index != u64::MAX).then_some(index)
    }
}

/// Replays a graph on request: it waits, checks that the data is as the other process writes it, doubles it, and
/// signals.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let data = domain.opener("data").read_write().timeout(TIMEOUT).open().unwrap();
    let kernels = gpu.kernels().unwrap();
    let (stream, gate) = (Stream::new(gpu.context()).unwrap(), Gate::new(&gpu));
    let bad = FirstBad::new(&gpu);
    let input = domain.timeline("in").unwrap();
    let writer = domain.timeline_writer("out").unwrap();
    prepare(&domain, &stream);
    let step = Step::capture(&domain, &gpu, |captured| {
        kernels.enqueue_verify(captured, slice(&data), 1, bad.0.as_slice())?;
        kernels.enqueue_double(captured, slice(&data))
    });
    say("ready");
    while let Some(order) = next_order() {
        let mut words = order.split(' ');
        let order = words.next().unwrap();
        let mut number = || words.next().unwrap().parse().unwrap();
        match order {
            "replay" => {
                for v in number()..=number() {
                    step.launch(&stream, Some((&input, v)), Some((&writer, v))).unwrap();
                }
                say("done");
            }
            "signal" => {
                step.launch(&stream, None, Some((&writer, number()))).unwrap();
                say("done");
            }
            "stop" => {
                gate.stop(&stream);
                say("done");
            }
            "found" => say(&format!("done {:?}", bad.found(&stream))),
            other => panic!("unknown command {other}"),
        }
    }
}

pub(crate) fn two_processes_replay_graphs_and_no_host_waits(world: &World) {
    let stage = Stage::new(world);
    let Stage { domain, gpu, data, stream, .. } = &stage;
    let kernels = gpu.kernels().unwrap();
    let answer = domain.timeline("out").unwrap();
    let order = domain.timeline_writer("in").unwrap();
    let bad = FirstBad::new(gpu);
    let step = Step::capture(domain, gpu, |captured| {
        kernels.enqueue_verify(captured, slice(data), 2, bad.0.as_slice())?;
        kernels.enqueue_fill(captured, slice(data))
    });
    let (gate, opener) = (Gate::new(gpu), Stream::new(gpu.context()).unwrap());
    let mut other = world.play("graph");
    kernels.enqueue_fill(stream.as_ref(), slice(data)).unwrap();
    kernels.enqueue_double(stream.as_ref(), slice(data)).unwrap();
    // The data is doubled in each turn of the other process, and filled anew in each turn of this one.
    let launch = |v| step.launch(stream, Some((&answer, v - 1)), Some((&order, v))).unwrap();
    gate.stop(stream);
    other.request(&format!("replay 1 {AHEAD}"));
    (1..=AHEAD).for_each(launch);
    // Both have launched, and no work was done: no host has waited for any.
    answer.wait_announced(AHEAD, TIMEOUT).unwrap();
    assert_eq!((answer.announced(), order.timeline().announced()), (AHEAD, AHEAD));
    assert_eq!((answer.value(), order.timeline().value()), (0, 0));
    gate.go(&opener);
    // At the same time, because a stream's queue has a limit.
    other.send(&format!("replay {} {TURNS}", AHEAD + 1));
    (AHEAD + 1..=TURNS).for_each(launch);
    other.expect("done");
    answer.wait(TURNS, TIMEOUT).unwrap();
    assert_eq!(bad.found(stream), None);
    assert_eq!(other.request("found"), "None");
    answer.check().unwrap();
}

pub(crate) fn a_writer_killed_during_a_launch_ends_the_waits_of_graphs(world: &World) {
    let stage = Stage::new(world);
    let step = Step::empty(&stage);
    let timeline = stage.domain.timeline("out").unwrap();
    let passed = stage.domain.timeline_writer("passed").unwrap();
    let mut writer = world.play("graph");
    writer.request("signal 1");
    timeline.wait(1, TIMEOUT).unwrap();
    writer.request("stop");
    writer.request("signal 2");
    // A launch that is under way, and one that is only to come.
    step.launch(&stage.stream, Some((&timeline, 2)), Some((&passed, 1))).unwrap();
    step.launch(&stage.stream, Some((&timeline, 3)), Some((&passed, 2))).unwrap();
    assert!(stage.still_waits());
    assert!(is_pending(&timeline, 2));
    writer.kill();
    passed.timeline().wait(2, TIMEOUT).unwrap();
    assert_eq!(ended(timeline.check()), (TimelineEnding::OwnerDied, 3, 1));
    let refused = step.launch(&stage.stream, Some((&timeline, 2)), Some((&passed, 3)));
    assert_eq!(ended(refused), (TimelineEnding::OwnerDied, 2, 1));
    assert_eq!(passed.timeline().announced(), 2);
    // The graph serves the next writer.
    let next = stage.domain.timeline_writer("out").unwrap();
    assert!(timeline.follow().unwrap());
    step.launch(&stage.stream, Some((&timeline, 2)), Some((&passed, 3))).unwrap();
    assert!(stage.still_waits());
    next.signal(2).unwrap();
    passed.timeline().wait(3, TIMEOUT).unwrap();
    timeline.check().unwrap();
}

/// Trap: a graph that is launched by itself repeats the values of its last launch.
pub(crate) fn a_launch_without_values_neither_waits_nor_signals(world: &World) {
    let stage = Stage::new(world);
    let step = Step::empty(&stage);
    let input = stage.domain.timeline_writer("input").unwrap();
    let output = stage.domain.timeline_writer("output").unwrap();
    let name = || stage.domain.timeline("output").unwrap();
    let before = name();
    replay(&step.graph, &stage.stream);
    stage.stream.synchronize().unwrap();
    step.launch(&stage.stream, Some((input.timeline(), 1)), Some((&output, 5))).unwrap();
    // The launch that is enqueued keeps its values.
    assert!(stage.still_waits());
    input.signal(1).unwrap();
    stage.stream.synchronize().unwrap();
    assert_eq!(output.timeline().value(), 5);
    output.signal(6).unwrap();
    replay(&step.graph, &stage.stream);
    stage.stream.synchronize().unwrap();
    assert_eq!(output.timeline().value(), 6);
    // Nor does it overwrite the end of a timeline.
    output.close();
    eventually("the end", || before.ending().is_some());
    replay(&step.graph, &stage.stream);
    stage.stream.synchronize().unwrap();
    before.wait(6, TIMEOUT).unwrap();
    assert_eq!(ended(before.wait(7, TIMEOUT)), (TimelineEnding::Closed, 7, 6));
    step.launch(&stage.stream, None, Some((&input, MAX_VALUE))).unwrap();
    input.timeline().wait(MAX_VALUE, TIMEOUT).unwrap();
}

pub(crate) fn a_launch_that_is_refused_launches_nothing(world: &World) {
    let stage = Stage::new(world);
    let (step, other) = (Step::empty(&stage), Step::empty(&stage));
    let [input, output] = ["input", "output"].map(|name| stage.domain.timeline_writer(name).unwrap());
    output.signal(4).unwrap();
    let launch = || GraphLaunch::new(step.graph.as_ref(), stage.stream.as_ref());
    let refused = |launch: GraphLaunch<'_>| {
        launch.run(|| -> Result<(), Error> { panic!("a refused graph must not be launched") }).unwrap_err()
    };
    for v in [0, 3, 4, MAX_VALUE + 1] {
        let error = refused(launch().wait(&step.wait, input.timeline(), 1).signal(&step.signal, &output, v));
        let Error::InvalidArgument(InvalidArgument::Value { value, last, .. }) = error else { panic!("{error:?}") };
        assert_eq!((value, last), (v, 4));
    }
    let error = refused(launch().wait(&step.wait, input.timeline(), MAX_VALUE + 1));
    assert!(matches!(error, Error::InvalidArgument(InvalidArgument::Value { .. })), "{error:?}");
    for launch in [
        launch().wait(&other.wait, input.timeline(), 1),
        launch().signal(&other.signal, &output, 5),
        launch().signal(&step.signal, &output, 5).signal(&step.signal, &output, 6),
        launch().wait(&step.wait, input.timeline(), 1).wait(&step.wait, output.timeline(), 5),
    ] {
        let error = refused(launch);
        assert!(matches!(error, Error::InvalidArgument(InvalidArgument::Graph { .. })), "{error:?}");
        assert_eq!(error.anchor(), "bad-graph");
    }
    assert_eq!((output.timeline().announced(), input.timeline().announced()), (4, 0));
    // The nodes that had got their values are idle again.
    replay(&step.graph, &stage.stream);
    stage.stream.synchronize().unwrap();
    assert_eq!(output.timeline().value(), 4);
    step.launch(&stage.stream, None, Some((&output, 5))).unwrap();
    output.timeline().wait(5, TIMEOUT).unwrap();
}

/// Trap: a launch that waits for its own signal.
pub(crate) fn a_wait_before_the_only_signal_that_could_end_it_is_refused(world: &World) {
    let stage = Stage::new(world);
    let writer = stage.domain.timeline_writer("x").unwrap();
    let other = stage.domain.timeline_writer("y").unwrap();
    // Another handle of the same timeline.
    let timeline = stage.domain.timeline("x").unwrap();
    let wait = |v| Link::Wait(&timeline, v);
    let signal = |v| Link::Signal(&writer, v);
    let between = || Link::Signal(&other, 1);
    for (links, wanted, signalled) in [
        (vec![wait(1), signal(1)], 1, 1),
        (vec![wait(1), between(), signal(2)], 1, 2),
        (vec![wait(3), signal(2)], 3, 2),
        (vec![signal(1), wait(2), signal(2), signal(3)], 2, 2),
    ] {
        let refused = chain(&stage, &links).unwrap_err();
        assert_eq!(refused.anchor(), "bad-graph");
        let why = format!(
            ": the wait for value {wanted} of timeline \"x\" would never end, because the signal of its value \
             {signalled} stands behind the wait in the graph"
        );
        assert!(refused.to_string().ends_with(&why), "{refused}");
    }
    assert_eq!((timeline.announced(), other.timeline().announced()), (0, 0));
    // These waits end: by a signal before them, by the launch before, and by the host.
    let gate = Gate::new(&stage.gpu);
    gate.stop(&stage.stream);
    chain(&stage, &[signal(1), wait(1), signal(2)]).unwrap();
    chain(&stage, &[wait(2), signal(3)]).unwrap();
    chain(&stage, &[Link::Wait(other.timeline(), 1), signal(4)]).unwrap();
    assert_eq!((timeline.value(), timeline.announced()), (0, 4));
    gate.go(&Stream::new(stage.gpu.context()).unwrap());
    timeline.wait(3, TIMEOUT).unwrap();
    other.signal(1).unwrap();
    timeline.wait(4, TIMEOUT).unwrap();
}

pub(crate) fn a_launch_that_fails_promises_nothing(world: &World) {
    let stage = Stage::new(world);
    let step = Step::empty(&stage);
    let writer = stage.domain.timeline_writer("x").unwrap();
    let launch = || GraphLaunch::new(step.graph.as_ref(), stage.stream.as_ref()).signal(&step.signal, &writer, 1);
    let failed = launch().run(|| Err(Box::<dyn std::error::Error>::from("no launch")));
    assert_eq!(failed.unwrap_err().to_string(), "no launch");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        launch().run(|| -> Result<(), Error> { panic!("on purpose: a launch that panics") })
    }));
    assert!(panicked.is_err());
    assert_eq!(writer.timeline().announced(), 0);
    replay(&step.graph, &stage.stream);
    stage.stream.synchronize().unwrap();
    assert_eq!(writer.timeline().value(), 0);
    step.launch(&stage.stream, None, Some((&writer, 1))).unwrap();
    writer.timeline().wait(1, TIMEOUT).unwrap();
}

pub(crate) fn nodes_are_captured_in_a_capture_alone(world: &World) {
    let stage = Stage::new(world);
    let outside = stage.domain.capture_wait(stage.stream.as_ref()).map(drop).unwrap_err();
    assert!(matches!(outside, Error::InvalidArgument(InvalidArgument::Graph { .. })), "{outside:?}");
    let outside = stage.domain.capture_signal(stage.stream.as_ref()).map(drop).unwrap_err();
    assert!(outside.to_string().ends_with("the stream is not being captured into a CUDA graph"), "{outside}");
    // A launch in a capture would become part of that graph, with the values of now.
    let step = Step::empty(&stage);
    let writer = stage.domain.timeline_writer("x").unwrap();
    let captured = Graph::capture(stage.gpu.context(), |stream| -> Result<(), Box<dyn std::error::Error>> {
        let launch = GraphLaunch::new(step.graph.as_ref(), stream).signal(&step.signal, &writer, 1);
        let refused = launch.run(|| -> Result<(), Error> { panic!("a refused graph must not be launched") });
        assert!(matches!(refused, Err(Error::DeviceFault(DeviceFault::Captured { .. }))), "{refused:?}");
        Ok(())
    });
    captured.unwrap();
    // The first call of a connection with a stream may be that of a capture.
    let fresh = world.connect();
    let step = Step::capture(&fresh, &stage.gpu, |_| Ok(()));
    step.launch(&stage.stream, None, Some((&writer, 1))).unwrap();
    writer.timeline().wait(1, TIMEOUT).unwrap();
}

pub(crate) fn one_graph_signals_several_times_and_from_two_streams(world: &World) {
    let stage = Stage::new(world);
    let writer = stage.domain.timeline_writer("x").unwrap();
    let second = Stream::new(stage.gpu.context()).unwrap();
    let (graph, nodes) = signals(&stage, 3);
    let launch = |stream: &Stream, values: [u64; 3]| {
        let launch = GraphLaunch::new(graph.as_ref(), stream.as_ref());
        let launch = nodes.iter().zip(values).fold(launch, |launch, (node, v)| launch.signal(node, &writer, v));
        launch.run(|| {
            replay(&graph, stream);
            Ok::<(), Error>(())
        })
    };
    let timeline = stage.domain.timeline("x").unwrap();
    for round in 0..50 {
        // Each change of the stream waits for what the other one owes.
        let stream = if round % 2 == 0 { &stage.stream } else { &second };
        launch(stream, [1, 2, 3].map(|v| 3 * round + v)).unwrap();
        assert_eq!(timeline.announced(), 3 * round + 3);
    }
    timeline.wait(150, TIMEOUT).unwrap();
    for values in [[151, 151, 152], [152, 151, 153], [151, 152, 150]] {
        let refused = launch(&second, values);
        assert!(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Value { .. }))), "{refused:?}");
    }
    assert_eq!(timeline.announced(), 150);
}

/// Trap: two launches that each hold the writer that the other one needs.
pub(crate) fn launches_with_the_same_writers_in_another_order_do_not_block_each_other(world: &World) {
    let stage = Stage::new(world);
    let writers = ["a", "b"].map(|name| stage.domain.timeline_writer(name).unwrap());
    let next = AtomicU64::new(1);
    thread::scope(|scope| {
        for [first, second] in [[0, 1], [1, 0]] {
            let (stage, writers, next) = (&stage, &writers, &next);
            scope.spawn(move || {
                let stream = Stream::new(stage.gpu.context()).unwrap();
                let (graph, nodes) = signals(stage, 2);
                for _ in 0..200 {
                    let v = next.fetch_add(1, Ordering::Relaxed);
                    let launch = GraphLaunch::new(graph.as_ref(), stream.as_ref());
                    let launch = launch.signal(&nodes[0], &writers[first], v).signal(&nodes[1], &writers[second], v);
                    let launched = launch.run(|| {
                        replay(&graph, &stream);
                        Ok::<(), Error>(())
                    });
                    // The other thread may have signalled a larger value before.
                    let refused = matches!(launched, Err(Error::InvalidArgument(InvalidArgument::Value { .. })));
                    assert!(launched.is_ok() || refused, "{launched:?}");
                }
                stream.synchronize().unwrap();
            });
        }
    });
    let values = writers.each_ref().map(|writer| (writer.timeline().value(), writer.timeline().announced()));
    // The thread that had the last number was refused by none.
    assert_eq!(values, [(400, 400); 2]);
}

pub(crate) fn values_of_a_graph_rest_on_its_waits(world: &World) {
    let stage = Stage::new(world);
    let step = Step::empty(&stage);
    let input = stage.domain.timeline("out").unwrap();
    let output = stage.domain.timeline_writer("output").unwrap();
    output.rests_on(&input);
    let mut writer = world.play("graph");
    writer.request("signal 1");
    step.launch(&stage.stream, Some((&input, 1)), Some((&output, 1))).unwrap();
    output.timeline().wait(1, TIMEOUT).unwrap();
    step.launch(&stage.stream, Some((&input, 2)), Some((&output, 2))).unwrap();
    writer.kill();
    output.timeline().wait(2, TIMEOUT).unwrap();
    let waiter = stage.domain.timeline("output").unwrap();
    waiter.wait(2, TIMEOUT).unwrap();
    eventually("the taint", || waiter.check().is_err());
    let refused = step.launch(&stage.stream, None, Some((&output, 3)));
    let Err(Error::InvalidData(InvalidData::Tainted { from, .. })) = refused else { panic!("{refused:?}") };
    assert_eq!(from, 2);
}

/// Trap: a word that becomes another timeline's while a graph waits for it.
pub(crate) fn a_graph_keeps_the_leases_of_its_waits_until_it_has_passed_them(world: &World) {
    let stage = Stage::new(world);
    let step = Step::empty(&stage);
    let domain = &stage.domain;
    let other = world.connect();
    let signals = other.timeline_writer("theirs").unwrap();
    let theirs = domain.timeline("theirs").unwrap();
    let ours = domain.timeline_writer("ours").unwrap();
    step.launch(&stage.stream, Some((&theirs, 1)), None).unwrap();
    drop(theirs);
    assert!(stage.still_waits());
    assert_eq!(names(&other), 2, "the stream waits for it");
    drop(signals);
    stage.stream.synchronize().unwrap();
    // A signal of the stream shows that it has passed the launch.
    ours.signal_on(stage.stream.as_ref(), 1).unwrap();
    eventually("the end of the name", || {
        domain.timeline("ours").unwrap();
        names(&other) == 1
    });
}

/// How many launches are enqueued before the first may run: few enough for every driver's queues.
const AHEAD: u64 = 50;

const TURNS: u64 = 1000;
