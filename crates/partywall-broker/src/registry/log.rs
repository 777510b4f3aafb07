//! Events of names, for watchers.
//!
//! All events are numbered and kept in one log that is bounded in bytes, so a watcher costs no more than its waiting
//! request, however slow it is. A watcher asks for the events since its point, and waits if there are none; a renewed
//! connection continues where it was. A waiting watcher misses no event, even if other names fill the log: it gets a
//! later point to continue from. A watcher that asks late learns how many events it has missed.
//!
//! `Reclaimed` is reported once the closing thread has closed the descriptors, because only then is the memory free.
//! Its bytes are those that the broker held.

use std::collections::{BTreeMap, VecDeque};

use partywall_wire::{Happened, NameEvent, Pattern, Point};
use serde::{Deserialize, Serialize};

use super::{
    coding,
    pages::page,
    people::Owned,
    types::{Change, Gap, MemberId, Millis, Name, Named, RequestId, WaitId},
};

/// The most recent events.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Log {
    /// The number of the broker, which points carry.
    instance: u64,
    kept: VecDeque<Happening>,
    bytes: u64,
    /// The most bytes that are kept.
    bound: u64,
    /// The number of the last event. Events count from 1 without gaps.
    last: u64,
    /// The event up to which all watchers have been notified.
    notified: u64,
    watchers: BTreeMap<WaitId, Watcher>,
}

/// An event of a name, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Happening {
    pub(super) sequence: u64,
    pub(super) at: Millis,
    pub(super) named: Named,
    pub(super) name: Name,
    pub(super) change: Change,
    /// The user to which the name belongs.
    pub(super) uid: u32,
    /// True if other users see the event.
    pub(super) shared: bool,
}

impl Happening {
    /// Returns the event as watchers get it.
    pub(super) fn event(&self) -> NameEvent {
        let Self { sequence, at, named, change, .. } = *self;
        NameEvent { sequence, at, named, name: self.name.to_string(), change }
    }

    /// Returns the bytes that the event counts for in the log's bound.
    pub(super) fn cost(&self) -> u64 {
        (size_of::<Self>() + self.name.len()) as u64
    }
}

/// A request that waits for events.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Watcher {
    pub(super) member: MemberId,
    pub(super) ticket: RequestId,
    #[serde(with = "coding::pattern")]
    pattern: Pattern,
    /// The point that it sent, and from which it would ask again.
    asked: u64,
}

impl Log {
    pub(super) fn new(instance: u64, bound: u64) -> Self {
        Self { instance, bound, ..Self::default() }
    }

    /// Returns the number of the broker.
    pub(super) fn instance(&self) -> u64 {
        self.instance
    }

    /// Adds an event.
    pub(super) fn put(&mut self, named: Named, name: &Name, owned: Owned, change: Change, at: Millis) {
        self.last += 1;
        let Owned { uid, shared } = owned;
        let event = Happening { sequence: self.last, at, named, name: name.clone(), change, uid, shared };
        self.bytes += event.cost();
        self.kept.push_back(event);
        while self.bytes > self.bound
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.cost();
        }
    }

    /// Returns the events since a point, of names that the watcher sees; `None` if the watcher has to wait for the next
    /// ones. Without a point, returns the present one.
    pub(super) fn since(
        &self,
        after: Option<Point>,
        pattern: &Pattern,
        sees: impl Fn(Owned) -> bool,
    ) -> Option<Happened> {
        let begin = self.begin();
        let (after, gap) = match after {
            None => return Some(Happened { gap: None, events: Vec::new(), next: self.point(self.last) }),
            Some(Point { instance, sequence: after }) if instance == self.instance && after <= self.last => {
                (after.max(begin), (after < begin).then(|| Gap::Behind { events: begin - after }))
            }
            Some(_) => (begin, Some(Gap::OtherBroker)),
        };
        let (events, next) = self.page(after, pattern, sees);
        (gap.is_some() || !events.is_empty()).then(|| Happened { gap, events, next: self.point(next) })
    }

    /// Adds a watcher, which has had all events since `asked` that it sees.
    pub(super) fn watch(&mut self, id: WaitId, by: (MemberId, RequestId), pattern: Pattern, asked: u64) {
        let (member, ticket) = by;
        self.watchers.insert(id, Watcher { member, ticket, pattern, asked });
    }

    pub(super) fn drop_watcher(&mut self, id: WaitId) -> Option<()> {
        self.watchers.remove(&id).map(drop)
    }

    /// Returns the watchers that the current event has something for, with what has happened.
    pub(super) fn notify(&mut self, sees: impl Fn(MemberId, Owned) -> bool) -> Vec<(MemberId, RequestId, Happened)> {
        let notified = std::mem::replace(&mut self.notified, self.last);
        if notified == self.last {
            return Vec::new();
        }
        // One event of the registry can overflow the log: the death of a member with very many names.
        let begin = self.begin();
        let gap = (notified < begin).then(|| Gap::Behind { events: begin - notified });
        let happened = |watcher: &Watcher| {
            // This watcher has been notified of everything before.
            let (events, next) = self.page(notified, &watcher.pattern, |owned| sees(watcher.member, owned));
            // If the log no longer reaches back to the watcher's point, the watcher gets a later point even without
            // events.
            let is_notified = gap.is_some() || !events.is_empty() || watcher.asked < begin;
            let happened = Happened { gap, events, next: self.point(next) };
            is_notified.then_some((watcher.member, watcher.ticket, happened))
        };
        self.watchers.values().filter_map(happened).collect()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn watchers(&self) -> &BTreeMap<WaitId, Watcher> {
        &self.watchers
    }

    fn point(&self, sequence: u64) -> Point {
        Point { instance: self.instance, sequence }
    }

    /// Returns the number before the first kept event.
    fn begin(&self) -> u64 {
        self.last - self.kept.len() as u64
    }

    /// Returns as many matching events after a point, of names that the watcher sees, as one answer can hold, and the
    /// point after the last compared event.
    fn page(&self, after: u64, pattern: &Pattern, sees: impl Fn(Owned) -> bool) -> (Vec<NameEvent>, u64) {
        let from = usize::try_from(after.saturating_sub(self.begin())).unwrap_or(usize::MAX);
        let kept = self.kept.range(from.min(self.kept.len())..);
        let seen = kept.filter(|event| sees(Owned { uid: event.uid, shared: event.shared }));
        let matching = seen.filter(|event| pattern.matches(event.name.as_str()));
        let (events, more) = page(matching.map(Happening::event), |event| event.name.len());
        let next = events.last().filter(|_| more).map_or(self.last, |event| event.sequence);
        (events, next)
    }
}
