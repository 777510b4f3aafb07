//! This program as another process, which plays a role of a test and exchanges lines with it.

use std::process::Command;

use partywall_harness::{Actor, next_order};

use super::{ROLE, role};

/// Starts this program in a role of one test, with settings of its own.
pub(super) fn start(test: &str, role: &str, environment: &[(&str, &str)]) -> Actor {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(ROLE, role).envs(environment.iter().copied());
    Actor::spawn(&mut command)
}

/// Returns the next line that a role sends by [`say`]. The test harness prints other lines around it.
pub(super) fn hear(role: &mut Actor) -> String {
    role.expect(MARK)
}

/// Returns true in a process that plays a role. Otherwise starts such a process with these settings, waits for its
/// success, and returns false.
///
/// For tests of state that belongs to a whole process.
pub(super) fn in_a_process(test: &str, environment: &[(&str, &str)]) -> bool {
    if role().is_none() {
        start(test, "alone", environment).finish();
    }
    role().is_some()
}

/// Sends a line to the test that started this role.
pub(super) fn say(words: impl std::fmt::Display) {
    partywall_harness::say(&format!("{MARK}{words}"));
}

/// Returns the next line that the test sends to this role.
pub(super) fn heard() -> String {
    next_order().expect("the test sends a line")
}

const MARK: &str = "@@ ";
