//! A domain's MPS daemon: start, stop, status.

use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use partywall_os::environment;

use super::{
    check_owner,
    control::ControlProgram,
    directory::{Directory, MpsHold},
    is_served,
};
use crate::{
    domain::{Location, StarterFailed, broker_binary, run_starter},
    error::{Error, ErrorKind, MpsFault, Result},
};

/// NVIDIA's MPS daemon of a domain, in a directory of its own beside the domain's socket. It may or may not run.
///
/// ```no_run
/// use partywall::{Domain, mps::MpsDaemon};
///
/// # fn main() -> partywall::Result<()> {
/// let daemon = MpsDaemon::of(&Domain::options().location()?);
/// let hold = daemon.start_held()?; // keeps it running until the client below has come
/// std::process::Command::new("python").arg("train.py").env(partywall::mps::PIPES, daemon.pipes()).spawn().unwrap();
/// # drop(hold);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct MpsDaemon {
    pub(super) directory: Directory,
    location: Location,
    program: Option<PathBuf>,
    pub(super) timeout: Duration,
    pub(super) idle: Option<Duration>,
}

/// How a start went.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpsStarted {
    /// True if the daemon ran before, with a watcher.
    pub already: bool,
    /// The pid of the watcher.
    pub watcher: Option<u32>,
}

/// The state of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpsStatus {
    /// True if a daemon listens.
    pub runs: bool,
    /// True if it answers.
    pub answers: bool,
    /// The pid of the watcher. Without one, the daemon runs until it is stopped.
    pub watcher: Option<u32>,
    /// True if a process holds it ([`MpsHold`]).
    pub held: bool,
    /// Its servers. A daemon starts one when its first client comes, and keeps it.
    pub servers: Vec<MpsServer>,
}

impl MpsStatus {
    /// Returns the pids of all clients.
    pub fn clients(&self) -> Vec<u32> {
        self.servers.iter().flat_map(|server| server.clients.iter().copied()).collect()
    }
}

/// A server, which runs the GPU work of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpsServer {
    /// Its pid.
    pub pid: u32,
    /// The pids of its clients.
    pub clients: Vec<u32>,
}

impl MpsDaemon {
    /// Returns the daemon of the domain at `location`.
    #[must_use]
    pub fn of(location: &Location) -> Self {
        let directory = Directory::of(location);
        Self { directory, location: location.clone(), program: None, timeout: TIMEOUT, idle: Some(IDLE) }
    }

    /// Sets the program `partywall`, which starts and watches the daemon, as
    /// [`DomainOptions::program`](crate::DomainOptions::program) does for the broker.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Sets how long the daemon has to answer, and to end. 10 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how long a daemon that this value starts runs without clients and holds; `None` means for ever. 60 s by
    /// default.
    #[must_use]
    pub fn idle_exit(mut self, after: Option<Duration>) -> Self {
        self.idle = after;
        self
    }

    /// Returns the directory of its sockets, the value of [`PIPES`](super::PIPES) for clients.
    pub fn pipes(&self) -> PathBuf {
        self.directory.pipes()
    }

    /// Returns the directory of its logs.
    pub fn logs(&self) -> PathBuf {
        self.directory.logs()
    }

    /// Starts the daemon and its watcher, unless both run, and waits until the daemon answers. Several starts at once
    /// are one.
    ///
    /// If its client comes later, use [`start_held`](Self::start_held).
    ///
    /// # Errors
    /// [`MpsFault::NoProgram`], [`MpsFault::NotStarted`], [`MpsFault::NoAnswer`], [`MpsFault::User`],
    /// [`MpsFault::PathTooLong`]; [`Unreachable`](crate::error::Unreachable) if the directory cannot be made or is not
    /// private.
    pub fn start(&self) -> Result<MpsStarted> {
        self.directory.check()?;
        check_owner(&self.pipes())?;
        let control = self.directory.control();
        if is_served(&control.pipes) {
            self.answer(&control)?;
            if let Some(watcher) = self.directory.watcher() {
                return Ok(MpsStarted { already: true, watcher: Some(watcher) });
            }
        } else {
            // Nothing answers, so this only finds out whether the program exists.
            control.ask("get_server_list", Instant::now() + self.timeout)?;
        }
        let mut command = Command::new(broker_binary(self.program.as_deref())?);
        environment::shield(&mut command);
        command.args(["mps", "watch", "--domain", &self.location.domain, "--socket"]).arg(&self.location.socket);
        command.arg("--timeout").arg(self.timeout.as_secs_f64().to_string());
        command.arg("--idle-exit").arg(self.idle.map_or_else(|| "never".into(), |idle| idle.as_secs_f64().to_string()));
        // The watcher waits for a lock and then for the daemon, each as long as the timeout, and reports what was too
        // long.
        run_starter(&mut command, self.timeout * 2 + SLACK).map_err(|StarterFailed { why, advice, code }| {
            let kind = if code == Some(TIMED_OUT) { ErrorKind::TimedOut } else { ErrorKind::Device };
            MpsFault::NotStarted { why, advice, kind }
        })?;
        self.answer(&control)?;
        Ok(MpsStarted { already: false, watcher: self.directory.watcher() })
    }

