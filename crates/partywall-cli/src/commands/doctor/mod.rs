//! `partywall doctor`: tests what works on this machine.
//!
//! The probes are the library's ([`partywall::doctor`]); each runs in a child, `partywall doctor --probe TITLE`. The
//! *main job* is `partywall demo` itself, through a broker in a temporary directory; whether the command succeeds
//! depends on that alone.
//!
//! Hidden flags: `--probe TITLE` is a probe in its child, `--limit SECONDS` is the time limit of each.

mod main_job;

use std::{ffi::OsString, time::Duration};

use clap::Args;
use partywall::{
    ErrorKind, VERSION,
    doctor::{Doctor, GpuState, Outcome, Probe, Report, Scope},
};
use serde_json::{Value, json};

use crate::{Context, failure::Failure, fetch, lab, output::Output, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The GPU to try: auto (the first), all, cuda:N or a GPU's UUID
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Scope,
    #[arg(long, hide = true, value_name = "TITLE")]
    probe: Option<Probe>,
    #[arg(long, hide = true, value_name = "SECONDS", default_value = "20", value_parser = text::parse_seconds)]
    limit: Duration,
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let program = std::env::current_exe().map_err(|error| {
        let advice = "mount /proc: the doctor needs it to start and watch processes";
        Failure::new(ErrorKind::Refused, format!("finding this program: {error}"), advice)
    })?;
    let mut child = vec![program.into_os_string()];
    child.extend(context.arguments());
    child.extend(["doctor", "--device", &arguments.device.to_string(), "--probe"].map(OsString::from));
    let doctor = Doctor::new(child, context.options()).scope(arguments.device).limit(arguments.limit);
    match arguments.probe {
        Some(probe) => {
            if probe == Probe::Vulkan {
                lab::take_over();
            }
            lab::contained().map_or(doctor.clone(), |lab| doctor.vulkan(lab.vulkan)).answer(probe);
            Ok(())
        }
        None => examine(context.output(), &doctor, arguments),
    }
}

fn examine(output: Output, doctor: &Doctor, arguments: &Arguments) -> Result<(), Failure> {
    output.line(format!("partywall {VERSION}: testing what works on this machine\n"));
    let mut probes = Vec::new();
    let mut simulated = false;
    let mut add = |report: &Report| {
        show(output, report);
        simulated |= report.finding.simulated;
        probes.push(to_json(report));
        report.finding.outcome == Outcome::Ok
    };
    let state = doctor.examine(|report| {
        add(report);
    });
    add(&Report::new("put URL", fetch::examine));
    let mut main_job = |title, device: &str| add(&Report::new(title, || main_job::run(arguments.limit, device)));
    let host = main_job("main job, host", "host");
    let device = match arguments.device {
        Scope::One(choice) => choice.to_string(),
        Scope::First | Scope::All => "cuda".to_owned(),
    };
    let gpu = match state {
        GpuState::Absent => None,
        GpuState::Broken => Some(false),
        GpuState::Present => Some(main_job("main job, GPU", &device)),
    };

    output.line("");
    let answer = |works| if works { "works" } else { "does NOT work" };
    output.line(format!("The main job in host memory {}.", answer(host)));
    output.line(match gpu {
        Some(works) => format!("The main job on a GPU {}.", answer(works)),
        None => "No GPU was tested.".to_owned(),
    });
    if simulated {
        output.line("The CUDA driver is SIMULATED: nothing here says anything about a GPU.");
    }
    output.value(&json!({ "simulated": simulated, "probes": probes, "main_job": { "host": host, "gpu": gpu } }));
    if host && gpu != Some(false) { Ok(()) } else { Err(Failure::silent(ErrorKind::CheckFailed)) }
}

/// Prints a report as lines of text.
fn show(output: Output, report: &Report) {
    let finding = &report.finding;
    let colour = match finding.outcome {
        Outcome::Ok => "\x1b[32m",
        Outcome::Warning => "\x1b[33m",
        Outcome::Failed => "\x1b[31m",
        Outcome::Skipped => "\x1b[2m",
    };
    let (on, off) = if output.has_colours() { (colour, "\x1b[0m") } else { ("", "") };
    let mut head = format!("{on}{:<9}{off}{:<20}", finding.outcome, report.title);
    let mut lines: Vec<String> = finding.detail.lines().map(str::to_owned).collect();
    let note = if finding.outcome == Outcome::Ok { "note" } else { "this means" };
    lines.extend(finding.meaning.lines().map(|line| format!("{note}: {line}")));
    lines.extend(finding.fix.lines().map(|line| format!("do this: {line}")));
    for line in lines {
        output.line(format!("{head}{line}"));
        head = " ".repeat(29);
    }
}

/// Returns a report as JSON.
fn to_json(report: &Report) -> Value {
    let finding = &report.finding;
    json!({
        "name": report.title, "outcome": finding.outcome.to_string(), "detail": finding.detail,
        "meaning": finding.meaning, "fix": finding.fix, "micros": report.took.as_nanos() as f64 / 1000.0,
    })
}
