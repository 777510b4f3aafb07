//! Fails every driver call of every public operation, then kills the process at every one of them.
//!
//! Runs on the simulated driver, which fails a call, or ends the process at it, on demand. For each
//! [operation](operations::OPERATIONS) a first run counts its driver calls; then each call is failed once, and then a
//! process is killed at each once. After each of these
//!
//! - an error names the call, its code, the object and what to do, and the same operation then succeeds;
//! - a process that ended by itself has left nothing in the driver (its ledger is empty);
//! - the broker holds exactly what it held before;
//! - another process of the same domain still has its memory, and the operation works there.
//!
//! | module | holds |
//! |---|---|
//! | [`operations`] | the public operations, one list: a new operation is one line there |
//! | [`harness`] | the runs, and what is checked after each |
//! | [`actors`] | the processes: one that runs an operation, and a bystander |
//! | [`report`] | which calls were failed and killed, and whether all were |

#![allow(clippy::print_stdout, reason = "a program that people run and read; the lint is meant for libraries")]

mod actors;
mod graphs;
mod harness;
mod operations;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use harness::Which;

const HELP: &str = "\
usage: partywall-faults [NAME] [--first] [--list] [--report FILE]

Fails each driver call of the operations whose names contain NAME, else of all, then kills a process at
each. Needs partywall and the simulated driver beside it: cargo build -p partywall-cli -p partywall-simcuda-library

  --first         only the first call of each function in an operation
  --list          print the operations and run none
  --report FILE   write what happened to FILE, as JSON
  --help          this text

Exit status: 0 if every call was failed and killed at, and survived; 1 if not; 2 for wrong arguments.
";

enum Task {
    Help,
    List(String),
    All { filter: String, which: Which, report: Option<PathBuf> },
    Actor { role: String, arguments: Vec<String> },
}

fn main() -> ExitCode {
    match task(std::env::args().skip(1)) {
        Ok(Task::Help) => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Ok(Task::List(filter)) => {
            for operation in operations::matching(&filter) {
                println!("{:<32} {}", operation.name, operation.what);
            }
            ExitCode::SUCCESS
        }
        Ok(Task::Actor { role, arguments }) => match actors::play(&role, &arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("{role}: {message}");
                ExitCode::FAILURE
            }
        },
        Ok(Task::All { filter, which, report }) => match harness::run(&filter, which, report.as_deref()) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(message) => {
                eprintln!("error: {message}");
                ExitCode::from(2)
            }
        },
        Err(message) => {
            eprint!("error: {message}\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

fn task(mut arguments: impl Iterator<Item = String>) -> Result<Task, String> {
    let mut filter = None;
    let mut report = None;
    let mut which = Which::Every;
    let mut list = false;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--help" | "-h" => return Ok(Task::Help),
            "--first" => which = Which::First,
            "--list" => list = true,
            "--report" => report = Some(PathBuf::from(value()?)),
            actors::ROLE => return Ok(Task::Actor { role: value()?, arguments: arguments.collect() }),
            unknown if unknown.starts_with('-') => return Err(format!("unknown option {unknown}")),
            _ if filter.is_some() => return Err("only one NAME can be given".to_owned()),
            _ => filter = Some(argument),
        }
    }
    let filter = filter.unwrap_or_default();
    if operations::matching(&filter).next().is_none() {
        return Err(format!("no operation's name contains {filter:?}; --list prints them"));
    }
    Ok(if list { Task::List(filter) } else { Task::All { filter, which, report } })
}
