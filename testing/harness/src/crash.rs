//! Processes that are killed or stopped between any two steps of an operation.
//!
//! [`at_each_point`] runs a role in one process after the other. Each process ends at the first crash point
//! (`partywall_shm::crash`) at which no process before it has ended, until a process passes no such point; then the same
//! is repeated with the next fate. If a role passes a point several times, each of them is a point of its own. Points are
//! known by their names and not by their numbers, because timing decides whether some are passed: a point more or less
//! before another one would shift its number, and the other one could be left out. The role calls [`arm`] right before the tested operation, and [`disarm`] after it.

use std::{
    io::{Read, Write},
    process::{ChildStdin, Command},
    sync::Mutex,
};

use partywall_os::process;
use partywall_shm::crash;
use rustix::process::Signal;

use crate::Running;

/// What happens to a process at a crash point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is killed.
    Killed,
    /// It is stopped, and never continues.
    Stopped,
    /// It is stopped for a while.
    Paused,
}

/// A process that has reached a crash point.
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
    /// Lets a paused process continue, and waits until it has completed its operation; kills any other process. Returns
    /// whether the process is dead.
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

/// Has a process crash at each point that it passes, with each fate, and calls `test` to check what it leaves. `start`
/// returns the process's command, and the objects that it works on, for each run. Returns the points' names, each once.
///
/// # Panics
/// If there are no points.
pub fn at_each_point<T>(
    start: impl Fn() -> (Command, T),
    mut test: impl FnMut(Crashed, T),
) -> std::collections::BTreeSet<String> {
    let mut points = std::collections::BTreeSet::new();
    for fate in [Fate::Killed, Fate::Stopped, Fate::Paused] {
        let mut reached = String::new();
        loop {
            let (mut command, world) = start();
            let signal = if fate == Fate::Killed { KILLED } else { STOPPED };
            let mut process = Running::spawn(command.env(VARIABLE, format!("0 {signal}")).env(REACHED, &reached));
            let Some(point) = expect(&mut process, &[THROUGH, AT]) else {
                process.wait().expect(0);
                break;
            };
            // Its last word came before the signal.
            match fate {
                Fate::Killed => crate::eventually("it is killed", || process.has_ended()),
                Fate::Stopped | Fate::Paused => crate::eventually("it is stopped", || process.is_stopped()),
            }
            reached = reached + &point + "\n";
            points.insert(point.clone());
            let gate = process.stdin();
            test(Crashed { process, gate, point, fate }, world);
        }
    }
    assert!(!points.is_empty(), "it passed no crash point");
    points
}

/// For a role: makes this thread crash as the test requests. Without a test, the thread passes all points.
///
/// # Panics
/// If the test's request is malformed. It is the number of points that come before, or the name of the point.
pub fn arm() {
    let Ok(text) = std::env::var(VARIABLE) else { return };
    let (number, signal) = text.rsplit_once(' ').expect("a point and a signal");
    *PASSES.lock().unwrap() = std::env::var(REACHED).unwrap_or_default().lines().map(str::to_owned).collect();
    match (number.parse(), signal) {
        (Ok(number), KILLED) => crash::arm(number, be_killed),
        (Ok(number), _) => crash::arm(number, be_stopped),
        (Err(_), _) => crash::arm(0, be_killed_there),
    }
}

/// For a role: reports that the tested operation is complete.
pub fn disarm() {
    crash::disarm();
    say(THROUGH, "");
}

/// Returns whether a process before this one has ended at this point.
fn passes(point: &str) -> bool {
    let mut passes = PASSES.lock().unwrap();
    passes.iter().position(|name| name == point).map(|index| passes.swap_remove(index)).is_some()
}

fn be_killed(point: &'static str) {
    if passes(point) {
        return crash::arm(0, be_killed);
    }
    say(AT, point);
    be(Signal::KILL);
}

/// Is killed if the test has named this point.
fn be_killed_there(point: &'static str) {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    if text.rsplit_once(' ').is_some_and(|(name, _)| name == point) {
        be_killed(point);
    }
    crash::arm(0, be_killed_there);
}

fn be_stopped(point: &'static str) {
    if passes(point) {
        return crash::arm(0, be_stopped);
    }
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

/// The points that this process passes, each once for each process that has ended there.
static PASSES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The environment variable with the number of the point and the signal.
const VARIABLE: &str = "PARTYWALL_TEST_CRASH";
/// That with the points at which processes have ended, one a line.
const REACHED: &str = "PARTYWALL_TEST_CRASHED";
const KILLED: &str = "killed";
const STOPPED: &str = "stopped";
const AT: &str = "crash point: ";
const THROUGH: &str = "crash points passed";
