//! The tests in Rust: which of them a step runs, by which runner and in which environment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use super::Outcome;
use crate::changes;
use crate::fuzz;
use crate::tools::{self, Package, Workspace};

/// The variable that names the library in place of the vendor's driver.
pub(super) const LIBCUDA: &str = "PARTYWALL_LIBCUDA";

/// The packages of every command: all, because others would select other features of their dependencies, and cargo
/// would compile most of them again. Only `partywall-bridge` has 250 crates of its own, and a step for itself.
pub(super) const PACKAGES: [&str; 3] = ["--workspace", "--exclude", BRIDGE];

/// The crate that no other step compiles.
const BRIDGE: &str = "partywall-bridge";

/// The examples that tests start as processes.
const EXAMPLES: [&str; 13] = [
    "consumer",
    "crash_points",
    "descriptors",
    "exercise_crash",
    "exercise_early_consumer",
    "exercise_pattern",
    "exercise_ring",
    "exercise_work_queue",
    "frames",
    "pipeline_gpu",
    "producer",
    "spans",
    "square_roots",
];

/// Parts of the names of tests that need a feature that a machine may lack, or minutes.
const NEEDS: [&str; 9] = [
    "needs_namespaces",
    "needs_python",
    "needs_no_gpu",
    "needs_root",
    "needs_systemd",
    "needs_prometheus",
    "needs_vulkan",
    "needs_cmake",
    "needs_minutes",
];

/// A part of the names of the tests that pass every crash point of something that passes many.
const SWEEP: &str = "at_every_crash_point";

/// The tests of the labs and the benchmarks.
const LABS: Selection<'_> = Selection { programs: &["lab", "render"], with: &[], without: &NEEDS, except: None };

/// A selection of tests.
#[derive(Default)]
struct Selection<'a> {
    /// The test programs; empty for all.
    programs: &'a [&'a str],
    /// Parts of names. Each selected test has one of them; empty for all.
    with: &'a [&'a str],
    /// Parts that the names of selected tests do not have.
    without: &'a [&'a str],
    /// Tests that are not selected. Only nextest can leave them out: `cargo test` runs them as well.
    except: Option<&'a Selection<'a>>,
}

impl Selection<'_> {
    /// The filter expression of nextest.
    fn expression(&self) -> String {
        let any_of = |what: &str, names: &[&str]| {
            let names = names.iter().map(|name| format!("{what}{name})")).collect::<Vec<_>>().join(" | ");
            (!names.is_empty()).then(|| format!("({names})"))
        };
        let programs = any_of("binary(=", self.programs);
        let with = any_of("test(", self.with);
        let without = self.without.iter().map(|part| format!("not test({part})"));
        let except = self.except.map(|except| format!("not ({})", except.expression()));
        programs.into_iter().chain(with).chain(without).chain(except).collect::<Vec<_>>().join(" & ")
    }

    /// The arguments of `cargo test`.
    fn arguments(&self) -> Vec<&str> {
        let mut words: Vec<_> = self.programs.iter().flat_map(|program| ["--test", program]).collect();
        if words.is_empty() {
            words.push("--all-targets");
        }
        words.push("--");
        words.extend(self.with);
        words.extend(self.without.iter().flat_map(|part| ["--skip", part]));
        words
    }
}

pub(super) fn build(workspace: &Workspace) -> Outcome {
    build_what_tests_run(workspace).into()
}

pub(super) fn tests(workspace: &Workspace) -> Outcome {
    let without: Vec<_> = NEEDS.into_iter().chain([SWEEP]).collect();
    run(workspace, &Selection { without: &without, except: Some(&LABS), ..Selection::default() }, &[]).into()
}

pub(super) fn labs(workspace: &Workspace) -> Outcome {
    run(workspace, &LABS, &[]).into()
}

pub(super) fn sweeps(workspace: &Workspace) -> Outcome {
    run_those_that(SWEEP, workspace)
}

