//! `partywall bench`: what sharing costs on this machine, compared with private memory in the same run.
//!
//! | module | measures |
//! |---|---|
//! | `memory` | latency of dependent loads and writes, and bandwidth of reads, in own and in shared memory |
//! | `copies` | copies into and out of shared memory |
//! | `handoff` | how long one process takes to notify another, in each available way |
//! | `relay` | the same between streams of two processes |
//! | `blocks` | hand-offs by blocks of a pool, of hosts and of streams |
//! | `fanout` | how long one process takes to notify several |
//! | `group` | groups of processes, and how they share a GPU |
//! | `overhead` | the memory that another process or another mapping costs |
//! | `attach` | opening and closing by size, how often one segment can be opened |
//! | `alloc` | blocks of a pool beside allocations |
//! | [`samplers`] | samplers, also for the project's own benchmarks |
//! | [`turns`] | hand-offs in turn and the objects of hosts, also for the project's own benchmarks |
//!
//! It has a broker and a domain of its own. Another process, a *peer*, creates the shared objects and follows the
//! orders of this one. Every case is checked: the bytes that were read, copied or handed over are the bytes that the
//! peer has written.

mod across;
mod alloc;
mod attach;
mod blocks;
mod chain;
mod copies;
mod fanout;
mod group;
mod handoff;
mod memory;
mod overhead;
mod peer;
mod relay;
pub mod samplers;
pub mod turns;

use std::{
    cell::{Cell, RefCell},
    fmt::Display,
    fs,
    sync::Arc,
    time::Duration,
};

use clap::ValueEnum;
use partywall::{DeviceChoice, Domain, ErrorKind, Gpu, Place, bytes};
use partywall_cli::device;
use partywall_measure::{Case, Comparison, Machine, Plan, Report, Unit, timed};

pub(crate) use self::peer::LAB as PEER;
use self::samplers::Timer;
use crate::{Failure, broker, broker::Broker, context::Context, failure::Doing, peer::Peer, reporter::Reporter};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// Dependent loads and writes in own and in shared memory
    Latency,
    /// Reading own and shared memory at full speed
    Bandwidth,
    /// Copies into and out of shared memory
    Copy,
    /// How long one process takes to notify another
    Handoff,
    /// Opening and closing segments
    Attach,
    /// Blocks of a pool beside allocations
    Alloc,
    /// One process to 1 to 8 others
    Fanout,
}

/// What to measure, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The subjects, in their order.
    pub subjects: Vec<Subject>,
    /// Where the memory is.
    pub device: DeviceChoice,
    /// Small sizes and few samples: shows that it works, and little more.
    pub quick: bool,
}

/// Receives the name of the next measurement and the completed part of the run, from 0 to 1.
pub type Progress<'a> = &'a dyn Fn(&str, f64);

/// Measures, and returns the report.
///
/// # Errors
/// A subject cannot be measured: memory of the chosen device cannot be allocated, or a process does not answer.
pub fn run(context: &Context, options: &Options, progress: Progress<'_>) -> Result<Report, Failure> {
    device::require_unpinned(options.device)?;
    let place = device::place(context.console, options.device)?;
    let bench = Bench::new(context, place, options.quick, progress)?;
    of_the_harness(&bench)?;
    let with_overhead = [Subject::Latency, Subject::Bandwidth, Subject::Attach]
        .into_iter()
        .find(|subject| options.subjects.contains(subject));
    for (done, subject) in options.subjects.iter().enumerate() {
        bench.done.set(done as f64 / options.subjects.len() as f64);
        match subject {
            Subject::Latency => memory::latency(&bench),
            Subject::Bandwidth => memory::bandwidth(&bench),
            Subject::Copy => copies::run(&bench),
            Subject::Handoff => handoff::run(&bench),
            Subject::Attach => attach::run(&bench),
            Subject::Alloc => alloc::run(&bench),
            Subject::Fanout => fanout::run(&bench),
        }?;
        // The report then shows the memory that sharing takes after the time.
        if with_overhead == Some(*subject) {
            overhead::run(&bench)?;
        }
    }
    progress("done", 1.0);
    Ok(bench.report.into_inner())
}

