//! A broker for one test, and other processes that play roles of the test.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use partywall::{Domain, Place, cuda, gpu};
use partywall_harness::Actor;

/// The option that makes this program play a role.
pub(crate) const ROLE: &str = "--role";

/// The timeout of steps that should be short.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A broker in its own directory. Dropping it ends the broker.
pub(crate) struct Broker {
    directory: PathBuf,
}

impl Broker {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = format!("partywall-gpu-tests-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        let _ = std::fs::remove_dir_all(&directory);
        Self { directory }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("test.sock")
    }

    /// Connects this process. The first connection starts the broker, which survives for a while without members.
    pub(crate) fn connect(&self) -> Result<Domain, String> {
        Domain::options().socket(self.socket()).connect().map_err(error_text)
    }

    /// Starts a process that plays `role`, after a change to the command, and waits until it is ready.
    pub(crate) fn play(&self, role: &str, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Actor {
        let program = std::env::current_exe().expect("a running program has a path");
        let mut command = Command::new(program);
        command.arg(ROLE).arg(role).args(arguments).env("PARTYWALL_SOCKET", self.socket());
        change(&mut command);
        let mut actor = Actor::spawn(&mut command);
        actor.expect("ready");
        actor
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let domain = Domain::options().socket(self.socket()).start(false).connect();
        let _ = domain.and_then(|domain| domain.stop_broker(true));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A broker and a connection of this process to it.
pub(crate) struct World {
    pub(crate) domain: Domain,
    broker: Broker,
}

impl World {
    pub(crate) fn new() -> Result<Self, String> {
        let broker = Broker::new();
        Ok(Self { domain: broker.connect()?, broker })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.broker.directory
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.broker.socket()
    }

    /// Starts a role; see [`Broker::play`].
    pub(crate) fn play(&self, role: &str, arguments: &[&str]) -> Actor {
        self.play_with(role, arguments, |_| ())
    }

    /// Starts a role after a change to its command; see [`Broker::play`].
    pub(crate) fn play_with(&self, role: &str, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Actor {
        self.broker.play(role, arguments, change)
    }
}

/// Reports that a role is ready, then waits until it is released.
pub(crate) fn ready_and_wait() {
    say("ready");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// A line for [`Actor::expect`].
#[allow(clippy::print_stdout, reason = "roles report to the test on standard output")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

/// Returns the first GPU of this process.
pub(crate) fn first_gpu() -> Result<Place, String> {
    let device = gpu::devices().map_err(error_text)?.into_iter().next().ok_or("no GPU")?;
    Ok(Place::Gpu(device.uuid().map_err(error_text)?))
}

/// Returns the free bytes of the first GPU.
pub(crate) fn free_bytes() -> Result<u64, String> {
    let driver = cuda::Driver::load().map_err(error_text)?;
    let device = cuda::Device::by_ordinal(driver, 0).map_err(error_text)?;
    let context = cuda::Context::retain(device).map_err(error_text)?;
    Ok(context.memory_info().map_err(error_text)?.free)
}

/// Polls `ask` until it returns true, or fails after the timeout.
pub(crate) fn eventually(what: &str, mut ask: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if ask()? {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(format!("{what} did not happen within {} s", TIMEOUT.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns an error as text, with its causes.
pub(crate) fn error_text(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Returns an error unless `condition` is true.
pub(crate) fn ensure(condition: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(otherwise()) }
}
