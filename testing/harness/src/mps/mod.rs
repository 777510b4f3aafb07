//! A temporary MPS control daemon, in directories of its own, and a stand-in for the vendor's.

mod stand_in;

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use rustix::process::{WaitOptions, getpid, set_child_subreaper, wait};

pub use stand_in::{Manner, StandIn, play};

/// The environment variable with the directory in which clients find their daemon.
pub const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The environment variable with the directory in which a daemon and its servers write their logs.
pub const LOGS: &str = "CUDA_MPS_LOG_DIRECTORY";

/// The control program of MPS, which starts the servers.
const CONTROL: &str = "nvidia-cuda-mps-control";
const PROGRAMS: [&str; 2] = [CONTROL, "nvidia-cuda-mps-server"];

/// Returns which program of MPS this machine lacks, if it lacks one.
pub fn missing() -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    PROGRAMS.into_iter().find(|program| !std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// Runs a daemon until `until` returns. Returns the logs of the daemon and its servers after they have ended. Call it
/// in a process that has no other children, because it waits for all children.
///
/// # Errors
/// The daemon does not start, `until` fails, or the directories cannot be made or removed.
pub fn keep(pipes: &Path, logs: &Path, until: impl FnOnce() -> Result<(), String>) -> Result<String, String> {
    let failed = |error: std::io::Error| format!("the directories of an MPS daemon: {error}");
    // The daemon and its servers detach from their parents, and then become children of this process.
    set_child_subreaper(Some(getpid())).map_err(|errno| errno.to_string())?;
    fs::create_dir_all(pipes).map_err(failed)?;
    fs::create_dir_all(logs).map_err(failed)?;
    let kept = control(pipes, logs, &["-d"], "").and_then(|()| {
        let told = until();
        // Clients that still exist get this many seconds.
        control(pipes, logs, &[], "quit -t 10\n")?;
        while wait(WaitOptions::empty()).is_ok() {}
        told
    });
    let written = ["control.log", "server.log"].map(|log| fs::read_to_string(logs.join(log)).unwrap_or_default());
    fs::remove_dir_all(logs).and_then(|()| fs::remove_dir_all(pipes)).map_err(failed)?;
    kept.map(|()| written.concat()).map_err(|error| format!("{error}\n{}", written.concat()))
}

fn control(pipes: &Path, logs: &Path, arguments: &[&str], input: &str) -> Result<(), String> {
    let mut command = Command::new(CONTROL);
    command.args(arguments).env(PIPES, pipes).env(LOGS, logs);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let told = command.spawn().and_then(|mut child| {
        let written = child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(input.as_bytes()));
        let status = child.wait()?;
        written.map(|()| status)
    });
    match told {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{CONTROL} {arguments:?} {input:?}: {status}")),
        Err(error) => Err(format!("{CONTROL} {arguments:?} {input:?}: {error}")),
    }
}
