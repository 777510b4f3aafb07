//! Results of a run, for machines and for people.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{ComparisonResult, Error, Machine, chart::OF, commit, today};

/// All results of one run of a benchmark, with the machine that it ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// A short title.
    pub title: String,
    /// The day of the run in UTC, such as `2026-11-20`.
    pub date: String,
    /// The measured commit, if it is known.
    pub commit: Option<String>,
    /// The machine.
    pub machine: Machine,
    /// Remarks that a reader needs to judge the numbers, and the parts that were left out, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The results, in the order in which they were measured.
    pub comparisons: Vec<ComparisonResult>,
}

impl Report {
    /// Returns a report with today's date and the current commit, without results.
    pub fn new(title: impl Into<String>, machine: Machine) -> Self {
        Self {
            title: title.into(),
            date: today(),
            commit: commit(),
            machine,
            notes: Vec::new(),
            comparisons: Vec::new(),
        }
    }

    /// Reads a report that [`Report::write_json`] wrote.
    pub fn read_json(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io { action: "read", path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        serde_json::from_str(&text).map_err(|source| Error::Json { path: path.to_owned(), source })
    }

    /// Adds a result.
    pub fn push(&mut self, result: ComparisonResult) {
        self.comparisons.push(result);
    }

    /// Adds a remark for the reader.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Returns the results by the question that they answer, the parameter `of` of the measured case, in the order in
    /// which the questions were first asked. Results without one are a group, too.
    pub fn questions(&self) -> Vec<(Option<&str>, Vec<&ComparisonResult>)> {
        let mut questions: Vec<(Option<&str>, Vec<&ComparisonResult>)> = Vec::new();
        for result in &self.comparisons {
            let question = result.measured.case.parameters.get(OF).map(String::as_str);
            match questions.iter_mut().find(|(known, _)| *known == question) {
                Some((_, results)) => results.push(result),
                None => questions.push((question, vec![result])),
            }
        }
        questions
    }

    /// Returns whether all goals were met.
    pub fn all_met(&self) -> bool {
        self.comparisons.iter().all(ComparisonResult::met)
    }

    /// Writes the report as JSON, and creates its folder if it is missing.
    pub fn write_json(&self, path: &Path) -> Result<(), Error> {
        let write = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut text = serde_json::to_string_pretty(self)?;
            text.push('\n');
            std::fs::write(path, text)
        };
        write().map_err(|source| Error::Io { action: "write", path: path.to_owned(), source })
    }
}

/// Formats a number with about four significant digits and without an exponent, so that columns are easy to compare.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Case, Comparison, Plan, Unit};

    fn example() -> Report {
        let result =
            Comparison::new(Case::new("open", Unit::Microseconds).parameter("size", "2 MiB"), Box::new(|| Ok(130.0)))
                .floor(Case::new("raw", Unit::Microseconds), Box::new(|| Ok(65.5)))
                .rival(Case::new("other", Unit::Microseconds), Box::new(|| Ok(2000.0)))
                .goal("<= floor + 60 us".parse().unwrap())
                .run(Plan::new(4))
                .unwrap();
        let mut report =
            Report::new("an example", Machine::detect(Some("Some GPU".to_owned()), Some("580.1".to_owned())));
        report.push(result);
        report.note("made up");
        report
    }

    #[test]
    fn missed_goal_is_named() {
        let report = example();
        assert!(!report.all_met());
        let judgement = report.comparisons[0].judgement();
        assert_eq!(judgement.as_deref(), Some("<= floor + 60 us (here 125.5 us): MISSED"));
    }

    #[test]
    fn a_report_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/report.json");
        let report = example();
        report.write_json(&path).unwrap();
        assert_eq!(Report::read_json(&path).unwrap(), report);
        let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let measured = &json["comparisons"][0]["measured"];
        assert_eq!(measured["name"], "open");
        assert_eq!(measured["unit"], "us");
        assert_eq!(measured["percentiles"]["p99.9"], 130.0);
        assert_eq!(json["comparisons"][0]["verdict"]["met"], false);
    }

    #[test]
    fn file_without_a_report_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        let missing = Report::read_json(&path).unwrap_err().to_string();
        assert!(missing.contains("x.json"), "{missing}");
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(Report::read_json(&path), Err(Error::Json { .. })));
    }

    #[test]
    fn figures_keep_about_four_digits() {
        for (value, text) in [(0.0, "0.00"), (0.1234, "0.1234"), (4.0, "4.00"), (142.06, "142.1"), (4434.4, "4434")] {
            assert_eq!(figure(value), text);
        }
    }
}
