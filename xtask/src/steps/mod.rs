//! `cargo xtask check` and `cargo xtask test`: runs steps and prints the result of each.
//!
//! | module | steps |
//! |---|---|
//! | [`sources`] | the text of the repository: format, lints, pages, dependencies, kernels |
//! | [`packages`] | the crates, packed as a release publishes them |
//! | [`cargo_c`] | cargo-c, beside `c-install` |
//! | [`rust`] | the tests in Rust |
//! | [`simulated`] | the programs that test the library on the simulated driver |
//! | [`python`] | the Python package |
//!
//! `test` runs some steps only if what they guard has changed: [`guards`].
//!
//! The steps are in lanes, which run at the same time. The main lane builds what tests start, and runs most tests. The
//! side lane mostly compiles, in its own target directories where possible, with what the others leave of the
//! processors. Steps that wait more than they compute run beside both.

mod cargo_c;
mod guards;
mod packages;
mod python;
mod rust;
mod simulated;
mod sources;

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use python::Environment;

use self::guards::Part;
use crate::changes;
use crate::tools::{Workspace, cannot_read};

/// A part of a test run that passes or fails by itself.
struct Step {
    /// The name that `--only` takes. Scripts rely on it, so that a step keeps its name.
    name: &'static str,
    /// What the step checks, for `--list`.
    about: &'static str,
    lane: Lane,
    run: fn(&Workspace) -> Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// One step after the other, with their output shown while they run.
    Main,
    /// One step after the other at a lower priority. The output goes to a file, which is shown if the step fails.
    Side,
    /// Each step by itself once the first of the main lane is over, with its output in a file.
    Waiting,
}

/// The end of a step. A step that could not check anything is *skipped* with the reason, and one that did not have to
/// is *left out*; neither is *passed*.
enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
    LeftOut(String),
}

impl From<Result<(), String>> for Outcome {
    fn from(result: Result<(), String>) -> Self {
        match result {
            Ok(()) => Self::Passed,
            Err(message) => Self::Failed(message),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => write!(f, "passed"),
            Self::Failed(message) => write!(f, "FAILED ({message})"),
            Self::Skipped(reason) => write!(f, "skipped ({reason})"),
            Self::LeftOut(reason) => write!(f, "left out ({reason})"),
        }
    }
}

const CHECK: &[Step] = &[
    Step {
        name: "format",
        about: "rustfmt, and the lock file of the fuzz targets",
        lane: Lane::Main,
        run: sources::format,
    },
    Step { name: "clippy", about: "clippy, with warnings as errors", lane: Lane::Main, run: sources::clippy },
    Step {
        name: "unit-tests",
        about: "unit tests of the crates that changed since main",
        lane: Lane::Main,
        run: rust::unit_tests_of_changes,
    },
];

