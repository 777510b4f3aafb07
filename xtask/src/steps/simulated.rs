//! The programs that test the library on the simulated driver.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Outcome;
use super::rust::{LIBCUDA, build_what_tests_run, in_test_environment};
use crate::tools::Workspace;

/// The variable with the seed for the pauses of simulated streams.
const SEED: &str = "SIMCUDA_SEED";

/// Parts of the names of the tests that run labs and benchmarks. Tests of the command line run most of them, too.
const LABS: [&str; 2] = ["command_lab", "command_bench"];

pub(super) fn gpu_tests(workspace: &Workspace) -> Outcome {
    on_two_gpus(workspace, "gpu-tests", &LABS.map(|part| ["--skip", part]).concat()).into()
}

pub(super) fn gpu_labs(workspace: &Workspace) -> Outcome {
    on_two_gpus(workspace, "gpu-labs", &LABS).into()
}

/// Runs a selection of the program that tests real GPUs on two simulated GPUs. Their streams pause at random, so that
/// work without a proper order fails. The printed seed repeats a run.
fn on_two_gpus(workspace: &Workspace, step: &str, selection: &[&str]) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    workspace.say(&format!("{SEED}={seed}"));
    let mut command = workspace.program("partywall-gpu-tests");
    command.args(selection).arg("--report").arg(workspace.target.join(format!("simulated-{step}.json")));
    command.env(LIBCUDA, workspace.simulated_driver()).env(SEED, seed.to_string());
    command.env("SIMCUDA_DEVICES", "2").env("SIMCUDA_DELAY", "300");
    workspace.run(in_test_environment(workspace, &mut command))
}

/// Fails each function of the driver in each public operation, and kills a process there.
pub(super) fn faults(workspace: &Workspace) -> Outcome {
    fail(workspace, "faults", &["--first"]).into()
}

/// Fails each driver call of each public operation, and kills a process at each. An operation calls most functions
/// several times, so this takes five times as long.
pub(super) fn all_faults(workspace: &Workspace) -> Outcome {
    fail(workspace, "all-faults", &[]).into()
}

fn fail(workspace: &Workspace, step: &str, options: &[&str]) -> Result<(), String> {
    build_what_tests_run(workspace)?;
    let mut command = workspace.program("partywall-faults");
    command.args(options).arg("--report").arg(workspace.target.join(format!("driver-{step}.json")));
    workspace.run(in_test_environment(workspace, &mut command))
}
