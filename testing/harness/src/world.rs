//! A broker in a thread, and other processes that run the same test program.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    thread::JoinHandle,
};

use partywall::{Domain, cuda::Driver};
use partywall_broker::{Broker, Config, Exit, StopHandle};

use crate::{Actor, Running, eventually, simulated_driver};

/// The environment variable that makes a test program play a role: the test `role` reads it, and otherwise does
/// nothing.
pub const ROLE: &str = "PARTYWALL_TEST_ROLE";

/// A broker in a thread, with a socket of its own. Dropping it ends the broker.
#[derive(Debug)]
pub struct World {
    socket: PathBuf,
    stop: StopHandle,
    broker: Option<JoinHandle<Exit>>,
    // Dropped last.
    directory: tempfile::TempDir,
}

impl World {
    /// Starts a broker that stays without members.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn new() -> Self {
        Self::with(|_| ())
    }

    /// As [`new`](Self::new), with a change to the broker's configuration.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::prepared(change, || ())
    }

    /// As [`with`](Self::with). The broker's thread calls `prepare` first.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn prepared(change: impl FnOnce(&mut Config), prepare: fn()) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path().join("sockets/test.sock"), "test", partywall::VERSION);
        config.idle_exit = None;
        change(&mut config);
        let socket = config.socket.clone();
        let broker = Broker::bind(config).unwrap();
        let stop = broker.stop_handle().unwrap();
        let broker = std::thread::spawn(move || {
            prepare();
            broker.run().unwrap()
        });
        Self { socket, stop, broker: Some(broker), directory }
    }

    /// Returns the broker's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns a directory for the test's own files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a connection of this process.
    ///
    /// # Panics
    /// If the broker refuses it.
    pub fn connect(&self) -> Domain {
        Domain::options().socket(&self.socket).start(false).connect().unwrap()
    }

    /// Tells the broker to end.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Waits until the broker has ended.
    ///
    /// # Panics
    /// If it has panicked, or was waited for before.
    pub fn exit(&mut self) -> Exit {
        let broker = self.broker.take().expect("a broker ends once");
        eventually("the broker ends", || broker.is_finished());
        broker.join().unwrap()
    }

    /// Ends the broker.
    ///
    /// # Panics
    /// If it has panicked.
    pub fn end_broker(&mut self) {
        self.stop();
        if let Some(broker) = self.broker.take() {
            broker.join().unwrap();
        }
    }

    /// Starts this test program as another process that plays `role`, and waits until it says `ready`.
    ///
    /// # Panics
    /// If it ends before.
    pub fn play(&self, role: &str) -> Actor {
        self.play_with(role, |_| ())
    }

    /// As [`play`](Self::play), with a change to the command.
    ///
    /// # Panics
    /// If it ends before it says `ready`.
    pub fn play_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        let mut command = Command::new(this_program());
        change(&mut command);
        let mut actor = self.start(role, command);
        actor.expect("ready");
        actor
    }

    /// As [`play`](Self::play), but waits until the process prints `word`.
    ///
    /// # Panics
    /// If the process ends before it prints the word.
    pub fn play_until(&self, role: &str, word: &str) -> Actor {
        let mut actor = self.start(role, Command::new(this_program()));
        actor.expect(word);
        actor
    }

    /// As [`play`](Self::play). Also returns the text that the role printed after `word` before it was ready.
    ///
    /// # Panics
    /// If the process ends before it prints `ready`.
    pub fn play_after(&self, role: &str, word: &str) -> (Actor, String) {
        let mut actor = self.start(role, Command::new(this_program()));
        let said = actor.expect(word);
        actor.expect("ready");
        (actor, said)
    }

    /// As [`play`](Self::play), through a launcher to which this test program is passed as the last argument.
    ///
    /// # Panics
    /// If it ends before it says `ready`.
    pub fn play_through(&self, role: &str, launcher: &[&str]) -> Actor {
        let mut actor = self.start(role, launched(launcher));
        actor.expect("ready");
        actor
    }

    /// As [`play_through`](Self::play_through). Also returns the text that the role printed after `word` before it was
    /// ready.
    ///
    /// # Panics
    /// If it ends before it says `ready`.
    pub fn play_through_after(&self, role: &str, launcher: &[&str], word: &str) -> (Actor, String) {
        let mut actor = self.start(role, launched(launcher));
        let said = actor.expect(word);
        actor.expect("ready");
        (actor, said)
    }

    fn start(&self, role: &str, mut command: Command) -> Actor {
        Actor::start(command.env("PARTYWALL_SOCKET", &self.socket), role)
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop();
        if let Some(broker) = self.broker.take() {
            let outcome = broker.join();
            assert!(outcome.is_ok() || std::thread::panicking(), "the broker has panicked");
        }
    }
}

/// Runs the body of the test with this name in a process on two simulated GPUs: this program again, because a process
/// chooses its driver once.
///
/// # Panics
/// If the test fails there.
pub fn simulated(test: &str, body: impl FnOnce(&World)) {
    if std::env::var_os(Driver::LIBRARY_VARIABLE).is_some() {
        return body(&World::new());
    }
    let mut command = Command::new(this_program());
    command.args(["--exact", test, "--nocapture"]);
    command.env(Driver::LIBRARY_VARIABLE, simulated_driver()).env("SIMCUDA_DEVICES", "2");
    let output = Running::spawn(&mut command).wait();
    let text = output.text();
    assert!(output.code == Some(0) && text.contains("1 passed"), "{text}\n{}", output.stderr);
}

/// Prints a line for [`Actor::expect`], which begins on a new line.
#[allow(clippy::print_stdout, reason = "it is how roles talk to the test")]
pub fn say(text: &str) {
    println!("\n{text}");
}

/// Shuts down every socket of this process.
///
/// # Panics
/// If the kernel does not duplicate a process's own descriptors.
pub fn cut_connections() {
    let pidfd = partywall_os::process::own_pidfd().unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let fd: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
        if link.to_str().is_some_and(|link| link.starts_with("socket:")) {
            let socket = match rustix::process::pidfd_getfd(&pidfd, fd, rustix::process::PidfdGetfdFlags::empty()) {
                // Another thread has closed it since.
                Err(rustix::io::Errno::BADF) => continue,
                socket => socket.unwrap(),
            };
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }
}

/// Reports that a role is ready, and waits for the test's next line, or to be killed.
///
/// # Panics
/// As [`next_order`].
#[allow(clippy::print_stdout, reason = "it is how roles talk to the test")]
pub fn linger() {
    println!("ready");
    next_order();
}

/// Returns a role's next command, or `None` when the test sends no more. Reads no further than the end of the line.
///
/// # Panics
/// If standard input cannot be read or is not text.
pub fn next_order() -> Option<String> {
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

fn launched(launcher: &[&str]) -> Command {
    let mut command = Command::new(launcher[0]);
    command.args(&launcher[1..]).arg(this_program());
    command
}

fn this_program() -> PathBuf {
    std::env::current_exe().unwrap()
}
