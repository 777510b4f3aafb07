//! What the live view shows, and what keys do.

use std::{
    sync::mpsc::Sender,
    time::{Duration, Instant},
};

use partywall::Location;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{
    draw::HELP,
    picture::Picture,
    tables::{self, Id, LOWER, Row, View},
    worker::{Ask, Report, Target, sentence},
};
use crate::{describe, failure::Failure};

/// The state of the live view.
pub(super) struct App {
    pub(super) picture: Picture,
    pub(super) location: Location,
    pub(super) every: Duration,
    /// The table of the members, then the one below it.
    pub(super) panes: [Pane; 2],
    /// Which of the panes has the keys.
    pub(super) focus: usize,
    /// Why no broker answers, and since when.
    pub(super) lost: Option<(String, Instant)>,
    /// When the worker last reported what is there, or that nothing is.
    pub(super) heard: Instant,
    pub(super) mode: Mode,
    /// The answer to the last action. The next key removes it.
    pub(super) message: Option<String>,
    pub(super) paused: bool,
    ask: Sender<Ask>,
    is_over: bool,
    suspends: bool,
}

/// What keys mean now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    Tables,
    /// A filter is typed.
    Filter,
    /// A text is shown: more about a target, or the help. Lines before `top` are scrolled away.
    More {
        target: Option<Target>,
        title: String,
        lines: Vec<String>,
        top: usize,
    },
    /// An eviction is to be confirmed.
    Evict(Victim),
}

/// The members that would be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) who: String,
    pub(super) members: Vec<u64>,
    /// The broker that has given them their numbers.
    instance: u64,
}

/// A table on the screen.
#[derive(Debug, Default)]
pub(super) struct Pane {
    pub(super) view: View,
    /// The rows that the filter leaves, in order.
    pub(super) rows: Vec<Row>,
    /// The number of rows without the filter.
    pub(super) all: usize,
    pub(super) column: usize,
    pub(super) reverse: bool,
    pub(super) filter: String,
    /// The row that has the keys.
    pub(super) selected: usize,
    /// The first row on the screen.
    pub(super) top: usize,
    /// How many rows were last on the screen.
    pub(super) page: usize,
}

impl Pane {
    fn new(view: View) -> Self {
        Self { view, column: view.first_order(), page: 1, ..Self::default() }
    }

    /// Makes the rows from a picture. The selected one stays selected wherever it moves.
    fn fill(&mut self, picture: &Picture) {
        let selected = self.rows.get(self.selected).map(|row| row.id.clone());
        let mut rows = self.view.rows(picture);
        self.all = rows.len();
        let filter = self.filter.to_lowercase();
        rows.retain(|row| tables::matches(row, &filter));
        tables::order(&mut rows, self.column, self.reverse);
        let kept = selected.and_then(|id| rows.iter().position(|row| row.id == id));
        self.selected = kept.unwrap_or(self.selected).min(rows.len().saturating_sub(1));
        self.rows = rows;
    }

    fn move_by(&mut self, rows: isize) {
        let last = self.rows.len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(rows).min(last);
    }

    /// Scrolls so that the selected row is among `page` rows on the screen.
    pub(super) fn scroll(&mut self, page: usize) {
        self.page = page.max(1);
        let lowest = self.rows.len().saturating_sub(self.page);
        let first = (self.selected + 1).saturating_sub(self.page);
        self.top = self.top.min(lowest).clamp(first, self.selected);
    }
}

impl App {
    pub(super) fn new(picture: Picture, location: Location, every: Duration, ask: Sender<Ask>) -> Self {
        let mut app = Self {
            picture,
            location,
            every,
            panes: [View::Members, View::Names].map(Pane::new),
            focus: 1,
            lost: None,
            heard: Instant::now(),
            mode: Mode::Tables,
            message: None,
            paused: false,
            ask,
            is_over: false,
            suspends: false,
        };
        app.fill();
        app
    }

    /// Returns whether the user has ended the view.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns whether the user wants the shell, once.
    pub(super) fn suspends(&mut self) -> bool {
        std::mem::take(&mut self.suspends)
    }

    /// Takes a report of the worker.
    pub(super) fn hear(&mut self, report: Report) {
        match report {
            Report::Snapshot(snapshot) => {
                self.lost = None;
                self.heard = Instant::now();
                if !self.paused {
                    self.picture = Picture::new(*snapshot, &self.picture.rates);
                    self.fill();
                }
            }
            Report::Lost(failure) => self.lose(&failure),
            Report::Detail(about, now) => {
                if let Mode::More { target, lines, .. } = &mut self.mode
                    && *target == Some(about)
                {
                    *lines = now;
                }
            }
            Report::Evicted(what) => self.message = Some(what),
        }
    }

