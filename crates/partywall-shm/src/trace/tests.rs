// Holds 315.
#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

use std::{
    sync::atomic::{AtomicBool, AtomicU64 as Word},
    thread,
};

use proptest::prelude::*;

use super::*;
use crate::members::Members;

fn traces() -> Traces {
    Members::map(Members::create(3).unwrap()).unwrap().traces()
}

/// An event whose words depend on one number, so that a torn one is noticed.
fn event(n: u64) -> TraceEvent {
    let action = Action::ALL[n as usize % Action::ALL.len()];
    TraceEvent {
        since: n,
        at: n + 1,
        pid: n as u32,
        tid: !n as u32,
        action,
        object: n * 3,
        value: n << 20,
        attempt: !n as u8,
    }
}

fn events(reader: &mut Reader, traces: &Traces) -> Vec<TraceEvent> {
    let mut events = Vec::new();
    reader.read(traces, |event| events.push(event));
    events
}

#[test]
fn events_are_read_once_and_in_order() {
    let traces = traces();
    traces.record(0, &event(1));
    assert!(!traces.are_on());
    traces.renew(0);
    assert!(traces.are_on());
    let mut reader = traces.reader();
    for n in 0..1000 {
        traces.record(7, &event(n));
        if n % 10 == 9 {
            assert_eq!(events(&mut reader, &traces), (n - 9..=n).map(event).collect::<Vec<_>>());
        }
    }
    assert_eq!((events(&mut reader, &traces).len(), reader.lost()), (0, 0));
    // A second tracer has a position of its own, and each row its ring.
    let mut other = traces.reader();
    (0..RINGS as u16).for_each(|row| traces.record(row, &event(row.into())));
    assert_eq!((events(&mut other, &traces).len(), events(&mut reader, &traces).len()), (RINGS, RINGS));
    traces.stop();
    traces.record(7, &event(1));
    assert!(events(&mut reader, &traces).is_empty());
}

#[test]
fn recording_ends_with_the_lease_of_a_killed_tracer() {
    let traces = traces();
    let mut reader = traces.reader();
    let recorded = |at| traces.record(0, &TraceEvent { at, ..event(0) });
    traces.renew(1_000);
    recorded(1_000 + LEASE);
    assert_eq!((events(&mut reader, &traces).len(), traces.are_on()), (1, true));
    recorded(1_001 + LEASE);
    assert_eq!((events(&mut reader, &traces).len(), traces.are_on()), (0, false));
    // No tracer asks for longer.
    traces.renew(u64::MAX);
    recorded(5_000);
    assert_eq!((events(&mut reader, &traces).len(), traces.are_on()), (0, false));
}

#[test]
fn overwritten_events_are_counted_as_lost() {
    let traces = traces();
    traces.renew(0);
    let mut reader = traces.reader();
    (0..EVENTS as u64 + 10).for_each(|n| traces.record(0, &event(n)));
    let read = events(&mut reader, &traces);
    assert_eq!((read.len(), read[0], reader.lost()), (EVENTS, event(10), 10));
}

#[test]
fn event_of_a_process_killed_while_writing_is_lost_alone() {
    let traces = traces();
    traces.renew(0);
    let mut reader = traces.reader();
    let ring = &traces.rings[0];
    // It has only its number; it has marked its entry.
    assert_eq!(ring.next.fetch_add(1, Ordering::Relaxed), 0);
    assert_eq!(ring.next.fetch_add(1, Ordering::Relaxed), 1);
    ring.entries[1].state.store(state_of(1) | WRITING, Ordering::Relaxed);
    traces.record(0, &event(2));
    // It might still be at it.
    assert_eq!((events(&mut reader, &traces), reader.lost()), (vec![], 0));
    assert_eq!((events(&mut reader, &traces), reader.lost()), (vec![], 1));
    assert_eq!((events(&mut reader, &traces), reader.lost()), (vec![event(2)], 2));
    // Once around the ring, only the marked entry takes no event.
    (3..EVENTS as u64 + 3).for_each(|n| traces.record(0, &event(n)));
    let mut read = events(&mut reader, &traces);
    read.extend(events(&mut reader, &traces));
    assert_eq!((read.len(), reader.lost()), (EVENTS - 1, 3));
    assert!(!read.contains(&event(EVENTS as u64 + 1)), "its entry is the marked one");
}

#[test]
fn no_event_of_threads_that_write_at_once_is_torn_or_read_twice() {
    let traces = traces();
    traces.renew(0);
    let over = AtomicBool::new(false);
    let recorded = Word::new(0);
    let (read, lost) = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reader = traces.reader();
            let mut read = 0;
            let mut last = [None; 2];
            loop {
                let is_over = over.load(Ordering::Acquire);
                reader.read(&traces, |found| {
                    assert_eq!(found, event(found.since), "torn");
                    let writer = found.since as usize % 2;
                    assert!(last[writer].replace(found.since) < Some(found.since), "twice, or out of order");
                    read += 1;
                });
                if is_over {
                    // No event is written any more.
                    reader.read(&traces, |_| read += 1);
                    return (read, reader.lost());
                }
            }
        });
        let write = |writer: u64| {
            for n in 0..100_000 {
                traces.record(0, &event(n * 2 + writer));
                recorded.fetch_add(1, Ordering::Relaxed);
            }
        };
        let writers = [0, 1].map(|writer| scope.spawn(move || write(writer)));
        for writer in writers {
            writer.join().unwrap();
        }
        over.store(true, Ordering::Release);
        reader.join().unwrap()
    });
    assert!(read > 0 && read + lost <= 200_000, "{read} read, {lost} lost");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_contents_are_read_without_a_panic(
        next in prop_oneof![any::<u64>(), 0..EVENTS as u64 * 3, Just(u64::MAX)],
        before in prop_oneof![Just(0), any::<u64>()],
        words in proptest::collection::vec(any::<u64>(), 8),
    ) {
        let traces = traces();
        let ring = &traces.rings[5];
        ring.next.store(before, Ordering::Relaxed);
        let mut reader = traces.reader();
        ring.next.store(next, Ordering::Relaxed);
        for (index, entry) in ring.entries.iter().enumerate() {
            let TraceEntry { state, at, since, who, what, object, value, zero } = entry;
            for (word, value) in [state, at, since, who, what, object, value, zero].into_iter().zip(&words) {
                word.store(value.wrapping_add(index as u64), Ordering::Relaxed);
            }
            if index % 3 == 0 {
                entry.state.store(state_of(next.wrapping_sub(1) - index as u64 % 2), Ordering::Relaxed);
            }
        }
        for _ in 0..3 {
            reader.read(&traces, |event| assert!(event.since <= event.at));
        }
        traces.renew(0);
        traces.record(5, &event(1));
    }
}

#[test]
fn objects_have_numbers_of_their_own() {
    let names = ["a", "b", "frames", "frames/1/publisher-3"];
    let mut numbers: Vec<_> = names.iter().flat_map(|name| [0, 1, 2].map(|version| object(name, version))).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 12);
}
