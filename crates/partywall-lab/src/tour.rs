//! `partywall lab tour`: all labs, one after the other, and one table of their beliefs.
//!
//! Each lab is a process of its own, so that one that fails, or breaks CUDA, leaves the others as they are.
//!
//! With `--json` the first line describes the machine (`lab`, `device`, `simulated`). One follows for each lab (`lab`,
//! `steps`, `different`, `not_tried`, `seconds`, and `error` if it did not run to its end). The last one has `labs`,
//! `failed` (the names of labs that did not run to their end), `steps`, `different`, `not_tried`, and `beliefs`, each
//! with its `lab`. The exit code is 1 if a lab failed or a step is different.

use std::{
    process::{Command as Process, Stdio},
    time::Instant,
};

use clap::{ArgMatches, Args, Command};
use partywall::{ErrorKind, Gpu, Place};
use partywall_cli::{
    device::{place, require_unpinned},
    simulation,
};
use serde_json::{Value, json};

use crate::{
    Context,
    device::under_mps,
    failure::{Doing, Failure},
    lab::{IN_TOUR, Lab, Places, read},
    labs,
    reporter::{SIMULATED, StepCounts, beliefs_heading, summary},
};

/// Its subcommand.
pub(super) const NAME: &str = "tour";

/// Returns the subcommand.
pub(super) fn command() -> Command {
    Places::augment_args(Command::new(NAME))
        .about("All labs, one after the other, with one table of the beliefs that they refute")
}

/// Runs the labs that run in the chosen place.
pub(super) fn run(context: &Context, arguments: &ArgMatches) -> Result<(), Failure> {
    let choice = read::<Places>(arguments)?.device;
    require_unpinned(choice)?;
    let place = place(context.console, choice)?;
    let kills = match place.gpu() {
        // The death of a client with work on the GPU may end the MPS server, and with it the other clients.
        Some(uuid) => !under_mps(&Gpu::open(uuid)?)?,
        None => true,
    };
    let mut tour = Tour { context, place, kills, described: false, reports: Vec::new() };
    if place == Place::Host {
        tour.described = true;
        tour.describe(&json!({ "device": "host" }));
    }
    for lab in labs() {
        tour.visit(lab)?;
    }
    tour.conclude()
}

struct Tour<'a> {
    context: &'a Context,
    place: Place,
    /// True if labs kill processes that work on the GPU.
    kills: bool,
    /// True if the machine was described.
    described: bool,
    reports: Vec<LabReport>,
}

/// What a lab said to programs.
struct LabReport {
    lab: &'static str,
    steps: Vec<Value>,
    /// Its last line. `None` if it did not run to its end.
    last: Option<Value>,
    simulated: bool,
}

impl LabReport {
    fn counts(&self) -> StepCounts {
        let with = |verdict| self.steps.iter().filter(|step| step["verdict"] == verdict).count();
        StepCounts { steps: self.steps.len(), different: with("different"), not_tried: with("not-tried") }
    }
}