/// The steps of `test`, in the order in which each lane runs them.
const TEST: &[Step] = &[
    Step {
        name: "format",
        about: "rustfmt, and the lock file of the fuzz targets",
        lane: Lane::Side,
        run: sources::format,
    },
    Step {
        name: "pages",
        about: "each promise has a test; files, links and dependencies that the pages name exist",
        lane: Lane::Side,
        run: sources::pages,
    },
    Step {
        name: "python-packages",
        about: "what the tests of the Python package need, downloaded",
        lane: Lane::Side,
        run: python::packages,
    },
    Step {
        name: "build",
        about: "the tests in Rust, every program that they start, and the Python extension, compiled",
        lane: Lane::Main,
        run: rust::build,
    },
    Step {
        name: "tests",
        about: "all tests in Rust that need nothing special of the machine",
        lane: Lane::Main,
        run: rust::tests,
    },
    Step { name: "users", about: "tests with processes of other users", lane: Lane::Main, run: rust::as_root },
    Step { name: "namespaces", about: "tests in namespaces of Linux", lane: Lane::Main, run: rust::in_namespaces },
    Step { name: "with-python", about: "tests in Rust that start Python", lane: Lane::Main, run: rust::with_python },
    Step {
        name: "systemd",
        about: "the units, judged by systemd's own tools",
        lane: Lane::Main,
        run: rust::with_systemd,
    },
    Step {
        name: "prometheus",
        about: "metrics, judged and scraped by Prometheus",
        lane: Lane::Main,
        run: rust::with_prometheus,
    },
    Step {
        name: "vulkan",
        about: "segments and timelines in Vulkan, on a CPU's driver under the validation layer",
        lane: Lane::Main,
        run: rust::with_vulkan,
    },
    Step {
        name: "cmake",
        about: "projects in C and C++ that find the installed library by CMake and pkg-config",
        lane: Lane::Main,
        run: rust::with_cmake,
    },
    Step { name: "without-gpu", about: "tests for machines without a GPU", lane: Lane::Main, run: rust::without_gpu },
    Step {
        name: "sweeps",
        about: "the broker, killed at every crash point of requests and restarts",
        lane: Lane::Main,
        run: rust::sweeps,
    },
    Step { name: "labs", about: "the labs and the benchmarks", lane: Lane::Main, run: rust::labs },
    Step {
        name: "faults",
        about: "each driver function in each public operation, failed and killed in turn",
        lane: Lane::Waiting,
        run: simulated::faults,
    },
    Step {
        name: "gpu-tests",
        about: "the program that tests real GPUs, on two simulated ones, without labs",
        lane: Lane::Waiting,
        run: simulated::gpu_tests,
    },
    Step {
        name: "python",
        about: "the Python package, installed and tested in host memory",
        lane: Lane::Waiting,
        run: python::package,
    },
    Step {
        name: "python-types",
        about: "the types of the Python package, of its stubs and of its examples",
        lane: Lane::Waiting,
        run: python::types,
    },
    Step {
        name: "python-simulated",
        about: "the Python package, tested on a simulated GPU",
        lane: Lane::Waiting,
        run: python::on_simulated_gpu,
    },
    Step { name: "bridge", about: "the bridge between hosts, linted and tested", lane: Lane::Main, run: rust::bridge },
    Step {
        name: "python-bridge",
        about: "the Python package, tested with the bridge between hosts",
        lane: Lane::Main,
        run: python::bridge,
    },
    Step { name: "doc-tests", about: "the examples in rustdoc", lane: Lane::Main, run: rust::doc_tests },
    Step {
        name: "packages",
        about: "the crates are complete for publishing, and pack",
        lane: Lane::Side,
        run: packages::pack,
    },
    Step { name: "loom", about: "the models of shared words, by loom", lane: Lane::Side, run: rust::loom },
    Step {
        name: "kernels",
        about: "the kernels' PTX is what they compile to",
        lane: Lane::Side,
        run: sources::kernels,
    },
    Step {
        name: "shaders",
        about: "the shaders' SPIR-V is what they compile to",
        lane: Lane::Side,
        run: sources::shaders,
    },
];

const LONG: &[Step] = &[
    Step {
        name: "licences",
        about: "licences, bans and sources of dependencies",
        lane: Lane::Side,
        run: sources::licences,
    },
    Step {
        name: "advisories",
        about: "known vulnerabilities of dependencies",
        lane: Lane::Side,
        run: sources::advisories,
    },
    Step {
        name: "fuzz",
        about: "each fuzz target for a few seconds, under the address sanitizer",
        lane: Lane::Main,
        run: rust::fuzz,
    },
    Step {
        name: "sanitizer",
        about: "the tests of partywall-shm and partywall-os under the address sanitizer",
        lane: Lane::Side,
        run: rust::address_sanitizer,
    },
    Step { name: "clippy", about: "clippy, with warnings as errors", lane: Lane::Side, run: sources::clippy },
    Step {
        name: "rustdoc",
        about: "the pages of rustdoc, with warnings as errors",
        lane: Lane::Side,
        run: sources::rustdoc,
    },
    Step { name: "book", about: "the pages as a book, and the links in it", lane: Lane::Side, run: sources::book },
    Step {
        name: "binary",
        about: "the program as a release builds it, and its size",
        lane: Lane::Main,
        run: sources::optimised_binary,
    },
    Step {
        name: "wheel",
        about: "the Python package and the lab as their users build them: optimised, installed and tested",
        lane: Lane::Main,
        run: python::wheel,
    },
    Step { name: "minutes", about: "tests in Rust that take minutes", lane: Lane::Main, run: rust::in_minutes },
    Step {
        name: "bridge-minutes",
        about: "tests of the bridge that take minutes: a thousand faults, and slow cables",
        lane: Lane::Main,
        run: rust::bridge_in_minutes,
    },
    Step {
        name: "simulated-gpu",
        about: "the integration tests once more, with segments on a simulated GPU",
        lane: Lane::Main,
        run: rust::on_simulated_gpu,
    },
    Step {
        name: "simulated-pinned",
        about: "the integration tests once more, with segments in pinned memory of the simulated driver",
        lane: Lane::Main,
        run: rust::in_simulated_pinned_memory,
    },
    Step {
        name: "gpu-labs",
        about: "the labs and benchmarks of the program that tests real GPUs, on two simulated ones",
        lane: Lane::Waiting,
        run: simulated::gpu_labs,
    },
    Step {
        name: "all-faults",
        about: "each driver call of each public operation, failed and killed in turn",
        lane: Lane::Waiting,
        run: simulated::all_faults,
    },
    Step {
        name: "packages-compiled",
        about: "each crate compiles from its package",
        lane: Lane::Main,
        run: packages::compile,
    },
    Step {
        name: "cargo-c",
        about: "cargo-c installs the library for C as `c-install` does",
        lane: Lane::Main,
        run: cargo_c::compare,
    },
];

