//! Messages from one process to another by topics and by iceoryx2, against the least time that the machine needs.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use partywall::{DType, Domain, Place, Policy, Publisher, Subscriber};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};
use tracing::{span::EnteredSpan, trace_span};

use super::ordering::{pair::Pair, semaphore::pairs};
use crate::{
    bench::{
        Bench,
        iceoryx2::{Iceoryx2, Mode},
        mps::Mps,
        placement::Placement,
        size,
        turns::{publish, same},
    },
    broker::Broker,
    prelude::TIMEOUT,
};

/// The number of subscribers in the receiving process, with the ways of hosts (polling, waiting, asleep) and of
/// kernels.
const SUBSCRIBERS: [(usize, [&str; 3], [&str; 2]); 4] = [
    (1, ["topic-look-1", "topic-exchange-1", "topic-wake-1"], ["kernels-topic-1", "kernels-raw-1"]),
    (2, ["topic-look-2", "topic-exchange-2", "topic-wake-2"], ["kernels-topic-2", "kernels-raw-2"]),
    (4, ["topic-look-4", "topic-exchange-4", "topic-wake-4"], ["kernels-topic-4", "kernels-raw-4"]),
    (8, ["topic-look-8", "topic-exchange-8", "topic-wake-8"], ["kernels-topic-8", "kernels-raw-8"]),
];

/// The cases of hosts: name, the floor's name and way, iceoryx2's mode.
const HOSTS: [(&str, &str, &str, Mode); 3] = [
    ("publish to receive, both polling", "shared cache line", "look-raw", Mode::Look),
    ("publish to receive, both waiting, in turn", "futex, both ways in turn", "exchange-raw", Mode::Exchange),
    ("publish to a sleeper", "futex to wake of a sleeper", "wake-raw", Mode::Wake),
];

/// How often `partywall trace` reads.
const TRACER_PAUSE: Duration = Duration::from_millis(5);

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    spans(bench, broker)?;
    ages(bench, broker)?;
    traces(bench, broker)?;
    let pair = Pair::start(bench, broker, None, None)?;
    let placement = Placement::TwoProcessors;
    if !pair.place(placement)? {
        bench.note("topics: skipped: there is one processor for two processes");
        return Ok(());
    }
    let rival = if bench.peers { Iceoryx2::build().inspect_err(|why| bench.leave_out(why)).ok() } else { None };
    for (index, (what, floor, floor_way, mode)) in HOSTS.into_iter().enumerate() {
        let unit = if index == 0 { Unit::Nanoseconds } else { Unit::Microseconds };
        for (subscribers, ways, _) in SUBSCRIBERS {
            let twins = rival.as_ref().map(|rival| rival.start(mode, subscribers)).transpose()?;
            let (plan, batch) = Pair::plan(bench, if index == 0 { 2_000 } else { 500 });
            let case = |what| placement.of(Case::new(what, unit));
            let ours = case(what).parameter("subscribers", subscribers);
            let mut comparison = Comparison::new(ours, pair.sampler(ways[index], unit, batch))
                .floor(case(floor), pair.sampler(floor_way, unit, batch));
            if let Some(twins) = &twins {
                twins.place(placement)?;
                let theirs = case("iceoryx2").parameter("subscribers", subscribers);
                comparison = comparison.rival(theirs, twins.sampler(unit, batch));
            }
            bench.run(comparison, plan)?;
        }
    }
    many(bench, &pair, "host")
}

/// Measures spans that no subscriber of `tracing` records: alone, and around messages within one process, where no
/// other cost hides them. The library enters two spans for each message and cannot leave them out, so the comparison
/// adds two more.
fn spans(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let topic = broker.connect()?.topic("spans").dtype(DType::U64).shape(&[1]).place(Place::Host).create()?;
    let publisher = topic.publisher()?;
    let subscriber = topic.subscriber(Policy::Block)?;
    let name = topic.name();
    let messages = |around: fn(&str) -> Option<[EnteredSpan; 2]>| -> Sampler<'_> {
        let mut value = 0;
        let publisher = &publisher;
        let subscriber = &subscriber;
        pairs(move || {
            value += 1;
            let _spans = around(name);
            message(publisher, subscriber, value)
        })
    };
    let case = |what| Case::new(what, Unit::Nanoseconds);
    let plan = bench.plan(1_000);
    let alone = pairs(|| {
        drop(trace_span!("publish", topic = std::hint::black_box(name)).entered());
        Ok(())
    });
    bench.run(Comparison::new(case("entering and leaving a span that no subscriber records"), alone), plan)?;
    let comparison =
        Comparison::new(case("publish and receive in one process, with two more spans"), messages(two_spans))
            .floor(case("publish and receive in one process"), messages(|_| None));
    bench.run(comparison, plan)
}

/// Measures the cost of measuring the ages of samples.
fn ages(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let messages = |name, measures: bool| -> Result<Sampler<'_>, Failure> {
        let topic = domain.topic(name).dtype(DType::U64).shape(&[1]).place(Place::Host).create()?;
        let publisher = topic.publisher()?;
        let subscriber = topic.subscribe(Policy::Block).measure_ages(measures).join()?;
        let mut value = 0;
        Ok(pairs(move || {
            value += 1;
            message(&publisher, &subscriber, value)
        }))
    };
    let case = |what| Case::new(what, Unit::Nanoseconds);
    let plan = bench.plan(1_000);
    let ours = case("publish and receive in one process, measuring ages");
    let comparison = Comparison::new(ours, messages("measured", true)?)
        .floor(case("publish and receive in one process"), messages("unmeasured", false)?);
    bench.run(comparison, plan)
}

