//! Users: what belongs to whom, who may open it, and what each of them may use.
//!
//! A name belongs to the user whose process created it, and with it all names under it: `a/b` under `a`. The user's
//! processes alone replace, remove and abandon it. Processes of other users may open what was created shared. Listings
//! show a user its own names and those that are shared. The broker's own user sees all, and may evict members of others
//! and free what dead ones have left; it can end the broker anyway.
//!
//! What a version or an object takes is charged to the user to which it belongs, until it is closed.
//!
//! All of this is decided here. The server only says which user a connection has.

use std::ops::Bound::{Included, Unbounded};

use serde::{Deserialize, Serialize};

use super::{
    Answer, Registry,
    effect::{Audited, Effect, Outcome},
    objects::LeasedObject,
    segments::limit,
    state::{Entry, Totals, Version},
    types::{LeaseId, Limit, MemberId, Name, OtherUsers, Place, Quota, Refusal},
};

/// What one user has.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct User {
    pub(super) totals: Totals,
    pub(super) timelines: u64,
    pub(super) semaphores: u64,
    /// Its claims, each of which may become a name.
    pub(super) claims: u64,
    /// Leases of its members, those in quarantine among them.
    pub(super) leases: u64,
    /// Waiting requests of its members.
    pub(super) waits: u64,
    /// True if its members run on the simulated driver, or the last one did if it has none now.
    pub(super) simulated: bool,
}

impl User {
    /// Returns the names that count for its quota.
    pub(super) fn names(&self) -> u64 {
        self.totals.names + self.timelines + self.semaphores + self.claims
    }
}

/// The user to which something belongs, and whether other users may open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owned {
    pub(super) uid: u32,
    pub(super) shared: bool,
}

impl Version {
    pub(super) fn owned(&self) -> Owned {
        Owned { uid: self.uid, shared: self.memory.facts.shared }
    }
}

impl Entry {
    /// Returns the user to which the name belongs, if it has a version that can be opened.
    fn owner(&self) -> Option<u32> {
        self.latest().map(|(_, version)| version.uid)
    }
}

impl Registry {
    /// Returns a member's user.
    pub(super) fn uid_of(&self, member: MemberId) -> u32 {
        self.members.get(&member).map_or(NOBODY, |record| record.identity.uid)
    }

    /// Returns whether a member may do to members of other users what it may do to those of its own.
    pub(super) fn administers(&self, member: MemberId) -> bool {
        self.uid_of(member) == self.bounds.user
    }

    /// Returns whether a member belongs to a user, or may act for it.
    pub(super) fn acts_for(&self, member: MemberId, uid: u32) -> bool {
        self.uid_of(member) == uid || self.administers(member)
    }

    /// Returns whether listings show something to a member.
    pub(super) fn sees(&self, member: MemberId, owned: Owned) -> bool {
        owned.shared || self.acts_for(member, owned.uid)
    }

    /// Refuses a member of another user than `owner`.
    pub(super) fn check_owner(
        &self,
        member: MemberId,
        owner: u32,
        what: impl FnOnce() -> OtherUsers,
    ) -> Result<(), Refusal> {
        let uid = self.uid_of(member);
        if uid == owner { Ok(()) } else { Err(Refusal::OtherUser { what: what(), owner, uid }) }
    }

    /// Refuses to open something that belongs to another user and is not shared.
    pub(super) fn check_access(&self, member: MemberId, name: &Name, owned: Owned) -> Result<(), Refusal> {
        if owned.shared {
            return Ok(());
        }
        self.check_owner(member, owned.uid, || OtherUsers::Open { name: name.to_string() })
    }

    /// Refuses to show something that belongs to another user and is not shared.
    pub(super) fn check_sight(&self, member: MemberId, name: &Name, owned: Owned) -> Result<(), Refusal> {
        if self.sees(member, owned) {
            return Ok(());
        }
        self.check_owner(member, owned.uid, || OtherUsers::Inspect { name: name.to_string() })
    }

    /// Refuses to create a name under one of another user.
    pub(super) fn check_new_name(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        self.check_names_above(member, name, |_| false)
    }

    /// Refuses to create a timeline under a name of another user. A member that has a shared topic or queue open may:
    /// its streams signal there.
    pub(super) fn check_new_timeline(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        let is_used = |version: &Version| version.memory.control.is_some() && version.holders.contains_key(&member);
        // The name may be another user's by now, and the removed topic still in use.
        self.check_names_above(member, name, |entry| entry.versions.values().any(|version| is_used(version)))
    }

