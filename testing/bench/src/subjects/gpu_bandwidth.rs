//! A kernel that reads 4 GiB once, through the mapping of a segment and from this process's own memory.

use partywall::{Place, cuda::DeviceBuffer};
use partywall_lab::bench::samplers::Timer;
use partywall_measure::{Case, Comparison, Failure, Unit};

use super::gpu_open;
use crate::{
    bench::{Bench, size},
    broker::Broker,
};

const BYTES: u64 = 4 << 30;

pub(super) fn run(bench: &mut Bench, broker: &Broker) -> Result<(), Failure> {
    let owner = gpu_open::first()?;
    let domain = broker.connect()?;
    let gpu = domain.gpu(owner)?;
    let free = gpu.context().memory_info()?.free;
    if free < 2 * BYTES {
        bench.report.note(format!("gpu_bandwidth: no {}, because only {free} bytes are free", size(BYTES)));
        return Ok(());
    }
    gpu_open::commit(broker, "data", Place::Gpu(owner), 1, BYTES)?;
    let plan = bench.plan(500);
    let case = |what: &str| Case::new(what, Unit::GigabytesPerSecond).parameter("size", size(BYTES));

    let segment = domain.opener("data").open()?;
    let mapped = segment.tensor("tensor.0")?.device()?;
    let local = DeviceBuffer::new(gpu.context(), BYTES)?;
    gpu.kernels()?.enqueue_fill(gpu.stream(), local.as_slice())?;
    gpu.stream().synchronize()?;
    let timer = Timer::new(&gpu)?;
    let comparison = Comparison::new(case("kernel read through a mapping"), timer.reads(mapped.as_slice(), BYTES))
        .floor(case("kernel read of local memory"), timer.reads(local.as_slice(), BYTES))
        .goal(">= 0.99x floor".parse()?);
    bench.run(comparison, plan)
}
