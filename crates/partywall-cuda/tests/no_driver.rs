//! A process without a CUDA driver: every call returns an error, and none panics.
//!
//! The driver table of a process is loaded once, and reads the environment variable then. Each case therefore runs in a
//! process of its own, which runs this test program again.

use std::process::Command;

use partywall_cuda::{Driver, LoadError};

const NOWHERE: &str = "/nonexistent/libcuda.so.1";

#[test]
fn missing_library_is_an_error() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_child_process"])
        .env(Driver::LIBRARY_VARIABLE, NOWHERE)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

// Holds 325.
#[test]
fn missing_simulated_driver_is_an_error() {
    let elsewhere = tempfile::tempdir().unwrap();
    let program = elsewhere.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let output = Command::new(program)
        .args(["--exact", "in_child_process_without_a_simulator"])
        .env(Driver::LIBRARY_VARIABLE, Driver::SIMULATED)
        .env("PATH", elsewhere.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Runs the process that the test above starts. It is no test itself.
#[test]
fn in_child_process_without_a_simulator() {
    if std::env::var_os(Driver::LIBRARY_VARIABLE).is_some_and(|library| library == Driver::SIMULATED) {
        assert_eq!(Driver::load().unwrap_err(), LoadError::NoSimulator);
        let text = LoadError::NoSimulator.to_string();
        assert!(text.contains("partywall-lab") && text.contains("libsimcuda.so beside this program"), "{text}");
    }
}

/// Runs the process that the first test starts. It is no test itself.
#[test]
fn in_child_process() {
    if std::env::var_os(Driver::LIBRARY_VARIABLE).is_none_or(|library| library != NOWHERE) {
        return;
    }
    let first = Driver::load().unwrap_err();
    let LoadError::Library { tried, reason } = &first else { panic!("{first:?}") };
    assert_eq!(tried, NOWHERE);
    assert!(reason.contains("cannot open"), "the linker's own text: {reason}");
    assert_eq!(Driver::load().unwrap_err(), first, "asked again, the same answer");
}
