//! Events of names, for watchers.
//!
//! All events are numbered and kept in one log that is bounded in bytes, so a watcher costs no more than its waiting
//! request, however slow it is. A watcher asks for the events since its point, and waits if there are none; a renewed
//! connection continues where it was. A waiting watcher misses no event, even if other names fill the log: it gets a
//! later point to continue from. A watcher that asks late learns how many events it has missed.
//!
//! `Reclaimed` is reported once the closing thread has closed the descriptors, because only then is the memory free.
//! Its bytes are those that the broker held.

use std::collections::VecDeque;

use partywall_wire::{Happened, NameEvent, Pattern, Point};
use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    effect::{Decision, Effects},
    pages::page,
    people::{Owned, Waiting},
    types::{Change, Gap, MemberId, Millis, Name, Named, Refusal, RequestId},
};

/// The most recent events.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Log {
    kept: VecDeque<Happening>,
    bytes: u64,
    /// The number of the last event. Events count from 1 without gaps.
    pub(super) last: u64,
    /// The event up to which all watchers have been notified.
    notified: u64,
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
    #[serde(with = "super::coding::pattern")]
    pattern: Pattern,
    /// The point that it sent, and from which it would ask again.
    asked: u64,
}

impl Log {
    /// Returns the number before the first kept event.
    fn begin(&self) -> u64 {
        self.last - self.kept.len() as u64
    }

    fn put(&mut self, happening: Happening, bound: u64) {
        self.bytes += happening.cost();
        self.kept.push_back(happening);
        while self.bytes > bound
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.cost();
        }
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

impl Registry {
    /// Logs an event of a name. Watchers are notified when the current event has been applied.
    pub(super) fn log(&mut self, named: Named, name: &Name, owned: Owned, change: Change) {
        self.log.last += 1;
        let Owned { uid, shared } = owned;
        let happening =
            Happening { sequence: self.log.last, at: self.now, named, name: name.clone(), change, uid, shared };
        self.log.put(happening, self.people.bounds().log);
    }

    /// Answers with the events since a point. If there are none, waits for the next ones.
    pub(super) fn watch(
        &mut self,
        member: MemberId,
        ticket: RequestId,
        pattern: &str,
        after: Option<Point>,
    ) -> Decision {
        let pattern = Pattern::new(pattern).map_err(|why| {
            let pattern = pattern.chars().take(256).collect();
            Refusal::BadPattern { pattern, why }
        })?;
        let begin = self.log.begin();
        let (after, gap) = match after {
            None => {
                let now = Happened { gap: None, events: Vec::new(), next: self.point(self.log.last) };
                return Ok(Answer::Happened(now).into());
            }
            Some(Point { instance, sequence: after }) if instance == self.instance && after <= self.log.last => {
                (after.max(begin), (after < begin).then(|| Gap::Behind { events: begin - after }))
            }
            Some(_) => (begin, Some(Gap::OtherBroker)),
        };
        let (events, next) = self.log.page(after, &pattern, |owned| self.people.sees(member, owned));
        if gap.is_some() || !events.is_empty() {
            return Ok(Answer::Happened(Happened { gap, events, next: self.point(next) }).into());
        }
        let id = self.people.enlist(member, ticket, Waiting::Watching)?;
        self.watchers.insert(id, Watcher { member, ticket, pattern, asked: after });
        Ok(Answer::Pending.into())
    }

    fn point(&self, sequence: u64) -> Point {
        Point { instance: self.instance, sequence }
    }

    /// Notifies watchers of what the current event has logged.
    pub(super) fn notify_watchers(&mut self, out: &mut Effects) {
        let notified = std::mem::replace(&mut self.log.notified, self.log.last);
        let last = self.log.last;
        if notified == last {
            return;
        }
        // One event of the registry can overflow the log: the death of a member with very many names.
        let begin = self.log.begin();
        let gap = (notified < begin).then(|| Gap::Behind { events: begin - notified });
        let mut happened = Vec::new();
        for watcher in self.watchers.values() {
            // This watcher has been notified of everything before.
            let sees = |owned| self.people.sees(watcher.member, owned);
            let (events, next) = self.log.page(notified, &watcher.pattern, sees);
            // If the log no longer reaches back to the watcher's point, the watcher gets a later point even without
            // events.
            if gap.is_some() || !events.is_empty() || watcher.asked < begin {
                happened.push((watcher.member, watcher.ticket, Happened { gap, events, next: self.point(next) }));
            }
        }
        for (member, ticket, happened) in happened {
            self.conclude(member, ticket, Ok(Answer::Happened(happened).into()), out);
        }
    }
}
