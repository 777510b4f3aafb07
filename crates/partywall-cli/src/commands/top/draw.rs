//! The frames of the live view.
//!
//! ```text
//! two lines about the domain
//! the members
//! one of the other tables
//! one line: the keys, a question or an answer
//! ```

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use partywall::{Location, bytes, info::MemberState};
use ratatui::{
    Frame,
    buffer::Buffer,
    layout::Rect,
    style::{Color, Modifier, Style},
    widgets::{Block, Clear, Widget},
};

use super::{
    app::{App, Mode, Pane},
    picture::Picture,
    tables::{Alert, LOWER, View},
};
use crate::{
    describe,
    table::{Columns, short_place},
    text::{self, count},
};

/// The smallest terminal that shows all parts.
const SMALLEST: (u16, u16) = (40, 12);

/// The lines above and below the tables.
const HEAD: u16 = 2;
const FOOT: u16 = 1;

/// The lines of a table that are no rows: its title and its headings.
const TITLES: u16 = 2;

/// The columns that a text over the tables cannot use: its frame, a blank on each side, and one beside the frame.
const FRAME: u16 = 6;

/// After how many intervals without news the broker counts as not answering, and after how long at least.
const SILENT: (u32, Duration) = (3, Duration::from_secs(3));

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);
const ALARM: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

const KEYS: &str = "q quit  ? help  Tab pane  1-5 table  s sort  / filter  e evict  Enter holders";

/// What keys do, and what headings mean.
pub(super) const HELP: [&str; 18] = [
    "Tab          go to the other pane",
    "1 2 3 4 5    names, topics, queues, blocks, ordering; also ← →",
    "↑ ↓ PgUp PgDn Home End   select a row; also k j g G",
    "s S          sort by the next or the previous column",
    "r            reverse the order",
    "/            filter: type part of a name, a state, a pid or a command",
    "Esc          show all rows again",
    "Enter        who holds it, or what a process holds",
    "e            evict the selected process, after a question",
    "p            pause",
    "q            quit; also Ctrl-C",
    "",
    "PER S   samples, results or values per second",
    "LAG     samples that a subscriber is behind",
    "AGE     time from publishing to receiving: median and 99 of 100",
    "OLDER   versions that are still held though a newer one is there",
    "BEAT    time since the last heartbeat, which only users of GPUs send",
    "unproven   dead, but its work on a GPU may go on: partywall rm --unproven",
];

/// Returns the lines about the domain as a whole.
pub(super) fn summary(picture: &Picture, location: &Location) -> [String; 2] {
    let status = &picture.snapshot.status;
    let up = picture.snapshot.now.saturating_sub(Duration::from_millis(status.started_at));
    let mut states: BTreeMap<MemberState, u64> = BTreeMap::new();
    for member in picture.snapshot.members.iter().filter(|member| member.state != MemberState::Alive) {
        *states.entry(member.state).or_default() += 1;
    }
    let states: Vec<_> = states.iter().map(|(state, n)| format!("{n} {}", describe::state(*state))).collect();
    let states = if states.is_empty() { String::new() } else { format!(" ({})", states.join(", ")) };
    let driver = if status.simulated { ", simulated GPUs" } else { "" };
    let members = count(picture.snapshot.members.len() as u64, "member");
    let first = format!(
        "domain {}, broker {} up {}{driver}; {members}{states}",
        location.domain,
        status.pid,
        text::duration(up)
    );
    let mut held: Vec<_> =
        status.bytes.iter().map(|(at, held)| format!("{} {}", short_place((*at).into()), bytes(*held))).collect();
    if held.is_empty() {
        held.push("no memory".into());
    }
    if status.unproven > 0 {
        held.push(format!("quarantine {} of {}", bytes(status.unproven_bytes), count(status.unproven, "dead member")));
    }
    if status.deaths > 0 {
        held.push(count(status.deaths, "death"));
    }
    for (_, pids) in describe::mps_daemons(&picture.snapshot.members) {
        held.push(format!("{} under MPS", pids.len()));
    }
    held.push(count(status.fds, "fd"));
    if picture.snapshot.left_out > 0 {
        held.push(format!("{} without detail", count(picture.snapshot.left_out as u64, "name")));
    }
    [first, held.join(", ")]
}

