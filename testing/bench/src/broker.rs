//! A broker that runs as long as its subject: the real binary, in a private directory.

use std::{
    env,
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use partywall::Domain;
use partywall_measure::Failure;
use partywall_os::process;
use rustix::process::Signal;
use tempfile::TempDir;

/// How long the broker may take to start, and to end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running `partywall serve`. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Broker {
    /// Its supervisor.
    child: Child,
    binary: PathBuf,
    /// The pid of its worker.
    worker: u32,
    socket: PathBuf,
    directory: TempDir,
}

impl Broker {
    pub(crate) fn start() -> Result<Self, Failure> {
        let binary = binary()?;
        // A broker listens only in a directory that no other user can access.
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().prefix("partywall-bench").permissions(private).tempdir()?;
        let socket = directory.path().join("bench.sock");
        let child = Command::new(&binary)
            .args(["serve", "--domain", "bench", "--socket"])
            .arg(&socket)
            .env("XDG_STATE_HOME", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(directory.path().join("stderr"))?)
            .spawn()
            .map_err(|error| format!("{}: {error}", binary.display()))?;
        let mut broker = Self { child, binary, worker: 0, socket, directory };
        broker.await_start().map_err(|why| {
            let said = fs::read_to_string(broker.directory.path().join("stderr")).unwrap_or_default();
            format!("{} serve {why}: {}", broker.binary.display(), said.trim())
        })?;
        Ok(broker)
    }

    fn await_start(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("ended at once ({status})"));
            }
            match self.connect().and_then(|domain| Ok(domain.status()?.pid)) {
                Ok(worker) => {
                    self.worker = worker;
                    return Ok(());
                }
                Err(error) if Instant::now() > deadline => return Err(format!("does not answer ({error})")),
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Returns the pid of the process that serves.
    pub(crate) fn pid(&self) -> u32 {
        self.worker
    }

    /// Returns a command of the same program that uses this broker.
    pub(crate) fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg(subcommand).arg("--socket").arg(&self.socket).stdin(Stdio::null());
        command
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns a new connection.
    pub(crate) fn connect(&self) -> Result<Domain, Failure> {
        connect(&self.socket)
    }

    /// Ends the broker and everything that it holds.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        self.connect()?.stop_broker(true)?;
        let deadline = Instant::now() + TIMEOUT;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                return Err("the broker was asked to stop, and did not end".into());
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // After `stop` there is nothing to end. Without `stop`, a subject has failed, and its failure was reported. The
        // supervisor passes the signal on to its worker, which a kill would leave alone.
        if let Ok(None) = self.child.try_wait() {
            let _ = process::pidfd(self.child.id()).and_then(|pidfd| process::kill(pidfd, Signal::TERM));
        }
        let _ = self.child.wait();
    }
}

/// Returns a connection to the broker at `socket`, which is running.
pub(crate) fn connect(socket: &Path) -> Result<Domain, Failure> {
    Ok(Domain::options().socket(socket).start(false).connect()?)
}

/// Returns `PARTYWALL_BIN`, else `partywall` beside this program. `PATH` is not used, because the built program is to
/// be measured.
pub(crate) fn binary() -> Result<PathBuf, Failure> {
    if let Some(binary) = env::var_os("PARTYWALL_BIN").filter(|value| !value.is_empty()) {
        return Ok(binary.into());
    }
    let beside = env::current_exe()?.with_file_name("partywall");
    if beside.is_file() {
        return Ok(beside);
    }
    Err(format!("no broker to measure: PARTYWALL_BIN is not set, and {} is not there", beside.display()).into())
}
