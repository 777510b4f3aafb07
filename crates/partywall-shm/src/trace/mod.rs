//! Traces: what members publish, receive and release, which tasks they submit, claim and complete, and what they signal
//! and wait for, while an observer asks.
//!
//! Each user's members have traces of their own, which follow their [rows](crate::members).
//!
//! | offset | part | bytes | written by |
//! |---|---|---|---|
//! | 0 | `until: u64` until when members record ([`now_ns`](crate::members::now_ns)), 0: they do not | 8 | tracers; members, see below |
//! | 64 | rings: [`RINGS`], each shared by the members whose row has this remainder | 262,208 each | members |
//!
//! A ring is a counter, `next`, in a cache line of its own, and [`EVENTS`] entries of 64 bytes:
//!
//! | offset | word | |
//! |---|---|---|
//! | 0 | `state` | twice the number of the event in the entry, plus 1 while it is written; numbers begin at 1 |
//! | 8 | `at` | the time of the event, in nanoseconds |
//! | 16 | `since` | when it began |
//! | 24 | `who` | the process in the upper half, the thread in the lower one |
//! | 32 | `what` | the code of an [`Action`] in the lowest byte, the number of a task's attempt in the next one |
//! | 40 | `object` | the [number](object) of the topic, queue or timeline |
//! | 48 | `value` | the sample's position, the task's [number](TaskId::number) or the timeline's value |
//!
//! **Switching on.** A tracer renews `until`, a little ahead of now ([`LEASE`]). Members read the word before each
//! event. The member that first finds the lease expired clears the word. A tracer that is killed therefore costs
//! members a read of the clock for each event until its lease has expired, and one load of a shared word afterwards.
//! Several tracers may run at a time: each has its own position in the rings.
//!
//! **Recording.**
//! 1. A member counts `next` up, which gives it a number, and with it an entry.
//! 2. It marks the entry as being written, by a compare-and-swap. If another thread is writing the entry, or a later
//!    event is there, the event is lost.
//! 3. Behind a fence it writes the words, and then stores the state without the mark.
//!
//! If the member is killed or stopped after step 1, this event is lost. After step 2, the entry stays marked and all its
//! later events are lost, one in [`EVENTS`] of the ring, until the broker ends. A reader uses the words of an entry only
//! if the state is the event's number, without the mark, before and after it has read them. So no event is torn.
//!
//! **Reading.** A tracer follows `next`. It counts an event as lost if the entry holds a later one, and if the entry is
//! not written by its next reading, unless that follows at once. No contents of the memory are trusted: reading
//! terminates, and unknown codes count as lost.

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::{
    crash::point,
    sync::{AtomicU64, Ordering, SharedArray, fence},
    task::TaskId,
};

/// Number of rings.
pub const RINGS: usize = 64;

/// Events of a ring.
pub const EVENTS: usize = if cfg!(loom) { 1 } else { 1 << 12 };

/// How long members record after a tracer has asked, in nanoseconds.
pub const LEASE: u64 = 2_000_000_000;

/// The mapped traces of one user's members.
#[derive(Debug)]
#[cfg_attr(not(loom), derive(Clone))]
pub struct Traces {
    pub(crate) header: SharedArray<TraceHeader>,
    pub(crate) rings: SharedArray<Ring>,
}

/// What a process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// It published a sample.
    Publish,
    /// It received a sample.
    Receive,
    /// It released a sample.
    Release,
    /// It signalled a value of a timeline.
    Signal,
    /// It enqueued the signal of a value on a stream.
    SignalOn,
    /// It waited for a value of a timeline.
    Wait,
    /// It enqueued a wait for a value on a stream.
    WaitOn,
    /// It submitted a task.
    Submit,
    /// It claimed a task.
    Claim,
    /// It completed a task.
    Complete,
    /// It enqueued the completion of a task on a stream.
    CompleteOn,
    /// It failed a task, or gave it back.
    Fail,
    /// It took the result of a task.
    Take,
}

/// What a process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// When it began: `CLOCK_MONOTONIC` in nanoseconds, as the host has it.
    pub since: u64,
    /// When it was over. The same as `since` for an event of one moment.
    pub at: u64,
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// What the process did.
    pub action: Action,
    /// The number of the topic, queue or timeline, by which a tracer knows its name.
    pub object: u64,
    /// The position of the sample, the value of the timeline, or the number of the task.
    pub value: u64,
    /// The number of the attempt of a task, from 1; 0 for a task that was submitted, and for anything else.
    pub attempt: u8,
}