impl App {
    /// Draws everything.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let buffer = frame.buffer_mut();
        if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
            let (columns, rows) = SMALLEST;
            let lines = ["the terminal is too small:", &format!("it needs {columns} columns and {rows} rows")];
            for (row, line) in area.rows().zip(lines) {
                write(buffer, row, line, ALARM);
            }
            return;
        }
        let mut rows = area.rows();
        let mut next = || rows.next().unwrap_or_default();
        self.head([next(), next()], buffer);
        let tables = area.height - HEAD - FOOT;
        let upper = upper_height(tables, self.panes[0].rows.len());
        let width = area.width;
        let pane = |y, height| Rect { x: area.x, y: area.y + y, width, height };
        let areas = [pane(HEAD, upper), pane(HEAD + upper, tables - upper)];
        let style = if self.lost.is_some() { DIM } else { Style::new() };
        let typing = self.mode == Mode::Filter;
        for (i, (pane, area)) in self.panes.iter_mut().zip(areas).enumerate() {
            let has_keys = self.focus == i;
            pane.draw(area, buffer, has_keys, typing && has_keys, style);
        }
        self.foot(pane(area.height - FOOT, FOOT), buffer);
        if let Mode::More { title, lines, top, .. } = &mut self.mode {
            *top = (*top).min(lines.len().saturating_sub(1));
            popup(area, buffer, title, lines[*top..].iter().map(String::as_str));
        }
    }

    fn head(&self, [first, second]: [Rect; 2], buffer: &mut Buffer) {
        let [about, held] = summary(&self.picture, &self.location);
        let (intervals, least) = SILENT;
        let silent = self.heard.elapsed();
        if let Some((why, since)) = &self.lost {
            let time = text::duration(since.elapsed());
            write(buffer, first, &format!("no broker for {time}, waiting for one; below is what was there"), ALARM);
            write(buffer, second, why, ALARM);
        } else if silent > self.every.saturating_mul(intervals).max(least) {
            write(buffer, first, &format!("the broker has not answered for {}", text::duration(silent)), ALARM);
            write(buffer, second, &held, Style::new());
        } else {
            write(buffer, first, &about, BOLD);
            write(buffer, second, &held, Style::new());
        }
    }

    /// Draws what the keys do, a question or an answer. A long one takes lines of the table above.
    fn foot(&self, area: Rect, buffer: &mut Buffer) {
        let (text, style) = match (&self.mode, &self.message) {
            (Mode::Evict(victim), _) => (format!("evict {}? Y: yes  K: and kill it  other: no", victim.who), ALARM),
            (Mode::Filter, _) => ("type a filter; Enter keeps it, Esc removes it".into(), BOLD),
            (_, Some(message)) => (message.clone(), BOLD),
            (_, None) if self.paused => ("paused: p goes on".into(), BOLD),
            (_, None) => return write(buffer, area, KEYS, DIM),
        };
        let lines = wrapped(&text, usize::from(area.width));
        let height = u16::try_from(lines.len()).unwrap_or(u16::MAX).min(area.y);
        let area = Rect { y: area.bottom() - height, height, ..area };
        Clear.render(area, buffer);
        for (row, line) in area.rows().zip(lines) {
            write(buffer, row, &line, style);
        }
    }
}

/// Breaks a text between words into lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<Cow<'_, str>> {
    let whole_words = textwrap::WordSplitter::NoHyphenation;
    textwrap::wrap(text, textwrap::Options::new(width).word_splitter(whole_words).break_words(false))
}

/// Returns the lines of the members' table: what it needs, at most two fifths, and at least one row.
fn upper_height(tables: u16, members: usize) -> u16 {
    let needed = u16::try_from(members).unwrap_or(u16::MAX).max(1).saturating_add(TITLES);
    needed.min(tables * 2 / 5).max(TITLES + 1)
}

