//! An MPS server for one subject.

use std::{os::unix::process::CommandExt, path::PathBuf, process::Command};

use partywall_harness::mps;
use partywall_measure::Failure;
use tempfile::TempDir;

use crate::{
    process::{Line, Process},
    role,
};

/// A daemon, which starts a server for its first client. Dropping it ends both. All clients must have ended before.
#[derive(Debug)]
pub(crate) struct Mps {
    _keeper: Process,
    directory: TempDir,
}

impl Mps {
    /// Returns why this machine cannot run a daemon.
    pub(crate) fn missing() -> Option<String> {
        mps::missing().map(|program| format!("there is no {program}"))
    }

    pub(crate) fn start() -> Result<Self, Failure> {
        let directory = tempfile::Builder::new().prefix("pw-mps").tempdir()?;
        let mut command = role::command(role::MPS, [directory.path()])?;
        // In a process group of its own: if the benchmark is interrupted, this process survives and ends the daemon.
        let mut keeper = Process::start(command.process_group(0))?;
        keeper.receive()?;
        Ok(Self { _keeper: keeper, directory })
    }

    /// Makes the process that the command starts a client.
    pub(crate) fn serve(&self, command: &mut Command) {
        command.env(mps::PIPES, pipes(self.directory.path().into()));
    }
}

/// The role of the process that keeps the daemon running until its line ends.
pub(crate) fn keep(directory: PathBuf) -> Result<(), Failure> {
    let mut line = Line::of_this_process_that_ends_itself()?;
    let until = || {
        line.send("started").map_err(|error| error.to_string())?;
        line.receive(None).map(drop).map_err(|error| error.to_string())
    };
    mps::keep(&pipes(directory.clone()), &directory.join("log"), until)?;
    Ok(())
}

fn pipes(directory: PathBuf) -> PathBuf {
    directory.join("pipe")
}