pub(super) fn in_namespaces(workspace: &Workspace) -> Outcome {
    if !has_namespaces() {
        return Outcome::Skipped("this machine refuses namespaces".to_owned());
    }
    // Those of several hosts take devices that only root may use.
    let without: &[_] = if is_root() { &[] } else { &["needs_namespaces_hosts"] };
    run(workspace, &Selection { with: &["needs_namespaces"], without, ..Selection::default() }, &[]).into()
}

fn has_namespaces() -> bool {
    succeeds("unshare --user --map-root-user --pid --mount --fork --kill-child true".split(' '))
}

/// Tests that start processes of other users.
pub(super) fn as_root(workspace: &Workspace) -> Outcome {
    if !is_root() {
        return Outcome::Skipped("only root may start processes of other users".to_owned());
    }
    run_those_that("needs_root", workspace)
}

pub(super) fn with_python(workspace: &Workspace) -> Outcome {
    if !succeeds(["python3", "-c", "import os; os.pidfd_open"].into_iter()) {
        return Outcome::Skipped("there is no Python 3.9 or later here".to_owned());
    }
    run_those_that("needs_python", workspace)
}

/// Tests that have systemd judge the units. It need not run.
pub(super) fn with_systemd(workspace: &Workspace) -> Outcome {
    // Before 250 it judges no unit that is not loaded.
    let version = Command::new("systemd-analyze").arg("--version").output().ok().and_then(|output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace().nth(1)?.parse::<u32>().ok()
    });
    match version {
        Some(250..) => run_those_that("needs_systemd", workspace),
        Some(older) => Outcome::Skipped(format!("systemd-analyze here is of version {older}, not 250 or later")),
        None => Outcome::Skipped("there is no systemd-analyze here: apt-get install systemd".to_owned()),
    }
}

/// Tests that have Prometheus judge and scrape the metrics.
pub(super) fn with_prometheus(workspace: &Workspace) -> Outcome {
    let has = |program: &str| succeeds([program, "--version"].into_iter());
    if !has("prometheus") || !has("promtool") {
        return Outcome::Skipped("there is no Prometheus here: apt-get install prometheus".to_owned());
    }
    run_those_that("needs_prometheus", workspace)
}

/// Tests that build projects outside the repository, in C and C++.
pub(super) fn with_cmake(workspace: &Workspace) -> Outcome {
    let has = |program: &str| succeeds([program, "--version"].into_iter());
    if !has("cmake") || !has("pkg-config") {
        return Outcome::Skipped("there is no CMake here: apt-get install cmake pkg-config".to_owned());
    }
    run_those_that("needs_cmake", workspace)
}

/// The tests run on lavapipe, Vulkan's driver for CPUs, under the validation layer.
pub(super) fn with_vulkan(workspace: &Workspace) -> Outcome {
    let manifests = |variable: &str, folder: &str, name: &str| {
        let places = std::env::var_os(variable);
        let places = places.iter().flat_map(|places| std::env::split_paths(places));
        let standard =
            ["/usr/share/vulkan", "/usr/local/share/vulkan", "/etc/vulkan"].map(|at| Path::new(at).join(folder));
        // The variable names files or folders.
        places.chain(standard).any(|place| {
            let is_it = |path: &Path| path.file_name().is_some_and(|file| file.to_string_lossy().contains(name));
            let mut entries = place.read_dir().into_iter().flatten().flatten();
            is_it(&place) || entries.any(|entry| is_it(&entry.path()))
        })
    };
    let driver = manifests("VK_DRIVER_FILES", "icd.d", "lvp");
    if !driver || !manifests("VK_LAYER_PATH", "explicit_layer.d", "VkLayer_khronos_validation") {
        let what = "there is no Vulkan driver for CPUs, or no validation layer";
        return Outcome::Skipped(format!("{what}: apt-get install mesa-vulkan-drivers vulkan-validationlayers"));
    }
    run_those_that("needs_vulkan", workspace)
}