impl Pane {
    fn draw(&mut self, area: Rect, buffer: &mut Buffer, has_keys: bool, typing: bool, style: Style) {
        let mut rows = area.rows();
        let Some(top) = rows.next() else { return };
        self.draw_title(top, buffer, has_keys, typing);
        let headings = self.view.headings();
        let cells = self.rows.iter().map(|row| row.cells.as_slice());
        let columns = Columns::fit(&headings, cells, usize::from(area.width));
        if let Some(head) = rows.next() {
            write(buffer, head, &columns.head(), DIM.add_modifier(Modifier::UNDERLINED));
        }
        self.scroll(usize::from(area.height.saturating_sub(TITLES)));
        if self.rows.is_empty() {
            let why = if self.all == 0 { "none" } else { "no row matches the filter: Esc shows all" };
            rows.next().into_iter().for_each(|row| write(buffer, row, why, DIM));
        }
        for ((i, row), line) in self.rows.iter().enumerate().skip(self.top).zip(rows) {
            let style = match row.alert {
                Alert::None => style,
                Alert::Slow => style.fg(Color::Yellow),
                Alert::Lost => style.fg(Color::Red),
            };
            write(buffer, line, &columns.line(&row.cells), style);
            if has_keys && i == self.selected {
                buffer.set_style(line, REVERSED);
            }
        }
    }

    /// Draws the name of the table, or of all that may take its place, and how its rows are chosen.
    fn draw_title(&self, area: Rect, buffer: &mut Buffer, has_keys: bool, typing: bool) {
        let style = if has_keys { BOLD } else { DIM };
        let mut x = area.x;
        let mut say = |text: &str, style| {
            let left = usize::from(area.right().saturating_sub(x));
            (x, _) = buffer.set_stringn(x, area.y, text, left, style);
        };
        match self.view {
            View::Members => say("Members", style.add_modifier(Modifier::REVERSED)),
            _ => {
                for (i, view) in LOWER.iter().enumerate() {
                    let is_shown = *view == self.view;
                    say(&format!("{}", i + 1), DIM);
                    say(view.name(), if is_shown { style.add_modifier(Modifier::REVERSED) } else { DIM });
                    say(" ", DIM);
                }
            }
        }
        let shown = self.rows.len();
        let of = if shown == self.all { String::new() } else { format!(" of {}", self.all) };
        let way = if self.reverse { " reversed" } else { "" };
        say(&format!(" {shown}{of} by {}{way}", self.view.headings()[self.column].title), style);
        if typing || !self.filter.is_empty() {
            let cursor = if typing { "▏" } else { "" };
            say(&format!(" /{}{cursor}", describe::shorten(&self.filter, 60)), ALARM);
        }
    }
}

/// Draws lines over the middle of the screen. The last line says that there are more, if they do not fit.
fn popup<'a>(area: Rect, buffer: &mut Buffer, title: &str, lines: impl Iterator<Item = &'a str>) {
    let room = usize::from(area.width.saturating_sub(FRAME));
    let lines: Vec<_> = lines.flat_map(|line| wrapped(line, room)).collect();
    let widest =
        lines.iter().map(AsRef::as_ref).chain([title]).map(|line| line.chars().count()).max().unwrap_or_default();
    let fitting = |wanted: usize, room: u16| u16::try_from(wanted).unwrap_or(u16::MAX).min(room.saturating_sub(2));
    let width = fitting(widest + 4, area.width);
    let height = fitting(lines.len() + 2, area.height);
    let x = area.x + (area.width - width) / 2;
    let y = area.y + (area.height - height) / 2;
    let outer = Rect { x, y, width, height };
    Clear.render(outer, buffer);
    let title = describe::shorten(title, usize::from(width.saturating_sub(6)));
    let block = Block::bordered().title(format!(" {title} "));
    let inner = block.inner(outer);
    block.render(outer, buffer);
    let room = usize::from(inner.height);
    let more = lines.len() > room;
    for (i, (row, line)) in inner.rows().zip(&lines).enumerate() {
        let row = Rect { x: row.x + 1, width: row.width.saturating_sub(1), ..row };
        if more && i + 1 == room {
            write(buffer, row, &format!("… {} more: ↓", lines.len() - i), DIM);
        } else {
            write(buffer, row, line, Style::new());
        }
    }
}

/// Shows what has a colour in bold instead.
pub(super) fn remove_colours(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        if (cell.fg, cell.bg) != (Color::Reset, Color::Reset) {
            (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
            cell.modifier |= Modifier::BOLD;
        }
    }
}

