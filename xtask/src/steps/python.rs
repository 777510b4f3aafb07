//! The Python package: built, installed into a virtual environment, and tested.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::Outcome;
use super::rust::{LIBCUDA, bridge_program, build_of_what_tests_run, build_what_tests_run, processors};
use crate::tools::Workspace;

/// The timeout for downloading the packages that tests need.
const FETCH_TIMEOUT: Duration = Duration::from_secs(600);

/// The profile for optimised builds that are faster to build than a release.
pub(super) const OPTIMISED: &str = "ci";

/// The command of cargo that builds the programs and libraries of all wheels, optimised. Each by itself would select
/// other features of shared dependencies, and compile them again.
pub(super) const OPTIMISED_BUILD: &str = "build --locked --profile ci -p partywall-cli -p partywall-python \
                                          -p partywall-fetch -p partywall-lab -p partywall-render \
                                          -p partywall-simcuda-library";

/// A server of S3, for the tests of `partywall-fetch`.
const MOTO: &str = "moto[server]==5.2.5";

/// Downloads the packages that the tests need. They include jax, which takes half a minute, but not torch, which has
/// five gigabytes.
pub(super) fn packages(workspace: &Workspace) -> Outcome {
    match environment(workspace) {
        Ok(_) => Outcome::Passed,
        Err(outcome) => outcome,
    }
}

/// Checks the types of the package, and of what uses it.
pub(super) fn types(workspace: &Workspace) -> Outcome {
    in_environment(workspace, |environment| {
        install(environment)?;
        environment.check_types()
    })
}

/// Runs the package's tests on host memory.
pub(super) fn package(workspace: &Workspace) -> Outcome {
    in_environment(workspace, |environment| {
        install(environment)?;
        environment.test_at_once("python/tests/host", &[examples(workspace)])
    })
}

/// Runs the package's tests on the simulated GPU.
pub(super) fn on_simulated_gpu(workspace: &Workspace) -> Outcome {
    in_environment(workspace, |environment| {
        install(environment)?;
        let variables = [(LIBCUDA, workspace.simulated_driver()), examples(workspace)];
        environment.test_at_once("python/tests/simulated", &variables)
    })
}

/// Names the folder of the programs in Rust that tests in Python start.
fn examples(workspace: &Workspace) -> (&'static str, PathBuf) {
    ("PARTYWALL_EXAMPLES", workspace.target.join("debug/examples"))
}

/// Tests the package together with the program that knows other hosts, which is no part of it.
pub(super) fn bridge(workspace: &Workspace) -> Outcome {
    in_environment(workspace, |environment| {
        let program = bridge_program(workspace)?;
        install(environment)?;
        environment.test_at_once("python/tests/bridge", &[("PARTYWALL_BRIDGE", program)])
    })
}

/// Builds the wheels as their users do, optimised and with programs of their own, and tests them on host memory.
pub(super) fn wheel(workspace: &Workspace) -> Outcome {
    let folder = workspace.target.join("wheels");
    in_environment(workspace, |environment| {
        environment.wheel("./python", OPTIMISED, OPTIMISED_BUILD, &folder)?;
        environment.install_wheel("partywall", &folder)?;
        environment.test_at_once("python/tests/host", &[])?;
        environment.wheel("./python/lab", OPTIMISED, OPTIMISED_BUILD, &folder)?;
        environment.install_wheel("partywall-lab", &folder)?;
        environment.test_at_once("python/tests/lab", &[])?;
        environment.wheel("./python/fetch", OPTIMISED, OPTIMISED_BUILD, &folder)?;
        environment.install_wheel("partywall-fetch", &folder)?;
        let words = "-m pip install --quiet --disable-pip-version-check";
        workspace.run_within(FETCH_TIMEOUT, environment.python(words).arg(MOTO))?;
        environment.test_at_once("python/tests/fetch", &[])
    })
}

fn in_environment(workspace: &Workspace, run: impl FnOnce(&Environment<'_>) -> Result<(), String>) -> Outcome {
    match environment(workspace) {
        Ok(environment) => run(&environment).into(),
        Err(outcome) => outcome,
    }
}

/// Installs the package, once a run.
fn install(environment: &Environment<'_>) -> Result<(), String> {
    environment.workspace.once.installed.get_or_init(|| environment.install()).clone()
}

/// Returns the environment that all steps of a run share.
fn environment(workspace: &Workspace) -> Result<Environment<'_>, Outcome> {
    if !is_here() {
        return Err(Outcome::Skipped("there is no Python 3.11 or later here".to_owned()));
    }
    let fetched = workspace.once.python.get_or_init(|| Environment::fresh(workspace).map(drop));
    fetched.clone().map_err(|message| Outcome::Skipped(format!("what its tests need is out of reach: {message}")))?;
    Ok(Environment::of(workspace))
}

