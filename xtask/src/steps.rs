//! `cargo xtask test`: all steps, one after the other, and a table of what became of them.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::tools::{self, Workspace, run, run_within};
use crate::{ptx, python};

/// How long fetching the advisory database may take before it counts as out of reach.
const FETCH_LIMIT: Duration = Duration::from_secs(120);

/// Runs all steps, or only the quick ones, and fails if one of them did.
///
/// A step that fails does not keep the others from running: whoever waited for the machine gets
/// to know everything that is wrong, not the first thing.
pub(crate) fn test(workspace: &Workspace, quick: bool) -> Result<(), String> {
    let mut lines = Vec::new();
    for step in STEPS.iter().filter(|step| step.quick || !quick) {
        println!("\n==== {} ====", step.name);
        let start = Instant::now();
        let outcome = (step.run)(workspace);
        let line = Line { name: step.name, time: start.elapsed(), outcome };
        if !matches!(line.outcome, Outcome::Passed) {
            println!("{}: {}", step.name, line.outcome);
        }
        lines.push(line);
    }
    println!("\n{}", table(&lines));
    let failed: Vec<_> =
        lines.iter().filter(|line| matches!(line.outcome, Outcome::Failed(_))).map(|line| line.name).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}; see above", failed.join(", "))) }
}

/// Tests the Python package alone.
pub(crate) fn python(workspace: &Workspace) -> Result<(), String> {
    match python_package(workspace) {
        Outcome::Failed(message) => Err(message),
        outcome => {
            println!("Python package: {outcome}");
            Ok(())
        }
    }
}

struct Step {
    name: &'static str,
    /// Whether `--quick` includes it.
    quick: bool,
    run: fn(&Workspace) -> Outcome,
}

/// What became of a step. What was not looked at is *skipped* with its reason, never *passed*.
enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
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
        }
    }
}

/// The quickest to fail come first.
const STEPS: [Step; 18] = [
    Step {
        name: "format",
        quick: true,
        run: |workspace| run(&mut workspace.cargo(["fmt", "--all", "--check"])).into(),
    },
    Step {
        name: "clippy",
        quick: true,
        run: |workspace| {
            let words = "clippy --workspace --all-targets -- -D warnings".split(' ');
            run(&mut workspace.cargo(words)).into()
        },
    },
    Step { name: "rustdoc", quick: false, run: |workspace| rustdoc(workspace).into() },
    Step { name: "licences, bans, sources", quick: false, run: |workspace| licences(workspace).into() },
    Step { name: "advisories", quick: false, run: advisories },
    Step { name: "tests", quick: true, run: |workspace| tests(workspace).into() },
    Step { name: "loom", quick: false, run: |workspace| loom(workspace).into() },
    Step { name: "address sanitizer", quick: false, run: address_sanitizer },
    Step { name: "tests in namespaces", quick: false, run: tests_in_namespaces },
    Step { name: "tests with Python", quick: false, run: tests_with_python },
    Step { name: "tests without a GPU", quick: false, run: tests_without_gpu },
    Step { name: "tests, simulated GPU", quick: false, run: |workspace| tests_on_simulated_gpu(workspace).into() },
    Step { name: "driver faults", quick: false, run: |workspace| faults(workspace).into() },
    Step { name: "GPU tests, simulated", quick: false, run: |workspace| simulated_gpu_tests(workspace).into() },
    Step { name: "Python package", quick: false, run: python_package },
    Step { name: "doc tests", quick: false, run: |workspace| doc_tests(workspace).into() },
    Step { name: "optimised binary", quick: false, run: |workspace| optimised_binary(workspace).into() },
    Step { name: "kernels (PTX)", quick: false, run: |_| kernels() },
];

/// The program as `cargo install` makes it, but for what makes that slow. With debugging information it would weigh
/// several times as much.
fn optimised_binary(workspace: &Workspace) -> Result<(), String> {
    const MOST_BYTES: u64 = 24 << 20;
    run(&mut workspace.cargo(["build", "--profile", "ci", "-p", "partywall-cli"]))?;
    let program = workspace.target.join("ci/partywall");
    let weight = std::fs::metadata(&program).map_err(|error| format!("{}: {error}", program.display()))?.len();
    if weight > MOST_BYTES {
        let allowed = MOST_BYTES >> 20;
        return Err(format!(
            "{} weighs {} MiB, {allowed} are allowed: is it stripped?",
            program.display(),
            weight >> 20
        ));
    }
    Ok(())
}

