//! The tables of `top`: which rows and columns there are, and their order.

use std::cmp::Ordering;

use partywall::{
    Place, bytes,
    info::{
        Ages, BlockCounts, ControlInfo, Lifetime, MemberInfo, MemberState, NameInfo, ObjectInfo, ObjectKind,
        Participant, PublisherInfo, SubscriberInfo,
    },
};

use super::{
    picture::{self, On, Picture, Wait},
    rates::Counter,
};
use crate::{
    describe,
    snapshot::Used,
    text::{count, duration, seconds, short_time},
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

    /// Returns the headings. One that begins with `>` aligns its column to the right.
    pub(super) fn headings(self) -> &'static [&'static str] {
        match self {
            Self::Members => &[
                ">PID",
                "STATE",
                ">BEAT",
                ">HOLDS",
                ">LEASES",
                ">BLOCKS",
                ">PERMITS",
                ">WRITES",
                ">SINCE",
                "MPS",
                "WAITS FOR",
                "COMMAND",
            ],
            Self::Names => {
                &["NAME", "KIND", "PLACE", ">SIZE", ">VERSION", ">OLDER", ">LEASES", ">AGE", ">PER S", "USE"]
            }
            Self::Topics => &[
                "TOPIC", "ROLE", ">PID", "STATE", "POLICY", ">PER S", ">LAG", ">MISSED", ">AGE P50", ">P99", ">HELD",
                ">SAMPLES", "WAITS",
            ],
            Self::Queues => &[
                "QUEUE",
                "PLACE",
                ">PENDING",
                ">RUNNING",
                ">DONE",
                ">DEAD",
                ">ROOM",
                ">PER S",
                ">RESULTS",
                ">RETURNED",
                "WORKERS",
            ],
            Self::Blocks => {
                &["NAME", "OF", ">BLOCKS", ">EACH", ">FREE", ">HELD", ">RING", ">READ", ">WAITING", "HELD BY"]
            }
            Self::Ordering => &["NAME", "KIND", ">VALUE", ">OF", ">PER S", ">WAITING", ">LEASES", "WRITER"],
        }
    }

    /// Returns the columns that a narrow terminal leaves out, in this order.
    pub(super) fn spare(self) -> &'static [&'static str] {
        match self {
            Self::Members => &["SINCE", "WRITES", "PERMITS", "BLOCKS", "MPS", "LEASES"],
            Self::Names => &["AGE", "VERSION", "PLACE", "OLDER", "LEASES"],
            Self::Topics => &["SAMPLES", "HELD", "POLICY", "STATE", "P99"],
            Self::Queues => &["PLACE", "RETURNED", "RESULTS", "ROOM", "DONE"],
            Self::Blocks => &["EACH", "READ", "RING", "OF"],
            Self::Ordering => &["LEASES", "KIND"],
        }
    }

    /// Returns the rows in the order of their names or members.
    pub(super) fn rows(self, picture: &Picture) -> Vec<Row> {
        let names = &picture.snapshot.names;
        let used = &picture.snapshot.used;
        match self {
            Self::Members => picture.snapshot.members.iter().map(|member| self::member(picture, member)).collect(),
            Self::Names => names.iter().map(|name| self::name(picture, name)).collect(),
            Self::Topics => used.iter().flat_map(|(name, used)| topic(picture, name, used)).collect(),
            Self::Queues => names.iter().filter_map(|name| queue(picture, name)).collect(),
            Self::Blocks => used.iter().flat_map(|(name, used)| blocks(name, used)).collect(),
            Self::Ordering => {
                picture.snapshot.objects.iter().filter_map(|object| self::object(picture, object)).collect()
            }
        }
    }

    /// Returns the column by which the rows are ordered at first.
    pub(super) fn first_order(self) -> usize {
        let heading = match self {
            Self::Members => ">HOLDS",
            Self::Names => ">SIZE",
            Self::Topics => "TOPIC",
            Self::Queues => "QUEUE",
            Self::Blocks | Self::Ordering => "NAME",
        };
        self.headings().iter().position(|other| *other == heading).unwrap_or_default()
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

/// A text, and for numbers their place in an order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    text: String,
    rank: Option<f64>,
}

