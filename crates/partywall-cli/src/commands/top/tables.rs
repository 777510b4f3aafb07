//! The tables of `top`: which rows and columns there are, and their order.

use partywall::info::{
    BlockCounts, ControlInfo, Lifetime, MemberInfo, MemberState, NameInfo, ObjectInfo, ObjectKind, TopicInfo,
};

use super::{
    picture::{On, Picture, Wait},
    rates::Counter,
};
use crate::{
    columns::{
        member, name, object,
        topic_user::{self, Role, TopicUser},
    },
    describe,
    snapshot::{Snapshot, Used},
    table::{Cell, Column, Entry, Heading, abbreviated, headings},
    text::{count, seconds},
};

/// A table to show.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Members,
    Names,
    Topics,
    Queues,
    Blocks,
    Ordering,
}

/// The views below that of the members, in the order of their keys.
pub(super) const LOWER: [View; 5] = [View::Names, View::Topics, View::Queues, View::Blocks, View::Ordering];

impl View {
    /// Returns its name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Members => "Members",
            Self::Names => "Names",
            Self::Topics => "Topics",
            Self::Queues => "Queues",
            Self::Blocks => "Blocks",
            Self::Ordering => "Ordering",
        }
    }

    /// Returns the headings.
    pub(super) fn headings(self) -> Vec<Heading<'static>> {
        match self {
            Self::Members => headings(member::TOP),
            Self::Names => headings(name::TOP),
            Self::Topics => headings(topic_user::TOP),
            Self::Queues => headings(name::TOP_QUEUES),
            Self::Blocks => headings(BLOCKS),
            Self::Ordering => headings(object::TOP),
        }
    }

    /// Returns the rows in the order of their names or members.
    pub(super) fn rows(self, picture: &Picture) -> Vec<Row> {
        let Snapshot { members, names, objects, used, .. } = &picture.snapshot;
        match self {
            Self::Members => members.iter().map(|info| self::member(picture, info)).collect(),
            Self::Names => names.iter().map(|info| self::name(picture, info)).collect(),
            Self::Topics => used.iter().flat_map(|(name, used)| topic(picture, name, used)).collect(),
            Self::Queues => names.iter().filter_map(|info| queue(picture, info)).collect(),
            Self::Blocks => used.iter().flat_map(|(name, used)| blocks(picture, name, used)).collect(),
            Self::Ordering => objects.iter().map(|info| self::object(picture, info)).collect(),
        }
    }

    /// Returns the column by which the rows are ordered at first: the first one, but for those that hold memory.
    pub(super) fn first_order(self) -> usize {
        let is_first = |heading: &Heading<'_>| ["HOLDS", "SIZE"].contains(&heading.title);
        self.headings().iter().position(is_first).unwrap_or_default()
    }
}

/// A line of a table.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) id: Id,
    pub(super) cells: Vec<Cell>,
    pub(super) alert: Alert,
    /// More text for the filter: what cells leave out.
    pub(super) whole: String,
}

/// What a row is about. It stays the same when the rows are counted again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Id {
    /// A member by its number.
    Member(u64),
    /// A segment, pool, topic or queue.
    Name(String),
    /// A publisher or subscriber of a topic by its number there, with its pid.
    Participant(String, u64, Option<u32>),
    /// The inputs (false) or outputs (true) of a queue, or the blocks (false) of a pool or topic.
    Blocks(String, bool),
    /// A timeline or semaphore.
    Object(ObjectKind, String),
}

/// How urgent a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alert {
    None,
    /// It keeps others waiting, or may soon.
    Slow,
    /// It is lost, and what it holds with it.
    Lost,
}

impl Alert {
    /// Returns the alert for a process in this state, which may wait for others or hold them up.
    fn of(state: MemberState, is_slow: bool) -> Self {
        match state {
            MemberState::Alive if !is_slow => Self::None,
            MemberState::Alive | MemberState::Hung => Self::Slow,
            _ => Self::Lost,
        }
    }
}

