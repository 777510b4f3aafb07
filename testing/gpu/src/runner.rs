//! Runs tests one after the other, each in a child process, and reports.
//!
//! Tests never run in parallel: they measure free device memory and kill processes, and would affect each other.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use partywall_measure::{commit, kernel_release, today};
use rustix::process::Signal;
use serde::Serialize;

use crate::child::{self, End, Finished};
use crate::gpu::{self, Found, GpuFacts};
use crate::ledger::{self, Ledger};
use crate::tests::{self, Test};
use crate::vulkan::show_driver;

/// The option that makes this program run one test in its child process.
pub(crate) const RUN_ONE: &str = "--run";
/// The option that makes it look for a GPU in a child process.
pub(crate) const PROBE: &str = "--probe";

/// The first use of a driver that is not kept loaded can take tens of seconds.
const PROBE_LIMIT: Duration = Duration::from_secs(120);

/// A selection of tests by parts of their names.
#[derive(Default)]
pub(crate) struct Selection {
    /// A selected test has one of them in its name; if there are none, all tests are selected.
    pub(crate) with: Vec<String>,
    /// A selected test has none of them in its name.
    pub(crate) without: Vec<String>,
}

impl Selection {
    fn tests(&self) -> impl Iterator<Item = &'static Test> {
        let has = |test: &Test, parts: &[String]| parts.iter().any(|part| test.name.contains(part));
        tests::all().filter(move |test| (self.with.is_empty() || has(test, &self.with)) && !has(test, &self.without))
    }
}

/// Prints the selected tests.
pub(crate) fn list(selection: &Selection) -> ExitCode {
    for test in selection.tests() {
        println!("{}  (needs {}, at most {} s)", test.name, test.needs, test.timeout.as_secs());
    }
    ExitCode::SUCCESS
}

