// Holds 315.
//! Traces under the model checker.
#![allow(clippy::unwrap_used, reason = "a model fails by panicking, as tests do")]

use loom::{model::Builder, sync::Arc, thread};

use super::*;

fn ring() -> Ring {
    let zero = || AtomicU64::new(0);
    let entry = || TraceEntry {
        state: zero(),
        at: zero(),
        since: zero(),
        who: zero(),
        what: zero(),
        object: zero(),
        value: zero(),
        zero: zero(),
    };
    Ring { next: zero(), zero: std::array::from_fn(|_| zero()), entries: std::array::from_fn(|_| entry()) }
}

fn event(n: u64) -> TraceEvent {
    TraceEvent {
        since: n,
        at: n,
        pid: n as u32,
        tid: n as u32,
        action: Action::Publish,
        object: n,
        value: n,
        attempt: n as u8,
    }
}

/// Two threads write into the only entry while a third one reads it: no event is torn.
#[test]
fn event_that_is_read_is_whole() {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let ring = Arc::new(ring());
        let writers = [0, 1].map(|_| {
            let ring = ring.clone();
            thread::spawn(move || {
                let number = ring.next.fetch_add(1, Ordering::Relaxed);
                ring.entries[0].write(number, &event(number + 5));
            })
        });
        for number in 0..2 {
            if let Content::Event(found) = ring.entries[0].read(number) {
                assert_eq!(found, event(number + 5));
            }
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}
