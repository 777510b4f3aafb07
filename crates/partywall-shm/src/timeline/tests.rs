#![allow(clippy::unwrap_used, reason = "what is said of tests holds for their helpers")]

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use proptest::prelude::*;

use super::*;

fn slab() -> Slab {
    Slab::map(Slab::create().unwrap()).unwrap()
}

/// A word of the cells, `offset` bytes behind the beginning of the first.
fn word(slab: &Slab, offset: usize) -> &AtomicU64 {
    &slab.memory().atomics(cell_offset(0) + offset, 1).unwrap()[0]
}

#[test]
fn values_only_grow_and_end() {
    let slab = slab();
    let cell = slab.cell(CELLS - 1).unwrap();
    assert!(slab.cell(CELLS).is_none());
    cell.start(7, 3);
    assert_eq!((cell.value(), cell.announced(), cell.incarnation()), (7, 7, 3));
    assert_eq!(cell.signal(7), Err(Refused::NotLarger(7)));
    assert_eq!(cell.signal(0), Err(Refused::OutOfRange));
    assert_eq!(cell.signal(MAX_VALUE + 1), Err(Refused::OutOfRange));
    cell.signal(9).unwrap();
    assert_eq!((cell.value(), cell.announced()), (9, 9));
    assert_eq!(cell.progress(9), Progress::Reached);
    assert_eq!(cell.progress(10), Progress::Pending);
    assert_eq!(cell.late_store(), None);
    assert_eq!(cell.end(TimelineEnding::OwnerDied), Ended { ending: TimelineEnding::OwnerDied, last: 9 });
    assert_eq!(cell.end(TimelineEnding::Abandoned), Ended { ending: TimelineEnding::OwnerDied, last: 9 });
    assert_eq!(cell.progress(9), Progress::Reached);
    assert_eq!(cell.progress(10), Progress::Ended(TimelineEnding::OwnerDied));
    assert_eq!(cell.signal(10), Err(Refused::Ended(TimelineEnding::OwnerDied)));
    let next = slab.cell(0).unwrap();
    next.start(cell.value(), cell.incarnation() + 1);
    next.signal(MAX_VALUE).unwrap();
    assert_eq!(next.check_next(MAX_VALUE), Err(Refused::NotLarger(MAX_VALUE)));
    assert_eq!(next.end(TimelineEnding::Evicted).last, MAX_VALUE);
}

#[test]
fn stream_owes_its_announced_value() {
    let slab = slab();
    let cell = slab.cell(1).unwrap();
    let value = word(&slab, CELL_BYTES);
    cell.check_next(5).unwrap();
    cell.announce(5);
    assert_eq!((cell.value(), cell.announced(), cell.progress(5)), (0, 5, Progress::Announced));
    assert_eq!(cell.check_next(5), Err(Refused::NotLarger(5)));
    cell.check_next(6).unwrap();
    assert_eq!(cell.signal(6), Err(Refused::Owed(5)));
    value.store(5, Ordering::Relaxed);
    cell.signal(6).unwrap();
    cell.announce(8);
    assert_eq!(cell.begin_close(), 8);
    assert_eq!(cell.check_next(9), Err(Refused::Closing));
    assert_eq!(cell.progress(9), Progress::Ended(TimelineEnding::Closed));
    assert_eq!(cell.progress(8), Progress::Announced);
    value.store(8, Ordering::Relaxed);
    assert_eq!(cell.end(TimelineEnding::Closed).last, 8);
}

#[test]
fn late_store_is_ignored() {
    let slab = slab();
    let cell = slab.cell(0).unwrap();
    let value = word(&slab, 0);
    cell.signal(3).unwrap();
    cell.announce(4);
    assert_eq!(cell.end(TimelineEnding::Evicted).last, 3);
    let poison = value.load(Ordering::Relaxed);
    value.store(4, Ordering::Relaxed);
    assert_eq!((cell.value(), cell.progress(4)), (3, Progress::Ended(TimelineEnding::Evicted)));
    let first = cell.late_store().unwrap();
    assert_eq!(first.value(), 4);
    value.store(5, Ordering::Relaxed);
    cell.undo(first);
    let second = cell.late_store().unwrap();
    assert_eq!(second.value(), 5, "it is not lost with the first");
    cell.undo(second);
    assert_eq!(cell.late_store(), None);
    assert_eq!(value.load(Ordering::Relaxed), poison);
}