    fn check_names_above(
        &self,
        member: MemberId,
        name: &Name,
        is_allowed: impl Fn(&Entry) -> bool,
    ) -> Result<(), Refusal> {
        for (end, _) in name.as_str().match_indices('/') {
            let above = &name.as_str()[..end];
            let entry = self.entries.get(above).filter(|entry| !is_allowed(entry));
            if let Some(owner) = entry.and_then(Entry::owner) {
                self.check_owner(member, owner, || OtherUsers::Create { name: above.to_owned() })?;
            }
        }
        Ok(())
    }

    /// Refuses to create a pool, topic or queue above timelines of another user, which members would take for its own.
    pub(super) fn check_names_below(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        let uid = self.uid_of(member);
        let below = format!("{name}/");
        let timelines = self.timelines.range::<str, _>((Included(below.as_str()), Unbounded));
        let foreign = timelines
            .take_while(|(other, _)| other.as_str().starts_with(&below))
            .find(|(_, timeline)| timeline.owned.uid != uid);
        match foreign {
            Some((other, timeline)) => {
                let what = OtherUsers::Create { name: other.to_string() };
                Err(Refusal::OtherUser { what, owner: timeline.owned.uid, uid })
            }
            None => Ok(()),
        }
    }

    /// Refuses to replace a name of another user.
    pub(super) fn check_replaces(&self, member: MemberId, name: &Name) -> Result<(), Refusal> {
        match self.entries.get(name).and_then(Entry::owner) {
            Some(owner) => self.check_owner(member, owner, || OtherUsers::Create { name: name.to_string() }),
            None => self.check_new_name(member, name),
        }
    }

    /// Returns the limits of a user.
    pub(super) fn quota_of(&self, uid: u32) -> Quota {
        if uid == self.bounds.user { self.bounds.own } else { self.bounds.guests }
    }

    /// Refuses what would exceed the user's share of a limit.
    pub(super) fn check_quota(&self, uid: u32, limit: Limit, held: u64, more: u64) -> Result<(), Refusal> {
        let needed = held.saturating_add(more);
        let quota = self.quota_of(uid);
        let allowed = match limit {
            Limit::Names => quota.names,
            Limit::Fds => quota.fds,
            Limit::Bytes => quota.bytes,
            Limit::Pinned(_) => quota.pinned,
            Limit::Leases => quota.leases,
            Limit::Timelines => quota.timelines,
            Limit::Semaphores => quota.semaphores,
            Limit::Waits => quota.waits,
            _ => quota.members,
        };
        if needed > allowed {
            Err(Refusal::Quota { uid, limit, allowed, held, needed, holders: Vec::new() })
        } else {
            Ok(())
        }
    }

    /// Refuses another name of a user, of any kind.
    pub(super) fn check_names(&self, uid: u32) -> Result<(), Refusal> {
        self.check_one_more(uid, Limit::Names, User::names)
    }

    /// Refuses one more of what `held` counts.
    pub(super) fn check_one_more(&self, uid: u32, limit: Limit, held: impl Fn(&User) -> u64) -> Result<(), Refusal> {
        self.check_quota(uid, limit, self.users.get(&uid).map_or(0, held), 1)
    }

    /// Refuses further descriptors and bytes of a user.
    pub(super) fn check_memory(&self, uid: u32, fds: u64, bytes: u64) -> Result<(), Refusal> {
        let (held_fds, held_bytes) = self.users.get(&uid).map_or((0, 0), |user| (user.totals.fds, user.totals.bytes()));
        self.check_quota(uid, Limit::Bytes, held_bytes, bytes)?;
        self.check_quota(uid, Limit::Fds, held_fds, fds)
    }

    /// Refuses further bytes of a user at a place, and `others` beside them that are elsewhere.
    pub(super) fn check_bytes(&self, uid: u32, place: Place, bytes: u64, others: u64) -> Result<(), Refusal> {
        let all = bytes.saturating_add(others);
        limit(Limit::Bytes, self.bounds.bytes, self.totals.bytes().saturating_add(all))?;
        self.check_node(uid, place, bytes)?;
        self.check_memory(uid, 0, all)
    }

