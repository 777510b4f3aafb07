//! A broker of a test's own, and other processes that play a role in the test.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use partywall::{Domain, Place, cuda, gpu};

/// The option that makes this program play a role.
pub(crate) const ROLE: &str = "--role";

/// The timeout of steps that should be short.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A broker in a directory of its own. Dropping it ends the broker.
pub(crate) struct World {
    pub(super) directory: PathBuf,
    pub(crate) domain: Domain,
}

impl World {
    pub(crate) fn new() -> Result<Self, String> {
        let directory = std::env::temp_dir().join(format!("partywall-gpu-tests-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let socket = directory.join("test.sock");
        let domain = Domain::options().socket(&socket).connect().map_err(tell)?;
        Ok(Self { directory, domain })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("test.sock")
    }

    /// Starts a process that plays `role` and waits until it says that it is ready.
    pub(crate) fn play(&self, role: &str, arguments: &[&str]) -> Result<Actor, String> {
        self.play_with(role, arguments, |_| ())
    }

    /// As [`World::play`], with a change to the command first.
    pub(crate) fn play_with(
        &self,
        role: &str,
        arguments: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Result<Actor, String> {
        let mut command = Command::new(std::env::current_exe().map_err(tell)?);
        command.arg(ROLE).arg(role).args(arguments).env("PARTYWALL_SOCKET", self.socket());
        change(&mut command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(tell)?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut actor = Actor { child, output, role: role.to_owned() };
        actor.expect("ready")?;
        Ok(actor)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.domain.stop_broker(true);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A process that plays a role. Dropping it kills it.
pub(crate) struct Actor {
    child: Child,
    output: BufReader<ChildStdout>,
    role: String,
}

impl Actor {
    /// Reads lines up to one that begins with `word`, and returns the rest of that one.
    pub(crate) fn expect(&mut self, word: &str) -> Result<String, String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).map_err(tell)? == 0 {
                let status = self.child.wait().map_err(tell)?;
                return Err(format!("{} ended ({status}) before it said {word:?}", self.role));
            }
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) -> Result<(), String> {
        self.child.kill().map_err(tell)?;
        self.child.wait().map(drop).map_err(tell)
    }

    /// Lets it go on: it waits for its standard input to end.
    pub(crate) fn release(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for its good end.
    pub(crate) fn finish(mut self) -> Result<(), String> {
        self.release();
        let status = self.child.wait().map_err(tell)?;
        if status.success() { Ok(()) } else { Err(format!("{} failed: {status}", self.role)) }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // Fails only if it has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says that a role is ready, then waits until it is released.
pub(crate) fn ready_and_wait() {
    say("ready");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// A line for [`Actor::expect`].
#[allow(clippy::print_stdout, reason = "it is how roles talk to the test")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

/// Returns the first GPU of this process.
pub(crate) fn first_gpu() -> Result<Place, String> {
    let device = gpu::devices().map_err(tell)?.into_iter().next().ok_or("no GPU")?;
    Ok(Place::Gpu(device.uuid().map_err(tell)?))
}

/// Free bytes of the first GPU.
pub(crate) fn free_bytes() -> Result<u64, String> {
    let driver = cuda::Driver::load().map_err(tell)?;
    let device = cuda::Device::by_ordinal(driver, 0).map_err(tell)?;
    let context = cuda::Context::retain(device).map_err(tell)?;
    Ok(context.memory_info().map_err(tell)?.free)
}

/// Asks until `true`, or fails.
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
pub(crate) fn tell(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// An error unless `condition`.
pub(crate) fn ensure(condition: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(otherwise()) }
}
