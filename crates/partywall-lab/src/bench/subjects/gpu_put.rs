//! Putting a model file that is in the page cache onto a GPU, against copies from page-locked memory at the full speed
//! of the link.

use partywall::Place;
use partywall::cuda::{DeviceBuffer, PinnedBuffer};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use crate::{
    bench::{Bench, clocked, model_file::ModelFile, size},
    broker::Broker,
};

/// Bytes that the floor copies at once.
const BUFFER: u64 = 256 << 20;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let file = ModelFile::make(bench, broker)?;
    let uuid = bench.gpu()?;
    let domain = broker.connect()?;
    let gpu = domain.gpu(uuid)?;

    let put: Sampler<'_> = Box::new(|| {
        let (elapsed, segment) = clocked(|| domain.put("model", Place::Gpu(uuid)).path(file.path()))?;
        segment.release()?;
        Ok(file.bytes() as f64 / elapsed.as_secs_f64() / 1e9)
    });
    let source = PinnedBuffer::new(gpu.context(), BUFFER)?;
    let destination = DeviceBuffer::new(gpu.context(), BUFFER)?;
    let copy: Sampler<'_> = Box::new(|| {
        let (elapsed, ()) = clocked(|| gpu.stream().copy_from_host(destination.as_slice(), &source))?;
        Ok(BUFFER as f64 / elapsed.as_secs_f64() / 1e9)
    });
    let case = |what: &str, bytes| Case::new(what, Unit::GigabytesPerSecond).parameter("size", size(bytes));
    let threads = partywall::files::default_threads();
    let comparison = Comparison::new(case("put", file.bytes()).parameter("threads", threads), put)
        .floor(case("copy from page-locked memory", BUFFER), copy);
    let plan = bench.plan(20).warm_up(2).block(1);
    bench.run(comparison, plan)
}
