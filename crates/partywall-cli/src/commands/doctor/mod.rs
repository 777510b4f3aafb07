//! `partywall doctor`: finds out by doing what works on this machine.
//!
//! Each probe runs in a child process with a time limit, because a driver that hangs or crashes is one of the things
//! to be found out. The child prints a [`Finding`] as one line of JSON. The *main job* is `partywall demo` itself,
//! through a broker in a temporary directory; whether the command succeeds depends on that alone.
//!
//! Hidden flags: `--probe NAME` is a probe in its child, `--limit SECONDS` is the time limit of each.

mod exchange;
mod finding;
mod gpu;
mod host;
mod main_job;
mod runner;

use std::time::Duration;

use clap::{Args, ValueEnum};
use partywall::{ErrorKind, VERSION};
use rustix::process::Signal;
use serde_json::{Value, json};

use self::{
    finding::{Finding, Outcome, Report},
    runner::Runner,
};
use crate::{Context, failure::Failure};

/// Its arguments.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[arg(long, hide = true, value_name = "NAME")]
    probe: Option<Probe>,
    #[arg(long, hide = true, value_name = "SECONDS", default_value_t = 20.0)]
    limit: f64,
}

/// What is run in a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Probe {
    Kernel,
    Processes,
    Limits,
    HostMemory,
    SocketDirectory,
    Broker,
    Environment,
    Driver,
    Devices,
    Kernels,
    Vmm,
    /// The other side of [`Probe::HostMemory`].
    TakeHostMemory,
    /// The other side of [`Probe::Vmm`].
    TakeGpuMemory,
}

/// Runs it.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    if let Some(probe) = arguments.probe {
        // Whoever waits for the answer may be killed; without this call the time limit ends us.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        return in_child(context, probe);
    }
    let limit = Duration::try_from_secs_f64(arguments.limit);
    let limit = limit.map_err(|error| Failure::new(ErrorKind::Usage, format!("--limit: {error}"), "use seconds"))?;
    Examination { context, runner: Runner::new(context, limit), reports: Vec::new() }.run()
}

/// One probe, in its process.
fn in_child(context: &Context, probe: Probe) -> Result<(), Failure> {
    let finding = match probe {
        Probe::Kernel => host::kernel(),
        Probe::Processes => host::processes(),
        Probe::Limits => host::limits(),
        Probe::HostMemory => host::memory(),
        Probe::SocketDirectory => host::socket_directory(context),
        Probe::Broker => host::broker(context),
        Probe::Environment => host::environment(),
        Probe::Driver => gpu::driver(),
        Probe::Devices => gpu::devices(),
        Probe::Kernels => gpu::kernels(),
        Probe::Vmm => gpu::vmm(),
        Probe::TakeHostMemory => return exchange::answer(host::take),
        Probe::TakeGpuMemory => return exchange::answer(gpu::take),
    };
    finding.send();
    Ok(())
}

/// All probes, one after the other.
struct Examination<'a> {
    context: &'a Context,
    runner: Runner<'a>,
    reports: Vec<Report>,
}

impl Examination<'_> {
    fn run(mut self) -> Result<(), Failure> {
        let output = self.context.output();
        output.line(format!("partywall {VERSION}: trying what works on this machine\n"));

        self.probe("kernel", Probe::Kernel);
        self.probe("processes", Probe::Processes);
        self.probe("limits", Probe::Limits);
        self.probe("host memory", Probe::HostMemory);
        self.probe("socket directory", Probe::SocketDirectory);
        self.probe("broker", Probe::Broker);
        self.probe("environment", Probe::Environment);
        let host = self.add("main job, host", |runner| main_job::run(runner, "host")) == Outcome::Ok;
        let gpu = self.gpu();

        output.line("");
        let answer = |works| if works { "works" } else { "does NOT work" };
        output.line(format!("The main job in host memory {}.", answer(host)));
        output.line(match gpu {
            Some(works) => format!("The main job on a GPU {}.", answer(works)),
            None => "There is no GPU to try it on.".to_owned(),
        });
        let probes: Vec<Value> = self.reports.iter().map(Report::json).collect();
        output.value(&json!({ "probes": probes, "main_job": { "host": host, "gpu": gpu } }));
        if host && gpu != Some(false) { Ok(()) } else { Err(Failure::silent(ErrorKind::CheckFailed)) }
    }

    /// The probes of GPUs: whether the main job works on one, or nothing if there is none.
    fn gpu(&mut self) -> Option<bool> {
        let driver = self.probe("GPU driver", Probe::Driver);
        let devices = match driver {
            Outcome::Ok => self.probe("GPUs", Probe::Devices),
            Outcome::Warning | Outcome::Skipped | Outcome::Failed => {
                self.skip("GPUs", "without a driver no GPU can be asked");
                Outcome::Skipped
            }
        };
        if devices == Outcome::Skipped {
            for title in ["GPU kernels", "GPU memory", "main job, GPU"] {
                self.skip(title, "there is no GPU to try it on");
            }
            // A driver that is there but does not work is a GPU that does not work.
            return (driver == Outcome::Failed).then_some(false);
        }
        self.probe("GPU kernels", Probe::Kernels);
        self.probe("GPU memory", Probe::Vmm);
        Some(self.add("main job, GPU", |runner| main_job::run(runner, "cuda")) == Outcome::Ok)
    }

    fn probe(&mut self, title: &'static str, probe: Probe) -> Outcome {
        self.add(title, |runner| runner.probe(probe))
    }

    fn skip(&mut self, title: &'static str, why: &str) {
        self.add(title, |_| Finding::skipped(why));
    }

    fn add(&mut self, title: &'static str, find: impl FnOnce(&Runner<'_>) -> Finding) -> Outcome {
        let report = Report::new(title, || find(&self.runner));
        report.show(self.context.output());
        let outcome = report.outcome();
        self.reports.push(report);
        outcome
    }
}
