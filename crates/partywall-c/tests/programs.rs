//! Programs in C, compiled against the header and the shared library, and run beside a broker.
#![allow(clippy::unwrap_used)] // the outermost functions of tests

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use partywall_broker::{Broker, Config};

/// The directory with the libraries that Cargo has built for these tests.
fn libraries() -> PathBuf {
    let program = env::current_exe().unwrap();
    program.parent().unwrap().to_owned()
}

fn run(source: &str) {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("program");
    let libraries = libraries();
    // Programs look for the library by its SONAME.
    std::os::unix::fs::symlink(libraries.join("libpartywall_c.so"), scratch.path().join("libpartywall.so.0")).unwrap();
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-I"])
        .arg(manifest.join("include"))
        .arg(manifest.join("tests/c").join(source))
        .arg(libraries.join("libpartywall_c.so"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let socket = scratch.path().join("sockets/c.sock");
    let broker = Broker::bind(Config::new(&socket, "c", partywall::VERSION)).unwrap();
    let stop = broker.stop_handle().unwrap();
    let broker = std::thread::spawn(move || broker.run());
    let ran = Command::new(&program).env("PARTYWALL_SOCKET", &socket).env("LD_LIBRARY_PATH", scratch.path()).output();
    stop.stop();
    broker.join().unwrap().unwrap();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn samples_go_through_a_topic_in_c() {
    run("topic.c");
}
