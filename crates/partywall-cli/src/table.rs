//! Tables: what their columns show of an item, and which columns fit into a line.

use std::{
    cmp::Ordering,
    ops::Deref,
    time::{Duration, SystemTime},
};

use partywall::{Place, bytes};

use crate::{describe, text};

/// A column of tables whose rows are about a `T`. Each object has its columns in a file of [`columns`](crate::columns).
pub(crate) struct Column<T> {
    heading: Heading<'static>,
    cell: fn(&Entry<'_, T>) -> Cell,
}

impl<T> Column<T> {
    /// Returns a column that is aligned to the left, for texts.
    pub(crate) const fn left(title: &'static str, cell: fn(&Entry<'_, T>) -> Cell) -> Self {
        Self { heading: Heading { title, is_right: false, spare: 0 }, cell }
    }

    /// Returns a column that is aligned to the right, for numbers.
    pub(crate) const fn right(title: &'static str, cell: fn(&Entry<'_, T>) -> Cell) -> Self {
        Self { heading: Heading { title, is_right: true, spare: 0 }, cell }
    }

    /// Returns it with a place among the columns that a narrow terminal leaves out, in this order, from 1. A column
    /// with 0 is always shown.
    pub(crate) const fn spare(mut self, place: u8) -> Self {
        self.heading.spare = place;
        self
    }

    /// Returns it under another heading.
    pub(crate) const fn headed(mut self, title: &'static str) -> Self {
        self.heading.title = title;
        self
    }
}

/// Returns the headings of columns.
pub(crate) fn headings<T>(columns: &[Column<T>]) -> Vec<Heading<'static>> {
    columns.iter().map(|column| column.heading).collect()
}

/// The heading of a column, and how the column is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heading<'a> {
    pub(crate) title: &'a str,
    is_right: bool,
    /// See [`Column::spare`].
    spare: u8,
}

impl<'a> Heading<'a> {
    /// Returns the headings of these titles. One that begins with `>` aligns its column to the right. The columns of
    /// `spare` are left out in this order.
    pub(crate) fn parse(titles: &[&'a str], spare: &[&str]) -> Vec<Self> {
        let heading = |title: &&'a str| {
            let shown = title.trim_start_matches('>');
            let place = spare.iter().position(|spare| *spare == shown.trim_start());
            Self { title: shown, is_right: title.starts_with('>'), spare: place.map_or(0, |place| place as u8 + 1) }
        };
        titles.iter().map(heading).collect()
    }
}

/// An item that a table lists, and what its cells show beside it. It stands for the item.
pub(crate) struct Entry<'a, T> {
    pub(crate) item: &'a T,
    /// When the item was listed, since 1970.
    pub(crate) now: Duration,
    /// Whether long names are abbreviated.
    pub(crate) is_brief: bool,
    /// How fast the number that the item counts grows per second, if that was measured.
    pub(crate) rate: Option<f64>,
    /// What follows from other items, in words.
    pub(crate) note: String,
}

impl<T> Deref for Entry<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item
    }
}

impl<'a, T> Entry<'a, T> {
    /// Returns an entry for an item that has been listed now.
    pub(crate) fn new(item: &'a T) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { item, now, is_brief: false, rate: None, note: String::new() }
    }

    /// Returns the cells of its row. Each is one line, whatever the text of other processes contains.
    pub(crate) fn cells(&self, columns: &[Column<T>]) -> Vec<Cell> {
        let most = if self.is_brief { LONGEST } else { usize::MAX };
        let cells = columns.iter().map(|column| (column.cell)(self));
        cells.map(|cell| Cell { text: describe::shorten(&cell.text, most), ..cell }).collect()
    }

    /// Returns a name, see [`abbreviated`].
    pub(crate) fn long_name(&self, name: &str) -> Cell {
        if self.is_brief { abbreviated(name).into() } else { name.into() }
    }

    /// Returns a place, see [`short_place`].
    pub(crate) fn place(&self, place: Place) -> Cell {
        if self.is_brief { short_place(place).into() } else { describe::place(place).into() }
    }

    /// Returns the time since a moment, which is given in milliseconds since 1970.
    pub(crate) fn since(&self, ms: u64) -> Cell {
        let age = self.now.saturating_sub(Duration::from_millis(ms));
        Cell::ranked(text::duration(age), age.as_secs_f64())
    }

    /// Returns the rate, blank if it is unknown.
    pub(crate) fn rate(&self) -> Cell {
        let cell = |rate| match rate {
            0.0 => Cell::ranked("0".into(), rate),
            rate if rate < 99.95 => Cell::ranked(format!("{rate:.1}"), rate),
            rate => Cell::ranked(format!("{rate:.0}"), rate),
        };
        self.rate.map(cell).into()
    }
}

