//! Watching in the model: all events in one list.

use partywall_wire::{Happened, NameEvent, Pattern};

use super::{
    model::{Model, ModelEffects, WaitFor},
    *,
};
use crate::registry::log::Happening;

impl Model {
    pub(super) fn note(&mut self, named: Named, name: &Name, (uid, shared): (u32, bool), change: Change) {
        let sequence = self.history.len() as u64 + 1;
        self.history.push(Happening { sequence, at: self.now, named, name: name.clone(), change, uid, shared });
    }

    pub(super) fn watch(
        &mut self,
        member: MemberId,
        ticket: RequestId,
        pattern: &str,
        after: Option<Point>,
    ) -> Outcome {
        let begin = self.begin();
        let last = self.history.len() as u64;
        let pattern = Pattern::new(pattern).unwrap();
        let (gap, after) = match after {
            None => return Ok(Answer::Happened(Happened { gap: None, events: Vec::new(), next: now(last) })),
            Some(point) if point.instance != INSTANCE || point.sequence > last => (Some(Gap::OtherBroker), begin),
            Some(Point { sequence: after, .. }) if after < begin => {
                (Some(Gap::Behind { events: begin - after }), begin)
            }
            Some(Point { sequence: after, .. }) => (None, after),
        };
        let events = self.since(member, after, &pattern);
        if gap.is_some() || !events.is_empty() {
            return Ok(Answer::Happened(Happened { gap, events, next: now(last) }));
        }
        self.enqueue(member, ticket, WaitFor::Watch(pattern, after))
    }

    /// Notifies watchers of what this event has logged.
    pub(super) fn notify_watchers(&mut self, effects: &mut ModelEffects) {
        let notified = std::mem::replace(&mut self.notified, self.history.len() as u64);
        let last = self.history.len() as u64;
        let begin = self.begin();
        for waiting in self.waits.clone() {
            let WaitFor::Watch(pattern, asked) = &waiting.waits_for else { continue };
            let gap = (notified < begin).then(|| Gap::Behind { events: begin - notified });
            let events = self.since(waiting.member, notified.max(begin), pattern);
            if notified < last && (gap.is_some() || !events.is_empty() || *asked < begin) {
                self.notify(&waiting, Ok(Answer::Happened(Happened { gap, events, next: now(last) })), effects);
            }
        }
    }

    fn since(&self, member: MemberId, after: u64, pattern: &Pattern) -> Vec<NameEvent> {
        let since = self.history.iter().filter(|event| event.sequence > after);
        let since = since.filter(|event| self.sees(member, event.uid, event.shared));
        since.filter(|event| pattern.matches(event.name.as_str())).map(Happening::event).collect()
    }

    /// Returns the number of forgotten events.
    fn begin(&self) -> u64 {
        let mut bytes = 0;
        let kept = self.history.iter().rev().take_while(|event| {
            bytes += event.cost();
            bytes <= self.bounds.log
        });
        self.history.len() as u64 - kept.count() as u64
    }
}

fn now(sequence: u64) -> Point {
    Point { instance: INSTANCE, sequence }
}