/// Writes a line, cut off where the area ends.
fn write(buffer: &mut Buffer, area: Rect, line: &str, style: Style) {
    // Text of other processes may contain control characters: here it becomes one line without them.
    let line = describe::shorten(line, usize::from(area.width));
    buffer.set_stringn(area.x, area.y, line, usize::from(area.width), style);
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Instant};

    use partywall::ErrorKind;
    use ratatui::{
        Terminal,
        backend::TestBackend,
        crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    };

    use super::{
        super::{
            example,
            worker::{Ask, Report, Target},
        },
        *,
    };
    use crate::failure::Failure;

    #[test]
    fn rows_that_have_a_colour_are_bold_without_colours() {
        let mut buffer = Buffer::empty(Rect { x: 0, y: 0, width: 3, height: 1 });
        buffer[(0, 0)].set_char('a').set_style(REVERSED.fg(Color::Red));
        buffer[(1, 0)].set_char('b').set_style(DIM);
        remove_colours(&mut buffer);
        let modifiers = [Modifier::REVERSED | Modifier::BOLD, Modifier::DIM, Modifier::empty()];
        for (cell, modifier) in buffer.content.iter().zip(modifiers) {
            assert_eq!((cell.fg, cell.bg, cell.modifier), (Color::Reset, Color::Reset, modifier));
        }
    }

    /// A live view of the example on a screen of a size.
    struct Shown {
        app: App,
        asked: mpsc::Receiver<Ask>,
        terminal: Terminal<TestBackend>,
    }

    impl Shown {
        fn new(columns: u16, rows: u16) -> Self {
            let (ask, asked) = mpsc::channel();
            let location = partywall::Domain::options().domain("default").location().unwrap();
            let app = App::new(example::picture(), location, Duration::from_secs(1), ask);
            Self { app, asked, terminal: Terminal::new(TestBackend::new(columns, rows)).unwrap() }
        }

        fn press(&mut self, key: KeyCode) -> &mut Self {
            self.app.key(KeyEvent::new(key, KeyModifiers::NONE));
            self
        }

        fn type_in(&mut self, text: &str) -> &mut Self {
            for c in text.chars() {
                self.press(KeyCode::Char(c));
            }
            self
        }

        /// Returns the lines of the screen, without blanks at their ends.
        fn lines(&mut self) -> Vec<String> {
            self.terminal.draw(|frame| self.app.draw(frame)).unwrap();
            let buffer = self.terminal.backend().buffer();
            let width = usize::from(buffer.area.width);
            let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
            buffer.content().chunks(width).map(|cells| line(cells).trim_end().to_owned()).collect()
        }

        fn screen(&mut self) -> String {
            self.lines().join("\n")
        }

        /// Returns the names in the lower table, in its order.
        fn names(&mut self) -> Vec<String> {
            self.app.panes[1].rows.iter().map(|row| row.whole.clone()).collect()
        }
    }

    #[test]
    fn frame_of_80_columns_shows_who_holds_what_and_who_waits() {
        let expected = "\
domain default, broker 4700 up 2 h 3 min; 3 members (1 unproven)
host 4 GiB, quarantine 3 GiB of 1 dead member, 4 deaths, 1 under MPS, 212 fds
Members 3 by HOLDS
 PID  STATE      BEAT  HOLDS  WAITS FOR                                COMMAND
4900  unproven         9 GiB                                           render
4822  alive     0.1 s  2 GiB  4711: steps 73 (1.5 s), 4711: blocks +2  python tr
4711  alive     0.1 s  1 GiB  4822: frames (1.2 s)                     python ca
1Names 2Topics 3Queues 4Blocks 5Ordering  5 by SIZE
NAME         KIND       SIZE      OLDER  LEASES  PER S  USE
llm/weights  segment  14 GiB  2 (1 GiB)       3         kept
blocks       pool     64 MiB                  3         2 waiters, 0 of 16 bloc…
frames       topic    64 MiB                  3    600  waits for 4822 (1.2 s),…
work         queue    64 MiB                  3    5.0  1 dead, 5 pending, 2 ru…
old          removed          1 (2 GiB)                 removed, and still held
";
        let screen = Shown::new(80, 24).lines();
        assert_eq!(screen.len(), 24);
        assert_eq!(screen[..15].join("\n").trim_end(), expected.trim_end(), "{}", screen.join("\n"));
        assert_eq!(screen[23], KEYS);
    }

    #[test]
    fn wide_frame_has_all_columns() {
        let screen = Shown::new(180, 50).screen();
        for heading in [View::Members, View::Names].into_iter().flat_map(View::headings) {
            assert!(screen.contains(heading.title), "{heading:?} is missing in {screen}");
        }
        assert!(screen.contains("waits for 4822 (1.2 s), lag 3, missed 7, 1 pub, 1 sub"), "{screen}");
    }

    #[test]
    fn topics_show_lag_losses_and_ages() {
        let screen = Shown::new(80, 24).type_in("2").screen();
        for part in ["LAG  MISSED  AGE P50       P99  WAITS", "3       7  31.0 µs  410.0 µs  holds up others"] {
            assert!(screen.contains(part), "{part:?} is missing in {screen}");
        }
    }

    #[test]
    fn every_table_shows_rows_at_every_size() {
        for (columns, rows) in [(40, 12), (80, 24), (81, 25), (160, 50), (200, 50), (500, 200)] {
            let mut shown = Shown::new(columns, rows);
            for (key, view) in ('1'..='5').zip(LOWER) {
                let lines = shown.press(KeyCode::Char(key)).lines();
                let first = view.headings()[0].title;
                let mut rows = lines.iter().skip_while(|line| !line.trim_start().starts_with(first)).skip(1);
                assert!(rows.next().is_some_and(|row| !row.is_empty()), "{view:?} at {columns}: {lines:#?}");
            }
            let help = shown.type_in("?").screen();
            assert!(help.contains("keys and columns") && help.contains("Tab   "), "{help}");
        }
    }

    #[test]
    fn too_small_terminal_shows_a_message_and_can_grow() {
        for (columns, rows) in [(39, 24), (80, 11), (1, 1), (10, 1)] {
            let mut shown = Shown::new(columns, rows);
            let screen = shown.screen();
            let start: String = "the terminal".chars().take(usize::from(columns) - 1).collect();
            assert!(screen.starts_with(&start) && !screen.contains("Members"), "{screen}");
            shown.terminal.backend_mut().resize(80, 24);
            assert!(shown.screen().contains("domain default"));
        }
    }

    #[test]
    fn long_answer_takes_several_lines() {
        let mut shown = Shown::new(40, 12);
        shown.app.hear(Report::Evicted("evicted pid 4711 (python train.py); 3 GiB (2 leases) in quarantine".into()));
        let lines = shown.lines();
        assert_eq!(lines[10..], ["evicted pid 4711 (python train.py); 3", "GiB (2 leases) in quarantine"]);
        assert_eq!(wrapped("", 10), [""]);
        assert_eq!(wrapped("a verylongword b", 5), ["a", "verylongword", "b"]);
    }

    #[test]
    fn keys_sort_reverse_and_filter() {
        let mut shown = Shown::new(160, 50);
        assert_eq!(shown.names()[0], "llm/weights", "the largest is first");
        shown.type_in("r");
        assert_eq!(shown.names().last().unwrap(), "llm/weights");
        // By SIZE, VERSION, …, USE, and then by NAME.
        shown.type_in("sssssss");
        assert_eq!(shown.names(), ["blocks", "frames", "llm/weights", "old", "work"]);
        shown.type_in("/WEI");
        assert!(shown.screen().contains("1 of 5 by NAME /WEI▏"), "{}", shown.screen());
        assert_eq!(shown.names(), ["llm/weights"]);
        shown.press(KeyCode::Enter).type_in("q");
        assert!(shown.app.is_over(), "q is no part of the filter any more");
        shown.press(KeyCode::Esc);
        assert_eq!(shown.names().len(), 5);
        shown.type_in("/nothing");
        assert!(shown.screen().contains("no row matches the filter"));
    }

    #[test]
    fn selected_row_stays_selected_when_the_order_changes() {
        let mut shown = Shown::new(80, 24);
        shown.press(KeyCode::End);
        let selected = |shown: &Shown| shown.app.panes[1].rows[shown.app.panes[1].selected].whole.clone();
        let last = selected(&shown);
        shown.type_in("r");
        assert_eq!(selected(&shown), last);
        assert_eq!(shown.app.panes[1].selected, 0);
    }

    #[test]
    fn ten_thousand_names_scroll() {
        let mut shown = Shown::new(80, 24);
        let mut snapshot = example::snapshot();
        let template = snapshot.names[0].clone();
        snapshot.names = (0..10_000)
            .map(|i| partywall::info::NameInfo { name: format!("name-{i:05}"), ..template.clone() })
            .collect();
        shown.app.hear(Report::Snapshot(Box::new(snapshot)));
        shown.press(KeyCode::Home);
        assert!(shown.screen().contains("name-00000"));
        shown.press(KeyCode::End);
        let screen = shown.screen();
        assert!(screen.contains("name-09999") && screen.contains("10000 by SIZE"), "{screen}");
        shown.press(KeyCode::PageUp).press(KeyCode::PageUp);
        assert!(!shown.screen().contains("name-09999"));
    }

    #[test]
    fn eviction_needs_a_yes_and_hits_the_member_that_was_shown() {
        let mut shown = Shown::new(80, 24);
        shown.type_in("e");
        assert!(shown.screen().contains("select a process first"), "a name cannot be evicted: {}", shown.screen());
        shown.press(KeyCode::Tab).press(KeyCode::Home).type_in("e");
        let question = shown.lines().pop().unwrap();
        assert_eq!(question, "evict pid 4900 (render)? Y: yes  K: and kill it  other: no");
        shown.type_in("y");
        assert!(shown.screen().contains("nothing was evicted") && shown.asked.try_recv().is_err());

        // A snapshot that comes in between moves rows, but not the question.
        shown.type_in("e");
        let mut other = example::snapshot();
        other.members.reverse();
        shown.app.hear(Report::Snapshot(Box::new(other)));
        shown.type_in("Y");
        let Ok(Ask::Evict { members, kill, .. }) = shown.asked.try_recv() else { panic!("nothing was asked") };
        assert_eq!((members, kill), (vec![9], false));

        // A publisher or subscriber stands for its process.
        shown.type_in("2").press(KeyCode::Home).type_in("eK");
        let Ok(Ask::Evict { members, kill, .. }) = shown.asked.try_recv() else { panic!("nothing was asked") };
        assert_eq!((members, kill), (vec![1], true));
        shown.app.hear(Report::Evicted("evicted pid 4711".into()));
        assert_eq!(shown.lines().pop().unwrap(), "evicted pid 4711");
    }

    #[test]
    fn holders_are_shown_until_a_key() {
        let mut shown = Shown::new(80, 24);
        shown.press(KeyCode::Home).press(KeyCode::Enter);
        let Ok(Ask::Details(Some(target))) = shown.asked.try_recv() else { panic!("nothing was asked") };
        assert_eq!(target, Target::Name("llm/weights".into()));
        shown.app.hear(Report::Detail(Target::Name("another".into()), vec!["wrong".into()]));
        let lines: Vec<_> = (0..100).map(|i| format!("holder {i}")).collect();
        shown.app.hear(Report::Detail(target, lines));
        let screen = shown.screen();
        assert!(
            screen.contains("llm/weights") && screen.contains("holder 0") && screen.contains("more: ↓"),
            "{screen}"
        );
        for _ in 0..200 {
            shown.press(KeyCode::Down);
        }
        assert!(shown.screen().contains("holder 99") && !shown.screen().contains("holder 98"));
        shown.press(KeyCode::Esc);
        assert!(!shown.screen().contains("holder 99"));
        assert!(matches!(shown.asked.try_recv(), Ok(Ask::Details(None))));
    }

    #[test]
    fn lost_broker_is_said_until_one_answers() {
        let mut shown = Shown::new(80, 24);
        let gone = Failure::new(ErrorKind::Unreachable, "no broker listens at /run/x", "start one: partywall serve");
        shown.app.hear(Report::Lost(gone));
        let screen = shown.screen();
        assert!(screen.starts_with("no broker for 0 s") && screen.contains("4711"), "{screen}");
        shown.app.hear(Report::Snapshot(Box::new(example::snapshot())));
        assert!(shown.screen().starts_with("domain default"));
        shown.app.heard = Instant::now() - Duration::from_secs(10);
        assert!(shown.screen().starts_with("the broker has not answered for 10 s"));
    }

    #[test]
    fn pause_keeps_the_picture() {
        let mut shown = Shown::new(80, 24);
        let mut empty = example::snapshot();
        empty.members.clear();
        shown.type_in("p");
        shown.app.hear(Report::Snapshot(Box::new(empty)));
        let screen = shown.screen();
        assert!(screen.contains("paused: p goes on") && screen.contains("3 members"), "{screen}");
    }
}
