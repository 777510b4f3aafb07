//! A process that plays a role of a test and exchanges lines with it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use super::{ROLE, role};

pub(super) struct Peer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this binary in a role of one test, with settings of its own.
    pub(super) fn start(test: &str, role: &str, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env(ROLE, role).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line that it sends. The test harness prints other lines around it.
    #[track_caller]
    pub(super) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "the peer has ended");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }

    /// Sends it a line, which [`heard`] returns there.
    pub(super) fn send(&mut self, words: &str) {
        writeln!(self.child.stdin.as_ref().unwrap(), "{words}").unwrap();
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end, and asserts that it succeeded.
    #[track_caller]
    pub(super) fn succeeds(mut self) {
        drop(self.child.stdin.take());
        std::io::copy(&mut self.lines, &mut std::io::sink()).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    /// Waits for its end, and asserts that this signal caused it.
    #[track_caller]
    pub(super) fn dies_of(mut self, signal: i32) {
        std::io::copy(&mut self.lines, &mut std::io::sink()).unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(signal));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns true in a process that plays a role. Otherwise starts such a process with these settings, waits for its
/// success, and returns false.
///
/// For tests of state that belongs to a whole process.
pub(super) fn in_a_process(test: &str, environment: &[(&str, &str)]) -> bool {
    if role().is_none() {
        Peer::start(test, "alone", environment).succeeds();
    }
    role().is_some()
}

/// Sends a line to the test that started this role.
pub(super) fn say(words: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{words}").unwrap();
    out.flush().unwrap();
}

/// Returns the next line that the test sends to this role.
pub(super) fn heard() -> String {
    let mut line = String::new();
    assert_ne!(std::io::stdin().read_line(&mut line).unwrap(), 0, "the test has ended");
    line.trim_end().to_owned()
}

const MARK: &str = "@@ ";