/// Measures what tracing costs a message. While no process traces, the library checks a flag three times for a message:
/// when it is published, received and released. The library cannot leave the checks out, so the comparison adds as many
/// again. While a process traces, the messages are compared with those of a domain without tracing.
fn traces(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let other = bench.broker("bench-traced")?;
    let domain = broker.connect()?;
    let traced = other.connect()?;
    let messages = |domain: &Domain, name, checks| -> Result<Sampler<'_>, Failure> {
        let topic = domain.topic(name).dtype(DType::U64).shape(&[1]).place(Place::Host).create()?;
        let publisher = topic.publisher()?;
        let subscriber = topic.subscribe(Policy::Block).join()?;
        let domain = domain.clone();
        let mut value = 0;
        Ok(pairs(move || {
            value += 1;
            for _ in 0..checks {
                std::hint::black_box(domain.is_traced());
            }
            message(&publisher, &subscriber, value)
        }))
    };
    let case = |what| Case::new(what, Unit::Nanoseconds);
    let plan = bench.plan(1_000);
    let ours = case("publish and receive in one process, with three more checks for a tracer");
    let comparison = Comparison::new(ours, messages(&domain, "checked", 3)?)
        .floor(case("publish and receive in one process"), messages(&domain, "untraced", 0)?);
    bench.run(comparison, plan)?;
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut tracer = traced.trace();
        let ended = &ended;
        scope.spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(TRACER_PAUSE);
                drop(tracer.read());
            }
        });
        let measured = (|| {
            let ours = case("publish and receive in one process while a process traces: three events");
            let comparison = Comparison::new(ours, messages(&traced, "traced", 0)?)
                .floor(case("publish and receive in one process"), messages(&domain, "quiet", 0)?);
            bench.run(comparison, plan)
        })();
        ended.store(true, Ordering::Relaxed);
        measured
    })
}

/// Publishes and receives a message within this process.
fn message(publisher: &Publisher, subscriber: &Subscriber, value: u64) -> Result<(), Failure> {
    publish(publisher, value)?;
    same(subscriber.recv(TIMEOUT)?.as_slice::<u64>()?[0], value)
}

fn two_spans(topic: &str) -> Option<[EnteredSpan; 2]> {
    Some([trace_span!("publish", topic).entered(), trace_span!("receive", topic).entered()])
}

/// Measures with time-slicing, and with both processes as clients of an MPS server that runs only for this subject.
pub(super) fn on_gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    kernels(bench, broker, "time-sliced", None)?;
    let Some(mps) = Mps::start(bench, broker)? else { return Ok(()) };
    kernels(bench, broker, "MPS", Some(&mps))
}

fn kernels(bench: &Bench<'_>, broker: &Broker, sharing: &str, mps: Option<&Mps>) -> Result<(), Failure> {
    let pair = Pair::start(bench, broker, Some((bench.gpu()?, 16 << 20)), mps)?;
    if pair.is_under_mps() != mps.is_some() {
        return Err(format!("the processes do not share the GPU as they should: {sharing}").into());
    }
    for (subscribers, _, [ours, raw]) in SUBSCRIBERS {
        let (plan, batch) = Pair::plan(bench, 500);
        let case = |what: &str| {
            Case::new(what, Unit::Microseconds).parameter("gpu", sharing).parameter("subscribers", subscribers)
        };
        let sampler = |way| pair.sampler(way, Unit::Microseconds, batch);
        let comparison = Comparison::new(case("publish on a stream to kernels of subscribers"), sampler(ours))
            .floor(case("the same by the driver and a futex"), sampler(raw));
        bench.run(comparison, plan)?;
    }
    many(bench, &pair, sharing)
}

/// Measures a hundred thousand messages of 4 MiB: in host memory the publisher writes one word of each, on a GPU a
/// kernel writes all of it.
fn many(bench: &Bench<'_>, pair: &Pair, memory: &str) -> Result<(), Failure> {
    let samples = bench.fewer(100);
    let plan = Plan::new(samples).warm_up(1).block(samples);
    let case = |what: &str, unit| {
        let case = Case::new(what, unit).parameter("memory", memory).parameter("messages", samples * 1_000);
        case.parameter("size", size(4 << 20))
    };
    let time = pair.sampler("many-time", Unit::Nanoseconds, samples);
    bench.run(Comparison::new(case("processor time of the publisher for a message", Unit::Nanoseconds), time), plan)?;
    // In host memory no copies are requested from a driver.
    if memory != "host" {
        let copies = pair.sampler("many-copies", Unit::Nanoseconds, samples);
        let comparison =
            Comparison::new(case("copies that the driver was asked for, for each message", Unit::Count), copies);
        bench.run(comparison, plan)?;
    }
    let grown = pair.sampler("many-memory", Unit::Nanoseconds, samples);
    let comparison = Comparison::new(case("memory that the publisher has more for each message", Unit::Bytes), grown);
    bench.run(comparison, plan)
}
