//! What crossing from host to host costs, beside raw TCP, raw zenoh and rsync: `cargo bench -p partywall-bridge -- --out
//! FILE`, as root. The hosts are network namespaces with a cable between them that has no limit.
//!
//! | module | holds |
//! |---|---|
//! | [`subjects`] | what is measured |
//! | [`goals`] | the goals of all subjects |
//! | [`pair`] | two hosts with bridges |
//! | [`raw_zenoh`], [`raw_tcp`] | what the same bytes take without Partywall |
#![allow(clippy::unwrap_used, reason = "a benchmark without its processes fails by panicking")]
#![allow(clippy::print_stdout, reason = "a program that people run and read")]

mod goals;
mod pair;
mod raw_tcp;
mod raw_zenoh;
mod subjects;

use std::{env, path::Path, process::Command};

use partywall_measure::{Case, Comparison, Failure, Machine, Plan, Report, Sampler, Unit, figure};

use self::subjects::SUBJECTS;

/// A run: how much of everything is measured, and what came of it.
struct Bench {
    quick: bool,
    report: Report,
}

impl Bench {
    /// Takes the samples of a comparison, judges its goal, keeps the result and prints it.
    fn run(&mut self, subject: &str, comparison: Comparison<'_>, samples: usize) -> Result<(), Failure> {
        let comparison = match goals::of(subject, comparison.case()) {
            Some(goal) => comparison.goal(goal.parse()?),
            None => comparison,
        };
        let samples = if self.quick { samples.div_ceil(10) } else { samples };
        let result = comparison.run(Plan::new(samples))?;
        let medians = result.floor.iter().chain(&result.rivals);
        let medians = medians.map(|other| format!("{} {}", other.case.name, figure(other.percentiles.p50)));
        println!(
            "{}: {} {}; {}; {}",
            result.measured.case,
            figure(result.measured.percentiles.p50),
            result.measured.case.unit,
            medians.collect::<Vec<_>>().join(", "),
            result.judgement().unwrap_or_default()
        );
        self.report.push(result);
        Ok(())
    }
}

fn main() -> Result<(), Failure> {
    if let Ok(role) = env::var(raw_zenoh::ROLE) {
        return raw_zenoh::play(&role);
    }
    let program = env!("CARGO_BIN_EXE_partywall-bridge");
    let arguments: Vec<_> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if env::var_os(PROGRAM).is_none() {
        // It has all commands of `partywall`, and is what sandboxes start.
        let status = Command::new(env::current_exe()?).args(arguments).env(PROGRAM, program).status()?;
        std::process::exit(status.code().unwrap_or(1));
    }
    let (mut out, mut chosen, mut quick) = (None, Vec::new(), false);
    let mut words = arguments.into_iter();
    while let Some(word) = words.next() {
        match &*word {
            "--quick" => quick = true,
            "--out" => out = words.next(),
            _ => chosen.push(word),
        }
    }
    if let Some(unknown) = chosen.iter().find(|name| SUBJECTS.iter().all(|(known, _)| known != name)) {
        let known: Vec<_> = SUBJECTS.iter().map(|(name, _)| *name).collect();
        return Err(format!("{unknown:?} is no subject: choose from {}", known.join(", ")).into());
    }
    let title = format!("What crossing from host to host costs, with Partywall {}", partywall::VERSION);
    let mut bench = Bench { quick, report: Report::new(title, Machine::detect(None, None)) };
    bench.report.note("two network namespaces of one machine, with a veth cable of MTU 1500 between them");
    if quick {
        bench.report.note("a quick run: few samples");
    }
    for (name, measure) in SUBJECTS {
        if chosen.is_empty() || chosen.iter().any(|chosen| chosen == name) {
            measure(&mut bench).map_err(|failure| format!("{name}: {failure}"))?;
        }
    }
    bench.report.notes.iter().for_each(|note| println!("{note}"));
    if let Some(out) = out {
        bench.report.write_json(Path::new(&out))?;
    }
    Ok(())
}

/// Returns the unit and a function from the time of `count` samples of a size to a rate: of small ones the samples, of
/// others the bytes in a second.
fn rate(bytes: usize, count: usize) -> (Unit, impl Fn(u64) -> f64 + Copy) {
    let is_small = bytes < SMALL;
    let unit = if is_small { Unit::PerSecond } else { Unit::GigabytesPerSecond };
    let of = if is_small { count as f64 * 1e9 } else { (count * bytes) as f64 };
    (unit, move |nanoseconds| of / nanoseconds as f64)
}

/// Returns a sampler of something that may fail.
fn sampler<'a>(sample: impl FnMut() -> Result<f64, Failure> + 'a) -> Sampler<'a> {
    Box::new(sample)
}

fn case(name: &str, unit: Unit, bytes: usize) -> Case {
    Case::new(name, unit).parameter("bytes", bytes)
}

/// Below this size samples are counted, not their bytes.
const SMALL: usize = 64 << 10;

/// The environment variable that names the program for sandboxes.
const PROGRAM: &str = "PARTYWALL_BIN";
