//! A model of torch of 14 GiB, from shared memory into a model on *meta*; or its tensors from a file in the page cache,
//! by safetensors and by `torch.load`. The processes have torch and a context.

use std::path::Path;

use partywall_measure::{Case, Comparison, Failure, Unit};

use crate::{
    bench::{
        Bench,
        model_file::ModelFile,
        python::{OURS, Programs, SAFETENSORS, TORCH_LOAD},
        size,
    },
    broker::Broker,
};

/// How many samples each program takes: the rivals take seconds.
const SAMPLES: usize = 5;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let gpu = bench.gpu()?;
    let file = ModelFile::large(bench, broker, domain.gpu(gpu)?.context().memory_info()?.free)?;
    let socket: &Path = broker.socket();
    let path: &Path = file.path();
    let case = |what: &str| {
        Case::new(what, Unit::Milliseconds).parameter("size", size(file.bytes())).parameter("tensors", file.tensors())
    };
    let programs = Programs::unpack(broker)?;
    let mut ours = programs.start(OURS, &[&"module", &socket, &path])?;
    let mut safetensors = programs.start_rival(bench, SAFETENSORS, &[&path]);
    let mut torch = programs.start_rival(bench, TORCH_LOAD, &[&path]);
    let rivals = [("load_file of safetensors", &mut safetensors), ("torch.load", &mut torch)];
    let rivals = rivals.into_iter().filter_map(|(what, rival)| Some((case(what), rival.as_mut()?.sampler(1))));
    let comparison = Comparison::new(case("load_module"), ours.sampler(1));
    let comparison = rivals.fold(comparison, |comparison, (case, sampler)| comparison.rival(case, sampler));
    let plan = bench.plan(SAMPLES).warm_up(1).block(1);
    bench.run(comparison, plan)
}
