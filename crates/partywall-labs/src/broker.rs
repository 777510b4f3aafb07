//! The broker of a lab. The lab may kill it, and its names are separate from those of the user's broker.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use partywall::{Domain, Error, ErrorKind, cuda::Stream};
use partywall_os::socket::{self, Ready};

use crate::{Context, context::open_directory, failure::Failure};

/// A broker that ends when this value is dropped, or when this process ends.
#[derive(Debug)]
pub(super) struct Broker {
    child: Child,
    directory: PathBuf,
    socket: PathBuf,
}

impl Broker {
    /// Starts a broker and waits until it is ready.
    pub(super) fn start(context: &Context, lab: &str) -> Result<Self, Failure> {
        let directory = context.lab_directory(&format!("{lab}-{}", std::process::id()))?;
        open_directory(&directory)?;
        let socket = directory.join("broker.sock");
        let system = |source| Error::System { what: "starting a broker for the lab".into(), source };
        let mut command = Command::new(std::env::current_exe().map_err(system)?);
        command.args(["serve", "--of-a-lab", &std::process::id().to_string(), "--socket"]).arg(&socket);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let child = command.spawn().map_err(system)?;
        // From here on, dropping it removes the process and its directory.
        let mut broker = Self { child, directory, socket };
        let ready = broker.child.stdout.take().filter(|output| {
            let deadline = Instant::now() + TIMEOUT;
            matches!(socket::wait(output, Ready::Read, Some(deadline)), Ok(true))
        });
        match ready.and_then(|output| BufReader::new(output).lines().next()).transpose().map_err(system)? {
            Some(_) => Ok(broker),
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

    /// Returns its directory, which is removed with it.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Kills the broker (SIGKILL).
    pub(super) fn kill(&mut self) {
        // The pid stays valid until the child has been waited for; `Child` sends nothing afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Connects to the broker of a lab. A missing broker is not started.
pub(super) fn connect(socket: &Path) -> Result<Domain, Failure> {
    Ok(Domain::options().socket(socket).start(false).connect()?)
}

/// Prepares what the library needs for waits of streams for timelines. Call it before a stream waits for anything:
/// registering memory with the driver might otherwise wait for that stream. An error is ignored here; the first real use
/// reports it.
pub(super) fn prepare(domain: &Domain, stream: &Stream) {
    let Ok(writer) = domain.timeline_writer(&format!("ready/{}", std::process::id())) else { return };
    if writer.signal_on(stream.as_ref(), 1).is_ok() {
        let _ = stream.synchronize();
    }
    writer.close();
}

/// How long a broker may take to become ready.
const TIMEOUT: Duration = Duration::from_secs(20);