impl AsRef<str> for Cell {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl Cell {
    /// Returns a text on one line, of at most [`LONGEST`] characters.
    fn text(text: impl AsRef<str>) -> Self {
        Self { text: describe::shorten(text.as_ref(), LONGEST), rank: None }
    }

    fn name(name: &str) -> Self {
        Self { text: ends(name), rank: None }
    }

    fn number(number: impl Into<u64>) -> Self {
        let number = number.into();
        Self { text: number.to_string(), rank: Some(number as f64) }
    }

    fn bytes(number: u64) -> Self {
        Self { text: bytes(number), rank: Some(number as f64) }
    }

    fn some(number: Option<u32>) -> Self {
        number.map_or_else(|| Self { text: "many".into(), rank: Some(f64::MAX) }, Self::number)
    }

    fn seconds(ms: Option<u64>) -> Self {
        let text = ms.map_or_else(String::new, seconds);
        Self { text, rank: ms.map(|ms| ms as f64) }
    }

    /// Returns an age of samples, blank if none was measured.
    fn age(ages: &Ages, ns: u64) -> Self {
        match ages.count {
            0 => Self::text(""),
            _ => Self { text: short_time(ns), rank: Some(ns as f64) },
        }
    }

    fn rate(rate: Option<f64>) -> Self {
        let text = rate.map_or_else(String::new, |rate| match rate {
            0.0 => "0".into(),
            rate if rate < 99.95 => format!("{rate:.1}"),
            rate => format!("{rate:.0}"),
        });
        Self { text, rank: rate }
    }

    /// Returns the time since a moment, which is given in milliseconds since 1970.
    fn since(picture: &Picture, ms: u64) -> Self {
        let then = std::time::Duration::from_millis(ms);
        let age = picture.snapshot.now.saturating_sub(then);
        Self { text: duration(age), rank: Some(age.as_secs_f64()) }
    }

    fn compare(&self, other: &Self) -> Ordering {
        match (self.rank, other.rank) {
            (Some(one), Some(two)) => one.total_cmp(&two),
            (one, two) => one.is_some().cmp(&two.is_some()).then_with(|| self.text.cmp(&other.text)),
        }
    }

