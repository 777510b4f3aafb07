//! An MPS server for one subject.

use std::process::Command;

use partywall::{
    Error, Location,
    error::MpsFault,
    mps::{MpsDaemon, MpsHold, PIPES},
};
use partywall_measure::Failure;

use crate::{bench::Bench, broker::Broker};

/// A daemon, which starts a server for its first client. Dropping it ends both. All clients must have ended before. If
/// this process is killed, the daemon ends by itself once it has no clients.
#[derive(Debug)]
pub(super) struct Mps {
    daemon: MpsDaemon,
    _hold: MpsHold,
}

impl Mps {
    /// Starts a daemon beside the broker's socket, or notes why this machine cannot run one.
    pub(super) fn start(bench: &Bench<'_>, broker: &Broker) -> Result<Option<Self>, Failure> {
        let location = Location::find(None, Some(broker.socket()))?;
        let daemon = MpsDaemon::of(&location).program(std::env::current_exe()?);
        match daemon.start_held() {
            Ok(hold) => Ok(Some(Self { daemon, _hold: hold })),
            Err(Error::Mps(why @ MpsFault::NoProgram { .. })) => {
                bench.note(format!("{}: without MPS: {why}", bench.subject.get()));
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the value of [`PIPES`] for its clients.
    pub(super) fn pipes(&self) -> String {
        self.daemon.pipes().to_string_lossy().into_owned()
    }

    /// Makes the process that the command starts a client.
    pub(super) fn serve(&self, command: &mut Command) {
        command.env(PIPES, self.pipes());
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        // If it cannot be stopped, its watcher ends it.
        let _ = self.daemon.stop(true);
    }
}