impl TraceEvent {
    /// Returns the task's place in its queue and its generation, as in its text. Returns `None` for a sample and for a
    /// value of a timeline.
    pub fn task(&self) -> Option<(u32, u64)> {
        use Action::{Claim, Complete, CompleteOn, Fail, Submit, Take};
        let TaskId { index, generation } = TaskId::of_number(self.value);
        matches!(self.action, Submit | Claim | Complete | CompleteOn | Fail | Take).then_some((index, generation))
    }
}

/// The position of a tracer in all rings.
#[derive(Debug)]
pub struct Reader {
    positions: Vec<RingCursor>,
    lost: u64,
}

/// The position in a ring.
#[derive(Debug, Default)]
struct RingCursor {
    /// How many events have been read or lost.
    read: u64,
    /// True if the next event was not written at the reading before.
    is_late: bool,
}

/// What comes before the rings.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct TraceHeader {
    until: AtomicU64,
    zero: [AtomicU64; 7],
}

/// A counter, and the entries that it leads to.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Ring {
    next: AtomicU64,
    zero: [AtomicU64; 7],
    entries: [TraceEntry; EVENTS],
}

#[derive(Debug)]
#[repr(C, align(64))]
struct TraceEntry {
    state: AtomicU64,
    at: AtomicU64,
    since: AtomicU64,
    who: AtomicU64,
    what: AtomicU64,
    object: AtomicU64,
    value: AtomicU64,
    zero: AtomicU64,
}

shared!(TraceHeader { until, zero } bits { RINGS });
shared!(Ring { next, zero, entries });
shared!(TraceEntry { state, at, since, who, what, object, value, zero } bits { WRITING, PID, ATTEMPT, ACTIONS });

/// The state of an entry in which an event is being written.
const WRITING: u64 = 1;
/// The first bit of the process, beside its thread.
const PID: u32 = 32;
/// The first bit of the attempt, beside the action.
const ATTEMPT: u32 = 8;
/// A hash of the names of all actions, in the order of their codes.
#[cfg(not(loom))]
const ACTIONS: u64 = {
    let mut hash = crate::layout::Hash::new();
    let mut code = 0;
    while code < Action::ALL.len() {
        hash = hash.text(Action::ALL[code].name());
        code += 1;
    }
    hash.end()
};

/// Operations of members.
impl Traces {
    /// Returns whether members are to record events.
    #[inline]
    pub fn are_on(&self) -> bool {
        self.header[0].until.load(Ordering::Relaxed) != 0
    }

    /// Records an event of the member of `row`, if a tracer still asks for events at that time.
    pub fn record(&self, row: u16, event: &TraceEvent) {
        let until = &self.header[0].until;
        let seen = until.load(Ordering::Relaxed);
        // A tracer asks for no longer than its lease.
        if !(event.at..=event.at.saturating_add(LEASE)).contains(&seen) {
            if seen != 0 {
                // Fails if a tracer has just asked again.
                let _ = until.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            return;
        }
        let ring = &self.rings[usize::from(row) % RINGS];
        let number = ring.next.fetch_add(1, Ordering::Relaxed);
        point("trace: number taken, entry not");
        ring.entries[number as usize % EVENTS].write(number, event);
    }
}

/// Operations of tracers.
impl Traces {
    /// Makes members record for [`LEASE`] from `now` ([`now_ns`](crate::members::now_ns)).
    pub fn renew(&self, now: u64) {
        self.header[0].until.store(now.saturating_add(LEASE), Ordering::Relaxed);
    }

    /// Makes members stop recording. Another tracer renews its lease afterwards.
    pub fn stop(&self) {
        self.header[0].until.store(0, Ordering::Relaxed);
    }

    /// Returns a reader of the events from now on.
    pub fn reader(&self) -> Reader {
        let position = |ring: &Ring| RingCursor { read: ring.next.load(Ordering::Acquire), is_late: false };
        Reader { positions: self.rings.iter().map(position).collect(), lost: 0 }
    }
}

impl Reader {
    /// Passes all new events to `take`: those of one ring in the order of their numbers.
    pub fn read(&mut self, traces: &Traces, mut take: impl FnMut(TraceEvent)) {
        for (position, ring) in self.positions.iter_mut().zip(traces.rings.iter()) {
            self.lost = self.lost.saturating_add(position.read(ring, &mut take));
        }
    }

