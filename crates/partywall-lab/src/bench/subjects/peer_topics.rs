//! Tensors of 4 MiB from one Python process to another by topics, and their sums back: against queues of
//! `multiprocessing`, and against the same copies and kernels written by hand.

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        mps::Mps,
        python::{OURS_TOPICS, Programs, RAW_TENSOR, SIMPLE_QUEUE},
    },
    broker::Broker,
};

/// Where the tensors are, and how the GPU is shared.
struct Setting {
    /// The programs' argument for the place.
    place: &'static str,
    /// The waiter for a complete tensor: the host or a stream.
    orders: &'static [&'static str],
    rival: &'static str,
}

pub(super) fn host(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let rival = "multiprocessing.SimpleQueue";
    let setting = Setting { place: "host", orders: &["host"], rival };
    measure(bench, broker, &Programs::unpack(broker)?, &setting)
}

pub(super) fn time_sliced(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    measure(bench, broker, &Programs::unpack(broker)?, &on_gpu("time-sliced"))
}

/// Measures with all programs as clients of an MPS server that runs only for this subject.
pub(super) fn under_mps(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let Some(mps) = Mps::start(bench, broker)? else { return Ok(()) };
    let programs = Programs::unpack(broker)?.under(&mps);
    measure(bench, broker, &programs, &on_gpu("MPS"))
}

fn on_gpu(place: &'static str) -> Setting {
    Setting { place, orders: &["host", "stream"], rival: "torch.multiprocessing.SimpleQueue" }
}

fn measure(bench: &Bench<'_>, broker: &Broker, programs: &Programs<'_>, setting: &Setting) -> Result<(), Failure> {
    let Setting { place, orders, rival, .. } = *setting;
    let mut queues = ["fresh", "same"].map(|how| programs.spawn(SIMPLE_QUEUE, &[&how, &place])).map(Some);
    let mut theirs = [None, None];
    for order in orders {
        // All programs start at the same time, because a start with torch takes ten seconds.
        let spawn = |how| programs.spawn(OURS_TOPICS, &[&how, &broker.socket(), &place, order]);
        let [mut send, mut loan, mut same] = [spawn("send")?, spawn("loan")?, spawn("same")?];
        let by_hand = |how| programs.spawn(RAW_TENSOR, &[&how, &place, order]);
        let [mut fresh_by_hand, mut same_by_hand] = [by_hand("fresh")?, by_hand("same")?];
        for program in [&mut send, &mut loan, &mut same, &mut fresh_by_hand, &mut same_by_hand] {
            program.await_ready()?;
        }
        for (queue, rival) in queues.iter_mut().zip(&mut theirs) {
            if let Some(spawned) = queue.take() {
                *rival = Programs::await_rival(bench, spawned);
            }
        }
        let [fresh_queue, same_queue] = &mut theirs;

        let plan = bench.plan(SAMPLES).warm_up(BLOCK).block(BLOCK);
        let memory = if place == "host" { "memory" } else { "gpu" };
        let case = |what: &str| Case::new(what, Unit::Microseconds).parameter(memory, place).parameter("order", order);
        let comparison =
            Comparison::new(case("a fresh tensor there and its sum back, by send"), send.sampler(plan.block))
                .floor(case("kernel, copy, kernel and futex by hand"), fresh_by_hand.sampler(plan.block))
                .rival(case("the same by loan"), loan.sampler(plan.block));
        let comparison = match fresh_queue {
            Some(queue) => comparison.rival(case(rival), queue.sampler(plan.block)),
            None => comparison,
        };
        bench.run(comparison, plan)?;

        let comparison =
            Comparison::new(case("the same tensor again there and its sum back"), same.sampler(plan.block))
                .floor(case("copy, kernel and futex by hand"), same_by_hand.sampler(plan.block));
        let comparison = match same_queue {
            Some(queue) => comparison.rival(case(rival), queue.sampler(plan.block)),
            None => comparison,
        };
        bench.run(comparison, plan)?;
    }
    Ok(())
}

/// Samples of each program and order. Below a thousand: after that many messages of the same tensor, torch waits for
/// the GPU with every message.
const SAMPLES: usize = 400;

/// Messages in a row, like a stream of messages. With one message a turn, every process would be asleep when it
/// arrives.
const BLOCK: usize = 50;