/// The program has the name of the library, so that both have their pages in the same place, and
/// cargo may write them at the same time. One after the other both are checked, and the pages of
/// the library are those that remain.
fn rustdoc(workspace: &Workspace) -> Result<(), String> {
    for targets in ["--bins", "--lib"] {
        let words = format!("doc --workspace {targets} --no-deps --document-private-items");
        run(workspace.cargo(words.split(' ')).env("RUSTDOCFLAGS", "-D warnings"))?;
    }
    Ok(())
}

fn licences(workspace: &Workspace) -> Result<(), String> {
    let mut deny = deny(workspace)?;
    run(deny.args(["check", "licenses", "bans", "sources"]))
}

/// Fetching the database and checking against it are two commands, because only a failure of the
/// second says anything about our dependencies.
fn advisories(workspace: &Workspace) -> Outcome {
    let commands = deny(workspace).and_then(|fetch| Ok((fetch, deny(workspace)?)));
    let (mut fetch, mut check) = match commands {
        Ok(commands) => commands,
        Err(message) => return Outcome::Failed(message),
    };
    if let Err(message) = run_within(FETCH_LIMIT, fetch.args(["fetch", "db"])) {
        return Outcome::Skipped(format!("the advisory database is out of reach: {message}"));
    }
    run(check.args(["check", "--disable-fetch", "advisories"])).into()
}

fn deny(workspace: &Workspace) -> Result<Command, String> {
    let mut command = Command::new(tools::cargo_deny(workspace)?);
    command.arg("--locked").current_dir(&workspace.root);
    Ok(command)
}

/// All tests but those that need of the machine what it may not have.
fn tests(workspace: &Workspace) -> Result<(), String> {
    // Whole names, so that no other test that happens to need something is left out as well.
    let expression = "not (test(needs_namespaces) | test(needs_python) | test(needs_no_gpu))";
    run_tests(
        workspace,
        (expression, &["--skip", "needs_namespaces", "--skip", "needs_python", "--skip", "needs_no_gpu"]),
    )
}

/// The protocols of shared memory under a model checker, which stands in for the atomics there; in a target directory
/// of its own, because everything is compiled with another flag. The models have `models` in their names.
fn loom(workspace: &Workspace) -> Result<(), String> {
    let which = ["-p", "partywall-shm", "--lib", "--target-dir"];
    let mut command = if tools::has_nextest(workspace) {
        workspace.cargo(["nextest", "run", "--no-fail-fast", "--cargo-profile", "loom"].into_iter().chain(which))
    } else {
        workspace.cargo(["test", "--no-fail-fast", "--profile", "loom"].into_iter().chain(which))
    };
    run(command.arg(workspace.target.join("loom")).arg("models::").env("RUSTFLAGS", "--cfg loom"))
}

/// The crates whose `unsafe` is about memory alone, with every access checked (Miri has no toolchain of its own here, and
/// knows no memfds). The sanitizer is behind an unstable flag, which a stable compiler takes with `RUSTC_BOOTSTRAP`; with a
/// target named, build scripts go without it.
fn address_sanitizer(workspace: &Workspace) -> Outcome {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    if !cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        return Outcome::Skipped(format!("it is set up for {TARGET} alone"));
    }
    let which = ["-p", "partywall-shm", "-p", "partywall-os", "--target", TARGET, "--target-dir"];
    let mut command = if tools::has_nextest(workspace) {
        workspace.cargo(["nextest", "run", "--no-fail-fast"].into_iter().chain(which))
    } else {
        workspace.cargo(["test", "--no-fail-fast", "--lib", "--tests"].into_iter().chain(which))
    };
    command.arg(workspace.target.join("asan"));
    run(command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address")).into()
}

