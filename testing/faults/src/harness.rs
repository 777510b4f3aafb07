//! The runs of an operation, and what is checked after each.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use partywall_harness::{Actor, Running, Sandbox};
use partywall_os::lock::IgnorePoison;

use crate::actors::{self, Holdings, Line, ReportedError};
use crate::operations::{self, Operation, held};
use crate::report::{self, Tested};

/// The driver calls of an operation that are failed and killed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Every,
    /// Of the calls of a function the first.
    First,
}

/// Runs the operations with a fault and a kill at each chosen call, and prints the results. Returns `Ok(false)` if a
/// check failed.
pub(crate) fn run(filter: &str, which: Which, file: Option<&Path>) -> Result<bool, String> {
    let operations: Vec<_> = operations::matching(filter).collect();
    let next = AtomicUsize::new(0);
    let tested = Mutex::new(Vec::new());
    // More workers than processors, because a worker spends time waiting for a death to be proved.
    let workers = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers.min(operations.len()) {
            scope.spawn(|| {
                let mut world = World::new();
                while let Some(operation) = operations.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = world.test(operation, which);
                    tested.lock().ignore_poison().push(result);
                }
            });
        }
    });
    let mut tested = tested.into_inner().ignore_poison();
    tested.sort_by_key(|one| operations.iter().position(|operation| operation.name == one.operation));
    if let Some(file) = file {
        report::write(&tested, file)?;
    }
    Ok(report::print(&tested))
}

/// The code of an injected failure: `CUDA_ERROR_UNKNOWN`, which no code interprets in another way.
const FAULT: &str = "999";
const FAULT_NAME: &str = "CUDA_ERROR_UNKNOWN";

/// A broker with a bystander.
struct World {
    bystander: Actor,
    /// What the broker holds while the bystander is the only member.
    rest: Holdings,
    runs: usize,
    /// The last field, because dropping it ends the broker.
    sandbox: Sandbox,
}

/// How an actor ended.
struct End {
    lines: Vec<Line>,
    code: Option<i32>,
    stderr: String,
    /// Functions and codes, in the order of the calls.
    calls: Vec<(String, String)>,
    /// What the actor left in the driver; `None` if it could not write its ledger.
    ledger: Option<String>,
}

impl World {
    fn new() -> Self {
        let sandbox = Sandbox::simulated(2);
        // The settle time gives a GPU time to stop, so it may be short here. Each of thousands of kills waits for it.
        let serve = sandbox.run(["serve", "--background", "--settle-ms", "5"]);
        assert_eq!(serve.code, Some(0), "{serve:?}");
        let directory = sandbox.path().join("bystander");
        fs::create_dir(&directory).expect("the sandbox can be written");
        let mut bystander = Actor::spawn(&mut actor(&sandbox, &[actors::BYSTANDER], &directory));
        let rest = serde_json::from_str(&bystander.line()).expect("a bystander reports what the broker holds");
        Self { bystander, rest, runs: 0, sandbox }
    }

    /// Runs one operation without faults, then with a failure and a kill at each chosen call.
    fn test(&mut self, operation: &'static Operation, which: Which) -> Tested {
        let mut tested = Tested::new(operation.name);
        let first = match self.count(operation) {
            Ok((first, calls)) => {
                tested.calls = calls;
                first
            }
            Err(problem) => {
                tested.problems.push(format!("without faults: {problem}"));
                return tested;
            }
        };
        for (offset, function) in tested.calls.clone().into_iter().enumerate() {
            if which == Which::First && tested.calls[..offset].contains(&function) {
                tested.left_out += 1;
                continue;
            }
            let index = first + offset + 1;
            let place = format!("call {} of {}, {function}", offset + 1, tested.calls.len());
            match self.fail(operation, index, &function) {
                Ok(true) => tested.reported += 1,
                Ok(false) => *tested.unnoticed.entry(function.clone()).or_default() += 1,
                Err(problem) => tested.problems.push(format!("{place}, failed: {problem}")),
            }
            tested.failed += 1;
            if let Err(problem) = self.kill(operation, index) {
                tested.problems.push(format!("{place}, killed: {problem}"));
            }
            tested.killed += 1;
        }
        tested
    }

