//! The report: which calls were failed and killed, and whether all were.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

/// What happened to one operation.
#[derive(Debug, Serialize)]
pub(crate) struct Tested {
    pub(crate) operation: &'static str,
    /// Its driver calls in order, as the run without faults made them.
    pub(crate) calls: Vec<String>,
    /// Calls that were not chosen.
    pub(crate) left_out: usize,
    /// Calls that were failed.
    pub(crate) failed: usize,
    /// Failed calls that an error reported, or that a context stored because a drop cannot return an error.
    pub(crate) reported: usize,
    /// Failed calls that were not reported, by function; all of them may go unnoticed.
    pub(crate) unnoticed: BTreeMap<String, usize>,
    /// Calls at which a process was killed.
    pub(crate) killed: usize,
    /// The checks that failed.
    pub(crate) problems: Vec<String>,
}

impl Tested {
    pub(crate) fn new(operation: &'static str) -> Self {
        let calls = Vec::new();
        let problems = Vec::new();
        Self { operation, calls, left_out: 0, failed: 0, reported: 0, unnoticed: BTreeMap::new(), killed: 0, problems }
    }

    /// Returns whether every chosen call was failed and killed at, and all checks passed.
    pub(crate) fn is_good(&self) -> bool {
        let chosen = self.calls.len() - self.left_out;
        chosen > 0 && self.failed >= chosen && self.killed == chosen && self.problems.is_empty()
    }
}

/// Prints the operations, then the problems, then the totals. Returns whether all checks passed.
pub(crate) fn print(tested: &[Tested]) -> bool {
    println!("{:<24} {:>6} {:>7} {:>8} {:>7}", "operation", "calls", "failed", "reported", "killed");
    for one in tested {
        let Tested { operation, calls, failed, reported, killed, .. } = one;
        let verdict = if one.is_good() { "" } else { "  BAD" };
        println!("{operation:<24} {:>6} {failed:>7} {reported:>8} {killed:>7}{verdict}", calls.len());
    }
    for one in tested {
        for problem in &one.problems {
            println!("\n{}: {problem}", one.operation);
        }
    }
    let sum = |of: fn(&Tested) -> usize| tested.iter().map(of).sum::<usize>();
    let good = tested.iter().all(Tested::is_good);
    println!(
        "\n{} driver calls of {} operations, {} of them left out: {} faults, {} reported, {} kills; {}",
        sum(|one| one.calls.len()),
        tested.len(),
        sum(|one| one.left_out),
        sum(|one| one.failed),
        sum(|one| one.reported),
        sum(|one| one.killed),
        if good {
            "every other call was failed and killed at, and survived".to_owned()
        } else {
            format!("{} problems", sum(|one| one.problems.len()))
        },
    );
    good
}

/// Writes the results to a file, as JSON.
pub(crate) fn write(tested: &[Tested], path: &Path) -> Result<(), String> {
    let text = serde_json::to_string_pretty(tested).map_err(|error| error.to_string())?;
    std::fs::write(path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))
}