#[test]
fn observer_completes_an_incomplete_end() {
    let slab = slab();
    let cell = slab.cell(0).unwrap();
    cell.signal(3).unwrap();
    let ending = &slab.memory().atomics::<AtomicU32>(cell_offset(0) + 24, 1).unwrap()[0];
    ending.store(TimelineEnding::BrokerGone as u32, Ordering::Relaxed);
    assert_eq!(cell.progress(4), Progress::Ended(TimelineEnding::BrokerGone));
    assert_eq!(value::read(word(&slab, 0).load(Ordering::Relaxed)), value::Reading::Poisoned(3));
    assert_eq!(word(&slab, 48).load(Ordering::Relaxed), 4);
    // The same, one step later.
    cell.start(3, 0);
    ending.store(TimelineEnding::BrokerGone as u32, Ordering::Relaxed);
    word(&slab, 0).store(value::poison(3), Ordering::Relaxed);
    assert_eq!((cell.value(), cell.progress(3)), (3, Progress::Reached));
}

#[test]
fn first_taint_stays() {
    let slab = slab();
    let cell = slab.cell(0).unwrap();
    assert_eq!(cell.tainted(), None);
    for v in [9, 5, 7] {
        cell.taint(v);
    }
    assert_eq!(cell.tainted(), Some(5));
}

#[test]
fn a_sleeper_of_another_mapping_is_woken() {
    let fd = Slab::create().unwrap();
    let ours = Slab::map(&fd).unwrap();
    let theirs = Slab::map(&fd).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cell = theirs.cell(5).unwrap();
            loop {
                let key = cell.prepare();
                if cell.progress(2000) == Progress::Reached {
                    return;
                }
                cell.sleep(key, Duration::MAX);
            }
        });
        for v in 1..=2000 {
            ours.cell(5).unwrap().signal(v).unwrap();
        }
    });
}

#[test]
fn cells_are_where_a_driver_is_told_and_fill_64_kib() {
    let slab = slab();
    let start = slab.memory().as_ptr() as usize;
    for index in [0, 1, CELLS - 1] {
        assert_eq!(std::ptr::from_ref(slab.cell(index).unwrap()) as usize - start, cell_offset(index));
    }
    assert!(slab.cell(CELLS).is_none());
    assert_eq!((slab.memory().len(), cell_offset(CELLS)), (64 << 10, 64 << 10));
}

proptest! {
    /// A broken or hostile member may leave any bytes: every call terminates without a panic, and the timeline has one
    /// end.
    #[test]
    fn any_bytes_can_be_read_and_ended(words in prop::array::uniform8(any::<u64>()), v in 0..=u64::MAX) {
        let slab = slab();
        let cell = slab.cell(0).unwrap();
        for (index, bits) in words.into_iter().enumerate() {
            word(&slab, index * 8).store(bits, Ordering::Relaxed);
        }
        cell.progress(v);
        let _ = (cell.signal(v), cell.check_next(v), cell.closing(), cell.tainted(), cell.late_store());
        let ended = cell.end(TimelineEnding::OwnerFaulted);
        prop_assert!(ended.last <= MAX_VALUE);
        prop_assert_eq!((cell.value(), cell.ending()), (ended.last, Some(ended.ending)));
        if let Some(late) = cell.late_store() {
            prop_assert!(late.value() <= MAX_VALUE);
            cell.undo(late);
        }
        prop_assert_eq!(cell.late_store(), None);
        cell.start(ended.last, 1);
        prop_assert_eq!((cell.value(), cell.announced(), cell.ending()), (ended.last, ended.last, None));
    }
}
