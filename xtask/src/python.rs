//! The Python package: built, installed into a virtual environment of its own, and tested.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::tools::{Workspace, run, run_within};

/// How long the packages that tests need may take to arrive before they count as out of reach.
const FETCH_LIMIT: Duration = Duration::from_secs(600);

/// Whether there is a Python that the package supports, with what makes virtual environments.
pub(crate) fn is_here() -> bool {
    let mut python = Command::new("python3");
    python.args(["-c", "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"]);
    python.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// A virtual environment, made anew.
pub(crate) struct Environment<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Environment<'a> {
    /// One with everything that tests need but the package itself, from the package index.
    pub(crate) fn fresh(workspace: &'a Workspace) -> Result<Self, String> {
        let folder = workspace.target.join("python");
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
        let this = Self { workspace, folder };
        let words = "-m pip install --quiet --disable-pip-version-check -r python/tests/requirements.txt";
        run_within(FETCH_LIMIT, &mut this.python(words))?;
        Ok(this)
    }

    /// Builds the package as its users do, but unoptimised, and installs it.
    pub(crate) fn install(&self) -> Result<(), String> {
        let words = "-m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps ./python";
        run(self.python(words).env("PARTYWALL_PROFILE", "dev"))
    }

    /// Builds the wheel for other machines into `folder`.
    pub(crate) fn wheel(&self, profile: &str, folder: &Path) -> Result<(), String> {
        let words = "-m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps ./python -w";
        // Named after the oldest C library that it works with, which maturin finds out.
        let mut command = self.python(words);
        command.arg(folder).env("PARTYWALL_PROFILE", profile).env("MATURIN_PEP517_ARGS", "--compatibility pypi");
        run(&mut command)
    }

    /// Checks types, those of the stubs that the build has made included, and these against what was built.
    pub(crate) fn check_types(&self) -> Result<(), String> {
        run(&mut self.python("-m mypy --config-file python/pyproject.toml -p partywall"))?;
        run(&mut self.python("-m mypy.stubtest --mypy-config-file python/pyproject.toml partywall._native"))?;
        run(&mut self.python("-m mypy --config-file python/pyproject.toml python/examples"))?;
        run(&mut self.python("-m mypy --config-file python/pyproject.toml benches/peers"))
    }

    /// Runs tests.
    pub(crate) fn test(&self, folder: &str, variables: &[(&str, PathBuf)]) -> Result<(), String> {
        let mut command = self.python("-m pytest -p no:cacheprovider");
        command.arg(folder).envs(variables.iter().map(|(name, value)| (name, value)));
        run(&mut command)
    }

    /// Its Python. Tests meet the program that the package brings along, and no broker of whoever runs them.
    fn python(&self, words: &str) -> Command {
        let programs = self.folder.join("bin");
        let mut command = Command::new(programs.join("python"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(programs).chain(std::env::split_paths(&path)));
        command.args(words.split(' ')).current_dir(&self.workspace.root).env("PYTHONDONTWRITEBYTECODE", "1");
        if let Ok(path) = path {
            command.env("PATH", path);
        }
        for variable in ["PARTYWALL_BIN", "PARTYWALL_SOCKET", "PARTYWALL_DOMAIN"] {
            command.env_remove(variable);
        }
        command
    }
}
