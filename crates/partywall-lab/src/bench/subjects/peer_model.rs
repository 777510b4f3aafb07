//! A model of 14 GiB as torch tensors: opened by name, or read from its file in the page cache by safetensors and by
//! `put_file`. The process has torch, a context and a connection.

use std::{ffi::OsStr, path::Path};

use partywall::Place;
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};

use crate::{
    bench::{
        Bench, clocked, milliseconds,
        model_file::ModelFile,
        program::Program,
        python::{OURS, Programs, SAFETENSORS},
        size,
    },
    broker::Broker,
};

const NAME: &str = "model";

/// The option that makes a program read some tensors before the clock stops.
const TOUCH: &str = "--touch";
const TOUCHED: usize = 8;

/// How many fresh processes open the model, and how many samples the slow programs take.
const FRESH: usize = 6;
const LONG: usize = 5;

/// The name of a program, and its arguments.
type ProgramCall<'a> = (&'a str, &'a [&'a dyn AsRef<OsStr>]);

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let gpu = bench.gpu()?;
    let file = ModelFile::large(bench, broker, domain.gpu(gpu)?.context().memory_info()?.free)?;
    domain.put(NAME, Place::Gpu(gpu)).kept(true).path(file.path())?.release()?;
    let socket: &Path = broker.socket();
    let path: &Path = file.path();
    let open: ProgramCall<'_> = (OURS, &[&"model", &socket, &NAME]);
    let load: ProgramCall<'_> = (SAFETENSORS, &[&path]);
    let ours = "open as torch tensors";
    let theirs = "load_file of safetensors";
    let case = |what: &str, process: &str| {
        let case = Case::new(what, Unit::Milliseconds).parameter("process", process);
        case.parameter("size", size(file.bytes())).parameter("tensors", file.tensors())
    };
    let programs = Programs::unpack(broker)?;

    // Repeatedly in one process, like a server that follows versions.
    let mut python = programs.start(open.0, open.1)?;
    let rust: Sampler<'_> = Box::new(|| Ok(milliseconds(clocked(|| domain.opener(NAME).open())?.0)));
    let plan = bench.plan(200);
    let comparison =
        Comparison::new(case(ours, "used"), python.sampler(plan.block)).floor(case("open from Rust", "used"), rust);
    bench.run(comparison, plan)?;
    drop(python);

    // Until kernels have read some tensors, so that no deferred work is left out.
    let touched = |what: &str| case(&format!("{what}, and read {TOUCHED} of them"), "used");
    let mut python = programs.start(open.0, &[open.1, &[&TOUCH]].concat())?;
    python.sample()?;
    let mut loading = programs.start_rival(bench, load.0, &[load.1, &[&TOUCH]].concat());
    let mut putting = programs.start_rival(bench, OURS, &[&"put", &socket, &path, &TOUCH]);
    let can_load = loading.is_some();
    let rivals = [(theirs, &mut loading), ("put_file of Partywall", &mut putting)];
    let rivals = rivals.into_iter().filter_map(|(what, rival)| Some((touched(what), rival.as_mut()?.sampler(1))));
    let comparison = Comparison::new(touched(ours), python.sampler(1));
    let comparison = rivals.fold(comparison, |comparison, (case, sampler)| comparison.rival(case, sampler));
    let plan = bench.plan(LONG).warm_up(0).block(1);
    bench.run(comparison, plan)?;
    drop((python, loading, putting));

    // In processes that have just started, like a server that is restarted.
    let plan = bench.plan(FRESH).warm_up(0).block(1);
    let comparison = Comparison::new(case(ours, "fresh"), first_of_each(&programs, open, plan.samples)?);
    let comparison = match can_load {
        true => comparison.rival(case(theirs, "fresh"), first_of_each(&programs, load, plan.samples)?),
        false => comparison,
    };
    bench.run(comparison, plan)
}

/// Returns a sampler that takes one sample from each of `number` processes and then ends the process. All processes
/// start before the first sample is taken.
fn first_of_each(
    programs: &Programs<'_>,
    (program, arguments): ProgramCall<'_>,
    number: usize,
) -> Result<Sampler<'static>, Failure> {
    let started = (0..number).map(|_| programs.spawn(program, arguments));
    let mut ready = started.collect::<Result<Vec<_>, _>>()?;
    ready.iter_mut().try_for_each(Program::await_ready)?;
    Ok(Box::new(move || ready.pop().ok_or("there are no more fresh processes")?.sample()))
}
