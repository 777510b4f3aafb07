//! MPS: a daemon that cannot be started, reached or stopped, and processes that cannot become its clients.

use std::{path::PathBuf, time::Duration};

use super::{
    ErrorKind, Help,
    text::{counted, seconds},
};

/// Why this process is not under MPS, or why the domain's MPS daemon did not start or stop.
///
/// Sharing works without MPS, too: a GPU then runs one process at a time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpsFault {
    /// The control program of MPS is not installed, or not on `PATH`.
    #[error("cannot run {program}: there is no such program on PATH")]
    NoProgram {
        /// The program.
        program: &'static str,
    },
    /// The daemon could not be started.
    #[error("the MPS daemon could not be started: {why}")]
    NotStarted {
        /// The message of the daemon, of the process that watches it, or of the kernel.
        why: String,
        /// The advice of the process that watches it, if any.
        advice: Option<String>,
        /// The class of the failure.
        kind: ErrorKind,
    },
    /// A daemon listens, but does not answer.
    #[error("the MPS daemon at {} does not answer within {}", pipes.display(), seconds(*after))]
    NoAnswer {
        /// Its directory of pipes.
        pipes: PathBuf,
        /// How long it had.
        after: Duration,
    },
    /// No daemon listens where this process would look for one.
    #[error("no MPS daemon listens at {}, where this process would look for one", pipes.display())]
    NoDaemon {
        /// The directory.
        pipes: PathBuf,
    },
    /// The daemon belongs to another user, whose daemons refuse this one.
    #[error("the MPS daemon at {} belongs to user {theirs}, this process to user {ours}", pipes.display())]
    User {
        /// Its directory of pipes.
        pipes: PathBuf,
        /// Its user.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// The CUDA driver reads the daemon's directory when it is initialised, and it has been initialised before.
    #[error("the CUDA driver of this process is initialised already, so the process cannot become a client of MPS")]
    Initialized,
    /// The daemon has clients, or processes that rely on it.
    #[error(
        "the MPS daemon at {} is in use by {}{}",
        pipes.display(),
        counted(clients.len() as u64, "client"),
        if *held { ", and held for processes that may still become clients" } else { "" }
    )]
    InUse {
        /// Its directory of pipes.
        pipes: PathBuf,
        /// The pids of its clients.
        clients: Vec<u32>,
        /// True if a command of `partywall run --mps` or a process that connected with `mps=True` still runs.
        held: bool,
    },
    /// The path of the directory is too long for the sockets that the daemon makes in it.
    #[error("cannot run an MPS daemon in {}: its sockets have paths of at most {most} bytes", pipes.display())]
    PathTooLong {
        /// The directory.
        pipes: PathBuf,
        /// The kernel's limit.
        most: usize,
    },
}

impl MpsFault {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self) -> Help {
        match self {
            Self::NoProgram { .. } => ErrorKind::NotFound.help("mps-not-installed", "NotUnderMps", "install it with the driver (Debian: nvidia-cuda-mps; containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility), or go on without MPS: sharing works, and processes take turns on a GPU"),
            Self::NotStarted { advice: Some(advice), kind, .. } => kind.help("mps-not-started", "NotUnderMps", advice.clone()),
            Self::NotStarted { kind, .. } => kind.help("mps-not-started", "NotUnderMps", "check that `nvidia-smi` works, then run `nvidia-cuda-mps-control -f` to see why; a longer `partywall mps start --timeout` gives it more time"),
            Self::NoAnswer { .. } => ErrorKind::TimedOut.help("mps-no-answer", "NotUnderMps", "try again; `partywall mps stop --force` ends the domain's daemon, and its log says more (`partywall mps status`)"),
            Self::NoDaemon { .. } => ErrorKind::Refused.help("mps-no-daemon", "NotUnderMps", "start this program with `partywall run --mps COMMAND`, or unset CUDA_MPS_PIPE_DIRECTORY where it names another daemon"),
            Self::User { .. } => ErrorKind::Refused.help("mps-wrong-user", "NotUnderMps", "unset CUDA_MPS_PIPE_DIRECTORY and run a daemon of your own with `partywall mps start`"),
            Self::Initialized => ErrorKind::Refused.help("mps-too-late", "NotUnderMps", "connect before torch or another library uses the GPU, or start the program with `partywall run --mps COMMAND`"),
            Self::InUse { clients, .. } => ErrorKind::Refused.help("mps-in-use", "NotUnderMps", "end them first; `partywall mps stop --force` ends CUDA in all of them").about(clients.first().copied()),
            Self::PathTooLong { .. } => ErrorKind::Usage.help("mps-path-too-long", "NotUnderMps", "choose a shorter --socket, or a shorter $XDG_RUNTIME_DIR"),
        }
    }
}