fn tests_in_namespaces(workspace: &Workspace) -> Outcome {
    let probe = "unshare --user --map-root-user --pid --mount --fork --kill-child true";
    if !succeeds(probe.split(' ')) {
        return Outcome::Skipped("this machine does not let us make namespaces".to_owned());
    }
    run_tests(workspace, ("test(needs_namespaces)", &["needs_namespaces"])).into()
}

fn tests_with_python(workspace: &Workspace) -> Outcome {
    if !succeeds(["python3", "-c", "import os; os.pidfd_open"].into_iter()) {
        return Outcome::Skipped("there is no Python 3.9 or later here".to_owned());
    }
    run_tests(workspace, ("test(needs_python)", &["needs_python"])).into()
}

fn tests_without_gpu(workspace: &Workspace) -> Outcome {
    if Path::new("/dev/nvidiactl").exists() {
        return Outcome::Skipped("there is a GPU here".to_owned());
    }
    run_tests(workspace, ("test(needs_no_gpu)", &["needs_no_gpu"])).into()
}

fn succeeds<'a>(mut words: impl Iterator<Item = &'a str>) -> bool {
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// Runs the tests that a filter selects, given as nextest and as cargo's own runner want it.
fn run_tests(workspace: &Workspace, (expression, words): (&str, &[&str])) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let mut command = if tools::has_nextest(workspace) {
        println!("cargo-nextest is here and runs the tests");
        let mut command = workspace.cargo(["nextest", "run", "--workspace", "--no-fail-fast", "-E", expression]);
        command.args(nextest_threads());
        command
    } else {
        println!("cargo-nextest is not installed; cargo test runs the tests");
        let mut command = workspace.cargo(["test", "--workspace", "--all-targets", "--no-fail-fast", "--"]);
        command.args(words);
        command
    };
    run(in_test_environment(workspace, &mut command))
}

/// More tests at once than nextest would run: most of them wait, above all for deaths to be proved.
fn nextest_threads() -> [String; 2] {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    ["--test-threads".to_owned(), (2 * processors).to_string()]
}

/// The integration tests once more, with their segments on a simulated GPU. Left out are those that say something of
/// host memory alone, and those whose members are made by hand out of bytes.
fn tests_on_simulated_gpu(workspace: &Workspace) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let left_out = ["host_memory", "needs_", "peers::", "imposter::"];
    let which = "--workspace --test domain --test stress --test put_get --test names --test members --test watch";
    let mut command = if tools::has_nextest(workspace) {
        let expression = left_out.map(|part| format!("not test({part})")).join(" & ");
        let words = ["nextest", "run", "--no-fail-fast", "-E", &expression];
        let mut command = workspace.cargo(words.into_iter().chain(which.split(' ')));
        command.args(nextest_threads());
        command
    } else {
        let skip = left_out.iter().flat_map(|part| ["--skip", part]);
        workspace.cargo(["test", "--no-fail-fast"].into_iter().chain(which.split(' ')).chain(["--"]).chain(skip))
    };
    command.env(LIBCUDA, workspace.simulated_driver()).env("PARTYWALL_TEST_DEVICE", "cuda");
    // Each of thousands of small segments has 2 MiB of it, and touches a page or two.
    command.env("SIMCUDA_MEMORY", "64G");
    run(in_test_environment(workspace, &mut command))
}

/// The program that a machine with a GPU runs, on two simulated ones. Their streams pause at random, so that work that
/// is only ordered by luck shows; the seed is told, and repeats it.
fn simulated_gpu_tests(workspace: &Workspace) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    println!("{SEED}={seed}");
    let mut command = workspace.program("partywall-gpu-tests");
    command.arg("--report").arg(workspace.target.join("simulated-gpu-tests.json"));
    command.env(LIBCUDA, workspace.simulated_driver()).env(SEED, seed.to_string());
    command.env("SIMCUDA_DEVICES", "2").env("SIMCUDA_DELAY", "300");
    run(in_test_environment(workspace, &mut command))
}

/// Fails each driver call of each public operation, and kills a process at each.
fn faults(workspace: &Workspace) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let mut command = workspace.program("partywall-faults");
    command.arg("--report").arg(workspace.target.join("driver-faults.json"));
    run(in_test_environment(workspace, &mut command))
}

