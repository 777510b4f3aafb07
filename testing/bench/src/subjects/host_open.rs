//! Opening a committed segment in host memory: one round trip, then a mapping. Dropping it is a second round trip,
//! which gives the lease back and is measured separately.

use partywall::{DType, Domain, Place, Segment};
use partywall_lab::bench::samplers::Half;
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use crate::{
    bench::{Bench, clocked, microseconds, size},
    broker::Broker,
    ping_pong::PingPong,
    placement::Placement,
};

const SIZES: [u64; 3] = [4 << 10, 1 << 20, 1 << 30];

/// The first placement shows the cost of the calls, the second the time that users get.
const PLACEMENTS: [Placement; 2] = [Placement::OneProcessor, Placement::Free];

/// The size of a page, the smallest unit that the kernel maps.
const PAGE: usize = 4096;

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let producer = broker.connect()?;
    let consumer = broker.connect()?;
    let mut raw = PingPong::start()?;
    let held = SIZES.map(|bytes| commit(&producer, bytes));
    let _held = held.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (placement, bytes) in PLACEMENTS.into_iter().flat_map(|placement| SIZES.map(|bytes| (placement, bytes))) {
        let _placed = placement.apply(&[broker.pid(), raw.pid()])?;
        let name = name(bytes);
        let open = || consumer.opener(&name).open();
        let ours = |half: Half| half.sampler(|| Ok(open()?), |_| Ok(()), |segment| Ok(segment.release()?));
        let plan = bench.plan(5_000);
        let case = |what: &str| placement.of(Case::new(what, Unit::Microseconds).parameter("size", size(bytes)));

        let goal = "<= floor + 60 us".parse()?;
        let comparison = Comparison::new(case("open"), ours(Half::Opening)).floor(raw.case(), raw.sampler()).goal(goal);
        bench.run(comparison, plan)?;
        let comparison = Comparison::new(case("release"), ours(Half::Closing)).floor(raw.case(), raw.sampler());
        bench.run(comparison, plan)?;

        if bytes == 1 << 20 {
            let sampler: Sampler<'_> = Box::new(|| {
                let (elapsed, _) = clocked(|| {
                    let segment = open()?;
                    touch(&segment)?;
                    Ok::<_, partywall::Error>(segment)
                })?;
                Ok(microseconds(elapsed))
            });
            bench.run(Comparison::new(case("open and touch every page"), sampler), plan)?;
        }
    }
    Ok(())
}

fn name(bytes: u64) -> String {
    format!("segment.{bytes}")
}

/// Returns a segment of one tensor, with memory behind every page.
fn commit(domain: &Domain, bytes: u64) -> Result<Segment, Failure> {
    let mut build = domain.create(&name(bytes), Place::Host).tensor("data", DType::U8, &[bytes]).allocate()?;
    build.as_mut_bytes("data")?.fill(1);
    Ok(build.commit()?)
}

/// Reads one byte of every page.
fn touch(segment: &Segment) -> Result<(), partywall::Error> {
    let bytes = segment.tensor("data")?.as_bytes()?;
    let sum: u64 = bytes.iter().step_by(PAGE).map(|byte| u64::from(*byte)).sum();
    std::hint::black_box(sum);
    Ok(())
}