    /// Returns how many events were lost: overwritten before they were read, or never written.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl RingCursor {
    /// Returns the number of events that were lost.
    fn read(&mut self, ring: &Ring, take: &mut impl FnMut(TraceEvent)) -> u64 {
        let next = ring.next.load(Ordering::Acquire);
        let Some(new) = next.checked_sub(self.read) else {
            // Only a process that breaks the rules counts down.
            self.read = next;
            return 0;
        };
        let mut lost = new.saturating_sub(EVENTS as u64);
        self.read += lost;
        while self.read < next {
            match ring.entries[self.read as usize % EVENTS].read(self.read) {
                Content::Event(event) => take(event),
                Content::Lost => lost += 1,
                Content::Unwritten if self.is_late => lost += 1,
                Content::Unwritten => {
                    self.is_late = true;
                    return lost;
                }
            }
            self.read += 1;
            self.is_late = false;
        }
        lost
    }
}

/// What an entry holds of an event.
#[derive(Debug, PartialEq, Eq)]
enum Content {
    Event(TraceEvent),
    /// Not yet, or never.
    Unwritten,
    /// A later event, or none that is known.
    Lost,
}

impl TraceEntry {
    fn write(&self, number: u64, event: &TraceEvent) {
        let written = state_of(number);
        let seen = self.state.load(Ordering::Relaxed);
        let is_free = seen & WRITING == 0 && seen < written;
        // Acquire: our words are written after those of the event before.
        if !is_free
            || self.state.compare_exchange(seen, written | WRITING, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        // Pairs with the fence in `read`: a reader that sees one of our words sees the mark, or a later state.
        fence(Ordering::Release);
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        set(&self.at, event.at);
        set(&self.since, event.since);
        set(&self.who, u64::from(event.pid) << PID | u64::from(event.tid));
        point("trace: entry half written");
        set(&self.what, event.action.code() | u64::from(event.attempt) << ATTEMPT);
        set(&self.object, event.object);
        set(&self.value, event.value);
        // Pairs with the first load in `read`.
        self.state.store(written, Ordering::Release);
    }

    fn read(&self, number: u64) -> Content {
        let written = state_of(number);
        let seen = self.state.load(Ordering::Acquire);
        if seen & !WRITING > written {
            return Content::Lost;
        }
        if seen != written {
            return Content::Unwritten;
        }
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let who = get(&self.who);
        let what = get(&self.what);
        let action = Action::of(what & 0xFF).filter(|_| what >> 16 == 0);
        let at = get(&self.at);
        let event = |action| TraceEvent {
            at,
            since: get(&self.since).min(at),
            pid: (who >> PID) as u32,
            tid: who as u32,
            action,
            object: get(&self.object),
            value: get(&self.value),
            attempt: (what >> ATTEMPT) as u8,
        };
        let event = action.map(event);
        // Pairs with the fence in `write`.
        fence(Ordering::Acquire);
        if get(&self.state) == written { event.map_or(Content::Lost, Content::Event) } else { Content::Lost }
    }
}

/// Returns the state of the entry that holds the event of this number, counted from 0.
fn state_of(number: u64) -> u64 {
    number.wrapping_add(1) << 1
}

impl Action {
    /// All actions, in the order of their codes.
    pub const ALL: [Self; 13] = [
        Self::Publish,
        Self::Receive,
        Self::Release,
        Self::Signal,
        Self::SignalOn,
        Self::Wait,
        Self::WaitOn,
        Self::Submit,
        Self::Claim,
        Self::Complete,
        Self::CompleteOn,
        Self::Fail,
        Self::Take,
    ];

    /// Returns its name in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Receive => "receive",
            Self::Release => "release",
            Self::Signal => "signal",
            Self::SignalOn => "signal_on",
            Self::Wait => "wait",
            Self::WaitOn => "wait_on",
            Self::Submit => "submit",
            Self::Claim => "claim",
            Self::Complete => "complete",
            Self::CompleteOn => "complete_on",
            Self::Fail => "fail",
            Self::Take => "take",
        }
    }

    fn code(self) -> u64 {
        self as u64
    }

    fn of(code: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// Returns the number of a topic or queue, of one version, or of a timeline, of version 0. Two objects could have one
/// number by chance, in about one of 2³² traces of a domain with 65,536 objects.
pub fn object(name: &str, version: u64) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    name.bytes().chain(version.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, hash)
}
