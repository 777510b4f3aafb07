//! What the scenes need: a broker of their own, and this program as another process that is told what to do.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use partywall::{Domain, Gpu};

use crate::tests::world;

/// How long anything may take that should not take long. A test that takes longer is killed with its processes.
pub(crate) const TIMEOUT: Duration = world::TIMEOUT;

/// A broker in a directory of its own. Dropping it ends the broker.
pub(crate) struct World {
    directory: PathBuf,
}

impl World {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = format!("partywall-gpu-timelines-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        let _ = std::fs::remove_dir_all(&directory);
        let world = Self { directory };
        // It starts the broker, which stays for a while without members.
        Domain::options().socket(world.socket()).connect().unwrap();
        world
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("test.sock")
    }

    pub(crate) fn connect(&self) -> Domain {
        Domain::options().socket(self.socket()).start(false).connect().unwrap()
    }

    /// Starts this program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Actor {
        self.play_with(role, |_| ())
    }

    /// As [`World::play`], with a change to the command first.
    pub(crate) fn play_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([world::ROLE, &format!("{}{role}", super::ROLE)]).env("PARTYWALL_SOCKET", self.socket());
        change(&mut command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut actor = Actor { child, input, output };
        actor.expect("ready");
        actor
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let domain = Domain::options().socket(self.socket()).start(false).connect();
        let _ = domain.and_then(|domain| domain.stop_broker(true));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Another process, which takes orders. Dropping it kills it.
pub(crate) struct Actor {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Actor {
    /// Reads up to a line that begins with `word`, and returns what follows it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended before it said {word:?}");
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Tells it to do something, and waits until it has.
    pub(crate) fn have(&mut self, order: &str) -> String {
        writeln!(self.input, "{order}").unwrap();
        self.expect("done")
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // Fails only if it has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns what a role is told next; `None` when there is nothing more to say.
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

pub(crate) use world::say;

/// Asks until `true`.
pub(crate) fn eventually(what: &str, mut ask: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !ask() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the first GPU of this process.
pub(crate) fn gpu(domain: &Domain) -> Arc<Gpu> {
    domain.gpu(partywall::gpu::devices().unwrap()[0].uuid().unwrap()).unwrap()
}

/// Returns whether `body` is true in a forked child, which ends then.
pub(crate) fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    crate::raw::in_fork(|| u8::from(body())).unwrap() == 1
}