/// Returns a name of at most [`NAME`] characters: its beginning and its end, by which names mostly differ.
pub(crate) fn abbreviated(name: &str) -> String {
    let length = name.chars().count();
    if length <= NAME {
        return describe::shorten(name, NAME);
    }
    let first: String = name.chars().take(NAME / 2 - 1).collect();
    let last: String = name.chars().skip(length - NAME / 2).collect();
    describe::shorten(&format!("{first}…{last}"), NAME)
}

/// Returns `host`, `pinned:N`, or the beginning of a GPU's UUID, by which GPUs differ.
pub(crate) fn short_place(place: Place) -> String {
    describe::place(place).chars().take(UUID).collect()
}

/// A text, and for numbers their place in an order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Cell {
    pub(crate) text: String,
    rank: Option<f64>,
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, rank: None }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Self::ranked(number.to_string(), number as f64)
    }
}

impl From<u32> for Cell {
    fn from(number: u32) -> Self {
        u64::from(number).into()
    }
}

impl<C: Into<Cell>> From<Option<C>> for Cell {
    fn from(cell: Option<C>) -> Self {
        cell.map_or_else(Self::default, Into::into)
    }
}

impl Cell {
    pub(crate) fn ranked(text: String, rank: f64) -> Self {
        Self { text, rank: Some(rank) }
    }

    pub(crate) fn bytes(number: u64) -> Self {
        Self::ranked(bytes(number), number as f64)
    }

    /// Returns milliseconds as seconds.
    pub(crate) fn seconds(ms: u64) -> Self {
        Self::ranked(text::seconds(ms), ms as f64)
    }

    pub(crate) fn nanoseconds(ns: u64) -> Self {
        Self::ranked(text::short_time(ns), ns as f64)
    }

    /// Returns a number that was not counted if it is large.
    pub(crate) fn or_many(number: Option<u32>) -> Self {
        number.map_or_else(|| Self::ranked("many".into(), f64::MAX), Self::from)
    }

    pub(crate) fn is_number(&self) -> bool {
        self.rank.is_some()
    }

    /// Orders numbers after texts.
    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        match (self.rank, other.rank) {
            (Some(one), Some(two)) => one.total_cmp(&two),
            (one, two) => one.is_some().cmp(&two.is_some()).then_with(|| self.text.cmp(&other.text)),
        }
    }
}

/// The columns of a table that fit into a line.
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    headings: &'a [Heading<'a>],
    shown: Vec<usize>,
    widths: Vec<usize>,
    /// The last column that is shown.
    last: usize,
    is_cut: bool,
}

