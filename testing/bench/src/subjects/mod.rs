//! What is measured.

mod gpu_bandwidth;
mod gpu_open;
mod gpu_put;
mod host_open;
mod many;
mod put;
mod round_trip;
mod table_open;

use partywall_measure::Failure;

use crate::{bench::Bench, broker::Broker};

/// Something that is measured, with a broker of its own.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) needs_gpu: bool,
    pub(crate) run: fn(&mut Bench, &Broker) -> Result<(), Failure>,
}

/// All of them, in the order in which they are measured.
pub(crate) const SUBJECTS: &[Subject] = &[
    host("round_trip", "asking the broker and being answered", round_trip::run),
    host("host_open", "opening host memory by name", host_open::run),
    host("table_open", "opening a segment of 70,000 tensors", table_open::run),
    host("put", "a cached safetensors file into host memory", put::run),
    host("many", "10,000 names; 1,000 members", many::run),
    gpu("gpu_open", "opening GPU memory by name", gpu_open::run),
    gpu("gpu_bandwidth", "a kernel reading through an imported mapping", gpu_bandwidth::run),
    gpu("gpu_put", "a cached safetensors file into GPU memory", gpu_put::run),
];

const fn host(name: &'static str, about: &'static str, run: fn(&mut Bench, &Broker) -> Result<(), Failure>) -> Subject {
    Subject { name, about, needs_gpu: false, run }
}

const fn gpu(name: &'static str, about: &'static str, run: fn(&mut Bench, &Broker) -> Result<(), Failure>) -> Subject {
    Subject { name, about, needs_gpu: true, run }
}
