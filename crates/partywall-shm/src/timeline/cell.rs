//! One incarnation of a timeline, in one cache line.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | `value: u64` | the writer's host, or one of its streams; a process that completes an end, once; the broker, again |
//! | 8 | `announced: u64` the highest value promised | the writer's host |
//! | 16 | `events: EventCount` (8 bytes, see [`eventcount`](crate::eventcount)) what sleepers wait for has changed | all |
//! | 24 | `ending: u32` why no further value comes, 0 while one may | once, from 0: the writer (`Closed`), the broker; any process (`BrokerGone`) |
//! | 28 | `incarnation: u32` | the broker, before it hands the cell out |
//! | 32 | `closing: u64` the last value that will come, + 1; 0 if that is not said | the writer's host |
//! | 40 | `tainted: u64` the first value that rests on a failed input, + 1; 0 if none does | the writer's host |
//! | 48 | `last: u64` the last value that counts, + 1; 0 before the end is complete | once, from 0, by a process that completes the end |
//! | 56 | eight zero bytes | |
//!
//! Rules:
//! 1. `value` only grows. The writer's host changes it by compare-and-swap, so that it never overwrites poison. A GPU's
//!    store may overwrite poison.
//! 2. A timeline ends in three steps, each a compare-and-swap: `ending` from 0, `value` to poison, `last` from 0. A
//!    process that finds an incomplete end completes it ([`Cell::settle`]). The value that counts is the one that was
//!    poisoned.
//! 3. Once `ending` is set, `last` alone says what has been reached. A later store of the GPU, from a writer that was
//!    not dead, that replaces the poison changes nothing for hosts; the broker repairs the poison for streams
//!    ([`Cell::undo`]) as long as such a store is possible.
//! 4. `value` is loaded before `ending`. In the other order, a late store as in rule 3 could count: `ending` is loaded
//!    as 0, then the timeline ends and the late store happens, then the late value is loaded.
//! 5. Every change that a sleeper may wait for is followed by a notification of `events`.
//! 6. No process sleeps on `value`: a stream wakes no process, and a growth by 2³² would not change the half that a
//!    futex compares.
//!
//! If the writer is killed or stopped between any two steps:
//! * between `value` and `announced` of a host's signal: readers take the larger of the two for both;
//! * between ordering the stream to signal and `announced`: the value comes unannounced, or not at all;
//! * before or within a notification: sleepers check again after [`MAX_SLEEP`](crate::MAX_SLEEP);
//! * between any two steps of an end: the next process that reads the cell completes the end.

use std::time::Duration;

use partywall_wire::TimelineEnding;

use super::value::{MAX_VALUE, Reading, poison, read};
use crate::{
    EventKey,
    crash::point,
    eventcount::EventCount,
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// See the head of this file.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Cell {
    value: AtomicU64,
    announced: AtomicU64,
    events: EventCount,
    ending: AtomicU32,
    incarnation: AtomicU32,
    closing: AtomicU64,
    tainted: AtomicU64,
    last: AtomicU64,
    _zero: AtomicU64,
}

#[cfg(all(test, loom))]
impl Cell {
    /// Creates a cell with value 0, for a model.
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            value: zero(),
            announced: zero(),
            events: EventCount::new(),
            ending: AtomicU32::new(0),
            incarnation: AtomicU32::new(0),
            closing: zero(),
            tainted: zero(),
            last: zero(),
            _zero: zero(),
        }
    }

    /// Stores a value as a stream does, whatever the word contains.
    pub(super) fn store_as_a_stream(&self, v: u64) {
        // Not a relaxed store, because on the supported processors no process sees the store without the stores before
        // it.
        self.value.swap(v, Ordering::AcqRel);
    }
}

shared! {
    Cell { value, announced, events, ending, incarnation, closing, tainted, last, _zero }
    bits {
        MAX_VALUE, poison(0), super::CELLS,
        TimelineEnding::OwnerDied as u64, TimelineEnding::OwnerFaulted as u64, TimelineEnding::Closed as u64,
        TimelineEnding::Abandoned as u64, TimelineEnding::BrokerGone as u64, TimelineEnding::Evicted as u64,
    }
}

/// The progress of a timeline towards a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The value has not been promised.
    Pending,
    /// The value has been promised, and comes unless the writer dies.
    Announced,
    /// The value has been signalled. Final.
    Reached,
    /// The value will never be reached. Final.
    Ended(TimelineEnding),
}

/// Why a value is not a valid next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The value is 0, or larger than [`MAX_VALUE`].
    OutOfRange,
    /// This value, which is not smaller than the given one, has been signalled or promised.
    NotLarger(u64),
    /// A stream has yet to store this value, and would overwrite the host's signal.
    Owed(u64),
    /// The writer has said that no further value comes.
    Closing,
    /// The timeline has ended.
    Ended(TimelineEnding),
}

/// A store to a timeline after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateStore {
    word: u64,
}

impl LateStore {
    /// Returns the value that was stored.
    pub fn value(self) -> u64 {
        live(self.word)
    }
}