    /// Does what a key means.
    pub(super) fn key(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        self.message = None;
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => self.is_over = true,
                KeyCode::Char('z') => self.suspends = true,
                _ => {}
            }
            return;
        }
        match &self.mode {
            Mode::Tables => self.key_in_tables(key.code),
            Mode::Filter => self.key_in_filter(key.code),
            Mode::More { .. } => self.key_in_text(key.code),
            Mode::Evict(victim) => {
                let victim = victim.clone();
                self.mode = Mode::Tables;
                match key.code {
                    // Not a small letter: words that are pasted or meant for another window contain `e` and `y`.
                    KeyCode::Char('Y') => self.evict(victim, false),
                    KeyCode::Char('K') => self.evict(victim, true),
                    _ => self.message = Some("nothing was evicted".into()),
                }
            }
        }
    }

    fn key_in_tables(&mut self, key: KeyCode) {
        let pane = &mut self.panes[self.focus];
        let page = pane.page as isize;
        let columns = pane.view.headings().len();
        let column = pane.column;
        match key {
            KeyCode::Char('q') => self.is_over = true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help(),
            KeyCode::Tab | KeyCode::BackTab => self.focus = 1 - self.focus,
            KeyCode::Up | KeyCode::Char('k') => pane.move_by(-1),
            KeyCode::Down | KeyCode::Char('j') => pane.move_by(1),
            KeyCode::PageUp => pane.move_by(-page),
            KeyCode::PageDown => pane.move_by(page),
            KeyCode::Home | KeyCode::Char('g') => pane.move_by(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => pane.move_by(isize::MAX),
            KeyCode::Left => self.turn(LOWER.len() - 1),
            KeyCode::Right => self.turn(1),
            KeyCode::Char(digit @ '1'..='5') => self.show(LOWER[digit as usize - '1' as usize]),
            KeyCode::Char('s') => self.sort((column + 1) % columns),
            KeyCode::Char('S') => self.sort((column + columns - 1) % columns),
            KeyCode::Char('r') => {
                pane.reverse = !pane.reverse;
                self.fill();
            }
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Esc => {
                pane.filter.clear();
                self.fill();
            }
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('e') => self.propose(),
            KeyCode::Enter => self.open_details(),
            _ => {}
        }
    }

    fn key_in_filter(&mut self, key: KeyCode) {
        let filter = &mut self.panes[self.focus].filter;
        match key {
            KeyCode::Enter => self.mode = Mode::Tables,
            KeyCode::Esc => {
                filter.clear();
                self.mode = Mode::Tables;
            }
            KeyCode::Backspace => drop(filter.pop()),
            KeyCode::Char(c) if !c.is_control() && filter.chars().count() < LONGEST_FILTER => filter.push(c),
            _ => return,
        }
        self.fill();
    }

    fn key_in_text(&mut self, key: KeyCode) {
        let Mode::More { lines, top, .. } = &mut self.mode else { return };
        let last = lines.len().saturating_sub(1);
        match key {
            KeyCode::Up | KeyCode::Char('k') => *top = top.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => *top = (*top + 1).min(last),
            KeyCode::PageUp => *top = top.saturating_sub(10),
            KeyCode::PageDown => *top = (*top + 10).min(last),
            _ => {
                self.mode = Mode::Tables;
                let _ = self.ask.send(Ask::Details(None));
            }
        }
    }

    fn fill(&mut self) {
        for pane in &mut self.panes {
            pane.fill(&self.picture);
        }
    }

    /// Shows another table below that of the members.
    fn show(&mut self, view: View) {
        self.focus = 1;
        if self.panes[1].view != view {
            self.panes[1] = Pane::new(view);
            self.fill();
        }
    }

    fn turn(&mut self, by: usize) {
        let now = LOWER.iter().position(|view| *view == self.panes[1].view).unwrap_or_default();
        self.show(LOWER[(now + by) % LOWER.len()]);
    }

    fn sort(&mut self, column: usize) {
        let pane = &mut self.panes[self.focus];
        pane.column = column;
        pane.reverse = false;
        self.fill();
    }

    fn selected(&self) -> Option<&Row> {
        let pane = &self.panes[self.focus];
        pane.rows.get(pane.selected)
    }

    /// Shows more about the selected row.
    fn open_details(&mut self) {
        let Some(row) = self.selected() else { return };
        let (target, title) = match &row.id {
            Id::Member(member) => {
                let Some(member) = self.picture.snapshot.members.iter().find(|m| m.member == *member) else { return };
                let who = describe::process(member.pid, &member.command, describe::SHORT);
                (Target::Process(member.pid), format!("held by {who}"))
            }
            Id::Name(name) | Id::Blocks(name, _) | Id::Participant(name, ..) => {
                (Target::Name(name.clone()), name.clone())
            }
            Id::Object(kind, name) => (Target::Object(*kind, name.clone()), name.clone()),
        };
        let lines = vec!["asking the broker …".to_owned()];
        let _ = self.ask.send(Ask::Details(Some(target.clone())));
        self.mode = Mode::More { target: Some(target), title, lines, top: 0 };
    }

    fn help(&mut self) {
        let lines = HELP.map(str::to_owned).to_vec();
        self.mode = Mode::More { target: None, title: "keys and columns".into(), lines, top: 0 };
    }

    /// Asks whether to evict the selected process.
    fn propose(&mut self) {
        let members = &self.picture.snapshot.members;
        let chosen: Vec<_> = match self.selected().map(|row| &row.id) {
            Some(Id::Member(member)) => members.iter().filter(|m| m.member == *member).collect(),
            Some(Id::Participant(_, _, Some(pid))) => members.iter().filter(|m| m.pid == *pid).collect(),
            _ => Vec::new(),
        };
        match chosen.first() {
            None => {
                let how = "select a process first: Tab goes to the members, 2 to publishers and subscribers";
                self.message = Some(how.into());
            }
            Some(first) => {
                let who = describe::process(first.pid, &first.command, SHORT);
                let members = chosen.iter().map(|member| member.member).collect();
                let instance = self.picture.snapshot.status.instance;
                self.mode = Mode::Evict(Victim { who, members, instance });
            }
        }
    }

    fn evict(&mut self, Victim { who, members, instance }: Victim, kill: bool) {
        let _ = self.ask.send(Ask::Evict { members, instance, kill });
        self.message = Some(format!("evicting {who} …"));
    }

    fn lose(&mut self, failure: &Failure) {
        self.heard = Instant::now();
        let since = self.lost.take().map_or_else(Instant::now, |(_, since)| since);
        self.lost = Some((sentence(failure), since));
    }
}

/// The most characters of a filter.
const LONGEST_FILTER: usize = 60;

/// The most characters of a command in the question whether to evict its process.
const SHORT: usize = 24;
