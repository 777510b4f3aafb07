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

/// Runs the process that the test above starts. It is no test itself.
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
