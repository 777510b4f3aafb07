//! A trace in Chrome's format ("Trace Event Format"), which Perfetto and `chrome://tracing` open.
//!
//! Each event is a slice of its thread. Arrows (flow events) lead
//! - from a publication to each receipt, and on to the release of the sample;
//! - from the submission of a task over all its attempts to the taking of its result;
//! - from the signal of a value to the ends of the waits for it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{self, Write},
};

use serde_json::{Value, json};

use super::{Action, TraceEvent};

/// A trace for <https://ui.perfetto.dev> and `chrome://tracing`: events, and the arrows between them.
#[derive(Debug)]
pub struct ChromeTrace {
    /// The events, in the order of their beginnings.
    events: Vec<TraceEvent>,
    arrows: Arrows,
    names: BTreeMap<u64, String>,
    /// The command lines of processes.
    commands: BTreeMap<u32, String>,
    lost: u64,
}

impl ChromeTrace {
    /// Arranges events. `name` names objects, and `commands` are the command lines of processes.
    pub(super) fn new(
        mut events: Vec<TraceEvent>,
        name: impl Fn(u64) -> String,
        commands: BTreeMap<u32, String>,
        lost: u64,
    ) -> Self {
        // A wait comes before the events within it.
        events.sort_by_key(|event| (event.since, Reverse(event.at)));
        let objects: BTreeSet<u64> = events.iter().map(|event| event.object).collect();
        let names = objects.into_iter().map(|object| (object, name(object))).collect();
        let arrows = arrows(&events);
        Self { events, arrows, names, commands, lost }
    }

    /// Writes the trace as JSON, one event a line, in small pieces: `out` should be buffered. Flushes `out`.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"lost\":{}}},\"traceEvents\":[", self.lost)?;
        let heads = self.pids().into_iter().filter_map(|pid| self.head(pid));
        let slices = self.events.iter().map(|event| self.slice(event, event.action.name(), length(event)));
        let ends = self.arrows.ends.iter().map(|end| self.slice(end, end_name(end.action), end.at - end.since));
        let points = self.arrows.all.iter().enumerate().flat_map(|(number, arrow)| self.points(number, arrow));
        for (index, value) in heads.chain(slices).chain(ends).chain(points).enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(out, "{comma}\n{value}")?;
        }
        writeln!(out, "\n]}}")?;
        out.flush()
    }

    /// Returns the number of events.
    pub fn events(&self) -> usize {
        self.events.len()
    }

    /// Returns the number of arrows.
    pub fn arrows(&self) -> usize {
        self.arrows.all.len()
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        self.pids().len()
    }

    /// Returns how many events were lost or left out.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    fn pids(&self) -> BTreeSet<u32> {
        self.events.iter().map(|event| event.pid).collect()
    }

    /// Returns the record that names a process, if its command line is known. Viewers show the pid of any other.
    fn head(&self, pid: u32) -> Option<Value> {
        let command = self.commands.get(&pid).filter(|command| !command.is_empty())?;
        // Perfetto shows what follows the last slash, which may be in any argument.
        let words = command.split(' ').map(|word| word.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default());
        let name = words.collect::<Vec<_>>().join(" ");
        Some(json!({ "ph": "M", "name": "process_name", "pid": pid, "args": { "name": name } }))
    }

    fn slice(&self, event: &TraceEvent, action: &str, length: u64) -> Value {
        let name = &self.names[&event.object];
        let (what, details) = match event.task() {
            // As in the text of the task's reference.
            Some((place, generation)) => {
                let attempt = if event.attempt > 1 { format!(" attempt {}", event.attempt) } else { String::new() };
                let task = format!("#{place}.{generation}");
                (format!("{name}{task}{attempt}"), json!({ "queue": name, "task": task, "attempt": event.attempt }))
            }
            None => (format!("{name} {}", event.value), json!({ category(event): name, "value": event.value })),
        };
        json!({
            "ph": "X",
            "name": format!("{action} {what}"),
            "cat": category(event),
            "ts": self.time(event.since),
            "dur": length as f64 / 1e3,
            "pid": event.pid,
            "tid": event.tid,
            "args": details,
        })
    }

    fn points(&self, number: usize, arrow: &Arrow) -> impl Iterator<Item = Value> {
        let Arrow { category, points } = arrow;
        let last = points.len() - 1;
        points.iter().enumerate().map(move |(index, SlicePoint { at, pid, tid })| {
            let kind = match index {
                0 => "s",
                _ if index == last => "f",
                _ => "t",
            };
            let mut value = json!({
                "ph": kind,
                "id": number,
                "name": category,
                "cat": category,
                "ts": self.time(*at),
                "pid": pid,
                "tid": tid,
            });
            if index == last {
                // The arrow ends at the slice around it, not at the next one.
                value["bp"] = json!("e");
            }
            value
        })
    }

    /// Returns a time in microseconds since the first event.
    fn time(&self, ns: u64) -> f64 {
        let start = self.events.first().map_or(0, |event| event.since);
        ns.saturating_sub(start) as f64 / 1e3
    }
}