impl<'a> Columns<'a> {
    /// Chooses the columns that fit into `limit` characters. If the rows are wider, columns are left out one by one, see
    /// [`Column::spare`], until they fit; then the last column is cut off, unless it is short.
    pub(crate) fn fit<'r>(headings: &'a [Heading<'a>], rows: impl Iterator<Item = &'r [Cell]>, limit: usize) -> Self {
        let mut widths: Vec<usize> = headings.iter().map(|heading| heading.title.chars().count()).collect();
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        let mut shown: Vec<usize> = (0..headings.len()).collect();
        let mut last = headings.len() - 1;
        let total = |shown: &[usize], widths: &[usize]| {
            shown.iter().map(|column| widths[*column] + GAP.len()).sum::<usize>() - GAP.len()
        };
        let mut spare: Vec<_> = shown.iter().copied().filter(|column| headings[*column].spare > 0).collect();
        spare.sort_by_key(|column| headings[*column].spare);
        let mut spare = spare.into_iter();
        // Even if the last column is cut off, the others have to fit.
        while total(&shown, &widths) > limit.saturating_add(widths[last] - widths[last].min(SHORT)) {
            let Some(next) = spare.next() else { break };
            shown.retain(|column| *column != next);
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
        self.join(|column| self.headings[column].title.to_owned())
    }

    /// Returns the line of a row.
    pub(crate) fn line(&self, row: &[Cell]) -> String {
        self.join(|column| match &row[column].text {
            text if column == self.last && self.is_cut => describe::shorten(text, self.widths[self.last] - 1),
            text => text.clone(),
        })
    }

    fn join(&self, cell: impl Fn(usize) -> String) -> String {
        let cells = self.shown.iter().map(|column| {
            let width = self.widths[*column];
            let cell = cell(*column);
            if self.headings[*column].is_right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    }
}

/// Returns the lines of a table in at most `limit` characters, see [`Columns::fit`].
pub(crate) fn lines(headings: &[Heading<'_>], rows: &[Vec<Cell>], limit: usize) -> Vec<String> {
    let columns = Columns::fit(headings, rows.iter().map(Vec::as_slice), limit);
    [columns.head()].into_iter().chain(rows.iter().map(|row| columns.line(row))).collect()
}

/// The space between two columns.
const GAP: &str = "  ";

/// A last column of up to this many characters is not cut off.
const SHORT: usize = 20;

/// The most characters of an abbreviated name.
const NAME: usize = 36;

/// The most characters of any other cell of a brief entry.
const LONGEST: usize = 200;

/// `GPU-` and the first eight digits.
const UUID: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::{member, name, object, topic_user};

    const TITLES: [&str; 4] = [">PID", "STATE", ">LEASES", "COMMAND"];

    fn table(titles: &[&str], rows: &[Vec<&str>], spare: &[&str], limit: usize) -> Vec<String> {
        let rows: Vec<_> = rows.iter().map(|row| row.iter().map(|text| Cell::from(*text)).collect()).collect();
        lines(&Heading::parse(titles, spare), &rows, limit)
    }

    fn rows() -> Vec<Vec<&'static str>> {
        vec![vec!["7", "alive", "2", "python train.py --batch 32"], vec!["4242", "hung", "1", "x"]]
    }

    #[test]
    fn table_that_fits_is_shown_whole() {
        let lines = table(&TITLES, &rows(), &["LEASES"], usize::MAX);
        assert_eq!(lines[0], " PID  STATE  LEASES  COMMAND");
        assert_eq!(lines[1], "   7  alive       2  python train.py --batch 32");
        assert_eq!(lines[2], "4242  hung        1  x");
        assert_eq!(table(&TITLES, &rows(), &["LEASES"], 47), lines, "it is 47 wide");
    }

    #[test]
    fn narrow_table_loses_the_end_of_its_last_column_then_spare_columns() {
        let lines = table(&TITLES, &rows(), &["LEASES", "STATE"], 42);
        assert_eq!(lines[1], "   7  alive       2  python train.py --ba…");
        assert_eq!(lines[2], "4242  hung        1  x");
        let lines = table(&TITLES, &rows(), &["LEASES", "STATE"], 34);
        assert_eq!(lines[0], " PID  STATE  COMMAND");
        assert_eq!(lines[1], "   7  alive  python train.py --ba…");
        let lines = table(&TITLES, &rows(), &["LEASES", "STATE"], 10);
        assert_eq!(
            lines[1], "   7  python train.py --b…",
            "the remaining columns are shown, however narrow the terminal is"
        );
    }

    #[test]
    fn column_that_has_become_the_last_is_cut_off() {
        let row = vec!["x", "a sample of a very long type", "host"];
        let lines = table(&["NAME", "SAMPLES", "PLACE"], &[row], &["PLACE"], 26);
        assert_eq!(lines, ["NAME  SAMPLES", "x     a sample of a very …"]);
    }

    #[test]
    fn short_last_column_is_never_cut_off() {
        let rows = [vec!["a-long-name-of-a-segment", "3", "3 h 12 min"]];
        let lines = table(&["NAME", ">OLDER", "AGE"], &rows, &["OLDER"], 36);
        assert_eq!(lines[1], "a-long-name-of-a-segment  3 h 12 min");
    }

    #[test]
    fn columns_are_left_out_in_the_order_of_their_places() {
        const LAST: Column<u32> = Column::left("LAST", |_| "stays".into());
        const FIRST: Column<u32> = Column::right("N", |n| (**n).into());
        let columns = [FIRST.spare(2), FIRST.headed("SQUARE").spare(1), LAST];
        let rows = [Entry::new(&7).cells(&columns)];
        let shown = |limit| lines(&headings(&columns), &rows, limit);
        assert_eq!(shown(16), ["N  SQUARE  LAST", "7       7  stays"]);
        assert_eq!(shown(15), ["N  LAST", "7  stays"]);
        assert_eq!(shown(7), ["LAST", "stays"]);
        assert_eq!(shown(1), ["LAST", "stays"]);
    }

    #[test]
    fn no_two_columns_of_a_table_have_the_same_place() {
        let tables = [
            headings(member::PS),
            headings(member::STATUS),
            headings(member::TOP),
            headings(name::SEGMENTS),
            headings(name::POOLS),
            headings(name::TOPICS),
            headings(name::QUEUES),
            headings(name::TOPIC_RATES),
            headings(name::TOP),
            headings(name::TOP_QUEUES),
            headings(object::TIMELINES),
            headings(object::SEMAPHORES),
            headings(object::TOP),
            headings(topic_user::PUBLISHERS),
            headings(topic_user::SUBSCRIBERS),
            headings(topic_user::TOP),
        ];
        for headings in tables {
            let mut places: Vec<_> = headings.iter().map(|heading| heading.spare).filter(|place| *place > 0).collect();
            let all = places.len();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), all, "{headings:?}");
            assert!(headings.iter().all(|heading| !heading.title.is_empty()), "{headings:?}");
        }
    }
}
