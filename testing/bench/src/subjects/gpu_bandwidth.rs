//! A kernel that reads 4 GiB once, through the mapping of a segment and from this process's own memory.

use partywall::cuda::{DeviceBuffer, DeviceSlice, Event};
use partywall::{Domain, Gpu};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

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
    let through_mapping = Reads::new(range.gpu())?;
    let directly = Reads::new(&local.gpu)?;
    let comparison = Comparison::new(case("kernel read through a mapping"), through_mapping.of(range.as_slice()))
        .floor(case("kernel read of local memory"), directly.of(local.buffer.as_slice()))
        .goal(">= 0.99x floor".parse()?);
    bench.run(comparison, plan)?;

    let devices = partywall::gpu::devices()?;
    let Some(second) = devices.get(1) else { return Ok(()) };
    let reader = second.uuid()?;
    let imported = gpu_open::open(broker, "data", Some(reader))?;
    let local = Local::new(&domain, reader)?;
    let range = imported.tensor("tensor.0")?.device()?;
    let over_link = Reads::new(range.gpu())?;
    let directly = Reads::new(&local.gpu)?;
    let comparison =
        Comparison::new(case("kernel read through a mapping of another GPU's memory"), over_link.of(range.as_slice()))
            .floor(case("kernel read of local memory"), directly.of(local.buffer.as_slice()));
    bench.run(comparison, plan)
}

/// Memory of this process alone, written by a kernel as the segment was.
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

/// Times kernels by the GPU's own clock.
struct Reads<'a> {
    gpu: &'a Gpu,
    before: Event,
    after: Event,
}

impl<'a> Reads<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self, Failure> {
        Ok(Self { gpu, before: Event::new(gpu.context())?, after: Event::new(gpu.context())? })
    }

    /// GB/s of reading `data` once.
    fn of<'s>(&'s self, data: DeviceSlice<'s>) -> Sampler<'s> {
        Box::new(move || {
            let stream = self.gpu.stream();
            self.before.record(stream)?;
            self.gpu.kernels()?.enqueue_read(stream, data)?;
            self.after.record(stream)?;
            self.after.synchronize()?;
            Ok(data.len() as f64 / self.after.elapsed_since(&self.before)?.as_secs_f64() / 1e9)
        })
    }
}