pub(super) fn without_gpu(workspace: &Workspace) -> Outcome {
    if Path::new("/dev/nvidiactl").exists() {
        return Outcome::Skipped("there is a GPU here".to_owned());
    }
    run_those_that("needs_no_gpu", workspace)
}

pub(super) fn in_minutes(workspace: &Workspace) -> Outcome {
    run_those_that("needs_minutes", workspace)
}

/// Lints and tests the bridge, which other steps leave out.
pub(super) fn bridge(workspace: &Workspace) -> Outcome {
    let run = || {
        build_what_tests_run(workspace)?;
        let lint = ["clippy", "--all-targets", "--package", BRIDGE, "--", "-D", "warnings"];
        workspace.run(&mut workspace.cargo(lint))?;
        let mut command =
            workspace.cargo(["test", "--no-fail-fast", "--package", BRIDGE, "--", "--skip", "needs_minutes"]);
        // Each host of a test is a broker and a bridge.
        command.arg("--test-threads").arg(processors().to_string());
        if !makes_hosts() {
            workspace.say("this machine makes no network namespaces: tests of the bridge that need them are skipped");
            command.args(["--skip", "needs_namespaces"]);
        }
        workspace.run(in_test_environment(workspace, &mut command))
    };
    run().into()
}

/// Builds the program of the bridge as its own tests do, and returns its path.
pub(super) fn bridge_program(workspace: &Workspace) -> Result<PathBuf, String> {
    workspace.run(&mut workspace.cargo(["test", "--no-run", "--package", BRIDGE]))?;
    Ok(workspace.target.join("debug").join(BRIDGE))
}

/// Tests the bridge for minutes: chaos, and samples that take long to cross.
pub(super) fn bridge_in_minutes(workspace: &Workspace) -> Outcome {
    if !makes_hosts() {
        return Outcome::Skipped("this machine makes no network namespaces".to_owned());
    }
    let run = || {
        build_what_tests_run(workspace)?;
        let mut command = workspace.cargo(["test", "--no-fail-fast", "--package", BRIDGE, "--", "needs_minutes"]);
        command.args(["--test-threads", "1"]);
        workspace.run(in_test_environment(workspace, &mut command))
    };
    run().into()
}

/// Returns whether tests can have several hosts here.
fn makes_hosts() -> bool {
    has_namespaces() && is_root()
}

fn run_those_that(part: &str, workspace: &Workspace) -> Outcome {
    run(workspace, &Selection { with: &[part], ..Selection::default() }, &[]).into()
}

pub(super) fn on_simulated_gpu(workspace: &Workspace) -> Outcome {
    on_simulated("cuda", workspace)
}

pub(super) fn in_simulated_pinned_memory(workspace: &Workspace) -> Outcome {
    on_simulated("pinned", workspace)
}

/// Leaves out the tests of host memory alone, and the tests whose members are made of bytes by hand.
fn on_simulated(device: &str, workspace: &Workspace) -> Outcome {
    let selection = Selection {
        programs: &["chaos", "domain", "stress", "segments"],
        without: &["host_memory", "needs_", "peers::", "imposter::"],
        ..Selection::default()
    };
    let variables = [
        (LIBCUDA, workspace.simulated_driver()),
        ("PARTYWALL_TEST_DEVICE", PathBuf::from(device)),
        // Each of thousands of small segments takes 2 MiB of address space and touches a page or two.
        ("SIMCUDA_MEMORY", PathBuf::from("64G")),
        ("SIMCUDA_NODE_MEMORY", PathBuf::from("64G")),
    ];
    run(workspace, &selection, &variables).into()
}

pub(super) fn doc_tests(workspace: &Workspace) -> Outcome {
    let run = || {
        build_what_tests_run(workspace)?;
        let mut command = workspace.cargo(["test", "--doc", "--no-fail-fast"]);
        command.args(PACKAGES);
        workspace.run(in_test_environment(workspace, &mut command))
    };
    run().into()
}

