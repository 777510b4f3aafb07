//! Benchmarks: the time that Partywall takes, beside the least that the machine could take, in the same run.
//!
//! The broker is the real binary in a process of its own, in a private directory. Other members and the peer of a
//! floor are processes of their own, too. Every subject gets a fresh broker, so that no subject measures the leftovers
//! of another.
//!
//! | module | holds |
//! |---|---|
//! | [`subjects`] | what is measured, one module a subject, and the list of them |
//! | [`mod@bench`] | tools for each subject: plans, the report, a stopwatch |
//! | [`broker`] | a broker that runs as long as its subject |
//! | [`role`] | the roles that this program plays when it has started itself as another process |
//! | [`board`] | words that processes share without the library, for the floors of ordering |
//! | [`posix`] | a futex mutex and POSIX semaphores |
//! | [`mps`] | an MPS server for one subject |
//! | [`process`] | other processes that follow commands, and neither outlive nor block the benchmark |
//! | [`ping_pong`] | the raw round trip, the floor of every request to the broker |
//! | [`placement`] | on which processors the two sides of a round trip run |
//! | [`handout`] | file descriptors from the broker without the library, for the floor on a GPU |
//! | [`model_file`] | a safetensors file in the page cache |
//! | [`program`] | programs of `benches/peers`, as processes that take samples |
//! | [`python`] | the programs in Python |
//! | [`iceoryx2`] | the program that uses iceoryx2 |
//! | [`markdown`] | the report as a page for `docs/measurements/` |

mod bench;
mod board;
mod broker;
mod handout;
mod iceoryx2;
mod markdown;
mod model_file;
mod mps;
mod ping_pong;
mod placement;
mod posix;
mod process;
mod program;
mod python;
mod role;
mod subjects;

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use partywall::cuda::Driver;
use partywall_measure::{Failure, Machine, Report};

use crate::{
    bench::{Bench, load_average},
    broker::Broker,
    subjects::{SUBJECTS, Subject},
};

/// Measures Partywall against the floor of this machine. The broker is the program that PARTYWALL_BIN names, else
/// `partywall` beside this program.
#[derive(Debug, Parser)]
#[command(name = "partywall-bench", version, after_help = EXIT_CODES)]
struct Arguments {
    /// Also measure the subjects that need a GPU; without a GPU they are skipped
    #[arg(long)]
    gpu: bool,
    /// Also measure rivals: subjects that need Python with the `partywall` package, torch and safetensors (`python3`,
    /// or the one that PARTYWALL_PYTHON names), and iceoryx2 (built by cargo, or the program that PARTYWALL_ICEORYX2
    /// names)
    #[arg(long)]
    peers: bool,
    /// Take a tenth of the samples, and use smaller files
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the report as a page of markdown
    #[arg(long, value_name = "FILE")]
    md: Option<PathBuf>,
    /// Write the report as an HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    strict: bool,
    /// List the subjects without measuring them
    #[arg(long)]
    list: bool,
    /// Measure only subjects whose names contain this text
    #[arg(default_value = "")]
    filter: String,
}

const EXIT_CODES: &str = "Exit codes: 0 measured, even if a goal was missed; 1 with --strict if a goal was missed; 2 usage; \
    3 a subject could not be measured.";

