//! The output of commands: sentences and aligned columns for people, JSON for programs.
#![allow(clippy::print_stdout)] // the one place that prints

use std::{
    io::{IsTerminal, Write},
    path::Path,
};

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use partywall::files;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    termios::tcgetwinsize,
};
use serde_json::Value;

use crate::table::{self, Cell, Column, Entry, Heading};

/// Where a command prints.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
    quiet: bool,
    /// Whether lines and values go to standard error.
    on_standard_error: bool,
}

impl Output {
    /// Returns the output. `quiet` leaves out remarks and progress.
    pub fn new(json: bool, quiet: bool) -> Self {
        Self { json, quiet, on_standard_error: false }
    }

    /// Prints lines and values on standard error: the result on standard output is something else.
    pub fn on_standard_error(self) -> Self {
        Self { on_standard_error: true, ..self }
    }

    /// Returns whether progress is shown: not with `--json` and not with `--quiet`.
    pub(crate) fn shows_progress(self) -> bool {
        !self.json && !self.quiet
    }

    /// Returns whether lines may have colours.
    pub fn has_colours(self) -> bool {
        if self.on_standard_error { has_colours(&std::io::stderr()) } else { has_colours(&std::io::stdout()) }
    }

    /// Returns whether the output is JSON for programs.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Prints a line for people; `--json` leaves it out.
    pub fn line(self, text: impl AsRef<str>) {
        if !self.json {
            self.print(text.as_ref());
        }
    }

    /// Prints a message of a process that continues: a sentence for people, a value for programs. The process continues
    /// even if its output is closed.
    pub fn announce(self, text: impl AsRef<str>, value: &Value) {
        let _ = write!(std::io::stdout(), "{}", self.announcement(text, value));
    }

    /// Returns the line that [`Self::announce`] prints.
    pub(crate) fn announcement(self, text: impl AsRef<str>, value: &Value) -> String {
        if self.json { format!("{value}\n") } else { format!("{}\n", text.as_ref()) }
    }

    /// Prints a remark that does not belong to the result on standard error. `--quiet` leaves it out.
    pub fn remark(self, text: impl AsRef<str>) {
        if !self.quiet {
            self.relay(text);
        }
    }

    /// Prints a remark for people; `--json` leaves it out too.
    pub fn note(self, text: impl AsRef<str>) {
        if !self.json {
            self.remark(text);
        }
    }

    /// Prints a line on standard error, also with `--quiet`: the subject of a question, or the output of a child
    /// process.
    pub(crate) fn relay(self, text: impl AsRef<str>) {
        let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
    }

    /// Prints a question on standard error; the answer follows on the same line.
    pub(crate) fn ask(self, text: impl AsRef<str>) {
        let _ = write!(std::io::stderr(), "{}", text.as_ref());
    }

    /// Returns whether the output may still have a reader. A pipe reports that its other end is closed.
    pub(crate) fn is_read(self) -> bool {
        let stdout = std::io::stdout();
        // The reader should see all earlier output now.
        let _ = stdout.lock().flush();
        let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_err() || !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Prints a whole document, with and without `--json`.
    pub(crate) fn document(self, text: &str) {
        print(text.trim_end());
    }

    /// Prints a value for programs; only `--json` shows it.
    pub fn value(self, value: &Value) {
        if self.json {
            self.print(&value.to_string());
        }
    }

    fn print(self, text: &str) {
        if self.on_standard_error { self.relay(text) } else { print(text) }
    }

    /// Prints aligned rows under headings, for people. A heading that begins with `>` aligns its column to the right.
    ///
    /// If the rows are wider than the terminal, the columns of `spare` are left out one by one until the rows
    /// fit; then the last column is cut off, unless it is short. Output that is not a terminal gets all columns.
    pub fn table(self, headings: &[&str], rows: &[Vec<String>], spare: &[&str]) {
        let rows: Vec<_> = rows.iter().map(|row| row.iter().map(|text| Cell::from(text.as_str())).collect()).collect();
        self.cells("", &Heading::parse(headings, spare), &rows);
    }

    /// Prints a table with a row for each item.
    pub(crate) fn rows<'a, T: 'a>(self, columns: &[Column<T>], items: impl IntoIterator<Item = &'a T>) {
        self.entries(columns, items.into_iter().map(Entry::new));
    }

    /// Prints a table with a row for each entry.
    pub(crate) fn entries<'a, T: 'a>(self, columns: &[Column<T>], entries: impl Iterator<Item = Entry<'a, T>>) {
        let rows: Vec<_> = entries.map(|entry| entry.cells(columns)).collect();
        self.cells("", &table::headings(columns), &rows);
    }

    /// Prints an empty line, a title, and below it, indented, a table with a row for each item; nothing without items.
    pub(crate) fn section<'a, T: 'a>(self, title: &str, columns: &[Column<T>], items: impl IntoIterator<Item = &'a T>) {
        let rows: Vec<_> = items.into_iter().map(|item| Entry::new(item).cells(columns)).collect();
        if !rows.is_empty() {
            self.line(format!("\n{title}"));
            self.cells("  ", &table::headings(columns), &rows);
        }
    }

    /// Prints the cells of a table, each line after `indent`.
    pub(crate) fn cells(self, indent: &str, headings: &[Heading<'_>], rows: &[Vec<Cell>]) {
        for line in table::lines(headings, rows, line_width().saturating_sub(indent.len())) {
            self.line(format!("{indent}{line}"));
        }
    }

    /// Prints a failure: the message, the advice and the entry of the documentation; with `--json` prints `value`.
    pub(crate) fn failure(self, message: &str, advice: &str, entry: Option<&str>, value: &Value) {
        if self.json {
            print(&value.to_string());
            return;
        }
        let mut stderr = std::io::stderr();
        let (on, off) = if has_colours(&stderr) { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
        let _ = writeln!(stderr, "{on}error:{off} {message}");
        if !advice.is_empty() {
            let _ = writeln!(stderr, "  → {advice}");
        }
        if let Some(entry) = entry {
            let _ = writeln!(stderr, "  more: partywall explain {entry}");
        }
    }
}

/// Returns whether a stream may have colours: if it is a terminal that has some and the user does not object, by
/// `NO_COLOR` or `CLICOLOR`. The same rule as for errors in the arguments, which clap prints.
pub(crate) fn has_colours(stream: &impl RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}

/// Returns whether a stream is a terminal whose lines can be written again.
pub(crate) fn is_screen(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}

/// Returns whether a path leads to standard output, as `/dev/stdout` does.
pub(crate) fn is_standard_output(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let named = std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let ours = rustix::fs::fstat(std::io::stdout()).map(|found| (found.st_dev, found.st_ino)).ok();
    files::is_in_place(path) && named.is_some() && named == ours
}

/// Returns the characters of a line: `COLUMNS` if it is set, as for `ps`, else the terminal's width, else no limit.
fn line_width() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
    set.or_else(|| Some(usize::from(tcgetwinsize(std::io::stdout()).ok()?.ws_col)).filter(|columns| *columns > 0))
        .unwrap_or(usize::MAX)
}

/// Prints a line. A reader that has closed the pipe (`| head`) is not a failure.
fn print(text: &str) {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: cannot write standard output: {error}");
            std::process::exit(5);
        }
    }
}