/// The package as its users get it: built, installed, its types checked, and its tests run on host memory and on the
/// simulated GPU. jax is among what is installed for them, and takes half a minute; torch is not: it is five gigabytes.
fn python_package(workspace: &Workspace) -> Outcome {
    if !python::is_here() {
        return Outcome::Skipped("there is no Python 3.11 or later here".to_owned());
    }
    let environment = match python::Environment::fresh(workspace) {
        Ok(environment) => environment,
        Err(message) => return Outcome::Skipped(format!("what its tests need is out of reach: {message}")),
    };
    let simulated = [(LIBCUDA, workspace.simulated_driver())];
    let steps = || {
        build_what_tests_run(workspace)?;
        environment.install()?;
        environment.check_types()?;
        environment.test("python/tests/host", &[])?;
        environment.test("python/tests/simulated", &simulated)
    };
    steps().into()
}

/// Names the library that stands in for the vendor's.
const LIBCUDA: &str = "PARTYWALL_LIBCUDA";
/// Of the pauses of simulated streams.
const SEED: &str = "SIMCUDA_SEED";

fn doc_tests(workspace: &Workspace) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let mut command = workspace.cargo(["test", "--doc", "--workspace", "--no-fail-fast"]);
    run(in_test_environment(workspace, &mut command))
}

/// Tests of every crate start the real program, but cargo tells only its own package's tests where
/// it is, and builds it only for them. An old one must not be what they find; nor an old simulated
/// driver, which tests load by its path.
///
/// Always the whole workspace, here and where tests are run: which features of a dependency are on depends on what is
/// built together, and each other choice of packages compiles most of them once more.
fn build_what_tests_run(workspace: &Workspace) -> Result<(), String> {
    run(&mut workspace.cargo(["build", "--workspace", "--lib", "--bins", "--tests"]))
}

/// Tests start the program that was just built, and meet no broker of whoever runs them.
fn in_test_environment<'a>(workspace: &Workspace, command: &'a mut Command) -> &'a mut Command {
    command.env("PARTYWALL_BIN", workspace.debug_binary()).env_remove("PARTYWALL_SOCKET").env_remove("PARTYWALL_DOMAIN")
}

fn kernels() -> Outcome {
    match ptx::check() {
        Ok(ptx::CheckOutcome::Passed { files }) => {
            println!("{files} kernel files compile to the PTX that is checked in");
            Outcome::Passed
        }
        Ok(ptx::CheckOutcome::Differs(what)) => {
            println!("{what}");
            Outcome::Failed("the PTX is not what the kernels compile to; run: cargo xtask ptx".to_owned())
        }
        Ok(ptx::CheckOutcome::Skipped(reason)) => Outcome::Skipped(reason),
        Err(message) => Outcome::Failed(message),
    }
}

struct Line {
    name: &'static str,
    time: Duration,
    outcome: Outcome,
}

fn table(lines: &[Line]) -> String {
    let width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
    let mut passed = 0;
    let mut failed = 0;
    let mut skipped = 0;
    let mut text = String::new();
    for line in lines {
        match line.outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed(_) => failed += 1,
            Outcome::Skipped(_) => skipped += 1,
        }
        let name = line.name;
        let seconds = line.time.as_secs_f64();
        text += &format!("{name:<width$}  {seconds:>7.1} s  {}\n", line.outcome);
    }
    text += &format!("\nsteps: {passed} passed, {failed} failed, {skipped} skipped");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_was_skipped_and_why() {
        let line = |name, outcome| Line { name, time: Duration::from_millis(1250), outcome };
        let text = table(&[
            line("format", Outcome::Passed),
            line("clippy", Outcome::Failed("exit status: 101".to_owned())),
            line("advisories", Outcome::Skipped("out of reach".to_owned())),
        ]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "format          1.2 s  passed");
        assert_eq!(lines[1], "clippy          1.2 s  FAILED (exit status: 101)");
        assert_eq!(lines[2], "advisories      1.2 s  skipped (out of reach)");
        assert_eq!(lines[4], "steps: 1 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn quick_is_format_clippy_and_tests() {
        let quick: Vec<_> = STEPS.iter().filter(|step| step.quick).map(|step| step.name).collect();
        assert_eq!(quick, ["format", "clippy", "tests"]);
    }
}
