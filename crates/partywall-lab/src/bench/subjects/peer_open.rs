//! Opening one tensor from Python, against the same calls from Rust: two members of one broker, in turns.

use std::time::Duration;

use partywall::{DType, Domain, Place};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use super::gpu_open;
use crate::{
    bench::{
        Bench, clocked, microseconds,
        placement::Placement,
        program::Program,
        python::{OURS, Programs},
        size,
    },
    broker::Broker,
};

const NAME: &str = "segment";
const TENSOR: &str = "tensor.0";

/// The measured work.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    Open,
    OpenClose,
    /// Open, take the tensor (in Python by torch), and close. It has no goal: Partywall does not control torch's part.
    Take,
}

pub(super) fn host(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let bytes = 1 << 20;
    let builder = broker.connect()?.create(NAME, Place::Host).tensor(TENSOR, DType::U8, &[bytes]);
    let _held = builder.allocate()?.commit()?;
    let programs = Programs::unpack(broker)?;
    for work in [Work::Open, Work::OpenClose] {
        let mut python = start(&programs, broker, work)?;
        for placement in [Placement::OneProcessor, Placement::Free] {
            let _placed = placement.apply(&[broker.pid(), python.pid()])?;
            let case = placement.of(case(work, "host", bytes));
            compare(bench, broker, &mut python, work, &case)?;
        }
    }
    Ok(())
}

pub(super) fn gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let bytes = 2 << 20;
    gpu_open::commit(bench, broker, NAME, Place::Gpu(bench.gpu()?), 1, bytes)?;
    let programs = Programs::unpack(broker)?;
    for work in [Work::Open, Work::OpenClose, Work::Take] {
        let mut python = start(&programs, broker, work)?;
        compare(bench, broker, &mut python, work, &case(work, "GPU", bytes))?;
    }
    Ok(())
}

fn start(programs: &Programs<'_>, broker: &Broker, work: Work) -> Result<Program, Failure> {
    let what = match work {
        Work::Open => "open",
        Work::OpenClose => "open-close",
        Work::Take => "tensor",
    };
    programs.start(OURS, &[&what, &broker.socket(), &NAME])
}

fn case(work: Work, memory: &str, bytes: u64) -> Case {
    let what = match work {
        Work::Open => "open",
        Work::OpenClose => "open and close",
        Work::Take => "open, take the tensor, and close",
    };
    Case::new(what, Unit::Microseconds).parameter("memory", memory).parameter("size", size(bytes))
}

fn compare(bench: &Bench<'_>, broker: &Broker, python: &mut Program, work: Work, case: &Case) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let rust: Sampler<'_> = Box::new(|| Ok(microseconds(from_rust(&domain, work)?)));
    let plan = bench.plan(5_000);
    let from = |language| case.clone().parameter("from", language);
    let comparison = Comparison::new(from("Python"), python.sampler(plan.block)).floor(from("Rust"), rust);
    bench.run(comparison, plan)
}

/// Does the same work as the Python program, and returns how long it took.
fn from_rust(domain: &Domain, work: Work) -> Result<Duration, Failure> {
    let open = || domain.opener(NAME).open();
    if work == Work::Open {
        let (elapsed, segment) = clocked(open)?;
        segment.release()?;
        return Ok(elapsed);
    }
    let all = || {
        let segment = open()?;
        if work == Work::Take {
            std::hint::black_box(segment.tensor(TENSOR)?.device()?.device_ptr());
        }
        segment.release()
    };
    Ok(clocked(all)?.0)
}