    /// Runs the operation without faults. Returns the number of calls before it, and the functions that it calls.
    fn count(&mut self, operation: &Operation) -> Result<(usize, Vec<String>), String> {
        let end = self.act(operation, None);
        let functions: Vec<_> = end.calls.iter().map(|(function, _)| function.clone()).collect();
        let Finished { calls, outcome, kept } = end.finished()?;
        outcome.map_err(|error| error.text)?;
        if !kept.is_empty() {
            return Err(format!("drops have failed: {kept:?}"));
        }
        self.check_rest(operation)?;
        Ok((calls.start, functions.get(calls).ok_or("the log of calls is cut short")?.to_vec()))
    }

    /// Fails the call with this index. Returns whether an error reported the failure.
    fn fail(&mut self, operation: &Operation, index: usize, function: &str) -> Result<bool, String> {
        let end = self.act(operation, Some(&format!("*:{index}={FAULT}")));
        match end.calls.get(index - 1) {
            Some((failed, code)) if failed == function && code == FAULT => {}
            other => return Err(format!("another call was there, or none: {other:?}")),
        }
        let Finished { outcome, kept, .. } = end.finished()?;
        let reported = match outcome {
            Err(error) => check_error(operation.name, function, &error).map(|()| true)?,
            Ok(()) if kept.iter().any(|text| text.contains(function) && text.contains(FAULT_NAME)) => true,
            Ok(()) if operations::MAY_GO_UNNOTICED.iter().any(|(name, _)| *name == function) => false,
            Ok(()) => return Err("the failure went unnoticed".to_owned()),
        };
        self.check_rest(operation)?;
        Ok(reported)
    }

    /// Kills a process at the call with this index.
    fn kill(&mut self, operation: &Operation, index: usize) -> Result<(), String> {
        let end = self.act(operation, Some(&format!("*:{index}=kill")));
        if end.code.is_some() || end.calls.len() != index {
            return Err(format!("it was not killed there: exit code {:?}, {} calls", end.code, end.calls.len()));
        }
        self.check_rest(operation)
    }