    /// Starts the daemon as [`start`](Self::start) does, and [holds](Self::hold) it. For a process that becomes a
    /// client later, or whose children do.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_held(&self) -> Result<MpsHold> {
        // Held before it is asked for: it could stop between its answer and the hold.
        let hold = self.hold()?;
        match self.start() {
            Ok(_) => Ok(hold),
            Err(error) => {
                drop(hold);
                if !is_served(&self.pipes())
                    && let Ok(Some(_lock)) = self.directory.try_lock(Instant::now())
                {
                    // Removes the directory that the hold has created. The first error is the one to report.
                    let _ = self.directory.remove();
                }
                Err(error)
            }
        }
    }

    /// Keeps the daemon from being stopped because it is idle, as long as the returned value lives. Waits while the
    /// daemon is being stopped.
    ///
    /// # Errors
    /// As for the directory in [`start`](Self::start).
    pub fn hold(&self) -> Result<MpsHold> {
        self.directory.hold(Instant::now() + self.timeout + SLACK)
    }

    /// Stops the daemon and its servers, and removes its directory. Returns false if no daemon ran. With `force`, ends
    /// it while it has clients, too; CUDA ends in all of them.
    ///
    /// # Errors
    /// [`MpsFault::InUse`] without `force`; [`MpsFault::NoAnswer`] for a daemon that does not end in time;
    /// [`MpsFault::NoProgram`].
    pub fn stop(&self, force: bool) -> Result<bool> {
        if !self.directory.exists() {
            return Ok(false);
        }
        let lock = self.directory.lock(Instant::now() + self.timeout + SLACK)?;
        let runs = is_served(&self.pipes());
        if runs {
            if !force {
                let status = self.status()?;
                let clients = status.clients();
                if !clients.is_empty() || status.held {
                    return Err(MpsFault::InUse { pipes: self.pipes(), clients, held: status.held }.into());
                }
                if !status.answers {
                    return Err(self.silent());
                }
            }
            self.end()?;
        }
        self.directory.remove()?;
        drop(lock);
        // The watcher finds no daemon any more.
        let deadline = Instant::now() + SLACK;
        while self.directory.watcher().is_some() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        Ok(runs)
    }

    /// Returns the state of the daemon.
    ///
    /// # Errors
    /// [`MpsFault::NoProgram`] if it runs and cannot be asked.
    pub fn status(&self) -> Result<MpsStatus> {
        let control = self.directory.control();
        let held = self.directory.is_held();
        let mut status =
            MpsStatus { runs: is_served(&control.pipes), answers: false, watcher: None, held, servers: Vec::new() };
        if !status.runs {
            return Ok(status);
        }
        status.watcher = self.directory.watcher();
        let deadline = Instant::now() + self.timeout;
        let Some(servers) = control.servers(deadline)? else { return Ok(status) };
        status.answers = true;
        for pid in servers {
            let clients = control.clients(pid, deadline)?.unwrap_or_default();
            status.servers.push(MpsServer { pid, clients });
        }
        Ok(status)
    }

    /// Returns the error for a daemon that runs and does not answer.
    pub fn silent(&self) -> Error {
        MpsFault::NoAnswer { pipes: self.pipes(), after: self.timeout }.into()
    }

    /// Ends the daemon, and waits for that. Called under the lock.
    pub(super) fn end(&self) -> Result<()> {
        let control = self.directory.control();
        let deadline = Instant::now() + self.timeout + SLACK;
        // Clients that still exist get this many seconds.
        control.ask(&format!("quit -t {}", GRACE.as_secs()), deadline)?;
        while is_served(&control.pipes) {
            if Instant::now() >= deadline {
                return Err(self.silent());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Asks the daemon until it answers.
    pub(super) fn answer(&self, control: &ControlProgram) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        while Instant::now() < deadline {
            if is_served(&control.pipes) && control.servers(deadline)?.is_some() {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        Err(self.silent())
    }
}

/// The exit code of `partywall` for [`ErrorKind::TimedOut`].
const TIMED_OUT: i32 = 7;

/// How long a daemon has to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a daemon runs without clients and holds.
const IDLE: Duration = Duration::from_secs(60);

/// How long clients have to end when their daemon ends.
const GRACE: Duration = Duration::from_secs(5);

/// How much longer than its timeout something may take that contains it.
const SLACK: Duration = Duration::from_secs(10);

const POLL: Duration = Duration::from_millis(20);