fn main() -> ExitCode {
    if let Some(outcome) = role::play() {
        return match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                eprintln!("partywall-bench, as another process: {failure}");
                ExitCode::FAILURE
            }
        };
    }
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(3)
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut out = io::stdout();
    let chosen: Vec<_> = SUBJECTS.iter().filter(|subject| subject.name.contains(&arguments.filter)).collect();
    if arguments.list {
        for subject in &chosen {
            let needs = if subject.needs_gpu { " (--gpu)" } else { "" };
            let peers = if subject.needs_peers { " (--peers)" } else { "" };
            writeln!(out, "{:<19} {}{needs}{peers}", subject.name, subject.about)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if chosen.is_empty() {
        return Err(format!("no subject contains {:?}; --list names them", arguments.filter).into());
    }
    // A thousand members need three thousand sockets, and ten thousand names may need a file each.
    partywall_os::process::raise_fd_limit();
    let no_gpu = if arguments.gpu { why_no_gpu() } else { Some("--gpu was not given".to_owned()) };
    let mut bench = Bench { quick: arguments.quick, peers: arguments.peers, report: new_report(no_gpu.is_none()) };
    let load = load_average();
    let mut failed = Vec::new();
    for subject in chosen {
        match &no_gpu {
            _ if subject.needs_peers && !arguments.peers => {}
            Some(why) if subject.needs_gpu => {
                if arguments.gpu {
                    eprintln!("{}: skipped: {why}", subject.name);
                    bench.report.note(format!("{}: skipped: {why}", subject.name));
                }
            }
            _ => {
                eprintln!("{}: {}", subject.name, subject.about);
                if let Err(failure) = measure(subject, &mut bench) {
                    eprintln!("{}: failed: {failure}", subject.name);
                    let failure = failure.to_string();
                    bench.report.note(format!(
                        "{}: failed: {}",
                        subject.name,
                        failure.lines().next().unwrap_or_default()
                    ));
                    failed.push(subject.name);
                }
                // After each subject, because a later one may crash this process or exceed its time.
                save(&bench.report, arguments)?;
            }
        }
    }
    let report = &mut bench.report;
    report.note(format!("load average of the last minute: {load} before, {} after", load_average()));
    if arguments.quick {
        report.note("a quick run: a tenth of the samples, and smaller files");
    }
    writeln!(out, "\n{report}")?;
    let missed: Vec<_> = report.comparisons.iter().filter(|c| !c.met()).map(|c| c.measured.case.to_string()).collect();
    let goals = report.comparisons.iter().filter(|result| result.verdict.is_some()).count();
    writeln!(out, "{} of {goals} goals met", goals - missed.len())?;
    for case in &missed {
        writeln!(out, "missed: {case}")?;
    }
    save(report, arguments)?;
    if !failed.is_empty() {
        return Err(format!("could not be measured: {}", failed.join(", ")).into());
    }
    Ok(if arguments.strict && !missed.is_empty() { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn measure(subject: &Subject, bench: &mut Bench) -> Result<(), Failure> {
    let broker = Broker::start()?;
    (subject.run)(bench, &broker)?;
    broker.stop()
}

/// Returns the GPUs. A GPU that cannot be used differs from none: its subjects fail with the reason.
fn why_no_gpu() -> Option<String> {
    match partywall::gpu::devices() {
        Ok(devices) if devices.is_empty() => Some("this process sees no GPU".to_owned()),
        Err(error @ partywall::Error::DeviceFault(partywall::error::DeviceFault::NoDevice { .. })) => {
            Some(error.to_string())
        }
        _ => None,
    }
}

fn new_report(gpu: bool) -> Report {
    let devices = if gpu { partywall::gpu::devices().unwrap_or_default() } else { Vec::new() };
    let name = devices.first().map(|device| {
        let name = device.name().unwrap_or_else(|_| "unknown".to_owned());
        if devices.len() > 1 { format!("{} x {name}", devices.len()) } else { name }
    });
    let driver = name.as_ref().and_then(|_| fs::read_to_string("/sys/module/nvidia/version").ok());
    let machine = Machine::detect(name, driver.map(|version| version.trim().to_owned()));
    let mut report = Report::new("Partywall benchmarks", machine);
    if gpu && Driver::load().is_ok_and(Driver::is_simulated) {
        report.note("SIMULATED: the driver is a simulation; these are its numbers, and no GPU's");
    }
    report
}

/// Writes the report to the files that were asked for.
fn save(report: &Report, arguments: &Arguments) -> Result<(), Failure> {
    if let Some(path) = &arguments.report {
        report.write_json(path)?;
    }
    if let Some(path) = &arguments.md {
        write(path, &markdown::page(report))?;
    }
    if let Some(path) = &arguments.html {
        write(path, &report.page()?)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |source: io::Error| format!("cannot write {}: {source}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    Ok(fs::write(path, text).map_err(failed)?)
}