/// Points of slices that belong together, in order.
#[derive(Debug, PartialEq)]
struct Arrow {
    category: &'static str,
    points: Vec<SlicePoint>,
}

/// A time within a slice of a thread.
#[derive(Debug, Clone, Copy, PartialEq)]
struct SlicePoint {
    at: u64,
    pid: u32,
    tid: u32,
}

/// The arrows between events.
#[derive(Debug, Default)]
struct Arrows {
    all: Vec<Arrow>,
    /// The last moments of events, as slices of their own within those of the events. Perfetto turns an arrow round
    /// that leads to a slice which began before the one where the arrow begins, as a wait begins before the signal that
    /// ends it.
    ends: Vec<TraceEvent>,
}

impl Arrows {
    /// Adds an arrow through the beginnings of events, and through the ends of calls that may have begun before the
    /// event that ended them. Does nothing for fewer than two events.
    fn add(&mut self, category: &'static str, events: &[&TraceEvent]) {
        let mut points: Vec<SlicePoint> = Vec::new();
        for event in events {
            let mut at = event.since;
            if let Some(former) = points.last().filter(|former| at < former.at) {
                // It ends with the slice of the event, so it begins before that ends.
                at = event.at.saturating_sub(MOMENT).max(former.at).min(event.at.saturating_sub(1));
                self.ends.push(TraceEvent { since: at, ..**event });
            }
            points.push(SlicePoint { at, pid: event.pid, tid: event.tid });
        }
        if points.len() > 1 {
            self.all.push(Arrow { category, points });
        }
    }
}

/// Returns the arrows between events that are sorted by their beginnings. No arrow leads back in time.
fn arrows(events: &[TraceEvent]) -> Arrows {
    let of = |actions: &'static [Action]| events.iter().filter(move |event| actions.contains(&event.action));
    let sample = |event: &TraceEvent| (event.object, event.value);
    let published: BTreeMap<_, _> = of(&[Action::Publish]).map(|event| (sample(event), event)).collect();
    let mut released: BTreeMap<_, VecDeque<&TraceEvent>> = BTreeMap::new();
    for event in of(&[Action::Release]) {
        released.entry((sample(event), event.pid)).or_default().push_back(event);
    }
    let mut arrows = Arrows::default();
    for receipt in of(&[Action::Receive]) {
        let publication = published.get(&sample(receipt)).filter(|publication| publication.since <= receipt.since);
        let releases = released.get_mut(&(sample(receipt), receipt.pid));
        let release = releases.and_then(VecDeque::pop_front).filter(|release| release.since >= receipt.since);
        arrows.add("sample", &publication.into_iter().copied().chain([receipt]).chain(release).collect::<Vec<_>>());
    }
    let mut tasks: BTreeMap<_, Vec<&TraceEvent>> = BTreeMap::new();
    for event in events.iter().filter(|event| event.task().is_some()) {
        tasks.entry(sample(event)).or_default().push(event);
    }
    for mut events in tasks.into_values() {
        // A claim ends after the submission has begun, and may begin before it. So with results.
        events.sort_by_key(|event| match event.action {
            Action::Claim | Action::Take => event.at.saturating_sub(1).max(event.since),
            _ => event.since,
        });
        arrows.add("task", &events);
    }
    let mut signalled: BTreeMap<u64, BTreeMap<u64, &TraceEvent>> = BTreeMap::new();
    for event in of(&[Action::Signal, Action::SignalOn]) {
        signalled.entry(event.object).or_default().entry(event.value).or_insert(event);
    }
    for wait in of(&[Action::Wait, Action::WaitOn]) {
        // The first value that ends the wait.
        let signals = signalled.get(&wait.object).and_then(|signals| signals.range(wait.value..).next());
        if let Some((_, signal)) = signals.filter(|(_, signal)| signal.since <= wait.at) {
            arrows.add("timeline", &[signal, wait]);
        }
    }
    arrows
}

