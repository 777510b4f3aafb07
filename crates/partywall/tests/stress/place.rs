//! A broker in a process of its own, so that it can be killed, stopped and counted, and other processes.

use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use partywall::{DType, Domain, Result, Segment};
use partywall_broker::{Broker, Config};
use rustix::process::{Pid, Resource, Rlimit, Signal};

/// The environment variable that makes the test program play a role.
pub(crate) const ROLE: &str = "PARTYWALL_TEST_ROLE";

/// A socket of a test's own, and a broker behind it.
pub(crate) struct Place {
    directory: tempfile::TempDir,
    broker: Option<Actor>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with("")
    }

    /// A place whose broker is started with `options`; see [`serve`].
    pub(crate) fn with(options: &str) -> Self {
        let mut place = Self::empty();
        place.start_broker(options);
        place
    }

    /// A place without a broker.
    pub(crate) fn empty() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, broker: None }
    }

    pub(crate) fn start_broker(&mut self, options: &str) {
        let mut broker = self.start(&format!("broker {options}"));
        broker.expect("ready");
        self.broker = Some(broker);
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("sockets/test.sock")
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn connect(&self) -> Domain {
        self.try_connect().unwrap()
    }

    pub(crate) fn try_connect(&self) -> Result<Domain> {
        Domain::options().socket(self.socket()).start(false).connect()
    }

    pub(crate) fn broker(&mut self) -> &mut Actor {
        self.broker.as_mut().unwrap()
    }

    /// Starts this test program as another process that plays `role`, and waits until it is ready.
    pub(crate) fn play(&self, role: &str) -> Actor {
        let mut actor = self.start(role);
        actor.expect("ready");
        actor
    }

    /// Starts this test program as another process that plays `role`.
    pub(crate) fn start(&self, role: &str) -> Actor {
        self.start_with(role, |_| ())
    }

    /// As [`Place::start`], with another environment.
    pub(crate) fn start_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        change(&mut command);
        command.args(["--exact", "role", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env("PARTYWALL_SOCKET", self.socket());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Actor { child, output }
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

    /// Writes to its standard input.
    pub(crate) fn tell(&mut self, what: &str) {
        std::io::Write::write_all(self.child.stdin.as_mut().unwrap(), what.as_bytes()).unwrap();
    }

    /// Waits for its end by itself.
    pub(crate) fn join(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        super::eventually("the stop", || self.state() == 'T');
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().try_into().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        stat.rsplit_once(')').unwrap().1.trim().chars().next().unwrap()
    }

    /// How many files it has open.
    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// How many files it has open once it has closed what it is about to close.
    pub(crate) fn open_files_at_rest(&self) -> usize {
        let mut last = self.open_files();
        let mut same = 0;
        super::eventually("rest", || {
            let now = self.open_files();
            same = if now == last { same + 1 } else { 0 };
            last = now;
            same >= 10
        });
        last
    }

    /// Waits until it has no more files open than it had. It may be kept from closing them for as long as others keep it
    /// from its processor.
    pub(crate) fn await_files(&self, before: usize) {
        super::eventually("the end of what was opened", || self.open_files() <= before);
    }

    /// Its resident memory in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of a broker. Options are `files=N`, its limit of open files once it has started, `clients=N`, `fds=N` and
/// `names=N`.
pub(crate) fn serve(options: &[&str]) {
    let mut config = Config::new(std::env::var_os("PARTYWALL_SOCKET").unwrap(), "test", partywall::VERSION);
    config.idle_exit = None;
    config.settle = Duration::from_millis(20);
    let mut files = None;
    for option in options.iter().filter(|option| !option.is_empty()) {
        let (key, value) = option.split_once('=').unwrap();
        let value: u64 = value.parse().unwrap();
        match key {
            "files" => files = Some(value),
            "clients" => config.limits.clients = Some(value),
            "fds" => config.limits.fds = Some(value),
            "names" => config.limits.names = value,
            other => panic!("no option is called {other:?}"),
        }
    }
    let broker = Broker::bind(config).unwrap();
    if let Some(files) = files {
        limit_files(files);
    }
    let stop = broker.stop_handle().unwrap();
    // Ends with the test.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stop.stop();
    });
    say("ready");
    broker.run().unwrap();
}

/// Lets this process have only so many files open.
pub(crate) fn limit_files(n: u64) {
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(n), maximum: Some(n) }).unwrap();
}

/// Tells the test something.
pub(crate) fn say(what: impl std::fmt::Display) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{what}").unwrap();
    out.flush().unwrap();
}

/// Waits for the test to end.
pub(crate) fn linger() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// How many elements a test's tensor has.
pub(crate) const ELEMENTS: u64 = 1024;

/// Commits one tensor `x` whose elements are all `value`.
pub(crate) fn commit(domain: &Domain, name: &str, value: u32, kept: bool) -> Result<Segment> {
    let builder = domain.create(name, partywall_harness::place()).tensor("x", DType::U32, &[ELEMENTS]).kept(kept);
    let mut build = builder.allocate()?;
    build.write("x", &value.to_ne_bytes().repeat(ELEMENTS as usize))?;
    build.commit()
}

/// The value that [`commit`] wrote, once and not torn.
pub(crate) fn value(segment: &Segment) -> u32 {
    let bytes = segment.tensor("x").unwrap().to_vec().unwrap();
    let value = bytes[..4].try_into().map(u32::from_ne_bytes).unwrap();
    assert!(bytes == value.to_ne_bytes().repeat(ELEMENTS as usize), "a torn version");
    value
}
