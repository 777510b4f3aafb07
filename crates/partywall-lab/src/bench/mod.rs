//! `partywall bench`: what sharing costs on this machine, and whether Partywall reaches its goals.
//!
//! | module | holds |
//! |---|---|
//! | [`subjects`] | what is measured, one module a subject, and the list of them |
//! | [`goals`] | the goals of all subjects |
//! | [`peer`] | the other processes of a benchmark, which follow orders |
//! | [`samplers`], [`turns`] | samplers and hand-offs in turn, which several subjects use |
//! | [`board`] | words that processes share without the library |
//! | [`posix`] | a futex mutex and POSIX semaphores |
//! | [`ping_pong`] | the raw round trip, the floor of every request to the broker |
//! | [`placement`] | on which processors the two sides of a round trip run |
//! | [`handout`] | file descriptors from the broker without the library |
//! | [`mps`] | an MPS server for one subject |
//! | [`model_file`] | a safetensors file in the page cache |
//! | [`program`] | programs of others, as processes that take samples |
//! | [`python`], [`iceoryx2`] | the programs in Python, and the one that uses iceoryx2 |
//!
//! Every subject has a broker and a domain of its own, so that no subject measures the leftovers of another. Cases are
//! measured in turns with their floors and rivals. The list of subjects has three parts: what sharing costs, which is
//! measured by default; Partywall beside the least that the machine could take (`floors`); and Partywall beside other
//! ways (`peers`).
//!
//! The programs of the other ways are in `peers`: Python files, which this program contains and starts, and a crate
//! outside the workspace, which cargo builds on demand.

mod board;
mod goals;
mod handout;
mod iceoryx2;
mod model_file;
mod mps;
mod peer;
mod ping_pong;
mod placement;
mod posix;
mod program;
mod python;
mod samplers;
mod subjects;
mod turns;

use std::{
    cell::{Cell, RefCell},
    fmt::Display,
    fs,
    time::{Duration, Instant},
};

pub(crate) use partywall::bytes as size;
use partywall::{DeviceChoice, DeviceUuid, ErrorKind, Gpu, Place, cuda::Driver, gpu};
use partywall_cli::device;
use partywall_measure::{Case, Comparison, Failure as Sampled, Machine, Plan, Report, Unit, timed};

use self::samplers::Timer;
pub(crate) use self::{
    peer::LAB as PEER,
    subjects::{Choice, SUBJECTS, Subject},
};
use crate::{Failure, broker::Broker, context::Context, failure::Doing, peer::Peer, reporter::Reporter};

/// What to measure, and how.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The subjects, in their order.
    pub(crate) subjects: Vec<&'static Subject>,
    /// True if each of them was named, so that none may be left out.
    pub(crate) named: bool,
    /// Where the memory is.
    pub(crate) device: DeviceChoice,
    /// Small sizes and few samples: shows that it works, and little more.
    pub(crate) quick: bool,
    /// True if subjects are also measured beside the rivals that are programs of their own.
    pub(crate) peers: bool,
}

/// Learns how far a run is.
pub(crate) struct Observer<'a> {
    /// Receives the name of the next measurement and the completed part of the run, from 0 to 1.
    pub(crate) progress: &'a dyn Fn(&str, f64),
    /// Receives the report after each subject.
    pub(crate) measured: &'a dyn Fn(&Report) -> Result<(), Failure>,
}