/// The time of the harness itself, which is a part of each sample.
fn of_the_harness(bench: &Bench<'_>) -> Result<(), Failure> {
    let case = |name: &str, unit| Case::new(name, unit).parameter("of", "the harness itself");
    let nothing = timed(Unit::Nanoseconds, || Ok(()));
    bench.run("the harness itself", Comparison::new(case("two reads of the clock", Unit::Nanoseconds), nothing))?;
    if let Some(gpu) = &bench.gpu {
        let timer = Timer::new(gpu).doing("making events")?;
        let nothing = Box::new(|| Ok(timer.time(|| Ok(()))?.as_secs_f64() * 1e6));
        let case = case("two events of a stream, with nothing between", Unit::Microseconds);
        bench.run("the harness itself", Comparison::new(case, nothing))?;
    }
    Ok(())
}

/// A run: what every subject needs.
struct Bench<'a> {
    place: Place,
    /// `None` in host memory.
    gpu: Option<Arc<Gpu>>,
    quick: bool,
    /// How many bytes a subject may allocate at once in the chosen place.
    room: u64,
    /// How many bytes of host memory it may allocate beside its memory on a GPU.
    host_room: u64,
    report: RefCell<Report>,
    /// Receives the progress of the run, and how much of it is done.
    progress: Progress<'a>,
    done: Cell<f64>,
    reporter: Reporter,
    domain: Domain,
    /// The last field, so that the connection is dropped before its broker.
    broker: Broker,
}

impl<'a> Bench<'a> {
    fn new(context: &Context, place: Place, quick: bool, progress: Progress<'a>) -> Result<Self, Failure> {
        // Each of 20,000 mappings may need a file.
        partywall_os::process::raise_fd_limit();
        let broker = Broker::start(context, PEER.name)?;
        let domain = broker::connect(broker.socket())?;
        let gpu = match place.gpu() {
            Some(uuid) => Some(domain.gpu(uuid)?),
            None => None,
        };
        let free = match &gpu {
            Some(gpu) => gpu.context().memory_info().doing("asking for the free memory")?.free,
            None => available_memory(),
        };
        let report = RefCell::new(new_report(gpu.as_deref(), quick)?);
        let reporter = Reporter::new(context, &PEER, "bench", false);
        let host_room = available_memory() / 4;
        Ok(Self {
            place,
            gpu,
            quick,
            room: free / 4,
            host_room,
            report,
            progress,
            done: Cell::new(0.0),
            reporter,
            domain,
            broker,
        })
    }

    /// Starts another process.
    fn peer(&self) -> Result<Peer, Failure> {
        self.peer_on(self.place, &[])
    }

    /// Starts another process with memory at another place, and with environment variables.
    fn peer_on(&self, place: Place, environment: &[(&str, &str)]) -> Result<Peer, Failure> {
        let peer = Peer::spawn(PEER.name, peer::ROLE, place, environment, &self.reporter)?;
        peer.say(self.broker.socket())?;
        Ok(peer)
    }

    /// Returns the sizes that a subject varies. It has `copies` buffers of a size at once, and on a GPU `host_copies`
    /// more on the host. Sizes that do not fit are noted.
    fn sizes(&self, what: &str, copies: u64, host_copies: u64) -> Vec<u64> {
        let most = if self.gpu.is_some() { LARGEST } else { 256 << 20 };
        let steps = (0..).map(|step| 4096 << (4 * step)).take_while(|size| *size < most);
        self.that_fit(what, steps.chain([most]), copies, host_copies)
    }

    /// Returns the given sizes that fit, as [`Bench::sizes`].
    fn that_fit(&self, what: &str, sizes: impl Iterator<Item = u64>, copies: u64, host_copies: u64) -> Vec<u64> {
        let sizes = sizes.filter(|size| !self.quick || *size <= 1 << 20);
        let needs = match &self.gpu {
            None => vec![("memory", copies, self.room)],
            Some(_) => vec![("GPU's memory", copies, self.room), ("host's memory", host_copies, self.host_room)],
        };
        let mut fit = Vec::new();
        for size in sizes {
            match lacking(size, &needs) {
                None => fit.push(size),
                Some((whose, copies)) => self.note(format!(
                    "{what}: {} is left out: {copies} times as much is more than a quarter of the {whose} that is free",
                    bytes(size)
                )),
            }
        }
        fit
    }

    /// Returns the size of a buffer, a power of two. Samples of small sizes take turns among its parts, so that no
    /// cache contains them. There are `copies` buffers at once, and on a GPU `host_copies` more on the host.
    fn rotated(&self, largest: u64, copies: u64, host_copies: u64) -> u64 {
        let on_host = if self.gpu.is_some() { self.host_room / host_copies.max(1) } else { u64::MAX };
        if self.quick { largest } else { rotation(largest, on_host.min(self.room / copies)) }
    }

