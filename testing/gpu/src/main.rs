//! Tests that need an NVIDIA driver or a simulated one, as one program that can be copied to a machine with a GPU.
//!
//! | module | holds |
//! |---|---|
//! | [`tests`] | the tests, one module per subject, and their list |
//! | [`runner`] | runs them one after the other, each in a child process, and reports |
//! | [`child`] | a child process in its own group, with a time limit and captured output |
//! | [`gpu`] | detection of GPUs |
//! | [`ledger`] | what the processes of a test left behind in the simulated driver |
//! | [`ending`] | the wait for connections that end on other threads |
//! | [`raw`] | the driver's raw entry points |
//! | [`vulkan`] | imports and commands of Vulkan |
//!
//! A test that crashes or hangs in the driver, or breaks its context, ends only its own process. Without a GPU all
//! tests are *skipped*, with the reason, and never *passed*.

#![allow(clippy::print_stdout, reason = "the program prints for people; the lint is meant for libraries")]

mod child;
mod ending;
mod gpu;
mod ledger;
mod raw;
mod runner;
mod tests;
mod vulkan;

use std::path::PathBuf;
use std::process::ExitCode;

use runner::Selection;

const HELP: &str = "\
usage: partywall-gpu-tests [NAME...] [--skip NAME]... [--list] [--report FILE]

Runs the tests whose names contain a NAME, else all of them. Without a GPU they are skipped.

  --skip NAME     leave out the tests whose names contain NAME
  --list          print the tests with what they need, and run none
  --report FILE   write the outcome of each test to FILE, as JSON
  --help          this text

The last line is `N passed, N failed, N skipped`. Exit status: 0 unless a test failed, 1 when one
did or the driver of a GPU that is there cannot be used, 2 for wrong arguments.
";

/// What the arguments ask for.
enum Task {
    Help,
    List(Selection),
    All {
        selection: Selection,
        report: Option<PathBuf>,
    },
    /// Runs one test, inside its child process.
    One(String),
    /// Looks for a GPU, inside a child process.
    Probe,
    /// Plays a role of a test, inside another process of the test.
    Role(String, Vec<String>),
}

fn main() -> ExitCode {
    let code = run();
    ending::await_connections();
    code
}

fn run() -> ExitCode {
    match task(std::env::args().skip(1)) {
        Ok(Task::Help) => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Ok(Task::List(selection)) => runner::list(&selection),
        Ok(Task::All { selection, report }) => runner::run_all(&selection, report.as_deref()),
        Ok(Task::One(name)) => runner::run_one(&name),
        Ok(Task::Probe) => runner::probe_in_child(),
        Ok(Task::Role(role, arguments)) => match tests::play(&role, &arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("{role}: {message}");
                ExitCode::FAILURE
            }
        },
        Err(message) => {
            eprint!("error: {message}\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

fn task(mut arguments: impl Iterator<Item = String>) -> Result<Task, String> {
    let mut selection = Selection::default();
    let mut report = None;
    let mut list = false;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--help" | "-h" => return Ok(Task::Help),
            "--list" => list = true,
            "--report" => report = Some(PathBuf::from(value()?)),
            "--skip" => selection.without.push(value()?),
            runner::RUN_ONE => return Ok(Task::One(value()?)),
            runner::PROBE => return Ok(Task::Probe),
            tests::world::ROLE => return Ok(Task::Role(value()?, arguments.collect())),
            unknown if unknown.starts_with('-') => return Err(format!("unknown option {unknown}")),
            _ => selection.with.push(argument),
        }
    }
    Ok(if list { Task::List(selection) } else { Task::All { selection, report } })
}