/// What came of a run.
pub(crate) struct Outcome {
    pub(crate) report: Report,
    /// The subjects that could not be measured, each with the reason.
    pub(crate) failed: Vec<(&'static str, Failure)>,
}

/// Measures.
///
/// # Errors
/// The device cannot be used, or a subject that was named needs another one; the observer fails.
pub(crate) fn run(context: &Context, options: &Options, observer: &Observer<'_>) -> Result<Outcome, Failure> {
    device::require_unpinned(options.device)?;
    // A thousand members need three thousand sockets, and ten thousand names and 20,000 mappings may need a file each.
    partywall_os::process::raise_fd_limit();
    let place = device::place(context.console, options.device)?;
    let bench = Bench::new(context, place, options, observer)?;
    of_the_harness(&bench)?;
    let mut failed = Vec::new();
    for (done, subject) in options.subjects.iter().enumerate() {
        bench.done.set(done as f64 / options.subjects.len() as f64);
        bench.subject.set(subject.name);
        if let Some(why) = subject.lacks(place)? {
            if options.named {
                let advice = "choose a device with --device, or GPUs that are simulated in software with --simulated";
                return Err(Failure::new(ErrorKind::Device, format!("{} {why}", subject.name), advice));
            }
            bench.note(format!("{}: skipped: it {why}", subject.name));
            continue;
        }
        match subject.measure(&bench) {
            Ok(()) => bench.note_unjudged(),
            Err(failure) => {
                bench.note(format!("{}: failed: {failure}", subject.name));
                failed.push((subject.name, failure));
            }
        }
        (observer.measured)(&bench.report.borrow())?;
    }
    (observer.progress)("done", 1.0);
    Ok(Outcome { report: bench.report.into_inner(), failed })
}

/// The time of the harness itself, which is a part of each sample.
fn of_the_harness(bench: &Bench<'_>) -> Result<(), Failure> {
    let case = |name: &str, unit| Case::new(name, unit).parameter("of", "the harness itself");
    let nothing = timed(Unit::Nanoseconds, || Ok(()));
    bench.run_within(Comparison::new(case("two reads of the clock", Unit::Nanoseconds), nothing)).map_err(failed)?;
    if let Place::Gpu(uuid) = bench.place {
        let gpu = Gpu::open(uuid)?;
        let timer = Timer::new(&gpu).doing("making events")?;
        let nothing = Box::new(|| Ok(microseconds(timer.time(|| Ok(()))?)));
        let case = case("two events of a stream, with nothing between", Unit::Microseconds);
        bench.run_within(Comparison::new(case, nothing)).map_err(failed)?;
    }
    Ok(())
}

/// A run: what every subject needs.
pub(crate) struct Bench<'a> {
    context: &'a Context,
    place: Place,
    quick: bool,
    peers: bool,
    report: RefCell<Report>,
    observer: &'a Observer<'a>,
    /// How much of the run is done, and the subject that is measured.
    done: Cell<f64>,
    subject: Cell<&'static str>,
    /// True once the memory that sharing takes was measured.
    overhead: Cell<bool>,
    /// The goals of the subject that were judged.
    judged: RefCell<Vec<&'static goals::Goal>>,
    reporter: Reporter,
}

impl<'a> Bench<'a> {
    fn new(context: &'a Context, place: Place, options: &Options, observer: &'a Observer<'a>) -> Result<Self, Failure> {
        Ok(Self {
            context,
            place,
            quick: options.quick,
            peers: options.peers,
            report: RefCell::new(new_report(place, options.quick)?),
            observer,
            done: Cell::new(0.0),
            subject: Cell::new(""),
            overhead: Cell::new(false),
            judged: RefCell::default(),
            reporter: Reporter::new(context, &PEER, "bench", false),
        })
    }

    /// Starts a broker of the subject. `name` differs from that of its other brokers.
    fn broker(&self, name: &str) -> Result<Broker, Failure> {
        Broker::start(self.context, name)
    }

    /// Starts another process that plays a role, and uses the broker.
    fn start(&self, broker: &Broker, role: &'static str) -> Result<Peer, Failure> {
        self.start_on(broker, role, Place::Host, &[])
    }

    /// Starts another process with memory at a place, and with environment variables.
    fn start_on(
        &self,
        broker: &Broker,
        role: &'static str,
        place: Place,
        environment: &[(&str, &str)],
    ) -> Result<Peer, Failure> {
        let peer = Peer::spawn(PEER.name, role, place, environment, &self.reporter)?;
        peer.say(broker.socket())?;
        Ok(peer)
    }

    /// Returns the chosen GPU.
    fn gpu(&self) -> Result<DeviceUuid, Sampled> {
        self.place.gpu().ok_or_else(|| "no GPU was chosen".into())
    }

    /// Returns a plan of `samples` samples, or a tenth of them.
    fn plan(&self, samples: usize) -> Plan {
        Plan::new(self.fewer(samples))
    }

    /// Returns `number`, or a tenth of it for a quick run.
    fn fewer(&self, number: usize) -> usize {
        if self.quick { number.div_ceil(10) } else { number }
    }

    fn note(&self, text: impl Into<String>) {
        self.report.borrow_mut().note(text);
    }