/// Runs format, clippy and the unit tests of the changed crates.
pub(crate) fn check(workspace: &Workspace) -> Result<(), String> {
    report(workspace, &CHECK.iter().map(Planned::certainly).collect::<Vec<_>>())
}

/// Runs all steps that a change must pass before it lands.
pub(crate) fn test(workspace: &Workspace) -> Result<(), String> {
    report(&workspace.compiling_once(), &plan(workspace, Part::Test))
}

/// Runs only the steps that take too long for [`fn@test`], and those that it leaves out.
pub(crate) fn test_long(workspace: &Workspace) -> Result<(), String> {
    report(&workspace.compiling_once(), &plan(workspace, Part::Long))
}

/// Runs the named steps of [`fn@test`] and [`test_long`].
pub(crate) fn only(workspace: &Workspace, names: &[&str]) -> Result<(), String> {
    let find = |name: &&str| {
        let step = TEST.iter().chain(LONG).find(|step| step.name == *name);
        let step = step.ok_or_else(|| format!("there is no step '{name}'; run: cargo xtask test --list"))?;
        Ok(Planned::certainly(step))
    };
    report(&workspace.compiling_once(), &names.iter().map(find).collect::<Result<Vec<_>, String>>()?)
}

/// Returns the steps of a part, those that are left out among them.
fn plan(workspace: &Workspace, part: Part) -> Vec<Planned> {
    let changed = changes::files(workspace);
    if let Err(message) = &changed {
        workspace.say(&format!("what has changed since main is unknown, so every step runs: {message}"));
    }
    let changed = changed.ok();
    let planned = |step: &'static Step| Planned {
        step,
        left_out: guards::reason_to_leave_out(step.name, part, changed.as_deref()),
    };
    match part {
        Part::Test => TEST.iter().map(planned).collect(),
        Part::Long => {
            let guarded = TEST.iter().filter(|step| guards::guard_of(step.name).is_some());
            LONG.iter().chain(guarded).map(planned).collect()
        }
    }
}

/// Returns a table of the steps of [`fn@test`] and [`test_long`].
pub(crate) fn list() -> String {
    let width = TEST.iter().chain(LONG).map(|step| step.name.len()).max().unwrap_or(0);
    let row = |step: &Step| {
        let mark = if guards::guard_of(step.name).is_some() { "*" } else { " " };
        format!("{mark} {:<width$}  {}\n", step.name, step.about)
    };
    let test: String = TEST.iter().map(row).collect();
    let long: String = LONG.iter().map(row).collect();
    let guard = |guard: &guards::Guard| format!("  {:<width$}  {}\n", guard.step, guard.paths.join(" "));
    let guards: String = guards::GUARDS.iter().map(guard).collect();
    format!(
        "cargo xtask test\n{test}\ncargo xtask test --long\n{long}\n* only if one of these has changed since main, and \
         otherwise in `test --long`\n{guards}"
    )
}

/// Runs steps, prints their table and fails if one of them did.
///
/// If a step fails, the others still run, so that one run shows all failures.
fn report(workspace: &Workspace, steps: &[Planned]) -> Result<(), String> {
    let start = Instant::now();
    let lines = run(workspace, steps);
    for line in &lines {
        if let (Outcome::Failed(_), Some(log)) = (&line.outcome, &line.log) {
            let text = fs::read(log).map_err(|error| cannot_read(log, &error))?;
            println!("\n==== {} ====", line.name);
            // If standard output is closed, the failure is reported anyway.
            let _ = std::io::stdout().write_all(&text);
        }
    }
    println!("\n{}in {:.1} s", table(&lines), start.elapsed().as_secs_f64());
    let failed = lines.iter().filter(|line| matches!(line.outcome, Outcome::Failed(_)));
    let failed: Vec<_> = failed.map(|line| line.name).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}; see above", failed.join(", "))) }
}

/// Runs steps, all but those of the main lane in the background. Without a main lane they run one after the other.
fn run(workspace: &Workspace, steps: &[Planned]) -> Vec<Line> {
    let of = |lane| steps.iter().filter(move |planned| planned.step.lane == lane);
    if of(Lane::Main).next().is_none() {
        return steps.iter().map(|step| run_shown(workspace, step)).collect();
    }
    thread::scope(|scope| {
        let side = scope.spawn(|| {
            yield_to_others();
            of(Lane::Side).map(|step| run_logged(workspace, step)).collect()
        });
        let mut background = vec![side];
        let mut lines = Vec::new();
        let mut waiting = Some(of(Lane::Waiting));
        for step in of(Lane::Main) {
            lines.push(run_shown(workspace, step));
            // In `test` the first step has built what they start; in `test --long` they build what is missing.
            let ready = waiting.take().into_iter().flatten();
            background.extend(ready.map(|step| scope.spawn(|| vec![run_logged(workspace, step)])));
        }
        for lane in background {
            lines.extend(lane.join().expect("a step returns its failure"));
        }
        lines
    })
}

