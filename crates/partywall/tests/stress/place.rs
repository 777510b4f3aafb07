//! A broker in a process of its own, so that it can be killed, stopped and counted, and other processes.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use partywall::{DType, Domain, Result, Segment};
use partywall_broker::{Broker, Config};
use rustix::process::{Resource, Rlimit};

pub(crate) use partywall_harness::{Actor, ROLE};

/// The socket of one test, and a broker behind it.
pub(crate) struct Place {
    directory: tempfile::TempDir,
    broker: Option<Actor>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with("")
    }

    /// Creates a place whose broker is started with `options`; see [`serve`].
    pub(crate) fn with(options: &str) -> Self {
        let mut place = Self::empty();
        place.start_broker(options);
        place
    }

    /// Creates a place without a broker.
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

    /// Starts a role as [`Place::start`] does, in another environment.
    pub(crate) fn start_with(&self, role: &str, change: impl FnOnce(&mut Command)) -> Actor {
        let mut command = Command::new(std::env::current_exe().unwrap());
        change(&mut command);
        Actor::start(command.env("PARTYWALL_SOCKET", self.socket()), role)
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
    // The broker ends with the test.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stop.stop();
    });
    say("ready");
    broker.run().unwrap();
}

/// Limits the open files of this process.
pub(crate) fn limit_files(n: u64) {
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(n), maximum: Some(n) }).unwrap();
}

/// Sends a line to the test.
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

/// The number of elements in the tensor of a test.
pub(crate) const ELEMENTS: u64 = 1024;

/// Commits one tensor `x` whose elements are all `value`.
pub(crate) fn commit(domain: &Domain, name: &str, value: u32, kept: bool) -> Result<Segment> {
    let builder = domain.create(name, partywall_harness::place()).tensor("x", DType::U32, &[ELEMENTS]).kept(kept);
    let mut build = builder.allocate()?;
    build.write("x", &value.to_ne_bytes().repeat(ELEMENTS as usize))?;
    build.commit()
}

/// Returns the value that [`commit`] wrote, after checking that it is not torn.
pub(crate) fn value(segment: &Segment) -> u32 {
    let bytes = segment.tensor("x").unwrap().to_vec().unwrap();
    let value = bytes[..4].try_into().map(u32::from_ne_bytes).unwrap();
    assert!(bytes == value.to_ne_bytes().repeat(ELEMENTS as usize), "a torn version");
    value
}
