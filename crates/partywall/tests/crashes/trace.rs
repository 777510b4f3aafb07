// Holds 315.
//! Traces: a process that crashes while it records loses one event, tears none, and keeps no other process from
//! recording.

use std::fs::File;

use partywall_harness::crash::{self, at_each_point};
use partywall_shm::{
    members::Members,
    trace::{Action, EVENTS, Reader, TraceEvent, Traces},
};

use super::points::{RECORDING, assert_passed};

/// The row of all, so that they share a ring.
const ROW: u16 = 3;
/// The events of the process that crashes.
const THEIRS: u64 = 3;

fn event(n: u64) -> TraceEvent {
    TraceEvent {
        since: n,
        at: n + 1,
        pid: n as u32,
        tid: !n as u32,
        action: Action::Signal,
        object: n * 3,
        value: n << 20,
        attempt: !n as u8,
    }
}

pub(crate) fn play(memory: File) {
    let traces = Members::map(memory).unwrap().traces();
    crash::arm();
    (0..THEIRS).for_each(|n| traces.record(ROW, &event(n)));
    crash::disarm();
}

/// Returns the new events, which must be whole. Reads three times: what is not written by then never will be.
fn events(reader: &mut Reader, traces: &Traces) -> Vec<u64> {
    let mut found = Vec::new();
    for _ in 0..3 {
        reader.read(traces, |seen| {
            assert_eq!(seen, event(seen.since), "torn");
            found.push(seen.since);
        });
    }
    found
}

#[test]
fn recording() {
    let points = at_each_point(
        || {
            let memory = Members::create(5).unwrap();
            let traces = Members::map(&memory).unwrap().traces();
            traces.renew(0);
            let reader = traces.reader();
            let command = super::role("trace records", &memory);
            (command, (memory, traces, reader))
        },
        |crashed, (_memory, traces, mut reader)| {
            let what = format!("{crashed:?}");
            let theirs = events(&mut reader, &traces);
            assert!(theirs.len() < THEIRS as usize && theirs.is_sorted(), "{what}: {theirs:?}");
            (100..110).for_each(|n| traces.record(ROW, &event(n)));
            assert_eq!(events(&mut reader, &traces), (100..110).collect::<Vec<_>>(), "{what}");
            assert_eq!(reader.lost(), 1, "{what}: the event at which it crashed");
            let is_half_written = crashed.point.contains("half written");
            // A paused process has continued by the end of this call.
            let is_dead = crashed.is_dead_in_the_end();
            let rest = events(&mut reader, &traces);
            assert_eq!(rest.is_empty(), is_dead || theirs.len() + 1 == THEIRS as usize, "{what}: {rest:?}");
            // One slot of the ring may be lost for good, and only if its process is.
            (200..200 + EVENTS as u64).for_each(|n| traces.record(ROW, &event(n)));
            let ours = events(&mut reader, &traces).len();
            let half_written = usize::from(is_dead && is_half_written);
            assert_eq!(ours, EVENTS - half_written, "{what}");
        },
    );
    assert_passed(&points, &[RECORDING]);
}
