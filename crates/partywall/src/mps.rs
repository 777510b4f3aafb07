//! Whether the GPUs of this process are shared by MPS: another process, the server, then does its work for it, and goes on
//! with it after its death.

use std::path::{Path, PathBuf};

use partywall_cuda::{Device, DeviceAttribute};
use partywall_os::{Errno, socket};

/// Whether a process that uses this device does so through an MPS server. Where the driver has no answer, it does if there
/// is one that it could use.
pub(crate) fn serves(device: &Device) -> bool {
    is_client(device).unwrap_or_else(|| listens(&pipes()))
}

/// Whether the driver of this process has become a client. A driver that does not know the question has no answer.
pub(crate) fn is_client(device: &Device) -> Option<bool> {
    device.attribute(DeviceAttribute::MPS_ENABLED).ok().map(|value| value != 0)
}

/// Where this process would look for an MPS daemon.
pub(crate) fn pipes() -> PathBuf {
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|it| !it.is_empty());
    pipes.map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from)
}

/// Whether an MPS daemon listens there. A socket of another type than ours answers so only if somebody has it open.
pub(crate) fn listens(pipes: &Path) -> bool {
    matches!(socket::connect(&pipes.join("control")), Ok(_) | Err(Errno::PROTOTYPE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mps_daemon_is_found_by_its_listening_process() {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        assert!(!listens(directory.path()));
        let socket = std::os::unix::net::UnixListener::bind(&control).unwrap();
        assert!(listens(directory.path()));
        drop(socket);
        assert!(!listens(directory.path()), "only the file is left");
    }
}
