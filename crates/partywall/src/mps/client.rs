//! A process that becomes a client of its domain's daemon, for languages that can set a variable of a running process.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt, path::PathBuf};

use partywall_cuda::{Device, Driver};
use partywall_os::per_process::PerProcess;

use super::{MpsDaemon, MpsHold, PIPES, check, chosen_pipes, is_client};
use crate::error::{MpsFault, Result};

/// The holds of this process on daemons that it may use at any time, until it ends.
static HELD: PerProcess<Vec<(PathBuf, MpsHold)>> = PerProcess::new();

impl MpsDaemon {
    /// Makes ready that this process becomes a client: starts the daemon, unless `start` is false, and holds it until
    /// this process ends. Returns the value that the caller must give to [`PIPES`] before the CUDA driver is
    /// initialised, or `None` if the variable has its value. A variable that names another daemon is left as it is.
    ///
    /// # Errors
    /// [`MpsFault::Initialized`] if the driver is initialised already; [`MpsFault::NoDaemon`] if the variable names a
    /// directory in which no daemon listens, or without `start`; as [`start`](Self::start).
    pub fn join(&self, start: bool) -> Result<Option<PathBuf>> {
        // Locked to the end, so that threads that connect at once take one hold.
        let mut held = HELD.lock();
        let pipes = self.pipes();
        let chosen = chosen_pipes();
        if chosen.as_ref() == Some(&pipes) && held.iter().any(|(known, _)| *known == pipes) {
            return Ok(None);
        }
        if Driver::is_initialized() && !found_daemon(chosen.as_deref().map(AsRef::as_ref)) {
            return Err(MpsFault::Initialized.into());
        }
        match chosen {
            Some(other) if other != pipes => return check(&other).map(|()| None),
            _ => {}
        }
        if !start {
            check(&pipes)?;
        }
        held.push((pipes.clone(), if start { self.start_held()? } else { self.hold()? }));
        Ok(if chosen_pipes().is_none() { Some(pipes) } else { None })
    }
}

/// Returns whether the driver, which is initialised, found the daemon that the variable names now.
fn found_daemon(pipes: Option<&OsStr>) -> bool {
    is_any_client() || pipes.is_some_and(|pipes| first_value(PIPES).as_deref() == Some(pipes.as_bytes()))
}

fn is_any_client() -> bool {
    let devices = Driver::load().ok().and_then(|driver| Device::all(driver).ok());
    devices.is_some_and(|devices| devices.iter().any(|device| is_client(device) == Some(true)))
}

/// Returns the value that a variable had when this process started.
fn first_value(name: &str) -> Option<Vec<u8>> {
    let environment = fs::read("/proc/self/environ").ok()?;
    let mut values = environment.split(|byte| *byte == 0).filter_map(|it| it.strip_prefix(name.as_bytes()));
    values.find_map(|rest| Some(rest.strip_prefix(b"=")?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_value_is_that_of_the_whole_name() {
        let path = std::env::var_os("PATH").expect("tests are found by it");
        assert_eq!(first_value("PATH").as_deref(), Some(path.as_bytes()));
        assert_eq!(first_value("PAT"), None);
    }
}
