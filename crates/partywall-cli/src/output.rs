//! What commands print: plain sentences and aligned columns for people, JSON for programs.
#![allow(clippy::print_stdout)] // the one place that prints

use std::io::{IsTerminal, Write};

use serde_json::Value;

/// Where a command prints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether programs read it.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// A sentence for people; programs do not get it.
    pub(crate) fn line(self, text: impl AsRef<str>) {
        if !self.json {
            print(text.as_ref());
        }
    }

    /// What a process that goes on has to say: a sentence for people, a value for programs. Whether anybody listens
    /// does not matter to it.
    pub(crate) fn announce(self, text: impl AsRef<str>, value: &Value) {
        let _ = write!(std::io::stdout(), "{}", self.announcement(text, value));
    }

    /// The line that [`Self::announce`] prints.
    pub(crate) fn announcement(self, text: impl AsRef<str>, value: &Value) -> String {
        if self.json { format!("{value}\n") } else { format!("{}\n", text.as_ref()) }
    }

    /// A remark that does not belong to the result, on standard error.
    pub(crate) fn remark(self, text: impl AsRef<str>) {
        let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
    }

    /// A value for programs; people do not get it.
    pub(crate) fn value(self, value: &Value) {
        if self.json {
            print(&value.to_string());
        }
    }

    /// Rows under headings, aligned for people. Columns whose heading begins with `>` are aligned to the right.
    pub(crate) fn table(self, headings: &[&str], rows: &[Vec<String>]) {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([headings[column].trim_start_matches('>').chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..headings.len()).map(width).collect();
        let show = |cells: Vec<&str>| {
            let cells = cells.iter().zip(&widths).zip(headings).map(|((cell, width), heading)| {
                if heading.starts_with('>') { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            self.line(cells.collect::<Vec<_>>().join("  ").trim_end());
        };
        show(headings.iter().map(|heading| heading.trim_start_matches('>')).collect());
        for row in rows {
            show(row.iter().map(String::as_str).collect());
        }
    }

    /// A failure: what and why, what to do, and where more is said about it; to programs `value`.
    pub(crate) fn failure(self, message: &str, advice: &str, entry: Option<&str>, value: &Value) {
        if self.json {
            print(&value.to_string());
            return;
        }
        let mut stderr = std::io::stderr();
        let (on, off) = if stderr.is_terminal() { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
        let _ = writeln!(stderr, "{on}error:{off} {message}");
        if !advice.is_empty() {
            let _ = writeln!(stderr, "  → {advice}");
        }
        if let Some(entry) = entry {
            let _ = writeln!(stderr, "  more: docs/troubleshooting.md#{entry}");
        }
    }
}

/// Prints a line. A reader that has gone (`| head`) wants no more, which is no failure.
fn print(text: &str) {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: standard output cannot be written: {error}");
            std::process::exit(5);
        }
    }
}
