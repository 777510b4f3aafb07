//! What a probe finds, and how it is told.

use std::{
    fmt,
    io::Write,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// How a probe went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It works.
    Ok,
    /// It works, with something to know.
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

/// What a probe finds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// How the probe went.
    pub outcome: Outcome,
    /// What was seen; may have several lines.
    pub detail: String,
    /// What that means, if it needs explaining; may have several lines.
    pub meaning: String,
    /// What to do about it; may have several lines, or none.
    pub fix: String,
    /// Whether the driver is the simulated one, so that the finding says nothing about a GPU.
    pub simulated: bool,
}

impl Finding {
    /// It works; `detail` is what was seen, in one or several lines.
    pub fn ok(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Ok, detail)
    }

    /// It works, with something to know.
    pub fn warning(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Warning, detail)
    }

    /// It does not work.
    pub fn failed(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Failed, detail)
    }

    /// It was not tried.
    pub fn skipped(detail: impl Into<String>) -> Self {
        Self::new(Outcome::Skipped, detail)
    }

    /// What was seen.
    pub fn new(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { outcome, detail: detail.into(), meaning: String::new(), fix: String::new(), simulated: false }
    }

    /// What it means for the user, and what falls back.
    #[must_use]
    pub fn means(mut self, meaning: impl Into<String>) -> Self {
        self.meaning = meaning.into();
        self
    }

    /// What to do about it.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = fix.into();
        self
    }

    /// The same finding of a driver that is no real one.
    pub(super) fn simulated(mut self) -> Self {
        self.simulated = true;
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
pub struct Report {
    /// What was examined.
    pub title: &'static str,
    /// What was found.
    pub finding: Finding,
    /// How long the probe took.
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