/// Runs the unit tests of the packages that changed.
///
/// Those of the packages that depend on them would take minutes to compile after a change of a low one; clippy compiles
/// all of these packages, and `test` runs their tests. One package is built alone, as while it is developed. For
/// several, cargo would select other features of their dependencies each time, so all packages are built.
pub(super) fn unit_tests_of_changes(workspace: &Workspace) -> Outcome {
    let names = match changes::packages(workspace) {
        Ok(names) if names.is_empty() => return Outcome::Skipped("no crate has changed".to_owned()),
        Ok(names) => names,
        Err(message) => return Outcome::Failed(message),
    };
    workspace.say(&format!("changed: {}", names.join(", ")));
    let mut words = Vec::new();
    let built = match &names[..] {
        [name] => {
            words.extend(["--package", name]);
            workspace.packages.iter().filter(|package| package.name == *name).collect::<Vec<_>>()
        }
        _ => {
            words.extend(PACKAGES);
            workspace.packages.iter().filter(|package| package.name != BRIDGE).collect()
        }
    };
    let mut targets: Vec<_> = built.iter().flat_map(|package| unit_tests(package)).collect();
    // Cargo takes this option once.
    targets.sort_by_key(|words| *words != [LIBRARY]);
    targets.dedup();
    if targets.is_empty() {
        return Outcome::Skipped(format!("{} has no unit tests", names.join(", ")));
    }
    words.extend(targets.concat());
    if built.len() > 1 {
        let untested = built.iter().filter(|package| unit_tests(package).is_empty());
        words.extend(untested.flat_map(|package| ["--exclude", &package.name]));
    }
    let mut command = if tools::has_nextest(workspace) {
        let expression = names.iter().map(|name| format!("package(={name})")).collect::<Vec<_>>().join(" | ");
        workspace.cargo(["nextest", "run", "--no-fail-fast", "--no-tests", "pass", "-E", &expression])
    } else {
        workspace.cargo(["test", "--no-fail-fast"])
    };
    workspace.run(in_test_environment(workspace, command.args(words))).into()
}

/// Returns the arguments that select each target of a package with unit tests. With `--lib` and `--bins` alone, cargo
/// would compile the tests of targets that have none.
fn unit_tests(package: &Package) -> Vec<Vec<&str>> {
    let targets = package.manifest["targets"].as_array().into_iter().flatten().filter(|target| target["test"] == true);
    targets
        .filter_map(|target| match target["kind"][0].as_str() {
            Some("lib") => Some(vec![LIBRARY]),
            Some("bin") => Some(vec!["--bin", target["name"].as_str()?]),
            _ => None,
        })
        .collect()
}

/// The argument that selects libraries.
const LIBRARY: &str = "--lib";

/// Runs the models of shared words, whose names contain `models`. All code is compiled with another flag, so they have
/// a target directory of their own.
pub(super) fn loom(workspace: &Workspace) -> Outcome {
    let which = ["-p", "partywall-shm", "--lib", "--target-dir"];
    let mut command = if tools::has_nextest(workspace) {
        workspace.cargo(["nextest", "run", "--no-fail-fast", "--cargo-profile", "loom"].into_iter().chain(which))
    } else {
        workspace.cargo(["test", "--no-fail-fast", "--profile", "loom"].into_iter().chain(which))
    };
    command.arg(workspace.target.join("loom")).arg("models::").env("RUSTFLAGS", "--cfg loom");
    workspace.run(&mut command).into()
}

/// Runs the tests of the crates whose `unsafe` concerns only memory, with every access checked. Miri has no toolchain
/// here and does not support memfds. The sanitizer needs an unstable flag, which a stable compiler accepts with
/// `RUSTC_BOOTSTRAP`. Build scripts are compiled without it, because a target is named.
pub(super) fn address_sanitizer(workspace: &Workspace) -> Outcome {
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
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    workspace.run(&mut command).into()
}

/// Runs each fuzz target for a few seconds.
pub(super) fn fuzz(workspace: &Workspace) -> Outcome {
    match fuzz::lacks() {
        Some(advice) => Outcome::Skipped(advice),
        None => fuzz::run_all(workspace).into(),
    }
}

