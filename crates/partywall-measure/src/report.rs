//! Results of a run, for machines and for people.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{ComparisonResult, Error, Machine, Measurement, Unit, Verdict, chart::OF, commit, today};

/// All results of one run of a benchmark, with the machine that it ran on.
///
/// [`fmt::Display`] prints it as an aligned table.
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        writeln!(f, "{}", self.title)?;
        write!(f, "{}, commit ", self.date)?;
        writeln!(f, "{}", self.commit.as_deref().unwrap_or("unknown"))?;
        writeln!(
            f,
            "{}, {} cores, {:.1} GiB, Linux {}",
            machine.cpu,
            machine.cores,
            machine.memory as f64 / f64::from(1 << 30),
            machine.kernel
        )?;
        if let Some(gpu) = &machine.gpu {
            let driver = machine.driver.as_deref().unwrap_or("unknown");
            writeln!(f, "{gpu}, driver {driver}")?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        writeln!(f)?;
        table(f, &self.rows())
    }
}

const HEADINGS: [&str; 12] =
    ["case", "n", "min", "p50", "p90", "p99", "p99.9", "max", "unit", "of case", "ratio", "goal"];

type Row = [String; HEADINGS.len()];

impl Report {
    fn rows(&self) -> Vec<Row> {
        let mut rows = vec![HEADINGS.map(str::to_owned)];
        for result in &self.comparisons {
            let unit = result.measured.case.unit;
            let ratio = result.ratio.map_or(String::new(), |r| format!("{r:.3}x"));
            let goal = result.verdict.as_ref().map_or(String::new(), |verdict| describe(verdict, unit));
            rows.push(row("", &result.measured, [String::new(), ratio, goal]));
            let beside = |role, other| {
                let of_case = result.of_case(other).map_or(String::new(), |ratio| format!("{}x", figure(ratio)));
                row(role, other, [of_case, String::new(), String::new()])
            };
            rows.extend(result.floor.iter().map(|floor| beside("  floor: ", floor)));
            rows.extend(result.rivals.iter().map(|rival| beside("  rival: ", rival)));
        }
        rows
    }
}

fn describe(verdict: &Verdict, unit: Unit) -> String {
    let outcome = if verdict.met { "met" } else { "MISSED" };
    let limit = figure(verdict.limit);
    format!("{} (here {limit} {unit}): {outcome}", verdict.goal)
}

fn row(role: &str, measurement: &Measurement, [of_case, ratio, goal]: [String; 3]) -> Row {
    let p = &measurement.percentiles;
    [
        format!("{role}{}", measurement.case),
        p.n.to_string(),
        figure(p.min),
        figure(p.p50),
        figure(p.p90),
        figure(p.p99),
        figure(p.p999),
        figure(p.max),
        measurement.case.unit.to_string(),
        of_case,
        ratio,
        goal,
    ]
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

/// Writes a table: texts (the first and the last column) are aligned to the left, numbers to the right.
fn table(f: &mut fmt::Formatter<'_>, rows: &[Row]) -> fmt::Result {
    let mut widths = [0; HEADINGS.len()];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let padded = if column == 0 || column + 1 == HEADINGS.len() {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            };
            line.push_str(gap);
            line.push_str(&padded);
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Case, Comparison, Plan};

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
    fn the_table_is_aligned_and_shows_the_missed_goal() {
        let report = example();
        assert!(!report.all_met());
        let text = report.to_string();
        assert!(text.contains("Some GPU, driver 580.1"), "{text}");
        assert!(text.contains("note: made up"), "{text}");
        let lines: Vec<_> = text.lines().skip_while(|line| !line.is_empty()).collect();
        assert!(lines[1].starts_with("case"), "{text}");
        assert!(lines[2].starts_with("open [size=2 MiB]"), "{text}");
        assert!(lines[2].ends_with("1.985x  <= floor + 60 us (here 125.5 us): MISSED"));
        assert!(lines[3].starts_with("  floor: raw"), "{text}");
        assert!(lines[4].starts_with("  rival: other"), "{text}");
        assert!(lines[3].ends_with(" 0.5038x") && lines[4].ends_with(" 15.38x"), "{text}");
        let right_edge = |line: &str| line.find(" us").unwrap();
        assert_eq!(right_edge(lines[3]), right_edge(lines[4]), "{text}");
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
