//! A broker of a test's own, and other processes that play a role in the test.

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use partywall::{DType, Domain, Segment};
use partywall_broker::{Broker, Config, StopHandle};
use partywall_harness::place;

use super::{TIMEOUT, pidfds};

/// The environment variable that makes the test program play a role.
pub(crate) const ROLE: &str = "PARTYWALL_TEST_ROLE";

/// A broker in a thread, with a socket of its own.
pub(crate) struct World {
    directory: tempfile::TempDir,
    stop: StopHandle,
    broker: Option<JoinHandle<()>>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::start_broker(change, || ())
    }

    /// With a broker that gets no pidfds from its kernel.
    pub(crate) fn without_pidfds() -> Self {
        Self::start_broker(|_| (), pidfds::forbid)
    }

    fn start_broker(change: impl FnOnce(&mut Config), prepare: fn()) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path().join("sockets/test.sock"), "test", partywall::VERSION);
        config.idle_exit = None;
        change(&mut config);
        let broker = Broker::bind(config).unwrap();
        let stop = broker.stop_handle().unwrap();
        let broker = std::thread::spawn(move || {
            prepare();
            broker.run().unwrap();
        });
        Self { directory, stop, broker: Some(broker) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("sockets/test.sock")
    }

    pub(crate) fn connect(&self) -> Domain {
        Domain::options().socket(self.socket()).start(false).connect().unwrap()
    }

    pub(crate) fn end_broker(&mut self) {
        self.stop.stop();
        if let Some(broker) = self.broker.take() {
            broker.join().unwrap();
        }
    }

    /// Starts this test program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Actor {
        let mut actor = self.start(role);
        actor.expect("ready");
        actor
    }

    /// As [`World::play`], and waits until it says `word`.
    pub(crate) fn play_until(&self, role: &str, word: &str) -> Actor {
        let mut actor = self.start(role);
        actor.expect(word);
        actor
    }

    /// As [`World::play`]; also returns what the role said behind `word`.
    pub(crate) fn play_after(&self, role: &str, word: &str) -> (Actor, String) {
        let mut actor = self.start(role);
        let said = actor.expect(word);
        actor.expect("ready");
        (actor, said)
    }

    fn start(&self, role: &str) -> Actor {
        self.start_with(role, Command::new(std::env::current_exe().unwrap()))
    }

    /// As [`World::play`], through a launcher whose last argument is to be this test program.
    pub(crate) fn play_through(&self, role: &str, launcher: &[&str]) -> Actor {
        let mut command = Command::new(launcher[0]);
        command.args(&launcher[1..]).arg(std::env::current_exe().unwrap());
        let mut actor = self.start_with(role, command);
        actor.expect("ready");
        actor
    }

    fn start_with(&self, role: &str, mut command: Command) -> Actor {
        command.args(["--exact", "role", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env("PARTYWALL_SOCKET", self.socket());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Actor { child, output }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end_broker();
    }
}

/// Another process. Dropping it kills it.
pub(crate) struct Actor {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Actor {
    /// Reads up to a line that contains `word`, and returns what follows it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended before it said {word:?}");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it do its next step.
    pub(crate) fn nudge(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Tells it something.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks until `true`.
pub(crate) fn eventually(what: &str, mut ask: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !ask() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Commits one small tensor `x` that holds `value`.
pub(crate) fn commit(domain: &Domain, name: &str, value: u32, kept: bool) -> Segment {
    let builder = domain.create(name, place()).tensor("x", DType::U32, &[4]).kept(kept);
    let mut build = builder.allocate().unwrap();
    build.write("x", &value.to_ne_bytes().repeat(4)).unwrap();
    build.commit().unwrap()
}

/// The value that [`commit`] wrote.
pub(crate) fn value(segment: &Segment) -> u32 {
    let bytes = segment.tensor("x").unwrap().to_vec().unwrap();
    let value = bytes[..4].try_into().map(u32::from_ne_bytes).unwrap();
    assert_eq!(bytes, value.to_ne_bytes().repeat(4));
    value
}
