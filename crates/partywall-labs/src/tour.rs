//! `partywall lab tour`: all labs, one after the other, and one table of their claims.
//!
//! Each lab is a process of its own, so that one that fails, or breaks CUDA, leaves the others as they are.
//!
//! With `--json` the first line describes the machine (`lab`, `device`, `simulated`). One follows for each lab (`lab`,
//! `steps`, `different`, `not_tried`, `seconds`, and `error` if it did not run to its end). The last one has `labs`,
//! `failed` (the names of labs that did not run to their end), `steps`, `different`, and `claims`, each with its `lab`.

use std::{
    process::{Command as Process, Stdio},
    time::Instant,
};

use clap::{ArgMatches, Args, Command};
use partywall::{ErrorKind, Gpu, Place};
use serde_json::{Value, json};

use crate::{
    Context, LABS, device,
    failure::{Doing, Failure},
    lab::{IN_TOUR, Lab, Places, read},
    reporter::{SIMULATED, claims_heading, summary},
    text::counted,
};

/// Its subcommand.
pub(super) const NAME: &str = "tour";

/// Returns the subcommand.
pub(super) fn command() -> Command {
    Places::augment_args(Command::new(NAME)).about("All labs, one after the other, with one table of what holds here")
}

/// Runs the labs that run in the chosen place.
pub(super) fn run(context: &Context, arguments: &ArgMatches) -> Result<(), Failure> {
    let choice = read::<Places>(arguments)?.device;
    device::require_unpinned(choice)?;
    let place = context.console.place(choice)?;
    let kills = match place.gpu() {
        // The death of a client with work on the GPU may end the MPS server, and with it the other clients.
        Some(uuid) => !device::under_mps(&Gpu::open(uuid)?)?,
        None => true,
    };
    let mut tour = Tour { context, place, kills, described: false, reports: Vec::new() };
    if place == Place::Host {
        tour.described = true;
        tour.describe(&json!({ "device": "host" }));
    }
    for lab in LABS.iter().copied() {
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
    reports: Vec<Report>,
}

/// What a lab said to programs.
struct Report {
    lab: &'static str,
    steps: Vec<Value>,
    /// Its last line. `None` if it did not run to its end.
    last: Option<Value>,
    simulated: bool,
}

impl Report {
    /// Returns the number of steps with a verdict.
    fn with(&self, verdict: &str) -> usize {
        self.steps.iter().filter(|step| step["verdict"] == verdict).count()
    }
}

impl Tour<'_> {
    /// Runs one lab, and reports how it ended.
    fn visit(&mut self, lab: &'static Lab) -> Result<(), Failure> {
        let console = &self.context.console;
        if self.place == Place::Host && !lab.on_host {
            console.line(&format!("{:<12} needs a GPU", lab.name));
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
        let last = if output.status.success() { lines.pop() } else { None };
        let header = lines.first().filter(|line| line["lab"] == lab.name).cloned();
        let steps = lines.into_iter().filter(|line| !line["step"].is_null()).collect();
        let simulated = header.as_ref().is_some_and(|header| header["simulated"] == true);
        if let Some(header) = header.filter(|_| !self.described) {
            self.described = true;
            self.describe(&header);
        }
        let report = Report { lab: lab.name, steps, last, simulated };

        let seconds = began.elapsed().as_secs_f64();
        let different = report.with("different");
        let not_tried = report.with("not-tried");
        let count = report.steps.len();
        let ending = match &report.last {
            Some(_) => {
                let steps = counted(count as u64, "step");
                format!("{steps}, {different} of them not as expected, {not_tried} not tried")
            }
            None => format!("did not run to its end ({})", output.status),
        };
        console.line(&format!("{:<12} {ending}, {seconds:.1} s", lab.name));
        let mut value = json!({
            "lab": lab.name, "steps": count, "different": different, "not_tried": not_tried, "seconds": seconds,
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
        let console = &self.context.console;
        console.line("A tour of the labs: what holds on this machine");
        match text("device").as_str() {
            "host" => console.line("Host memory: the labs that need a GPU are left out."),
            device => console.line(&format!("{device}, {}, CUDA {}", text("uuid"), text("cuda"))),
        }
        if simulated {
            console.line(SIMULATED);
        }
        console.line("");
        console.value(&json!({ "lab": NAME, "device": header["device"], "simulated": simulated }));
    }

    /// Shows the claims of all labs.
    fn conclude(self) -> Result<(), Failure> {
        let console = &self.context.console;
        let mut claims = Vec::new();
        let mut rows = Vec::new();
        for report in &self.reports {
            for claim in report.last.iter().flat_map(|last| last["claims"].as_array()).flatten() {
                let text = |field: &str| claim[field].as_str().unwrap_or_default().to_owned();
                rows.push(vec![text("verdict").replace('-', " "), report.lab.to_owned(), text("text")]);
                let mut claim = claim.clone();
                claim["lab"] = report.lab.into();
                claims.push(claim);
            }
        }
        let simulated = self.reports.iter().any(|report| report.simulated);
        console.line(&format!("\n{}", claims_heading(simulated)));
        console.table(&["VERDICT", "LAB", "CLAIM"], &rows, &[]);
        let count = |verdict: &str| claims.iter().filter(|claim| claim["verdict"] == verdict).count();
        let steps = self.reports.iter().map(|report| report.steps.len()).sum::<usize>();
        let different = self.reports.iter().map(|report| report.with("different")).sum::<usize>();
        let counts = ["held", "did-not-hold", "open", "not-tried"].map(count);
        let made = format!("{}, {}", counted(self.reports.len() as u64, "lab"), counted(steps as u64, "step"));
        console.line(&summary(simulated, &made, different, counts));
        let failed: Vec<_> =
            self.reports.iter().filter(|report| report.last.is_none()).map(|report| report.lab).collect();
        console.value(&json!({
            "lab": NAME, "labs": self.reports.len(), "failed": failed, "steps": steps, "different": different,
            "claims": claims,
        }));
        match failed.first() {
            None => Ok(()),
            Some(first) => Err(Failure::new(
                ErrorKind::CheckFailed,
                format!(
                    "{} of {} labs did not run to their end: {}",
                    failed.len(),
                    self.reports.len(),
                    failed.join(", ")
                ),
                format!("run them alone: `partywall lab {first}{}`", self.context.flag),
            )),
        }
    }
}