    fn is_number(&self) -> bool {
        self.rank.is_some()
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

fn member(picture: &Picture, member: &MemberInfo) -> Row {
    let mut waits: Vec<_> = picture.waits.iter().filter(|wait| wait.pid == Some(member.pid)).collect();
    waits.sort_by_key(|wait| std::cmp::Reverse((wait.on.is_urgent(), wait.ms)));
    let text = |wait: &&Wait| format!("{}: {}{}", wait.whom(), wait.object(&ends(&wait.name)), wait.time());
    let texts: Vec<_> = waits.iter().map(text).collect();
    let more = match texts.len().saturating_sub(SHOWN_WAITS) {
        0 => String::new(),
        more => format!(" +{more}"),
    };
    let shown = format!("{}{more}", texts[..texts.len().min(SHOWN_WAITS)].join(", "));
    let mut urgent = picture.waits.iter().filter(|wait| wait.on.is_urgent());
    let is_slow = urgent.any(|wait| wait.pid == Some(member.pid) || wait.by.contains(&member.pid));
    Row {
        id: Id::Member(member.member),
        cells: vec![
            Cell::number(member.pid),
            Cell::text(describe::state(member.state)),
            Cell::seconds(member.quiet),
            Cell::bytes(member.bytes),
            Cell::number(member.leases),
            Cell::some(member.blocks),
            Cell::some(member.permits),
            Cell::number(member.timelines),
            Cell::since(picture, member.since),
            Cell::name(member.mps.as_deref().unwrap_or_default()),
            Cell::text(shown),
            Cell::text(describe::command(&member.command, describe::LONG)),
        ],
        alert: Alert::of(member.state, is_slow),
        whole: format!("{} {} {}", member.command, member.mps.as_deref().unwrap_or_default(), texts.join(", ")),
    }
}

fn name(picture: &Picture, name: &NameInfo) -> Row {
    let older = Cell { text: describe::older(name), rank: (name.older > 0).then_some(name.older_bytes as f64) };
    let (use_of, alert) = use_of(picture, name);
    let mut cells = vec![Cell::name(&name.name), Cell::text(picture::kind(name))];
    match &name.latest {
        Some(latest) => cells.extend([
            Cell::text(place(latest.place.into())),
            Cell::bytes(latest.bytes),
            Cell::number(latest.version),
            older,
            Cell::number(latest.leases),
            Cell::since(picture, latest.committed_at),
            Cell::rate(picture.rates.of(&Counter::Name(name.name.clone(), latest.version))),
        ]),
        None => {
            let none = || Cell::text("");
            cells.extend([none(), Cell::bytes(0), none(), older, none(), none(), none()]);
        }
    }
    cells.push(Cell::text(use_of));
    Row { id: Id::Name(name.name.clone()), cells, alert, whole: name.name.clone() }
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
    let rate = |id| Cell::rate(picture.rates.of(&Counter::Participant(name.to_owned(), used.version, id)));
    let publisher = |publisher: &PublisherInfo| {
        let PublisherInfo { who, published, blocked } = publisher;
        let waits = blocked.map(|(by, ms)| {
            let whom = topic.subscribers.iter().find(|subscriber| subscriber.who.id == by);
            let whom = whom.and_then(|whom| whom.who.pid).map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            format!("for {whom} ({})", seconds(ms))
        });
        let none = || Cell::text("");
        let facts = [rate(who.id), none(), none(), none(), none(), none(), Cell::number(*published)];
        participant(name, "pub", who, "", facts, waits)
    };
    let subscriber = |subscriber: &SubscriberInfo| {
        let SubscriberInfo { who, lag, received, dropped, held, stalled, ages, .. } = subscriber;
        let facts = [
            rate(who.id),
            Cell::number(*lag),
            Cell::number(*dropped),
            Cell::age(ages, ages.p50),
            Cell::age(ages, ages.p99),
            Cell::number(*held),
            Cell::number(*received),
        ];
        let holds_up = stalled.map(|ms| format!("holds up others ({})", seconds(ms)));
        participant(name, "sub", who, &describe::control::policy(subscriber), facts, holds_up)
    };
    let rows: Vec<_> = topic.publishers.iter().map(publisher).chain(topic.subscribers.iter().map(subscriber)).collect();
    if !rows.is_empty() {
        return rows;
    }
    let mut cells = vec![Cell::name(name), Cell::text("nobody")];
    cells.resize(View::Topics.headings().len(), Cell::text(""));
    vec![Row { id: Id::Name(name.to_owned()), cells, alert: Alert::None, whole: name.to_owned() }]
}

fn participant(
    topic: &str,
    role: &str,
    who: &Participant,
    policy: &str,
    facts: [Cell; 7],
    waits: Option<String>,
) -> Row {
    let alert = who.state.map_or(Alert::Lost, |state| Alert::of(state, waits.is_some()));
    let mut cells = vec![
        Cell::name(topic),
        Cell::text(role),
        who.pid.map_or_else(|| Cell::text("?"), Cell::number),
        Cell::text(describe::control::state(who)),
        Cell::text(policy),
    ];
    cells.extend(facts);
    cells.push(Cell::text(waits.unwrap_or_default()));
    Row { id: Id::Participant(topic.to_owned(), who.id, who.pid), cells, alert, whole: topic.to_owned() }
}

fn queue(picture: &Picture, name: &NameInfo) -> Option<Row> {
    let latest = name.latest.as_ref()?;
    let usage = name.usage?.queue?;
    let used = picture.snapshot.used.get(&name.name).filter(|used| used.version == latest.version);
    let workers = used.into_iter().flat_map(|used| &used.holders).filter(|holder| holder.tasks > 0);
    let workers: Vec<_> = workers.map(|holder| format!("{} ({})", holder.pid, holder.tasks)).collect();
    Some(Row {
        id: Id::Name(name.name.clone()),
        cells: vec![
            Cell::name(&name.name),
            Cell::text(place(latest.place.into())),
            Cell::number(usage.pending),
            Cell::number(usage.claimed + usage.enqueued),
            Cell::number(usage.done),
            Cell::number(usage.dead),
            Cell::number(usage.free),
            Cell::rate(picture.rates.of(&Counter::Name(name.name.clone(), latest.version))),
            Cell::number(usage.completed),
            Cell::number(usage.returned),
            Cell::text(workers.join(", ")),
        ],
        alert: if usage.dead > 0 { Alert::Slow } else { Alert::None },
        whole: name.name.clone(),
    })
}

fn blocks(name: &str, used: &Used) -> Vec<Row> {
    let Used { control, info: ControlInfo { blocks, topic, queue }, holders, .. } = used;
    let held_by = holders.iter().filter(|holder| holder.blocks > 0);
    let held_by: Vec<_> = held_by.map(|holder| format!("{} ({})", holder.pid, holder.blocks)).collect();
    let of = if topic.is_some() { "topic" } else { "pool" };
    let inputs = if queue.is_some() { "inputs" } else { of };
    let mut rows = vec![block_row(name, inputs, (control.blocks, control.block_bytes), blocks, &held_by.join(", "))];
    if let (Some(queue), Some(shape)) = (queue, control.queue) {
        // Holders are counted over both.
        rows.push(block_row(name, "outputs", (shape.outputs, shape.output_bytes), &queue.outputs, ""));
    }
    rows
}

fn block_row(name: &str, of: &str, (number, each): (u32, u64), counts: &BlockCounts, held_by: &str) -> Row {
    Row {
        id: Id::Blocks(name.to_owned(), of == "outputs"),
        cells: vec![
            Cell::name(name),
            Cell::text(of),
            Cell::number(number),
            Cell::bytes(each),
            Cell::number(counts.free + counts.unused),
            Cell::number(counts.held + counts.handed + counts.offered),
            Cell::number(counts.in_ring),
            Cell::number(counts.read),
            Cell::number(counts.waiting),
            Cell::text(if counts.invalid > 0 { "damaged: see partywall show" } else { held_by }),
        ],
        alert: match (counts.invalid, counts.waiting) {
            (0, 0) => Alert::None,
            (0, _) => Alert::Slow,
            _ => Alert::Lost,
        },
        whole: name.to_owned(),
    }
}

fn object(picture: &Picture, object: &ObjectInfo) -> Option<Row> {
    let id = Id::Object(object.kind(), object.name().to_owned());
    let (kind, cells, alert) = match object {
        ObjectInfo::Timeline(timeline) => {
            let rate = picture.rates.of(&Counter::Timeline(timeline.name.clone(), timeline.incarnation));
            let facts = [Cell::number(timeline.value), Cell::number(timeline.announced), Cell::rate(rate)];
            let last = [Cell::text(""), Cell::number(timeline.leases), Cell::text(describe::writer(timeline))];
            let alert = if timeline.ending.is_some() { Alert::Lost } else { Alert::None };
            ("timeline", [facts, last], alert)
        }
        ObjectInfo::Semaphore(semaphore) => {
            let facts = [Cell::number(semaphore.held), Cell::number(semaphore.maximum), Cell::text("")];
            let last = [Cell::number(semaphore.waiting), Cell::number(semaphore.leases), Cell::text("")];
            ("semaphore", [facts, last], if semaphore.waiting > 0 { Alert::Slow } else { Alert::None })
        }
        _ => return None,
    };
    let cells = [Cell::name(object.name()), Cell::text(kind)].into_iter().chain(cells.into_iter().flatten());
    Some(Row { id, cells: cells.collect(), alert, whole: object.name().to_owned() })
}

/// Returns `host`, `pinned:N`, or the beginning of a GPU's UUID, by which GPUs differ.
pub(super) fn place(place: Place) -> String {
    let mut name = describe::place(place);
    if let Some((end, _)) = name.char_indices().nth(UUID) {
        name.truncate(end);
    }
    name
}

/// Returns a name of at most [`NAME`] characters: its beginning and its end, by which names mostly differ.
fn ends(name: &str) -> String {
    let length = name.chars().count();
    if length <= NAME {
        return describe::shorten(name, NAME);
    }
    let first: String = name.chars().take(NAME / 2 - 1).collect();
    let last: String = name.chars().skip(length - NAME / 2).collect();
    describe::shorten(&format!("{first}…{last}"), NAME)
}

/// The most characters of a name in a table. Enter shows all of it.
const NAME: usize = 36;

/// The most characters of any other cell.
const LONGEST: usize = 200;

/// The waits of a member in a table. Enter shows all for names and timelines.
const SHOWN_WAITS: usize = 2;

/// `GPU-` and the first eight digits.
const UUID: usize = 12;

#[cfg(test)]
mod tests {
    use super::{super::example, *};

    fn texts(rows: &[Row], column: usize) -> Vec<&str> {
        rows.iter().map(|row| row.cells[column].as_ref()).collect()
    }

    #[test]
    fn every_row_has_a_cell_for_each_heading() {
        let picture = example::picture();
        for view in LOWER.into_iter().chain([View::Members]) {
            let rows = view.rows(&picture);
            assert!(!rows.is_empty(), "{view:?}");
            assert!(rows.iter().all(|row| row.cells.len() == view.headings().len()), "{view:?}");
            for spare in view.spare() {
                assert!(view.headings().iter().any(|heading| heading.trim_start_matches('>') == *spare), "{spare}");
            }
            assert!(view.first_order() < view.headings().len());
        }
    }

    #[test]
    fn numbers_fall_texts_rise_and_blanks_are_last() {
        let picture = example::picture();
        let mut rows = View::Names.rows(&picture);
        let column = |heading| View::Names.headings().iter().position(|other| *other == heading).unwrap();
        order(&mut rows, column(">SIZE"), false);
        let sizes: Vec<_> = rows.iter().map(|row| row.cells[column(">SIZE")].rank.unwrap()).collect();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        order(&mut rows, column(">PER S"), false);
        let rates = texts(&rows, column(">PER S"));
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
        assert!(row.cells[0].as_ref().chars().count() <= NAME && row.cells[0].as_ref().contains('…'), "{row:?}");
        assert!(matches(row, "/middle/") && matches(row, "") && !matches(row, "other"));
    }

    // Holds 318.
    #[test]
    fn members_that_wait_and_those_they_wait_for_are_named() {
        let picture = example::picture();
        let rows = View::Members.rows(&picture);
        let column = View::Members.headings().iter().position(|heading| *heading == "WAITS FOR").unwrap();
        let row = |pid: &str| rows.iter().find(|row| row.cells[0].as_ref() == pid).unwrap();
        assert_eq!((row("4711").cells[column].as_ref(), row("4711").alert), ("4822: frames (1.2 s)", Alert::Slow));
        let expected = "4711: steps 73 (1.5 s), 4711: blocks +2";
        assert_eq!((row("4822").cells[column].as_ref(), row("4822").alert), (expected, Alert::Slow));
        assert!(matches(row("4822"), "a commit: llm/weights@7"), "the filter finds what the cell leaves out");
        assert_eq!(row("4900").alert, Alert::Lost, "it is unproven");
        let names = View::Names.rows(&picture);
        let frames = names.iter().find(|row| row.id == Id::Name("frames".into())).unwrap();
        assert!(frames.cells.last().unwrap().as_ref().starts_with("waits for 4822 (1.2 s), lag 3"), "{frames:?}");
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
                    assert!(!cell.as_ref().contains(bad), "{cell:?}");
                }
            }
        }
    }
}