fn length(event: &TraceEvent) -> u64 {
    event.at.saturating_sub(event.since).max(MOMENT)
}

/// Returns the name of the last moment of an event.
fn end_name(action: Action) -> &'static str {
    match action {
        Action::Wait => "reached",
        Action::Claim => "claimed",
        Action::Take => "taken",
        other => other.name(),
    }
}

/// The length of a slice for an event of one moment, in nanoseconds: two events of a thread are further apart.
const MOMENT: u64 = 50;

fn category(event: &TraceEvent) -> &'static str {
    match event.action {
        Action::Publish | Action::Receive | Action::Release => "topic",
        _ if event.task().is_some() => "queue",
        _ => "timeline",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(action: Action, pid: u32, since: u64, at: u64, object: u64, value: u64) -> TraceEvent {
        TraceEvent { since, at, pid, tid: pid + 1, action, object, value, attempt: 0 }
    }

    fn written(events: Vec<TraceEvent>) -> (Vec<Value>, ChromeTrace) {
        let trace = ChromeTrace::new(events, |object| format!("object {object} \"\n"), BTreeMap::new(), 7);
        let mut bytes = Vec::new();
        trace.write(&mut bytes).unwrap();
        let document: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(document["otherData"]["lost"], 7);
        (document["traceEvents"].as_array().unwrap().clone(), trace)
    }

    // Holds 315.
    #[test]
    fn arrows_lead_from_a_publication_over_each_receipt_to_its_release() {
        use Action::{Publish, Receive, Release};
        let (events, trace) = written(vec![
            event(Release, 30, 9_000, 9_000, 1, 5),
            event(Publish, 10, 1_000, 1_200, 1, 5),
            event(Receive, 20, 2_000, 2_000, 1, 5),
            event(Receive, 30, 3_000, 3_000, 1, 5),
            // Held until the end of the trace, of another topic, and published before the trace.
            event(Publish, 10, 4_000, 4_000, 2, 5),
            event(Receive, 20, 5_000, 5_000, 3, 5),
        ]);
        assert_eq!((trace.events(), trace.arrows(), trace.processes()), (6, 2, 3));
        let flows: Vec<_> = events.iter().filter(|event| event["cat"] == "sample").collect();
        let seen: Vec<_> = flows.iter().map(|flow| (&flow["id"], flow["ph"].as_str().unwrap(), &flow["pid"])).collect();
        let expected = [(0, "s", 10), (0, "f", 20), (1, "s", 10), (1, "t", 30), (1, "f", 30)];
        let expected: Vec<_> = expected.iter().map(|(id, kind, pid)| (json!(id), *kind, json!(pid))).collect();
        assert!(seen.iter().copied().eq(expected.iter().map(|(id, kind, pid)| (id, *kind, pid))), "{seen:?}");
        // Each point lies in a slice of its thread.
        for flow in flows {
            let at = flow["ts"].as_f64().unwrap();
            let is_around = |slice: &Value| {
                let from = slice["ts"].as_f64().unwrap();
                slice["pid"] == flow["pid"]
                    && slice["tid"] == flow["tid"]
                    && from <= at
                    && at < from + slice["dur"].as_f64().unwrap()
            };
            assert!(events.iter().filter(|slice| slice["ph"] == "X").any(is_around), "{flow}");
        }
        let first = events.iter().find(|event| event["ph"] == "X").unwrap();
        assert_eq!((&first["ts"], &first["dur"]), (&json!(0.0), &json!(0.2)));
    }

    // Holds 315.
    #[test]
    fn arrows_lead_from_the_signal_that_ends_a_wait_and_never_back_in_time() {
        use Action::{Signal, SignalOn, Wait, WaitOn};
        let (events, trace) = written(vec![
            event(Wait, 20, 100, 900, 1, 4),
            event(Signal, 10, 700, 800, 1, 5),
            event(Signal, 10, 950, 960, 1, 6),
            event(WaitOn, 20, 970, 970, 1, 6),
            // Signalled later, by an event that was lost, and by none.
            event(WaitOn, 20, 980, 980, 1, 7),
            event(SignalOn, 10, 990, 999, 1, 7),
            event(Wait, 20, 100, 900, 2, 4),
        ]);
        assert_eq!(trace.arrows(), 2);
        let times = |kind| {
            let points = events.iter().filter(move |event| event["ph"] == kind);
            points.map(|point| (point["pid"].as_u64().unwrap(), point["ts"].as_f64().unwrap())).collect::<Vec<_>>()
        };
        assert_eq!((times("s"), times("f")), (vec![(10, 0.6), (10, 0.85)], vec![(20, 0.75), (20, 0.87)]));
        // Its arrow leads to a slice that began after the signal.
        let ends: Vec<_> = events.iter().filter(|event| event["name"] == "reached object 1 \"\n 4").collect();
        let [end] = ends[..] else { panic!("{ends:?}") };
        assert_eq!((&end["pid"], &end["ts"], &end["dur"]), (&json!(20), &json!(0.75), &json!(0.05)));
    }

    // Holds 315.
    #[test]
    fn one_arrow_leads_over_all_attempts_of_a_task() {
        use Action::{Claim, Complete, Fail, Submit, Take};
        let task = 3 << 17 | 9;
        let of = |action, pid, since, at, attempt| TraceEvent { attempt, ..event(action, pid, since, at, 1, task) };
        let (events, trace) = written(vec![
            of(Submit, 10, 1_000, 1_200, 0),
            of(Claim, 20, 1_100, 1_300, 1),
            of(Fail, 20, 2_000, 2_100, 1),
            // Of a worker that was killed, and so did not say how its attempt ended.
            of(Claim, 30, 2_050, 2_200, 2),
            of(Claim, 20, 3_000, 3_010, 3),
            of(Complete, 20, 4_000, 4_100, 3),
            // The call has begun before the worker completed the task.
            of(Take, 10, 3_990, 4_200, 3),
            // Claimed after the trace.
            event(Submit, 10, 5_000, 5_100, 1, task + 1),
        ]);
        assert_eq!((trace.events(), trace.arrows()), (8, 1));
        let points: Vec<_> = events.iter().filter(|event| event["cat"] == "task").collect();
        let kinds: String = points.iter().map(|point| point["ph"].as_str().unwrap()).collect();
        let pids: Vec<_> = points.iter().map(|point| point["pid"].as_u64().unwrap()).collect();
        assert_eq!((kinds.as_str(), pids), ("stttttf", vec![10, 20, 20, 30, 20, 20, 10]));
        assert!(points.is_sorted_by_key(|point| point["ts"].as_f64()), "{points:?}");
        assert!(points.iter().all(|point| point["id"] == 0), "{points:?}");
        let slice = events.iter().find(|event| event["name"] == "complete object 1 \"\n#9.3 attempt 3").unwrap();
        assert_eq!(slice["args"], json!({ "queue": "object 1 \"\n", "task": "#9.3", "attempt": 3 }));
        assert!(events.iter().any(|event| event["name"] == "submit object 1 \"\n#10.3"), "{events:?}");
    }

    // Holds 315.
    #[test]
    fn events_of_any_contents_are_written() {
        let (events, _) = written(vec![
            event(Action::Wait, 0, 0, u64::MAX, u64::MAX, u64::MAX),
            event(Action::Signal, 7, u64::MAX, u64::MAX, u64::MAX, u64::MAX),
            event(Action::Receive, 7, 5, 3, 0, 0),
        ]);
        let slices = events.iter().filter(|event| event["ph"] == "X");
        assert_eq!(slices.count(), 4, "one more for the end of the wait");
        assert_eq!(written(Vec::new()).0, Vec::<Value>::new());
    }

    // Holds 315.
    #[test]
    fn names_of_processes_have_no_slash() {
        for (command, expected) in [
            ("/usr/bin/python3 train.py --out /tmp/a/trace.json", "python3 train.py --out trace.json"),
            ("worker dir/ / x", "worker dir  x"),
        ] {
            let commands = BTreeMap::from([(10, command.to_owned())]);
            let trace = ChromeTrace::new(vec![event(Action::Signal, 10, 0, 1, 1, 1)], |_| "t".into(), commands, 0);
            assert_eq!(trace.head(10).unwrap()["args"]["name"], expected);
        }
    }
}
