// Holds 16.
//! Cells under the model checker.
#![allow(clippy::unwrap_used, reason = "a model fails by panicking, as tests do")]

use loom::{
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use super::*;
use crate::MAX_SLEEP;

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Sleeps until `look` returns a value.
fn wait<T>(cell: &Cell, poll: impl Fn(&Cell) -> Option<T>) -> T {
    loop {
        let key = cell.prepare();
        if let Some(found) = poll(cell) {
            return found;
        }
        cell.sleep(key, MAX_SLEEP);
    }
}

/// Sleeps until `v` is reached or never will be.
fn decided(cell: &Cell, v: u64) -> Progress {
    wait(cell, |cell| match cell.progress(v) {
        Progress::Pending | Progress::Announced => None,
        decided => Some(decided),
    })
}

fn promised(cell: &Cell, v: u64) -> Progress {
    wait(cell, |cell| Some(cell.progress(v)).filter(|progress| *progress != Progress::Pending))
}

#[test]
fn woken_waiter_sees_writes_before_the_signal() {
    check(2, || {
        let shared = Arc::new((Cell::new(), AtomicU32::new(0)));
        let waiter = {
            let shared = shared.clone();
            thread::spawn(move || {
                assert_eq!(decided(&shared.0, 1), Progress::Reached);
                assert_eq!(shared.1.load(Ordering::Relaxed), 7);
            })
        };
        shared.1.store(7, Ordering::Relaxed);
        shared.0.signal(1).unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn no_promise_is_slept_through() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        let waiters = [1, 2].map(|v| {
            let cell = cell.clone();
            thread::spawn(move || assert_eq!(promised(&cell, v), Progress::Announced))
        });
        cell.announce(1);
        cell.announce(2);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn sleeper_misses_no_change_of_another_waker() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        let waiter = {
            let cell = cell.clone();
            thread::spawn(move || {
                promised(&cell, 1);
                assert_eq!(wait(&cell, |cell| cell.ending()), TimelineEnding::Evicted);
            })
        };
        let ender = {
            let cell = cell.clone();
            thread::spawn(move || cell.end(TimelineEnding::Evicted))
        };
        cell.announce(1);
        ender.join().unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn all_observers_agree_on_the_last_value() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        let waiter = {
            let cell = cell.clone();
            thread::spawn(move || decided(&cell, 1))
        };
        let ender = {
            let cell = cell.clone();
            thread::spawn(move || cell.end(TimelineEnding::OwnerDied))
        };
        let signalled = cell.signal(1);
        let ended = ender.join().unwrap();
        let progress = waiter.join().unwrap();
        assert_eq!(ended, Ended { ending: TimelineEnding::OwnerDied, last: u64::from(signalled.is_ok()) });
        match signalled {
            Ok(()) => assert_eq!(progress, Progress::Reached),
            Err(refused) => {
                assert_eq!(refused, Refused::Ended(TimelineEnding::OwnerDied));
                assert_eq!(progress, Progress::Ended(TimelineEnding::OwnerDied));
            }
        }
    });
}

#[test]
fn timeline_ends_once_with_one_reason() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        let enders = [TimelineEnding::OwnerDied, TimelineEnding::BrokerGone].map(|ending| {
            let cell = cell.clone();
            thread::spawn(move || cell.end(ending))
        });
        let signalled = cell.signal(1).is_ok();
        let [a, b] = enders.map(|ender| ender.join().unwrap());
        assert_eq!(a, b);
        assert_eq!((a.last, cell.value(), cell.ending()), (u64::from(signalled), a.last, Some(a.ending)));
        assert!(cell.late_store().is_none());
    });
}

#[test]
fn late_store_of_a_stream_does_not_change_the_outcome() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        cell.announce(1);
        let ender = {
            let cell = cell.clone();
            thread::spawn(move || cell.end(TimelineEnding::Abandoned).last)
        };
        let stream = {
            let cell = cell.clone();
            thread::spawn(move || cell.store_as_a_stream(1))
        };
        let seen = cell.progress(1);
        let last = ender.join().unwrap();
        stream.join().unwrap();
        match seen {
            Progress::Reached => assert_eq!(last, 1),
            Progress::Ended(_) => assert_eq!(last, 0),
            _ => {}
        }
        let after = if last == 1 { Progress::Reached } else { Progress::Ended(TimelineEnding::Abandoned) };
        assert_eq!((cell.progress(1), cell.value()), (after, last));
        // Only if it came after the poison is there something to repair.
        let late = cell.late_store();
        assert!(late.is_none() || last == 0);
        late.into_iter().for_each(|late| cell.undo(late));
        assert!(cell.late_store().is_none());
    });
}

#[test]
fn closing_is_not_slept_through() {
    check(2, || {
        let cell = Arc::new(Cell::new());
        cell.announce(1);
        let waiter = {
            let cell = cell.clone();
            thread::spawn(move || assert_eq!(decided(&cell, 2), Progress::Ended(TimelineEnding::Closed)))
        };
        assert_eq!(cell.begin_close(), 1);
        waiter.join().unwrap();
        cell.store_as_a_stream(1);
        assert_eq!((cell.end(TimelineEnding::Closed).last, cell.progress(1)), (1, Progress::Reached));
    });
}
