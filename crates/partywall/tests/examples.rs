//! The examples run, in host memory.
#![allow(clippy::unwrap_used)] // tests

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use partywall::{Domain, Result};
use partywall_broker::{Broker, Config};

#[allow(dead_code, reason = "its `main` connects to the user's own domain")]
#[path = "../examples/pool.rs"]
mod pool;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/square_roots.rs"]
mod square_roots;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/timeline.rs"]
mod timeline;
#[allow(dead_code, reason = "as above")]
#[path = "../examples/topic.rs"]
mod topic;

/// Runs an example on two connections to a broker of its own.
fn runs(example: fn(&Domain, &Domain) -> Result<()>) {
    with_broker(|socket| {
        let connect = || Domain::options().socket(socket).start(false).connect().unwrap();
        example(&connect(), &connect()).unwrap();
    });
}

/// Runs a test beside a broker at a socket.
fn with_broker(test: impl FnOnce(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("sockets/test.sock");
    let broker = Broker::bind(Config::new(&socket, "test", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    test(&socket);
    stop.stop();
    broker.join().unwrap().unwrap();
}

/// Returns the command of an example, which Cargo builds with the tests of this package.
fn program(name: &str, socket: &Path) -> Command {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "there is no {}: cargo build -p partywall --examples", path.display());
    let mut command = Command::new(path);
    command.env("PARTYWALL_SOCKET", socket).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

#[test]
fn consumer_example_waits_for_its_producer() {
    with_broker(|socket| {
        let mut consumer = program("consumer", socket).spawn().unwrap();
        let mut producer = program("producer", socket).arg("host").spawn().unwrap();
        let mut line = String::new();
        BufReader::new(producer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("example@1 is there"), "{line}");
        assert!(consumer.wait().unwrap().success());
        drop(producer.stdin.take());
        assert!(producer.wait().unwrap().success());
    });
}

#[test]
fn recovery_example_finds_its_weights_after_two_crashes() {
    with_broker(|socket| {
        let output = program("recovery", socket).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        for (part, count) in [(": loading", 2), (": the weights are there", 1), ("every weight is right: true", 2)] {
            assert_eq!(text.matches(part).count(), count, "{part}: {text}");
        }
    });
}

#[test]
fn pool_example_runs_in_host_memory() {
    runs(pool::run);
}

#[test]
fn square_roots_example_runs_in_host_memory() {
    runs(square_roots::run);
}

#[test]
fn timeline_example_runs_in_host_memory() {
    runs(timeline::run);
}

#[test]
fn topic_example_runs_in_host_memory() {
    runs(topic::run);
}

#[test]
fn index_lists_each_example() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let index = std::fs::read_to_string(folder.join("README.md")).unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.ends_with(".rs") || index.contains(&format!("({name})")), "{name}");
    }
}
