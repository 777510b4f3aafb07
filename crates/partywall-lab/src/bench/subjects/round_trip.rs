//! An empty request to the broker, against the same number of bytes to a process that only sends them back.

use partywall_measure::{Case, Comparison, Failure, Unit, timed};

use crate::{
    bench::{Bench, ping_pong::PingPong, placement::Placement},
    broker::Broker,
};

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let mut raw = PingPong::start(bench, broker)?;
    for placement in [Placement::OneProcessor, Placement::TwoProcessors, Placement::Free] {
        let Some(_placed) = placement.apply(&[broker.pid(), raw.pid()])? else { continue };
        let ping = timed(Unit::Microseconds, || Ok(domain.ping()?));
        let case = placement.of(Case::new("round trip", Unit::Microseconds));
        // Without a placement, the scheduler may put one pair on one processor and the other pair on two. The goal
        // applies to that too, because users get the same.
        let comparison = Comparison::new(case, ping).floor(raw.case(), raw.sampler()).goal("<= 1.3x floor".parse()?);
        let plan = bench.plan(20_000).block(200);
        bench.run(comparison, plan)?;
    }
    Ok(())
}
