//! Findings of probes, and how they are sent.

use std::{
    fmt,
    io::Write,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// The outcome of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It works.
    Ok,
    /// It works, with a remark.
    Warning,
    /// It does not work.
    Failed,
    /// It was not tried.
    Skipped,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        })
    }
}

/// The finding of a probe.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// The outcome of the probe.
    pub outcome: Outcome,
    /// The observation; may have several lines.
    pub detail: String,
    /// The meaning, if the observation needs an explanation; may have several lines.
    pub meaning: String,
    /// The advice; may have several lines, or none.
    pub fix: String,
    /// True if it was made with the simulated driver, so that it says nothing about a GPU.
    pub simulated: bool,
}

impl Finding {
    /// Returns a finding that everything works. `detail` has one or several lines.
    pub fn ok(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Ok, detail)
    }

    /// Returns a finding that it works, with a remark.
    pub fn warning(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Warning, detail)
    }

    /// Returns a finding that it does not work.
    pub fn failed(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Failed, detail)
    }

    /// Returns a finding that it was not tried.
    pub fn skipped(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Skipped, detail)
    }

    /// Returns a finding with this outcome and detail.
    pub fn new(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { outcome, detail: detail.into(), meaning: String::new(), fix: String::new(), simulated: false }
    }

    /// Adds what the finding means for the user, and what works instead.
    #[must_use]
    pub fn means(mut self, meaning: impl Into<String>) -> Self {
        self.meaning = meaning.into();
        self
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = fix.into();
        self
    }

    /// Marks the finding as one of the simulated driver.
    pub(super) fn simulated(mut self) -> Self {
        self.simulated = true;
        self
    }

    /// Adds meaning and fix, unless everything works.
    pub(super) fn or(self, meaning: &str, fix: &str) -> Self {
        if self.outcome == Outcome::Ok { self } else { self.means(meaning).fix(fix) }
    }

    /// Sends the finding to the process that started the probe.
    pub(super) fn send(&self) {
        // If the parent has ended, the finding is not needed.
        let _ = serde_json::to_string(self).map(|line| writeln!(std::io::stdout(), "{line}"));
    }

    /// Reads the finding at the end of a child's output.
    pub(super) fn receive(output: &[u8]) -> Option<Self> {
        serde_json::from_slice(output.trim_ascii().rsplit(|byte| *byte == b'\n').next()?).ok()
    }
}

/// The finding of a named probe, and how long it took.
#[derive(Debug)]
pub struct Report {
    /// The subject of the probe.
    pub title: &'static str,
    /// The finding.
    pub finding: Finding,
    /// The duration of the probe.
    pub took: Duration,
}

impl Report {
    /// Runs the probe `find`.
    pub fn new(title: &'static str, find: impl FnOnce() -> Finding) -> Self {
        let start = Instant::now();
        let finding = find();
        Self { title, finding, took: start.elapsed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_is_the_last_line_of_a_childs_output() {
        let line = serde_json::to_string(&Finding::failed("broken").means("no").fix("yes")).unwrap();
        let found = Finding::receive(format!("some library's chatter\n{line}\n").as_bytes()).unwrap();
        assert_eq!((found.outcome, found.fix.as_str()), (Outcome::Failed, "yes"));
        assert!(Finding::receive(b"").is_none());
        assert!(Finding::receive(b"{}").is_none());
    }
}