    /// Notes a failure in the report; the run continues without the failed part.
    fn leave_out(&self, failure: &Sampled) {
        self.note(format!("left out: {failure}"));
    }

    /// Takes the samples of a comparison, judges its goal, and keeps the result.
    fn run(&self, comparison: Comparison<'_>, plan: Plan) -> Result<(), Sampled> {
        let comparison = self.prepared(comparison)?;
        self.report.borrow_mut().push(comparison.run(plan)?);
        Ok(())
    }

    /// Takes samples for about a second.
    fn run_within(&self, comparison: Comparison<'_>) -> Result<(), Sampled> {
        let (limit, samples) = if self.quick { (50, 20) } else { (1_000, 1_000) };
        let comparison = self.prepared(comparison)?;
        self.report.borrow_mut().push(comparison.run_within(Duration::from_millis(limit), samples)?);
        Ok(())
    }

    /// Keeps numbers that were counted once each.
    fn count(&self, case: Case, values: &[f64]) -> Result<(), Sampled> {
        let mut counted = values.iter().copied();
        let next = Box::new(move || counted.next().ok_or_else(|| "there is no further number".into()));
        self.run(Comparison::new(case, next), Plan::new(values.len()).warm_up(0))
    }

    /// Shows what is measured next, and sets its goal.
    fn prepared<'c>(&self, comparison: Comparison<'c>) -> Result<Comparison<'c>, Sampled> {
        let subject = self.subject.get();
        (self.observer.progress)(&format!("{subject}: {}", comparison.case().name), self.done.get());
        let Some(goal) = goals::of(subject, &comparison)? else { return Ok(comparison) };
        self.judged.borrow_mut().push(goal);
        Ok(comparison.goal(goal.text.parse()?))
    }

    /// Notes the goals of a subject that were not judged, because a rival or a size was left out.
    fn note_unjudged(&self) {
        let judged = self.judged.take();
        let is_open = |goal: &&goals::Goal| !judged.iter().any(|other| std::ptr::eq(*other, *goal));
        for goal in goals::all(self.subject.get()).filter(|goal| goal.is_of_every_run()).filter(is_open) {
            self.note(format!("{}: not judged: {goal}", self.subject.get()));
        }
    }
}

fn new_report(place: Place, quick: bool) -> Result<Report, Failure> {
    let devices = if place.gpu().is_some() { gpu::devices()? } else { Vec::new() };
    let mut name = None;
    for device in &devices {
        if Some(device.uuid().doing("asking for a UUID")?) == place.gpu() {
            name = Some(device.name().doing("asking for the GPU's name")?);
        }
    }
    let driver = place.gpu().and_then(|_| fs::read_to_string("/sys/module/nvidia/version").ok());
    let machine = Machine::detect(name, driver.map(|version| version.trim().to_owned()));
    let title = format!("What sharing memory costs on this machine, with Partywall {}", env!("CARGO_PKG_VERSION"));
    let mut report = Report::new(title, machine);
    // The user's current folder may belong to another repository, whose commit would be misleading.
    report.commit = std::env::var("PARTYWALL_COMMIT").ok().filter(|commit| !commit.is_empty());
    match place.gpu() {
        None => report.note("host memory: no GPU has a part in it"),
        Some(_) if Driver::load().is_ok_and(Driver::is_simulated) => {
            report.note("SIMULATED: the driver is a simulation; these are its numbers, and no GPU's");
        }
        Some(_) => {}
    }
    if quick {
        report.note("a quick run: small sizes and few samples");
    }
    Ok(report)
}

/// The failure of a subject.
fn failed(error: impl Display) -> Failure {
    Failure::new(ErrorKind::CheckFailed, error.to_string(), "start it again; `partywall doctor` says what is missing")
}

/// Returns how long `work` took, and its result. Dropping the result later is not counted.
fn clocked<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(Duration, T), Sampled>
where
    Sampled: From<E>,
{
    let start = Instant::now();
    let result = work();
    let elapsed = start.elapsed();
    Ok((elapsed, result?))
}

/// Returns a duration in microseconds.
fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Returns a duration in milliseconds.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the bytes that a process may have without moving others out of memory.
fn available_memory() -> u64 {
    model_file::meminfo(model_file::AVAILABLE).unwrap_or(0)
}
