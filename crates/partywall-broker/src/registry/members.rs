//! Members in trouble: evicted, with a broken CUDA context, or dead while their work may continue.

use std::sync::Arc;

use partywall_wire::{Evicted, Freed, Kill};

use super::{
    Answer, Call, Decision, Registry,
    effect::{Effect, Effects},
    near::near_numbers,
    reclaim::Departure,
    report::count,
    state::{Ender, Eviction, Life, Member},
    types::{MemberId, OtherUsers, Refusal, TimelineEnding, Whom},
};

impl Registry {
    /// Records that the member has opened a GPU.
    pub(super) fn uses_gpu(&mut self, member: MemberId, mps: Option<String>) -> Answer {
        if let Some(record) = self.members.get_mut(&member)
            && mps.is_some()
        {
            record.mps = mps.map(Arc::from);
        }
        Answer::Done
    }

    /// Refuses a member that cannot own a name of this user: it is gone, leaves, or belongs to another user.
    pub(super) fn check_may_own(&self, owner: MemberId, uid: u32) -> Result<(), Refusal> {
        let may = |record: &Member| {
            let lives = matches!(record.life, Life::Alive | Life::Suspect) && record.eviction.is_none();
            lives && record.identity.uid == uid && !record.identity.operator
        };
        if self.members.get(&owner).is_some_and(may) {
            return Ok(());
        }
        Err(Refusal::NoSuchMember { whom: Whom::Member(owner.0), near: Vec::new() })
    }

    /// Records that the member's CUDA context is broken: it cannot use a GPU any more, nor know which of its work was
    /// done.
    pub(super) fn context_lost(&mut self, member: MemberId, out: &mut Effects) -> Answer {
        if let Some(record) = self.members.get_mut(&member) {
            record.lost_context = true;
        }
        self.end_timelines_of(member, TimelineEnding::OwnerFaulted, out);
        self.detach_objects(member, TimelineEnding::OwnerFaulted, out);
        Answer::Done
    }