    fn note(&self, text: impl Into<String>) {
        self.report.borrow_mut().note(text);
    }

    /// Takes the samples of a comparison, for about a second, and keeps the result.
    fn run(&self, what: &str, comparison: Comparison<'_>) -> Result<(), Failure> {
        (self.progress)(what, self.done.get());
        let (limit, samples) = if self.quick { (50, 20) } else { (1_000, 1_000) };
        let result = comparison.run_within(Duration::from_millis(limit), samples).map_err(failed)?;
        self.report.borrow_mut().push(result);
        Ok(())
    }

    /// Keeps numbers that were counted once each.
    fn count(&self, case: Case, values: &[f64]) -> Result<(), Failure> {
        let mut counted = values.iter().copied();
        let next = Box::new(move || counted.next().ok_or_else(|| "there is no further number".into()));
        let result = Comparison::new(case, next).run(Plan::new(values.len()).warm_up(0)).map_err(failed)?;
        self.report.borrow_mut().push(result);
        Ok(())
    }
}

/// Returns the cases of what is measured at a size in bytes, by their names.
fn cases(unit: Unit, size: u64, of: impl Display) -> impl Fn(&str) -> Case {
    move |name| Case::new(name, unit).parameter("bytes", size).parameter("of", &of)
}

/// The largest size that is measured.
const LARGEST: u64 = 4 << 30;

/// Bytes of a buffer that fits into no cache of a GPU or a processor.
const ROTATED: u64 = 256 << 20;

/// Returns [`ROTATED`], or the largest power of two that fits, but at least `largest`, which is a power of two.
fn rotation(largest: u64, room: u64) -> u64 {
    let fits = room.checked_ilog2().map_or(0, |power| 1 << power);
    ROTATED.min(fits).max(largest)
}

fn new_report(gpu: Option<&Gpu>, quick: bool) -> Result<Report, Failure> {
    let name = gpu.map(|gpu| gpu.context().device().name().doing("asking for the GPU's name")).transpose()?;
    let driver = gpu.and_then(|_| fs::read_to_string("/sys/module/nvidia/version").ok());
    let machine = Machine::detect(name, driver.map(|version| version.trim().to_owned()));
    let title = format!("What sharing memory costs on this machine, with Partywall {}", env!("CARGO_PKG_VERSION"));
    let mut report = Report::new(title, machine);
    // The user's current folder may belong to another repository, whose commit would be misleading.
    report.commit = std::env::var("PARTYWALL_COMMIT").ok().filter(|commit| !commit.is_empty());
    match gpu {
        None => report.note("host memory: no GPU has a part in it"),
        Some(gpu) if gpu.context().driver().is_simulated() => {
            report.note("SIMULATED: the driver is a simulation; these are its numbers, and no GPU's");
        }
        Some(_) => {}
    }
    if quick {
        report.note("a quick run: small sizes and few samples");
    }
    Ok(report)
}

/// Returns the first memory that is too small, and how many times it would have to hold `size`. Each need is a
/// memory, a number of copies, and the free bytes.
fn lacking<'a>(size: u64, needs: &[(&'a str, u64, u64)]) -> Option<(&'a str, u64)> {
    let lacks = |(_, copies, room): &&(&str, u64, u64)| size.saturating_mul(*copies) > *room;
    needs.iter().find(lacks).map(|(whose, copies, _)| (*whose, *copies))
}

/// Returns the bytes that a process may have without moving others out of memory.
fn available_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

/// The failure of a comparison.
fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorKind::CheckFailed, error.to_string(), "start it again; `partywall doctor` says what is missing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_parts_have_room_and_take_the_largest() {
        assert_eq!(rotation(1 << 20, u64::MAX), ROTATED);
        assert_eq!(rotation(4 << 30, 5 << 30), 4 << 30, "a part is all of it");
        assert_eq!(rotation(1 << 20, 100 << 20), 64 << 20, "a power of two, within the room");
        assert_eq!(rotation(4096, 0), 4096);
    }

    #[test]
    fn size_has_to_fit_into_each_memory() {
        let needs = [("GPU's", 4, 400), ("host's", 5, 300)];
        assert_eq!(lacking(60, &needs), None, "exactly as much as there is");
        assert_eq!(lacking(61, &needs), Some(("host's", 5)));
        assert_eq!(lacking(101, &needs), Some(("GPU's", 4)));
        assert_eq!(lacking(u64::MAX, &[("GPU's", 1, u64::MAX), ("host's", 0, 0)]), None);
    }
}
