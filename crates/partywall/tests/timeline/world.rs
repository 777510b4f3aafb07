//! A broker of a test's own, processes that play a role in the test, and the simulated driver.

use std::{
    io::{Read, Write},
    path::PathBuf,
    process::{ChildStdin, Command},
    sync::Arc,
    thread::JoinHandle,
};

use partywall::{Domain, Gpu, cuda::Driver};
use partywall_broker::{Broker, Config, StopHandle};
use partywall_harness::{Running, simulated_driver};

pub(crate) use partywall_harness::{WATCHDOG as TIMEOUT, eventually};

pub(crate) const ROLE: &str = "PARTYWALL_TEST_ROLE";

/// Runs the body of the test with this name in a process on the simulated driver: this program again, which chooses its
/// driver once.
pub(crate) fn simulated(test: &str, body: impl FnOnce(&World)) {
    if std::env::var_os(Driver::LIBRARY_VARIABLE).is_some() {
        return body(&World::new());
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.env(Driver::LIBRARY_VARIABLE, simulated_driver()).env("SIMCUDA_DEVICES", "2");
    let output = Running::spawn(&mut command).wait();
    let text = output.text();
    assert!(output.code == Some(0) && text.contains("1 passed"), "{text}\n{}", output.stderr);
}

/// A broker in a thread, with a socket of its own.
pub(crate) struct World {
    directory: tempfile::TempDir,
    stop: StopHandle,
    broker: Option<JoinHandle<()>>,
}

impl World {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path().join("sockets/test.sock"), "test", partywall::VERSION);
        config.idle_exit = None;
        let broker = Broker::bind(config).unwrap();
        let stop = broker.stop_handle().unwrap();
        let broker = std::thread::spawn(move || {
            broker.run().unwrap();
        });
        Self { directory, stop, broker: Some(broker) }
    }

    pub(crate) fn end_broker(&mut self) {
        self.stop.stop();
        if let Some(broker) = self.broker.take() {
            broker.join().unwrap();
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("sockets/test.sock")
    }

    pub(crate) fn connect(&self) -> Domain {
        Domain::options().socket(self.socket()).start(false).connect().unwrap()
    }

    /// Starts this test program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Actor {
        self.play_with(role, |_| ())
    }

    /// As [`World::play`], with a change to the command first.
    pub(crate) fn play_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env("PARTYWALL_SOCKET", self.socket());
        change(&mut command);
        let mut process = Running::spawn(&mut command);
        let input = process.stdin();
        let mut actor = Actor { process, input };
        actor.expect("ready");
        actor
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end_broker();
    }
}

/// Another process, which takes orders. Dropping it kills it.
pub(crate) struct Actor {
    process: Running,
    input: ChildStdin,
}

impl Actor {
    /// Reads up to a line that begins with `word`, and returns what follows it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        loop {
            if let Some(rest) = self.process.line().strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Tells it to do something; see [`next_order`].
    pub(crate) fn order(&mut self, order: &str) {
        writeln!(self.input, "{order}").unwrap();
    }

    /// Tells it to do something, and waits until it has.
    pub(crate) fn have(&mut self, order: &str) -> String {
        self.order(order);
        self.expect("done")
    }

    pub(crate) fn kill(self) {
        self.process.kill();
    }
}

/// What a role is told next; `None` when the test has nothing more to say.
pub(crate) fn next_order() -> Option<String> {
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock();
    loop {
        let mut byte = [0];
        match input.read(&mut byte).unwrap() {
            0 => return None,
            _ if byte == *b"\n" => return Some(String::from_utf8(line).unwrap()),
            _ => line.extend(byte),
        }
    }
}

/// Says something to [`Actor::expect`].
#[allow(clippy::print_stdout)] // it is how roles talk to the test
pub(crate) fn say(text: &str) {
    println!("\n{text}");
}

/// The first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Whether `body` is true in a forked child, which ends then.
#[allow(unsafe_code)]
pub(crate) fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the locks that the child needs are its own; it ends without unwinding into the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = body();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: the status is a live number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}