/// Returns whether there is a Python that the package supports, with what makes virtual environments.
fn is_here() -> bool {
    let mut python = Command::new("python3");
    python.args(["-c", "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"]);
    python.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// A virtual environment in the target directory.
pub(crate) struct Environment<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Environment<'a> {
    /// Creates it anew with everything that tests need except the package itself, from the package index.
    pub(crate) fn fresh(workspace: &'a Workspace) -> Result<Self, String> {
        let this = Self::of(workspace);
        workspace.run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&this.folder))?;
        let words = "-m pip install --quiet --disable-pip-version-check -r python/tests/requirements.txt";
        workspace.run_within(FETCH_TIMEOUT, &mut this.python(words))?;
        Ok(this)
    }

    fn of(workspace: &'a Workspace) -> Self {
        Self { workspace, folder: workspace.target.join("python") }
    }

    /// Returns the environment with the frameworks above torch.
    pub(crate) fn of_stacks(workspace: &'a Workspace) -> Self {
        Self { workspace, folder: workspace.target.join("stacks") }
    }

    /// Creates it, and keeps what is installed in it.
    pub(crate) fn make(&self) -> Result<(), String> {
        self.workspace.run(Command::new("python3").args(["-m", "venv"]).arg(&self.folder))
    }

    /// Packs what [`build_what_tests_run`] has built, unoptimised, and installs it.
    pub(crate) fn install(&self) -> Result<(), String> {
        build_what_tests_run(self.workspace)?;
        let words = "-m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps ./python";
        let mut command = self.python(words);
        command.env("PARTYWALL_PROFILE", "dev");
        command.env("PARTYWALL_BUILD", build_of_what_tests_run().collect::<Vec<_>>().join(" "));
        self.workspace.run(&mut command)
    }

    /// Builds the wheel of a project for other machines into `folder`. `build` is the command of cargo that builds what
    /// is in it.
    pub(crate) fn wheel(&self, project: &str, profile: &str, build: &str, folder: &Path) -> Result<(), String> {
        let words = "-m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w";
        // The wheel is named after the oldest C library that it works with, which maturin determines.
        let mut command = self.python(words);
        command
            .arg(folder)
            .arg(project)
            .env("PARTYWALL_PROFILE", profile)
            .env("PARTYWALL_BUILD", build)
            .env("MATURIN_PEP517_ARGS", "--compatibility pypi");
        self.workspace.run(&mut command)
    }

    /// Installs the wheel of a folder in place of what is installed.
    fn install_wheel(&self, name: &str, folder: &Path) -> Result<(), String> {
        let words = "-m pip install --quiet --disable-pip-version-check --force-reinstall --no-index --no-deps";
        self.workspace.run(self.python(words).arg(name).arg("--find-links").arg(folder))
    }

    /// Checks the types of the package, including the stubs that the build has generated, and compares the stubs with
    /// the built module.
    fn check_types(&self) -> Result<(), String> {
        self.workspace.run(&mut self.python("-m mypy --config-file python/pyproject.toml -p partywall"))?;
        self.workspace
            .run(&mut self.python("-m mypy.stubtest --mypy-config-file python/pyproject.toml partywall._native"))?;
        self.workspace.run(
            &mut self.python("-m mypy --config-file python/pyproject.toml python/examples crates/partywall-lab/peers"),
        )
    }

    /// Runs tests.
    pub(crate) fn test(&self, folder: &str, variables: &[(&str, PathBuf)]) -> Result<(), String> {
        self.run_tests("", folder, variables)
    }

    /// Runs tests in several processes, for each test has a broker of its own. Their output is short: pytest would name
    /// the process of each test.
    fn test_at_once(&self, folder: &str, variables: &[(&str, PathBuf)]) -> Result<(), String> {
        self.run_tests(&format!(" --quiet --dist worksteal -n {}", 2 * processors()), folder, variables)
    }

    fn run_tests(&self, options: &str, folder: &str, variables: &[(&str, PathBuf)]) -> Result<(), String> {
        let mut command = self.python(&format!("-m pytest -p no:cacheprovider{options}"));
        command.arg(folder).envs(variables.iter().map(|(name, value)| (name, value)));
        self.workspace.run(&mut command)
    }

    /// Returns a command of its Python. Tests use the program in the package, and no broker of the user.
    pub(crate) fn python(&self, words: &str) -> Command {
        let programs = self.folder.join("bin");
        let mut command = Command::new(programs.join("python"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(programs).chain(std::env::split_paths(&path)));
        command.args(words.split(' ')).current_dir(&self.workspace.root).env("PYTHONDONTWRITEBYTECODE", "1");
        if let Ok(path) = path {
            command.env("PATH", path);
        }
        self.workspace.compile_as_chosen(&mut command);
        for variable in ["PARTYWALL_BIN", "PARTYWALL_SOCKET", "PARTYWALL_DOMAIN"] {
            command.env_remove(variable);
        }
        command
    }
}
