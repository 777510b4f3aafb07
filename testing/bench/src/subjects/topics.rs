//! Messages from one process to another: what the machine takes for one, and what iceoryx2 does.

use partywall_measure::{Case, Comparison, Failure, Unit};

use super::ordering::pair::Pair;
use crate::{
    bench::Bench,
    broker::Broker,
    iceoryx2::{Iceoryx2, Mode},
    placement::Placement,
};

/// How many subscribers there are in the process that receives.
const SUBSCRIBERS: [usize; 4] = [1, 2, 4, 8];

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let pair = Pair::start(broker, None, |_| ())?;
    let placement = Placement::TwoProcessors;
    if !pair.place(placement)? {
        bench.report.note("topics: skipped: there is one processor for two processes");
        return Ok(());
    }
    let rival = match Iceoryx2::build() {
        Ok(rival) => rival,
        Err(failure) => {
            bench.leave_out(&failure);
            return Ok(());
        }
    };
    for (mode, what, floor, floor_way, unit, samples) in [
        (Mode::Look, "iceoryx2, both looking", "shared cache line", "look-raw", Unit::Nanoseconds, 2_000),
        (Mode::Exchange, "iceoryx2, both waiting, in turn", "futex", "exchange-raw", Unit::Microseconds, 500),
        (Mode::Wake, "iceoryx2, to a sleeper", "futex to wake of a sleeper", "wake-raw", Unit::Microseconds, 2_000),
    ] {
        for subscribers in SUBSCRIBERS {
            let twins = rival.start(mode, subscribers)?;
            twins.place(placement)?;
            let (plan, batch) = Pair::plan(bench, samples);
            let case = |what| placement.of(Case::new(what, unit));
            let comparison =
                Comparison::new(case(what).parameter("subscribers", subscribers), twins.sampler(unit, batch))
                    .floor(case(floor), pair.sampler(floor_way, unit, batch));
            bench.run(comparison, plan)?;
        }
    }
    Ok(())
}
