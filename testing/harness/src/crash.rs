//! Processes that are killed or stopped between any two steps of what they do.
//!
//! [`at_each_point`] runs a role in one process after the other. The first ends at the first crash point that it passes
//! (`partywall_shm::crash`), the second at the second, until one passes them all; then the same with the next fate. The
//! role calls [`arm`] right before what is looked at, and [`disarm`] behind it.

use std::{
    io::{Read, Write},
    process::{ChildStdin, Command},
};

use partywall_os::process;
use partywall_shm::crash;
use rustix::process::Signal;

use crate::Running;

/// What becomes of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is killed.
    Killed,
    /// It is stopped, and never goes on.
    Stopped,
    /// It is stopped for a while.
    Paused,
}

/// A process that has come to a point.
#[derive(Debug)]
pub struct Crashed {
    process: Running,
    /// Keeps it at the point.
    gate: ChildStdin,
    /// The point.
    pub point: String,
    /// What became of it.
    pub fate: Fate,
}

impl Crashed {
    /// Lets it go on, if it is only paused, and waits until it has done what it was about to do; else sees to it that it
    /// is dead. Returns whether it is.
    pub fn is_dead_in_the_end(mut self) -> bool {
        if self.fate == Fate::Paused {
            self.process.signal(Signal::CONT);
            self.gate.write_all(b"\n").unwrap();
            expect(&mut self.process, &[THROUGH]);
            self.process.wait().expect(0);
            return false;
        }
        self.process.kill();
        true
    }
}

/// Has a process crash at each point that it passes, and `test` look at what it leaves, with each fate. `start` makes
/// the process's command, and whatever it works on, for each of them. Returns the points' names, each once.
///
/// # Panics
/// If there are no points.
pub fn at_each_point<T>(
    start: impl Fn() -> (Command, T),
    mut test: impl FnMut(Crashed, T),
) -> std::collections::BTreeSet<String> {
    let mut points = std::collections::BTreeSet::new();
    for fate in [Fate::Killed, Fate::Stopped, Fate::Paused] {
        for number in 0_u64.. {
            let (mut command, world) = start();
            let signal = if fate == Fate::Killed { KILLED } else { STOPPED };
            let mut process = Running::spawn(command.env(VARIABLE, format!("{number} {signal}")));
            let Some(point) = expect(&mut process, &[THROUGH, AT]) else {
                process.wait().expect(0);
                break;
            };
            // Its last word came before the signal.
            match fate {
                Fate::Killed => crate::eventually("it is killed", || process.has_ended()),
                Fate::Stopped | Fate::Paused => crate::eventually("it is stopped", || process.is_stopped()),
            }
            points.insert(point.clone());
            let gate = process.stdin();
            test(Crashed { process, gate, point, fate }, world);
        }
    }
    assert!(!points.is_empty(), "it passed no crash point");
    points
}

/// For a role: has this thread crash as the test has it. Without a test it passes all points.
///
/// # Panics
/// If the test says nothing that can be understood.
pub fn arm() {
    let Ok(text) = std::env::var(VARIABLE) else { return };
    let (number, signal) = text.split_once(' ').expect("a number and a signal");
    let action = if signal == KILLED { be_killed } else { be_stopped };
    crash::arm(number.parse().expect("a number"), action);
}

/// For a role: says that what was looked at is done.
pub fn disarm() {
    crash::disarm();
    say(THROUGH, "");
}

fn be_killed(point: &'static str) {
    say(AT, point);
    be(Signal::KILL);
}

fn be_stopped(point: &'static str) {
    say(AT, point);
    be(Signal::STOP);
    // The signal may have gone to another thread, and this one would go on until that one stops all.
    let _ = std::io::stdin().read(&mut [0]);
}

fn be(signal: Signal) {
    process::kill(process::own_pidfd().unwrap(), signal).unwrap();
}

#[allow(clippy::print_stdout, reason = "it is how a role talks to the test")]
fn say(word: &str, what: &str) {
    // The test runner may have begun a line.
    println!("\n{word}{what}");
}

/// Reads up to a line that begins with one of `words`; returns what follows the second one.
fn expect(process: &mut Running, words: &[&str]) -> Option<String> {
    loop {
        let line = process.line();
        if let Some(index) = words.iter().position(|word| line.starts_with(word)) {
            return (index > 0).then(|| line[words[index].len()..].to_owned());
        }
    }
}

/// Says which point, and what is to happen there.
const VARIABLE: &str = "PARTYWALL_TEST_CRASH";
const KILLED: &str = "killed";
const STOPPED: &str = "stopped";
const AT: &str = "crash point: ";
const THROUGH: &str = "crash points passed";