    /// Evicts members: takes from them everything that others may wait for, and keeps their leases, because only the
    /// end of a process ends its use of memory. All of it is done before the reply, so that whoever evicted a member
    /// never sees a message of it that was published later.
    pub(super) fn evict(&mut self, member: MemberId, whom: Whom, kill: bool, before: &mut Effects) -> Decision {
        let meant = self.meant(whom);
        if meant.is_empty() {
            let near = if let Whom::Pid(pid) = whom { self.near_pids(pid, |_| true) } else { Vec::new() };
            return Err(Refusal::NoSuchMember { whom, near });
        }
        // Processes of two users may report the same pid, each in its PID namespace.
        let ours: Vec<_> = meant.iter().copied().filter(|id| self.acts_for(member, self.uid_of(*id))).collect();
        let Some(first) = ours.first().copied() else {
            let pid = self.pid_of(meant[0]);
            return Err(self.other_user(member, meant[0], OtherUsers::Evict { pid }));
        };
        let meant = ours;
        if meant.contains(&member) {
            return Err(Refusal::NotYourself);
        }
        let is_there = |id: &MemberId| self.members.get(id).is_some_and(|other| other.life != Life::Unproven);
        let here: Vec<_> = meant.iter().copied().filter(is_there).collect();
        if here.is_empty() {
            return Err(Refusal::IsUnproven { pid: self.pid_of(first) });
        }
        let by = self.ender(member);
        let mut evicted = Vec::new();
        for id in here {
            self.evict_one(id, &by, before);
            if evicted.len() < ROWS {
                evicted.extend(self.departed(id));
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
        let Some(record) = self.members.get_mut(&member) else { return };
        if record.eviction.replace(eviction).is_none() {
            self.notify(member, Departure::Evicted { by: by.clone() }, out);
        }
    }

    /// Frees the leases of dead members, trusting the caller that their work is over. Frees as many members as fit into
    /// one answer.
    ///
    /// Without a pid, only those that the caller may free are meant.
    pub(super) fn free_unproven(&mut self, member: MemberId, pid: Option<u32>, out: &mut Effects) -> Decision {
        let is_unproven = |id: &MemberId| self.members.get(id).is_some_and(|record| record.life == Life::Unproven);
        let meant = match pid {
            Some(pid) => self.meant(Whom::Pid(pid)),
            None => self.members.keys().copied().collect(),
        };
        let is_ours = |id: &MemberId| self.acts_for(member, self.uid_of(*id));
        let ours: Vec<_> = meant.iter().copied().filter(is_ours).collect();
        if let (Some(pid), true, Some(other)) = (pid, ours.is_empty(), meant.first()) {
            return Err(self.other_user(member, *other, OtherUsers::Free { pid }));
        }
        let meant = ours;
        let mut freed: Vec<_> = meant.iter().copied().filter(is_unproven).collect();
        if let (Some(pid), true) = (pid, freed.is_empty()) {
            return Err(match meant.first().and_then(|id| self.members.get(id)) {
                Some(record) => Refusal::NotUnproven { pid, state: record.state() },
                None => Refusal::NoSuchMember { whom: Whom::Pid(pid), near: self.near_pids(pid, is_unproven) },
            });
        }
        let more = freed.len() > ROWS;
        freed.truncate(ROWS);
        let rows = freed.iter().filter_map(|id| self.departed(*id)).collect();
        for id in freed {
            self.give_back(id, Departure::Died, out);
        }
        Ok(Answer::Freed { members: rows, more }.into())
    }

    /// Ends the quarantine of a member after the time that the operator set.
    pub(super) fn expire(&mut self, member: MemberId, out: &mut Effects) {
        if self.members.get(&member).is_some_and(|record| record.life == Life::Unproven) {
            self.give_back(member, Departure::Died, out);
        }
    }

    /// Refuses the requests of an evicted member, except those that make other members safer.
    pub(super) fn check_evicted(&self, member: MemberId, call: &Call) -> Result<(), Refusal> {
        match self.members.get(&member).and_then(|record| record.eviction) {
            Some(Eviction { by, at })
                if !matches!(call, Call::Bye | Call::UsesGpu { .. } | Call::ContextLost { .. }) =>
            {
                Err(Refusal::Evicted { by, at })
            }
            _ => Ok(()),
        }
    }

    fn other_user(&self, member: MemberId, other: MemberId, what: OtherUsers) -> Refusal {
        Refusal::OtherUser { what, owner: self.uid_of(other), uid: self.uid_of(member) }
    }

    fn meant(&self, whom: Whom) -> Vec<MemberId> {
        match whom {
            Whom::Member(id) => {
                let id = MemberId(id);
                let is_meant = self.members.contains_key(&id) && !self.is_operator(id);
                is_meant.then_some(id).into_iter().collect()
            }
            Whom::Pid(pid) => {
                let of_pid = self.sharing_members().filter(|(_, record)| record.identity.pid == pid);
                of_pid.map(|(id, _)| *id).collect()
            }
        }
    }

    fn near_pids(&self, wanted: u32, among: impl Fn(&MemberId) -> bool) -> Vec<u32> {
        let others = self.sharing_members().filter(|(id, _)| among(id)).map(|(_, record)| record.identity.pid);
        near_numbers(others, wanted)
    }

    fn departed(&self, id: MemberId) -> Option<Freed> {
        let record = self.members.get(&id)?;
        Some(Freed {
            member: id.0,
            pid: record.identity.pid,
            command: record.identity.command.to_string(),
            leases: count(record.all_leases()),
            bytes: record.bytes,
        })
    }

    /// Returns a member as others learn of it when it ends something.
    pub(super) fn ender(&self, member: MemberId) -> Ender {
        match self.members.get(&member) {
            Some(Member { identity, .. }) => Ender { pid: identity.pid, command: Arc::clone(&identity.command) },
            None => Ender { pid: 0, command: "".into() },
        }
    }

    pub(super) fn pid_of(&self, member: MemberId) -> u32 {
        self.members.get(&member).map_or(0, |record| record.identity.pid)
    }
}

/// Members in one answer. Their command lines have up to 256 bytes.
const ROWS: usize = 100;
