// Holds 19, 180.
//! Processes that are killed or stopped between any two steps of an operation on shared memory. Nothing is lost, and
//! the other processes continue.
#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

mod broker;
mod points;
mod pool;
mod queue;
mod semaphore;
mod slots;
mod sweep;
mod timeline;
mod topic;
mod trace;

use std::{
    fs::{File, OpenOptions},
    os::fd::{AsRawFd, OwnedFd},
    process::Command,
};

/// This program again, which plays `role` with the memory `fd`.
fn role(role: &str, fd: &OwnedFd) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "play", "--nocapture"]);
    command.env(ROLE, role).env(MEMORY, format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()));
    command
}

/// Runs the other processes of the tests. It is no test itself.
#[test]
fn play() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role == broker::ROLE {
        return broker::play();
    }
    let memory: File = OpenOptions::new().read(true).write(true).open(std::env::var(MEMORY).unwrap()).unwrap();
    match role.split_once(' ').unwrap() {
        ("pool", role) => pool::play(role, memory),
        ("queue", role) => queue::play(role, memory),
        ("semaphore", role) => semaphore::play(role, memory),
        ("sweep", role) => sweep::play(role),
        ("timeline", role) => timeline::play(role, memory),
        ("topic", role) => topic::play(role, memory),
        ("trace", _) => trace::play(memory),
        _ => panic!("{role}"),
    }
}

const ROLE: &str = "PARTYWALL_TEST_ROLE";
const MEMORY: &str = "PARTYWALL_TEST_MEMORY";
