//! `partywall serve --replace`: has the running broker continue as this program.
//!
//! With `--json` as `serve`.

use std::{os::fd::AsFd, path::Path};

use partywall::{Error, ErrorKind, Location, error::Unreachable};
use partywall_broker::replacement::this_program;
use rustix::fs::stat;

use super::ReadyMessage;
use crate::{Context, failure::Failure};

/// Asks the broker, and waits until it serves again.
pub(super) fn run(context: &Context, location: &Location) -> Result<(), Failure> {
    let program = this_program().map_err(|errno| Failure::system("opening this program through /proc", errno))?;
    let options = context.options().start(false).operator(true);
    let domain = options.connect().map_err(|error| match error {
        Error::Unreachable(Unreachable::Version { .. }) => {
            let advice = "members of that broker speak its protocol, so it cannot continue as this program: \
                          `partywall stop --force` ends it, and drops all names";
            Failure::from(error).with_advice(advice)
        }
        other => other.into(),
    })?;
    domain.replace_broker(program.as_fd())?;
    // The worker that has answered reads no further request.
    let status = domain.status()?;
    let is_ours =
        status.supervisor.is_some_and(|pid| identity(format!("/proc/{pid}/exe")) == identity("/proc/self/exe"));
    if !is_ours {
        let message = "the broker was not replaced: this program did not serve, and the former one goes on";
        return Err(Failure::new(ErrorKind::Refused, message, "`partywall logs` shows the reason"));
    }
    let ready = ReadyMessage {
        pid: status.pid,
        supervisor: status.supervisor.unwrap_or_default(),
        location,
        log: status.log.as_deref().map(Path::new),
    };
    context.output().announce(ready.text(), &ready.json());
    Ok(())
}

/// Returns which file this is. `None` if it cannot be seen.
fn identity(path: impl AsRef<Path>) -> Option<(u64, u64)> {
    stat(path.as_ref()).ok().map(|stat| (stat.st_dev, stat.st_ino))
}
