//! The broker of a lab. The lab may kill it, and its names are separate from those of the user's broker.

use std::{
    io::{self, BufRead, BufReader},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use partywall::{Domain, ErrorKind, cuda::Stream};
use partywall_os::{
    dir::PrivateDir,
    process,
    socket::{self, Ready},
};
use rustix::process::Signal;

use crate::{
    Context,
    failure::{Doing, Failure},
};

/// A broker that ends when this value is dropped, or when this process ends.
#[derive(Debug)]
pub struct Broker {
    /// The supervisor.
    child: Child,
    /// The pid of the first worker, and the worker itself, once it is ready.
    pid: u32,
    worker: Option<OwnedFd>,
    directory: PathBuf,
    socket: PathBuf,
}

impl Broker {
    /// Starts a broker and waits until it is ready.
    pub(super) fn start(context: &Context, lab: &str) -> Result<Self, Failure> {
        let directory = context.lab_directory(&format!("{lab}-{}", std::process::id()))?;
        // The broker makes its own directory: if this process were killed in between, nobody would remove it. The
        // directory of the user's broker may be missing. If it cannot be created, the broker fails.
        let _ = directory.parent().map(|parent| PrivateDir::open(parent, true));
        let socket = directory.join("broker.sock");
        let mut command = Command::new(std::env::current_exe().doing(STARTING)?);
        command.args(["--json", "serve", "--of-a-lab", &std::process::id().to_string(), "--socket"]).arg(&socket);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().doing(STARTING)?;
        // From here on, dropping it removes the process and its directory.
        let mut broker = Self { child, pid: 0, worker: None, directory, socket };
        let ready = broker.child.stdout.take().filter(|output| {
            let deadline = Instant::now() + TIMEOUT;
            matches!(socket::wait(output, Ready::Read, Some(deadline)), Ok(true))
        });
        match ready.and_then(|output| BufReader::new(output).lines().next()).transpose().doing(STARTING)? {
            Some(line) => {
                let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
                if let (Some(message), Some(advice)) =
                    (ready["error"]["message"].as_str(), ready["error"]["advice"].as_str())
                {
                    return Err(Failure::new(ErrorKind::Refused, message, advice));
                }
                let pid = ready["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                broker.pid = pid.unwrap_or_default();
                broker.worker = pid.and_then(|pid| process::pidfd(pid).ok());
                Ok(broker)
            }
            None => Err(Failure::new(
                ErrorKind::Unreachable,
                "the lab's broker did not become ready",
                format!("see what `partywall serve --socket {}` says", broker.socket.display()),
            )),
        }
    }

    /// Returns the path of its socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the pid of the process that serves first.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a command of this program that uses the broker.
    pub(super) fn command(&self, subcommand: &str) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(subcommand).arg("--socket").arg(&self.socket).stdin(Stdio::null());
        Ok(command)
    }

    /// Returns a new connection to it.
    pub(super) fn connect(&self) -> Result<Domain, Failure> {
        connect(&self.socket)
    }

    /// Returns its directory, which is removed with it.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Kills the broker's present worker (SIGKILL), which its supervisor replaces. Returns its pid.
    pub fn kill_worker(&mut self, domain: &Domain) -> Result<u32, Failure> {
        let pid = domain.status()?.pid;
        let worker = process::pidfd(pid).doing(KILLING)?;
        // Once it has answered, the worker begins the request that waited behind this one. Killed at that moment twice
        // in a row, it dies twice in the same request, which a third worker refuses.
        thread::sleep(PAUSE);
        process::kill(&worker, Signal::KILL).doing(KILLING)?;
        Ok(pid)
    }

    /// Kills the broker for good (SIGKILL): the supervisor, which would restart the worker, and then the worker.
    pub(super) fn kill(&mut self) {
        // The pid stays valid until the child has been waited for; `Child` sends nothing afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(worker) = self.worker.take() {
            let _ = process::kill(worker, Signal::KILL);
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // The supervisor ends its present worker, which is not the first one if that was killed. A supervisor whose end
        // was waited for has no pid any more.
        if matches!(self.child.try_wait(), Ok(None))
            && let Ok(supervisor) = process::pidfd(self.child.id())
            && process::kill(&supervisor, Signal::TERM).is_ok()
        {
            let _ = socket::wait(&supervisor, Ready::Read, Some(Instant::now() + TIMEOUT));
        }
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Connects to the broker of a lab. A missing broker is not started.
pub(super) fn connect(socket: &Path) -> Result<Domain, Failure> {
    Ok(Domain::options().socket(socket).start(false).connect()?)
}

/// Prepares what the library needs for waits of streams for timelines. Call it before a stream waits for anything:
/// registering memory with the driver might otherwise wait for that stream. An error is ignored here; the first real
/// use reports it.
pub(super) fn prepare(domain: &Domain, stream: &Stream) {
    let Ok(writer) = domain.timeline_writer(&format!("ready/{}", std::process::id())) else { return };
    if writer.signal_on(stream.as_ref(), 1).is_ok() {
        let _ = stream.synchronize();
    }
    writer.close();
}

const STARTING: &str = "starting a broker for the lab";
const KILLING: &str = "killing the broker's worker";

/// How long a worker that will be killed first works on.
const PAUSE: Duration = Duration::from_millis(3);

/// How long a broker may take to become ready.
const TIMEOUT: Duration = Duration::from_secs(20);