impl Tour<'_> {
    /// Runs one lab, and reports how it ended.
    fn visit(&mut self, lab: &'static Lab) -> Result<(), Failure> {
        let console = self.context.console;
        if self.place == Place::Host && !lab.on_host {
            console.line(format!("{:<12} needs a GPU", lab.name));
            return Ok(());
        }
        if let Some(program) = lab.elsewhere.filter(|program| !program.is_installed()) {
            console.line(format!("{:<12} needs the program {}: {}", lab.name, program.name, program.install));
            return Ok(());
        }
        let began = Instant::now();
        let starting = format!("starting the lab {}", lab.name);
        let mut command = Process::new(std::env::current_exe().doing(&starting)?);
        command.args(["lab", lab.name, "--json", IN_TOUR, "--device", &self.place.to_string()]);
        if self.kills {
            command.args(lab.kills_by);
        }
        if let Some(domain) = &self.context.domain {
            command.args(["--domain", domain]);
        }
        if let Some(socket) = &self.context.socket {
            command.arg("--socket").arg(socket);
        }
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().doing(&starting)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let error = lines.last().map(|last| last["error"].clone()).filter(|error| !error.is_null());
        // A lab with a step that is not as expected has run to its end, too.
        let last = lines.pop_if(|last| last["beliefs"].is_array());
        let header = lines.first().filter(|line| line["lab"] == lab.name).cloned();
        let steps = lines.into_iter().filter(|line| !line["step"].is_null()).collect();
        let simulated = header.as_ref().is_some_and(|header| header["simulated"] == true);
        if let Some(header) = header.filter(|_| !self.described) {
            self.described = true;
            self.describe(&header);
        }
        let report = LabReport { lab: lab.name, steps, last, simulated };

        let seconds = began.elapsed().as_secs_f64();
        let counts = report.counts();
        let ending = match &report.last {
            Some(_) => counts.to_string(),
            None => format!("did not run to its end ({})", output.status),
        };
        console.line(format!("{:<12} {ending}, {seconds:.1} s", lab.name));
        let mut value = json!({
            "lab": lab.name, "steps": counts.steps, "different": counts.different, "not_tried": counts.not_tried,
            "seconds": seconds,
        });
        if report.last.is_none() {
            value["error"] = error.unwrap_or_else(|| output.status.to_string().into());
        }
        console.value(&value);
        self.reports.push(report);
        Ok(())
    }

    fn describe(&self, header: &Value) {
        let text = |field: &str| header[field].as_str().unwrap_or_default().to_owned();
        let simulated = header["simulated"] == true;
        let console = self.context.console;
        console.line("A tour of the labs: which beliefs are refuted on this machine");
        match text("device").as_str() {
            "host" => console.line("Host memory: the labs that need a GPU are left out."),
            device => console.line(format!("{device}, {}, CUDA {}", text("uuid"), text("cuda"))),
        }
        if simulated {
            console.line(SIMULATED);
        }
        console.line("");
        console.value(&json!({ "lab": NAME, "device": header["device"], "simulated": simulated }));
    }

    /// Shows the beliefs of all labs.
    fn conclude(self) -> Result<(), Failure> {
        let console = self.context.console;
        let mut beliefs = Vec::new();
        let mut rows = Vec::new();
        for report in &self.reports {
            for belief in report.last.iter().flat_map(|last| last["beliefs"].as_array()).flatten() {
                let text = |field: &str| belief[field].as_str().unwrap_or_default().to_owned();
                rows.push(vec![text("verdict"), report.lab.to_owned(), text("text")]);
                let mut belief = belief.clone();
                belief["lab"] = report.lab.into();
                beliefs.push(belief);
            }
        }
        let simulated = self.reports.iter().any(|report| report.simulated);
        console.line(format!("\n{}", beliefs_heading(simulated)));
        console.table(&["VERDICT", "LAB", "BELIEF"], &rows, &[]);
        let count = |verdict: &str| beliefs.iter().filter(|belief| belief["verdict"] == verdict).count();
        let counts: StepCounts = self.reports.iter().map(LabReport::counts).sum();
        console.line(format!("\n{}", summary(simulated, counts, ["refuted", "true", "open"].map(count))));
        let failed: Vec<_> =
            self.reports.iter().filter(|report| report.last.is_none()).map(|report| report.lab).collect();
        console.value(&json!({
            "lab": NAME, "labs": self.reports.len(), "failed": failed, "steps": counts.steps,
            "different": counts.different, "not_tried": counts.not_tried, "beliefs": beliefs,
        }));
        match failed.first() {
            None if counts.different == 0 => Ok(()),
            None => Err(Failure::silent(ErrorKind::CheckFailed)),
            Some(first) => Err(Failure::new(
                ErrorKind::CheckFailed,
                format!(
                    "{} of {} labs did not run to their end: {}",
                    failed.len(),
                    self.reports.len(),
                    failed.join(", ")
                ),
                format!("run them alone: `partywall lab {first}{}`", simulation::flag()),
            )),
        }
    }
}