    /// Refuses further bytes of a user at a place, if it is the pinned memory of a NUMA node.
    pub(super) fn check_node(&self, uid: u32, place: Place, bytes: u64) -> Result<(), Refusal> {
        let Place::Pinned(node) = place else { return Ok(()) };
        let there = |totals: &Totals| totals.places.get(&place).copied().unwrap_or(0);
        limit(Limit::Pinned(Some(node)), self.bounds.pinned, there(&self.totals).saturating_add(bytes))?;
        let of_user = self.users.get(&uid).map_or(0, |user| there(&user.totals));
        self.check_quota(uid, Limit::Pinned(Some(node)), of_user, bytes)
    }

    /// Changes the sums, those of the user and those of all.
    pub(super) fn charge(&mut self, uid: u32, change: impl Fn(&mut Totals)) {
        change(&mut self.totals);
        change(&mut self.users.entry(uid).or_default().totals);
    }

    /// Returns the record of a user.
    pub(super) fn user_mut(&mut self, uid: u32) -> &mut User {
        self.users.entry(uid).or_default()
    }

    /// Returns the number of a user's members, those in quarantine among them.
    pub(super) fn members_of(&self, uid: u32) -> u64 {
        self.sharing_members().filter(|(_, member)| member.identity.uid == uid).count() as u64
    }

    /// Returns whether a user's members run on the simulated driver.
    pub(super) fn is_simulated(&self, uid: u32) -> bool {
        self.users.get(&uid).is_some_and(|user| user.simulated)
    }

    /// Returns whether a member runs on the simulated driver.
    pub(crate) fn runs_simulated(&self, member: MemberId) -> bool {
        self.is_simulated(self.uid_of(member))
    }

    /// Returns whether a user has memory that a driver has allocated.
    pub(super) fn has_driver_memory(&self, uid: u32) -> bool {
        let versions = self.entries.values().flat_map(|entry| entry.versions.values());
        versions.filter(|version| version.uid == uid).any(|version| version.memory.facts.place.needs_driver())
    }

    /// Returns the audit lines for the outcome of a request: what a member got of another user, or was refused because
    /// of its user.
    pub(super) fn audited(&self, member: MemberId, outcome: &Outcome) -> Vec<Effect> {
        let uid = self.uid_of(member);
        let line = |what: OtherUsers, owner: u32, granted: bool| {
            let pid = self.pid_of(member);
            Effect::Audit(Audited::OtherUser { uid, pid, what, owner, granted })
        };
        let opened = |name: &Name, owned: Owned| {
            (owned.uid != uid).then(|| line(OtherUsers::Open { name: name.to_string() }, owned.uid, true))
        };
        match outcome {
            Err(Refusal::OtherUser { what, owner, .. }) => vec![line(what.clone(), *owner, false)],
            Err(Refusal::Quota { limit, allowed, needed, .. }) => {
                let pid = self.pid_of(member);
                vec![Effect::Audit(Audited::Quota { uid, pid, limit: *limit, allowed: *allowed, needed: *needed })]
            }
            Ok(Answer::Opened(found)) => {
                let version = self.version(&found.name, found.version);
                version.and_then(|version| opened(&found.name, version.owned())).into_iter().collect()
            }
            Ok(Answer::Timeline(found)) => self.audited_object(found.lease, opened),
            Ok(Answer::Semaphore { lease, .. }) => self.audited_object(*lease, opened),
            Ok(Answer::Evicted(evicted)) => {
                let others = evicted.iter().map(|departed| (departed.pid, self.uid_of(MemberId(departed.member))));
                let others = others.filter(|(_, owner)| *owner != uid);
                others.map(|(pid, owner)| line(OtherUsers::Evict { pid }, owner, true)).collect()
            }
            _ => Vec::new(),
        }
    }

    fn audited_object(&self, lease: LeaseId, opened: impl Fn(&Name, Owned) -> Option<Effect>) -> Vec<Effect> {
        let Some(held) = self.object_leases.get(&lease) else { return Vec::new() };
        let found = match &held.object {
            LeasedObject::Timeline { name, .. } => {
                self.timelines.get(name).and_then(|timeline| opened(name, timeline.owned))
            }
            LeasedObject::Semaphore { name } => {
                self.semaphores.get(name).and_then(|semaphore| opened(name, semaphore.owned))
            }
        };
        found.into_iter().collect()
    }
}

/// The user of no member: no process has this number.
const NOBODY: u32 = u32::MAX;