/// Orders rows by a column: numbers from the largest, texts from A, and the other way round if `reverse`. Rows that are
/// equal there keep their order.
pub(super) fn order(rows: &mut [Row], column: usize, reverse: bool) {
    let falling = rows.iter().any(|row| row.cells[column].is_number()) != reverse;
    rows.sort_by(|one, other| {
        let order = one.cells[column].compare(&other.cells[column]);
        if falling { order.reverse() } else { order }
    });
}

/// Returns whether a row contains a text in any case.
pub(super) fn matches(row: &Row, lower_case: &str) -> bool {
    let contains = |text: &str| text.to_lowercase().contains(lower_case);
    lower_case.is_empty() || contains(&row.whole) || row.cells.iter().any(|cell| contains(&cell.text))
}

/// Returns the entry of an item in a table of this picture.
fn entry<'a, T>(picture: &Picture, item: &'a T, rate: Option<f64>, note: String) -> Entry<'a, T> {
    Entry { now: picture.snapshot.now, is_brief: true, rate, note, ..Entry::new(item) }
}

fn member(picture: &Picture, info: &MemberInfo) -> Row {
    let mut waits: Vec<_> = picture.waits.iter().filter(|wait| wait.pid == Some(info.pid)).collect();
    waits.sort_by_key(|wait| std::cmp::Reverse((wait.on.is_urgent(), wait.ms)));
    let text = |wait: &&Wait| format!("{}: {}{}", wait.whom(), wait.object(&abbreviated(&wait.name)), wait.time());
    let texts: Vec<_> = waits.iter().map(text).collect();
    let more = match texts.len().saturating_sub(SHOWN_WAITS) {
        0 => String::new(),
        more => format!(" +{more}"),
    };
    let shown = format!("{}{more}", texts[..texts.len().min(SHOWN_WAITS)].join(", "));
    let mut urgent = picture.waits.iter().filter(|wait| wait.on.is_urgent());
    let is_slow = urgent.any(|wait| wait.pid == Some(info.pid) || wait.by.contains(&info.pid));
    Row {
        id: Id::Member(info.member),
        cells: entry(picture, info, None, shown).cells(member::TOP),
        alert: Alert::of(info.state, is_slow),
        whole: format!("{} {} {}", info.command, info.mps.as_deref().unwrap_or_default(), texts.join(", ")),
    }
}

fn name(picture: &Picture, info: &NameInfo) -> Row {
    let (use_of, alert) = use_of(picture, info);
    Row {
        id: Id::Name(info.name.clone()),
        cells: entry(picture, info, picture.rates.of_name(info), use_of).cells(name::TOP),
        alert,
        whole: info.name.clone(),
    }
}