/// Runs one test, inside its child process.
pub(crate) fn run_one(name: &str) -> ExitCode {
    die_with_parent();
    let Some(test) = tests::all().find(|test| test.name == name) else {
        eprintln!("there is no test named {name}; --list prints their names");
        return ExitCode::from(2);
    };
    match (test.run)() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// Looks for a GPU, inside a child process, and prints the result as the last line.
pub(crate) fn probe_in_child() -> ExitCode {
    die_with_parent();
    match gpu::probe().and_then(|found| serde_json::to_string(&found).map_err(|error| error.to_string())) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the selected tests, reports to the terminal and to `report`.
pub(crate) fn run_all(selection: &Selection, report: Option<&Path>) -> ExitCode {
    let chosen: Vec<&Test> = selection.tests().collect();
    if chosen.is_empty() {
        eprintln!("error: no test has such a name; --list without NAME prints all names");
        return ExitCode::from(2);
    }
    let found = match probe() {
        Ok(found) => found,
        Err(message) => {
            eprintln!("error: the driver is installed but cannot be used, so nothing was tested: {message}");
            return ExitCode::FAILURE;
        }
    };
    let mut results = Results::new(&found, &chosen);
    results.print_machine(&found);
    if let Err(message) = run_each(&chosen, &found, &mut results, report) {
        eprintln!("error: {message}");
        return ExitCode::FAILURE;
    }
    results.print_summary()
}

/// Writes the report before the first test, so that a wrong path is reported immediately, and after each test, so that
/// an interrupted run keeps its results.
fn run_each(chosen: &[&Test], found: &Found, results: &mut Results, report: Option<&Path>) -> Result<(), String> {
    let write = |results: &Results| report.map_or(Ok(()), |path| results.write(path));
    write(results)?;
    for (index, test) in chosen.iter().enumerate() {
        let record = judge(test, found);
        record.print();
        results.tests[index] = record;
        write(results)?;
    }
    Ok(())
}

/// Looks for a GPU in a child process, so that a driver that hangs or crashes does not affect the runner.
fn probe() -> Result<Found, String> {
    let finished = run_child(&mut ourselves(&[PROBE]), PROBE_LIMIT)?;
    let last = finished.output.lines().last().unwrap_or_default();
    match finished.end {
        End::Exited(status) if status.success() => {
            serde_json::from_str(last).map_err(|error| format!("the probe of the driver printed '{last}': {error}"))
        }
        _ => Err(format!("the probe of the driver {}: {}", how(&finished, PROBE_LIMIT), finished.output.trim())),
    }
}

fn judge(test: &Test, found: &Found) -> Record {
    let missing = match found {
        Found::Nothing(reason) => Some(reason.clone()),
        Found::Gpu(facts) => test.needs.missing(facts),
    };
    let (outcome, time, message) = match missing {
        Some(reason) => (Outcome::Skipped, Duration::ZERO, reason),
        None => match run(test) {
            Ok((outcome, finished)) => (outcome, finished.time, finished.output),
            Err(message) => (Outcome::Failed, Duration::ZERO, message),
        },
    };
    Record { name: test.name, outcome, seconds: time.as_secs_f64(), message }
}

/// Runs a test in a child process. A test that leaves something behind in the simulated driver fails.
fn run(test: &Test) -> Result<(Outcome, Finished), String> {
    let ledger = Ledger::new().map_err(|error| format!("cannot make a ledger: {error}"))?;
    let mut command = ourselves(&[RUN_ONE, test.name]);
    let mut finished = run_child(command.env(ledger::VARIABLE, ledger.directory()), test.timeout)?;
    let mut outcome = Outcome::Passed;
    let mut output = vec![finished.output.trim_end().to_owned()];
    if !matches!(finished.end, End::Exited(status) if status.success()) {
        outcome = Outcome::Failed;
        output.insert(0, how(&finished, test.timeout));
    }
    let left = ledger.left()?;
    if !left.is_empty() {
        outcome = Outcome::Failed;
        output.extend(left);
    }
    finished.output = output.join("\n");
    Ok((outcome, finished))
}

fn how(finished: &Finished, limit: Duration) -> String {
    let limit = limit.as_secs_f64();
    match finished.end {
        End::Exited(status) => format!("ended with {status}"),
        End::TimedOut => format!("did not end within {limit} s and was killed"),
        End::Unkillable => format!("did not end within {limit} s and cannot be killed: it is stuck in the driver"),
    }
}

/// Returns a command that runs this program.
fn ourselves(arguments: &[&str]) -> Command {
    // The link works even if the file was replaced meanwhile, unlike its path.
    let mut command = Command::new("/proc/self/exe");
    command.args(arguments);
    show_driver(&mut command);
    command
}

fn run_child(command: &mut Command, limit: Duration) -> Result<Finished, String> {
    child::run(command, limit).map_err(|error| format!("cannot run a child process: {error}"))
}

/// Makes a test end with its runner, even if the runner is killed.
fn die_with_parent() {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        eprintln!("warning: this process would outlive its runner: {error}");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Passed,
    Failed,
    Skipped,
    /// The outcome of the remaining tests of an interrupted run.
    NotRun,
}

#[derive(Debug, Serialize)]
struct Record {
    name: &'static str,
    outcome: Outcome,
    seconds: f64,
    message: String,
}

impl Record {
    fn print(&self) {
        match self.outcome {
            Outcome::Passed => println!("passed   {} ({:.1} s)", self.name, self.seconds),
            Outcome::Failed => {
                println!("FAILED   {} ({:.1} s)", self.name, self.seconds);
                self.message.lines().for_each(|line| println!("         | {line}"));
            }
            Outcome::Skipped => println!("skipped  {}: {}", self.name, self.message),
            Outcome::NotRun => {}
        }
    }
}

/// The report, as written to its file.
#[derive(Debug, Serialize)]
struct Results {
    gpu: Option<String>,
    gpus: usize,
    driver: Option<String>,
    /// True if the driver is simulated, so that the results prove nothing about a GPU.
    simulated: bool,
    date: String,
    kernel: String,
    commit: Option<String>,
    tests: Vec<Record>,
}

impl Results {
    fn new(found: &Found, chosen: &[&Test]) -> Self {
        let facts = match found {
            Found::Gpu(facts) => Some(facts.clone()),
            Found::Nothing(_) => None,
        };
        let not_run =
            |test: &&Test| Record { name: test.name, outcome: Outcome::NotRun, seconds: 0.0, message: String::new() };
        Self {
            gpus: facts.as_ref().map_or(0, |facts| facts.count),
            gpu: facts.as_ref().map(|facts| facts.name.clone()),
            simulated: facts.as_ref().is_some_and(|facts| facts.simulated),
            driver: facts.map(|GpuFacts { driver, .. }| driver),
            date: today(),
            kernel: kernel_release(),
            commit: commit(),
            tests: chosen.iter().map(not_run).collect(),
        }
    }

    fn print_machine(&self, found: &Found) {
        match found {
            Found::Gpu(facts) => {
                let simulated = if facts.simulated { " (simulated)" } else { "" };
                let GpuFacts { count, name, driver, .. } = facts;
                println!("{count} x {name}, driver {driver}{simulated}, Linux {}\n", self.kernel);
            }
            Found::Nothing(reason) => println!("no GPU: {reason}\n"),
        }
    }

    fn print_summary(&self) -> ExitCode {
        println!("\n{}", self.summary());
        if self.count(Outcome::Failed) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn summary(&self) -> String {
        let [passed, failed, skipped] = [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|o| self.count(o));
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.tests.iter().filter(|record| record.outcome == outcome).count()
    }

    fn write(&self, path: &Path) -> Result<(), String> {
        let cannot = |error: &dyn std::error::Error| format!("cannot write the report {}: {error}", path.display());
        let mut text = serde_json::to_string_pretty(self).map_err(|error| cannot(&error))?;
        text.push('\n');
        std::fs::write(path, text).map_err(|error| cannot(&error))
    }
}

#[cfg(test)]
mod unit {
    use super::*;
    use crate::tests::Needs;

    fn test(name: &'static str, needs: usize) -> Test {
        Test { name, needs: Needs::Gpu(needs), timeout: Duration::from_secs(1), run: || Ok(()) }
    }

    fn results(found: &Found, tests: &[Test]) -> Results {
        let chosen: Vec<_> = tests.iter().collect();
        let mut results = Results::new(found, &chosen);
        results.tests = tests.iter().map(|test| judge(test, found)).collect();
        results
    }

    #[test]
    fn without_a_gpu_everything_is_skipped_with_the_reason() {
        let found = Found::Nothing("no driver".to_owned());
        let results = results(&found, &[test("a", 1), test("b", 2)]);
        assert_eq!(results.summary(), "0 passed, 0 failed, 2 skipped");
        assert!(results.tests.iter().all(|record| record.message == "no driver"));
    }

    #[test]
    fn a_test_for_two_gpus_is_skipped_on_one() {
        let facts = GpuFacts { name: "Some GPU".to_owned(), count: 1, driver: "580.1".to_owned(), simulated: false };
        let results = results(&Found::Gpu(facts), &[test("pair", 2)]);
        assert_eq!(results.summary(), "0 passed, 0 failed, 1 skipped");
        assert_eq!(results.tests[0].message, "needs 2 GPUs, this machine shows 1");
    }

    #[test]
    fn a_report_cut_short_does_not_look_complete() {
        let results = Results::new(&Found::Nothing("no driver".to_owned()), &[&test("late", 1)]);
        let json = serde_json::to_value(&results).unwrap();
        assert_eq!(json["tests"][0]["outcome"], "not_run");
        assert!(json["gpu"].is_null());
        assert_eq!(results.summary(), "0 passed, 0 failed, 0 skipped");
    }
}
