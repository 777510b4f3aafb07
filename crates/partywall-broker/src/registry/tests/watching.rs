// Holds 112.
//! Watching, rule by rule.

use partywall_wire::{Happened, NameEvent};

use super::*;

fn watch(pattern: &str, after: Option<Point>) -> Call {
    Call::Watch { pattern: pattern.into(), after }
}

impl Watched {
    fn happened(&mut self, member: MemberId, pattern: &str, after: Option<Point>) -> Happened {
        match self.ask(member, watch(pattern, after)).1 {
            Ok(Answer::Happened(happened)) => happened,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the events of names that match a pattern.
    fn all(&mut self, member: MemberId, pattern: &str) -> Vec<(String, Change)> {
        short(&self.happened(member, pattern, point(0)).events)
    }
}

fn short(events: &[NameEvent]) -> Vec<(String, Change)> {
    events.iter().map(|event| (event.name.to_string(), event.change)).collect()
}

/// Returns the events of the only completion among the effects.
fn notified(effects: &[Effect]) -> Happened {
    match &notices(effects)[..] {
        [(.., Ok(Answer::Happened(happened)))] => happened.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn watcher_sees_a_name_and_each_version_come_and_go() {
    let (mut w, [a, b]) = Watched::with_members();
    let (_, first) = w.commit(a, "x", false);
    w.commit(b, "x", true);
    w.release(a, first);
    let _ = w.ask(a, Call::Remove { name: called("x"), deadline: None });
    w.apply(Event::Died { member: b });
    let name = || "x".to_owned();
    let by_a = 101;
    let by_b = 102;
    let expected = [
        (name(), Change::Created { pid: by_a }),
        (name(), Change::Committed { version: 1, bytes: 10, pid: by_a }),
        (name(), Change::Committed { version: 2, bytes: 10, pid: by_b }),
        (name(), Change::Withdrawn { pid: by_a }),
    ];
    assert_eq!(w.all(a, "*"), expected, "memory is free when it is closed");
    w.close_all();
    let reclaimed = [1, 2].map(|version| (name(), Change::Reclaimed { version, bytes: 10 }));
    assert_eq!(w.all(a, "x"), [&expected[..], &reclaimed].concat());
}

// Holds 113.
#[test]
fn death_is_reported_before_its_memory_is_freed() {
    let (mut w, [a, b]) = Watched::with_members();
    w.commit(a, "theirs", false);
    let held = w.opened(b, "theirs");
    let Happened { next, .. } = w.happened(b, "*", None);
    let (ticket, outcome, _) = w.ask(b, watch("th*", Some(next)));
    assert_eq!(outcome, Ok(Answer::Pending));
    let effects = w.apply(Event::Died { member: a });
    assert_eq!(short(&notified(&effects).events), [("theirs".into(), Change::OwnerDied { pid: 101 })]);
    assert_eq!(notices(&effects)[0].1, ticket);
    let next = notified(&effects).next;
    assert_eq!(w.ask(b, watch("*", Some(next))).1, Ok(Answer::Pending));
    w.release(b, held.lease);
    let effects = w.close_all();
    assert_eq!(short(&notified(&effects).events), [("theirs".into(), Change::Reclaimed { version: 1, bytes: 10 })]);
}

#[test]
fn watchers_get_only_names_that_match() {
    let (mut w, [a, b]) = Watched::with_members();
    assert_eq!(w.ask(b, watch("llm/*", point(0))).1, Ok(Answer::Pending));
    let commit = w.commit_call("other", false, true);
    let (.., effects) = w.ask(a, commit);
    assert_eq!(notices(&effects), []);
    let commit = w.commit_call("llm/a", false, true);
    let (.., effects) = w.ask(a, commit);
    let Happened { gap: None, events, next: Point { sequence: 4, .. } } = notified(&effects) else {
        panic!("{effects:?}")
    };
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [3, 4]);
}

#[test]
fn timelines_and_semaphores_have_their_own_events() {
    let (mut w, [a, b]) = Watched::with_members();
    let open = |writer| Call::OpenTimeline { name: called("t"), writer, shared: false };
    let _ = w.ask(a, open(true));
    let _ = w.ask(b, open(false));
    let semaphore = Call::OpenSemaphore { name: called("s"), maximum: 1, shared: false };
    let _ = w.ask(b, semaphore);
    w.apply(Event::Died { member: a });
    let _ = w.ask(b, open(true));
    let _ = w.ask(b, Call::ContextLost { gpu: None });
    let events = w.happened(b, "*", point(0)).events;
    let notified: Vec<_> = events.iter().map(|event| (event.named, event.change)).collect();
    assert_eq!(
        notified,
        [
            (Named::Timeline, Change::Created { pid: 101 }),
            (Named::Semaphore, Change::Created { pid: 102 }),
            (Named::Timeline, Change::OwnerDied { pid: 101 }),
            (Named::Timeline, Change::OwnerFaulted { pid: 102 }),
        ]
    );
    w.join(MemberId(3));
    w.apply(Event::Died { member: b });
    let after = events.len() as u64;
    let notified: Vec<_> =
        w.happened(MemberId(3), "*", point(after)).events.iter().map(|e| (e.named, e.change)).collect();
    let gone = Change::Withdrawn { pid: 102 };
    assert_eq!(notified, [(Named::Semaphore, gone), (Named::Timeline, gone)], "as its leases go");
}

#[test]
fn late_watcher_learns_how_many_events_it_missed() {
    let bounds = Bounds { log: 1000, ..UNBOUNDED };
    let mut w = Watched::new(bounds);
    let [a, b] = [1, 2].map(MemberId);
    w.join(a);
    w.join(b);
    for _ in 0..100 {
        w.commit(a, "x", true);
    }
    let Happened { gap: Some(Gap::Behind { events: missed }), events, next } = w.happened(b, "*", point(7)) else {
        panic!("it is not all there any more")
    };
    assert!((5..20).contains(&events.len()), "{events:?}");
    assert_eq!(events[0].sequence, 7 + missed + 1);
    assert_eq!((events.last().unwrap().sequence, next.sequence), (101, 101));
    assert_eq!(w.happened(b, "*", point(7 + missed)).gap, None);
    // A point that is not of this broker.
    for after in [ELSEWHERE, point(102)] {
        let there = w.happened(b, "y", after);
        assert_eq!(there, Happened { gap: Some(Gap::OtherBroker), events: Vec::new(), next: point(101).unwrap() });
    }
}

#[test]
fn waiting_watch_misses_nothing_in_a_fast_log() {
    let mut w = Watched::new(Bounds { log: 1000, ..UNBOUNDED });
    let [a, b] = [1, 2].map(MemberId);
    w.join(a);
    w.join(b);
    let mut next = 0;
    let quiet = |next| watch("quiet", point(next));
    // Long before the log has been filled a second time, the watcher gets a later point.
    let mut renewed = 0;
    assert_eq!(w.ask(b, quiet(next)).1, Ok(Answer::Pending));
    for _ in 0..100 {
        let commit = w.commit_call("busy", false, true);
        let (.., effects) = w.ask(a, commit);
        if !notices(&effects).is_empty() {
            let Happened { gap: None, events, next: later } = notified(&effects) else { panic!("{effects:?}") };
            let later = later.sequence;
            assert!(events.is_empty() && later > next);
            (next, renewed) = (later, renewed + 1);
            assert_eq!(w.ask(b, quiet(next)).1, Ok(Answer::Pending));
        }
    }
    assert!((2..50).contains(&renewed), "{renewed}");
    let commit = w.commit_call("quiet", false, true);
    let (.., effects) = w.ask(a, commit);
    assert_eq!(notified(&effects).gap, None);
    assert_eq!(notified(&effects).events.len(), 2);
}

#[test]
fn event_larger_than_the_log_is_reported() {
    let mut w = Watched::new(Bounds { log: 500, ..UNBOUNDED });
    let [a, b] = [1, 2].map(MemberId);
    w.join(a);
    w.join(b);
    for i in 0..50 {
        w.commit(a, &format!("name{i}"), false);
    }
    let Happened { next, .. } = w.happened(b, "*", None);
    assert_eq!(w.ask(b, watch("*", Some(next))).1, Ok(Answer::Pending));
    let effects = w.apply(Event::Died { member: a });
    let Happened { gap: Some(Gap::Behind { events: missed }), events, next: last } = notified(&effects) else {
        panic!("{effects:?}")
    };
    assert_eq!(missed + events.len() as u64, 50);
    let next = next.sequence;
    assert_eq!((events[0].sequence, last.sequence), (next + missed + 1, next + 50));
}

#[test]
fn watch_counts_as_a_waiting_request() {
    let mut w = Watched::new(Bounds { waits: 1, ..UNBOUNDED });
    let a = MemberId(1);
    w.join(a);
    let (ticket, outcome, _) = w.ask(a, watch("*", point(0)));
    assert_eq!(outcome, Ok(Answer::Pending));
    let refused = w.ask(a, watch("*", point(0))).1;
    assert_eq!(refused, Err(Refusal::Limit { limit: Limit::Waits, allowed: 1, needed: 2, holders: Vec::new() }));
    assert_eq!(w.ask(a, Call::Cancel { ticket }).1, Ok(Answer::Done));
    assert_eq!(w.ask(a, watch("*", point(0))).1, Ok(Answer::Pending));
    w.apply(Event::Suspected { member: a });
    w.apply(Event::Resumed { member: a });
    w.commit(a, "x", true);
    assert_eq!(w.happened(a, "*", point(0)).events.len(), 2, "it asks again, and has missed nothing");
}
