//! Opening GPU memory in a process that has a context, against the driver's own calls on the same file descriptors:
//! import, reserve, map, set access. Another process committed the memory and is gone.

use partywall::{DeviceUuid, Place};
use partywall_lab::bench::samplers::Half;
use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{Bench, size},
    broker::Broker,
    handout, role,
};

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let uuid = first()?;
    let domain = broker.connect()?;
    let gpu = domain.gpu(uuid)?;
    let free = gpu.context().memory_info()?.free;
    for (tensors, bytes) in [(1, 2 << 20), (64, 1 << 30)] {
        let total = tensors * bytes;
        if total > free {
            bench.report.note(format!("gpu_open: no {}, because only {free} bytes are free", size(total)));
            continue;
        }
        let name = format!("segment.{total}");
        commit(broker, &name, Place::Gpu(uuid), tensors, bytes)?;
        let chunks = handout::chunks(broker.socket(), &name, gpu.context().driver().is_simulated())?;
        let case = |what: &str| {
            Case::new(what, Unit::Microseconds).parameter("size", size(total)).parameter("chunks", chunks.len())
        };
        let ours = |half: Half| {
            half.sampler(|| Ok(domain.opener(&name).open()?), |_| Ok(()), |segment| Ok(segment.release()?))
        };
        let plan = bench.plan(500);
        let comparison = Comparison::new(case("open"), ours(Half::Opening))
            .floor(case("import and map"), Half::Opening.of_the_driver(gpu.context(), &chunks))
            .goal("<= floor + 200 us".parse()?);
        bench.run(comparison, plan)?;
        let comparison = Comparison::new(case("release"), ours(Half::Closing))
            .floor(case("unmap"), Half::Closing.of_the_driver(gpu.context(), &chunks));
        bench.run(comparison, plan)?;
        domain.remove(&name)?;
    }
    Ok(())
}

/// Returns the first GPU that this process sees.
pub(super) fn first() -> Result<DeviceUuid, Failure> {
    let devices = partywall::gpu::devices()?;
    Ok(devices.first().ok_or("no GPU")?.uuid()?)
}

/// Has another process commit `tensors` tensors of `bytes` bytes each, written by a kernel. That process ends before
/// this returns.
pub(super) fn commit(broker: &Broker, name: &str, place: Place, tensors: u64, bytes: u64) -> Result<(), Failure> {
    let mut command = role::command(role::GPU_SEGMENT, [broker.socket()])?;
    let status = command.args([name, &place.to_string(), &tensors.to_string(), &bytes.to_string()]).status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the process that was to commit {name:?} failed: {status}").into())
    }
}