/// The outcome of [`Cell::end`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Why the timeline ended. Not the given reason, if another process was first.
    pub ending: TimelineEnding,
    /// The last value that counts: where the next incarnation starts.
    pub last: u64,
}

/// Operations of the broker.
impl Cell {
    /// Begins a new incarnation at the value `from`.
    ///
    /// No other process may use the cell: neither its former members nor their streams.
    pub fn start(&self, from: u64, incarnation: u32) {
        let from = from.min(MAX_VALUE);
        // `events` keeps its value. The message that hands the cell out orders these stores.
        self.value.store(from, Ordering::Relaxed);
        self.announced.store(from, Ordering::Relaxed);
        for word in [&self.closing, &self.tainted, &self.last] {
            word.store(0, Ordering::Relaxed);
        }
        self.incarnation.store(incarnation, Ordering::Relaxed);
        self.ending.store(0, Ordering::Release);
    }

    /// Ends the timeline, unless it has ended, and wakes all waiters. Waiting streams continue.
    pub fn end(&self, ending: TimelineEnding) -> Ended {
        // Pairs with the load in `ending`: a process that sees the end sees what was done before it.
        let first = self.ending.compare_exchange(0, ending as u32, Ordering::AcqRel, Ordering::Acquire);
        point("timeline: ending stored, value not poisoned");
        let last = self.settle();
        point("timeline: ended, nobody notified");
        self.events.notify();
        let ending = first.err().and_then(ending_of).unwrap_or(ending);
        Ended { ending, last }
    }

    /// Returns a late store that has replaced the poison of an ended timeline. Call this from time to time while the
    /// writer of an ended cell may still write; note the value, and [`undo`](Self::undo) the store.
    pub fn late_store(&self) -> Option<LateStore> {
        self.ending()?;
        let poison = poison(self.settle());
        // Pairs with the store: a process that learns of the value sees what was done before it.
        let word = self.value.load(Ordering::Acquire);
        (word != poison).then_some(LateStore { word })
    }

