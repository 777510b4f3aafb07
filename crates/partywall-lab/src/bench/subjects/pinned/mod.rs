//! Pinned host memory: attaching it, copying it, and reading it where it is.

pub(crate) mod attach;
pub(crate) mod copies;
pub(crate) mod readers;

use std::{sync::Arc, time::Duration};

use partywall::{DeviceChoice, Domain, Gpu, Place, gpu};
use partywall_measure::Failure;

use crate::{
    bench::{
        Bench,
        model_file::{AVAILABLE, meminfo},
        size,
    },
    broker::Broker,
};

/// The domain, GPU and node that each of the subjects uses.
struct Setting {
    domain: Domain,
    gpu: Arc<Gpu>,
    /// The node that is closest to the GPU.
    node: u32,
    /// The unit of all sizes: 1 GiB, or 1 MiB of simulated memory.
    unit: u64,
}

impl Setting {
    fn new(bench: &Bench<'_>, broker: &Broker) -> Result<Self, Failure> {
        let domain = broker.connect()?;
        let gpu = domain.gpu(bench.gpu()?)?;
        let (Place::Pinned(node), _) = gpu::resolve(DeviceChoice::Pinned(None))? else {
            return Err("pinned memory is on no NUMA node".into());
        };
        let unit = if gpu.context().driver().is_simulated() { 1 << 20 } else { 1 << 30 };
        Ok(Self { domain, gpu, node, unit })
    }

    fn place(&self) -> Place {
        Place::Pinned(self.node)
    }

    /// Returns whether the host has this many bytes. If not, the report says what is left out.
    fn fits(&self, bench: &Bench<'_>, what: &str, host_bytes: u64) -> bool {
        let available = meminfo(AVAILABLE).unwrap_or(0);
        let fits = host_bytes + self.unit <= available;
        if !fits {
            let needs = size(host_bytes);
            bench
                .note(format!("{what}: left out, because it needs {needs} of host memory, and {available} B are free"));
        }
        fits
    }
}

/// Returns GB/s.
fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}
