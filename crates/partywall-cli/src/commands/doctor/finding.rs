//! What a probe finds, and how it is told.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::output::Output;

/// How a probe went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// It works.
    Ok,
    /// It works, with something to know.
    Warning,
    /// It does not work.
    Failed,
    /// It was not tried.
    Skipped,
}

/// What a probe finds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Finding {
    outcome: Outcome,
    /// What was seen; may have several lines.
    detail: String,
    /// What that means for the user, if it needs saying.
    meaning: String,
    /// What to do about it.
    fix: String,
}

impl Finding {
    pub(super) fn ok(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Ok, detail)
    }

    pub(super) fn warning(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Warning, detail)
    }

    pub(super) fn failed(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Failed, detail)
    }

    pub(super) fn skipped(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Skipped, detail)
    }

    pub(super) fn new(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { outcome, detail: detail.into(), meaning: String::new(), fix: String::new() }
    }

    /// What it means.
    pub(super) fn means(mut self, meaning: impl Into<String>) -> Self {
        self.meaning = meaning.into();
        self
    }

    /// What to do about it.
    pub(super) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = fix.into();
        self
    }

    /// What it means and what to do about it, unless all is well.
    pub(super) fn or(self, meaning: &str, fix: &str) -> Self {
        if self.outcome == Outcome::Ok { self } else { self.means(meaning).fix(fix) }
    }

    /// Tells it to the process that started the probe.
    pub(super) fn send(&self) {
        // If nobody listens, nobody wants to know.
        let _ = serde_json::to_string(self).map(|line| writeln!(std::io::stdout(), "{line}"));
    }

    /// Reads what a child's output ends with.
    pub(super) fn receive(output: &[u8]) -> Option<Self> {
        serde_json::from_slice(output.trim_ascii().rsplit(|byte| *byte == b'\n').next()?).ok()
    }
}

/// The finding of a named probe, and how long that took.
#[derive(Debug)]
pub(super) struct Report {
    title: &'static str,
    finding: Finding,
    took: Duration,
}

impl Report {
    /// Does the probe.
    pub(super) fn new(title: &'static str, find: impl FnOnce() -> Finding) -> Self {
        let start = Instant::now();
        let finding = find();
        Self { title, finding, took: start.elapsed() }
    }

    pub(super) fn outcome(&self) -> Outcome {
        self.finding.outcome
    }

    /// For people.
    pub(super) fn show(&self, output: Output) {
        let Finding { outcome, detail, meaning, fix } = &self.finding;
        let (word, colour) = match outcome {
            Outcome::Ok => ("ok", "\x1b[32m"),
            Outcome::Warning => ("warning", "\x1b[33m"),
            Outcome::Failed => ("failed", "\x1b[31m"),
            Outcome::Skipped => ("skipped", "\x1b[2m"),
        };
        let (on, off) = if std::io::stdout().is_terminal() { (colour, "\x1b[0m") } else { ("", "") };
        let mut head = format!("{on}{word:<9}{off}{:<18}", self.title);
        let mut lines: Vec<String> = detail.lines().map(str::to_owned).collect();
        let note = if *outcome == Outcome::Ok { "note" } else { "this means" };
        lines.extend(meaning.lines().map(|line| format!("{note}: {line}")));
        lines.extend(fix.lines().map(|line| format!("do this: {line}")));
        for line in lines {
            output.line(format!("{head}{line}"));
            head = " ".repeat(27);
        }
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        let Finding { outcome, detail, meaning, fix } = &self.finding;
        json!({
            "name": self.title, "outcome": outcome, "detail": detail, "meaning": meaning, "fix": fix,
            "micros": self.took.as_nanos() as f64 / 1000.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_the_last_line_of_a_childs_output() {
        let line = serde_json::to_string(&Finding::failed("broken").means("no").fix("yes")).unwrap();
        let found = Finding::receive(format!("some library's chatter\n{line}\n").as_bytes()).unwrap();
        assert_eq!((found.outcome, found.fix.as_str()), (Outcome::Failed, "yes"));
        assert!(Finding::receive(b"").is_none());
        assert!(Finding::receive(b"{}").is_none());
    }
}