/// Returns how a name is used, the most urgent fact first.
fn use_of(picture: &Picture, name: &NameInfo) -> (String, Alert) {
    let Some(latest) = &name.latest else {
        let notice = name.notice.map_or_else(String::new, |notice| format!(": {}", describe::notice(&notice)));
        let alert = if name.lost { Alert::Lost } else { Alert::None };
        return (format!("{}, and still held{notice}", describe::gone(name)), alert);
    };
    let used = picture.snapshot.used.get(&name.name).filter(|used| used.version == latest.version);
    let mut facts = Vec::new();
    let mut alert = Alert::None;
    if let Some(usage) = name.usage.and_then(|usage| usage.topic) {
        for wait in picture.waits.iter().filter(|wait| wait.on == On::Subscriber && wait.name == name.name) {
            facts.push(format!("waits for {}{}", wait.whom(), wait.time()));
            alert = Alert::Slow;
        }
        let topic = used.and_then(|used| used.info.topic.as_ref());
        let subscribers = || topic.into_iter().flat_map(|topic| &topic.subscribers);
        let lag = subscribers().map(|subscriber| subscriber.lag).max().unwrap_or_default();
        let missed = subscribers().fold(0_u64, |sum, subscriber| sum.saturating_add(subscriber.dropped));
        let behind = [(lag, "lag"), (missed, "missed")];
        facts.extend(behind.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{what} {n}")));
        facts.push(format!("{} pub, {} sub", usage.publishers, usage.subscribers));
    } else if let Some(usage) = name.usage.and_then(|usage| usage.queue) {
        let running = usage.claimed + usage.enqueued;
        let all = [(usage.dead, "dead"), (usage.pending, "pending"), (running, "running"), (usage.done, "done")];
        facts.extend(all.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
        if facts.is_empty() {
            facts.push("no tasks".into());
        }
    } else if let (Some(usage), Some(control)) = (name.usage, latest.control) {
        let waiting = used.map_or(0, |used| used.info.blocks.waiting);
        if waiting > 0 {
            facts.push(count(waiting.into(), "waiter"));
            alert = Alert::Slow;
        }
        facts.push(format!("{} of {} free", usage.free, count(control.blocks.into(), "block")));
    } else {
        facts.push(match latest.lifetime {
            Lifetime::Owned => format!("owned by {}", latest.owner),
            lifetime => lifetime.name().into(),
        });
        if latest.mutable {
            facts.push("mutable".into());
        }
    }
    (facts.join(", "), alert)
}

fn topic(picture: &Picture, name: &str, used: &Used) -> Vec<Row> {
    let Some(topic) = &used.info.topic else { return Vec::new() };
    let row = |role| {
        let waits = waits(topic, &role);
        let user = TopicUser { topic: name.to_owned(), role };
        let who = user.who();
        let rate = picture.rates.of(&Counter::Participant(name.to_owned(), used.version, who.id));
        Row {
            id: Id::Participant(name.to_owned(), who.id, who.pid),
            alert: who.state.map_or(Alert::Lost, |state| Alert::of(state, waits.is_some())),
            cells: entry(picture, &user, rate, waits.unwrap_or_default()).cells(topic_user::TOP),
            whole: name.to_owned(),
        }
    };
    let publishers = topic.publishers.iter().cloned().map(Role::Publisher);
    let subscribers = topic.subscribers.iter().cloned().map(Role::Subscriber);
    let rows: Vec<_> = publishers.chain(subscribers).map(row).collect();
    if !rows.is_empty() {
        return rows;
    }
    let mut cells = vec![abbreviated(name).into(), "nobody".into()];
    cells.resize(topic_user::TOP.len(), Cell::default());
    vec![Row { id: Id::Name(name.to_owned()), cells, alert: Alert::None, whole: name.to_owned() }]
}

/// Returns for whom a publisher waits, or that a subscriber makes publishers wait, and for how long.
fn waits(topic: &TopicInfo, role: &Role) -> Option<String> {
    match role {
        Role::Publisher(publisher) => {
            let (by, ms) = publisher.blocked?;
            let whom = topic.subscribers.iter().find(|subscriber| subscriber.who.id == by);
            let whom = whom.and_then(|whom| whom.who.pid).map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            Some(format!("for {whom} ({})", seconds(ms)))
        }
        Role::Subscriber(subscriber) => Some(format!("holds up others ({})", seconds(subscriber.stalled?))),
    }
}

fn queue(picture: &Picture, info: &NameInfo) -> Option<Row> {
    let usage = name::queue(info)?;
    let version = info.latest.as_ref()?.version;
    let used = picture.snapshot.used.get(&info.name).filter(|used| used.version == version);
    let workers = used.into_iter().flat_map(|used| &used.holders).filter(|holder| holder.tasks > 0);
    let workers: Vec<_> = workers.map(|holder| format!("{} ({})", holder.pid, holder.tasks)).collect();
    Some(Row {
        id: Id::Name(info.name.clone()),
        cells: entry(picture, info, picture.rates.of_name(info), workers.join(", ")).cells(name::TOP_QUEUES),
        alert: if usage.dead > 0 { Alert::Slow } else { Alert::None },
        whole: info.name.clone(),
    })
}

/// The blocks of a pool or topic, or the inputs or outputs of a queue.
struct Blocks {
    name: String,
    of: &'static str,
    number: u32,
    each: u64,
    counts: BlockCounts,
}

type Col = Column<Blocks>;

/// The note says which processes hold blocks.
const BLOCKS: &[Col] = &[
    Col::left("NAME", |blocks| blocks.long_name(&blocks.name)),
    Col::left("OF", |blocks| blocks.of.into()).spare(4),
    Col::right("BLOCKS", |blocks| blocks.number.into()),
    Col::right("EACH", |blocks| Cell::bytes(blocks.each)).spare(1),
    Col::right("FREE", |blocks| (blocks.counts.free + blocks.counts.unused).into()),
    Col::right("HELD", |blocks| (blocks.counts.held + blocks.counts.handed + blocks.counts.offered).into()),
    Col::right("RING", |blocks| blocks.counts.in_ring.into()).spare(3),
    Col::right("READ", |blocks| blocks.counts.read.into()).spare(2),
    Col::right("WAITING", |blocks| blocks.counts.waiting.into()),
    Col::left("HELD BY", |blocks| match blocks.counts.invalid {
        0 => blocks.note.as_str().into(),
        _ => "damaged: see partywall show".into(),
    }),
];

fn blocks(picture: &Picture, name: &str, used: &Used) -> Vec<Row> {
    let Used { control, info: ControlInfo { blocks, topic, queue }, holders, .. } = used;
    let held_by = holders.iter().filter(|holder| holder.blocks > 0);
    let held_by: Vec<_> = held_by.map(|holder| format!("{} ({})", holder.pid, holder.blocks)).collect();
    let of = match (topic, queue) {
        (Some(_), _) => "topic",
        (None, Some(_)) => "inputs",
        (None, None) => "pool",
    };
    let row = |of, (number, each), counts: &BlockCounts, held_by| {
        let blocks = Blocks { name: name.to_owned(), of, number, each, counts: *counts };
        Row {
            id: Id::Blocks(name.to_owned(), of == "outputs"),
            cells: entry(picture, &blocks, None, held_by).cells(BLOCKS),
            alert: match (counts.invalid, counts.waiting) {
                (0, 0) => Alert::None,
                (0, _) => Alert::Slow,
                _ => Alert::Lost,
            },
            whole: name.to_owned(),
        }
    };
    let mut rows = vec![row(of, (control.blocks, control.block_bytes), blocks, held_by.join(", "))];
    if let (Some(queue), Some(shape)) = (queue, control.queue) {
        // Holders are counted over both.
        rows.push(row("outputs", (shape.outputs, shape.output_bytes), &queue.outputs, String::new()));
    }
    rows
}

fn object(picture: &Picture, info: &ObjectInfo) -> Row {
    let (rate, alert) = match info {
        ObjectInfo::Timeline(it) if it.ending.is_some() => (picture.rates.of_timeline(it), Alert::Lost),
        ObjectInfo::Timeline(it) => (picture.rates.of_timeline(it), Alert::None),
        ObjectInfo::Semaphore(it) if it.waiting > 0 => (None, Alert::Slow),
        _ => (None, Alert::None),
    };
    Row {
        id: Id::Object(info.kind(), info.name().to_owned()),
        cells: entry(picture, info, rate, String::new()).cells(object::TOP),
        alert,
        whole: info.name().to_owned(),
    }
}

/// The waits of a member in a table. Enter shows all for names and timelines.
const SHOWN_WAITS: usize = 2;

#[cfg(test)]
mod tests {
    use super::{super::example, *};

    fn texts(rows: &[Row], column: usize) -> Vec<&str> {
        rows.iter().map(|row| row.cells[column].text.as_str()).collect()
    }

    #[test]
    fn every_row_has_a_cell_for_each_heading() {
        let picture = example::picture();
        for view in LOWER.into_iter().chain([View::Members]) {
            let rows = view.rows(&picture);
            assert!(!rows.is_empty(), "{view:?}");
            assert!(rows.iter().all(|row| row.cells.len() == view.headings().len()), "{view:?}");
            assert!(view.first_order() < view.headings().len());
        }
    }

    #[test]
    fn numbers_fall_texts_rise_and_blanks_are_last() {
        let picture = example::picture();
        let mut rows = View::Names.rows(&picture);
        let column = |heading| View::Names.headings().iter().position(|other| other.title == heading).unwrap();
        order(&mut rows, column("SIZE"), false);
        assert_eq!(texts(&rows, column("SIZE")), ["14 GiB", "64 MiB", "64 MiB", "64 MiB", ""]);
        order(&mut rows, column("PER S"), false);
        let rates = texts(&rows, column("PER S"));
        assert!(!rates[0].is_empty() && rates.last().unwrap().is_empty(), "{rates:?}");
        order(&mut rows, column("NAME"), false);
        let rising = texts(&rows, 0).into_iter().map(str::to_owned).collect::<Vec<_>>();
        assert!(rising.is_sorted(), "{rising:?}");
        order(&mut rows, column("NAME"), true);
        assert_eq!(texts(&rows, 0), rising.iter().rev().map(String::as_str).collect::<Vec<_>>());
    }

    #[test]
    fn filter_finds_what_a_cell_leaves_out() {
        let long = format!("{}/middle/{}", "a".repeat(100), "z".repeat(100));
        let mut picture = example::picture();
        picture.snapshot.names[0].name.clone_from(&long);
        let row = &View::Names.rows(&picture)[0];
        assert!(row.cells[0].text.chars().count() == 36 && row.cells[0].text.contains('…'), "{row:?}");
        assert!(matches(row, "/middle/") && matches(row, "") && !matches(row, "other"));
    }

    // Holds 318.
    #[test]
    fn members_that_wait_and_those_they_wait_for_are_named() {
        let picture = example::picture();
        let rows = View::Members.rows(&picture);
        let column = View::Members.headings().iter().position(|heading| heading.title == "WAITS FOR").unwrap();
        let row = |pid: &str| rows.iter().find(|row| row.cells[0].text == pid).unwrap();
        assert_eq!((row("4711").cells[column].text.as_str(), row("4711").alert), ("4822: frames (1.2 s)", Alert::Slow));
        let expected = "4711: steps 73 (1.5 s), 4711: blocks +2";
        assert_eq!((row("4822").cells[column].text.as_str(), row("4822").alert), (expected, Alert::Slow));
        assert!(matches(row("4822"), "a commit: llm/weights@7"), "the filter finds what the cell leaves out");
        assert_eq!(row("4900").alert, Alert::Lost, "it is unproven");
        let names = View::Names.rows(&picture);
        let frames = names.iter().find(|row| row.id == Id::Name("frames".into())).unwrap();
        assert!(frames.cells.last().unwrap().text.starts_with("waits for 4822 (1.2 s), lag 3"), "{frames:?}");
    }

    #[test]
    fn commands_and_names_cannot_steer_a_terminal() {
        let mut picture = example::picture();
        let hostile = "evil \u{1b}[2J\u{9b}31m\r\n\u{202e}txt\u{200b}";
        picture.snapshot.members[0].command = hostile.into();
        picture.snapshot.names[0].name = hostile.into();
        for view in [View::Members, View::Names] {
            for row in view.rows(&picture) {
                for cell in &row.cells {
                    let bad = |c: char| c.is_control() || matches!(c, '\u{202e}' | '\u{200b}');
                    assert!(!cell.text.contains(bad), "{cell:?}");
                }
            }
        }
    }
}