    /// Poisons an ended timeline again, unless another late store has replaced this one.
    pub fn undo(&self, late: LateStore) {
        // Hosts no longer read the value.
        let _ = self.value.compare_exchange(late.word, poison(self.settle()), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Operations of the writer's host.
impl Cell {
    /// Signals `v`.
    ///
    /// # Errors
    /// See [`Refused`]. A refused value changes nothing.
    pub fn signal(&self, v: u64) -> Result<(), Refused> {
        loop {
            // Acquire, so that a process that sees the new value also sees what was done before the former one.
            let word = self.value.load(Ordering::Acquire);
            self.check_next(v)?;
            let announced = self.announced.load(Ordering::Relaxed);
            match read(word) {
                Reading::Live(value) if value < announced => return Err(Refused::Owed(announced)),
                Reading::Live(_) => {}
                Reading::Poisoned(_) | Reading::Invalid => return Err(Refused::Ended(self.verdict())),
            }
            // Pairs with the loads in `progress` and `value`.
            if self.value.compare_exchange(word, v, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                point("timeline: value stored, not announced");
                self.announced.store(v, Ordering::Release);
                point("timeline: signalled, nobody notified");
                self.events.notify();
                return Ok(());
            }
            // The timeline was ended meanwhile, or a stream stored a value.
        }
    }

    /// Checks that `v` is a valid next value. Call this before ordering a stream to store it.
    ///
    /// # Errors
    /// See [`Refused`], without [`Refused::Owed`]: a stream may promise further values.
    pub fn check_next(&self, v: u64) -> Result<(), Refused> {
        if v == 0 || v > MAX_VALUE {
            return Err(Refused::OutOfRange);
        }
        if let Some(ending) = self.ending() {
            return Err(Refused::Ended(ending));
        }
        if self.closing().is_some() {
            return Err(Refused::Closing);
        }
        match self.announced() {
            largest if v <= largest => Err(Refused::NotLarger(largest)),
            _ => Ok(()),
        }
    }

    /// Promises `v`, once a stream has been ordered to store it, and wakes waiters for the promise.
    pub fn announce(&self, v: u64) {
        // Pairs with the load in `progress`: a process that sees the promise sees what the host did before it.
        self.announced.store(v, Ordering::Release);
        point("timeline: announced, nobody notified");
        self.events.notify();
    }

    /// Records that no value follows the promised ones, and returns the last promised value. Waiters for later values
    /// get [`TimelineEnding::Closed`] immediately. Once the last value is stored, call [`Cell::end`].
    pub fn begin_close(&self) -> u64 {
        let last = self.announced();
        // Pairs with the load in `closing`.
        self.closing.store(last + 1, Ordering::Release);
        point("timeline: closing stored, nobody notified");
        self.events.notify();
        last
    }

    /// Records that the values from `v` on rest on a failed input.
    pub fn taint(&self, v: u64) {
        let word = v.min(MAX_VALUE) + 1;
        let smaller = |tainted| (tainted == 0 || word < tainted).then_some(word);
        // Pairs with the load in `tainted`.
        if self.tainted.fetch_update(Ordering::AcqRel, Ordering::Acquire, smaller).is_ok() {
            self.events.notify();
        }
    }
}

/// Operations of every process.
impl Cell {
    /// Returns the last value that was really signalled.
    pub fn value(&self) -> u64 {
        let word = self.value.load(Ordering::Acquire);
        match self.ending() {
            Some(_) => self.settle(),
            None => live(word),
        }
    }

    /// Returns the highest promised value, which is not smaller than the signalled one.
    pub fn announced(&self) -> u64 {
        self.announced.load(Ordering::Acquire).min(MAX_VALUE).max(self.value())
    }

    /// Returns why no further value comes, or `None` while one may.
    pub fn ending(&self) -> Option<TimelineEnding> {
        ending_of(self.ending.load(Ordering::Acquire))
    }

    /// Returns the last value that will come, if the writer is closing.
    pub fn closing(&self) -> Option<u64> {
        stored(self.closing.load(Ordering::Acquire))
    }

    /// Returns the first value that rests on a failed input.
    pub fn tainted(&self) -> Option<u64> {
        stored(self.tainted.load(Ordering::Acquire))
    }

    /// Returns the incarnation of the timeline.
    pub fn incarnation(&self) -> u32 {
        self.incarnation.load(Ordering::Relaxed)
    }

    /// Returns the progress towards `v`.
    pub fn progress(&self, v: u64) -> Progress {
        // Before `ending`: rule 4.
        let word = self.value.load(Ordering::Acquire);
        if let Some(ending) = self.ending() {
            return if v <= self.settle() { Progress::Reached } else { Progress::Ended(ending) };
        }
        match read(word) {
            Reading::Live(value) if v <= value => Progress::Reached,
            // Poison without an end: the writer's own store, against the rules.
            Reading::Poisoned(_) | Reading::Invalid => Progress::Ended(TimelineEnding::OwnerFaulted),
            Reading::Live(_) if self.closing().is_some_and(|last| v > last) => Progress::Ended(TimelineEnding::Closed),
            Reading::Live(_) if v <= self.announced.load(Ordering::Acquire) => Progress::Announced,
            Reading::Live(_) => Progress::Pending,
        }
    }

    /// Announces that the caller may sleep. The caller must check its condition afterwards.
    pub fn prepare(&self) -> EventKey {
        self.events.prepare()
    }

    /// Sleeps until, after `key`, a value is promised, signalled by a host or tainted, or the timeline is closed or
    /// ends; for at most `limit` and [`MAX_SLEEP`](crate::MAX_SLEEP). May return early.
    ///
    /// A stream's store ends no sleep.
    pub fn sleep(&self, key: EventKey, limit: Duration) {
        self.events.sleep(key, limit);
    }

    /// Wakes all sleepers to check their conditions again.
    pub fn notify(&self) {
        self.events.notify();
    }
}

impl Cell {
    /// Completes an end that has begun, and returns the last value that counts. `ending` must not be 0.
    fn settle(&self) -> u64 {
        let mut attempts = 0;
        loop {
            if let Some(last) = stored(self.last.load(Ordering::Acquire)) {
                return last;
            }
            let word = self.value.load(Ordering::Acquire);
            let last = match read(word) {
                Reading::Poisoned(last) => last,
                Reading::Live(_) | Reading::Invalid => {
                    let last = live(word);
                    let poisoned = self.value.compare_exchange(word, poison(last), Ordering::AcqRel, Ordering::Relaxed);
                    attempts += 1;
                    if poisoned.is_err() && attempts < MOST_ATTEMPTS {
                        continue;
                    }
                    last
                }
            };
            point("timeline: value poisoned, last not stored");
            // Pairs with the load above. Because of a late store, another process may have found an earlier value. The
            // first value stored in `last` counts for all.
            let first = self.last.compare_exchange(0, last + 1, Ordering::AcqRel, Ordering::Acquire);
            return first.err().and_then(stored).unwrap_or(last);
        }
    }

    fn verdict(&self) -> TimelineEnding {
        self.ending().unwrap_or(TimelineEnding::OwnerFaulted)
    }
}

/// Returns the ending with this number; `None` for 0, while the timeline has not ended.
pub(crate) fn ending_of(code: u32) -> Option<TimelineEnding> {
    Some(match code {
        0 => return None,
        1 => TimelineEnding::OwnerDied,
        3 => TimelineEnding::Closed,
        4 => TimelineEnding::Abandoned,
        5 => TimelineEnding::BrokerGone,
        6 => TimelineEnding::Evicted,
        // 2, or a number that a process that breaks the rules has written.
        _ => TimelineEnding::OwnerFaulted,
    })
}

/// Maximum number of attempts to poison a value. A writer that is faster for so long breaks the rules. The broker then
/// continues, and `undo` stores the poison.
const MOST_ATTEMPTS: u32 = 1000;

/// Returns the value of a word without poison, or 0 for an invalid word.
fn live(word: u64) -> u64 {
    match read(word) {
        Reading::Live(value) => value,
        Reading::Poisoned(_) | Reading::Invalid => 0,
    }
}

/// Decodes a value that is stored with 1 added to it.
fn stored(word: u64) -> Option<u64> {
    word.checked_sub(1).map(|value| value.min(MAX_VALUE))
}
