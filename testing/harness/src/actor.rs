//! A child process of a test, which plays a role.

use std::{
    fs,
    io::Write,
    process::{ChildStdin, Command, ExitStatus},
};

use rustix::process::Signal;

use crate::{ROLE, Running, eventually};

/// A process that plays a role and takes orders. Dropping it kills it.
#[derive(Debug)]
pub struct Actor {
    process: Running,
    input: ChildStdin,
}

impl Actor {
    /// Starts a test program in `role`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(command: &mut Command, role: &str) -> Self {
        Self::spawn(command.args(["--exact", "role", "--nocapture", "--test-threads=1"]).env(ROLE, role))
    }

    /// Starts any program that takes orders.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(command: &mut Command) -> Self {
        let mut process = Running::spawn(command);
        let input = process.stdin();
        Self { process, input }
    }

    /// Returns the pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the next line of its standard output.
    ///
    /// # Panics
    /// If there is none, or the watchdog ends it.
    pub fn line(&mut self) -> String {
        self.process.line()
    }

    /// Reads up to a line that contains `word`, and returns the text after the word.
    ///
    /// # Panics
    /// If the process ends before it prints such a line.
    pub fn expect(&mut self, word: &str) -> String {
        loop {
            if let Some((_, rest)) = self.line().split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Writes a line to its standard input.
    ///
    /// # Panics
    /// If it takes none.
    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Lets it do its next step.
    ///
    /// # Panics
    /// If it takes no line.
    pub fn proceed(&mut self) {
        self.send("");
    }

    /// Writes a line to its standard input, and returns the text after `done` in its answer.
    ///
    /// # Panics
    /// If the process ends before it answers.
    pub fn request(&mut self, order: &str) -> String {
        self.send(order);
        self.expect("done")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Returns whether it has ended.
    ///
    /// # Panics
    /// If the kernel does not report it.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// Kills it and waits for its end.
    ///
    /// # Panics
    /// If it does not end.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.process.reap();
    }

    /// Waits for its end by itself.
    ///
    /// # Panics
    /// If the watchdog ends it.
    pub fn join(&mut self) -> ExitStatus {
        self.process.reap()
    }

    /// Closes its input and waits until it ends with success.
    ///
    /// # Panics
    /// If it fails, or the watchdog ends it.
    pub fn finish(self) {
        drop(self.input);
        self.process.wait().expect(0);
    }

    /// Stops it, and waits until it is stopped.
    ///
    /// # Panics
    /// If it does not stop.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        eventually("the stop", || self.process.is_stopped());
    }

    /// Lets it go on after [`stop`](Self::stop).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Returns how many files it has open.
    ///
    /// # Panics
    /// If it has ended.
    pub fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Returns how many files it has open once that number no longer changes.
    ///
    /// # Panics
    /// If the number keeps changing.
    pub fn open_files_at_rest(&self) -> usize {
        let mut last = self.open_files();
        let mut same = 0;
        eventually("rest", || {
            let now = self.open_files();
            same = if now == last { same + 1 } else { 0 };
            last = now;
            same >= 10
        });
        last
    }

    /// Waits until it has at most `before` files open. It closes files when it is next scheduled.
    ///
    /// # Panics
    /// If it keeps more files open.
    pub fn await_files(&self, before: usize) {
        eventually("the end of what was opened", || self.open_files() <= before);
    }

    /// Returns its resident memory in KiB.
    ///
    /// # Panics
    /// If it has ended.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}
