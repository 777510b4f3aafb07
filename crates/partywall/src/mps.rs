//! Detects whether this process uses its GPUs through MPS.
//!
//! Under MPS another process, the MPS server, runs the GPU work of its clients. That work may go on after a client's death.

use std::path::{Path, PathBuf};

use partywall_cuda::{Device, DeviceAttribute};
use partywall_os::{Errno, socket};

/// Returns whether this process uses the device through an MPS server. If the driver cannot answer, returns whether an MPS
/// daemon listens where this process would look for one.
pub(crate) fn serves(device: &Device) -> bool {
    is_client(device).unwrap_or_else(|| listens(&pipes()))
}

/// Returns whether the driver of this process is an MPS client; `None` if the driver does not know the attribute.
pub(crate) fn is_client(device: &Device) -> Option<bool> {
    device.attribute(DeviceAttribute::MPS_ENABLED).ok().map(|value| value != 0)
}

/// Returns the directory in which this process would look for an MPS daemon.
pub(crate) fn pipes() -> PathBuf {
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|it| !it.is_empty());
    pipes.map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from)
}

/// Returns whether an MPS daemon listens in this directory.
pub(crate) fn listens(pipes: &Path) -> bool {
    // The daemon's socket may be of another type than ours. The kernel reports that only while a process has it open.
    matches!(socket::connect(&pipes.join("control")), Ok(_) | Err(Errno::PROTOTYPE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mps_daemon_is_found_only_while_it_listens() {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        assert!(!listens(directory.path()));
        let socket = std::os::unix::net::UnixListener::bind(&control).unwrap();
        assert!(listens(directory.path()));
        drop(socket);
        assert!(!listens(directory.path()), "only the file is left");
    }
}