/// Lowers the priority of this thread, and of all that it starts. Tests are then hardly slowed by a compilation beside
/// them.
fn yield_to_others() {
    let Ok(thread) = fs::read_link("/proc/thread-self") else { return };
    let Some(id) = thread.file_name() else { return };
    // Without it, the steps only take longer.
    let _ = Command::new("renice").args(["-n", "5", "-p"]).arg(id).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

fn run_shown(workspace: &Workspace, planned: &Planned) -> Line {
    let name = planned.step.name;
    println!("\n==== {name} ====");
    let line = planned.run(workspace);
    if !matches!(line.outcome, Outcome::Passed) {
        println!("{name}: {}", line.outcome);
    }
    line
}

fn run_logged(workspace: &Workspace, planned: &Planned) -> Line {
    let name = planned.step.name;
    let folder = workspace.target.join("xtask");
    let path = folder.join(name).with_extension("log");
    let file = fs::create_dir_all(&folder).and_then(|()| File::create(&path));
    let mut line = match file {
        Ok(file) => planned.run(&workspace.logging_to(file)),
        Err(error) => {
            let outcome = Outcome::Failed(format!("cannot create {}: {error}", path.display()));
            return Line { name, time: Duration::ZERO, processor_time: Duration::ZERO, outcome, log: None };
        }
    };
    line.log = Some(path);
    println!("==== {name} (in the background): {} ====", line.outcome);
    line
}

/// A step of a run.
struct Planned {
    step: &'static Step,
    /// Why the run leaves it out.
    left_out: Option<String>,
}

impl Planned {
    fn certainly(step: &'static Step) -> Self {
        Self { step, left_out: None }
    }

    fn run(&self, workspace: &Workspace) -> Line {
        let start = Instant::now();
        let workspace = workspace.counting();
        let outcome = match &self.left_out {
            Some(reason) => Outcome::LeftOut(reason.clone()),
            None => (self.step.run)(&workspace),
        };
        let (time, processor_time) = (start.elapsed(), workspace.processor_time());
        Line { name: self.step.name, time, processor_time, outcome, log: None }
    }
}

struct Line {
    name: &'static str,
    time: Duration,
    /// That of the commands of the step.
    processor_time: Duration,
    outcome: Outcome,
    /// The output of a step in the background.
    log: Option<PathBuf>,
}

fn table(lines: &[Line]) -> String {
    let width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
    let mut passed = 0;
    let mut failed = 0;
    let mut skipped = 0;
    let mut left_out = 0;
    let mut text = format!("{:<width$}  {:>9}  {:>9}\n", "step", "time", "processor");
    for line in lines {
        match line.outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed(_) => failed += 1,
            Outcome::Skipped(_) => skipped += 1,
            Outcome::LeftOut(_) => left_out += 1,
        }
        let name = line.name;
        let [seconds, processor] = [line.time, line.processor_time].map(|time| time.as_secs_f64());
        text += &format!("{name:<width$}  {seconds:>7.1} s  {processor:>7.1} s  {}\n", line.outcome);
    }
    text += &format!("\nsteps: {passed} passed, {failed} failed, {skipped} skipped, {left_out} left out, ");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_gives_the_reason_of_a_skipped_step() {
        let (time, processor_time) = (Duration::from_millis(1250), Duration::from_secs(2));
        let line = |name, outcome| Line { name, time, processor_time, outcome, log: None };
        let text = table(&[
            line("format", Outcome::Passed),
            line("clippy", Outcome::Failed("exit status: 101".to_owned())),
            line("advisories", Outcome::Skipped("out of reach".to_owned())),
            line("loom", Outcome::LeftOut("nothing it guards has changed".to_owned())),
        ]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "step             time  processor");
        assert_eq!(lines[1], "format          1.2 s      2.0 s  passed");
        assert_eq!(lines[2], "clippy          1.2 s      2.0 s  FAILED (exit status: 101)");
        assert_eq!(lines[3], "advisories      1.2 s      2.0 s  skipped (out of reach)");
        assert_eq!(lines[4], "loom            1.2 s      2.0 s  left out (nothing it guards has changed)");
        assert_eq!(lines[6], "steps: 1 passed, 1 failed, 1 skipped, 1 left out, ");
    }

    #[test]
    fn every_step_has_a_name_of_its_own() {
        let mut names: Vec<_> = TEST.iter().chain(LONG).map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TEST.len() + LONG.len());
    }
}
