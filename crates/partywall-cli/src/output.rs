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

use crate::describe::shorten;

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
    pub(crate) fn announce(self, text: impl AsRef<str>, value: &Value) {
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
        if self.json {
            return;
        }
        for line in table(headings, rows, spare, line_width()) {
            self.line(line);
        }
    }

    /// Prints a [`table`](Self::table) with a row for each item.
    pub(crate) fn rows<'a, T: 'a>(self, columns: &[Column<T>], items: impl IntoIterator<Item = &'a T>, spare: &[&str]) {
        let headings: Vec<_> = columns.iter().map(|(heading, _)| *heading).collect();
        let row = |item| columns.iter().map(|(_, cell)| cell(item)).collect();
        self.table(&headings, &items.into_iter().map(row).collect::<Vec<_>>(), spare);
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

/// A column of a table: its heading, and what it shows of an item.
pub(crate) type Column<T> = (&'static str, fn(&T) -> String);

/// Returns the characters of a line: `COLUMNS` if it is set, as for `ps`, else the terminal's width, else no limit.
fn line_width() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
    set.or_else(|| Some(usize::from(tcgetwinsize(std::io::stdout()).ok()?.ws_col)).filter(|columns| *columns > 0))
        .unwrap_or(usize::MAX)
}

/// Returns the lines of a table, see [`Output::table`].
fn table(headings: &[&str], rows: &[Vec<String>], spare: &[&str], limit: usize) -> Vec<String> {
    let columns = Columns::fit(headings, widest(headings, rows.iter().map(Vec::as_slice)), spare, limit);
    [columns.head()].into_iter().chain(rows.iter().map(|row| columns.line(row))).collect()
}

/// Returns the width of each column, in characters: that of its widest cell or its heading.
pub(crate) fn widest<'a, C: AsRef<str> + 'a>(headings: &[&str], rows: impl Iterator<Item = &'a [C]>) -> Vec<usize> {
    let mut widths: Vec<usize> = headings.iter().map(|heading| title(heading).chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.as_ref().chars().count());
        }
    }
    widths
}

/// The columns of a table that fit into a line, see [`Output::table`].
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    headings: &'a [&'a str],
    shown: Vec<usize>,
    widths: Vec<usize>,
    /// The last column that is shown.
    last: usize,
    is_cut: bool,
}

impl<'a> Columns<'a> {
    /// Chooses from columns of these widths the ones that fit into `limit` characters.
    pub(crate) fn fit(headings: &'a [&'a str], mut widths: Vec<usize>, spare: &[&str], limit: usize) -> Self {
        let mut shown: Vec<usize> = (0..headings.len()).collect();
        let mut last = headings.len() - 1;
        let total = |shown: &[usize], widths: &[usize]| {
            shown.iter().map(|column| widths[*column] + GAP.len()).sum::<usize>() - GAP.len()
        };
        let mut spare = spare.iter();
        // Even if the last column is cut off, the others have to fit.
        while total(&shown, &widths) > limit.saturating_add(widths[last] - widths[last].min(SHORT)) {
            let Some(next) = spare.next() else { break };
            shown.retain(|column| title(headings[*column]).trim_start() != *next);
            last = shown.last().copied().unwrap_or(last);
        }
        let shortest = widths[last].min(SHORT);
        let excess = total(&shown, &widths).saturating_sub(limit);
        let cut = widths[last].saturating_sub(excess).max(shortest);
        let is_cut = cut < widths[last];
        widths[last] = cut;
        Self { headings, shown, widths, last, is_cut }
    }

    /// Returns the line of the headings.
    pub(crate) fn head(&self) -> String {
        self.join(|column| title(self.headings[column]).to_owned())
    }

    /// Returns the line of a row.
    pub(crate) fn line<C: AsRef<str>>(&self, row: &[C]) -> String {
        self.join(|column| match row[column].as_ref() {
            cell if column == self.last && self.is_cut => shorten(cell, self.widths[self.last] - 1),
            cell => cell.to_owned(),
        })
    }

    fn join(&self, cell: impl Fn(usize) -> String) -> String {
        let cells = self.shown.iter().map(|column| {
            let width = self.widths[*column];
            let cell = cell(*column);
            if self.headings[*column].starts_with('>') { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    }
}

/// Returns a heading without the mark that aligns its column.
pub(crate) fn title(heading: &str) -> &str {
    heading.trim_start_matches('>')
}

/// The space between two columns.
const GAP: &str = "  ";

/// A last column of up to this many characters is not cut off.
const SHORT: usize = 20;

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

#[cfg(test)]
mod tests {
    use super::*;

    const HEADINGS: [&str; 4] = [">PID", "STATE", ">LEASES", "COMMAND"];

    fn rows() -> Vec<Vec<String>> {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        vec![row(["7", "alive", "2", "python train.py --batch 32"]), row(["4242", "hung", "1", "x"])]
    }

    #[test]
    fn table_that_fits_is_shown_whole() {
        let lines = table(&HEADINGS, &rows(), &["LEASES"], usize::MAX);
        assert_eq!(lines[0], " PID  STATE  LEASES  COMMAND");
        assert_eq!(lines[1], "   7  alive       2  python train.py --batch 32");
        assert_eq!(lines[2], "4242  hung        1  x");
        assert_eq!(table(&HEADINGS, &rows(), &["LEASES"], 47), lines, "it is 47 wide");
    }

    #[test]
    fn narrow_table_loses_the_end_of_its_last_column_then_spare_columns() {
        let lines = table(&HEADINGS, &rows(), &["LEASES", "STATE"], 42);
        assert_eq!(lines[1], "   7  alive       2  python train.py --ba…");
        assert_eq!(lines[2], "4242  hung        1  x");
        let lines = table(&HEADINGS, &rows(), &["LEASES", "STATE"], 34);
        assert_eq!(lines[0], " PID  STATE  COMMAND");
        assert_eq!(lines[1], "   7  alive  python train.py --ba…");
        let lines = table(&HEADINGS, &rows(), &["LEASES", "STATE"], 10);
        assert_eq!(
            lines[1], "   7  python train.py --b…",
            "the remaining columns are shown, however narrow the terminal is"
        );
    }

    #[test]
    fn column_that_has_become_the_last_is_cut_off() {
        let lines = table(
            &["NAME", "SAMPLES", "PLACE"],
            &[["x", "a sample of a very long type", "host"].map(str::to_owned).to_vec()],
            &["PLACE"],
            26,
        );
        assert_eq!(lines, ["NAME  SAMPLES", "x     a sample of a very …"]);
    }

    #[test]
    fn short_last_column_is_never_cut_off() {
        let rows = [vec!["a-long-name-of-a-segment".to_owned(), "3".to_owned(), "3 h 12 min".to_owned()]];
        let lines = table(&["NAME", ">OLDER", "AGE"], &rows, &["OLDER"], 36);
        assert_eq!(lines[1], "a-long-name-of-a-segment  3 h 12 min");
    }
}
