//! Opening GPU memory in a process that has a context, against the driver's own calls on the same file descriptors:
//! import, reserve, map, set access. Another process committed the memory and is gone.

use partywall::Place;
use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench, handout,
        peer::{self, Order},
        samplers::Half,
        size,
    },
    broker::Broker,
};

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let uuid = bench.gpu()?;
    let domain = broker.connect()?;
    let gpu = domain.gpu(uuid)?;
    let free = gpu.context().memory_info()?.free;
    let tensors = 64;
    let bytes = if gpu.context().driver().is_simulated() { 1 << 20 } else { 1 << 30 };
    let total = tensors * bytes;
    if total > free {
        bench.note(format!("gpu_open: no {}, because only {free} bytes are free", size(total)));
        return Ok(());
    }
    let name = format!("segment.{total}");
    commit(bench, broker, &name, Place::Gpu(uuid), tensors, bytes)?;
    let chunks = handout::chunks(broker.socket(), &name, gpu.context().driver().is_simulated())?;
    let case = |what: &str| {
        Case::new(what, Unit::Microseconds).parameter("size", size(total)).parameter("chunks", chunks.len())
    };
    let ours =
        |half: Half| half.sampler(|| Ok(domain.opener(&name).open()?), |_| Ok(()), |segment| Ok(segment.release()?));
    let plan = bench.plan(500);
    let comparison = Comparison::new(case("open"), ours(Half::Opening))
        .floor(case("import and map"), Half::Opening.of_the_driver(gpu.context(), &chunks));
    bench.run(comparison, plan)?;
    let comparison = Comparison::new(case("release"), ours(Half::Closing))
        .floor(case("unmap"), Half::Closing.of_the_driver(gpu.context(), &chunks));
    bench.run(comparison, plan)?;
    domain.remove(&name)?;
    Ok(())
}

/// Has another process commit `tensors` tensors of `bytes` bytes each, written by a kernel. That process ends before
/// this returns.
pub(super) fn commit(
    bench: &Bench<'_>,
    broker: &Broker,
    name: &str,
    place: Place,
    tensors: u64,
    bytes: u64,
) -> Result<(), Failure> {
    let mut peer = bench.start(broker, peer::ROLE)?;
    peer.ask::<()>(Order::CommitKept { name: name.to_owned(), place: place.to_string(), tensors, bytes })?;
    peer.end();
    Ok(())
}
