//! Requests that wait for events of names.

use partywall_wire::{Pattern, Point};

use super::{
    Registry,
    effect::{Answer, Decision, Effects},
    people::{Owned, Waiting},
    types::{Change, MemberId, Name, Named, Refusal, RequestId},
};

impl Registry {
    /// Logs an event of a name. Watchers are notified when the current event has been applied.
    pub(super) fn log(&mut self, named: Named, name: &Name, owned: Owned, change: Change) {
        self.log.put(named, name, owned, change, self.now);
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
        match self.log.since(after, &pattern, |owned| self.people.sees(member, owned)) {
            Some(happened) => Ok(Answer::Happened(happened).into()),
            None => {
                let id = self.people.enlist(member, ticket, Waiting::Watching)?;
                self.log.watch(id, (member, ticket), pattern, after.map_or(0, |after| after.sequence));
                Ok(Answer::Pending.into())
            }
        }
    }

    /// Notifies watchers of what the current event has logged.
    pub(super) fn notify_watchers(&mut self, out: &mut Effects) {
        for (member, ticket, happened) in self.log.notify(|member, owned| self.people.sees(member, owned)) {
            self.conclude(member, ticket, Ok(Answer::Happened(happened).into()), out);
        }
    }
}