    /// Checks that the broker holds what it held before, that the bystander's memory is unchanged, and that the
    /// operation works in the bystander.
    fn check_rest(&mut self, operation: &Operation) -> Result<(), String> {
        let deadline = Instant::now() + partywall_harness::WATCHDOG;
        loop {
            let now: Holdings = self.ask(actors::HOLDINGS)?;
            if now == self.rest {
                break;
            }
            if Instant::now() > deadline {
                return Err(format!("the broker does not come to rest: {now:?}, before {:?}", self.rest));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.ask::<Result<(), ReportedError>>(operation.name)?.map_err(|error| format!("the bystander: {}", error.text))
    }

    /// Sends an order to the bystander and returns its answer.
    fn ask<T: serde::de::DeserializeOwned>(&mut self, order: &str) -> Result<T, String> {
        self.bystander.send(order);
        serde_json::from_str(&self.bystander.line()).map_err(|error| format!("the bystander: {error}"))
    }

    /// Runs an actor to its end.
    fn act(&mut self, operation: &Operation, faults: Option<&str>) -> End {
        self.runs += 1;
        let directory = self.sandbox.path().join(format!("run-{}", self.runs));
        fs::create_dir(&directory).expect("the sandbox can be written");
        let calls = directory.join("calls");
        let ledger = directory.join("ledger");
        fs::create_dir(&ledger).expect("the sandbox can be written");
        let mut command = actor(&self.sandbox, &[actors::ACTOR, operation.name], &directory);
        command.env(actors::CALLS, &calls).env("SIMCUDA_LEDGER", &ledger);
        command.env("SIMCUDA_FAULTS", faults.unwrap_or_default());
        command.env("SIMCUDA_APART", actors::APART);
        let running = Running::spawn(&mut command);
        let pid = running.pid();
        let output = running.wait();
        let lines = output.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let end = End {
            lines,
            code: output.code,
            stderr: output.stderr,
            calls: read_calls(&calls),
            ledger: fs::read_to_string(ledger.join(format!("{pid}.json"))).ok().map(|text| text.trim().to_owned()),
        };
        let _ = fs::remove_dir_all(&directory);
        end
    }
}

/// The result of an operation in an actor that was not killed.
struct Finished {
    /// Which of the process's calls were the operation's.
    calls: std::ops::Range<usize>,
    outcome: Result<(), ReportedError>,
    /// Failures of drops that the contexts have stored.
    kept: Vec<String>,
}

impl End {
    /// Returns the operation's outcome if the process then ran it once more with success, and left nothing in the
    /// driver.
    fn finished(self) -> Result<Finished, String> {
        if self.code != Some(0) {
            return Err(format!("exit code {:?}: {}", self.code, self.stderr.trim()));
        }
        let [Line::Begins(begin), Line::Ended(end, outcome), Line::Kept(kept), Line::Again(again)] = &self.lines[..]
        else {
            return Err(format!("it said {:?}: {}", self.lines, self.stderr.trim()));
        };
        again.as_ref().map_err(|error| format!("the same operation then fails: {}", error.text))?;
        match self.ledger.as_deref() {
            Some("[]") => Ok(Finished { calls: *begin..*end, outcome: outcome.clone(), kept: kept.clone() }),
            Some(left) => Err(format!("it leaves {left}")),
            None => Err("it wrote no ledger".to_owned()),
        }
    }
}

/// Checks that an error names the failed call, its code, the object, and what to do.
fn check_error(operation: &str, function: &str, error: &ReportedError) -> Result<(), String> {
    let ReportedError { text, advice } = error;
    let object = operation.replace(' ', "-");
    let objects = [object.as_str(), held::PREFIX, "GPU", "cuda:", "pinned memory"];
    let wrong = if !text.contains(function) {
        "the call"
    } else if !text.contains(FAULT_NAME) {
        "the code"
    } else if !objects.iter().any(|object| text.contains(object)) {
        "the object"
    } else if advice.is_empty() {
        "what to do"
    } else {
        return Ok(());
    };
    Err(format!("the error does not name {wrong}: {text} ({advice})"))
}

/// Returns the command that starts this program in a role.
fn actor(sandbox: &Sandbox, role: &[&str], directory: &Path) -> Command {
    let program = std::env::current_exe().expect("a running program has a path");
    let mut command = sandbox.program(program);
    command.arg(actors::ROLE).args(role).arg(sandbox.socket()).arg(directory);
    command
}

/// Returns the functions and codes of a log of calls.
fn read_calls(log: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let parse = |line: &str| {
        let mut words = line.split(' ').skip(2).map(str::to_owned);
        Some((words.next()?, words.next()?))
    };
    text.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_must_say_everything() {
        let error = |text: &str, advice: &str| ReportedError { text: text.to_owned(), advice: advice.to_owned() };
        let check = |text, advice| check_error("open", "cuMemMap", &error(text, advice));
        assert_eq!(check("mapping \"open/1\": cuMemMap failed: CUDA_ERROR_UNKNOWN (999)", "do it"), Ok(()));
        let cases = [
            ("mapping \"open/1\": CUDA_ERROR_UNKNOWN", "do it", "the call"),
            ("mapping \"open/1\": cuMemMap failed", "do it", "the code"),
            ("mapping: cuMemMap failed: CUDA_ERROR_UNKNOWN", "do it", "the object"),
            ("mapping \"open/1\": cuMemMap failed: CUDA_ERROR_UNKNOWN", "", "what to do"),
        ];
        for (text, advice, wrong) in cases {
            assert!(check(text, advice).unwrap_err().contains(wrong), "{text}");
        }
    }

    #[test]
    fn process_with_leftovers_has_not_finished() {
        let end = |code, ledger: Option<&str>, again| End {
            lines: vec![Line::Begins(3), Line::Ended(5, Ok(())), Line::Kept(Vec::new()), Line::Again(again)],
            code,
            stderr: String::new(),
            calls: Vec::new(),
            ledger: ledger.map(str::to_owned),
        };
        assert_eq!(end(Some(0), Some("[]"), Ok(())).finished().unwrap().calls, 3..5);
        let bad = Err(ReportedError { text: "no".to_owned(), advice: String::new() });
        for end in [
            end(None, Some("[]"), Ok(())),
            end(Some(1), Some("[]"), Ok(())),
            end(Some(0), None, Ok(())),
            end(Some(0), Some("[{}]"), Ok(())),
            end(Some(0), Some("[]"), bad),
        ] {
            assert!(end.finished().is_err());
        }
    }
}
