//! NVIDIA's MPS: whether this process is under it, and a daemon for each domain.
//!
//! Without MPS the processes on a GPU take turns in time slices, and a hand-off from a kernel of one process to a
//! kernel of another takes 143 µs. Under MPS, kernels of several processes run at the same time, and it takes 5.6 µs
//! (measured on an H200). The price: a fault, or a kill in a long kernel, ends CUDA in all processes of the same
//! server, and a process's death does not prove that its GPU work is over, so its memory is quarantined.
//!
//! Another process, the MPS server, runs the GPU work of its clients. A *daemon* starts that server when the first
//! client comes. [`MpsDaemon`] runs the vendor's daemon in a directory of its own beside the domain's socket, and a
//! *watcher* stops it when no process needs it any more. It neither touches a daemon in another directory nor changes
//! the compute mode of a GPU. The broker has no part in this; it only records which daemon each member reports.
//!
//! A process becomes a client if `CUDA_MPS_PIPE_DIRECTORY` names the daemon's directory when its CUDA driver is
//! initialised. `partywall run --mps COMMAND` starts a command so, and the Python package's `connect(mps=True)` sets
//! the variable for its own process. A Rust program cannot set it safely once it has threads;
//! [`DomainOptions::mps`](crate::DomainOptions::mps) therefore only checks.
//!
//! | module | content |
//! |---|---|
//! | `client` | this process becomes a client |
//! | `control` | the vendor's control program: one request and its answer |
//! | `directory` | the daemon's directory, and the locks in it |
//! | `daemon` | [`MpsDaemon`]: start, stop, status |
//! | `watcher` | the process that starts the daemon, and stops it |

mod client;
mod control;
mod daemon;
mod directory;
mod watcher;

use std::path::{Path, PathBuf};

use partywall_cuda::{Device, DeviceAttribute};
use partywall_os::{Errno, environment, socket};

pub use self::{
    daemon::{MpsDaemon, MpsServer, MpsStarted, MpsStatus},
    directory::MpsHold,
    watcher::Watched,
};
use crate::error::{MpsFault, Result};

/// The environment variable that names the directory in which a process looks for its daemon.
pub const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Returns the directory in which this process would look for an MPS daemon.
pub fn pipes() -> PathBuf {
    chosen_pipes().unwrap_or_else(|| PathBuf::from("/tmp/nvidia-mps"))
}

/// Returns whether an MPS daemon listens in this directory.
pub fn is_served(pipes: &Path) -> bool {
    // The daemon's socket may be of another type than ours. The kernel reports that only while a process has it open.
    matches!(socket::connect(&pipes.join(CONTROL_SOCKET)), Ok(_) | Err(Errno::PROTOTYPE))
}

/// Fails unless a daemon listens in this directory that accepts this user.
///
/// # Errors
/// [`MpsFault::NoDaemon`], [`MpsFault::User`].
pub(crate) fn check(pipes: &Path) -> Result<()> {
    check_owner(pipes)?;
    if is_served(pipes) { Ok(()) } else { Err(MpsFault::NoDaemon { pipes: pipes.to_owned() }.into()) }
}

/// Returns whether this process uses the device through an MPS server. If the driver cannot answer, returns whether an
/// MPS daemon listens where this process would look for one.
pub(crate) fn serves(device: &Device) -> bool {
    is_client(device).unwrap_or_else(|| is_served(&pipes()))
}

/// Returns whether the driver of this process is an MPS client; `None` if the driver does not know the attribute.
pub(crate) fn is_client(device: &Device) -> Option<bool> {
    device.attribute(DeviceAttribute::MPS_ENABLED).ok().map(|value| value != 0)
}

/// Returns the directory that the environment of this process names.
fn chosen_pipes() -> Option<PathBuf> {
    environment::place(PIPES).map(PathBuf::from)
}

/// Refuses the daemon of another user. One of root serves every user.
fn check_owner(pipes: &Path) -> Result<()> {
    let ours = rustix::process::geteuid().as_raw();
    // The socket, or if this user may not enter the directory, the directory.
    let found = rustix::fs::stat(pipes.join(CONTROL_SOCKET)).or_else(|_| rustix::fs::stat(pipes));
    match found.map(|stat| stat.st_uid) {
        Ok(theirs) if !accepts(theirs, ours) => Err(MpsFault::User { pipes: pipes.to_owned(), theirs, ours }.into()),
        // Nothing is there: asking the daemon reports that.
        _ => Ok(()),
    }
}

/// Returns whether a daemon of user `theirs` accepts clients of user `ours`.
fn accepts(theirs: u32, ours: u32) -> bool {
    theirs == ours || theirs == 0
}

/// The daemon's socket, in its directory.
const CONTROL_SOCKET: &str = "control";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Domain, Error};

    #[test]
    fn mps_daemon_is_found_only_while_it_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        assert!(!is_served(directory.path()));
        let socket = std::os::unix::net::UnixListener::bind(&control).unwrap();
        assert!(is_served(directory.path()));
        drop(socket);
        assert!(!is_served(directory.path()), "only the file is left");
    }

    // Holds 239.
    #[test]
    fn program_that_wants_mps_connects_only_where_a_daemon_listens() {
        let directory = tempfile::tempdir().unwrap();
        let refused = check(directory.path()).unwrap_err();
        assert!(matches!(refused, Error::Mps(MpsFault::NoDaemon { .. })), "{refused}");
        let _daemon = std::os::unix::net::UnixListener::bind(directory.path().join("control")).unwrap();
        check(directory.path()).unwrap();

        let socket = directory.path().join("none.sock");
        let refused = Domain::options().socket(&socket).start(false).mps(true).connect().unwrap_err();
        // The machine may run a daemon where this process would look for one; then the missing broker is the reason.
        let is_expected = match is_served(&pipes()) {
            true => matches!(refused, Error::Unreachable(_)),
            false => matches!(refused, Error::Mps(MpsFault::NoDaemon { .. })),
        };
        assert!(is_expected, "{refused}");
    }

    // Holds 239.
    #[test]
    fn daemon_of_another_user_is_refused_unless_it_is_root() {
        assert!(accepts(1000, 1000) && accepts(0, 1000));
        assert!(!accepts(1001, 1000) && !accepts(1001, 0));
        let directory = tempfile::tempdir().unwrap();
        check_owner(directory.path()).unwrap();
        check_owner(&directory.path().join("nothing")).unwrap();
    }
}