/// Runs a selection of the workspace's tests.
fn run(workspace: &Workspace, selection: &Selection<'_>, variables: &[(&str, PathBuf)]) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let mut command = if tools::has_nextest(workspace) {
        let expression = selection.expression();
        let mut command =
            workspace.cargo(["nextest", "run", "--no-fail-fast", "-E", &expression, "--binaries-metadata"]);
        // Most tests wait, mainly for proofs that processes have ended.
        command.arg(test_programs(workspace)).arg("--cargo-metadata").arg(metadata(workspace));
        command.arg("--test-threads").arg((3 * processors()).to_string());
        command
    } else {
        workspace.say("cargo-nextest is not installed; cargo test runs the tests, which takes longer");
        workspace.cargo(["test", "--no-fail-fast"].into_iter().chain(PACKAGES).chain(selection.arguments()))
    };
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    workspace.run(in_test_environment(workspace, &mut command))
}

/// Builds, once a run, all tests and every program and library that they start or load.
///
/// Cargo builds the `partywall` program only for the tests of its own package, and for none the simulated driver and
/// the compiled half of the Python package. None of them may be outdated.
pub(crate) fn build_what_tests_run(workspace: &Workspace) -> Result<(), String> {
    let build = || {
        workspace.run(&mut workspace.cargo(build_of_what_tests_run()))?;
        if tools::has_nextest(workspace) {
            // With these files nextest does not call cargo, which would wait for another step that compiles or looks at
            // the registry.
            let create = |path: PathBuf| {
                File::create(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))
            };
            let mut describe = workspace.cargo(["metadata", "--format-version", "1"]);
            workspace.run_into(create(metadata(workspace))?, &mut describe)?;
            // Not `--lib`, which would compile tests of libraries that have none.
            let words = "nextest list --list-type binaries-only --message-format json --tests";
            let mut list = workspace.cargo(words.split(' '));
            workspace.run_into(create(test_programs(workspace))?, list.args(PACKAGES))?;
        }
        Ok(())
    };
    workspace.once.built.get_or_init(build).clone()
}

/// Returns the arguments of cargo for [`build_what_tests_run`].
pub(super) fn build_of_what_tests_run() -> impl Iterator<Item = &'static str> {
    let examples = EXAMPLES.iter().flat_map(|example| ["--example", example]);
    ["build", "--lib", "--bins", "--tests"].into_iter().chain(examples).chain(PACKAGES)
}

/// The file with nextest's list of the programs that contain tests.
fn test_programs(workspace: &Workspace) -> PathBuf {
    workspace.target.join("test-programs.json")
}

/// The file with cargo's description of the workspace.
fn metadata(workspace: &Workspace) -> PathBuf {
    workspace.target.join("metadata.json")
}

/// Makes tests start the program that was just built, and use no broker of the user.
pub(super) fn in_test_environment<'a>(workspace: &Workspace, command: &'a mut Command) -> &'a mut Command {
    command.env("PARTYWALL_BIN", workspace.debug_binary()).env_remove("PARTYWALL_SOCKET").env_remove("PARTYWALL_DOMAIN")
}

pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout == b"0\n")
}

fn succeeds<'a>(mut words: impl Iterator<Item = &'a str>) -> bool {
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selection_means_the_same_to_both_runners() {
        let selection = Selection { programs: &["a", "b"], with: &["c", "d"], without: &["e", "f"], except: None };
        let expression = "(binary(=a) | binary(=b)) & (test(c) | test(d)) & not test(e) & not test(f)";
        assert_eq!(selection.expression(), expression);
        assert_eq!(selection.arguments(), ["--test", "a", "--test", "b", "--", "c", "d", "--skip", "e", "--skip", "f"]);
        let others = Selection { with: &["c"], except: Some(&selection), ..Selection::default() };
        assert_eq!(others.arguments(), ["--all-targets", "--", "c"]);
        assert_eq!(others.expression(), format!("(test(c)) & not ({expression})"));
    }
}
