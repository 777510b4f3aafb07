//! Members in trouble: evicted, with a broken CUDA context, or dead while their work may continue.

use partywall_wire::{Evicted, Freed, Kill};

use super::{
    Registry,
    effect::{Answer, Decision, Effect, Effects},
    people::{Ender, Eviction},
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
    /// end of a process ends its use of memory. All of it is done before the reply, so that the caller sees no
    /// message that an evicted member has published later.
    pub(super) fn evict(&mut self, member: MemberId, whom: Whom, kill: bool, before: &mut Effects) -> Decision {
        let meant = self.people.meant(whom);
        if meant.is_empty() {
            let near = if let Whom::Pid(pid) = whom { self.people.near_pids(pid, |_| true) } else { Vec::new() };
            return Err(Refusal::NoSuchMember { whom, near });
        }
        let pid = self.people.pid_of(meant[0]);
        let ours = self.people.own(member, meant, OtherUsers::Evict { pid })?;
        if ours.contains(&member) {
            return Err(Refusal::NotYourself);
        }
        let here: Vec<_> = ours.into_iter().filter(|id| self.people.has_process(*id)).collect();
        if here.is_empty() {
            return Err(Refusal::IsUnproven { pid });
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
        let is_unproven = |id: &MemberId| self.people.is_unproven(*id);
        let ours = match pid {
            Some(pid) => self.people.own(member, self.people.meant(Whom::Pid(pid)), OtherUsers::Free { pid })?,
            None => {
                let acts_for = |id: &MemberId| self.people.acts_for(member, self.people.uid_of(*id));
                self.people.members().keys().copied().filter(acts_for).collect()
            }
        };
        let mut freed: Vec<_> = ours.iter().copied().filter(is_unproven).collect();
        if let (Some(pid), true) = (pid, freed.is_empty()) {
            return Err(match ours.first().and_then(|id| self.people.member(*id)) {
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
        if self.people.is_unproven(member) {
            self.give_back(member, Departure::Died, out);
        }
    }
}

/// Members in one answer. Their command lines have up to 256 bytes.
const ROWS: usize = 100;
