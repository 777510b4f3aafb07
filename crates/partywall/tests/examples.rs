//! The examples run, in host memory.
#![allow(clippy::unwrap_used)] // tests

use std::path::Path;

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
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("sockets/test.sock");
    let broker = Broker::bind(Config::new(&socket, "test", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let connect = || Domain::options().socket(&socket).start(false).connect().unwrap();
    example(&connect(), &connect()).unwrap();
    stop.stop();
    broker.join().unwrap().unwrap();
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
