//! Members in trouble: evicted, with a broken CUDA context, or dead while their work may continue.

use partywall_wire::{Evicted, Freed, Kill};

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects},
    people::{Ender, Eviction, Life},
    reclaim::Departure,
    types::{MemberId, OtherUsers, Refusal, TimelineEnding, Whom},
};

impl Registry {
    /// Records that the member's CUDA context is broken: it cannot use a GPU any more, nor know which of its work was
    /// done.
    pub(super) fn context_lost(&mut self, member: MemberId, out: &mut Effects) -> Answer {
        self.people.lose_context(member);
        self.end_timelines_of(member, TimelineEnding::OwnerFaulted, out);
        self.detach(member, TimelineEnding::OwnerFaulted, |_| true, out);
        Answer::Done
    }

    /// Evicts members: takes from them everything that others may wait for, and keeps their leases, because only the
    /// end of a process ends its use of memory. All of it is done before the reply, so that whoever evicted a member
    /// never sees a message of it that was published later.
    pub(super) fn evict(&mut self, member: MemberId, whom: Whom, kill: bool, before: &mut Effects) -> Decision {
        let meant = self.people.meant(whom);
        if meant.is_empty() {
            let near = if let Whom::Pid(pid) = whom { self.people.near_pids(pid, |_| true) } else { Vec::new() };
            return Err(Refusal::NoSuchMember { whom, near });
        }
        // Processes of two users may report the same pid, each in its PID namespace.
        let ours: Vec<_> =
            meant.iter().copied().filter(|id| self.people.acts_for(member, self.people.uid_of(*id))).collect();
        let Some(first) = ours.first().copied() else {
            let pid = self.people.pid_of(meant[0]);
            return Err(self.people.other_user(member, meant[0], OtherUsers::Evict { pid }));
        };
        let meant = ours;
        if meant.contains(&member) {
            return Err(Refusal::NotYourself);
        }
        let is_there = |id: &MemberId| self.people.member(*id).is_some_and(|other| other.life != Life::Unproven);
        let here: Vec<_> = meant.iter().copied().filter(is_there).collect();
        if here.is_empty() {
            return Err(Refusal::IsUnproven { pid: self.people.pid_of(first) });
        }
        let by = self.people.ender(member);
        let mut evicted = Vec::new();
        for id in here {
            self.evict_one(id, &by, before);
            if evicted.len() < ROWS {
                evicted.extend(self.people.departed(id));
            }
        }
        if kill {
            before.extend(evicted.iter().map(|departed| Effect::Kill(MemberId(departed.member))));
        }
        // The server replaces what was asked for by the result.
        let kill = if kill { Kill::Sent } else { Kill::NotAsked };
        let evicted = evicted.into_iter().map(|departed| {
            let Freed { member, pid, command, leases, bytes } = departed;
            Evicted { member, pid, command, leases, bytes, kill }
        });
        Ok(Answer::Evicted(evicted.collect()).into())
    }

    /// Evicts a member, or replaces the reason of its eviction.
    pub(super) fn evict_one(&mut self, member: MemberId, by: &Ender, out: &mut Effects) {
        let eviction = Eviction { by: by.pid, at: self.now };
        if self.people.evict(member, eviction) {
            self.notify(member, Departure::Evicted { by: by.clone() }, out);
        }
    }

    /// Frees the leases of dead members, trusting the caller that their work is over. Frees as many members as fit into
    /// one answer.
    ///
    /// Without a pid, only those that the caller may free are meant.
    pub(super) fn free_unproven(&mut self, member: MemberId, pid: Option<u32>, out: &mut Effects) -> Decision {
        let is_unproven = |id: &MemberId| self.people.member(*id).is_some_and(|record| record.life == Life::Unproven);
        let meant = match pid {
            Some(pid) => self.people.meant(Whom::Pid(pid)),
            None => self.people.members().keys().copied().collect(),
        };
        let is_ours = |id: &MemberId| self.people.acts_for(member, self.people.uid_of(*id));
        let ours: Vec<_> = meant.iter().copied().filter(is_ours).collect();
        if let (Some(pid), true, Some(other)) = (pid, ours.is_empty(), meant.first()) {
            return Err(self.people.other_user(member, *other, OtherUsers::Free { pid }));
        }
        let meant = ours;
        let mut freed: Vec<_> = meant.iter().copied().filter(is_unproven).collect();
        if let (Some(pid), true) = (pid, freed.is_empty()) {
            return Err(match meant.first().and_then(|id| self.people.member(*id)) {
                Some(record) => Refusal::NotUnproven { pid, state: record.state() },
                None => Refusal::NoSuchMember { whom: Whom::Pid(pid), near: self.people.near_pids(pid, is_unproven) },
            });
        }
        let more = freed.len() > ROWS;
        freed.truncate(ROWS);
        let rows = freed.iter().filter_map(|id| self.people.departed(*id)).collect();
        for id in freed {
            self.give_back(id, Departure::Died, out);
        }
        Ok(Answer::Freed { members: rows, more }.into())
    }

    /// Ends the quarantine of a member after the time that the operator set.
    pub(super) fn expire(&mut self, member: MemberId, out: &mut Effects) {
        if self.people.member(member).is_some_and(|record| record.life == Life::Unproven) {
            self.give_back(member, Departure::Died, out);
        }
    }
}

/// Members in one answer. Their command lines have up to 256 bytes.
const ROWS: usize = 100;
