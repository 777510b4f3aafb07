//! What happens to names, for watchers.
//!
//! Events are kept in one log, which is bounded by bytes, so that a watcher costs what it waits with and nothing else:
//! one that asks late learns how many events it has missed. Watchers ask, get what has happened since their point, and
//! wait if that is nothing. While they wait they miss nothing, however fast the log runs on.

use std::collections::VecDeque;

use partywall_wire::Pattern;

use super::{
    Decision, Registry,
    effect::{Answer, Effects, Happened, Happening},
    event::{After, Watch},
    report::page,
    state::Waiting,
    types::{Change, Gap, MemberId, Name, Named, RequestId},
};

/// The last of what has happened.
#[derive(Debug, Default)]
pub(super) struct Log {
    kept: VecDeque<Happening>,
    bytes: u64,
    /// The number of the last event. They count from 1 without a hole.
    pub(super) last: u64,
    /// The event up to which all watchers have been notified.
    notified: u64,
}

/// A request that waits for something to happen.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) member: MemberId,
    pub(super) ticket: RequestId,
    pattern: Pattern,
    /// The point of which it asked. It knows no later one, should it have to ask again.
    asked: u64,
}

impl Log {
    /// The number before the first event that is kept.
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

    /// As many events behind a point as one answer takes, and the point behind what was looked at.
    fn page(&self, after: u64, pattern: &Pattern) -> (Vec<Happening>, u64) {
        let from = usize::try_from(after.saturating_sub(self.begin())).unwrap_or(usize::MAX);
        let kept = self.kept.range(from.min(self.kept.len())..);
        let matching = kept.filter(|event| pattern.matches(event.name.as_str()));
        let (events, more) = page(matching.cloned(), |event| event.name.as_str().len());
        let next = events.last().filter(|_| more).map_or(self.last, |event| event.sequence);
        (events, next)
    }
}

impl Registry {
    /// Logs what has happened. Watchers are notified at the end of the event that is being applied.
    pub(super) fn log(&mut self, named: Named, name: &Name, change: Change) {
        self.log.last += 1;
        let happening = Happening { sequence: self.log.last, at: self.now, named, name: name.clone(), change };
        self.log.put(happening, self.bounds.log);
    }

    /// What has happened since a point, or else what will happen next.
    pub(super) fn watch(&mut self, member: MemberId, ticket: RequestId, Watch { pattern, after }: Watch) -> Decision {
        let begin = self.log.begin();
        let (after, gap) = match after {
            After::Now => {
                let now = Happened { gap: None, events: Vec::new(), next: self.log.last };
                return Ok(Answer::Happened(now).into());
            }
            After::Event(after) if after >= begin && after <= self.log.last => (after, None),
            After::Event(after) if after < begin => (begin, Some(Gap::Behind { events: begin - after })),
            After::Event(_) | After::Elsewhere => (begin, Some(Gap::OtherBroker)),
        };
        let (events, next) = self.log.page(after, &pattern);
        if gap.is_some() || !events.is_empty() {
            return Ok(Answer::Happened(Happened { gap, events, next }).into());
        }
        let id = self.enlist(member, ticket, Waiting::Watching)?;
        self.watchers.insert(id, Watcher { member, ticket, pattern, asked: after });
        Ok(Answer::Pending.into())
    }

    /// Notifies watchers of what has happened in this event.
    pub(super) fn notify_watchers(&mut self, out: &mut Effects) {
        let notified = std::mem::replace(&mut self.log.notified, self.log.last);
        let last = self.log.last;
        if notified == last {
            return;
        }
        // One event may be more than the log holds: a death with very many names.
        let begin = self.log.begin();
        let gap = (notified < begin).then(|| Gap::Behind { events: begin - notified });
        let mut happened = Vec::new();
        for watcher in self.watchers.values() {
            // This watcher has been notified of everything before.
            let (events, next) = self.log.page(notified, &watcher.pattern);
            // When the log leaves the point behind that it would ask of if it had to ask again, it gets a later one.
            if gap.is_some() || !events.is_empty() || watcher.asked < begin {
                happened.push((watcher.member, watcher.ticket, Happened { gap, events, next }));
            }
        }
        for (member, ticket, happened) in happened {
            self.conclude(member, ticket, Ok(Answer::Happened(happened).into()), out);
        }
    }
}
