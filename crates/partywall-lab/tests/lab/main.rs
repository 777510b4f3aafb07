//! The program `partywall-lab`, as users start it: through `partywall`, on the simulated driver and without one.
#![allow(clippy::unwrap_used, reason = "helpers of tests are outside #[test]")]

mod bench;
mod memory;
mod order;
mod program;
mod runner;
mod simulated;
mod streams;
mod weights;

use std::{collections::BTreeMap, path::Path, process::Command};

use partywall_harness::{Output, Running, Sandbox, simulated_driver};
use serde_json::Value;

/// Runs the stand-in for the MPS daemon. It is no test itself.
#[test]
fn mps_control() {
    partywall_harness::mps::play();
}

/// `partywall lab` on the simulated driver.
fn lab(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    let mut command = sandbox.command(["lab"]);
    command.args(arguments).env("PARTYWALL_LIBCUDA", simulated_driver());
    command
}

/// The JSON output of a lab: its header, its steps by name, and its beliefs by name.
struct Report {
    header: Value,
    steps: Vec<Value>,
    beliefs: BTreeMap<String, Value>,
}

impl Report {
    fn of(output: &Output) -> Self {
        let lines: Vec<Value> = output.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (header, rest) = lines.split_first().unwrap();
        let (last, steps) = rest.split_last().unwrap();
        let beliefs = last["beliefs"].as_array().unwrap().iter();
        let beliefs = beliefs.map(|belief| (belief["belief"].as_str().unwrap().to_owned(), belief.clone()));
        Self { header: header.clone(), steps: steps.to_vec(), beliefs: beliefs.collect() }
    }

    fn step(&self, name: &str) -> &Value {
        self.steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("no step {name:?}"))
    }

    /// The beliefs with a verdict.
    fn with(&self, verdict: &str) -> Vec<&str> {
        let with = self.beliefs.iter().filter(|(_, belief)| belief["verdict"] == verdict);
        with.map(|(name, _)| name.as_str()).collect()
    }

    /// The steps with a verdict.
    fn steps_with(&self, verdict: &str) -> Vec<&str> {
        let with = self.steps.iter().filter(|step| step["verdict"] == verdict);
        with.map(|step| step["step"].as_str().unwrap()).collect()
    }
}

/// Fails if a process has left something on the device, or if another number of processes ended by themselves.
#[track_caller]
fn assert_nothing_left(ledger: &Path, processes: usize) {
    let files: Vec<_> = std::fs::read_dir(ledger).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), processes, "{files:?}");
    for file in files {
        let left = std::fs::read_to_string(file).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), Value::Array(Vec::new()), "{left}");
    }
}

/// Returns a lab's report, after checking that its processes, of which there are `processes`, left nothing on the
/// device.
#[track_caller]
fn report_of(name: &str, processes: usize) -> Report {
    let sandbox = Sandbox::new();
    let ledger = sandbox.path().join("ledger");
    std::fs::create_dir(&ledger).unwrap();
    let mut command = lab(&sandbox, &[name, "--json"]);
    let report = Report::of(&Running::spawn(command.env("SIMCUDA_LEDGER", &ledger)).wait().expect(0));
    assert_nothing_left(&ledger, processes);
    report
}

/// The processes that were started in the sandbox, with their command lines.
fn processes_of(sandbox: &Sandbox) -> Vec<(rustix::process::Pid, String)> {
    let place = sandbox.path().to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let directory = entry.unwrap().path();
        let pid = directory.file_name()?.to_str()?.parse().ok().and_then(rustix::process::Pid::from_raw)?;
        let text = |file| std::fs::read(directory.join(file)).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text("environ").ok().filter(|environment| environment.contains(place))?;
        Some((pid, text("cmdline").ok()?))
    });
    processes.collect()
}
