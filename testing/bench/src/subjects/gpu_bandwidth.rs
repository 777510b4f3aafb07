//! A kernel that reads 4 GiB once, through the mapping of a segment and from this process's own memory.

use partywall::{Domain, Gpu, cuda::DeviceBuffer};
use partywall_labs::bench::samplers::Timer;
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
    gpu_open::commit(broker, "data", owner, 1, BYTES)?;
    let plan = bench.plan(500);
    let case = |what: &str| Case::new(what, Unit::GigabytesPerSecond).parameter("size", size(BYTES));

    let imported = gpu_open::open(broker, "data", None)?;
    let local = Local::new(&domain, owner)?;
    let range = imported.tensor("tensor.0")?.device()?;
    let through_mapping = Timer::new(range.gpu())?;
    let directly = Timer::new(&local.gpu)?;
    let comparison =
        Comparison::new(case("kernel read through a mapping"), through_mapping.reads(range.as_slice(), BYTES))
            .floor(case("kernel read of local memory"), directly.reads(local.buffer.as_slice(), BYTES))
            .goal(">= 0.99x floor".parse()?);
    bench.run(comparison, plan)?;

    let devices = partywall::gpu::devices()?;
    let Some(second) = devices.get(1) else { return Ok(()) };
    let reader = second.uuid()?;
    let imported = gpu_open::open(broker, "data", Some(reader))?;
    let local = Local::new(&domain, reader)?;
    let range = imported.tensor("tensor.0")?.device()?;
    let over_link = Timer::new(range.gpu())?;
    let directly = Timer::new(&local.gpu)?;
    let comparison = Comparison::new(
        case("kernel read through a mapping of another GPU's memory"),
        over_link.reads(range.as_slice(), BYTES),
    )
    .floor(case("kernel read of local memory"), directly.reads(local.buffer.as_slice(), BYTES));
    bench.run(comparison, plan)
}

/// Private memory of this process, written by a kernel like the segment.
struct Local {
    buffer: DeviceBuffer,
    gpu: std::sync::Arc<Gpu>,
}

impl Local {
    fn new(domain: &Domain, uuid: partywall::DeviceUuid) -> Result<Self, Failure> {
        let gpu = domain.gpu(uuid)?;
        let buffer = DeviceBuffer::new(gpu.context(), BYTES)?;
        gpu.kernels()?.enqueue_fill(gpu.stream(), buffer.as_slice())?;
        gpu.stream().synchronize()?;
        Ok(Self { buffer, gpu })
    }
}
